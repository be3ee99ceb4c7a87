//! Which memory `--manage all` manages of what the program maps.

use crate::range_attributes::Attributes;
use core::ffi::c_int;
use pagefold_os::mem::READ_WRITE;

/// Asks for low addresses, where an architecture knows that.
#[cfg(target_arch = "x86_64")]
const MAP_LOW: c_int = libc::MAP_32BIT;
#[cfg(not(target_arch = "x86_64"))]
const MAP_LOW: c_int = 0;

/// Returns true if memory with these rights is open: the program reads and writes it, and perhaps executes it.
pub(super) fn is_open(prot: c_int) -> bool {
    prot & !libc::PROT_EXEC == READ_WRITE
}

/// Returns true for private memory of the usual kind, which may be placed anywhere. Code may have to be near other code.
pub(super) fn is_plain(prot: c_int, flags: c_int) -> bool {
    is_private(flags) && prot & libc::PROT_EXEC == 0
}

fn is_private(flags: c_int) -> bool {
    flags & (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
        && flags & (libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED | MAP_LOW) == 0
}

/// Returns true for memory that `--manage all` manages where it is open.
pub(super) fn is_manageable(prot: c_int, flags: c_int) -> bool {
    is_private(flags) && (is_open(prot) || prot == libc::PROT_NONE)
}

/// Notes that the end of memory is seen. What the program opens later, it opens and ends by calls that are seen.
pub(super) fn mark(note: &mut Attributes, prot: c_int, is_large: bool) {
    *if is_large && is_open(prot) { &mut note.seen } else { &mut note.reserved } = true;
}
