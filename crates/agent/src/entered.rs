//! Where the agent begins in a program that runs already: the first function of its first thread, which opens a socket, has
//! its other end taken and has the userfaultfd enabled (`crates/entry` is the other side).

use crate::attached::{give, keep_page, offer};
use crate::cold;
use crate::owned_ranges::{self, Owned};
use crate::runtime::thread::begin_thread;
use crate::state::{MAY_EXECUTE, MAY_FOLLOW, SHARED};
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::Uffd;
use pagefold_os::{Range, mem, memfd, sock, syscall};
use pagefold_protocol::entry::{EntryPage, stage};
use pagefold_protocol::handshake::receive;
use pagefold_protocol::message::{Op, Packet};

/// How long the entering process may take for each of its steps, in milliseconds.
const STEP_MS: u32 = 10_000;

/// For how long the reason of a failure can be read, in milliseconds.
const FAILED_MS: i32 = 50;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // A mistake of ours must not go on: the kernel's abort is clean.
    loop {
        // SAFETY: ends the process.
        let _ = unsafe { syscall!(libc::SYS_kill, syscall!(libc::SYS_getpid).unwrap_or(0), libc::SIGABRT) };
    }
}

/// The first function of the agent's first thread. `page` lies in the agent's own memory.
///
/// # Safety
/// `page` is the entry page that the entering process has filled, and stays mapped.
#[unsafe(no_mangle)]
unsafe extern "C" fn entered(page: *const EntryPage) -> ! {
    // SAFETY: the caller's.
    let page = unsafe { &*page };
    let [start, len] = page.image;
    owned_ranges::register(Owned::Image, Range { start, end: start + len });
    MAY_FOLLOW.store(page.may_follow == 1, Ordering::Relaxed);
    MAY_EXECUTE.store(page.may_execute == 1, Ordering::Relaxed);
    keep_page(page);
    owned_ranges::register(Owned::Stack, Range { start: page.stack[0], end: page.stack[1] });
    owned_ranges::hide_range(start, len);
    if begin_thread(c"pagefold-agent") {
        match begin(page) {
            Ok(()) => crate::live::entered(),
            Err(Errno(errno)) => page.error.store(errno, Ordering::Relaxed),
        }
    }
    page.stage.store(stage::FAILED, Ordering::Release);
    // The entering process reads why, unless it is what failed.
    let _ = pagefold_os::fd::poll(&mut [], FAILED_MS);
    crate::attached::leave()
}

/// Opens a socket, has the other end taken, and has the userfaultfd enabled.
fn begin(page: &EntryPage) -> Result<()> {
    // What the program unmaps the daemon may still believe to be the program's: no mapping of ours takes its place.
    let mut random = 0u64;
    // SAFETY: the kernel fills the 8 bytes.
    let _ = unsafe { syscall!(libc::SYS_getrandom, core::ptr::from_mut(&mut random), 8, 0) };
    mem::keep_apart(random);
    // SAFETY: `PR_GET_DUMPABLE` takes no pointer.
    if unsafe { syscall!(libc::SYS_prctl, libc::PR_GET_DUMPABLE) } != Ok(1) {
        return Err(Errno(libc::EACCES));
    }
    let requests = offer(page, STEP_MS)?;
    sock::set_timeout(&requests, u64::from(STEP_MS))?;
    let (_, mut fds) = receive(&requests, Op::Welcome)?;
    let hold = match Uffd::bare(fds.take(0).as_ref()) {
        Ok(hold) => hold,
        Err(errno) => {
            let refusal = Packet { status: errno.0, ..Packet::new(Op::Ready) };
            sock::send(&requests, refusal.bytes(), &[])?;
            return Err(errno);
        }
    };
    sock::send(&requests, Packet::new(Op::Ready).bytes(), &[hold.fd().raw()])?;
    let (enabled, mut fds) = receive(&requests, Op::Welcome)?;
    if enabled.status != 0 {
        return Err(Errno(enabled.status));
    }
    if let Some(code) = fds.take(0) {
        share_code(page.image[0], &code);
    }
    let path = page.socket.get(..page.socket_len as usize).ok_or(Errno(libc::EINVAL))?;
    let domain_len = page.domain.iter().position(|byte| *byte == 0).unwrap_or(page.domain.len());
    if !SHARED.configure(path, &page.domain[..domain_len], page.all == 1) {
        return Err(Errno(libc::EALREADY));
    }
    let [tolerance_ppm, tier_max] = page.cold_options;
    cold::TOLERANCE_PPM.store(tolerance_ppm, Ordering::Relaxed);
    cold::TIER_MAX.store(tier_max, Ordering::Relaxed);
    cold::COLD.store(page.cold == 1, Ordering::Relaxed);
    // The tier's has other features, and the daemon enables it with the greeting.
    give(requests, Some(hold).filter(|_| page.cold == 0));
    Ok(())
}

/// Maps the file of the agent's code over the copy that was written to `start`: all programs with an agent share the file's
/// pages. Where the kernel refuses that, the copy stays.
fn share_code(start: u64, file: &Fd) {
    let Ok((len, _)) = memfd::len_and_inode(file.raw()) else { return };
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    let rights = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the entering process wrote the copy from the bytes of the file, so that whatever executes it, this function
    // included, goes on in the same instructions; and no page of theirs has data.
    if unsafe { mem::map(start, len, rights, flags, file.raw(), 0) }.is_ok() {
        owned_ranges::hide_range(start, len);
    }
}
