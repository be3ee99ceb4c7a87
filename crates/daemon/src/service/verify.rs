//! `verify`: does every page that the ledger calls shared really show its slot?

use crate::service::daemon::Daemon;

use crate::status::Verified;
use pagefold_merge::page::PageState;
use pagefold_merge::{ClientId, Domain};
use pagefold_os::pagemap::{ENTRY_BYTES, PageEntry};
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_pool::Slot;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most lines about the pages of a domain, and as many about its ledger; the last line counts the rest.
const WRONG_MAX: usize = 100;
/// Shortest and longest time for which a page that seems wrong is compared again.
const SECOND_LOOK: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

fn entry(pagemap: &File, addr: u64) -> Option<PageEntry> {
    let mut bytes = [0; ENTRY_BYTES];
    pagemap.read_exact_at(&mut bytes, addr / PAGE_SIZE as u64 * ENTRY_BYTES as u64).ok()?;
    Some(PageEntry::from_bytes(bytes))
}

/// What a look at one page found.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Absent,
    /// The daemon may not look.
    Unseen,
    Broken,
    SameFrame,
    SameBytes,
    Wrong(String),
}

/// A client's page map and memory.
struct Files {
    pagemap: File,
    /// `None` if the daemon may not read it (`kernel.yama.ptrace_scope`): then the client's agent does.
    memory: Option<File>,
}

fn files_of(pid: i32) -> io::Result<Files> {
    let memory = match File::open(format!("/proc/{pid}/mem")) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => None,
        opened => Some(opened?),
    };
    Ok(Files { pagemap: File::open(format!("/proc/{pid}/pagemap"))?, memory })
}

/// Pages of a client that are read before they are compared.
const BATCH: usize = 128;
/// Pages of a client's ledger that are copied at a time, while no worker has the client locked.
const PART: usize = 1 << 16;

/// Compares the pages of a domain's clients with their slots.
struct Comparer<'a> {
    domain: &'a Domain,
    own: &'a io::Result<File>,
    pids: HashMap<ClientId, i32>,
    open: HashMap<ClientId, io::Result<Files>>,
    copies: Vec<Page>,
    readable: [bool; BATCH],
}

impl<'a> Comparer<'a> {
    fn new(domain: &'a Domain, own: &'a io::Result<File>, pids: HashMap<ClientId, i32>) -> Comparer<'a> {
        Comparer {
            domain,
            own,
            pids,
            open: HashMap::new(),
            copies: vec![[0; PAGE_SIZE]; BATCH],
            readable: [false; BATCH],
        }
    }

    /// Looks at pages of one client, [`BATCH`] at most.
    fn look_at(&mut self, pages: &[(ClientId, u64, Slot)]) -> Vec<Look> {
        let id = pages[0].0;
        let files = self.open.entry(id).or_insert_with(|| {
            self.pids.get(&id).map_or_else(|| Err(io::ErrorKind::NotFound.into()), |pid| files_of(*pid))
        });
        let (files, own) = match (files, self.own) {
            (Ok(files), Ok(own)) => (files, own),
            (Err(error), Ok(_)) if error.kind() != io::ErrorKind::PermissionDenied => {
                return pages.iter().map(|_| Look::Absent).collect();
            }
            _ => return pages.iter().map(|_| Look::Unseen).collect(),
        };
        // Reading also brings the pages into the client's table, where their frames can be seen.
        match &files.memory {
            Some(memory) => {
                for ((_, addr, _), (copy, readable)) in pages.iter().zip(self.copies.iter_mut().zip(&mut self.readable))
                {
                    *readable = memory.read_exact_at(copy, *addr).is_ok();
                }
            }
            None => {
                let runs: Vec<Range> = pages.iter().map(|(_, addr, _)| Range::pages_from(*addr, 1)).collect();
                if self.domain.fetch(id, &runs, &mut self.copies, &mut self.readable).is_err() {
                    self.readable.fill(false);
                }
            }
        }
        let copies = self.copies.iter().zip(&self.readable).map(|(copy, readable)| readable.then_some(copy));
        let looks = pages.iter().zip(copies);
        looks.map(|((_, addr, slot), copy)| look(self.domain, &files.pagemap, own, *addr, *slot, copy)).collect()
    }
}

