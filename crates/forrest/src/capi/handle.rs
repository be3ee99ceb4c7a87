//! Handles: which stores a process has open, and which calls are under way on each.
//!
//! A handle names a slot of a fixed table and the generation that opened it.
//! Each call is counted in the slot's word, in which closing also turns the
//! generation: so a slot is emptied after its last call, and a handle of a
//! former generation opens nothing.

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

/// Stores one process can have open at a time.
const HANDLES: usize = 1024;

/// A place for an open store: how many calls use it, and which generation of handle opens it.
struct Slot {
    /// Generation in the high half (odd: open), calls under way in the low half.
    word: AtomicU64,
    store: UnsafeCell<Option<Store>>,
}

// SAFETY: `store` is written only by whoever turned the generation even with no call under way, and before the
// generation that opens it is published.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; HANDLES] = [const { Slot { word: AtomicU64::new(0), store: UnsafeCell::new(None) } }; HANDLES];

/// A call under way on an open store. A thread that is in one is in a callback, or in a signal's handler.
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
        // SAFETY: while our call is counted nobody writes the slot, and its generation said that it is open.
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
        // SAFETY: the generation is even, so no call reads the slot, and our count keeps others from filling it.
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

/// Closes a handle. Waits for calls of other threads that are under way; later ones get FORREST_BAD_HANDLE. In a callback it
/// does not wait: FORREST_BUSY if there are any.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_close(handle: *mut FORREST) -> c_int {
    guard(|| {
        let (slot, generation) = slot_of(handle)?;
        let mut word = slot.word.load(Ordering::Relaxed);
        let calls = loop {
            if word >> 32 != generation {
                return Err(Code(FORREST_BAD_HANDLE));
            }
            // A callback does not wait: two that close each other's handles would for ever.
            if arena::Call::is_any() && word & 0xffff_ffff != 0 {
                return Err(Code(FORREST_BUSY));
            }
            // Even generation, and one more call so that nobody fills the slot before it is empty.
            let closed = ((generation + 1) & 0xffff_ffff) << 32 | ((word & 0xffff_ffff) + 1);
            match slot.word.compare_exchange_weak(word, closed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break word & 0xffff_ffff,
                Err(now) => word = now,
            }
        };
        // SAFETY: calls under way only read; we write after the last one has left.
        let forked = unsafe { (*slot.store.get()).as_ref() }.is_some_and(Store::is_forked);
        if forked && calls != 0 {
            // Threads that were inside a call did not come along; their calls never end, so the slot stays taken.
            return Ok(());
        }
        while slot.word.load(Ordering::Acquire) & 0xffff_ffff != 1 {
            std::thread::yield_now();
        }
        // SAFETY: ours is the only call left, and the generation keeps new ones out.
        let store = unsafe { (*slot.store.get()).take() };
        slot.word.fetch_sub(1, Ordering::Release);
        drop(store);
        Ok(())
    })
}
