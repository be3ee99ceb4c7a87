//! Children that the program forks while it is merged. No agent is in them, so the keeper answers for their memory, or the
//! daemon if it has no keeper. While neither is there the agent of their parent holds their descriptors: the children wait
//! rather than read old bytes.

use core::sync::atomic::{AtomicI32, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use pagefold_os::uffd::Uffd;
use pagefold_protocol::forked_memory::fill;
use pagefold_protocol::message::{Op, Packet};

/// Children that wait for a keeper at most; with as many descriptors most programs have no other left.
const WAITING_MAX: usize = 1024;
/// How long a keeper may take to make room for a child, in milliseconds.
const SEND_MS: u64 = 100;

/// The socket by which children go to the keeper or the daemon; -1 if there is none.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
/// Descriptors of children that wait, -1 in free places. Only the agent's first thread reads the events of forks, and
/// connects.
static WAITING: [AtomicI32; WAITING_MAX] = [const { AtomicI32::new(-1) }; WAITING_MAX];

/// The socket by which children go, to be polled for its end: the keeper may end before the daemon does.
pub(crate) fn socket() -> i32 {
    SOCKET.load(Ordering::Relaxed)
}

/// A socket for children, both ends, if the one there was leads nowhere any more.
pub(crate) fn new_socket() -> pagefold_os::raw::Result<Option<(Fd, Fd)>> {
    let mut poll = [libc::pollfd { fd: socket(), events: 0, revents: 0 }];
    if poll[0].fd >= 0 && pagefold_os::fd::poll(&mut poll, 0) == Ok(0) {
        return Ok(None);
    }
    let (ours, theirs) = sock::pair()?;
    sock::set_timeout(&ours, SEND_MS)?;
    Ok(Some((ours, theirs)))
}

/// Children go to `socket` from now on, those that wait first.
pub(crate) fn begin(socket: Fd) {
    let before = SOCKET.swap(socket.into_raw(), Ordering::Relaxed);
    if before >= 0 {
        // SAFETY: this module owned it, and nothing uses it any more.
        drop(unsafe { Fd::from_raw(before) });
    }
    for place in &WAITING {
        let fd = place.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the place owned it.
            hand_over(Uffd::from_fd(unsafe { Fd::from_raw(fd) }));
        }
    }
}

/// Takes charge of a child that was just forked; `fd` is the descriptor that the kernel made for it. What its parent had
/// discarded is filled first, for the child's own list begins empty.
pub(crate) fn adopt_child(fd: i32, for_each_discarded: impl FnOnce(&dyn Fn(pagefold_os::Range))) {
    // SAFETY: the kernel made the descriptor for the reader of the event, and it is wrapped once.
    let child = Uffd::from_fd(unsafe { Fd::from_raw(fd) });
    for_each_discarded(&|range| fill(&child, range));
    hand_over(child);
}

fn hand_over(child: Uffd) {
    let fd = socket();
    if fd >= 0 {
        // SAFETY: the descriptor is open, and this value never closes it.
        let socket = core::mem::ManuallyDrop::new(unsafe { Fd::from_raw(fd) });
        if sock::send(&socket, Packet::new(Op::ForkedChild).bytes(), &[child.fd().raw()]).is_ok() {
            return;
        }
    }
    // Closing it would let the child read old bytes.
    let fd = child.into_fd().into_raw();
    let free = WAITING.iter().find(|place| place.load(Ordering::Relaxed) < 0);
    free.iter().for_each(|place| place.store(fd, Ordering::Relaxed));
}
