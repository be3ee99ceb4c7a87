//! The attached form: the agent in a program that runs already, static or not.
//!
//! A process that traces one thread of the program for a moment maps this code and starts its first thread
//! (`crates/entry`). No call of the program is interposed, so the agent relies on two other things: the kernel reports
//! discards, moves and forks of merged memory by the userfaultfd, and no thread of the program runs while the agent replaces
//! a mapping, because the daemon stops all of them for the length of that request. What the program said about its memory
//! the kernel tells ([`vm_flags`](crate::address_space::vm_flags)).
//!
//! [`entered`](crate::entered) is where the thread begins; `children` hands forked children to the keeper by the
//! `keeper_socket`; `c_functions` stands in for the C library.

mod c_functions;
mod children;
mod keeper_socket;

pub(crate) use children::adopt_child;
pub(crate) use keeper_socket::{is_open as is_keeper_there, new as new_keeper_socket};

use crate::owned_ranges::{self, Owned};
use crate::runtime::connection::ACCEPT_MS;
use crate::runtime::thread::exit_thread;
use crate::state::read_settings;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::Uffd;
use pagefold_os::{PAGE_SIZE, mem, sock, syscall};
use pagefold_protocol::entry::{EntryPage, order, stage};
use pagefold_protocol::message::{HELLO_ATTACHED, Packet};

/// How long a process that asks for a socket may take for it, in milliseconds: events of merged memory wait meanwhile.
const OFFER_MS: u32 = 200;

/// Sockets and userfaultfd that the entry left for the first connection; -1 once they are taken.
static GIVEN_SOCKET: AtomicI32 = AtomicI32::new(-1);
static GIVEN_HOLD: AtomicI32 = AtomicI32::new(-1);

fn take(given: &AtomicI32) -> Option<Fd> {
    let fd = given.swap(-1, Ordering::AcqRel);
    // SAFETY: the entry put a descriptor of this thread's there, and the swap hands it out once.
    (fd >= 0).then(|| unsafe { Fd::from_raw(fd) })
}

/// A connection to the daemon: at first the one to the daemon that entered. Later ones are by the path of its socket, or by
/// way of the keeper, or to a daemon that asks for one.
///
/// # Errors
/// As connect(2).
pub(crate) fn connect() -> Result<Fd> {
    if let Some(given) = take(&GIVEN_SOCKET) {
        return Ok(given);
    }
    if let Some(page) = page().filter(|page| page.order.load(Ordering::Acquire) == order::CONNECT) {
        return offer(page, OFFER_MS);
    }
    match sock::connect_within(read_settings().0, ACCEPT_MS) {
        Ok(socket) if is_trusted(&socket) => Ok(socket),
        _ => keeper_socket::connect(),
    }
}

/// Opens a socket for the process that enters or asks for one, and waits at most so long until that has the other end.
///
/// # Errors
/// As socketpair(2); `ECANCELED` if the process gives up, `ETIMEDOUT`.
pub(crate) fn offer(page: &EntryPage, patience_ms: u32) -> Result<Fd> {
    let (ours, theirs) = sock::pair()?;
    page.requests.store(theirs.raw(), Ordering::Relaxed);
    page.stage.store(stage::OPEN, Ordering::Release);
    for _ in 0..patience_ms {
        match page.order.load(Ordering::Acquire) {
            order::TAKEN => return Ok(ours),
            order::GIVE_UP => return Err(Errno(libc::ECANCELED)),
            _ => drop(pagefold_os::fd::poll(&mut [], 1)),
        }
    }
    // A process that asked may have been killed: the next one asks anew.
    let given_up = page.order.compare_exchange(order::CONNECT, order::TAKEN, Ordering::AcqRel, Ordering::Acquire);
    if given_up == Err(order::TAKEN) { Ok(ours) } else { Err(Errno(libc::ETIMEDOUT)) }
}

