//! Signals of the calling thread: which of them wait.

use crate::syscall;

/// Signals by number, signal 1 in bit 0: the kernel's form.
pub type Mask = u64;

/// Sets the calling thread's mask and returns the one before; safe in a signal handler.
pub fn set_mask(mask: Mask) -> Mask {
    let mut before: Mask = 0;
    // SAFETY: the kernel reads and writes eight bytes each. It cannot fail with these arguments.
    let _ = unsafe {
        syscall!(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            core::ptr::from_ref(&mask),
            core::ptr::from_mut(&mut before),
            size_of::<Mask>()
        )
    };
    before
}

/// While it lives no signal handler runs in this thread. A fault that would raise one ends the process.
#[derive(Debug)]
pub struct Blocked {
    before: Mask,
    /// The mask belongs to a thread.
    _thread: core::marker::PhantomData<*const ()>,
}

impl Blocked {
    /// Lets every signal wait.
    pub fn all() -> Blocked {
        Blocked { before: set_mask(Mask::MAX), _thread: core::marker::PhantomData }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        set_mask(self.before);
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU32, Ordering};

    static RANG: AtomicU32 = AtomicU32::new(0);

    extern "C" fn ring(_: i32) {
        RANG.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_signal_waits_until_the_guard_is_gone() {
        // SAFETY: the handler only counts.
        unsafe { libc::signal(libc::SIGUSR2, ring as *const () as usize) };
        {
            let _outer = Blocked::all();
            {
                let _inner = Blocked::all();
                // SAFETY: raise(3) takes no pointer, and the handler of `SIGUSR2` only counts.
                unsafe { libc::raise(libc::SIGUSR2) };
            }
            assert_eq!(RANG.load(Ordering::Relaxed), 0, "the inner guard left the outer one's mask");
        }
        assert_eq!(RANG.load(Ordering::Relaxed), 1);
    }
}
