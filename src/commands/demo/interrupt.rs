//! The demonstration can be interrupted at any time: all that waits asks here whether it is to go on.

use crate::error::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Pause between two looks whether we are asked to end.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// The signal by which we were asked to end; 0 for none.
static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
}

/// Has signals end us only once all is put back; a second one ends us at once.
pub(super) fn heed_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: all zeros is an action, which the kernel then fills; the handler only stores to an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            // A signal that the caller had ignored stays ignored, as nohup wants.
            if libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction != libc::SIG_IGN {
                action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_RESTART | libc::SA_RESETHAND;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}

/// To be called again and again by all that waits.
pub(super) fn go_on() -> Result<(), Error> {
    if ASKED.load(Ordering::Relaxed) == 0 { Ok(()) } else { Err("interrupted".into()) }
}

/// Has the process of `command` get `signal` should we be killed. For the main thread: it is the end of the one that
/// starts it that counts.
pub(super) fn end_with_us(command: &mut Command, signal: libc::c_int) -> &mut Command {
    let us = std::process::id() as libc::pid_t;
    // SAFETY: system calls alone between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong);
            // We may be gone already.
            if libc::getppid() != us {
                libc::_exit(1);
            }
            Ok(())
        })
    }
}

/// Waits, unless we are asked to end.
pub(super) fn pause(time: Duration) -> Result<(), Error> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        go_on()?;
        std::thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
    }
    go_on()
}

/// Ends us by the signal that asked for it, if one did.
pub(super) fn end_as_asked() {
    let signal = ASKED.load(Ordering::Relaxed);
    if signal != 0 {
        // SAFETY: signal(2) sets the default action, so no handler of ours runs; raise(3) takes no pointer.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

/// Waits until `ready` says so.
pub(super) fn wait_for(mut ready: impl FnMut() -> bool, limit: Duration, what: &str) -> Result<(), Error> {
    let began = Instant::now();
    while !ready() {
        go_on()?;
        if began.elapsed() > limit {
            return Err(what.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
