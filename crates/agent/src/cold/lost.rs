//! Pages that nobody can bring back any more: who touches them gets SIGBUS, never other bytes.
//!
//! A daemon that is gone may have a successor, and its keeper holds what that needs: pages are lost only once neither can be
//! reached. The daemon does the same to what is out when it finds that the tier is gone.

use super::{Cold, TABLE};
use crate::cold_table::{FROZEN, OUT, PACT_AGENT, RESIDENT, Table, VOID};
use crate::engine::TAKEN_MS;
use crate::shared::read_settings;
use crate::thread::yield_now;
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Errno;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, sched, sock};

const PAGE: u64 = PAGE_SIZE as u64;

/// How long daemon and keeper must both be out of reach, and no daemon serve the table, before pages that are out count as
/// lost, in nanoseconds.
const LOST_NS: u64 = if cfg!(test) { 200_000_000 } else { 10_000_000_000 };
/// Pause between two looks whether somebody is there, in nanoseconds.
const LOOKS_NS: u64 = LOST_NS / 40;

/// Name of the keeper's socket: the daemon's, and this behind it.
pub const KEEPER_SUFFIX: &[u8] = b".keeper";

/// Watches for the moment from which nobody can bring pages back any more.
#[derive(Default)]
pub(super) struct Vigil {
    /// What the daemon's count was.
    beat: u32,
    looked_ns: u64,
    /// Since when nobody was there; 0 while somebody is.
    alone_ns: u64,
}

impl Vigil {
    /// One that takes nothing for life but what comes from now on.
    pub(super) fn over(table: &Table) -> Vigil {
        Vigil { beat: table.head().beat.load(Ordering::Acquire), ..Vigil::default() }
    }

    /// Nobody was there at the last look.
    pub(super) fn is_alone(&self) -> bool {
        self.alone_ns != 0
    }

    /// Somebody is there.
    pub(super) fn begin_anew(&mut self) {
        self.alone_ns = 0;
    }

    /// True once nobody was there for long. Who lives may still bring the pages back: a successor, or the keeper that will
    /// have one.
    pub(super) fn is_over(&mut self, table: &Table) -> bool {
        let now = sched::monotonic_ns();
        if now - self.looked_ns > LOOKS_NS {
            self.looked_ns = now;
            // Who cannot reach it (a program with another root directory, or out of descriptors) is served all the same.
            let beat = table.head().beat.load(Ordering::Acquire);
            if beat != core::mem::replace(&mut self.beat, beat) || somebody_lives(read_settings().0) {
                self.alone_ns = 0;
            } else if self.alone_ns == 0 {
                self.alone_ns = now;
            }
        }
        self.is_alone() && now - self.alone_ns > LOST_NS
    }
}

/// Somebody lives who has what is out, or may have it: the daemon at `socket`, or its keeper.
fn somebody_lives(socket: &[u8]) -> bool {
    lives(socket) || keeper_lives(socket)
}

fn keeper_lives(socket: &[u8]) -> bool {
    let mut path = [0u8; 120];
    let len = socket.len() + KEEPER_SUFFIX.len();
    if len > path.len() {
        return false;
    }
    path[..socket.len()].copy_from_slice(socket);
    path[socket.len()..len].copy_from_slice(KEEPER_SUFFIX);
    lives(&path[..len])
}

/// Somebody listens at `path`, even if he has no time.
fn lives(path: &[u8]) -> bool {
    matches!(sock::connect_within(path, TAKEN_MS), Ok(_) | Err(Errno(libc::EAGAIN)))
}

impl Cold {
    /// Takes the pact from a daemon that is gone; one that comes back finds that what it had begun is void.
    pub(super) fn force_pact(&self) {
        self.table.head().epoch.fetch_add(1, Ordering::SeqCst);
        self.table.head().pact.store(PACT_AGENT, Ordering::SeqCst);
    }

    /// Who touches a page that is out gets SIGBUS, also who waits for it now.
    pub(super) fn lose_out(&self) {
        // Without the guard: who has it may be waiting for a daemon to read an event, and nobody moves pages but us.
        self.force_pact();
        poison_out(&self.hold, &self.table);
        self.table.head().moving.store(0, Ordering::SeqCst);
        self.table.free_pact();
    }

    /// Reads the events that wait, in the place of a daemon that is gone. The pact is held.
    pub(super) fn hear(&self) {
        while let Ok(Some(event)) = self.hold.read_event_at_once() {
            obey(&self.table, event);
        }
    }

