//! Keeps processors awake while other threads wait for ours again and again.
//!
//! A thread that waits for another thread's answer puts its own processor to sleep, and waking a processor costs more than
//! many an answer: 20 to 35 us for a halted one of a virtual machine, 100 us and more for the deep states of a real one. A
//! hold on `/dev/cpu_dma_latency` (the kernel's "PM QoS") forbids such sleep to all processors as long as it is open; a
//! process that dies lets go of it. It burns what the sleep would have saved, so it is held only while answers come thick,
//! and a moment longer.

use crate::fd::Fd;
use crate::raw::Result;
use crate::sync::lock;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Mutex;

/// Answers within [`WINDOW_NS`] that make it worth while: each saves one wake or two, 3 % of a processor's time at least.
const THICK: u32 = 16;
const WINDOW_NS: u64 = 10_000_000;
/// How much longer it is held.
const LINGER_NS: u64 = 20_000_000;
/// Pause between looks whether it is still wanted, in milliseconds.
const LOOK_MS: i32 = 10;

/// Longest time to wake that is allowed meanwhile, in microseconds. A real processor's first state takes that at most.
/// A virtual machine's `haltpoll` says 1 of a halt that takes twenty times as long: there processors poll.
fn allowed_us() -> i32 {
    let driver = std::fs::read_to_string("/sys/devices/system/cpu/cpuidle/current_driver").unwrap_or_default();
    if driver.trim() == "haltpoll" { 0 } else { 2 }
}

/// The kernel's file.
pub const PATH: &core::ffi::CStr = c"/dev/cpu_dma_latency";

/// Opens the kernel's file and asks for short wakes; they last until the descriptor is closed.
///
/// # Errors
/// Without the file, or the right to write to it.
pub fn hold() -> Result<Fd> {
    let fd = Fd::open(PATH, libc::O_WRONLY | libc::O_CLOEXEC, 0)?;
    fd.write(&allowed_us().to_ne_bytes())?;
    Ok(fd)
}

/// Holds processors awake while answers come thick.
#[derive(Debug)]
pub struct Awake {
    /// False: never.
    wanted: bool,
    began: AtomicU64,
    count: AtomicU32,
    /// Until when it is held, in monotonic nanoseconds; 0 if it is not.
    until: AtomicU64,
    held: Mutex<Option<Fd>>,
    /// Times that it was taken.
    holds: AtomicU64,
}

impl Awake {
    /// Makes one; not `wanted`, it never holds anything.
    pub const fn new(wanted: bool) -> Awake {
        Awake {
            wanted,
            began: AtomicU64::new(0),
            count: AtomicU32::new(0),
            until: AtomicU64::new(0),
            held: Mutex::new(None),
            holds: AtomicU64::new(0),
        }
    }

    /// `answers` were given by `now` (monotonic nanoseconds), each to a sleeping thread.
    pub fn answered(&self, answers: u32, now: u64) {
        if !self.wanted {
            return;
        }
        // Races lose an answer or two of a count that is a guess anyway.
        if now.saturating_sub(self.began.load(Ordering::Relaxed)) > WINDOW_NS {
            self.began.store(now, Ordering::Relaxed);
            self.count.store(answers, Ordering::Relaxed);
        } else {
            self.count.fetch_add(answers, Ordering::Relaxed);
        }
        if self.count.load(Ordering::Relaxed) < THICK {
            return;
        }
        self.began.store(now, Ordering::Relaxed);
        self.count.store(0, Ordering::Relaxed);
        let until = self.until.load(Ordering::Relaxed);
        if until != 0 {
            // Let go of meanwhile: the next window takes it again.
            let _ = self.until.compare_exchange(until, now + LINGER_NS, Ordering::Relaxed, Ordering::Relaxed);
            return;
        }
        // Under the lock the hold exists if and only if it has an end: no other thread may release it in between.
        let mut held = lock(&self.held);
        if held.is_none() {
            // Without the right to it everything is as it was, only slower.
            *held = hold().ok();
            self.holds.fetch_add(1, Ordering::Relaxed);
        }
        self.until.store(now + LINGER_NS, Ordering::Relaxed);
    }

    /// Releases the hold if nothing was answered for a while. For a thread that waited and got nothing to do.
    pub fn idle(&self, now: u64) {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 || now < until {
            return;
        }
        let mut held = lock(&self.held);
        if self.until.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            *held = None;
        }
    }

    /// How long to wait for work, in milliseconds, before [`idle`](Self::idle) is due: `otherwise` if nothing is held.
    pub fn pause_ms(&self, otherwise: i32) -> i32 {
        if self.until.load(Ordering::Relaxed) == 0 { otherwise } else { LOOK_MS.min(otherwise) }
    }

    /// How often processors were kept awake.
    pub fn holds(&self) -> u64 {
        self.holds.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn held_while_answers_come_thick_and_no_longer() {
        let awake = Awake::new(true);
        // Thin: one per millisecond.
        (0..100).for_each(|ms| awake.answered(1, (1000 + ms) * MS));
        assert_eq!((awake.holds(), awake.pause_ms(500)), (0, 500));
        (0..u64::from(THICK)).for_each(|n| awake.answered(1, 2000 * MS + n * 100_000));
        assert_eq!((awake.holds(), awake.pause_ms(500)), (1, LOOK_MS));
        awake.idle(2010 * MS);
        assert_eq!(awake.pause_ms(500), LOOK_MS, "it lingers");
        awake.answered(THICK, 2015 * MS);
        awake.idle(2030 * MS);
        assert_eq!((awake.holds(), awake.pause_ms(500)), (1, LOOK_MS), "still thick, still the same hold");
        awake.idle(2040 * MS);
        assert_eq!(awake.pause_ms(500), 500);
        assert!(awake.held.lock().unwrap().is_none());
        awake.answered(THICK, 2050 * MS);
        assert_eq!(awake.holds(), 2);
    }

    #[test]
    fn who_does_not_want_it_gets_none() {
        let awake = Awake::new(false);
        (0..1000).for_each(|n| awake.answered(100, n));
        assert_eq!((awake.holds(), awake.pause_ms(7)), (0, 7));
    }

    #[test]
    fn it_is_held_only_while_there_is_an_end_to_it() {
        for _ in 0..1_000 {
            let awake = Awake::new(true);
            let done = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        awake.idle(u64::MAX);
                    }
                });
                (1..10).for_each(|round| awake.answered(THICK, round * MS));
                done.store(true, Ordering::Relaxed);
            });
            awake.idle(u64::MAX);
            assert_eq!(awake.pause_ms(500), 500);
            assert!(awake.held.lock().unwrap().is_none(), "nobody will let go of it");
        }
    }

    #[test]
    fn the_kernel_takes_it_from_root() {
        if crate::user::effective() != 0 || !std::path::Path::new("/dev/cpu_dma_latency").exists() {
            eprintln!("SKIPPED: /dev/cpu_dma_latency is root's, or absent here");
            return;
        }
        let held = hold().expect("root may");
        drop(held);
    }
}
