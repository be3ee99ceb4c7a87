//! What who brings pages back needs in a signal handler: a decoder from a pool, and patience.
//!
//! Neither takes a lock or memory, for a signal may come anywhere: the pool is made before the first one can.

use super::FAULT_PAGES_MAX;
use crate::tier::Worker;
use pagefold_os::{PAGE_SIZE, Page, syscall};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Waits a little longer each time.
#[derive(Default)]
pub(super) struct Patience(u32);

impl Patience {
    pub(super) fn wait(&mut self) {
        self.0 += 1;
        match self.0 {
            0..=32 => std::hint::spin_loop(),
            // SAFETY: numbers only.
            33..=200 => drop(unsafe { syscall!(libc::SYS_sched_yield) }),
            _ => {
                let time = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
                // SAFETY: the kernel reads the structure.
                let _ = unsafe { syscall!(libc::SYS_nanosleep, std::ptr::from_ref(&time), 0usize) };
            }
        }
    }

    /// True when that took several seconds.
    pub(super) fn ended(&self) -> bool {
        self.0 > 100_000
    }
}

/// What a thread needs to bring pages back.
pub(super) struct Decoder {
    pub worker: Worker,
    pub pages: Box<[Page; FAULT_PAGES_MAX]>,
}

struct Place {
    taken: AtomicBool,
    decoder: UnsafeCell<Decoder>,
}

// SAFETY: the decoder is used by who took the place, one at a time.
unsafe impl Sync for Place {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Place {}

static DECODERS: OnceLock<Box<[Place]>> = OnceLock::new();
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// A decoder, taken from the pool.
pub(super) struct Taken(&'static Place);

impl Taken {
    /// Takes one, waiting for who has it. Whoever calls this has signals blocked until it is dropped: who has a decoder
    /// goes on.
    pub(super) fn take() -> Option<Taken> {
        let places = DECODERS.get()?;
        let first = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut patience = Patience::default();
        loop {
            for place in (first..first.wrapping_add(places.len())).map(|at| &places[at % places.len()]) {
                if !place.taken.swap(true, Ordering::Acquire) {
                    return Some(Taken(place));
                }
            }
            patience.wait();
        }
    }
}

impl Deref for Taken {
    type Target = Decoder;
    fn deref(&self) -> &Decoder {
        // SAFETY: we took the place.
        unsafe { &*self.0.decoder.get() }
    }
}

impl DerefMut for Taken {
    fn deref_mut(&mut self) -> &mut Decoder {
        // SAFETY: as above.
        unsafe { &mut *self.0.decoder.get() }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Makes the pool: two decoders for each processor, so that a thread that lost its processor keeps nobody waiting.
pub(super) fn make_decoders() {
    DECODERS.get_or_init(|| {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) * 2;
        let place = |_| {
            let pages: Box<[Page]> = vec![[0; PAGE_SIZE]; FAULT_PAGES_MAX].into_boxed_slice();
            let pages = pages.try_into().expect("as many as were made");
            Place { taken: AtomicBool::new(false), decoder: UnsafeCell::new(Decoder { worker: Worker::new(), pages }) }
        };
        (0..count.clamp(4, 32)).map(place).collect()
    });
}
