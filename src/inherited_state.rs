//! The state that this process inherited, which it passes on to the program it becomes.
//!
//! Before `main` Rust's runtime ignores SIGPIPE and opens /dev/null for closed standard descriptors, and `Command::exec`
//! resets SIGPIPE to its default. The caller of `pagefold run` meant its own settings for the program, so they are restored.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// SIGPIPE was ignored.
static IGNORED: AtomicBool = AtomicBool::new(false);
/// Which standard descriptors were closed, by bits.
static CLOSED: AtomicU32 = AtomicU32::new(0);

/// Runs before the runtime.
extern "C" fn look() {
    // SAFETY: zeros are a value of it, and the kernel fills it.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks only.
    if unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action) } == 0 {
        IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
    for fd in 0..3 {
        // SAFETY: asks only.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
            CLOSED.fetch_or(1 << fd, Ordering::Relaxed);
        }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

/// Becomes `command`, which begins as this process began; returns only why not.
pub fn exec_as(mut command: Command) -> io::Error {
    pass_on(&mut command);
    let error = command.exec();
    // `exec` has reset SIGPIPE: without this the error message would kill the process if standard error is a closed pipe.
    // SAFETY: no handler is set.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    error
}

fn pass_on(command: &mut Command) {
    let (ignored, closed) = (IGNORED.load(Ordering::Relaxed), CLOSED.load(Ordering::Relaxed));
    let restore = move || {
        // SAFETY: no handler is set; the descriptors are /dev/null, closed if the program begins.
        unsafe {
            if ignored {
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            }
            for fd in (0..3).filter(|fd| closed & 1 << fd != 0) {
                libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
        Ok(())
    };
    // SAFETY: nothing but system calls that are safe between fork and exec.
    unsafe { command.pre_exec(restore) };
}