    /// The pages that are out are lost: who touches them gets SIGBUS, not other bytes. Everything else is the kernel's
    /// again, for we are the last to hold the descriptor: who waited goes on.
    pub(super) fn give_up(self) {
        self.lose_out();
        TABLE.store(0, Ordering::Release);
        self.table.head().region.store(0, Ordering::Release);
    }
}

/// Makes every page that is out a SIGBUS; the pact is held. Returns how many.
pub fn poison_out(hold: &Uffd, table: &Table) -> u64 {
    let mut lost = 0;
    let mut heard = true;
    // What an mremap(2) takes away meanwhile may come to where we have been.
    while core::mem::take(&mut heard) {
        table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| {
            let (mut at, mut settled) = (start, start);
            let mut settle = |from: u64, to: u64| {
                for addr in (from..to).step_by(PAGE_SIZE) {
                    if table.set_state(addr, RESIDENT) == OUT {
                        lost += 1;
                    }
                }
            };
            let mut single = false;
            while at < end {
                // Within one mapping; a run may lie in several.
                let stop = if single { at + PAGE } else { end };
                let (done, error) = hold.poison(Range { start: at, end: stop }, 0);
                at += done;
                match error {
                    None => {}
                    // A discard or a move is under way, and nothing can be done before its event is read.
                    Some(Errno(libc::EAGAIN)) if hold.is_alive() => {
                        // What it moves to where we have been is out.
                        settle(settled, at);
                        settled = at;
                        // Never waits: that would be for the client, which may be the daemon's.
                        if hold.read_event_at_once().ok().flatten().is_some_and(|event| obey(table, event)) {
                            // The rest of the run may be no run any more.
                            heard = true;
                            break;
                        }
                        yield_now();
                    }
                    Some(Errno(libc::ENOMEM)) => yield_now(),
                    Some(_) if !single => single = true,
                    // There already, or nothing there any more.
                    Some(_) => at += PAGE,
                }
            }
            settle(settled, at);
            let _ = hold.wake(Range { start, end });
        });
    }
    table.head().lost.fetch_add(lost, Ordering::Relaxed);
    lost
}

/// Has the table say of pages that are out or in our hands what an event says; false if it says nothing of them.
fn obey(table: &Table, event: uffd::Event) -> bool {
    let leave = |range: Range, then: &mut dyn FnMut(u64)| {
        for (state, left) in [(OUT, RESIDENT), (FROZEN, VOID)] {
            table.for_each_run(range.start, range.end, state, |start, end| {
                for addr in (start..end).step_by(PAGE_SIZE) {
                    table.set_state(addr, left);
                    then(addr);
                }
            });
        }
    };
    match event {
        uffd::Event::Remove(range) | uffd::Event::Unmap(range) => leave(range, &mut |_| ()),
        uffd::Event::Remap { from, to } => {
            leave(Range { start: to, end: to.saturating_add(from.len()) }, &mut |_| ());
            // Neither can what we have in hand come in there, and nobody may read zeros: it is lost with what is out.
            leave(from, &mut |addr| {
                let addr = to + (addr - from.start);
                if table.find_or_add(addr).is_some() {
                    table.set_state(addr, OUT);
                }
            });
        }
        // SAFETY: the kernel made the descriptor for us just now.
        uffd::Event::Fork(fd) => lose_child(&Uffd::from_fd(unsafe { Fd::from_raw(fd) }), table),
        _ => return false,
    }
    true
}

/// A child loses what its parent lacks; everything else is the kernel's when its descriptor is let go. Until then it waits.
fn lose_child(child: &Uffd, table: &Table) {
    for state in [OUT, FROZEN] {
        table.for_each_run(0, u64::MAX >> 1, state, |start, end| lose_of_child(child, table, Range { start, end }, 0));
    }
}

