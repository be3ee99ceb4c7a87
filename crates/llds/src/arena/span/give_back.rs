//! Giving back: the pages of free spans go back to the system, by groups that fill 2 MiB.
//!
//! A few free spans keep their pages for whoever needs some next. Those of
//! extents in a file stay for a moment, because readers of arrays may be late:
//! then they go with what the process takes back next, or when it closes.

use super::{FREE, HOLE, Meta, UNUSED};
use crate::arena::class::SPAN_BYTES;
use crate::arena::{Inner, fault};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Spans that lie in one 2 MiB page and are given back together.
const GROUP: usize = (2 << 20) / SPAN_BYTES;

/// Free spans kept with their pages before any are given back.
const KEEP_SPANS: u64 = 4;

/// How long the pages of a freed extent stay in a file. Who reads an array takes no hazard, so he may come late; a day in
/// tests, so that none of them depends on the hour.
const LATE: Duration = if cfg!(test) { Duration::from_secs(86_400) } else { Duration::from_millis(100) };

impl Inner {
    /// Makes a span that `owner` holds free, and may give pages back when enough free spans are kept.
    pub(super) fn make_free(&self, span: usize, owner: u64, give_back: bool) {
        let entry = self.entry(span);
        entry.meta.store(Meta::free(FREE, owner), Ordering::SeqCst);
        fault::point();
        self.header().kept.fetch_add(1, Ordering::Relaxed);
        if give_back && self.keeps_enough() {
            self.give_back_group(span, owner);
        }
        let state = Meta::of(entry.meta.load(Ordering::SeqCst)).state;
        entry.meta.store(Meta::free(state, 0), Ordering::SeqCst);
        self.hint(0, span);
    }

    /// Whether more free spans have pages than are kept for the next who need some.
    fn keeps_enough(&self) -> bool {
        self.header().kept.load(Ordering::Relaxed) > KEEP_SPANS + (self.fresh() / 64) as u64
    }

    /// Gives the pages of extents back that this process freed long enough before `now`, or ever.
    pub(in crate::arena) fn give_back_late(&self, now: Option<Instant>, owner: u64) {
        let due: Vec<_> = {
            let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
            let is_due = |since: Instant| now.is_none_or(|now| now.duration_since(since) >= LATE);
            let count = late.iter().take_while(|extent| is_due(extent.0)).count();
            late.drain(..count).collect()
        };
        for (_, span, spans) in due {
            for first in (span / GROUP * GROUP..span + spans).step_by(GROUP) {
                if self.keeps_enough() {
                    self.trim_group(first, owner);
                }
            }
        }
    }

    /// Gives the 2 MiB around `span`, held free by `owner`, back to the system if its neighbours are free too.
    fn give_back_group(&self, span: usize, owner: u64) {
        let first = span / GROUP * GROUP;
        let last = (first + GROUP).min(self.layout.spans);
        let mut held = Vec::with_capacity(GROUP);
        let mut whole = true;
        for near in first..last {
            if near == span {
                continue;
            }
            let meta = Meta::of(self.entry(near).meta.load(Ordering::SeqCst));
            if meta.claimable() && self.swap_meta(near, meta.word(), Meta { owner, ..meta }.word()) {
                held.push((near, meta));
                fault::point();
            } else {
                whole = false;
                break;
            }
        }
        if whole {
            self.map.give_back(self.span_offset(first) as usize, (last - first) * SPAN_BYTES);
            let was_free = Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).state == FREE;
            let freed = u64::from(was_free) + held.iter().filter(|(_, meta)| meta.state == FREE).count() as u64;
            let kept = &self.header().kept;
            let _ = kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(freed)));
            self.entry(span).meta.store(Meta::free(HOLE, owner), Ordering::SeqCst);
        }
        for (near, meta) in held {
            let state = if whole && meta.state != UNUSED { HOLE } else { meta.state };
            self.entry(near).meta.store(Meta::free(state, 0), Ordering::SeqCst);
            if state != UNUSED {
                self.hint(0, near);
            }
        }
    }

    /// Gives all pages of free spans back to the system.
    pub(in crate::arena) fn trim(&self, owner: u64) {
        for first in (0..self.fresh()).step_by(GROUP) {
            self.trim_group(first, owner);
        }
    }

    /// Gives the 2 MiB from `first` on back to the system if all of it is free.
    fn trim_group(&self, first: usize, owner: u64) {
        // Holes too: a reader that was late may have filled one again.
        let used = (first..(first + GROUP).min(self.layout.spans)).find_map(|span| {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            (meta.claimable() && meta.state != UNUSED).then_some((span, meta))
        });
        let Some((span, meta)) = used else { return };
        if self.swap_meta(span, meta.word(), Meta { owner, ..meta }.word()) {
            self.give_back_group(span, owner);
            let state = Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).state;
            self.entry(span).meta.store(Meta::free(state, 0), Ordering::SeqCst);
            self.hint(0, span);
        }
    }
}
