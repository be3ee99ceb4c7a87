//! The program's pins, as its own thread sees them (see [`pinning_devices`](pagefold_protocol::pinning_devices)).

use core::ffi::CStr;
use pagefold_os::fd::Fd;
use pagefold_os::syscall;
use pagefold_protocol::pinning_devices::may_pin_pages;

/// Returns true if memory is pinned for good, as registered buffers are. Where /proc is out of reach that is unknown, and the kernel could
/// not copy in place either: memory that is not unshared then has no agent.
pub(super) fn are_registered() -> bool {
    let Ok(file) = Fd::open(c"/proc/thread-self/status", libc::O_RDONLY, 0) else { return false };
    let mut text = [0; 4 << 10];
    let mut len = 0;
    while let Ok(got @ 1..) = file.read(&mut text[len..]) {
        len += got;
    }
    let line = text[..len].split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"VmPin:"));
    line.is_none_or(|rest| rest.iter().any(|byte| (b'1'..=b'9').contains(byte)))
}

/// True if memory may be held, for as long as a device reads it or writes there.
pub(super) fn may_be_there() -> bool {
    are_registered() || may_come()
}

/// True if one of the thread's open files may hold memory.
fn may_come() -> bool {
    const HEAD: usize = 19;
    let Ok(dir) = Fd::open(c"/proc/thread-self/fd", libc::O_RDONLY, 0) else { return false };
    let mut list = [0u8; 2 << 10];
    loop {
        // SAFETY: the kernel fills at most as much as there is.
        let got = match unsafe { syscall!(libc::SYS_getdents64, dir.raw(), list.as_mut_ptr(), list.len()) } {
            Ok(0) => return false,
            Ok(got) => got,
            Err(_) => return true,
        };
        let mut rest = &list[..got];
        while rest.len() > HEAD {
            let len = usize::from(u16::from_ne_bytes([rest[16], rest[17]]));
            let Ok(name) = CStr::from_bytes_until_nul(&rest[HEAD..]) else { return true };
            if name.to_bytes()[0].is_ascii_digit() && file_may_hold(&dir, name) {
                return true;
            }
            rest = rest.get(len.max(HEAD)..).unwrap_or(&[]);
        }
    }
}

/// The same of the file `name` in `dir`, the thread's descriptors.
fn file_may_hold(dir: &Fd, name: &CStr) -> bool {
    let number = name.to_bytes().iter().fold(0, |all, digit| all * 10 + usize::from(digit - b'0'));
    // SAFETY: asks only.
    let flags = unsafe { syscall!(libc::SYS_fcntl, number, libc::F_GETFL) }.unwrap_or(0);
    let mut target = [0u8; 64];
    // SAFETY: the kernel fills at most as much as there is.
    let len = unsafe { syscall!(libc::SYS_readlinkat, dir.raw(), name.as_ptr(), target.as_mut_ptr(), target.len()) };
    flags & libc::O_DIRECT as usize != 0
        || may_pin_pages(&target[..len.unwrap_or(0)]) && kind(number) != Some(libc::S_IFBLK)
}

/// What kind of file the descriptor is.
fn kind(number: usize) -> Option<libc::mode_t> {
    let mut about = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills the structure, of which zeros are a value.
    unsafe { syscall!(libc::SYS_fstat, number, about.as_mut_ptr()) }.ok()?;
    // SAFETY: zeroed, and filled by the kernel.
    Some(unsafe { about.assume_init() }.st_mode & libc::S_IFMT)
}
