//! Slots to which the index does not lead.
//!
//! The index has one entry for a content. Two slots may have that content: both came from an earlier daemon, or a run of
//! equal slots took the place of one. The index leads to one of them, and the other is remembered here while pages show it.
//! It gets the entry when the segment of the first is retired or released. Without that, a new page with the content would
//! find nothing, although a slot has it.

use super::Domain;
use super::index_entry::IndexEntry;
use pagefold_os::sync::lock;
use pagefold_pool::{Fingerprint, Slot};
use std::collections::HashMap;

/// The slots, by the fingerprint of their content.
#[derive(Debug, Default)]
pub(super) struct UnlistedSlots(HashMap<Fingerprint, Vec<Slot>>);

impl UnlistedSlots {
    fn add(&mut self, fingerprint: Fingerprint, slot: Slot) {
        let slots = self.0.entry(fingerprint).or_default();
        if !slots.contains(&slot) {
            slots.push(slot);
        }
    }

    /// Forgets the slots of a segment that was released.
    fn forget(&mut self, segment: u32) {
        self.0.retain(|_, slots| {
            slots.retain(|slot| slot.segment() != segment);
            !slots.is_empty()
        });
    }

    /// Forgets one slot: the index leads to it.
    fn drop_slot(&mut self, fingerprint: Fingerprint, slot: Slot) {
        if let Some(slots) = self.0.get_mut(&fingerprint) {
            slots.retain(|other| *other != slot);
            if slots.is_empty() {
                self.0.remove(&fingerprint);
            }
        }
    }

    fn memory_bytes(&self) -> u64 {
        let entry = size_of::<(Fingerprint, Vec<Slot>)>() + 4 * size_of::<Slot>();
        (self.0.len() * entry) as u64
    }
}

impl Domain {
    /// Notes that the index leads elsewhere for the content of `slot`.
    pub(super) fn note_unlisted(&self, fingerprint: Fingerprint, slot: Slot) {
        lock(&self.unlisted).add(fingerprint, slot);
    }

    /// True if a slot is remembered that may have a content with this fingerprint.
    pub(super) fn has_unlisted(&self, fingerprint: Fingerprint) -> bool {
        lock(&self.unlisted).0.contains_key(&fingerprint)
    }

    /// After the retirement of a segment: has the index lead to remembered slots where it led to those that get no more
    /// sharers.
    pub(super) fn list_instead_of_retired(&self) {
        let remembered: Vec<(Fingerprint, Vec<Slot>)> = {
            let unlisted = lock(&self.unlisted);
            unlisted.0.iter().map(|(fingerprint, slots)| (*fingerprint, slots.clone())).collect()
        };
        for (fingerprint, slots) in remembered {
            // One entry: the others stay remembered.
            if let Some(slot) = slots.into_iter().find(|slot| self.pool.published_from(*slot) > 0)
                && let Some(retired) = self.index.get(fingerprint)
                && let IndexEntry::Slot(before) = IndexEntry::from_value(retired)
                && self.pool.published_from(before) == 0
                && self.index.replace(fingerprint, retired, IndexEntry::Slot(slot).value())
            {
                lock(&self.unlisted).drop_slot(fingerprint, slot);
            }
        }
    }

    /// After the release of `segment`: forgets its slots, and has the index lead to remembered ones for contents with these
    /// fingerprints. Returns what the owners of candidates with such a content are to be told.
    pub(super) fn list_instead(&self, segment: u32, fingerprints: &[Fingerprint]) -> Vec<(IndexEntry, Option<Slot>)> {
        lock(&self.unlisted).forget(segment);
        let mut notices = Vec::new();
        for fingerprint in fingerprints {
            let slots = lock(&self.unlisted).0.remove(fingerprint).unwrap_or_default();
            // Those of a retired segment are offered again when it is kept.
            let shared = slots.into_iter().filter(|slot| self.pool.published_from(*slot) > 0);
            notices.extend(shared.filter_map(|slot| self.offer_as(*fingerprint, slot)));
        }
        notices
    }

    /// Bytes of what is remembered.
    pub(super) fn unlisted_bytes(&self) -> u64 {
        lock(&self.unlisted).memory_bytes()
    }
}
