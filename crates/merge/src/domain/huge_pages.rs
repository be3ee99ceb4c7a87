//! Huge pages are left whole unless enough of their pages are zero or have a twin: they are probed for that.

use super::Domain;
use super::index_entry::IndexEntry;
use super::member::Work;
use crate::client::Gone;
use crate::table::Huge;
use pagefold_os::Range;
use pagefold_os::page::is_zero;

/// Periods that a huge page is left before it is probed first.
pub(super) const HUGE_FIRST_PROBE: u8 = 2;
/// Huge pages that one step probes at most, before it lets other clients have their turn.
const HUGE_PROBES: usize = 32;
/// Highest exponent of the wait between probes.
const HUGE_BACKOFF_MAX: u8 = 5;
/// A huge page is split if at least one of this many of its pages is zero or has a twin.
const HUGE_PAYS_ONE_IN: usize = 4;

impl Domain {
    /// Huge pages are left whole unless enough of their pages are zero or have a twin. Probes some of those that are due;
    /// false if there was nothing to do.
    pub(super) fn probe_huge(&self, work: &mut Work) -> Result<bool, Gone> {
        let left = work.probes.len().saturating_sub(HUGE_PROBES);
        let due = work.probes.split_off(left);
        for addr in &due {
            let Ok(at) = work.table.chunks().binary_search_by_key(addr, |chunk| chunk.addr) else { continue };
            let Huge::Wait(0, backoff) = work.table.chunks()[at].huge else { continue };
            let pays = self.probe(work, at)?;
            let next = (backoff + 1).min(HUGE_BACKOFF_MAX);
            // One that pays is split by the next look.
            work.idle = work.idle.filter(|_| !pays);
            work.table.chunks_mut()[at].huge = if pays { Huge::Split } else { Huge::Wait(1 << backoff, next) };
        }
        Ok(!due.is_empty())
    }

    fn probe(&self, work: &mut Work, at: usize) -> Result<bool, Gone> {
        let chunk = &work.table.chunks()[at];
        let parts: Vec<Range> = chunk.parts().collect();
        let pages = chunk.page_count() as usize;
        let mut readable = vec![false; pages];
        let mut pairs = Vec::with_capacity(pages);
        let mut zero = 0;
        let (client, table) = (&mut work.client, &work.table);
        self.with_buffer(pages, |buffer| {
            client.fetch(&parts, buffer, &mut readable)?;
            let chunk = &table.chunks()[at];
            chunk.indexed.clear();
            for ((index, page), _) in chunk.pages().zip(&*buffer).zip(&readable).filter(|(_, readable)| **readable) {
                if is_zero(page) {
                    zero += 1;
                } else {
                    chunk.indexed.set(index, true);
                    let entry = IndexEntry::Candidate { chunk: chunk.id, page: index as u32 };
                    pairs.push((self.key.fingerprint(page), entry.value()));
                }
            }
            Ok(())
        })?;
        self.count(|c| &c.pages_fingerprinted, pages as u64);
        let mut existing = vec![None; pairs.len()];
        let _ = self.index.get_or_insert_many(&pairs, &mut existing);
        let twins =
            existing.iter().zip(&pairs).filter(|(found, pair)| found.is_some_and(|value| value != pair.1)).count();
        Ok((zero + twins) * HUGE_PAYS_ONE_IN >= pages)
    }
}

/// Another period of waiting is over for huge pages; notes which are due, the first last.
pub(super) fn note_due_probes(work: &mut Work) {
    work.probes.clear();
    for chunk in work.table.chunks_mut().iter_mut().rev() {
        match chunk.huge {
            Huge::Wait(0, _) => work.probes.push(chunk.addr),
            Huge::Wait(periods, backoff) => chunk.huge = Huge::Wait(periods - 1, backoff),
            Huge::No | Huge::Split => {}
        }
    }
}
