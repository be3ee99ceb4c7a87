//! `verify`: does every page that the ledger calls shared really show its slot?

use crate::server::{Daemon, lock};
use crate::status::Verified;
use pagefold_merge::ClientId;
use pagefold_os::{PAGE_SIZE, Page};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

const PRESENT: u64 = 1 << 63;
/// The page belongs to a file (or shared memory), so it has not been written since it was merged.
const FILE: u64 = 1 << 61;
const FRAME: u64 = (1 << 55) - 1;

/// Most wrong pages that are listed; more are only counted by the last line.
const WRONG_MAX: usize = 100;

fn entry(pagemap: &File, addr: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    pagemap.read_exact_at(&mut bytes, addr / PAGE_SIZE as u64 * 8).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

pub(crate) fn verify(daemon: &Daemon) -> Verified {
    let mut found = Verified::default();
    let Ok(own) = File::open("/proc/self/pagemap") else { return found };
    let groups: Vec<_> = lock(&daemon.groups).iter().map(|(key, group)| (key.clone(), group.domain.clone())).collect();
    let [done, total] = &daemon.verified;
    done.store(0, Ordering::Relaxed);
    total.store(0, Ordering::Relaxed);
    for (key, domain) in groups {
        let pids: HashMap<ClientId, i32> =
            lock(&daemon.connected).iter().filter(|c| c.key == key).map(|c| (c.id, c.shared.pid)).collect();
        let mut open: HashMap<ClientId, Option<(File, File)>> = HashMap::new();
        let ledger = domain.ledger();
        total.fetch_add(ledger.len() as u64, Ordering::Relaxed);
        for (id, addr, slot) in ledger {
            found.pages += 1;
            done.store(found.pages, Ordering::Relaxed);
            let files = open.entry(id).or_insert_with(|| {
                let pid = pids.get(&id)?;
                Some((File::open(format!("/proc/{pid}/pagemap")).ok()?, File::open(format!("/proc/{pid}/mem")).ok()?))
            });
            let Some((pagemap, memory)) = files else {
                found.absent += 1;
                continue;
            };
            let mut bytes: Page = [0; PAGE_SIZE];
            // Reading also brings the page into the client's table, where its frame can be seen.
            let read = memory.read_exact_at(&mut bytes, addr).is_ok();
            let Some(theirs) = entry(pagemap, addr).filter(|entry| read && entry & PRESENT != 0) else {
                found.absent += 1;
                continue;
            };
            if theirs & FILE == 0 {
                found.broken += 1;
                continue;
            }
            let checked = domain.pool().with_page(slot, |page| {
                // Comparing also brings the slot into our own table.
                let equal = *page == bytes;
                let ours = entry(&own, page.as_ptr() as u64).unwrap_or(0);
                (equal, ours & FRAME, theirs & FRAME)
            });
            match checked {
                Some((true, ours, theirs)) if ours == theirs && ours != 0 => found.same_frame += 1,
                // Frame numbers read as zero without privilege.
                Some((true, 0, 0)) => found.same_bytes += 1,
                other => {
                    if found.wrong.len() < WRONG_MAX {
                        let what = match other {
                            None => "its slot is gone".to_owned(),
                            Some((false, ..)) => "its bytes differ from the slot's".to_owned(),
                            Some((_, ours, theirs)) => format!("it shows frame {theirs:#x}, the slot is {ours:#x}"),
                        };
                        found.wrong.push(format!("client {id} page {addr:#x} slot {}: {what}", slot.number()));
                    }
                }
            }
        }
        found.wrong.extend(domain.audit().into_iter().take(WRONG_MAX));
    }
    found
}
