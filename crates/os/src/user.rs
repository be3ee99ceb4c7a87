//! Which user this thread is.

use crate::syscall;

/// Its effective user.
pub fn effective() -> u32 {
    // SAFETY: the call takes nothing and cannot fail.
    unsafe { syscall!(libc::SYS_geteuid) }.map_or(u32::MAX, |user| user as u32)
}
