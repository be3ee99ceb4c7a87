//! Kill points: a test lets its process die at the n-th store from now.
//!
//! In debug builds and under `--cfg pagefold_stress` the code that changes
//! shared memory passes a kill point between any two stores. In release builds a
//! kill point compiles to nothing.

#[cfg(any(debug_assertions, pagefold_stress))]
mod armed {
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Points left until the process dies; 0 means never.
    static LEFT: AtomicU64 = AtomicU64::new(0);

    /// Makes this process die by SIGKILL at the `count`-th kill point from now; 0 disarms.
    pub fn arm(count: u64) {
        LEFT.store(count, Ordering::Relaxed);
    }

    /// Runs `work` in a forked child that dies at its `count`-th kill point. Returns true if the child got that far.
    ///
    /// # Panics
    /// If fork fails, or the child ends in another way.
    pub fn dies(count: u64, work: impl FnOnce()) -> bool {
        // SAFETY: the child uses its own copy of the memory or shares it on purpose, and ends with _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            arm(count);
            work();
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waitpid writes only `status`; `child` is the process just forked.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(status == 0 || libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
        status != 0
    }

    /// Passes a kill point.
    #[inline]
    pub fn point() {
        if LEFT.load(Ordering::Relaxed) != 0 && LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
            // SAFETY: kill takes no pointers; the signal goes to this process.
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
