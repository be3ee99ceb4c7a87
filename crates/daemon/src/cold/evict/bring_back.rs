//! Evicted pages of a client are brought back before a fault asks for them.

use crate::cold::client::faults::ReadAhead;
use crate::cold::client::{CLUSTER_PAGES, Client};
use crate::cold::group::Group;
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_protocol::residency_map::EVICTED;
use pagefold_tier::Tier;
use std::sync::atomic::Ordering;
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;
/// Most runs of pages that are copied under one lock: a fault waits for it.
const RUNS_AT_ONCE: usize = 16;

/// The pages of `range` that are out: of what the tier has, not of what the table claims, which may be far more.
pub(crate) fn pages_out(tier: &Tier, client: &Client, range: Range) -> Vec<u64> {
    let (mut from, end) = (range.start / PAGE, range.end / PAGE);
    let mut pages = Vec::new();
    while from < end
        && let stored = tier.neighbours(client.client_id, from, 4096)
        && let Some(last) = stored.last()
    {
        from = last + 1;
        pages.extend(stored.into_iter().filter(|page| *page < end && client.table.state(page * PAGE) == EVICTED));
    }
    pages
}

/// How many of the pages at the head of `pages` are brought back under one lock.
fn batch_len(pages: &[u64]) -> usize {
    let mut runs = 1;
    let pairs = pages.windows(2).take(CLUSTER_PAGES - 1);
    1 + pairs
        .take_while(|pair| {
            runs += usize::from(pair[1] != pair[0].wrapping_add(1));
            runs <= RUNS_AT_ONCE
        })
        .count()
}

/// Brings these pages back in their order, as far as they are out and the client's limit has room for them. The caller holds
/// the client's link.
pub(crate) fn bring_back(group: &Group, client: &Client, pages: &[u64]) {
    let mut rest = pages;
    bring_batches(group, client, || {
        let (batch, after) = rest.split_at(batch_len(rest).min(rest.len()));
        rest = after;
        batch.to_vec()
    });
}

/// Brings back the pages of `next`, as [`bring_back`] does, until that has no more: at most [`CLUSTER_PAGES`] at a time.
pub(crate) fn bring_batches(group: &Group, client: &Client, mut next: impl FnMut() -> Vec<u64>) {
    let tier = &group.tier;
    let mut buffer = vec![[0; PAGE_SIZE]; CLUSTER_PAGES];
    let mut batch = next();
    let mut refused = 0;
    while !batch.is_empty() && !client.gone.load(Ordering::Relaxed) {
        if client.limits.reserve_pages(batch.len() as u64) < batch.len() as u64 {
            // What would fill the client's limit stays out; a touch brings it when there is room.
            return;
        }
        // Loading needs no lock: what is true at the end counts.
        let load = |(page, place): (&u64, &mut Page)| {
            client.table.state(page * PAGE) == EVICTED && tier.load(client.client_id, *page, place).is_ok()
        };
        let loaded: Vec<bool> = batch.iter().zip(&mut buffer).map(load).collect();
        let came = {
            let _service = client.take_service();
            if !client.take_owner_lock(2000) {
                refused += 1;
                if refused > 1000 {
                    break;
                }
                continue;
            }
            let came = client.copy_loaded(tier, &batch, &loaded, &buffer);
            client.table.unlock();
            came
        };
        if !came && refused < 1000 {
            // Events wait, or memory does.
            refused += 1;
            client.serve(tier, &mut ReadAhead::default());
            if refused > 8 {
                std::thread::sleep(Duration::from_millis(1));
            }
            continue;
        }
        batch = next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_a_cluster_of_pages_and_few_runs() {
        let one_run: Vec<u64> = (5..5 + 2 * CLUSTER_PAGES as u64).collect();
        assert_eq!(batch_len(&one_run), CLUSTER_PAGES);
        assert_eq!(batch_len(&one_run[..3]), 3);
        assert_eq!(batch_len(&[u64::MAX]), 1);
        let scattered: Vec<u64> = (0..100).map(|number| number * 7 % 100).collect();
        assert_eq!(batch_len(&scattered), RUNS_AT_ONCE);
        // Pairs, in no order.
        let pairs: Vec<u64> = (0..100).rev().flat_map(|number| [number * 4, number * 4 + 1]).collect();
        assert_eq!(batch_len(&pairs), 2 * RUNS_AT_ONCE);
    }
}
