//! Which memory `--manage all` manages of what the program maps.

use crate::range_attributes::Attributes;
use core::ffi::c_int;

/// Asks for low addresses, where an architecture knows that.
#[cfg(target_arch = "x86_64")]
const MAP_LOW: c_int = libc::MAP_32BIT;
#[cfg(not(target_arch = "x86_64"))]
const MAP_LOW: c_int = 0;

pub(super) const OPEN: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Returns true for private memory of the usual kind, which may be placed anywhere.
pub(super) fn is_plain(prot: c_int, flags: c_int) -> bool {
    flags & (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
        && flags & (libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED | MAP_LOW) == 0
        && prot & libc::PROT_EXEC == 0
}

/// Returns true for memory that `--manage all` manages where it is open.
pub(super) fn is_manageable(prot: c_int, flags: c_int) -> bool {
    is_plain(prot, flags) && matches!(prot, OPEN | libc::PROT_NONE)
}

/// Notes that the end of memory is seen. What the program opens later, it opens and ends by calls that are seen.
pub(super) fn mark(note: &mut Attributes, prot: c_int, is_large: bool) {
    *if is_large && prot == OPEN { &mut note.seen } else { &mut note.reserved } = true;
}
