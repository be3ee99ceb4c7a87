//! Reaching the daemon: how long the agent's threads wait for it, and which refusals are final.

use core::sync::atomic::{AtomicU32, Ordering};
use pagefold_os::fd::{self, Fd};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::sched;

/// Pause before the agent tries again after it could not set itself up, in milliseconds.
pub(crate) const REFUSED_MS: i32 = 10_000;

/// How long the agent waits for a daemon that listens but accepts no connections, in milliseconds.
pub(crate) const ACCEPT_MS: u64 = 20;

/// How long the agent waits for the daemon's answer to `Hello`, in milliseconds.
pub(crate) const ANSWER_MS: u64 = 10_000;
/// The same for an agent that is about to leave.
const LEAVING_ANSWER_MS: u64 = 1_000;

/// Waits until the daemon has answered on `socket`, and calls `serve` when `beside` is readable and now and then.
///
/// # Errors
/// `ETIMEDOUT` if the daemon does not answer in time, or if `phase` changes.
pub(crate) fn wait_for_answer(socket: &Fd, phase: &AtomicU32, beside: i32, mut serve: impl FnMut()) -> Result<()> {
    let (began, at_first) = (sched::monotonic_ns(), phase.load(Ordering::Acquire));
    let limit_ms = if at_first == 1 { ANSWER_MS } else { LEAVING_ANSWER_MS };
    while phase.load(Ordering::Acquire) == at_first && sched::monotonic_ns() - began < limit_ms * 1_000_000 {
        let mut polls = [socket.raw(), beside].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        fd::poll(&mut polls, 20)?;
        if polls[0].revents != 0 {
            return Ok(());
        }
        serve();
    }
    Err(Errno(libc::ETIMEDOUT))
}

/// Returns true if the cause of `errno` will not pass. A lack of memory, descriptors and the like passes.
pub(crate) fn is_lasting(errno: Errno) -> bool {
    matches!(errno.0, libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP)
}
