//! The socket between the agent and the keeper, or the daemon if it has no keeper. Forked children go by it, and an agent
//! asks by it for a connection to the daemon: the program may have another root directory, another mount namespace, or
//! another user than the daemon, and then no path leads to the daemon's socket.

use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicI32, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::sock;
use pagefold_os::syscall;
use pagefold_protocol::message::{Op, Packet};

/// How long a keeper may take to make room for a packet, in milliseconds.
const SEND_MS: u64 = 100;

/// The agent's end; -1 if there is none. Once there is one, its number stays open until the agent's last thread ends.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

fn socket() -> Option<ManuallyDrop<Fd>> {
    let fd = SOCKET.load(Ordering::Relaxed);
    // SAFETY: the descriptor is open, and this value never closes it.
    (fd >= 0).then(|| ManuallyDrop::new(unsafe { Fd::from_raw(fd) }))
}

/// True as long as the other end is open: keeper or daemon live.
pub(crate) fn is_open() -> bool {
    socket().is_some_and(|socket| sock::is_open(&socket))
}

/// A new socket, both ends. Each daemon gets one: it gives the other end to each keeper that it has.
pub(crate) fn new() -> Result<Option<(Fd, Fd)>> {
    let (ours, theirs) = sock::pair()?;
    sock::set_timeout(&ours, SEND_MS)?;
    Ok(Some((ours, theirs)))
}

/// `socket` takes the place of the one before. Another thread may be sending by that, so the number stays.
pub(super) fn replace(socket: Fd) {
    match self::socket() {
        None => SOCKET.store(socket.into_raw(), Ordering::Relaxed),
        Some(before) => {
            // SAFETY: dup3(2) takes no pointer. The number is this module's, and stands for the new socket from now on.
            let _ = unsafe { syscall!(libc::SYS_dup3, socket.raw(), before.raw(), libc::O_CLOEXEC) };
        }
    }
}

/// Sends `fd` to the keeper.
///
/// # Errors
/// `ENOTCONN` if there is no socket; as sendmsg(2).
pub(super) fn send(op: Op, carried: &Fd) -> Result<()> {
    let socket = socket().ok_or(Errno(libc::ENOTCONN))?;
    sock::send(&socket, Packet::new(op).bytes(), &[carried.raw()])
}

/// A connection to the daemon, by way of the keeper. It ends at once where there is no daemon.
///
/// # Errors
/// As socketpair(2) and [`send`].
pub(super) fn connect() -> Result<Fd> {
    let (ours, theirs) = sock::pair()?;
    send(Op::Connect, &theirs)?;
    Ok(ours)
}
