//! Plain memory: how it is watched for writes, and how it takes the place of what was merged.
//!
//! What replaces a mapping of the pool's must look as if nothing had been merged, so it gets the rights of the old one and all
//! attributes that the program gave to the range.

use crate::address_space::maps::Maps;
use crate::range_attributes::RangeAttributes;
use crate::state::is_lent;
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
                let _ = unsafe { mem::advise(at, end - at, advice) };
            }
        }
        at = end;
    }
}

/// Replaces every pool mapping in `range` by fresh anonymous memory, as a discard of anonymous memory would leave it,
/// with the rights of the old one and the attributes in `table`. Calls `refused` for each that the kernel does not replace, with
/// its rights.
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
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the program has declared the content of the range void; the mapping there is ours.
        match unsafe { mem::map(part.start, part.len(), prot, flags, -1, 0) } {
            Ok(_) => {
                if let Some(table) = table {
                    keep_attributes(part, table, true);
                }
                if let Some(watch) = watch {
                    let _ = watch_anonymous(watch, part);
                }
            }
            Err(errno) => {
                refused(part, prot, errno);
                failed = Some(errno);
            }
        }
        found = true;
        false
    })?;
    failed.map_or(Ok(found), Err)
}