/// What the parent lacks of `lacked` is lost where the child has it, `by` bytes further on.
fn lose_of_child(child: &Uffd, table: &Table, lacked: Range, by: u64) {
    let mut at = lacked.start;
    while at < lacked.end {
        // Page by page: a run may lie in several mappings, and the child may have given up some.
        let (_, error) = child.poison(Range::pages_from(at.wrapping_add(by), 1), 0);
        match error {
            Some(Errno(libc::EAGAIN)) if child.is_alive() => {
                match child.read_event_at_once() {
                    Ok(Some(uffd::Event::Fork(fd))) => {
                        // SAFETY: the kernel made the descriptor for us just now.
                        lose_child(&Uffd::from_fd(unsafe { Fd::from_raw(fd) }), table);
                    }
                    Ok(Some(uffd::Event::Remap { from, to })) => {
                        let by = to.wrapping_sub(from.start);
                        for state in [OUT, FROZEN] {
                            table.for_each_run(from.start, from.end, state, |start, end| {
                                lose_of_child(child, table, Range { start, end }, by);
                            });
                        }
                    }
                    _ => yield_now(),
                }
            }
            Some(Errno(libc::ENOMEM)) => yield_now(),
            // Done, or not the child's.
            _ => at += PAGE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::{fd, mem};
    use std::os::unix::ffi::OsStrExt;

    /// A child by a raw fork, of which no daemon hears any more.
    #[test]
    fn a_child_loses_what_its_parent_lacks() {
        let features = uffd::FEATURE_EVENT_FORK | uffd::FEATURE_POISON;
        let device = uffd::open_device().ok();
        let Ok(hold) = Uffd::new(device.as_ref(), features) else {
            return eprintln!("SKIPPED: no userfaultfd that hears of forks for us");
        };
        let map = mem::Mapping::anonymous(crate::cold_table::LEN).unwrap();
        // SAFETY: of that length, and mapped beyond the call.
        let table = unsafe { Table::at(map.addr()) };
        table.begin();
        let memory = mem::Mapping::anonymous(3 * PAGE_SIZE).unwrap();
        hold.register(Range::pages_from(memory.addr(), 3), uffd::MODE_MISSING).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        // They may lie in two chunks.
        for number in [0, 2] {
            table.find_or_add(page_at(number)).unwrap();
        }
        table.set_state(page_at(0), OUT);
        table.set_state(page_at(2), FROZEN);
        let child = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut polls = [libc::pollfd { fd: hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
                assert_eq!(fd::poll(&mut polls, 60_000), Ok(1), "no event of the fork");
                obey(&table, hold.read_event_at_once().unwrap().expect("an event"));
            });
            // SAFETY: by a bare call; the child allocates nothing, and ends.
            unsafe {
                let child = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32;
                if child == 0 {
                    let is_there = |number| crate::cold::back::read_in(Range::pages_from(page_at(number), 1));
                    let seen = (0..3).map(|number| i32::from(is_there(number)) << number).sum();
                    libc::_exit(seen);
                }
                child
            }
        });
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 2), "bits of pages that read zeros");
        assert_eq!((table.state(page_at(0)), table.state(page_at(2))), (OUT, FROZEN), "the parent has lost nothing");
    }

    #[test]
    fn what_is_moved_out_of_our_hands_is_out() {
        let map = mem::Mapping::anonymous(crate::cold_table::LEN).unwrap();
        // SAFETY: of that length, and mapped beyond the call.
        let table = unsafe { Table::at(map.addr()) };
        table.begin();
        let chunk = |number: u64| number * crate::cold_table::CHUNK_BYTES;
        table.find_or_add(chunk(1)).unwrap();
        table.set_state(chunk(1), FROZEN);
        table.set_state(chunk(1) + PAGE, OUT);
        assert!(obey(&table, uffd::Event::Remap { from: Range::pages_from(chunk(1), 3), to: chunk(2) }));
        assert_eq!([0, 1, 2].map(|page| table.state(chunk(1) + page * PAGE)), [VOID, RESIDENT, RESIDENT]);
        assert_eq!([0, 1, 2].map(|page| table.state(chunk(2) + page * PAGE)), [OUT, OUT, RESIDENT]);
    }

    /// One that stands still has no place left for who asks.
    #[test]
    fn a_daemon_that_takes_no_connections_lives_and_holds_nobody_up() {
        let path = std::env::temp_dir().join(format!("pagefold-lives-{}", std::process::id()));
        let path = path.as_os_str().as_bytes();
        let listener = sock::listen(path).unwrap();
        while sock::connect_within(path, 1).is_ok() {}
        let (say, said) = std::sync::mpsc::channel();
        let socket = path.to_vec();
        std::thread::spawn(move || say.send(somebody_lives(&socket)));
        assert_eq!(said.recv_timeout(std::time::Duration::from_secs(60)), Ok(true));
        drop(listener);
        assert!(!somebody_lives(path));
        std::fs::remove_file(std::ffi::OsStr::from_bytes(path)).unwrap();
    }
}
