//! The owner lock: which side may change states and read events (see the module's head).

use super::ResidencyMap;
use core::sync::atomic::Ordering;
use pagefold_os::syscall;

/// The lock is free.
pub const OWNER_NONE: u32 = 0;
/// The agent holds the lock.
pub const OWNER_AGENT: u32 = 1;
/// The daemon holds the lock.
pub const OWNER_DAEMON: u32 = 2;

impl ResidencyMap {
    /// Takes the owner lock for `owner` if it is free.
    pub fn try_lock(&self, owner: u32) -> bool {
        // Acquire pairs with the release in `unlock`: this side sees the states as the last holder left them.
        self.head().owner.compare_exchange(OWNER_NONE, owner, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the owner lock for the agent, waiting for up to about `ms` milliseconds.
    pub fn lock_within(&self, ms: u32) -> bool {
        let head = self.head();
        for _ in 0..ms.max(1) * 4 {
            if self.try_lock(OWNER_AGENT) {
                return true;
            }
            head.has_waiter.store(1, Ordering::SeqCst);
            let timeout = libc::timespec { tv_sec: 0, tv_nsec: 250_000 };
            // SAFETY: the word is mapped, as the caller of `at` promised, and the timeout outlives the call.
            let _ = unsafe {
                syscall!(
                    libc::SYS_futex,
                    head.owner.as_ptr(),
                    libc::FUTEX_WAIT,
                    OWNER_DAEMON,
                    core::ptr::from_ref(&timeout)
                )
            };
        }
        false
    }

    /// Frees the owner lock.
    pub fn unlock(&self) {
        let head = self.head();
        head.owner.store(OWNER_NONE, Ordering::SeqCst);
        if head.has_waiter.swap(0, Ordering::SeqCst) != 0 {
            // SAFETY: the word is mapped, as the caller of `at` promised.
            let _ = unsafe { syscall!(libc::SYS_futex, head.owner.as_ptr(), libc::FUTEX_WAKE, 1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_map;
    use super::*;

    #[test]
    fn agent_and_daemon_exclude_each_other() {
        with_map(|map| {
            use std::sync::atomic::AtomicU32 as Count;
            static INSIDE: Count = Count::new(0);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for _ in 0..2_000 {
                        while !map.try_lock(OWNER_DAEMON) {
                            std::thread::yield_now();
                        }
                        assert_eq!(INSIDE.fetch_add(1, Ordering::Relaxed), 0);
                        assert_eq!(INSIDE.fetch_sub(1, Ordering::Relaxed), 1);
                        map.unlock();
                    }
                });
                for _ in 0..2_000 {
                    assert!(map.lock_within(10_000));
                    assert_eq!(INSIDE.fetch_add(1, Ordering::Relaxed), 0);
                    assert_eq!(INSIDE.fetch_sub(1, Ordering::Relaxed), 1);
                    map.unlock();
                }
            });
        });
    }
}
