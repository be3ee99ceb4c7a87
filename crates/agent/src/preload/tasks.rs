//! What a program sees of its threads. Who must be alone counts the links of `/proc/self/task`, as the processes do in which
//! Chromium starts its sandboxes; the agent's threads are none of the program's.

use super::active::active;
use super::c_library::returned;
use crate::chores::count_threads;
use crate::process::is_own_process;
use core::ffi::{CStr, c_char, c_int};
use core::mem::MaybeUninit;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::syscall;

/// Looks again while one of the agent's threads begins or ends.
const TRIES: u32 = 5;

/// stat(2) of `path` below `dir`, with the links of this process's threads as if there were no agent.
///
/// # Safety
/// As fstatat(2).
unsafe fn stat_at(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> Result<()> {
    // SAFETY: the program's own call.
    let call = || unsafe { syscall!(libc::SYS_newfstatat, dir, path, to, flags) }.map(drop);
    call()?;
    let mut before = 0;
    for _ in 0..TRIES {
        let ours = threads();
        // Without any, as behind a filter that may not know the calls made here, there is nothing to leave out.
        if ours == 0 || path.is_null() || !active() || !is_own_process() {
            return Ok(());
        }
        // SAFETY: the kernel has read the name and written the answer.
        if !unsafe { is_task_directory(dir, CStr::from_ptr(path), &*to) } {
            return Ok(());
        }
        if ours == before {
            // SAFETY: as above.
            unsafe { (*to).st_nlink = (*to).st_nlink.saturating_sub(ours) };
            return Ok(());
        }
        before = ours;
        call()?;
    }
    Ok(())
}

/// True if `path` below `dir`, of which `stat` tells, is the directory of this process's threads.
fn is_task_directory(dir: c_int, path: &CStr, stat: &libc::stat) -> bool {
    let mut name = path.to_bytes();
    while let Some(shorter) = name.strip_suffix(b"/") {
        name = shorter;
    }
    if stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
        return false;
    }
    let Some(of) = name.strip_suffix(b"/task") else { return false };
    let of = &of[of.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1)..];
    let number = of.iter().try_fold(0u32, |number, byte| {
        let digit = byte.wrapping_sub(b'0');
        (digit < 10).then(|| number.checked_mul(10)?.checked_add(digit.into())).flatten()
    });
    // SAFETY: returns a number.
    let own = of == b"self" || !of.is_empty() && number == Some(unsafe { libc::getpid() }.unsigned_abs());
    own && is_proc(dir, path)
}

/// Whatever root directory and namespaces the program has by now.
fn is_proc(dir: c_int, path: &CStr) -> bool {
    let Ok(fd) = Fd::open_at(dir, path, libc::O_PATH, 0) else { return false };
    let mut found = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel writes there, or leaves the zeros, which no file system has for its kind.
    unsafe {
        let _ = syscall!(libc::SYS_fstatfs, fd.raw(), found.as_mut_ptr());
        found.assume_init_ref().f_type == libc::PROC_SUPER_MAGIC
    }
}

/// How many of this process's threads are the agent's. Their numbers need not be those of `/proc`, which may be of a
/// namespace above.
fn threads() -> libc::nlink_t {
    count_threads() as libc::nlink_t
}

/// fstatat(2), under each name that programs were linked with.
macro_rules! stats {
    ($($(#[$about:meta])* fn $name:ident($($arg:ident: $kind:ty),*) = ($dir:expr, $path:expr, $to:expr, $flags:expr);)*) => {$(
        $(#[$about])*
        ///
        /// # Safety
        /// As fstatat(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> c_int {
            // SAFETY: the program's own call.
            returned(unsafe { stat_at($dir, $path, $to, $flags) })
        }
    )*};
}

stats! {
    /// fstatat(2).
    fn fstatat(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// fstatat(2).
    fn fstatat64(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// fstatat(2), as the C library had it until 2.32; the first argument is the version of the structure.
    fn __fxstatat(_version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// fstatat(2), as the C library had it until 2.32.
    fn __fxstatat64(_version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// stat(2).
    fn stat(path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
    /// stat(2).
    fn stat64(path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
    /// stat(2), as the C library had it until 2.32.
    fn __xstat(_version: c_int, path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
    /// stat(2), as the C library had it until 2.32.
    fn __xstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
}
