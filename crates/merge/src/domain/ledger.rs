//! The ledger: which page of which client shows which slot. An audit recounts it.

use super::member::{Member, Work};
use super::{ClientId, Domain};
use crate::page::PageState;
use crate::table::{CHUNK_LEN, Chunk};
use pagefold_os::sync::{at_once, lock, read};
use pagefold_pool::Slot;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// Rounds of an audit, each of which waits for one client.
const AUDIT_ROUNDS: usize = 20;
/// Looks of a round whether no client is in hand any more, and the pause between them: no step begins for a second at most.
const AUDIT_TRIES: usize = 1000;
const AUDIT_PAUSE: Duration = Duration::from_millis(1);

impl Domain {
    /// Every page that the ledger says is shared: (client, address, slot), for checks against the kernel's page tables.
    pub fn ledger(&self) -> Vec<(ClientId, u64, Slot)> {
        let members: Vec<Arc<Member>> = read(&self.members).values().cloned().collect();
        let mut all = Vec::new();
        for member in members {
            all.extend(shared_from(&lock(&member.work), 0).map(|(addr, slot)| (member.id, addr, slot)));
        }
        all
    }

    /// The part of the [ledger](Self::ledger) of client `id` that begins at `from`, `most` pages at most: the whole takes 16
    /// bytes a page. Empty at its end, and for a client that has gone.
    pub fn ledger_part(&self, id: ClientId, from: u64, most: usize) -> Vec<(ClientId, u64, Slot)> {
        let Some(member) = read(&self.members).get(&id).cloned() else { return Vec::new() };
        let work = lock(&member.work);
        shared_from(&work, from).take(most).map(|(addr, slot)| (id, addr, slot)).collect()
    }

    /// Recounts everything that is counted twice and returns what disagrees; empty if the books are right. All work waits
    /// meanwhile: pages that are being merged are in one book earlier than in the other. Other work does not wait for a
    /// client that does not answer.
    pub fn audit(&self) -> Vec<String> {
        let mut busy = None;
        for _ in 0..AUDIT_ROUNDS {
            match self.audit_round(busy.take()) {
                Ok(wrong) => return wrong,
                Err(member) => busy = member,
            }
        }
        vec!["not recounted: some client is in the hands of a worker all the time; try again".into()]
    }

    /// One try of an audit: waits for the worker on the client that was `busy` in the last try, and then a little for all
    /// others. Returns a client that was busy to the end.
    fn audit_round(&self, busy: Option<Arc<Member>>) -> Result<Vec<String>, Option<Arc<Member>>> {
        // As long as the client likes, so with nothing else in hand.
        let mut waited_for = busy.as_ref().map(|member| (member.id, lock(&member.work)));
        self.auditing.fetch_add(1, Ordering::AcqRel);
        let _at_rest = AtRest(self);
        let mut in_hand = None;
        for _ in 0..AUDIT_TRIES {
            if let Some(_roster) = at_once(self.roster.try_write()) {
                let members: Vec<Arc<Member>> = read(&self.members).values().cloned().collect();
                let mut held: Vec<MutexGuard<'_, Work>> = Vec::with_capacity(members.len());
                let is_held = |id| waited_for.as_ref().is_some_and(|(held, _)| *held == id);
                let others = || members.iter().filter(|member| !is_held(member.id));
                held.extend(others().map_while(|member| at_once(member.work.try_lock())));
                in_hand = others().nth(held.len()).cloned();
                if in_hand.is_none() {
                    held.extend(waited_for.take().map(|(_, work)| work));
                    return Ok(self.recount(&held));
                }
            } else {
                // A client is being added or removed: it may be the one that this thread waited for.
                waited_for = None;
            }
            std::thread::sleep(AUDIT_PAUSE);
        }
        Err(in_hand)
    }

    /// What disagrees, with all members' work in hand.
    fn recount(&self, held: &[MutexGuard<'_, Work>]) -> Vec<String> {
        let mut sharers: BTreeMap<Slot, u32> = BTreeMap::new();
        let shared = held.iter().flat_map(|work| shared_from(work, 0));
        shared.for_each(|(_, slot)| *sharers.entry(slot).or_default() += 1);
        let mut wrong: Vec<String> = sharers
            .iter()
            .filter(|(slot, count)| self.pool.sharers(**slot) != **count)
            .map(|(slot, count)| format!("{slot:?}: {count} in ledgers, {} in the pool", self.pool.sharers(*slot)))
            .collect();
        let (in_ledgers, in_pool) =
            (sharers.values().map(|n| u64::from(*n)).sum::<u64>(), self.pool.stats().pages_sharing);
        if in_ledgers != in_pool {
            wrong.push(format!("{in_ledgers} sharers in ledgers, {in_pool} in the pool"));
        }
        wrong
    }
}

/// Each page from `from` on that the ledger says is shared, and its slot.
fn shared_from(work: &Work, from: u64) -> impl Iterator<Item = (u64, Slot)> + '_ {
    let chunks = work.table.chunks();
    let first = chunks.partition_point(|chunk| chunk.addr + CHUNK_LEN <= from);
    let shared = |chunk: &'_ Chunk, index| match chunk.state(index) {
        PageState::Shared(slot) => Some((chunk.page_addr(index), slot)),
        _ => None,
    };
    let chunks = chunks[first..].iter().filter(|chunk| chunk.counts.shared > 0);
    let pages = chunks.flat_map(move |chunk| chunk.pages().filter_map(move |index| shared(chunk, index)));
    pages.skip_while(move |(addr, _)| *addr < from)
}

/// While it lives no step begins.
struct AtRest<'a>(&'a Domain);

impl Drop for AtRest<'_> {
    fn drop(&mut self) {
        self.0.auditing.fetch_sub(1, Ordering::AcqRel);
    }
}