/// Whether the process at the other end may have the program's memory: it is of root, or of the program's user. Where the
/// program sees other files than the daemon, any process may listen at the path.
fn is_trusted(socket: &Fd) -> bool {
    sock::is_of_own_user(socket) || sock::peer(socket).is_ok_and(|peer| peer.uid == 0)
}

/// The agent's end of a new socket to the keeper, which has the other end.
pub(crate) fn begin_keeper_socket(ours: Fd) {
    keeper_socket::replace(ours);
    children::send_waiting();
}

/// The userfaultfd that reports forks, which the daemon enabled, once.
pub(crate) fn take_hold() -> Option<Uffd> {
    take(&GIVEN_HOLD).map(Uffd::from_fd)
}

/// The entry page.
static PAGE: AtomicU64 = AtomicU64::new(0);

fn page() -> Option<&'static EntryPage> {
    let at = PAGE.load(Ordering::Relaxed);
    // SAFETY: the page lies in the image, which stays mapped until the agent's last thread leaves.
    (at != 0).then(|| unsafe { &*(at as *const EntryPage) })
}

/// True once the daemon has told the agent to leave.
pub(crate) fn is_asked_to_leave() -> bool {
    page().is_some_and(|page| page.order.load(Ordering::Acquire) == order::LEAVE)
}

/// Says in a greeting by which entry the agent came, so that any daemon can take it out again.
pub(crate) fn describe_entry(hello: &mut Packet) {
    let image = owned_ranges::range_of(Owned::Image);
    hello.a |= HELLO_ATTACHED;
    (hello.b, hello.count, hello.sequence) = (image.start, image.len(), LEAVE_AT.load(Ordering::Relaxed));
}

/// Code outside of the image that unmaps a range and ends the thread; 0 if there is none.
static LEAVE_AT: AtomicU64 = AtomicU64::new(0);

/// Ends the agent's thread with all that is mapped for it.
pub(crate) fn leave() -> ! {
    let image = owned_ranges::range_of(Owned::Image);
    // All else was unmapped by its owner, and may be the program's by now. The nursery lies between two inaccessible pages.
    for (owned, beside) in
        [(Owned::Nursery, PAGE_SIZE as u64), (Owned::LoanStack, 0), (Owned::FaultInStack, 0), (Owned::ColdWakeup, 0)]
    {
        let range = owned_ranges::range_of(owned);
        if !range.is_empty() {
            // SAFETY: the range is the agent's, and this is its last thread.
            let _ = unsafe { mem::unmap(range.start - beside, range.len() + 2 * beside) };
        }
    }
    // The kernel would clear the word after the page is unmapped, and perhaps mapped anew.
    // SAFETY: the kernel forgets an address.
    let _ = unsafe { syscall!(libc::SYS_set_tid_address, 0) };
    let at = LEAVE_AT.load(Ordering::Relaxed);
    #[cfg(target_arch = "x86_64")]
    if at != 0 {
        // SAFETY: the entering process put code there that makes two calls, munmap(2) of the image and exit(2), and does not
        // return.
        unsafe {
            core::arch::asm!("jmp {at}", at = in(reg) at, in("rdi") image.start, in("rsi") image.len(), options(noreturn))
        }
    }
    let _ = at;
    exit_thread()
}

/// Remembers the entry page, by which the daemon tells the agent to leave.
pub(crate) fn keep_page(page: &'static EntryPage) {
    LEAVE_AT.store(page.leave_at, Ordering::Relaxed);
    PAGE.store(core::ptr::from_ref(page) as u64, Ordering::Relaxed);
}

/// Leaves the socket for the first connection, and for live merging the userfaultfd.
pub(crate) fn give(requests: Fd, hold: Option<Uffd>) {
    GIVEN_SOCKET.store(requests.into_raw(), Ordering::Release);
    GIVEN_HOLD.store(hold.map_or(-1, |hold| hold.into_fd().into_raw()), Ordering::Release);
}
