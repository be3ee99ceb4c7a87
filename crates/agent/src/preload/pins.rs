//! The program's pins, as its own thread sees them (see [`pinning_devices`](pagefold_protocol::pinning_devices)).

use core::ffi::CStr;
use pagefold_os::fd::Fd;
use pagefold_os::syscall;
use pagefold_protocol::pinning_devices::may_pin_pages;

/// Returns true if memory is pinned for good, as registered buffers are. Where /proc is out of reach that is unknown, and
/// the kernel could not copy in place either: memory that is not unshared then has no agent.
///
/// Newer kernels (7.2) count no registered buffers of io_uring in `VmPin`; each ring says for itself how many it has.
pub(super) fn are_registered() -> bool {
    are_counted() || any_file(ring_has_buffers)
}

/// True if `VmPin` says so, or cannot be read.
fn are_counted() -> bool {
    let Ok(file) = Fd::open(c"/proc/thread-self/status", libc::O_RDONLY, 0) else { return false };
    let mut text = [0; 4 << 10];
    line_of(&file, &mut text, b"VmPin:").is_none_or(has_count)
}

/// The rest of the line of `file` that begins with `key`, if all of that line has room in `text`.
fn line_of<'a>(file: &Fd, text: &'a mut [u8], key: &[u8]) -> Option<&'a [u8]> {
    let mut len = 0;
    while let Ok(got @ 1..) = file.read(&mut text[len..]) {
        len += got;
    }
    let whole = text[..len].iter().rposition(|&byte| byte == b'\n').unwrap_or(0);
    text[..whole].split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))
}

fn has_count(rest: &[u8]) -> bool {
    rest.iter().any(|byte| (b'1'..=b'9').contains(byte))
}

/// True if memory may be held, for as long as a device reads it or writes there.
pub(super) fn may_be_there() -> bool {
    are_registered() || any_file(file_may_hold)
}

/// True if `is_such` says so of one of the thread's open files, given the directory of descriptors and the file's name
/// there; or if that cannot be told.
fn any_file(is_such: impl Fn(&Fd, &CStr) -> bool) -> bool {
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
            if name.to_bytes()[0].is_ascii_digit() && is_such(&dir, name) {
                return true;
            }
            rest = rest.get(len.max(HEAD)..).unwrap_or(&[]);
        }
    }
}

/// What the file `name` in `dir` is, as the kernel names it; at most as much as `target` holds.
fn target_of<'a>(dir: &Fd, name: &CStr, target: &'a mut [u8; 64]) -> &'a [u8] {
    // SAFETY: the kernel fills at most as much as there is.
    let len = unsafe { syscall!(libc::SYS_readlinkat, dir.raw(), name.as_ptr(), target.as_mut_ptr(), target.len()) };
    &target[..len.unwrap_or(0)]
}

/// True if `name` in `dir` is a ring with registered buffers, or one that does not say. It does not while it is at work.
fn ring_has_buffers(dir: &Fd, name: &CStr) -> bool {
    if !target_of(dir, name, &mut [0; 64]).starts_with(b"anon_inode:[io_uring]") {
        return false;
    }
    let Ok(about) = Fd::open(c"/proc/thread-self/fdinfo", libc::O_RDONLY, 0)
        .and_then(|about| Fd::open_at(about.raw(), name, libc::O_RDONLY, 0))
    else {
        return true;
    };
    // Behind the entries that wait: where those fill the room, it does not say.
    line_of(&about, &mut [0; 1 << 10], b"UserBufs:").is_none_or(has_count)
}

/// True if the file `name` in `dir`, the thread's descriptors, may hold memory.
fn file_may_hold(dir: &Fd, name: &CStr) -> bool {
    let number = name.to_bytes().iter().fold(0, |all, digit| all * 10 + usize::from(digit - b'0'));
    // SAFETY: asks only.
    let flags = unsafe { syscall!(libc::SYS_fcntl, number, libc::F_GETFL) }.unwrap_or(0);
    flags & libc::O_DIRECT as usize != 0
        || may_pin_pages(target_of(dir, name, &mut [0; 64])) && kind(number) != Some(libc::S_IFBLK)
}

/// What kind of file the descriptor is.
fn kind(number: usize) -> Option<libc::mode_t> {
    let mut about = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills the structure, of which zeros are a value.
    unsafe { syscall!(libc::SYS_fstat, number, about.as_mut_ptr()) }.ok()?;
    // SAFETY: zeroed, and filled by the kernel.
    Some(unsafe { about.assume_init() }.st_mode & libc::S_IFMT)
}
