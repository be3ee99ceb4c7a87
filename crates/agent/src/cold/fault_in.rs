//! How pages return: a thread touches them, and waits for the daemon meanwhile.
//!
//! Many pages return at once with the mapping lock held, so none is evicted again meanwhile, and no room is made: the daemon
//! says how much room there is, and the thread stops at its end. A step that spans several mappings, or has lost pages or
//! pages that the program may not read, is taken apart.

use super::session::residency;
use crate::address_space::maps::Maps;
use crate::runtime::housekeeping::exit_if_alone;
use crate::runtime::thread::{begin_thread, exit_thread, yield_now};
use crate::state::{COLD_AGENT, FAULT_IN_THREAD, MAY_START, SHARED};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{PAGE_SIZE, Range, mem, syscall};
use pagefold_protocol::residency_map::{EVICTED, ResidencyMap, SCANT_PAGES};

/// How often what is out by the table and was touched is looked at again, about a millisecond apart: the daemon may have to
/// hear first that it is elsewhere.
const UNHEARD_TRIES: u32 = 1000;

/// Pages that are brought back at once, between two looks at the room.
const STEP_PAGES: usize = SCANT_PAGES as usize;

/// Has every page of `range` here; false if some are not.
pub(crate) fn read_in(range: Range) -> bool {
    populate(range).is_ok()
}

/// As [`read_in`], and says why; `ENOMEM` where nothing is mapped.
fn populate(range: Range) -> Result<()> {
    // SAFETY: reads pages in, changes nothing.
    unsafe { mem::advise(range.start, range.len(), libc::MADV_POPULATE_READ) }
}

/// As [`read_in`], of a step that lies in several mappings, has lost pages, or that the program may not read. The last it
/// may for a moment: nothing else has the kernel wait for a page there (`/proc/PID/mem` does not), and its own calls that
/// change rights wait for the mapping lock.
#[inline(never)]
fn read_in_parts(step: Range) {
    let Ok(maps) = Maps::open() else { return };
    let mut parts = [(Range { start: 0, end: 0 }, 0); STEP_PAGES];
    let mut count = 0;
    // The stack may be a handler's. Of what a longer line tells nothing is ours.
    let mut buffer = [0u8; 2 << 10];
    let _ = maps.for_each(&mut buffer, |map| {
        if let Some(part) = parts.get_mut(count).filter(|_| map.range.overlaps(&step)) {
            let range = map.range.intersection(&step);
            *part = (range, map.prot);
            count += 1;
        }
    });
    for &(part, rights) in &parts[..count] {
        let hidden = rights & libc::PROT_READ == 0;
        // SAFETY: adds a right, and takes it away again.
        let protect = |rights| unsafe { mem::protect(part.start, part.len(), rights) };
        if hidden && protect(rights | libc::PROT_READ).is_err() {
            continue;
        }
        if !read_in(part) {
            // What is lost stays lost.
            for addr in (part.start..part.end).step_by(PAGE_SIZE) {
                let _ = read_in(Range::pages_from(addr, 1));
            }
        }
        if hidden {
            let _ = protect(rights);
        }
    }
}

/// Where what is to be brought back lies, but for what shall stay out.
pub(super) struct Wanted<F: Fn(u64, u64) -> (u64, bool)> {
    pub(super) range: Range,
    /// How far what lies at an address is of one kind (to an end at most), and whether it shall stay out.
    pub(super) stretch: F,
    /// Whether a limit has room for it or not.
    pub(super) ignores_limit: bool,
}

/// For [`Wanted`]: nothing stays out.
pub(super) fn all(_: u64, end: u64) -> (u64, bool) {
    (end, false)
}

pub(super) const EVERYTHING: Range = Range { start: 0, end: u64::MAX >> 1 };

/// It has touched everything.
static IS_DONE: AtomicBool = AtomicBool::new(false);

/// What [`FAULT_IN_THREAD`] is to do.
static ORDER: AtomicU32 = AtomicU32::new(FAULT_IN);
const STAND_BY: u32 = 1;
const FAULT_IN: u32 = 2;
const GO: u32 = 3;

/// How long the standby thread sleeps before it does its housekeeping, in nanoseconds.
const REST_NS: i64 = 500_000_000;

/// Starts [`FAULT_IN_THREAD`] now, for later: from now on no thread may be started any more.
#[cfg(any(test, feature = "preload"))]
pub(super) fn start_standby() {
    if !FAULT_IN_THREAD.is_gone() {
        return;
    }
    ORDER.store(STAND_BY, Ordering::Release);
    BEGUN.store(false, Ordering::Relaxed);
    if FAULT_IN_THREAD.start(thread_main) {
        // What it calls first may be forbidden soon.
        while !BEGUN.load(Ordering::Acquire) && !FAULT_IN_THREAD.is_gone() {
            yield_now();
        }
    }
}

/// It has begun.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Gives the standby thread its order; false if there is no such thread.
fn order(what: u32) -> bool {
    let told = ORDER.compare_exchange(STAND_BY, what, Ordering::AcqRel, Ordering::Acquire).is_ok();
    // SAFETY: the word outlives the call.
    let _ = unsafe { syscall!(libc::SYS_futex, ORDER.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) };
    told && !FAULT_IN_THREAD.is_gone()
}

