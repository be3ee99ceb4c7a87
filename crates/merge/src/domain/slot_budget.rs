//! Which twins are worth a slot: those that both sides have mappings left for.
//!
//! A slot takes memory immediately, and saves some only once pages are mapped from it. Where either side has used up its
//! budget of mappings for runs as short as these, no page would be: a program with many scattered duplicates would keep its
//! memory, and the pool would hold a copy of it. Pages that are left out are tried again like other pages without room.

use super::index_stage::Twin;
use super::member::Work;
use super::{Domain, EDGES, read, remap};
use crate::ClientId;
use crate::plan::{self, TargetSlot};
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_protocol::message::RefusalReason;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_SIZE as u64;

impl Domain {
    /// The `twins` (ascending by address) that are to get slots, beside pages that `known` slots were found for (ascending
    /// but for zeros). Where only the other side has no room the index leads to this one from now on: to the next that comes
    /// it is the better twin.
    pub(super) fn affordable(&self, work: &mut Work, twins: Vec<Twin>, known: &[(u64, TargetSlot)]) -> Vec<Twin> {
        if twins.is_empty() {
            return twins;
        }
        let (owners, mut mappings_claimed) = self.owners(&twins);
        let mut used = work.mappings + work.deferred_mappings;
        let most = EDGES * twins.len() as i64;
        if mappings_claimed.values().chain([&used]).all(|used| self.may_be_short(used + most)) {
            return twins;
        }
        let mut has_room = vec![true; twins.len()];
        let beside = |a: usize| twins[a - 1].addr + PAGE == twins[a].addr;
        let follows = |a: usize| match (owners[a - 1], owners[a]) {
            (Some((owner, before)), Some((same, addr))) => beside(a) && owner == same && before + PAGE == addr,
            _ => false,
        };
        for part in parts(twins.len(), follows) {
            if let Some(mappings_claimed) = owners[part.start].and_then(|(owner, _)| mappings_claimed.get_mut(&owner)) {
                let fits = self.affords(part.len() as u64, EDGES, mappings_claimed);
                has_room[part].fill(fits);
            }
        }
        // Those of zeros come first, and have no mapping to join.
        let known: Vec<u64> = known.iter().filter(|(_, target)| target.is_some()).map(|(addr, _)| *addr).collect();
        let is_known = |addr: u64| known.binary_search(&addr).is_ok();
        let mut worth = Vec::with_capacity(twins.len());
        let mut notices = Vec::new();
        for part in parts(twins.len(), |a| beside(a) && has_room[a - 1] == has_room[a]) {
            let (first, last) = (twins[part.start].addr, twins[part.end - 1].addr);
            let shared_edges = i64::from(is_known(first.wrapping_sub(PAGE))) + i64::from(is_known(last + PAGE));
            let pages = part.len() as u64;
            if has_room[part.start] && self.affords(pages, (EDGES - shared_edges).max(1), &mut used) {
                worth.extend_from_slice(&twins[part]);
                continue;
            }
            let takes_over = !has_room[part.start] && self.affords(pages, EDGES, &mut used.clone());
            self.count(|c| &c.over_vma_budget_runs, 1);
            if !takes_over {
                work.leave_out();
            }
            for twin in &twins[part] {
                if !takes_over {
                    Self::refuse(work, RefusalReason::Limit);
                    remap::put_off(work, twin.addr);
                } else if self.index.replace(twin.fingerprint, twin.entry.value(), twin.mine) {
                    notices.push((twin.entry, None));
                } else {
                    remap::look_up_again(work, Range::pages_from(twin.addr, 1));
                }
            }
        }
        self.notify_owners(&notices);
        worth
    }

    /// True if runs of any length are worth their mappings when `used` are taken.
    fn may_be_short(&self, used: i64) -> bool {
        plan::run_pages_min(used.max(0) as u64, self.config.vma_budget) == 1
    }

    /// The owner and address of each other twin, and how many mappings each of these clients has claimed.
    #[allow(clippy::type_complexity)]
    fn owners(&self, twins: &[Twin]) -> (Vec<Option<(ClientId, u64)>>, BTreeMap<ClientId, i64>) {
        let (chunks, members) = (read(&self.chunks), read(&self.members));
        let owners: Vec<_> = twins.iter().map(|twin| chunks.place(twin.entry)).collect();
        let mut mappings_claimed = BTreeMap::new();
        for (client, _) in owners.iter().flatten() {
            if let (false, Some(member)) = (mappings_claimed.contains_key(client), members.get(client)) {
                mappings_claimed.insert(*client, member.mappings_claimed.load(Ordering::Relaxed));
            }
        }
        (owners, mappings_claimed)
    }
}

/// Cuts `len` elements before each that does not go on with the one before it.
fn parts(len: usize, goes_on: impl Fn(usize) -> bool) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        if start >= len {
            return None;
        }
        at = (start + 1..len).find(|next| !goes_on(*next)).unwrap_or(len);
        Some(start..at)
    })
}
