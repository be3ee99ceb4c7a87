//! Waiting until something happens, without looking again and again: bells for poll(2), words for threads.

use crate::fd::Fd;
use crate::raw::Result;
use crate::{sched, syscall};
use core::sync::atomic::AtomicU32;

/// An event descriptor that several may ring and one polls.
#[derive(Debug)]
pub struct Bell(Fd);

impl Bell {
    /// Makes one, silent.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn new() -> Result<Bell> {
        // SAFETY: eventfd2(2) takes no pointer; the descriptor is new and has this one owner.
        unsafe {
            let fd = syscall!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
            Ok(Bell(Fd::from_raw(fd as i32)))
        }
    }

    /// Wakes the polling thread; safe in a signal handler.
    pub fn ring(&self) {
        // It fails only when it rings already.
        let _ = self.0.write(&1u64.to_ne_bytes());
    }

    /// Silences it: what is rung from now on is new.
    pub fn hush(&self) {
        let _ = self.0.read(&mut [0; 8]);
    }

    /// The descriptor to poll for input.
    pub const fn fd(&self) -> &Fd {
        &self.0
    }
}

/// Most words that one call of [`any`] waits for.
pub const WORDS_MAX: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct Waiter {
    value: u64,
    addr: u64,
    flags: u32,
    reserved: u32,
}

/// `FUTEX2_SIZE_U32`, shared between processes.
const SIZE_U32: u32 = 2;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FUTEX_WAITV: libc::c_long = 449;

/// Waits until [`wake`] is called for one of the words, if all have the values given; at most `timeout_ms`. Only the
/// first [`WORDS_MAX`] count.
pub fn any<'a>(words: impl IntoIterator<Item = (&'a AtomicU32, u32)>, timeout_ms: u64) {
    let mut waiters = [Waiter { value: 0, addr: 0, flags: SIZE_U32, reserved: 0 }; WORDS_MAX];
    let mut count = 0;
    for ((word, value), waiter) in words.into_iter().zip(&mut waiters) {
        waiter.value = u64::from(value);
        waiter.addr = word.as_ptr() as u64;
        count += 1;
    }
    let end = sched::monotonic_ns() + timeout_ms * 1_000_000;
    let end = libc::timespec { tv_sec: (end / 1_000_000_000) as i64, tv_nsec: (end % 1_000_000_000) as i64 };
    // SAFETY: the words live as long as their borrows, and the kernel only reads the rest.
    let _ =
        unsafe { syscall!(FUTEX_WAITV, waiters.as_ptr(), count, 0, core::ptr::from_ref(&end), libc::CLOCK_MONOTONIC) };
}

/// Wakes every thread that waits for `word`, in any process. The caller changes the word first: a thread that is about to
/// wait must find it changed.
pub fn wake(word: &AtomicU32) {
    // SAFETY: an address that the kernel only compares.
    let _ = unsafe { syscall!(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    const LONG_MS: u64 = 60_000;

    #[test]
    fn any_of_the_words_ends_the_wait() {
        let words: Vec<AtomicU32> = (0..5).map(AtomicU32::new).collect();
        for changed in 0..5 {
            let seen: Vec<u32> = words.iter().map(|word| word.load(Ordering::Acquire)).collect();
            let began = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    words[changed].fetch_add(1, Ordering::Release);
                    wake(&words[changed]);
                });
                while words[changed].load(Ordering::Acquire) == seen[changed] {
                    any(words.iter().zip(seen.iter().copied()), LONG_MS);
                }
            });
            assert!(began.elapsed() < Duration::from_millis(LONG_MS));
            // Changed since it was seen: no wait at all.
            any(words.iter().zip(seen.iter().copied()), LONG_MS);
            assert!(began.elapsed() < Duration::from_millis(LONG_MS));
        }
        any(words.iter().map(|word| (word, word.load(Ordering::Relaxed))), 1);
    }

    #[test]
    fn a_bell_rings_until_it_is_hushed() {
        let bell = Bell::new().expect("an event descriptor");
        let rings = || {
            let mut polls = [libc::pollfd { fd: bell.fd().raw(), events: libc::POLLIN, revents: 0 }];
            crate::fd::poll(&mut polls, 0).expect("poll") == 1
        };
        assert!(!rings());
        bell.ring();
        bell.ring();
        assert!(rings());
        bell.hush();
        assert!(!rings());
    }
}
