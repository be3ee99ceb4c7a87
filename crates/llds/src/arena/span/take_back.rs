//! Taking back: a thread that finds no room takes units from threads that do not allocate at this moment.
//!
//! A thread may own units for as long as it lives, however idle it is. Only the
//! owner of a unit sets bits there, so a unit changes hands in two steps: it is
//! marked as wanted, then taken if its owner is not inside an allocation there.
//! The owner announces the block that it is about to allocate (its intent), then
//! looks at the mark, then sets the bit. So either the owner sees the mark and
//! gives the unit up, or the other thread sees the intent and leaves the unit.
//!
//! The owner's list of units is not written: its next allocation finds that the
//! unit has another owner.

use super::{Meta, SMALL, Unit};
use crate::arena::class::CLASS_COUNT;
use crate::arena::thread_record::{INTENT_ALLOC, THREADS_MAX, ThreadRecord};
use crate::arena::{Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Gives up the units of this thread, and takes back those of others: what is left in them is then found by all.
    #[cold]
    pub(in crate::arena) fn relieve(&self, thread: &ThreadRecord, owner: u64) {
        self.disown_all(thread, owner);
        self.each_unit(|unit, meta| {
            if meta.state == SMALL && meta.owner != 0 && meta.owner != owner {
                self.take_back(unit, meta, owner);
            }
        });
        self.sweep(owner);
    }

    /// Takes a unit, seen as `meta`, from its owner and makes it findable, if the owner is not inside an allocation there.
    pub(super) fn take_back(&self, unit: Unit, meta: Meta, owner: u64) {
        if meta.owner > THREADS_MAX as u64 || meta.class >= CLASS_COUNT {
            return;
        }
        let thread = self.record_at(meta.owner);
        let (is_wanted, meta) = (meta.wanted, Meta { wanted: false, ..meta });
        let wanted = Meta { wanted: true, ..meta };
        if !self.is_idle(thread, unit, meta) || !(is_wanted || self.swap_meta(unit, meta.word(), wanted.word())) {
            return;
        }
        fault::point();
        // Pairs with the SeqCst exchange of the intent in `announce`. If the owner is inside, it gives the unit up next
        // time.
        if !self.is_idle(thread, unit, meta) {
            return;
        }
        if self.swap_meta(unit, wanted.word(), Meta { owner, ..meta }.word()) {
            fault::point();
            self.disown_unit(unit, owner);
        }
    }

    /// Returns true if `thread` has the unit in its list and is not about to allocate there. A unit that is in no list is
    /// owned for the length of one step, which no other thread may interrupt.
    fn is_idle(&self, thread: &ThreadRecord, unit: Unit, meta: Meta) -> bool {
        let start = self.unit_offset(unit);
        Unit::listed(&thread.owned_spans[meta.class], Ordering::SeqCst) == Some(unit)
            && !(start..start + meta.bytes() as u64).contains(&thread.intents[INTENT_ALLOC].load(Ordering::SeqCst))
    }

    /// Announces that `thread` is about to allocate `block` in a unit that it owned as `meta`. Returns false, and withdraws
    /// the intent, if the unit was taken back or is wanted.
    #[inline]
    pub(super) fn announce(&self, thread: &ThreadRecord, unit: Unit, meta: Meta, block: u64) -> bool {
        thread.intents[INTENT_ALLOC].swap(block, Ordering::SeqCst);
        let is_ours = self.entry(unit).meta.load(Ordering::SeqCst) == meta.word();
        if !is_ours {
            thread.settle_alloc();
        }
        fault::point();
        is_ours
    }

    /// Removes a unit that was taken back, and that `owner` takes for one step, from the list of `owner`.
    pub(super) fn forget(&self, owner: u64, unit: Unit, class: usize) {
        let thread = self.record_at(owner);
        if Unit::listed(&thread.owned_spans[class], Ordering::Relaxed) == Some(unit) {
            Unit::unlist(thread, class);
        }
    }
}