/// Ends the standby thread, and waits until it has ended: no agent leaves any more.
pub(super) fn dismiss_standby() {
    if order(GO) {
        while !FAULT_IN_THREAD.is_gone() {
            yield_now();
        }
    }
}

/// In a forked child, which has none of its parent's threads.
#[cfg(feature = "preload")]
pub(super) fn forget_thread() {
    FAULT_IN_THREAD.forget();
    ORDER.store(FAULT_IN, Ordering::Relaxed);
}

/// Has [`FAULT_IN_THREAD`] touch everything, and `wait` called until it is gone; false if it has not touched everything.
pub(super) fn fault_in_by_thread(mut wait: impl FnMut()) -> bool {
    IS_DONE.store(false, Ordering::Relaxed);
    let starts = || {
        ORDER.store(FAULT_IN, Ordering::Release);
        MAY_START.load(Ordering::Acquire) && FAULT_IN_THREAD.start(thread_main)
    };
    if !order(FAULT_IN) && !starts() {
        return false;
    }
    while !FAULT_IN_THREAD.is_gone() {
        wait();
    }
    IS_DONE.load(Ordering::Acquire)
}

extern "C" fn thread_main() -> ! {
    if begin_thread(c"pagefold-back") {
        BEGUN.store(true, Ordering::Release);
        let rest = libc::timespec { tv_sec: 0, tv_nsec: REST_NS };
        while ORDER.load(Ordering::Acquire) == STAND_BY {
            let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
            // SAFETY: word and time outlive the call.
            let _ =
                unsafe { syscall!(libc::SYS_futex, ORDER.as_ptr(), operation, STAND_BY, core::ptr::from_ref(&rest)) };
            exit_if_alone();
        }
        if ORDER.load(Ordering::Acquire) == FAULT_IN {
            fault_in_everything();
            IS_DONE.store(true, Ordering::Release);
        }
    }
    exit_thread()
}

/// Has everything back, whether a limit has room for it or not, but for what is lost.
pub(super) fn fault_in_everything() {
    let _held = SHARED.mapping_lock.lock(COLD_AGENT);
    if let Some(residency) = residency() {
        let _ = fault_in(&residency, &Wanted { range: EVERYTHING, stretch: all, ignores_limit: true });
    }
}

/// Touches every evicted page, so that it returns.
///
/// No page is evicted meanwhile, because the caller holds the mapping lock. So the daemon keeps none of these pages waiting
/// for room; it says how much room there is, and this function stops at its end.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for all of it; pages that have returned stay.
pub(super) fn fault_in<F: Fn(u64, u64) -> (u64, bool)>(residency: &ResidencyMap, wanted: &Wanted<F>) -> Result<()> {
    /// What is kept free beyond the room is far more.
    const STEP: usize = STEP_PAGES * PAGE_SIZE;
    let head = residency.head();
    // In this order: what is moved is on the move before it is out no more.
    if head.evicted.load(Ordering::Acquire) == 0 && head.moving_pages.load(Ordering::SeqCst) == 0 {
        return Ok(());
    }
    let epoch = head.epoch.load(Ordering::SeqCst);
    let has_no_room = || !wanted.ignores_limit && head.is_scant();
    let mut is_full = false;
    // True if something is out that was touched: the table says so a moment longer, and until the daemon has heard of a bare
    // call that took it elsewhere.
    let mut touch = || {
        let mut again = false;
        residency.for_each_run(wanted.range.start, wanted.range.end, EVICTED, |mut start, run_end| {
            while start < run_end && !is_full {
                let (end, stays) = (wanted.stretch)(start, run_end.min(start + STEP as u64));
                let step = Range { start, end };
                start = end;
                if stays {
                    continue;
                }
                let touched = populate(step);
                if touched.is_err() {
                    read_in_parts(step);
                }
                again |= matches!(touched, Ok(()) | Err(Errno(libc::ENOMEM))) && residency.has(step, EVICTED);
                // Behind the step: what was true at the last fault long ago would be no news.
                is_full = has_no_room();
            }
        });
        again && !is_full
    };
    head.paused_evictions.fetch_add(1, Ordering::SeqCst);
    let mut turn = 0;
    while touch() && turn < UNHEARD_TRIES && head.epoch.load(Ordering::SeqCst) == epoch {
        turn += 1;
        if turn < 16 {
            yield_now();
        } else {
            let _ = pagefold_os::fd::poll(&mut [], 1);
        }
    }
    // What moved comes in by itself; a daemon that takes over says how many it still knows of.
    while !is_full && head.moving_pages.load(Ordering::SeqCst) > 0 {
        let _ = pagefold_os::fd::poll(&mut [], 1);
        is_full = has_no_room();
    }
    head.paused_evictions.fetch_sub(1, Ordering::SeqCst);
    if is_full { Err(Errno(libc::ENOMEM)) } else { Ok(()) }
}
