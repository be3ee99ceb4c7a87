//! Kill points: a test asks that the process dies at the n-th store from now.
//!
//! In debug builds and under `--cfg pagefold_stress` the code that changes
//! shared memory passes a point between any two stores. In release builds a
//! point is nothing.

#[cfg(any(debug_assertions, pagefold_stress))]
mod armed {
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Points left until the process dies; 0 means never.
    static LEFT: AtomicU64 = AtomicU64::new(0);

    /// Makes this process die by SIGKILL at the `count`-th kill point from now; 0 disarms.
    pub fn arm(count: u64) {
        LEFT.store(count, Ordering::Relaxed);
    }

    /// Runs `work` in a forked child that dies at its `count`-th kill point; says whether it got that far.
    ///
    /// # Panics
    /// If there is no child to be had, or it ended in another way.
    pub fn dies(count: u64, work: impl FnOnce()) -> bool {
        // SAFETY: the child uses memory of its own or that it shares on purpose, and leaves by _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            arm(count);
            work();
            // SAFETY: leaves the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(status == 0 || libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
        status != 0
    }

    /// Passes a kill point.
    #[inline]
    pub fn point() {
        if LEFT.load(Ordering::Relaxed) != 0 && LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
            // SAFETY: sends a signal to ourselves; no memory is touched.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            loop {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(any(debug_assertions, pagefold_stress))]
pub use armed::{arm, dies, point};

/// Does nothing: kill points exist in debug and stress builds only.
#[cfg(not(any(debug_assertions, pagefold_stress)))]
pub fn arm(_count: u64) {}

/// Does nothing: kill points exist in debug and stress builds only.
#[cfg(not(any(debug_assertions, pagefold_stress)))]
#[inline(always)]
pub fn point() {}
