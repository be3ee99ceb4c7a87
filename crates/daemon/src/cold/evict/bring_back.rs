//! Evicted pages of a client are brought back before a fault asks for them.

use crate::cold::client::faults::ReadAhead;
use crate::cold::client::{CLUSTER_PAGES, Client};
use crate::cold::group::Group;
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_protocol::residency_map::EVICTED;
use pagefold_tier::Tier;
use std::sync::atomic::Ordering;
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;

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

/// Brings these pages back, as far as they are out and the client's limit has room for them. The caller holds the client's
/// link.
pub(crate) fn bring_back(group: &Group, client: &Client, pages: &[u64]) {
    let tier = &group.tier;
    let mut buffer = vec![[0; PAGE_SIZE]; CLUSTER_PAGES];
    let mut at = 0;
    let mut refused = 0;
    while at < pages.len() && !client.gone.load(Ordering::Relaxed) {
        let mut len = 1;
        while at + len < pages.len() && len < CLUSTER_PAGES && pages[at + len] == pages[at] + len as u64 {
            len += 1;
        }
        if client.limits.reserve_pages(len as u64) < len as u64 {
            // What would fill the client's limit stays out; a touch brings it when there is room.
            return;
        }
        let (start, end) = (pages[at], pages[at] + len as u64);
        // Loading needs no lock: what is true at the end counts.
        let loaded: Vec<bool> = (start..end)
            .map(|page| {
                client.table.state(page * PAGE) == EVICTED
                    && tier.load(client.client_id, page, &mut buffer[(page - start) as usize]).is_ok()
            })
            .collect();
        let mut again = false;
        {
            let service = client.take_service();
            if !client.take_owner_lock(2000) {
                refused += 1;
                if refused > 1000 {
                    break;
                }
                continue;
            }
            again |= !client.copy_loaded(tier, start..end, &loaded, &buffer);
            client.table.unlock();
            drop(service);
        }
        if again && refused < 1000 {
            // Events wait, or memory does.
            refused += 1;
            client.serve(tier, &mut ReadAhead::default());
            if refused > 8 {
                std::thread::sleep(Duration::from_millis(1));
            }
            continue;
        }
        at += len;
    }
}
