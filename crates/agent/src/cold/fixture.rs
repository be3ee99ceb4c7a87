//! A session as a daemon's handshake leaves it, for tests, without a daemon.

use super::handshake::set_up;
use super::session::{ColdSession, Connection};
use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, Range, mem, uffd};
use pagefold_protocol::channel::Channel;
use std::sync::Mutex;
use std::time::Duration;

/// The longest that a test waits for what must happen.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Tests of leaving agents share statics and take turns.
pub(super) static LEAVING: Mutex<()> = Mutex::new(());

/// A session; its userfaultfd watches two pages of memory, the second of them present. Where the kernel gives this process
/// no userfaultfd, the function prints SKIPPED and returns `None`.
pub(super) fn connected() -> Option<(ColdSession, Connection, mem::Mapping)> {
    connected_with(uffd::FEATURE_EVENT_REMOVE)
}

/// As [`connected`], with these events of the userfaultfd enabled.
pub(super) fn connected_with(events: u64) -> Option<(ColdSession, Connection, mem::Mapping)> {
    let channel = Channel::create(c"channel").unwrap();
    let mut cold = None;
    if set_up(&mut cold, &channel, uffd::open_device().ok().as_ref()).is_err() {
        eprintln!("SKIPPED: no userfaultfd for us");
        return None;
    }
    let cold = cold.unwrap();
    let features =
        uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_MOVE | uffd::FEATURE_POISON | events;
    cold.hold.enable(features).unwrap();
    let memory = mem::Mapping::anonymous(2 * PAGE_SIZE).unwrap();
    // SAFETY: inside the test's memory.
    unsafe { memory.as_ptr().add(PAGE_SIZE).write_bytes(7, PAGE_SIZE) };
    let range = Range::pages_from(memory.addr(), 2);
    cold.hold.register(range, uffd::MODE_MISSING | uffd::MODE_WP).unwrap();
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the descriptor has one owner.
    let socket = unsafe { Fd::from_raw(std::os::fd::IntoRawFd::into_raw_fd(socket)) };
    Some((cold, Connection { socket, channel, epoch: 0 }, memory))
}
