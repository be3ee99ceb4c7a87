//! The guard: whoever changes the address space and the agent exclude each other.
//!
//! The agent holds it from the moment it takes pages away until they are back
//! or mapped; interposed calls hold it around the system call. It is a futex
//! word that carries its owner, so that a signal handler that interrupts its
//! own thread inside the guard passes through instead of waiting for itself.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
#[cfg(not(loom))]
use pagefold_os::syscall;

/// A lock that can be taken again by its owner.
#[derive(Debug)]
pub struct Guard {
    /// 0 free, 1 held, 2 held and somebody waits.
    word: AtomicU32,
    /// Who holds it: any number that tells threads apart.
    owner: AtomicUsize,
}

/// Proof that the guard is held; `false` inside when an outer frame of the same thread holds it.
#[derive(Debug)]
pub struct Held<'a>(Option<&'a Guard>);

impl Guard {
    /// Makes a free guard.
    #[cfg(not(loom))]
    pub const fn new() -> Guard {
        Guard { word: AtomicU32::new(0), owner: AtomicUsize::new(0) }
    }

    /// Makes a free guard.
    #[cfg(loom)]
    pub fn new() -> Guard {
        Guard { word: AtomicU32::new(0), owner: AtomicUsize::new(0) }
    }

    /// Takes the guard for `me` if it is free (or already held by `me`).
    pub fn try_lock(&self, me: usize) -> Option<Held<'_>> {
        if self.owner.load(Ordering::Relaxed) == me {
            return Some(Held(None));
        }
        // Acquire pairs with the release in `unlock`: we see the address space as the last holder left it.
        self.word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        self.owner.store(me, Ordering::Relaxed);
        Some(Held(Some(self)))
    }

    /// Takes the guard for `me`, waiting while another holds it.
    pub fn lock(&self, me: usize) -> Held<'_> {
        self.lock_serving(me, || {})
    }

    /// Takes the guard for `me`; calls `serve` about every 50 us while waiting.
    pub fn lock_serving(&self, me: usize, mut serve: impl FnMut()) -> Held<'_> {
        if let Some(held) = self.try_lock(me) {
            return held;
        }
        while self.word.swap(2, Ordering::Acquire) != 0 {
            self.wait();
            serve();
        }
        self.owner.store(me, Ordering::Relaxed);
        Held(Some(self))
    }

    /// Waits until the holder wakes us, or a moment: a missed wake costs no more than that.
    #[cfg(not(loom))]
    fn wait(&self) {
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
        // SAFETY: the word outlives the call; the kernel only reads it.
        let _ = unsafe {
            syscall!(
                libc::SYS_futex,
                self.word.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                2,
                core::ptr::from_ref(&timeout)
            )
        };
    }

    #[cfg(loom)]
    fn wait(&self) {
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

    /// Makes the guard free in a forked child, whatever it was in the parent.
    pub fn reset(&self) {
        self.owner.store(0, Ordering::Relaxed);
        self.word.store(0, Ordering::Relaxed);
    }

    /// Frees the guard that `me` holds through a forgotten [`Held`].
    pub fn unlock_forgotten(&self, me: usize) {
        if self.owner.load(Ordering::Relaxed) == me {
            self.unlock();
        }
    }

    fn unlock(&self) {
        self.owner.store(0, Ordering::Relaxed);
        // Release pairs with the acquire of the next holder.
        if self.word.swap(0, Ordering::Release) == 2 {
            self.wake();
        }
    }
}

impl Default for Guard {
    fn default() -> Self {
        Guard::new()
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(guard) = self.0 {
            guard.unlock();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn only_one_holds_it_and_its_owner_passes() {
        static GUARD: Guard = Guard::new();
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
}
