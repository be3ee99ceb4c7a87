//! Children that the program forks while it is merged. No agent is in them, so the daemon answers for their memory, and while
//! there is no daemon the agent of their parent does.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use pagefold_os::uffd::Uffd;
use pagefold_protocol::forked_memory::{ForkedMemory, fill};
use pagefold_protocol::message::{Op, Packet};

/// Children that the agent answers for at most. A child beyond them waits at its first discard until the daemon is back.
pub(crate) const CHILDREN_MAX: usize = 32;

/// Where the daemon takes children over; -1 if it is gone.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

struct Kept(UnsafeCell<[Option<ForkedMemory>; CHILDREN_MAX]>);

// SAFETY: only the agent's first thread, which reads the events of forks, reaches the children.
unsafe impl Sync for Kept {}

static KEPT: Kept = Kept(UnsafeCell::new([const { None }; CHILDREN_MAX]));
/// Children in `KEPT`.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Children go to `socket` from now on.
pub(crate) fn begin(socket: Fd) {
    SOCKET.store(socket.into_raw(), Ordering::Relaxed);
}

#[allow(clippy::mut_from_ref)]
fn kept() -> &'static mut [Option<ForkedMemory>; CHILDREN_MAX] {
    // SAFETY: only the agent's first thread calls this, and no caller keeps the reference while another is made.
    unsafe { &mut *KEPT.0.get() }
}

/// Takes charge of a child that was just forked; `fd` is the descriptor that the kernel made for it. What its parent had discarded
/// is filled first, for the child's own list begins empty.
pub(crate) fn adopt_child(fd: i32, for_each_discarded: impl FnOnce(&dyn Fn(pagefold_os::Range))) {
    // SAFETY: the kernel made the descriptor for the reader of the event, and it is wrapped once.
    let child = Uffd::from_fd(unsafe { Fd::from_raw(fd) });
    for_each_discarded(&|range| fill(&child, range));
    hand_over(child);
}

fn hand_over(child: Uffd) {
    let socket = SOCKET.load(Ordering::Relaxed);
    if socket >= 0 {
        // SAFETY: the descriptor is open, and this value never closes it.
        let socket = core::mem::ManuallyDrop::new(unsafe { Fd::from_raw(socket) });
        if sock::send(&socket, Packet::new(Op::ForkedChild).bytes(), &[child.fd().raw()]).is_ok() {
            return;
        }
    }
    match kept().iter_mut().find(|place| place.is_none()) {
        Some(place) => {
            *place = Some(ForkedMemory::new(child));
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
        // Closing it would let the child read old bytes.
        None => core::mem::forget(child),
    }
}

/// The descriptors to wait for, in the first places of `polls`; returns how many.
pub(crate) fn fds(polls: &mut [libc::pollfd]) -> usize {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    let mut count = 0;
    for (poll, child) in polls.iter_mut().zip(kept().iter().flatten()) {
        *poll = libc::pollfd { fd: child.uffd().fd().raw(), events: libc::POLLIN, revents: 0 };
        count += 1;
    }
    count
}

/// Answers what waits in the children, and forgets those that have ended.
pub(crate) fn serve() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    for index in 0..CHILDREN_MAX {
        let mut born: [Option<Uffd>; 8] = [const { None }; 8];
        let place = &mut kept()[index];
        let Some(child) = place else { continue };
        child.serve(|uffd| match born.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(uffd),
            None => core::mem::forget(uffd),
        });
        if !child.uffd().is_alive() {
            *place = None;
            COUNT.fetch_sub(1, Ordering::Relaxed);
        }
        born.into_iter().flatten().for_each(hand_over);
    }
}
