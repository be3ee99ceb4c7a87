//! When evicted pages are lost: an access to them raises SIGBUS then, and never reads other bytes.
//!
//! A dead daemon may get a successor, and its keeper holds what that needs: pages are lost only once neither can be reached.
//! The daemon does the same to evicted pages when it finds that the tier is gone.

use super::session::{ColdSession, RESIDENCY};
use crate::attached;
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
/// Pause between two attempts to reach daemon or keeper, in nanoseconds.
const LOOKS_NS: u64 = LOST_NS / 40;

/// Watches for the moment from which no process can bring pages back any more.
#[derive(Default)]
pub(super) struct DaemonLiveness {
    /// What the daemon's count was.
    beat: u32,
    looked_ns: u64,
    /// Since when neither daemon nor keeper could be reached; 0 while one can.
    alone_ns: u64,
}

impl DaemonLiveness {
    /// One that takes nothing for life but what comes from now on.
    pub(super) fn of(residency: &ResidencyMap) -> DaemonLiveness {
        DaemonLiveness { beat: residency.head().heartbeat.load(Ordering::Acquire), ..DaemonLiveness::default() }
    }

    /// Returns true if neither could be reached at the last attempt.
    pub(super) fn is_unreachable(&self) -> bool {
        self.alone_ns != 0
    }

    /// A daemon was reached.
    pub(super) fn note_alive(&mut self) {
        self.alone_ns = 0;
    }

    /// Returns true once neither could be reached for long. A live one may still bring the pages back: a successor of the
    /// daemon, or the keeper, which will start one.
    pub(super) fn is_lost(&mut self, residency: &ResidencyMap) -> bool {
        let now = sched::monotonic_ns();
        if now - self.looked_ns > LOOKS_NS {
            self.looked_ns = now;
            // A daemon also serves a client that cannot connect (a program with another root directory, or out of
            // descriptors).
            let beat = residency.head().heartbeat.load(Ordering::Acquire);
            let beats = beat != core::mem::replace(&mut self.beat, beat);
            if beats || attached::is_keeper_there() || is_served(read_settings().0) {
                self.alone_ns = 0;
            } else if self.alone_ns == 0 {
                self.alone_ns = now;
            }
        }
        self.is_unreachable() && now - self.alone_ns > LOST_NS
    }
}

/// Returns true if a process lives that has the evicted pages, or may have them: the daemon at `socket`, or its keeper.
fn is_served(socket: &[u8]) -> bool {
    accepts(socket) || keeper_accepts(socket)
}

fn keeper_accepts(socket: &[u8]) -> bool {
    let mut path = [0u8; 120];
    let len = socket.len() + KEEPER_SUFFIX.len();
    if len > path.len() {
        return false;
    }
    path[..socket.len()].copy_from_slice(socket);
    path[socket.len()..len].copy_from_slice(KEEPER_SUFFIX);
    accepts(&path[..len])
}

/// Returns true if a process listens at `path`, even if it accepts no connection now.
fn accepts(path: &[u8]) -> bool {
    matches!(sock::connect_within(path, ACCEPT_MS), Ok(_) | Err(Errno(libc::EAGAIN)))
}

impl ColdSession {
    /// Takes the owner lock from a daemon that is gone; a daemon that comes back finds its requests out of date.
    pub(super) fn force_lock(&self) {
        self.residency.head().epoch.fetch_add(1, Ordering::SeqCst);
        self.residency.head().owner.store(OWNER_AGENT, Ordering::SeqCst);
    }

    /// Poisons the evicted pages: an access raises SIGBUS, also one that waits now.
    pub(super) fn poison_all(&self) {
        // Without the mapping lock: its holder may be waiting for a daemon to read an event. Only this thread evicts pages.
        self.force_lock();
        poison_evicted(&self.hold, &self.residency);
        self.residency.head().moving_pages.store(0, Ordering::SeqCst);
        self.residency.unlock();
    }

    /// Reads the events that wait, in the place of a daemon that is gone. The owner lock is held.
    pub(super) fn apply_events(&self) {
        while let Ok(Some(event)) = self.hold.read_event_at_once() {
            apply_event(&self.residency, event);
        }
    }

    /// The evicted pages are lost: an access raises SIGBUS, and never reads other bytes. Everything else returns to the
    /// kernel, because the agent closes the last descriptor: waiting threads go on.
    pub(super) fn give_up(self) {
        self.poison_all();
        RESIDENCY.store(0, Ordering::Release);
        self.residency.head().client_id.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    /// A stopped daemon with a full queue of connections.
    #[test]
    fn a_daemon_that_accepts_no_connection_counts_as_alive() {
        let path = std::env::temp_dir().join(format!("pagefold-lives-{}", std::process::id()));
        let path = path.as_os_str().as_bytes();
        let listener = sock::listen(path).unwrap();
        while sock::connect_within(path, 1).is_ok() {}
        let (say, said) = std::sync::mpsc::channel();
        let socket = path.to_vec();
        std::thread::spawn(move || say.send(is_served(&socket)));
        assert_eq!(said.recv_timeout(std::time::Duration::from_secs(60)), Ok(true));
        drop(listener);
        assert!(!is_served(path));
        std::fs::remove_file(std::ffi::OsStr::from_bytes(path)).unwrap();
    }
}
