//! Plain memory: how it is watched for writes, and how it takes the place of what was merged.
//!
//! What replaces a mapping of the pool's must look as if nothing had been merged, so it gets the rights of the old one and
//! all attributes that the program gave to the range.

use crate::address_space::maps::Maps;
use crate::range_attributes::{Attributes, RangeAttributes};
use crate::state::is_lent;
use core::ffi::c_int;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Range, mem};

/// Watches plain memory, unless it is the cold tier's for a while: its own descriptor has it then.
///
/// # Errors
/// As the kernel says; something other than plain memory lies there.
pub(crate) fn watch_anonymous(watch: &Uffd, range: Range) -> Result<()> {
    if is_lent() { Err(Errno(libc::EBUSY)) } else { watch.register(range, uffd::MODE_WP) }
}

/// Puts the attributes that `table` knows for `range` onto the mapping there, which is `plain` memory or the pool's.
pub(crate) fn keep_attributes(range: Range, table: &RangeAttributes, plain: bool) {
    let mut at = range.start;
    while at < range.end {
        let (end, note) = table.stretch(at, range.end);
        put_attributes(Range { start: at, end }, &note, plain);
        at = end;
    }
}

/// Puts the attributes of `note` onto the mapping at `range`, which is `plain` memory or the pool's.
fn put_attributes(range: Range, note: &Attributes, plain: bool) {
    let wanted = [
        (note.dont_fork, libc::MADV_DONTFORK),
        (note.wipe_on_fork && plain, libc::MADV_WIPEONFORK),
        (note.dont_dump, libc::MADV_DONTDUMP),
        (note.mergeable || note.handed && plain, libc::MADV_MERGEABLE),
        (note.huge, libc::MADV_HUGEPAGE),
        (note.small && plain, libc::MADV_NOHUGEPAGE),
    ];
    for (set, advice) in wanted {
        if set {
            // SAFETY: these attributes change no content.
            let _ = unsafe { mem::advise(range.start, range.len(), advice) };
        }
    }
}

/// Puts what keeps the memory at `range` from children and dumps onto `fresh`, plain memory that is to replace all of it:
/// see [`map_over`]. Where only part of `range` is kept from them this does nothing.
pub(crate) fn keep_from_copies(fresh: Range, range: Range, table: &RangeAttributes) {
    let (end, note) = table.alike_for_copies(range);
    if end == range.end && note.is_kept_from_copies() {
        put_attributes(fresh, &note, true);
    }
}

/// Maps `source`, a descriptor and an offset, or fresh memory if it is `None`, in the place of what lies at `range`, for a
/// program that gave all of `range` the attributes `note`.
///
/// Memory that no child and no dump may have gets these attributes elsewhere, before it comes to `range`: another thread may
/// fork by a bare call, or crash, at any moment. Other attributes may follow later. Fresh memory comes without them where
/// the kernel has no room for both mappings: a discard must not fail for that, and shows no old byte.
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// As mmap(2) with `MAP_FIXED`.
pub(crate) unsafe fn map_over(
    range: Range,
    rights: c_int,
    source: Option<(c_int, u64)>,
    note: &Attributes,
) -> Result<()> {
    let (kind, fd, offset) = match source {
        Some((fd, offset)) => (0, fd, offset),
        None => (libc::MAP_ANONYMOUS, -1, 0),
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | kind;
    if note.is_kept_from_copies() {
        // SAFETY: a new mapping where nothing lies.
        let aside = unsafe { mem::map(mem::wish(range.len()), range.len(), rights, flags, fd, offset) };
        // SAFETY: as the caller promised.
        let moved = aside.and_then(|aside| unsafe { move_over(range, aside, note, source.is_none()) });
        if moved.is_ok() || source.is_some() {
            return moved;
        }
    }
    // SAFETY: as the caller promised.
    unsafe { mem::map(range.start, range.len(), rights, flags | libc::MAP_FIXED, fd, offset) }.map(|_| ())
}

/// Moves the mapping at `aside`, which is as long as `range`, there, with the attributes of `note`; if that fails it is
/// unmapped.
///
/// # Safety
/// As mmap(2) with `MAP_FIXED` of `range`; no other thread knows the mapping at `aside`.
unsafe fn move_over(range: Range, aside: u64, note: &Attributes, plain: bool) -> Result<()> {
    let len = range.len();
    put_attributes(Range { start: aside, end: aside + len }, note, plain);
    // SAFETY: as the caller promised.
    let moved = unsafe { mem::remap(aside, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, range.start) };
    moved.map(|_| ()).inspect_err(|_| {
        // SAFETY: nothing uses the mapping.
        let _ = unsafe { mem::unmap(aside, len) };
    })
}

/// Replaces every pool mapping in `range` by fresh anonymous memory, as a discard of anonymous memory would leave it,
/// with the rights of the old one and the attributes in `table`. Calls `refused` for each that the kernel does not replace,
/// with its rights.
///
/// # Errors
/// If the mappings cannot be read, or the kernel refuses one.
pub fn replace_merged(
    maps: &Maps,
    range: Range,
    watch: Option<&Uffd>,
    table: Option<&RangeAttributes>,
    mut refused: impl FnMut(Range, i32, Errno),
) -> Result<bool> {
    let (mut found, mut failed) = (false, None);
    maps.pools(range, |part, prot| {
        let mut rest = part;
        while !rest.is_empty() {
            // What the table cannot tell now is put there later.
            let (end, note) = table.map_or((rest.end, Attributes::default()), |table| table.alike_for_copies(rest));
            let alike = Range { end, ..rest };
            rest.start = end;
            // SAFETY: the program has declared the content of the range void; the mapping there is ours.
            match unsafe { map_over(alike, prot, None, &note) } {
                Ok(()) => {
                    if let Some(table) = table {
                        keep_attributes(alike, table, true);
                    }
                    if let Some(watch) = watch {
                        let _ = watch_anonymous(watch, alike);
                    }
                }
                Err(errno) => {
                    refused(alike, prot, errno);
                    failed = Some(errno);
                }
            }
        }
        found = true;
        false
    })?;
    failed.map_or(Ok(found), Err)
}
