//! Children that the program forks while it is merged. No agent is in them, so the keeper answers for their memory, or the
//! daemon if it has no keeper. While neither is there the agent of their parent holds their descriptors: the children wait
//! rather than read old bytes.

use super::keeper_socket;
use core::sync::atomic::{AtomicI32, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::uffd::Uffd;
use pagefold_protocol::forked_memory::fill;
use pagefold_protocol::message::Op;

/// Children that wait for a keeper at most; with as many descriptors most programs have no other left.
const WAITING_MAX: usize = 1024;

/// Descriptors of children that wait, -1 in free places. Only the agent's first thread reads the events of forks, and
/// connects.
static WAITING: [AtomicI32; WAITING_MAX] = [const { AtomicI32::new(-1) }; WAITING_MAX];

/// The keeper may have room for those that wait.
pub(super) fn send_waiting() {
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
    if keeper_socket::send(Op::ForkedChild, child.fd()).is_ok() {
        return;
    }
    // Closing it would let the child read old bytes.
    let fd = child.into_fd().into_raw();
    let free = WAITING.iter().find(|place| place.load(Ordering::Relaxed) < 0);
    free.iter().for_each(|place| place.store(fd, Ordering::Relaxed));
}
