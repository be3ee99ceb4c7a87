//! Threads of ours, made by a raw clone(2).
//!
//! The C library knows nothing of them: no thread-local storage, so no `errno`; no signal of the program's is ever delivered
//! to one; and its table of descriptors is its own as soon as it runs. A thread's number is a word that the kernel clears
//! and wakes when it is gone, a moment before the kernel has closed what it had open. Its stack stays for the next one.

use crate::owned_ranges::{self, Owned};
use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, Ordering};
use pagefold_os::signal::Blocked;
use pagefold_os::{PAGE_SIZE, Range, mem, syscall};
use pagefold_protocol::seccomp_filter::{ATTACHED_THREAD_FLAGS, THREAD_FLAGS};

const STACK_LEN: usize = 256 << 10;

/// In tests the threads run code of the standard library, which uses thread-local storage.
const FLAGS: libc::c_int =
    if cfg!(all(feature = "attached", not(test))) { ATTACHED_THREAD_FLAGS } else { THREAD_FLAGS };

/// Bytes of the longest path of a thread's file in /proc.
#[cfg(feature = "preload")]
pub(crate) const TASK_PATH_LEN: usize = 48;

/// Lets others run.
pub(crate) fn yield_now() {
    // SAFETY: the call takes no arguments.
    let _ = unsafe { syscall!(libc::SYS_sched_yield) };
}

/// A thread of ours.
#[derive(Debug)]
pub struct Thread {
    /// Its number; the kernel clears it when the thread is gone.
    id: AtomicI32,
    /// Its stack, which serves the next one.
    stack: Owned,
}

impl Thread {
    pub(crate) const fn new(stack: Owned) -> Thread {
        Thread { id: AtomicI32::new(0), stack }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.id.load(Ordering::Acquire) == 0
    }

    /// Its number; 0 if it is gone.
    #[cfg(feature = "preload")]
    pub(crate) fn number(&self) -> i32 {
        self.id.load(Ordering::Acquire)
    }

    /// Where /proc tells of it; `name` is one of the files there, or empty for the directory. `None` if it is gone.
    #[cfg(feature = "preload")]
    pub(crate) fn path<'a>(&self, name: &[u8], buffer: &'a mut [u8; TASK_PATH_LEN]) -> Option<&'a CStr> {
        let id = self.id.load(Ordering::Acquire).unsigned_abs();
        let mut digits = [0; 10];
        let (mut first, mut rest) = (digits.len(), id);
        while rest > 0 {
            first -= 1;
            digits[first] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        let mut at = 0;
        for part in [b"/proc/self/task/", &digits[first..], name, b"\0"] {
            buffer.get_mut(at..at + part.len())?.copy_from_slice(part);
            at += part.len();
        }
        if id == 0 { None } else { CStr::from_bytes_until_nul(buffer).ok() }
    }

    /// The calling thread is this one, which another process has started. The word is not cleared when it ends.
    #[cfg(feature = "attached")]
    pub(crate) fn adopt(&self) {
        // SAFETY: the call takes no arguments.
        self.id.store(unsafe { syscall!(libc::SYS_gettid) }.unwrap_or(0) as i32, Ordering::Release);
    }

    /// In a forked child, which has none of its parent's threads.
    #[cfg(feature = "preload")]
    pub(crate) fn forget(&self) {
        self.id.store(0, Ordering::Relaxed);
    }

    /// Starts it, if the one before is gone; `main` never returns.
    pub(crate) fn start(&self, main: extern "C" fn() -> !) -> bool {
        if !self.is_gone() {
            return false;
        }
        let mut stack = owned_ranges::range_of(self.stack);
        if stack.is_empty() {
            let Ok(fresh) = mem::Mapping::anonymous(STACK_LEN) else { return false };
            stack = Range { start: fresh.addr(), end: fresh.addr() + STACK_LEN as u64 };
            core::mem::forget(fresh);
            owned_ranges::register(self.stack, stack);
        }
        let top = stack.end & !15;
        // No signal of the program's may ever be delivered to our thread: it inherits a full mask.
        let blocked = Blocked::all();
        let result = clone_thread(FLAGS, top, self.id.as_ptr(), main);
        drop(blocked);
        result >= 0
    }

    /// Waits until it is gone.
    #[cfg(feature = "preload")]
    pub(crate) fn wait(&self) {
        while !self.is_gone() {
            self.wait_a_moment();
        }
    }

    /// Waits until it is gone, 10 ms at most.
    pub(crate) fn wait_a_moment(&self) {
        let id = self.id.load(Ordering::Acquire);
        if id == 0 {
            return;
        }
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        // SAFETY: the word outlives the call. The kernel wakes it (shared futex) when the thread ends.
        let _ =
            unsafe { syscall!(libc::SYS_futex, self.id.as_ptr(), libc::FUTEX_WAIT, id, core::ptr::from_ref(&timeout)) };
    }
}