/// Looks at the page at `addr`, which read `bytes` just before.
fn look(domain: &Domain, pagemap: &File, own: &File, addr: u64, slot: Slot, bytes: Option<&Page>) -> Look {
    let Some(bytes) = bytes else { return Look::Absent };
    let Some(theirs) = entry(pagemap, addr).filter(|entry| entry.is_present()) else { return Look::Absent };
    // A page that was written since it was merged is the client's own.
    if !theirs.is_file() {
        return Look::Broken;
    }
    let checked = domain.pool().with_page(slot, |page| {
        // Comparing also brings the slot into our own table.
        let equal = page == bytes;
        let ours = entry(own, page.as_ptr() as u64).map_or(0, PageEntry::frame);
        (equal, ours, theirs.frame())
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

/// The ledger of client `id`, in parts that [`Comparer`] look at: all of a large domain's would take as much memory as the
/// rest of what is kept of it.
fn batches(domain: &Domain, id: ClientId) -> impl Iterator<Item = Vec<(ClientId, u64, Slot)>> {
    let (mut from, mut part) = (0, Vec::new().into_iter());
    std::iter::from_fn(move || {
        if part.as_slice().is_empty() {
            part = domain.ledger_part(id, from, PART).into_iter();
            from = part.as_slice().last()?.1 + PAGE_SIZE as u64;
        }
        Some(part.by_ref().take(BATCH).collect())
    })
}

pub(crate) fn verify(daemon: &Daemon) -> Verified {
    let mut found = Verified::default();
    let own = File::open("/proc/self/pagemap");
    let groups: Vec<_> =
        lock(&daemon.live.domains).iter().map(|(key, live)| (key.clone(), live.domain.clone())).collect();
    let [done, total] = &daemon.verified;
    done.store(0, Ordering::Relaxed);
    total.store(0, Ordering::Relaxed);
    for (key, domain) in groups {
        let pids: HashMap<ClientId, i32> =
            lock(&daemon.live.connected).iter().filter(|c| c.key == key).map(|c| (c.id, c.shared.pid)).collect();
        let mut comparer = Comparer::new(&domain, &own, pids);
        total.fetch_add(domain.pool().stats().pages_sharing, Ordering::Relaxed);
        let mut suspects = Vec::new();
        for batch in domain.clients().into_iter().flat_map(|id| batches(&domain, id)) {
            found.pages += batch.len() as u64;
            // More may be merged meanwhile.
            total.fetch_max(found.pages, Ordering::Relaxed);
            done.store(found.pages, Ordering::Relaxed);
            for (page, look) in batch.iter().zip(comparer.look_at(&batch)) {
                match look {
                    Look::Absent => found.absent += 1,
                    Look::Unseen => found.unseen += 1,
                    Look::Broken => found.broken += 1,
                    Look::SameFrame => found.same_frame += 1,
                    Look::SameBytes => found.same_bytes += 1,
                    Look::Wrong(_) => suspects.push(*page),
                }
            }
        }
        // The program may have put something else there, or the page been merged anew, since the ledger was copied: by the
        // next looks of its worker the ledger says so.
        let end = Instant::now() + (daemon.config.period * 3).clamp(SECOND_LOOK[0], SECOND_LOOK[1]);
        let mut lines = Vec::new();
        for (id, addr, slot) in suspects {
            let what = loop {
                let Some(Look::Wrong(what)) = comparer.look_at(&[(id, addr, slot)]).pop() else { break None };
                if domain.page_state(id, addr) != PageState::Shared(slot) {
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
    use pagefold_merge::client::{Client, Gone, Outcome, PoolMapping, RemapPiece, Written};
    use pagefold_pool::Pool;

    #[test]
    fn pages_that_may_not_be_read_are_not_absent() {
        let domain = Domain::new(pagefold_merge::Config::default()).unwrap();
        let own = File::open("/proc/self/pagemap");
        let slot = Slot::new(0, 0);
        for (kind, expected) in
            [(io::ErrorKind::PermissionDenied, Look::Unseen), (io::ErrorKind::NotFound, Look::Absent)]
        {
            let mut comparer = Comparer::new(&domain, &own, HashMap::new());
            comparer.open.insert(1, Err(kind.into()));
            assert_eq!(comparer.look_at(&[(1, 0, slot)]), [expected]);
        }
    }

    /// As under a kernel that forbids reading other processes' memory: the agent of the client reads it.
    #[test]
    fn the_agent_reads_what_the_daemon_may_not() {
        let domain = Domain::new(pagefold_merge::Config::default()).unwrap();
        // Held: it stays when clients leave.
        let published = domain.pool().publish(&[&[7; PAGE_SIZE]]).unwrap();
        let slot = published.first;
        // The client's page is the slot's own here: it is in our table, as a file's, once it was read.
        let (read, shown) = domain.pool().with_page(slot, |page| (page[9], std::ptr::from_ref(page) as u64)).unwrap();
        assert_eq!(read, 7);
        for (byte, right) in [(7, true), (8, false)] {
            let id = domain.add(Box::new(OnePage(byte)));
            let own = File::open("/proc/self/pagemap");
            let mut comparer = Comparer::new(&domain, &own, HashMap::new());
            let pagemap = File::open("/proc/self/pagemap").unwrap();
            comparer.open.insert(id, Ok(Files { pagemap, memory: None }));
            let look = comparer.look_at(&[(id, shown, slot)]).pop().unwrap();
            assert_eq!(matches!(look, Look::SameFrame | Look::SameBytes), right, "{look:?}");
            assert_eq!(matches!(look, Look::Wrong(_)), !right, "{look:?}");
            domain.remove(id);
            assert_eq!(comparer.look_at(&[(id, shown, slot)]), [Look::Absent]);
        }
    }

    /// A client with pages that all read as this byte.
    struct OnePage(u8);

    impl Client for OnePage {
        fn generation(&mut self) -> u64 {
            0
        }
        fn regions(&mut self) -> Result<Option<Vec<Range>>, Gone> {
            Ok(None)
        }
        fn pool_mappings(&mut self) -> Result<Option<Vec<PoolMapping>>, Gone> {
            Ok(None)
        }
        fn watch(&mut self, _: &[Range]) -> Result<(), Gone> {
            Ok(())
        }
        fn touched(&mut self, _: Range, _: &mut Vec<Range>) -> Result<(), Gone> {
            Ok(())
        }
        fn written(&mut self, _: Range, _: bool, _: &mut Vec<Written>) -> Result<(), Gone> {
            Ok(())
        }
        fn broken(&mut self, _: Range, _: &mut Vec<Range>) -> Result<(), Gone> {
            Ok(())
        }
        fn fetch(&mut self, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone> {
            out[..runs.len()].fill([self.0; PAGE_SIZE]);
            readable[..runs.len()].fill(true);
            Ok(())
        }
        fn remap(&mut self, _: &Pool, _: &[RemapPiece], _: &mut Vec<Outcome>) -> Result<(), Gone> {
            Ok(())
        }
        fn heal(&mut self, _: &[Range], _: &mut Vec<bool>) -> Result<(), Gone> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_bounded_and_the_rest_is_counted() {
        let mut out = Vec::new();
        tell(&mut out, vec!["x".into(); WRONG_MAX], "pages");
        assert_eq!(out.len(), WRONG_MAX);
        tell(&mut out, vec!["x".into(); 250], "pages");
        assert_eq!((out.len(), out.last().unwrap().as_str()), (2 * WRONG_MAX + 1, "and 150 more pages"));
    }
}
