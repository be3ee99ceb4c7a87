//! Epochs: unlinked memory is reused only when no thread can still hold a reference to it.
//!
//! This is classic epoch-based reclamation with three ages. A thread that is about to follow links
//! *pins*: it publishes the epoch it saw. The epoch moves from `e` to `e + 1` only when every pinned
//! thread has published `e`. LineMemory unlinked and then stamped with `e` can be reused once the epoch
//! is `e + 2`: every thread that pinned before the unlinking has unpinned by then.
//!
//! This module only keeps time. It holds no garbage, runs no destructor and allocates nothing: each
//! structure keeps its own list of retired memory, stamped with [`Clock::now`], and asks
//! [`Clock::is_past`]. So a structure may be dropped while threads are pinned elsewhere, and its
//! memory may lie in a file that is mapped several times.
//!
//! What it does not promise: a thread that stops while pinned stops the clock. No thread waits for
//! it, but memory unlinked meanwhile is not reused until it continues. In a forked child that is for ever, if another
//! thread of the parent was pinned at the fork: structures stay correct there, but reuse nothing.

use crate::primitive::{AtomicU64, Ordering, fence};

#[cfg(loom)]
const SLOTS: usize = 3;
#[cfg(not(loom))]
const SLOTS: usize = 512;

/// Set in a participant's word by the thread that owns it.
const OWNED: u64 = 1;
/// Set in a participant's word while its owner is pinned; the epoch stands above it.
const PINNED: u64 = 2;
const EPOCH_SHIFT: u32 = 2;

/// One thread's slot. Two cache lines, because of the adjacent-line prefetcher.
#[repr(align(128))]
struct ThreadSlot {
    /// `epoch << 2 | PINNED | OWNED`. Written by its owner, read by threads that advance the clock.
    word: AtomicU64,
}

/// An epoch clock that a set of structures shares.
pub struct Clock {
    epoch: AtomicU64,
    /// Pins of threads without a slot: while there are any, the clock stands still.
    slotless_pins: AtomicU64,
    /// Number of slots ever taken: an advance looks at these only.
    slots_high: AtomicU64,
    slots: [ThreadSlot; SLOTS],
}

