//! Segments of earlier pools that were not taken in, and why.

use pagefold_pool::Refused;
use std::collections::BTreeMap;

/// Periods in which a client's files that may be sealed later are tried again.
const TRIES: u32 = 10;

/// Segments of earlier pools that a client shows, and that were not taken in.
#[derive(Debug, Default)]
pub(super) struct NotInherited {
    /// Its pages, by reason.
    pub(super) pages: BTreeMap<String, u64>,
    /// Some may be taken in later.
    may_come: bool,
    tries: u32,
}

impl NotInherited {
    /// True while segments may be taken in that could not be yet.
    pub(super) fn waits(&self) -> bool {
        self.may_come && self.tries < TRIES
    }

    /// Notes `pages` that show a segment which was refused by `why`; by no reason if it cannot be opened.
    pub(super) fn note(&mut self, pages: u64, why: Option<Refused>) {
        self.may_come |= matches!(why, None | Some(Refused::NotSealed));
        let why = why.map_or_else(|| "it cannot be opened".to_owned(), |why| why.to_string());
        *self.pages.entry(why).or_default() += pages;
    }

    /// They are looked at anew.
    pub(super) fn begin(&mut self) {
        *self = NotInherited { tries: self.tries, ..NotInherited::default() };
    }

    /// Another period is over: returns true if the client's mappings should be looked at again in the next one.
    pub(super) fn end_period(&mut self) -> bool {
        let again = self.waits();
        self.tries = if self.may_come { self.tries + u32::from(again) } else { 0 };
        again
    }
}
