//! One page very often: where neighbours have one content, a run of equal slots stands for it.
//!
//! Neighbours that show one slot are a mapping each, so the budget of mappings would decide how many of them are merged. A
//! run of equal slots ([`copies`](crate::Config::copies)) is one mapping for as many neighbours. Which of the slots a page
//! shows is a matter of its address: so runs join, whenever they were found.

use super::index_entry::IndexEntry;
use super::member::Work;
use super::{Domain, read, write};
use crate::plan::TargetSlot;
use pagefold_os::PAGE_SIZE;
use pagefold_pool::Slot;
use std::collections::BTreeMap;

impl Domain {
    /// Has pages (ascending by address) of which very many neighbours show one slot show a run of equal slots instead.
    pub(super) fn spread(&self, work: &mut Work, pairs: &mut [(u64, TargetSlot)]) {
        if self.config.copies < 2 {
            return;
        }
        // Ordered, so that a simulation replays.
        let mut neighbours: BTreeMap<Slot, u32> = BTreeMap::new();
        for pair in pairs.windows(2) {
            if let [(before, Some(slot)), (addr, target)] = *pair
                && target == Some(slot)
                && before + PAGE_SIZE as u64 == addr
            {
                *neighbours.entry(slot).or_default() += 1;
            }
        }
        neighbours.retain(|slot, count| *count >= self.config.copies_from || read(&self.repeats).contains(slot));
        let firsts: BTreeMap<Slot, Slot> =
            neighbours.into_keys().filter_map(|slot| Some((slot, self.first_copy(work, slot)?))).collect();
        if firsts.is_empty() {
            return;
        }
        for (addr, target) in pairs {
            if let Some(first) = target.and_then(|slot| firsts.get(&slot)) {
                *target = Some(self.copy(*addr, *first));
            }
        }
    }

    /// The first of the slots that are equal to `slot`, made if there are none yet; `None` if there is no room for them.
    fn first_copy(&self, work: &mut Work, slot: Slot) -> Option<Slot> {
        if self.are_copies(&slot) {
            return Some(slot);
        }
        let mut page = [0; PAGE_SIZE];
        if !self.pool.read(slot, &mut page) {
            return None;
        }
        let fingerprint = self.key.fingerprint(&page);
        // Another client's pages may have had them made since ours were looked up.
        let led_to = || match self.index.get(fingerprint).map(IndexEntry::from_value) {
            Some(IndexEntry::Slot(found)) => Some(found).filter(|found| self.are_copies(found)),
            _ => None,
        };
        if let Some(first) = led_to() {
            return Some(first);
        }
        let copies = vec![&page; self.config.copies as usize];
        let mut published = self.pool.publish_in(work.lane, &copies).ok()?;
        if published.taken < copies.len() {
            // The segment ended. The copies in it get no sharers; the next segment has room for all.
            published =
                self.pool.publish_in(work.lane, &copies).ok().filter(|published| published.taken == copies.len())?;
        }
        let first = published.first;
        work.held_segments.insert(published.hold.segment(), published.hold);
        // Known as what they are before anybody is led to them.
        write(&self.repeats).insert(first);
        if !self.index.replace(fingerprint, IndexEntry::Slot(slot).value(), IndexEntry::Slot(first).value()) {
            write(&self.repeats).remove(&first);
            return led_to();
        }
        // Other pages show it still.
        self.note_unlisted(fingerprint, slot);
        Some(first)
    }

    /// Has pages show their own of equal slots where the index leads to the first.
    pub(super) fn lead_to_copies(&self, targets: &mut [(u64, TargetSlot)]) {
        let repeats = read(&self.repeats);
        if repeats.is_empty() {
            return;
        }
        for (addr, target) in targets {
            if let Some(first) = target.filter(|slot| repeats.contains(slot) && self.is_published(slot)) {
                *target = Some(self.copy(*addr, first));
            }
        }
    }

    /// The one of the equal slots from `first` on that the page at `addr` shows.
    fn copy(&self, addr: u64, first: Slot) -> Slot {
        let copy = addr / PAGE_SIZE as u64 % u64::from(self.config.copies);
        Slot::from_number(first.number() + copy as u32)
    }

    /// True if `first` is the first of equal slots that can be shared.
    fn are_copies(&self, first: &Slot) -> bool {
        read(&self.repeats).contains(first) && self.is_published(first)
    }

    fn is_published(&self, first: &Slot) -> bool {
        self.pool.published_from(*first) >= self.config.copies
    }

    /// True if `slot` is the last of equal ones: the page behind shows the first of them, or another content.
    pub(super) fn ends_copies(&self, slot: Slot) -> bool {
        let first = slot.number().checked_sub(self.config.copies.saturating_sub(1));
        first.is_some_and(|first| read(&self.repeats).contains(&Slot::from_number(first)))
    }
}
