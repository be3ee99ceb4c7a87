//! The preloaded form: it follows the program's own memory calls.
//!
//! Each function here stands before the C library's: it makes the same system
//! call, with the mapping lock held where mappings end, and notes what the daemon
//! should know. Nothing allocates; errors are the kernel's own, in `errno`.
//!
//! The rooms that follow calls: `mapping`, `advice`, `locks`, `seals`, `keys`, `fork`, `malloc`, `without_agent`, `filters`,
//! `credentials`, `userfaultfd`, `proc_task`, and `syscall` for those that come as a number. Below them: `active` says
//! whether there is anything to follow, `early` notes what is mapped before that is known, `suspend` sends the agent away
//! and has it back, `unmerge` makes memory plain, `pins` tells what is held.

mod active;
mod advice;
mod c_library;
mod credentials;
mod early;
mod filters;
mod fork;
mod keys;
mod locks;
mod malloc;
mod manageable;
mod mapping;
mod pins;
mod proc_task;
mod ranges;
mod seals;
mod suspend;
mod syscall;
mod unmerge;
mod userfaultfd;
mod without_agent;

use crate::cold;
use crate::owned_ranges::{self, Owned};
use crate::process::mark_origin;
use crate::state::SHARED;
use active::ACTIVE;
use c_library::{glibc, glibc_version, is_instrumented, next, text};
use core::ffi::CStr;
use core::sync::atomic::Ordering;
use fork::{NEXT_CLONE, NEXT_FORK, NEXT_LIBC_FORK, register_first};
use malloc::{NEXT_REALLOC, look_at_allocator, next_free};
use mapping::{ZONE_NEXT, ZONE_START};
use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, Range, mem, syscall};
use suspend::start_unless_away;
use userfaultfd::NEXT_IOCTL;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // A mistake of ours must not go on: the kernel's abort is clean.
    loop {
        // SAFETY: ends the process.
        let _ = unsafe { syscall!(libc::SYS_kill, libc::getpid(), libc::SIGABRT) };
    }
}

/// True if the kernel places this program's memory as in every run. By a file: a filter may forbid personality(2).
fn is_placed_alike() -> bool {
    let mut digits = [0u8; 8];
    let file = Fd::open(c"/proc/self/personality", libc::O_RDONLY, 0);
    let read = file.and_then(|file| file.read(&mut digits)) == Ok(digits.len());
    let personality = core::str::from_utf8(&digits).ok().and_then(|text| u32::from_str_radix(text, 16).ok());
    read && personality.is_some_and(|bits| bits & libc::ADDR_NO_RANDOMIZE as u32 != 0)
}

/// Registers the library's zero-initialized statics, for which its file has no bytes, as the agent's own memory.
fn register_statics() {
    unsafe extern "C" {
        static __bss_start: u8;
        static _end: u8;
    }
    let (start, end) = (&raw const __bss_start as u64, &raw const _end as u64);
    let page = PAGE_SIZE as u64;
    owned_ranges::register(Owned::Statics, Range { start: start & !(page - 1), end: end.next_multiple_of(page) });
}

/// Runs before the program's own code.
extern "C" fn begin() {
    let manages_all = prepare();
    early::end(manages_all == Some(true));
    let Some(manages_all) = manages_all else { return };
    ACTIVE.store(true, Ordering::Release);
    // The C library's allocator maps memory without our seeing it, so there may never be a better moment.
    if manages_all {
        start_unless_away();
    }
}

/// Prepares to follow the program's calls. Returns whether all its memory is to be managed; nothing if no call is to be
/// followed.
fn prepare() -> Option<bool> {
    // Before there are other threads: what serves during the first lookup is not theirs if another allocator is preloaded.
    next_free();
    next(&NEXT_REALLOC, c"realloc".as_ptr(), glibc().realloc);
    // Looked up now: later it might be in a signal handler.
    next(&NEXT_FORK, c"_Fork".as_ptr(), 0);
    next(&NEXT_LIBC_FORK, c"fork".as_ptr(), 0);
    next(&NEXT_CLONE, c"clone".as_ptr(), 0);
    next(&NEXT_IOCTL, c"ioctl".as_ptr(), 0);
    credentials::look_up();
    proc_task::look_up();
    // Another C library does other things from within (forks, blocks): its program runs as without us.
    glibc_version()?;
    let socket = text(c"PAGEFOLD_SOCKET").filter(|_| !is_instrumented())?;
    let domain = text(c"PAGEFOLD_DOMAIN").unwrap_or(b"");
    let cold = text(c"PAGEFOLD_COLD") == Some(b"1");
    let all = cold || text(c"PAGEFOLD_MANAGE") == Some(b"all");
    if cold {
        let number = |name: &CStr| {
            let digits = text(name).unwrap_or(b"").iter().take_while(|byte| byte.is_ascii_digit()).take(18);
            digits.fold(0u64, |all, digit| all * 10 + u64::from(digit - b'0'))
        };
        cold::TOLERANCE_PPM.store(number(c"PAGEFOLD_REFAULT_BUDGET"), Ordering::Relaxed);
        cold::TIER_MAX.store(number(c"PAGEFOLD_TIER_MAX"), Ordering::Relaxed);
        cold::COLD.store(true, Ordering::Relaxed);
    }
    if !SHARED.configure(socket, domain, all) {
        return None;
    }
    look_at_allocator();
    // The zone starts anywhere in 16 TiB, as the kernel's own placement would; where that is always the same, so is ours.
    let mut random = 0u64;
    if !is_placed_alike() {
        // SAFETY: the kernel fills the 8 bytes.
        let _ = unsafe { syscall!(libc::SYS_getrandom, core::ptr::from_mut(&mut random), 8, 0) };
    }
    ZONE_NEXT.store(ZONE_START + (random % (16 << 40)) / (2 << 20) * (2 << 20), Ordering::Relaxed);
    mem::keep_apart(random.rotate_left(32));
    register_first();
    mark_origin();
    register_statics();
    Some(all)
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
