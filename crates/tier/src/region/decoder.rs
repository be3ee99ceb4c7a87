//! What loading a page in a signal handler needs: a decoder from a pool, and a bounded wait.
//!
//! Neither locks nor allocates, because a signal may interrupt any code. The pool is made before the handler is installed.

use super::report::FAULT_PAGES_MAX;
use crate::tier::Worker;
use pagefold_os::{PAGE_SIZE, Page, syscall};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A wait without locks: it spins, then yields, then sleeps, and counts the rounds.
#[derive(Default)]
pub(super) struct SpinBudget(u32);

impl SpinBudget {
    pub(super) fn spin(&mut self) {
        self.0 += 1;
        match self.0 {
            0..=32 => std::hint::spin_loop(),
            // SAFETY: sched_yield takes no arguments.
            33..=200 => drop(unsafe { syscall!(libc::SYS_sched_yield) }),
            _ => {
                let time = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
                // SAFETY: the kernel reads `time`, which outlives the call; the second pointer is null.
                let _ = unsafe { syscall!(libc::SYS_nanosleep, std::ptr::from_ref(&time), 0usize) };
            }
        }
    }

    /// Returns true after several seconds.
    pub(super) fn is_spent(&self) -> bool {
        self.0 > 100_000
    }
}

/// The buffers that loading pages needs.
pub(super) struct Decoder {
    pub worker: Worker,
    pub pages: Box<[Page; FAULT_PAGES_MAX]>,
}

struct PoolEntry {
    taken: AtomicBool,
    decoder: UnsafeCell<Decoder>,
}

// SAFETY: only the thread that set `taken` uses the decoder, until it clears it.
unsafe impl Sync for PoolEntry {}
// SAFETY: no field depends on the thread that created it.
unsafe impl Send for PoolEntry {}

static DECODERS: OnceLock<Box<[PoolEntry]>> = OnceLock::new();
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// A decoder taken from the pool; dropping it returns it.
pub(super) struct DecoderGuard(&'static PoolEntry);

impl DecoderGuard {
    /// Takes a decoder, and waits if all are taken. The caller has signals blocked until it drops the guard, so a thread
    /// that has a decoder always continues and returns it.
    pub(super) fn take() -> Option<DecoderGuard> {
        let pool = DECODERS.get()?;
        let first = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut budget = SpinBudget::default();
        loop {
            for entry in (first..first.wrapping_add(pool.len())).map(|at| &pool[at % pool.len()]) {
                if !entry.taken.swap(true, Ordering::Acquire) {
                    return Some(DecoderGuard(entry));
                }
            }
            budget.spin();
        }
    }
}

impl Deref for DecoderGuard {
    type Target = Decoder;
    fn deref(&self) -> &Decoder {
        // SAFETY: this guard set `taken`, so no other thread uses the decoder.
        unsafe { &*self.0.decoder.get() }
    }
}

impl DerefMut for DecoderGuard {
    fn deref_mut(&mut self) -> &mut Decoder {
        // SAFETY: this guard set `taken`, so no other thread uses the decoder, and `&mut self` excludes other borrows.
        unsafe { &mut *self.0.decoder.get() }
    }
}

impl Drop for DecoderGuard {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Makes the pool: two decoders for each processor, so that a preempted thread with a decoder does not delay others.
pub(super) fn make_pool() {
    DECODERS.get_or_init(|| {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) * 2;
        let entry = |_| {
            let pages: Box<[Page]> = vec![[0; PAGE_SIZE]; FAULT_PAGES_MAX].into_boxed_slice();
            let pages = pages.try_into().expect("as many as were made");
            PoolEntry {
                taken: AtomicBool::new(false),
                decoder: UnsafeCell::new(Decoder { worker: Worker::new(), pages }),
            }
        };
        (0..count.clamp(4, 32)).map(entry).collect()
    });
}