/// Starts a thread at `main` on the stack that ends at `top`; the kernel keeps its id in `word`.
#[cfg(target_arch = "x86_64")]
fn clone_thread(flags: libc::c_int, top: u64, word: *mut i32, main: extern "C" fn() -> !) -> isize {
    let result: isize;
    // SAFETY: the new thread starts on its own, aligned stack with rax = 0 and calls `main`, which never returns; the
    // parent goes on after the block. No other thread uses the stack until the kernel has cleared `word`.
    unsafe {
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize, in("rsi") top, in("rdx") word, in("r10") word, in("r8") 0usize,
            in("r9") main as usize,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
fn clone_thread(flags: libc::c_int, top: u64, word: *mut i32, main: extern "C" fn() -> !) -> isize {
    let result: isize;
    // SAFETY: as on x86-64; arm64 takes the child's thread-id word as the fifth argument.
    unsafe {
        core::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "blr x5",
            "brk #1",
            "2:",
            in("x5") main as usize,
            in("x8") libc::SYS_clone, inlateout("x0") flags as isize => result,
            in("x1") top, in("x2") word, in("x3") 0usize, in("x4") word,
        );
    }
    result
}

/// What a thread of ours does first; `name` has 15 bytes at most. False if it cannot have a table of descriptors for itself:
/// then it shares the program's still, and must end.
///
/// A copy of the program's table keeps open what the program closes meanwhile, and closes it as the last one does, which
/// FUSE and NFS answer by a flush that may wait. The kernel makes none of the descriptors from 64 on; the lowest it copies,
/// and closes at once.
#[must_use]
pub(crate) fn begin_thread(name: &CStr) -> bool {
    // SAFETY: close_range(2) takes no pointer. The table is new, and empty when the call is done, or it fails.
    let apart = unsafe { syscall!(libc::SYS_close_range, 0, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
    name_thread(name);
    apart.is_ok()
}

/// Names the calling thread; `name` has 15 bytes at most.
pub(crate) fn name_thread(name: &CStr) {
    // SAFETY: names the thread.
    let _ = unsafe { syscall!(libc::SYS_prctl, libc::PR_SET_NAME, name.as_ptr()) };
}

/// Gives back what deep calls have left of the calling thread's stack, below the frames that are in use: most of it is
/// zeros, in each program that has an agent.
#[inline(never)]
pub(crate) fn trim_stack() {
    // The frames of the calls that do it lie below this one.
    const KEPT: u64 = 2 * PAGE_SIZE as u64;
    let frame = 0u8;
    let at = core::ptr::from_ref(core::hint::black_box(&frame)) as u64;
    for owned in [Owned::Stack, Owned::LoanStack] {
        let stack = owned_ranges::range_of(owned);
        let end = (at & !(PAGE_SIZE as u64 - 1)) - KEPT;
        if (stack.start..stack.end).contains(&at) && end > stack.start {
            // SAFETY: nothing below the stack pointer is in use, and the thread takes no signal.
            let _ = unsafe { mem::advise(stack.start, end - stack.start, libc::MADV_DONTNEED) };
        }
    }
}

pub(crate) fn exit_thread() -> ! {
    loop {
        // SAFETY: ends this thread only; the kernel clears and wakes `SHARED.thread`.
        let _ = unsafe { syscall!(libc::SYS_exit, 0) };
    }
}