impl Clock {
    /// Makes a clock at epoch 2, so that "two epochs ago" always exists.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self {
            epoch: AtomicU64::new(2),
            slotless_pins: AtomicU64::new(0),
            slots_high: AtomicU64::new(0),
            slots: [const { ThreadSlot { word: AtomicU64::new(0) } }; SLOTS],
        }
    }

    /// Makes a clock at epoch 2, so that "two epochs ago" always exists.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self {
            epoch: AtomicU64::new(2),
            slotless_pins: AtomicU64::new(0),
            slots_high: AtomicU64::new(0),
            slots: std::array::from_fn(|_| ThreadSlot { word: AtomicU64::new(0) }),
        }
    }

    /// Reads the epoch: the stamp for memory that was just unlinked.
    pub fn now(&self) -> u64 {
        // Orders the caller's unlinking before the read of the stamp; pairs with the SeqCst fence in `announce`.
        fence(Ordering::SeqCst);
        self.epoch.load(Ordering::SeqCst)
    }

    /// Returns true if everything unlinked before the stamp was taken can be reused.
    pub fn is_past(&self, stamp: u64) -> bool {
        self.epoch.load(Ordering::Acquire) >= stamp + 2
    }

    /// Moves the epoch on by one if every pinned thread has seen it; never waits.
    pub fn try_advance(&self) -> bool {
        let epoch = self.epoch.load(Ordering::SeqCst);
        // Pairs with the SeqCst fence in `announce`: either we see a thread's word, or that thread sees everything unlinked
        // before this fence.
        fence(Ordering::SeqCst);
        if self.slotless_pins.load(Ordering::SeqCst) != 0 || !self.may_advance(epoch) {
            return false;
        }
        // The first check was cheap and may have missed a word that was still in a store buffer; this one does not.
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
        if asymmetric::is_on() && !(asymmetric::fence_all() && self.may_advance(epoch)) {
            return false;
        }
        self.epoch.compare_exchange(epoch, epoch + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Returns true if every pinned thread has published this epoch.
    fn may_advance(&self, epoch: u64) -> bool {
        let slots_high = self.slots_high.load(Ordering::SeqCst) as usize;
        for slot in &self.slots[..slots_high] {
            let word = slot.word.load(Ordering::Acquire);
            if word == 0 {
                continue;
            }
            if word & PINNED != 0 && word >> EPOCH_SHIFT != epoch {
                return false;
            }
        }
        true
    }

    /// Takes a free slot.
    fn register(&self) -> Option<usize> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
        asymmetric::choose();
        let index = self.slots.iter().position(|slot| {
            slot.word.load(Ordering::Relaxed) == 0
                && slot.word.compare_exchange(0, OWNED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        // Before the first pin in this slot, so that the pin's fence orders this store too.
        self.slots_high.fetch_max(index as u64 + 1, Ordering::SeqCst);
        Some(index)
    }

    fn deregister(&self, index: usize) {
        self.slots[index].word.store(0, Ordering::Release);
    }

    fn announce(&self, index: Option<usize>) {
        match index {
            Some(index) => {
                // Acquire, pairs with the compare-exchange in `try_advance`: a thread that sees an epoch also sees all
                // unlinking before the stamps which that epoch made past.
                let epoch = self.epoch.load(Ordering::Acquire);
                #[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
                if asymmetric::is_on() {
                    // `try_advance` makes this thread execute a full fence (membarrier), so only the compiler's order
                    // matters here.
                    self.slots[index].word.store(epoch << EPOCH_SHIFT | PINNED | OWNED, Ordering::Relaxed);
                    std::sync::atomic::compiler_fence(Ordering::SeqCst);
                    return;
                }
                // On x86 an exchange is a full fence, and cheaper than mfence.
                if cfg!(all(target_arch = "x86_64", not(loom), not(miri))) {
                    self.slots[index].word.swap(epoch << EPOCH_SHIFT | PINNED | OWNED, Ordering::SeqCst);
                    std::sync::atomic::compiler_fence(Ordering::SeqCst);
                    return;
                }
                self.slots[index].word.store(epoch << EPOCH_SHIFT | PINNED | OWNED, Ordering::Relaxed);
            }
            None => {
                self.slotless_pins.fetch_add(1, Ordering::SeqCst);
            }
        }
        // Pairs with the SeqCst fences in `now` and `try_advance`.
        fence(Ordering::SeqCst);
    }

    fn withdraw(&self, index: Option<usize>) {
        match index {
            // Release: everything done while pinned happens before an advance that sees us unpinned (acquire load in
            // `may_advance`).
            Some(index) => self.slots[index].word.store(OWNED, Ordering::Release),
            None => {
                self.slotless_pins.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// Pins without a fence (asymmetric fences): the thread that advances the clock makes all threads of the process execute
/// one, by membarrier(2). Every change of a tree takes a pin; the clock advances once in thousands of changes.
///
/// Why a plain store is enough: a thread is about to follow a link, and its word may still be in its store buffer. If the
/// thread wrote the word before the fence that membarrier made it execute, the word is visible now, and the clock stands.
/// If it wrote the word after that fence, its later loads come after the fence too, and see everything that was unlinked
/// before the advance. (The processors of this module keep loads in order among themselves, and stores too.)
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
mod asymmetric {
    use std::sync::atomic::{AtomicU8, Ordering};

    const UNKNOWN: u8 = 0;
    const OFF: u8 = 1;
    const ON: u8 = 2;

    /// Chosen before the first pin that finds a slot, and never changed afterwards.
    static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);

    fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: membarrier takes no pointers and changes no memory.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Asks the kernel once. A kernel or a seccomp filter that refuses means pins with a fence.
    pub(super) fn choose() {
        if MODE.load(Ordering::Acquire) == UNKNOWN {
            let mode = if membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) { ON } else { OFF };
            // If several threads ask at the same time, the first answer counts.
            let _ = MODE.compare_exchange(UNKNOWN, mode, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    #[inline(always)]
    pub(super) fn is_on() -> bool {
        MODE.load(Ordering::Relaxed) == ON
    }

    /// Makes every running thread of this process execute a full fence. Returns false if the kernel refuses; then the
    /// caller must not advance the clock.
    pub(super) fn fence_all() -> bool {
        membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
static CLOCK: Clock = Clock::new();

#[cfg(loom)]
loom::lazy_static! {
    static ref CLOCK: Clock = Clock::new();
}

/// Returns the clock that all structures of this process share.
pub fn clock() -> &'static Clock {
    &CLOCK
}

/// A thread's registration: its slot and how many pins it holds. Without a destructor, so that it stays usable for pins
/// that other thread-locals hold or take while the thread ends.
struct Registration {
    index: std::cell::Cell<Registered>,
    depth: std::cell::Cell<u32>,
}

#[derive(Clone, Copy)]
enum Registered {
    NotYet,
    At(usize),
    /// The thread is ending: its last pin releases the slot.
    #[cfg_attr(loom, allow(dead_code))]
    Last(usize),
    None,
}

impl Registration {
    const fn new() -> Self {
        Self { index: std::cell::Cell::new(Registered::NotYet), depth: std::cell::Cell::new(0) }
    }

    #[inline]
    fn index(&self) -> Option<usize> {
        match self.index.get() {
            Registered::At(index) | Registered::Last(index) => Some(index),
            Registered::None => None,
            Registered::NotYet => self.register(),
        }
    }

    #[cold]
    fn register(&self) -> Option<usize> {
        // A thread that can no longer register a destructor gets no slot, since it could not release it. Under loom the
        // clock is dropped with the model's execution, before the thread-locals.
        #[cfg(not(loom))]
        let index = ENDING.try_with(|_| clock().register()).unwrap_or(None);
        #[cfg(loom)]
        let index = clock().register();
        self.index.set(index.map_or(Registered::None, Registered::At));
        index
    }

    /// Ends the last pin of the thread.
    #[inline]
    fn leave(&self) {
        match self.index.get() {
            Registered::At(index) => clock().withdraw(Some(index)),
            Registered::Last(index) => {
                clock().deregister(index);
                self.index.set(Registered::None);
            }
            Registered::None | Registered::NotYet => clock().withdraw(None),
        }
    }
}

/// Releases the thread's slot when the thread ends.
#[cfg(not(loom))]
struct Ending;

#[cfg(not(loom))]
impl Drop for Ending {
    fn drop(&mut self) {
        REGISTRATION.with(|registration| {
            if let Registered::At(index) = registration.index.get() {
                if registration.depth.get() == 0 {
                    clock().deregister(index);
                    registration.index.set(Registered::None);
                } else {
                    registration.index.set(Registered::Last(index));
                }
            }
        });
    }
}

#[cfg(not(loom))]
thread_local! {
    static REGISTRATION: Registration = const { Registration::new() };
    static ENDING: Ending = const { Ending };
}

#[cfg(loom)]
loom::thread_local! {
    static REGISTRATION: Registration = Registration::new();
}

/// Proof that this thread is pinned; dropping the last one unpins the thread.
pub struct Pin {
    /// A pin belongs to the thread that made it.
    _not_send: std::marker::PhantomData<*const ()>,
}

/// Pins this thread to the current epoch until the guard is dropped. A thread may hold several, and drop them in any order.
pub fn pin() -> Pin {
    REGISTRATION.with(|registration| {
        let depth = registration.depth.get();
        registration.depth.set(depth + 1);
        if depth == 0 {
            clock().announce(registration.index());
        }
    });
    Pin { _not_send: std::marker::PhantomData }
}

impl Drop for Pin {
    fn drop(&mut self) {
        REGISTRATION.with(|registration| {
            let depth = registration.depth.get() - 1;
            registration.depth.set(depth);
            if depth == 0 {
                registration.leave();
            }
        });
    }
}

/// Returns this thread's slot, which no other thread has meanwhile; `None` if no slot is left.
#[inline]
pub(crate) fn thread_slot() -> Option<usize> {
    REGISTRATION.with(Registration::index)
}

/// Returns a small number that differs between most threads, to choose a shard of a counter.
pub(crate) fn thread_index() -> usize {
    thread_slot().unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pinned_thread_holds_the_clock_and_leaving_frees_it() {
        let clock = Clock::new();
        let index = clock.register();
        clock.announce(index);
        let stamp = clock.now();
        assert!(clock.try_advance(), "a thread pinned at this epoch lets it move once");
        assert!(!clock.try_advance(), "but not twice");
        assert!(!clock.is_past(stamp));
        clock.withdraw(index);
        assert!(clock.try_advance());
        assert!(clock.is_past(stamp));
    }

    #[test]
    fn threads_without_a_slot_still_hold_the_clock() {
        let clock = Clock::new();
        while clock.register().is_some() {}
        clock.announce(None);
        assert!(!clock.try_advance());
        clock.withdraw(None);
        assert!(clock.try_advance());
    }

    #[test]
    fn a_pin_may_end_after_its_thread_s_registration() {
        /// A pin, its slot, and a channel that receives the slot's word before the pin ends.
        type Held = (Pin, usize, std::sync::mpsc::Sender<(u64, usize)>);
        struct Holder(std::cell::RefCell<Option<Held>>);
        impl Drop for Holder {
            fn drop(&mut self) {
                let Some((pin, index, sender)) = self.0.take() else { return };
                let gone = ENDING.try_with(|_| ()).is_err();
                let held = if gone { CLOCK.slots[index].word.load(Ordering::SeqCst) } else { 0 };
                drop(pin);
                let _ = sender.send((held, index));
            }
        }
        thread_local! {
            static HOLDER: Holder = const { Holder(std::cell::RefCell::new(None)) };
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // Thread-locals are destroyed in the opposite order of their first use.
            HOLDER.with(|holder| {
                let pin = pin();
                let index = thread_slot().expect("a slot is free");
                *holder.0.borrow_mut() = Some((pin, index, sender));
            });
        })
        .join()
        .unwrap();
        let (held, index) = receiver.recv().unwrap();
        assert_ne!(held & PINNED, 0, "the pin holds the clock to its end");
        // Other threads may take the slot for a while.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while CLOCK.slots[index].word.load(Ordering::SeqCst) != 0 {
            assert!(std::time::Instant::now() < deadline, "the slot is never free again");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_last_pin_of_a_thread_leaves_whichever_it_is() {
        for outer_first in [false, true] {
            let (mut first, mut last) = (pin(), pin());
            if !outer_first {
                std::mem::swap(&mut first, &mut last);
            }
            let stamp = CLOCK.now();
            drop(first);
            let index = thread_slot().expect("a slot is free");
            assert_ne!(CLOCK.slots[index].word.load(Ordering::SeqCst) & PINNED, 0);
            // Other tests advance this clock as well: it moves once at most.
            for _ in 0..3 {
                CLOCK.try_advance();
            }
            assert!(!CLOCK.is_past(stamp), "the clock passed a pin that is held");
            drop(last);
            assert_eq!(CLOCK.slots[index].word.load(Ordering::SeqCst) & PINNED, 0);
        }
    }
}
