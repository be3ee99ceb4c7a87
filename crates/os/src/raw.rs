//! System calls without the C library: the error comes back as a value.

use core::arch::asm;
use core::fmt;

/// An error number of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

/// What a call of this crate returns.
pub type Result<T> = core::result::Result<T, Errno>;

impl Errno {
    /// The kernel's name for the error, for the few that we meet.
    pub const fn name(self) -> &'static str {
        match self.0 {
            libc::EPERM => "EPERM",
            libc::ENOENT => "ENOENT",
            libc::ESRCH => "ESRCH",
            libc::EINTR => "EINTR",
            libc::EIO => "EIO",
            libc::EBADF => "EBADF",
            libc::EAGAIN => "EAGAIN",
            libc::ENOMEM => "ENOMEM",
            libc::EACCES => "EACCES",
            libc::EFAULT => "EFAULT",
            libc::EBUSY => "EBUSY",
            libc::EEXIST => "EEXIST",
            libc::EINVAL => "EINVAL",
            libc::EMFILE => "EMFILE",
            libc::ENFILE => "ENFILE",
            libc::ENOTTY => "ENOTTY",
            libc::ENOSPC => "ENOSPC",
            libc::EPIPE => "EPIPE",
            libc::ENOSYS => "ENOSYS",
            libc::ECONNREFUSED => "ECONNREFUSED",
            libc::ECONNRESET => "ECONNRESET",
            _ => "errno",
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(feature = "std")]
        return write!(f, "{}", std::io::Error::from_raw_os_error(self.0));
        #[cfg(not(feature = "std"))]
        write!(f, "{self:?}")
    }
}

impl core::error::Error for Errno {}

#[cfg(feature = "std")]
impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        std::io::Error::from_raw_os_error(errno.0)
    }
}

/// Makes system call `number` with six arguments and returns what the kernel returned.
///
/// # Safety
/// The caller answers for everything the kernel does on behalf of this call.
#[cfg(target_arch = "x86_64")]
#[inline]
pub unsafe fn syscall6(number: libc::c_long, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the register contract of the x86-64 kernel: rcx and r11 are lost, all else is kept.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result,
             in("rdi") a[0], in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Makes system call `number` with six arguments and returns what the kernel returned.
///
/// # Safety
/// The caller answers for everything the kernel does on behalf of this call.
#[cfg(target_arch = "aarch64")]
#[inline]
pub unsafe fn syscall6(number: libc::c_long, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the register contract of the arm64 kernel.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a[0] => result,
             in("x1") a[1], in("x2") a[2], in("x3") a[3], in("x4") a[4], in("x5") a[5], options(nostack));
    }
    result
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("pagefold knows the system call convention of x86_64 and aarch64 only");

/// Turns the kernel's return value into a result.
///
/// # Errors
/// The error number, if `result` is one.
pub fn check(result: isize) -> Result<usize> {
    if (-4095..0).contains(&result) { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}

/// Makes a system call with up to six arguments; missing ones are zero.
///
/// # Safety
/// As [`syscall6`].
#[macro_export]
macro_rules! syscall {
    ($number:expr $(, $arg:expr)* $(,)?) => {{
        let given: &[usize] = &[$($arg as usize),*];
        let mut args = [0usize; 6];
        let mut index = 0;
        while index < given.len() {
            args[index] = given[index];
            index += 1;
        }
        $crate::raw::check($crate::raw::syscall6($number, args))
    }};
}

/// Calls `f` again for as long as it is interrupted by a signal.
///
/// # Errors
/// Whatever `f` returns, but never `EINTR`.
pub fn retry<T>(mut f: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match f() {
            Err(Errno(libc::EINTR)) => {}
            other => return other,
        }
    }
}
