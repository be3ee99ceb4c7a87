//! `verify`: does every page that the ledger calls shared really show its slot?

use crate::server::{Daemon, lock};
use crate::status::Verified;
use pagefold_merge::page::State;
use pagefold_merge::{ClientId, Domain};
use pagefold_os::{PAGE_SIZE, Page};
use pagefold_pool::Slot;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const PRESENT: u64 = 1 << 63;
/// The page belongs to a file (or shared memory), so it has not been written since it was merged.
const FILE: u64 = 1 << 61;
const FRAME: u64 = (1 << 55) - 1;

/// Most lines about the pages of a domain, and about its ledger; more are only counted by the last line.
const WRONG_MAX: usize = 100;
/// How long a page that seems wrong is looked at again, at least and at most.
const SECOND_LOOK: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

fn entry(pagemap: &File, addr: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    pagemap.read_exact_at(&mut bytes, addr / PAGE_SIZE as u64 * 8).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

/// What a look at one page found.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Absent,
    /// We may not look.
    Unseen,
    Broken,
    SameFrame,
    SameBytes,
    Wrong(String),
}

/// A client's page map and memory.
type Files = (File, File);

fn files_of(pid: i32) -> io::Result<Files> {
    Ok((File::open(format!("/proc/{pid}/pagemap"))?, File::open(format!("/proc/{pid}/mem"))?))
}

fn look(domain: &Domain, files: &io::Result<Files>, own: &File, addr: u64, slot: Slot) -> Look {
    let (pagemap, memory) = match files {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Look::Unseen,
        Err(_) => return Look::Absent,
    };
    let mut bytes: Page = [0; PAGE_SIZE];
    // Reading also brings the page into the client's table, where its frame can be seen.
    let read = memory.read_exact_at(&mut bytes, addr).is_ok();
    let Some(theirs) = entry(pagemap, addr).filter(|entry| read && entry & PRESENT != 0) else { return Look::Absent };
    if theirs & FILE == 0 {
        return Look::Broken;
    }
    let checked = domain.pool().with_page(slot, |page| {
        // Comparing also brings the slot into our own table.
        let equal = *page == bytes;
        let ours = entry(own, page.as_ptr() as u64).unwrap_or(0);
        (equal, ours & FRAME, theirs & FRAME)
    });
    match checked {
        Some((true, ours, theirs)) if ours == theirs && ours != 0 => Look::SameFrame,
        // Frame numbers read as zero without privilege.
        Some((true, 0, 0)) => Look::SameBytes,
        None => Look::Wrong("its slot is gone".to_owned()),
        Some((false, ..)) => Look::Wrong("its bytes differ from the slot's".to_owned()),
        Some((_, ours, theirs)) => Look::Wrong(format!("it shows frame {theirs:#x}, the slot is {ours:#x}")),
    }
}

pub(crate) fn verify(daemon: &Daemon) -> Verified {
    let mut found = Verified::default();
    let own = File::open("/proc/self/pagemap");
    let groups: Vec<_> = lock(&daemon.groups).iter().map(|(key, group)| (key.clone(), group.domain.clone())).collect();
    let [done, total] = &daemon.verified;
    done.store(0, Ordering::Relaxed);
    total.store(0, Ordering::Relaxed);
    for (key, domain) in groups {
        let pids: HashMap<ClientId, i32> =
            lock(&daemon.connected).iter().filter(|c| c.key == key).map(|c| (c.id, c.shared.pid)).collect();
        let mut open: HashMap<ClientId, io::Result<Files>> = HashMap::new();
        let mut look_at = |id: ClientId, addr, slot| {
            let Ok(own) = &own else { return Look::Unseen };
            let files = open.entry(id).or_insert_with(|| {
                pids.get(&id).map_or_else(|| Err(io::ErrorKind::NotFound.into()), |pid| files_of(*pid))
            });
            look(&domain, files, own, addr, slot)
        };
        let ledger = domain.ledger();
        total.fetch_add(ledger.len() as u64, Ordering::Relaxed);
        let mut suspects = Vec::new();
        for (id, addr, slot) in ledger {
            found.pages += 1;
            done.store(found.pages, Ordering::Relaxed);
            match look_at(id, addr, slot) {
                Look::Absent => found.absent += 1,
                Look::Unseen => found.unseen += 1,
                Look::Broken => found.broken += 1,
                Look::SameFrame => found.same_frame += 1,
                Look::SameBytes => found.same_bytes += 1,
                Look::Wrong(_) => suspects.push((id, addr, slot)),
            }
        }
        // The program may have put something else there, or the page been merged anew, since the ledger was copied: by the
        // next looks of its worker the ledger says so.
        let end = Instant::now() + (daemon.config.period * 3).clamp(SECOND_LOOK[0], SECOND_LOOK[1]);
        let mut lines = Vec::new();
        for (id, addr, slot) in suspects {
            let what = loop {
                let Look::Wrong(what) = look_at(id, addr, slot) else { break None };
                if domain.page_state(id, addr) != State::Shared(slot) {
                    break None;
                }
                if Instant::now() > end {
                    break Some(what);
                }
                std::thread::sleep(SECOND_LOOK[0] / 4);
            };
            match what {
                None => found.broken += 1,
                Some(what) => {
                    found.wrong_pages += 1;
                    lines.push(format!("client {id} page {addr:#x} slot {}: {what}", slot.number()));
                }
            }
        }
        tell(&mut found.wrong, lines, "pages");
        tell(&mut found.wrong, domain.audit(), "faults of the ledger");
    }
    found
}

/// Adds the first of `lines`, and how many there are beside.
fn tell(out: &mut Vec<String>, lines: Vec<String>, what: &str) {
    let more = lines.len().saturating_sub(WRONG_MAX);
    out.extend(lines.into_iter().take(WRONG_MAX));
    if more > 0 {
        out.push(format!("and {more} more {what}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_not_be_looked_at_is_not_absent() {
        let domain = Domain::new(pagefold_merge::Config::default()).unwrap();
        let own = File::open("/proc/self/pagemap").unwrap();
        let slot = Slot::new(0, 0);
        for (kind, expected) in
            [(io::ErrorKind::PermissionDenied, Look::Unseen), (io::ErrorKind::NotFound, Look::Absent)]
        {
            assert_eq!(look(&domain, &Err(kind.into()), &own, 0, slot), expected);
        }
    }

    #[test]
    fn lines_have_an_end_and_are_counted() {
        let mut out = Vec::new();
        tell(&mut out, vec!["x".into(); WRONG_MAX], "pages");
        assert_eq!(out.len(), WRONG_MAX);
        tell(&mut out, vec!["x".into(); 250], "pages");
        assert_eq!((out.len(), out.last().unwrap().as_str()), (2 * WRONG_MAX + 1, "and 150 more pages"));
    }
}
