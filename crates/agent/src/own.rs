//! Memory of ours among the program's: stacks, staging areas, the nursery, what is static.
//!
//! What must be left out of lists and freezes is asked for here, by address, whatever advice was given on it;
//! who makes such memory stores its place here.

use crate::arena;
use crate::cold;
use crate::engine::BELL;
#[cfg(feature = "preload")]
use crate::process::ORIGIN;
use crate::shared::{NOTHING, SHARED};
use crate::table::Table;
use crate::thread::{STACK_LEN, Thread};
use crate::whole::HUGE_LEN;
use core::sync::atomic::{AtomicU64, Ordering};
use pagefold_os::{PAGE_SIZE, Range, mem};
use pagefold_protocol::message::{FETCH_PAGES_MAX, FREEZE_PAGES_MAX};

#[cfg(feature = "preload")]
const PAGE: u64 = PAGE_SIZE as u64;

/// Length of the nursery: a mapping that is given back is one again as far as this reaches.
pub(crate) const NURSERY_LEN: u64 = 32 << 20;
/// Where it is, 0 before there is one. A forked child inherits it.
pub(crate) static NURSERY: AtomicU64 = AtomicU64::new(0);

/// Where frozen pages wait, 0 before there is such a place.
pub(crate) static STAGING: AtomicU64 = AtomicU64::new(0);

/// Where a huge page waits that is frozen whole, 0 before there was one.
pub(crate) static WHOLE: AtomicU64 = AtomicU64::new(0);

/// Where pages that leave for the cold tier wait, 0 before there is such a place.
pub(crate) static COLD_STAGING: AtomicU64 = AtomicU64::new(0);

/// Memory of ours that looks like the program's, and that the program may give any advice on, as it does who advises all that
/// its list of mappings shows. It is never managed: an agent that freezes its own stack waits for itself.
fn own() -> [Range; 11] {
    let at = |start: &AtomicU64, len: u64| match start.load(Ordering::Relaxed) {
        0 => NOTHING,
        start => Range { start, end: start + len },
    };
    let stack = |thread: &Thread| at(&thread.stack, STACK_LEN as u64);
    let [second, bringer] = cold::threads();
    [
        stack(&SHARED.thread),
        stack(second),
        stack(bringer),
        at(&STAGING, (FREEZE_PAGES_MAX * PAGE_SIZE) as u64),
        at(&WHOLE, HUGE_LEN),
        at(&COLD_STAGING, (FETCH_PAGES_MAX * PAGE_SIZE) as u64),
        at(&NURSERY, NURSERY_LEN),
        at(BELL.page().0, BELL.page().1),
        at(cold::BELL.page().0, cold::BELL.page().1),
        origin_page(),
        statics(),
    ]
}

#[cfg(feature = "preload")]
fn origin_page() -> Range {
    let page = ORIGIN.load(Ordering::Relaxed);
    if page == 0 { NOTHING } else { Range::pages_from(page, 1) }
}

#[cfg(not(feature = "preload"))]
fn origin_page() -> Range {
    NOTHING
}

/// What the library's file has no bytes for.
#[cfg(feature = "preload")]
fn statics() -> Range {
    unsafe extern "C" {
        static __bss_start: u8;
        static _end: u8;
    }
    Range { start: &raw const __bss_start as u64 & !(PAGE - 1), end: (&raw const _end as u64).next_multiple_of(PAGE) }
}

/// A program that links us is managed where it says so in code.
#[cfg(not(feature = "preload"))]
fn statics() -> Range {
    NOTHING
}

/// The first memory of ours in `range`.
pub(crate) fn first_own(range: Range) -> Option<Range> {
    own().into_iter().filter(|own| own.overlaps(&range)).min_by_key(|own| own.start)
}

/// True if part of `range` must not be frozen: the program wants it left alone, it is ours, or may end unseen.
pub(crate) fn is_left_alone(table: &Table, range: Range) -> bool {
    table.excludes(range) || first_own(range).is_some() || arena::may_end(table, range)
}

pub(crate) fn is_nursery(addr: u64) -> bool {
    let base = NURSERY.load(Ordering::Relaxed);
    base != 0 && (base..base + NURSERY_LEN).contains(&addr)
}

/// Marks a mapping of ours: not copied by fork, not dumped.
pub(crate) fn mark_own(map: &mem::Mapping) {
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        // SAFETY: changes no bytes.
        let _ = unsafe { mem::advise(map.addr(), map.len() as u64, advice) };
    }
}
