//! The mapping lock: the agent and calls that change the address space exclude each other.
//!
//! The agent holds it from the moment it takes pages away until they are back or mapped; interposed calls hold it around the
//! system call. It is one word: its owner, and whether a thread waits. So there is no moment in which its owner is unknown,
//! and a signal handler that interrupts its own thread anywhere passes through instead of waiting for itself.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use pagefold_os::syscall;

/// Bit of the word: a thread waits. A waiter sets it, and the owner looks at it when it frees the lock.
const WAITED_FOR: u64 = 1;

/// A lock that can be taken again by its owner.
#[derive(Debug)]
pub struct MappingLock {
    /// 0 free; else the holder, any number but 0 that tells threads apart, above [`WAITED_FOR`].
    word: AtomicU64,
    /// How often the holder took it again. A handler leaves it as it found it, so the holder's load and store may be
    /// interrupted.
    again: AtomicU32,
}

/// Proof that the mapping lock is held.
#[derive(Debug)]
pub struct MappingLockGuard<'a> {
    guard: &'a MappingLock,
    nested: bool,
}

impl MappingLockGuard<'_> {
    /// True if an outer frame of the same thread holds it too: what waits for the agent would wait for ever.
    pub fn is_nested(&self) -> bool {
        self.nested
    }
}

impl MappingLock {
    /// Makes a free lock.
    #[cfg(not(loom))]
    pub const fn new() -> MappingLock {
        MappingLock { word: AtomicU64::new(0), again: AtomicU32::new(0) }
    }

    /// Makes a free lock.
    #[cfg(loom)]
    pub fn new() -> MappingLock {
        MappingLock { word: AtomicU64::new(0), again: AtomicU32::new(0) }
    }

    /// Takes the mapping lock for `me` if it is free (or already held by `me`).
    pub fn try_lock(&self, me: usize) -> Option<MappingLockGuard<'_>> {
        self.take(me, 0).ok()
    }

    /// As [`try_lock`](Self::try_lock), with `bits` in the word.
    ///
    /// # Errors
    /// The word, if another holds it.
    fn take(&self, me: usize, bits: u64) -> Result<MappingLockGuard<'_>, u64> {
        let mine = (me as u64) << 1;
        // Acquire pairs with the release in `unlock`: we see the address space as the last holder left it.
        match self.word.compare_exchange(0, mine | bits, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(MappingLockGuard { guard: self, nested: false }),
            // Only this thread makes the word its own or frees it.
            Err(word) if word & !WAITED_FOR == mine => {
                self.again.store(self.again.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                Ok(MappingLockGuard { guard: self, nested: true })
            }
            Err(word) => Err(word),
        }
    }

    /// Takes the mapping lock for `me`, waiting while another holds it.
    pub fn lock(&self, me: usize) -> MappingLockGuard<'_> {
        self.lock_serving(me, || {})
    }

    /// Takes the mapping lock for `me`; calls `serve` about every 50 us while waiting.
    pub fn lock_serving(&self, me: usize, mut serve: impl FnMut()) -> MappingLockGuard<'_> {
        let mut bits = 0;
        loop {
            let word = match self.take(me, bits) {
                Ok(held) => return held,
                Err(word) => word,
            };
            let waited = word | WAITED_FOR;
            if word == waited || self.word.compare_exchange(word, waited, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                self.wait(waited);
                // Others may wait as well, and the bit that told of them may be gone.
                bits = WAITED_FOR;
                serve();
            }
        }
    }

    /// Waits until the holder wakes us, or a moment: a missed wake costs no more than that.
    #[cfg(not(loom))]
    fn wait(&self, word: u64) {
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
        // The kernel compares 32 bits, the lower half on our architectures.
        // SAFETY: the word outlives the call; the kernel only reads it.
        let _ = unsafe {
            syscall!(
                libc::SYS_futex,
                self.word.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                word as u32,
                core::ptr::from_ref(&timeout)
            )
        };
    }

    #[cfg(loom)]
    fn wait(&self, _word: u64) {
        loom::thread::yield_now();
    }

    #[cfg(not(loom))]
    fn wake(&self) {
        // SAFETY: wakes waiters on a word of ours.
        let _ =
            unsafe { syscall!(libc::SYS_futex, self.word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) };
    }

    #[cfg(loom)]
    fn wake(&self) {}

    /// True if `me` holds the mapping lock.
    pub fn is_held_by(&self, me: usize) -> bool {
        self.word.load(Ordering::Relaxed) & !WAITED_FOR == (me as u64) << 1
    }

    /// Makes the mapping lock free in a forked child, whatever it was in the parent, but for what outer frames of `me` hold
    /// there too: they go on in the child.
    pub fn reset(&self, me: usize) {
        if !self.is_held_by(me) {
            self.again.store(0, Ordering::Relaxed);
            self.word.store(0, Ordering::Relaxed);
        }
    }

    /// Undoes one forgotten [`MappingLockGuard`] of `me`; outer frames hold the mapping lock as before.
    pub fn unlock_forgotten(&self, me: usize) {
        if self.is_held_by(me) {
            self.unlock();
        }
    }

    fn unlock(&self) {
        let again = self.again.load(Ordering::Relaxed);
        if again > 0 {
            self.again.store(again - 1, Ordering::Relaxed);
            return;
        }
        // Release pairs with the acquire of the next holder.
        if self.word.swap(0, Ordering::Release) & WAITED_FOR != 0 {
            self.wake();
        }
    }
}

