//! Handles: the stores that a process has open, and the calls in progress on each.
//!
//! A handle names a slot of a fixed table and the generation that opened it.
//! The slot's word counts the calls in progress and holds the generation, which
//! closing advances. So a slot is emptied only after its last call, and a handle of
//! an earlier generation is refused.

use super::codes::{Code, FORREST_BAD_HANDLE, FORREST_BUSY, FORREST_FORKED, FORREST_INVALID, guard};
use crate::store::Store;
use libc::c_int;
use llds::arena;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle; it points to nothing.
#[repr(C)]
pub struct FORREST {
    _opaque: [u8; 0],
}

/// Stores that one process can have open at the same time.
const HANDLES: usize = 1024;

/// A slot for an open store: how many calls use it, and which generation of handle opens it.
struct Slot {
    /// Generation in the high half (odd: open), calls in progress in the low half.
    word: AtomicU64,
    store: UnsafeCell<Option<Store>>,
}

// SAFETY: `store` is written only under an even generation: by the thread that took the free slot, before it
// publishes the odd generation, or by the thread that closed the slot, after the last call ended.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; HANDLES] = [const { Slot { word: AtomicU64::new(0), store: UnsafeCell::new(None) } }; HANDLES];

/// A call in progress on an open store. A thread inside one that enters again is in a callback or in a signal handler.
struct Call {
    slot: &'static Slot,
    _call: arena::Call,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.slot.word.fetch_sub(1, Ordering::Release);
    }
}

impl Call {
    fn store(&self) -> Result<&Store, c_int> {
        // SAFETY: `enter` counted this call and saw the open generation; `forrest_close` writes the slot only after all
        // counted calls ended.
        unsafe { (*self.slot.store.get()).as_ref() }.ok_or(FORREST_BAD_HANDLE)
    }
}

fn slot_of(handle: *mut FORREST) -> Result<(&'static Slot, u64), c_int> {
    let handle = handle as u64;
    let (index, generation) = ((handle >> 32) as usize, handle & 0xffff_ffff);
    if handle == 0 {
        return Err(FORREST_INVALID);
    }
    let slot = index.checked_sub(1).and_then(|index| SLOTS.get(index)).ok_or(FORREST_BAD_HANDLE)?;
    if generation % 2 == 1 { Ok((slot, generation)) } else { Err(FORREST_BAD_HANDLE) }
}

fn enter(handle: *mut FORREST) -> Result<Call, c_int> {
    let (slot, generation) = slot_of(handle)?;
    // Acquire: pairs with the release in `publish`, so that this call sees the slot's store.
    let word = slot.word.fetch_add(1, Ordering::Acquire);
    let call = Call { slot, _call: arena::Call::begin() };
    if word >> 32 == generation { Ok(call) } else { Err(FORREST_BAD_HANDLE) }
}

pub(super) fn publish(store: Store) -> Result<*mut FORREST, c_int> {
    for (index, slot) in SLOTS.iter().enumerate() {
        let word = slot.word.load(Ordering::Relaxed);
        // Even: closed. A count in the low half alone marks a slot that is being filled or emptied.
        if word >> 32 & 1 == 1 || word & 0xffff_ffff != 0 {
            continue;
        }
        if slot.word.compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            continue;
        }
        // SAFETY: the generation is even, so no call reads the slot, and our count keeps other threads from filling it.
        unsafe { *slot.store.get() = Some(store) };
        let generation = (word >> 32) + 1;
        slot.word.fetch_add((1 << 32) - 1, Ordering::Release);
        return Ok((((index as u64 + 1) << 32) | (generation & 0xffff_ffff)) as *mut FORREST);
    }
    Err(FORREST_BUSY)
}

/// Runs a call on an open store.
#[inline]
pub(super) fn with_store(handle: *mut FORREST, run: impl FnOnce(&Store) -> Result<(), Code>) -> c_int {
    guard(|| {
        let call = enter(handle)?;
        let store = call.store()?;
        if store.is_forked() {
            return Err(Code(FORREST_FORKED));
        }
        run(store)
    })
}

/// Closes a handle. Waits for calls of other threads in progress; later ones get FORREST_BAD_HANDLE. In a callback it does
/// not wait: FORREST_BUSY if there are any.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_close(handle: *mut FORREST) -> c_int {
    guard(|| {
        let (slot, generation) = slot_of(handle)?;
        let mut word = slot.word.load(Ordering::Relaxed);
        let calls = loop {
            if word >> 32 != generation {
                return Err(Code(FORREST_BAD_HANDLE));
            }
            // A callback does not wait: two callbacks that close each other's handles would deadlock.
            if arena::Call::is_any() && word & 0xffff_ffff != 0 {
                return Err(Code(FORREST_BUSY));
            }
            // Even generation, and one more call so that no thread fills the slot before it is empty.
            let closed = ((generation + 1) & 0xffff_ffff) << 32 | ((word & 0xffff_ffff) + 1);
            match slot.word.compare_exchange_weak(word, closed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break word & 0xffff_ffff,
                Err(now) => word = now,
            }
        };
        // SAFETY: calls in progress only read the slot; this thread writes it only after the last call ended.
        let forked = unsafe { (*slot.store.get()).as_ref() }.is_some_and(Store::is_forked);
        if forked && calls != 0 {
            // Threads that were inside a call do not exist in the forked child; their calls never end, so the slot stays
            // taken.
            return Ok(());
        }
        while slot.word.load(Ordering::Acquire) & 0xffff_ffff != 1 {
            std::thread::yield_now();
        }
        // SAFETY: ours is the only count left (acquire load above), and the even generation refuses new calls.
        let store = unsafe { (*slot.store.get()).take() };
        slot.word.fetch_sub(1, Ordering::Release);
        drop(store);
        Ok(())
    })
}
