//! Pages that nobody can bring back any more: who touches them gets SIGBUS, never other bytes.
//!
//! A daemon that is gone may have a successor, and its keeper holds what that needs: pages are lost only once neither can be
//! reached. The daemon does the same to what is out when it finds that the tier is gone.

use super::session::{Cold, TABLE};
use crate::runtime::connection::ACCEPT_MS;
use crate::state::read_settings;
use core::sync::atomic::Ordering;
use pagefold_os::raw::Errno;
use pagefold_os::{sched, sock};
use pagefold_protocol::message::KEEPER_SUFFIX;
use pagefold_protocol::residency_map::{OWNER_AGENT, ResidencyMap, apply_event, poison_evicted};

/// How long daemon and keeper must both be out of reach, and no daemon serve the table, before pages that are out count as
/// lost, in nanoseconds.
const LOST_NS: u64 = if cfg!(test) { 200_000_000 } else { 10_000_000_000 };
/// Pause between two looks whether somebody is there, in nanoseconds.
const LOOKS_NS: u64 = LOST_NS / 40;

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
    pub(super) fn over(table: &ResidencyMap) -> Vigil {
        Vigil { beat: table.head().heartbeat.load(Ordering::Acquire), ..Vigil::default() }
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
    pub(super) fn is_over(&mut self, table: &ResidencyMap) -> bool {
        let now = sched::monotonic_ns();
        if now - self.looked_ns > LOOKS_NS {
            self.looked_ns = now;
            // Who cannot reach it (a program with another root directory, or out of descriptors) is served all the same.
            let beat = table.head().heartbeat.load(Ordering::Acquire);
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
    matches!(sock::connect_within(path, ACCEPT_MS), Ok(_) | Err(Errno(libc::EAGAIN)))
}

impl Cold {
    /// Takes the pact from a daemon that is gone; one that comes back finds that what it had begun is void.
    pub(super) fn force_pact(&self) {
        self.table.head().epoch.fetch_add(1, Ordering::SeqCst);
        self.table.head().owner.store(OWNER_AGENT, Ordering::SeqCst);
    }

    /// Who touches a page that is out gets SIGBUS, also who waits for it now.
    pub(super) fn lose_out(&self) {
        // Without the guard: who has it may be waiting for a daemon to read an event, and nobody moves pages but us.
        self.force_pact();
        poison_evicted(&self.hold, &self.table);
        self.table.head().moving_pages.store(0, Ordering::SeqCst);
        self.table.unlock();
    }

    /// Reads the events that wait, in the place of a daemon that is gone. The pact is held.
    pub(super) fn hear(&self) {
        while let Ok(Some(event)) = self.hold.read_event_at_once() {
            apply_event(&self.table, event);
        }
    }

    /// The pages that are out are lost: who touches them gets SIGBUS, not other bytes. Everything else is the kernel's
    /// again, for we are the last to hold the descriptor: who waited goes on.
    pub(super) fn give_up(self) {
        self.lose_out();
        TABLE.store(0, Ordering::Release);
        self.table.head().client_id.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

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
