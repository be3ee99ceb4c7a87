//! Ranges of addresses as calls of the program name them.

use crate::address_space::maps::Maps;
use core::ffi::c_void;
use pagefold_os::raw::Result;
use pagefold_os::{PAGE_SIZE, Range};

const PAGE: u64 = PAGE_SIZE as u64;

/// The pages of `len` bytes at `addr`; nothing where the kernel refuses that address or length, and changes nothing.
pub(super) fn range_of(addr: *mut c_void, len: usize) -> Option<Range> {
    let start = addr as u64;
    let end = start.checked_add((len as u64).checked_next_multiple_of(PAGE)?)?;
    start.is_multiple_of(PAGE).then_some(Range { start, end })
}

/// Calls `act` with what is mapped of `range`.
pub(super) fn for_each_mapped(range: Range, mut act: impl FnMut(Range)) -> Result<()> {
    // On the stack, small as that may be: what was mapped for it might lie in a hole of the range.
    let mut buffer = [0u8; 2 << 10];
    Maps::open()?.for_each(&mut buffer, |map| {
        if map.range.overlaps(&range) {
            act(map.range.intersection(&range));
        }
    })
}