impl Default for MappingLock {
    fn default() -> Self {
        MappingLock::new()
    }
}

impl Drop for MappingLockGuard<'_> {
    fn drop(&mut self) {
        self.guard.unlock();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn only_one_holds_it_and_its_owner_passes() {
        static GUARD: MappingLock = MappingLock::new();
        static INSIDE: AtomicU64 = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for me in 1..=4 {
                scope.spawn(move || {
                    for _ in 0..5_000 {
                        let _held = GUARD.lock(me);
                        assert_eq!(INSIDE.fetch_add(1, Ordering::Relaxed), 0);
                        let _again = GUARD.lock(me);
                        assert_eq!(INSIDE.fetch_sub(1, Ordering::Relaxed), 1);
                    }
                });
            }
        });
        assert!(GUARD.try_lock(9).is_some());
    }

    #[test]
    fn a_fork_in_a_handler_leaves_the_interrupted_frame_its_hold() {
        let guard = MappingLock::new();
        let outer = guard.lock(2);
        for child in [false, true] {
            core::mem::forget(guard.lock(2));
            guard.unlock_forgotten(2);
            if child {
                guard.reset(2);
            }
            assert!(guard.try_lock(3).is_none(), "the outer frame holds it, child: {child}");
        }
        assert!(!outer.is_nested());
        drop(outer);
        // Another thread's hold does not come along.
        core::mem::forget(guard.lock(3));
        guard.reset(2);
        assert!(guard.try_lock(4).is_some());
    }

    /// Signals come between any two instructions of a thread that takes the mapping lock and frees it, and take it too.
    #[test]
    fn a_handler_passes_wherever_it_interrupts() {
        static GUARD: MappingLock = MappingLock::new();
        static SIGNALS: AtomicU64 = AtomicU64::new(0);
        const ME: usize = 7;
        extern "C" fn handle(_: libc::c_int) {
            drop(GUARD.lock(ME));
            SIGNALS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler touches atomics only; the signal is sent to the thread below and to no other.
        unsafe { libc::signal(libc::SIGUSR2, handle as *const () as libc::sighandler_t) };
        static TARGET: AtomicU64 = AtomicU64::new(0);
        static ENDS: AtomicU64 = AtomicU64::new(0);
        // Not scoped: a thread that is stuck must not hold up the test that says so.
        std::thread::spawn(|| {
            // SAFETY: the call takes no arguments.
            TARGET.store(unsafe { libc::pthread_self() } as u64, Ordering::Release);
            while ENDS.load(Ordering::Acquire) == 0 {
                drop(GUARD.lock(ME));
            }
        });
        while TARGET.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        for sent in 1..=20_000 {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
            // SAFETY: the thread lives until `ENDS` is set.
            unsafe { libc::pthread_kill(TARGET.load(Ordering::Relaxed) as libc::pthread_t, libc::SIGUSR2) };
            while SIGNALS.load(Ordering::Relaxed) < sent {
                assert!(std::time::Instant::now() < deadline, "stuck after {sent} signals");
                std::thread::yield_now();
            }
        }
        ENDS.store(1, Ordering::Release);
    }
}
