//! Segments of an earlier pool: of a daemon that ended, or of a domain that was empty for a while.
//!
//! Programs map them still, and the kernel keeps them as long. A pool takes such a file in if it is one that only a pool of
//! the same domain can have made, and that no process can change any more:
//!
//! - It belongs to the user of this daemon. A client of another user cannot make such a file.
//! - It carries the domain's name, and its group is the domain's user where that is not the daemon's. Only the daemon's
//!   user sets either, so a file that a client of one domain hands to a client of another is refused.
//! - It has the length of a segment and can neither shrink nor grow: reading it never raises SIGBUS.
//! - It cannot be written. A segment that was being filled when its daemon ended is sealed first; the kernel refuses that
//!   while there is a writable mapping.
//!
//! Where daemon and client have the same user the first two prove nothing: such a client may do to the daemon what it
//! likes. The last two hold there too, so a forged file is worth what any page of that client is: bytes that do not change,
//! and that are compared before they are shared.

use crate::segment::{SEGMENT_LEN, SLOTS_PER_SEGMENT, file_name};
use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, memfd, user};

/// Why a file is not taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another user made it, or it was made for another domain.
    #[error("it was not made for this domain")]
    NotOurs,
    /// It is no segment, or can be changed.
    #[error("it is not sealed")]
    NotSealed,
    /// The pool has its largest size, or the process no descriptor or mapping left.
    #[error("the pool has no room for it")]
    NoRoom,
    /// The kernel refused a call.
    #[error("{0}")]
    System(pagefold_os::Errno),
}

impl From<pagefold_os::Errno> for Refused {
    fn from(errno: pagefold_os::Errno) -> Refused {
        Refused::System(errno)
    }
}

/// A file that passed [`check`].
#[derive(Debug)]
pub struct Sealed {
    pub reader: Fd,
    /// Slots that were written.
    pub slots: u32,
}

/// Checks that `file` is a segment of an earlier pool of this name and user, with this inode, and seals it.
pub fn check(file: &Fd, inode: u64, pool: &str, user: Option<u32>) -> Result<Sealed, Refused> {
    if !memfd::is_one(file) {
        return Err(Refused::NotSealed);
    }
    // Not the descriptor that a client gave: what that may be used for is its own choice.
    let reader = memfd::reopen_read_only(file)?;
    let (owner, group) = memfd::owner_and_group(&reader)?;
    let made_for = if user.is_none_or(|user| user == owner) { None } else { user };
    let path = std::fs::read_link(format!("/proc/self/fd/{}", reader.raw())).unwrap_or_default();
    let name = format!("/memfd:{} (deleted)", file_name(pool));
    if owner != user::effective() || made_for.is_some_and(|user| user != group) || path.as_os_str() != name.as_str() {
        return Err(Refused::NotOurs);
    }
    let (len, its_inode) = memfd::len_and_inode(reader.raw())?;
    if len != SEGMENT_LEN as u64 || its_inode != inode || memfd::page_size(reader.raw())? != PAGE_SIZE as u64 {
        return Err(Refused::NotSealed);
    }
    if !is_sealed(&reader)? {
        return Err(Refused::NotSealed);
    }
    // Pages beyond the last one written do not exist, and to read one would make it.
    let slots = (memfd::first_hole(&reader)? / PAGE_SIZE as u64).min(u64::from(SLOTS_PER_SEGMENT)) as u32;
    Ok(Sealed { reader, slots })
}

/// Returns whether the file can be changed by no process; seals one that was being filled.
fn is_sealed(file: &Fd) -> Result<bool, Refused> {
    const LENGTH: i32 = memfd::SEAL_SHRINK | memfd::SEAL_GROW;
    let seals = memfd::seals(file)?;
    if seals & LENGTH != LENGTH {
        return Ok(false);
    }
    if seals & memfd::SEAL_WRITE != 0 {
        return Ok(true);
    }
    // Its own daemon may not have ended completely, or a page of it may be pinned: then it is tried again.
    Ok(seals & memfd::SEAL_FUTURE_WRITE != 0 && seal(file).is_ok())
}

/// Seals need a descriptor that could write, for which the owner needs the right. The seals on it forbid the writing itself.
fn seal(file: &Fd) -> pagefold_os::raw::Result<()> {
    memfd::set_mode(file, 0o600)?;
    let writer = memfd::reopen(file, libc::O_RDWR);
    let sealed = writer.and_then(|writer| memfd::add_seals(&writer, memfd::SEAL_WRITE | memfd::SEAL_SEAL));
    let _ = memfd::set_mode(file, 0o400);
    sealed
}
