//! Memory that is mapped before the agent begins.
//!
//! An allocator that is loaded with the program (mimalloc, jemalloc) maps its first memory when the loader, or a
//! constructor, first allocates; the agent's constructor may come later. The calls come to the functions of this library all
//! the same, so the end of such memory is seen. What the program says about it meanwhile is asked of the kernel when the
//! agent begins.

use super::c_library::me;
use super::manageable::{is_manageable, mark};
use super::unmerge::EVERYTHING;
use crate::address_space::smaps;
use crate::range_attributes::{Attributes, RangeAttributes};
use crate::state::SHARED;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};
use pagefold_os::Range;
use pagefold_os::raw::Result;
use pagefold_protocol::message::ALL_MIN;

static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Returns true before the agent has begun, or decided not to.
pub(super) fn is_early() -> bool {
    !IS_OVER.load(Ordering::Relaxed)
}

/// Notes what was mapped at `range`, in place of whatever was there.
pub(super) fn note_mapped(range: Range, prot: c_int, flags: c_int) {
    let held = SHARED.mapping_lock.lock(me());
    let table = SHARED.tables(&held).table;
    let is_large = range.len() >= ALL_MIN;
    let is_managed = is_manageable(prot, flags) && (is_large || table.sees(range));
    table.forget(range);
    if is_managed {
        table.change(range, |note| mark(note, prot, is_large));
    }
}

/// The agent begins; what was noted is managed if it `manages_all` memory.
pub(super) fn end(manages_all: bool) {
    IS_OVER.store(true, Ordering::Relaxed);
    let held = SHARED.mapping_lock.lock(me());
    let table = SHARED.tables(&held).table;
    if !table.entries().is_empty() && (!manages_all || complete(table).is_err()) {
        table.forget(EVERYTHING);
    }
}

/// Adds what the program said about noted memory, and forgets what is no longer mapped.
fn complete(table: &mut RangeAttributes) -> Result<()> {
    let mut behind = 0;
    smaps::for_each(|mapping| {
        table.forget(Range { start: behind, end: mapping.range.start.max(behind) });
        behind = mapping.range.end;
        let said = mapping.said;
        table.change(mapping.range, |note| {
            if note.seen || note.reserved {
                *note = Attributes { seen: note.seen, reserved: note.reserved, ..said };
            }
        });
    })?;
    table.forget(Range { start: behind, end: u64::MAX });
    Ok(())
}
