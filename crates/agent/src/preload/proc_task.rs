//! What a program sees of its threads. A program that must have one thread counts the links of `/proc/self/task`, as the
//! processes do in which Chromium starts its sandboxes, or reads `/proc/self/stat`, as Python does at a fork. The agent's
//! threads are not shown.

use super::active::active;
use super::c_library::{fail, next, returned};
use crate::process::is_own_process;
use crate::state::count_threads;
use core::ffi::{CStr, c_char, c_int};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::Errno;
use pagefold_os::{memfd, stat, syscall};

/// Looks again while one of the agent's threads begins or ends.
const TRIES: u32 = 5;

/// Makes `call`, a stat(2) of `path` below `dir` into `to`, with the links of this process's threads as if there were no
/// agent.
///
/// # Safety
/// As fstatat(2).
unsafe fn stat_by(call: impl Fn() -> c_int, dir: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
    let mut before = 0;
    for _ in 0..=TRIES {
        let told = call();
        let ours = threads();
        // Without any, as behind a filter that may not know the calls made here, there is nothing to leave out.
        if told != 0 || ours == 0 || path.is_null() || !active() || !is_own_process() {
            return told;
        }
        // SAFETY: the kernel has read the name, so it is a valid string.
        if !unsafe { is_task_directory(dir, CStr::from_ptr(path), &*to) } {
            return told;
        }
        if ours == before {
            // SAFETY: the call succeeded above, so the kernel has written `to`.
            unsafe { (*to).st_nlink = (*to).st_nlink.saturating_sub(ours as libc::nlink_t) };
            return told;
        }
        before = ours;
    }
    0
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
fn threads() -> u64 {
    count_threads() as u64
}

/// What the kernel tells of the process.
const STAT: &CStr = c"/proc/self/stat";

static NEXT_FOPEN: AtomicUsize = AtomicUsize::new(0);

type FopenFn = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;

/// fopen(3): `/proc/self/stat`, of which Python (since 3.12) reads at each fork whether there are threads beside, tells of
/// the program's own.
///
/// # Safety
/// As fopen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    let found = next(&NEXT_FOPEN, c"fopen".as_ptr(), 0);
    if found == 0 {
        fail(Errno(libc::ENOSYS));
        return core::ptr::null_mut();
    }
    // SAFETY: the C library's function of this name has this type; the program's own call.
    let file = unsafe { core::mem::transmute::<usize, FopenFn>(found)(path, mode) };
    // SAFETY: a path that was opened is a string.
    if file.is_null() || unsafe { CStr::from_ptr(path) } != STAT || threads() == 0 || !active() || !is_own_process() {
        return file;
    }
    let Some(text) = own_stat() else { return file };
    // SAFETY: the descriptor becomes the stream's.
    let told = unsafe { libc::fdopen(text.raw(), mode) };
    if told.is_null() {
        return file;
    }
    core::mem::forget(text);
    // SAFETY: the stream was made here, and has no other user.
    unsafe { libc::fclose(file) };
    told
}

/// fopen(3), the same function on our architectures.
///
/// # Safety
/// As fopen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: passed on.
    unsafe { fopen(path, mode) }
}

/// Returns true if the program may write a short file: a signal ends a program that exceeds its limit of file size. By a
/// file, because other calls may be forbidden.
fn may_write() -> bool {
    let mut text = [0u8; 512];
    let read = Fd::open(c"/proc/self/limits", libc::O_RDONLY, 0).and_then(|file| file.read(&mut text));
    let mut lines = text[..read.unwrap_or(0)].split(|&byte| byte == b'\n');
    let limit = lines.find_map(|line| line.strip_prefix(b"Max file size")).map(<[u8]>::trim_ascii_start);
    // Of so many digits, or `unlimited`.
    limit.and_then(|limit| limit.split(|&byte| byte == b' ').next()).is_some_and(|limit| limit.len() > 4)
}

/// A file with `/proc/self/stat` as if there were no agent.
fn own_stat() -> Option<Fd> {
    may_write().then_some(())?;
    let mut text = [0u8; 1 << 10];
    let len = Fd::open(STAT, libc::O_RDONLY, 0).ok()?.read(&mut text).ok()?;
    let text = &text[..len];
    let field = stat::field(text, 20)?;
    let count = field.parse::<u64>().ok()?.checked_sub(threads())?;
    let start = field.as_ptr() as usize - text.as_ptr() as usize;
    let mut digits = [0; 20];
    let (mut first, mut rest) = (digits.len(), count);
    while rest > 0 || first == digits.len() {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let file = memfd::create(c"stat", 0).ok()?;
    let mut at = 0;
    for part in [&text[..start], &digits[first..], &text[start + field.len()..]] {
        // By calls that a filter allows under which the agent stays; the reader begins at the start.
        // SAFETY: the kernel reads the part.
        let wrote = unsafe { syscall!(libc::SYS_pwrite64, file.raw(), part.as_ptr(), part.len(), at) };
        (wrote == Ok(part.len())).then_some(())?;
        at += part.len();
    }
    Some(file)
}

/// fstatat(2), under each name that programs were linked with. The next library's is called: it may be one that tells
/// otherwise than the kernel, as fakeroot's does.
macro_rules! stats {
    ($($(#[$about:meta])* fn $name:ident($($arg:ident: $kind:ty),*) = ($dir:expr, $path:expr, $to:expr, $flags:expr);)*) => {
        #[allow(non_upper_case_globals)]
        mod cache {
            use super::AtomicUsize;
            $(pub(super) static $name: AtomicUsize = AtomicUsize::new(0);)*
        }

        /// Looks up what is called through here: later it might be in a signal handler.
        pub(super) fn look_up() {
            $(next(&cache::$name, concat!(stringify!($name), "\0").as_ptr().cast(), 0);)*
        }

        $(
            $(#[$about])*
            ///
            /// # Safety
            /// As fstatat(2).
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $kind),*) -> c_int {
                let call = || match cache::$name.load(Ordering::Acquire) {
                    // A name of another version of the C library, or nothing is looked up yet.
                    // SAFETY: the program's own call with its own arguments, as its caller promised.
                    0 => returned(unsafe { syscall!(libc::SYS_newfstatat, $dir, $path, $to, $flags) }.map(drop)),
                    // SAFETY: the linker found a function of this name, which has this type; the arguments are the program's
                    // own.
                    found => unsafe {
                        core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> c_int>(found)($($arg),*)
                    },
                };
                // SAFETY: as the caller promises.
                unsafe { stat_by(call, $dir, $path, $to) }
            }
        )*
    };
}

stats! {
    /// fstatat(2).
    fn fstatat(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// fstatat(2).
    fn fstatat64(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// fstatat(2), as the C library had it until 2.32; the first argument is the version of the structure.
    fn __fxstatat(version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// fstatat(2), as the C library had it until 2.32.
    fn __fxstatat64(version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) = (dir, path, to, flags);
    /// stat(2).
    fn stat(path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
    /// stat(2).
    fn stat64(path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
    /// stat(2), as the C library had it until 2.32.
    fn __xstat(version: c_int, path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
    /// stat(2), as the C library had it until 2.32.
    fn __xstat64(version: c_int, path: *const c_char, to: *mut libc::stat) = (libc::AT_FDCWD, path, to, 0);
}
