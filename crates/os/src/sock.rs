//! Unix sockets of packets, with descriptors passed along.

use crate::fd::Fd;
use crate::raw::{Errno, Result, retry};
use crate::syscall;

/// Most descriptors that one packet carries: the kernel's limit, so that none that came is left to be closed on receiving.
pub const FDS_MAX: usize = 253;

/// Makes a socket of whole packets, close-on-exec.
///
/// # Errors
/// As socket(2).
pub fn packet_socket() -> Result<Fd> {
    // SAFETY: socket(2) takes no pointer.
    let fd = unsafe { syscall!(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) }?;
    // SAFETY: just made, ours.
    Ok(unsafe { Fd::from_raw(fd as i32) })
}

/// Makes two sockets of whole packets, close-on-exec, each the other's end.
///
/// # Errors
/// As socketpair(2).
pub fn pair() -> Result<(Fd, Fd)> {
    let (mut fds, kind) = ([0_i32; 2], libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
    // SAFETY: the kernel writes two numbers.
    unsafe { syscall!(libc::SYS_socketpair, libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) }?;
    // SAFETY: both were just made, and are ours.
    Ok(unsafe { (Fd::from_raw(fds[0]), Fd::from_raw(fds[1])) })
}

/// Most bytes of a socket's path: one less than its address holds, which ends it.
pub const PATH_BYTES_MAX: usize = 107;

/// Makes the address of `path`; a leading NUL byte means an abstract name.
///
/// # Errors
/// `ENAMETOOLONG` if the path does not fit.
pub fn address(path: &[u8]) -> Result<(libc::sockaddr_un, u32)> {
    let mut addr = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; PATH_BYTES_MAX + 1] };
    if path.len() > PATH_BYTES_MAX {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    for (to, from) in addr.sun_path.iter_mut().zip(path) {
        *to = *from as libc::c_char;
    }
    let terminator = u32::from(path.first() != Some(&0));
    Ok((addr, 2 + path.len() as u32 + terminator))
}

/// Connects to the socket at `path`.
///
/// # Errors
/// As connect(2).
pub fn connect(path: &[u8]) -> Result<Fd> {
    connect_within(path, 0)
}

/// As [`connect`], after [`set_timeout`]: a listener that accepts no connections holds the caller up no longer than that.
///
/// # Errors
/// As connect(2); `EAGAIN` if the time is over.
pub fn connect_within(path: &[u8], timeout_ms: u64) -> Result<Fd> {
    let socket = packet_socket()?;
    if timeout_ms > 0 {
        set_timeout(&socket, timeout_ms)?;
    }
    let (addr, len) = address(path)?;
    // SAFETY: the address outlives the call.
    retry(|| unsafe { syscall!(libc::SYS_connect, socket.raw(), core::ptr::from_ref(&addr), len) })?;
    Ok(socket)
}

/// Listens at `path`. Only the owner may connect, whatever the mask for new files is.
///
/// # Errors
/// As bind(2) and listen(2).
pub fn listen(path: &[u8]) -> Result<Fd> {
    let socket = packet_socket()?;
    let (addr, len) = address(path)?;
    // The name has the socket's mode from the start.
    crate::memfd::set_mode(&socket, 0o600)?;
    // SAFETY: the address outlives the call.
    unsafe { syscall!(libc::SYS_bind, socket.raw(), core::ptr::from_ref(&addr), len) }?;
    // SAFETY: listen(2) takes no pointer.
    unsafe { syscall!(libc::SYS_listen, socket.raw(), 128) }?;
    Ok(socket)
}

/// Returns false if the listener at the socket `path` is gone or there is no such socket. It does not matter of which kind
/// the socket is, or whether this process may connect. Never waits.
///
/// # Errors
/// As socket(2); `ENAMETOOLONG` if the path does not fit.
pub fn is_served(path: &[u8]) -> Result<bool> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: socket(2) takes no pointer.
    let fd = unsafe { syscall!(libc::SYS_socket, libc::AF_UNIX, kind, 0) }?;
    // SAFETY: just made, ours.
    let socket = unsafe { Fd::from_raw(fd as i32) };
    let (addr, len) = address(path)?;
    // SAFETY: the address outlives the call.
    let connected = retry(|| unsafe { syscall!(libc::SYS_connect, socket.raw(), core::ptr::from_ref(&addr), len) });
    Ok(!matches!(connected, Err(Errno(libc::ECONNREFUSED | libc::ENOENT))))
}

/// Accepts one connection.
///
/// # Errors
/// As accept4(2).
pub fn accept(listener: &Fd) -> Result<Fd> {
    // SAFETY: no address is asked for.
    let fd = retry(|| unsafe { syscall!(libc::SYS_accept4, listener.raw(), 0, 0, libc::SOCK_CLOEXEC) })?;
    // SAFETY: just made, ours.
    Ok(unsafe { Fd::from_raw(fd as i32) })
}

/// Process, user and group at the other end when it connected.
///
/// # Errors
/// As getsockopt(2) `SO_PEERCRED`.
pub fn peer(socket: &Fd) -> Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as u32;
    // SAFETY: the kernel fills at most `len` bytes of the structure.
    unsafe {
        syscall!(
            libc::SYS_getsockopt,
            socket.raw(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            core::ptr::from_mut(&mut cred),
            core::ptr::from_mut(&mut len)
        )
    }?;
    Ok(cred)
}

/// True if the process at the other end was of this process's user when it connected, or listened.
pub fn is_of_own_user(socket: &Fd) -> bool {
    peer(socket).is_ok_and(|peer| peer.uid == crate::user::effective())
}

/// True as long as a process has the other end.
pub fn is_open(socket: &Fd) -> bool {
    let mut polls = [libc::pollfd { fd: socket.raw(), events: libc::POLLRDHUP, revents: 0 }];
    crate::fd::poll(&mut polls, 0) == Ok(0)
}

/// A descriptor of the process at the other end when it connected, which no other process can come to be.
///
/// # Errors
/// As getsockopt(2) `SO_PEERPIDFD` (Linux 6.5).
pub fn peer_process(socket: &Fd) -> Result<Fd> {
    const SO_PEERPIDFD: i32 = 77;
    let mut fd = -1;
    let mut len = size_of::<i32>() as u32;
    // SAFETY: the kernel fills at most `len` bytes, the number of a new descriptor.
    unsafe {
        syscall!(
            libc::SYS_getsockopt,
            socket.raw(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            core::ptr::from_mut(&mut fd),
            core::ptr::from_mut(&mut len)
        )
    }?;
    // SAFETY: just made, ours.
    Ok(unsafe { Fd::from_raw(fd) })
}

/// True if the process of `pidfd` has ended: its number may be another's by now.
pub fn has_ended(pidfd: &Fd) -> bool {
    let mut polls = [libc::pollfd { fd: pidfd.raw(), events: libc::POLLIN, revents: 0 }];
    crate::fd::poll(&mut polls, 0) != Ok(0)
}

/// Lets neither sending nor receiving wait longer than `timeout_ms`.
///
/// # Errors
/// As setsockopt(2).
pub fn set_timeout(socket: &Fd, timeout_ms: u64) -> Result<()> {
    let time = libc::timeval { tv_sec: (timeout_ms / 1000) as i64, tv_usec: (timeout_ms % 1000) as i64 * 1000 };
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        // SAFETY: the structure outlives the call.
        unsafe {
            syscall!(
                libc::SYS_setsockopt,
                socket.raw(),
                libc::SOL_SOCKET,
                option,
                core::ptr::from_ref(&time),
                size_of::<libc::timeval>()
            )
        }?;
    }
    Ok(())
}

/// Translates an error of a socket with a time limit, set by [`set_timeout`] or by the standard library. After the limit the
/// kernel says "try again", which explains nothing; this says [`TimedOut`](std::io::ErrorKind).
#[cfg(feature = "std")]
pub fn in_time(error: std::io::Error, limit: core::time::Duration) -> std::io::Error {
    use std::io::{Error, ErrorKind};
    match error.kind() {
        ErrorKind::WouldBlock => Error::new(ErrorKind::TimedOut, format!("no word in {limit:?}")),
        _ => error,
    }
}

#[repr(C, align(8))]
struct Control {
    bytes: [u8; 16 + 4 * FDS_MAX],
}

/// Sends one packet with descriptors.
///
/// # Errors
/// As sendmsg(2); `EINVAL` for more than [`FDS_MAX`] descriptors.
pub fn send(socket: &Fd, bytes: &[u8], fds: &[i32]) -> Result<()> {
    if fds.len() > FDS_MAX {
        return Err(Errno(libc::EINVAL));
    }
    let mut control = Control { bytes: [0; 16 + 4 * FDS_MAX] };
    let len = 16 + 4 * fds.len();
    control.bytes[..8].copy_from_slice(&len.to_ne_bytes());
    control.bytes[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    control.bytes[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
    for (index, fd) in fds.iter().enumerate() {
        control.bytes[16 + 4 * index..20 + 4 * index].copy_from_slice(&fd.to_ne_bytes());
    }
    let mut iov = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    // SAFETY: all-zero is a valid msghdr.
    let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
    header.msg_iov = &mut iov;
    header.msg_iovlen = 1;
    if !fds.is_empty() {
        header.msg_control = control.bytes.as_mut_ptr().cast();
        header.msg_controllen = (len.next_multiple_of(8)) as _;
    }
    // SAFETY: header, vector and control outlive the call and describe memory we own; the kernel only reads them.
    retry(|| unsafe { syscall!(libc::SYS_sendmsg, socket.raw(), core::ptr::from_ref(&header), libc::MSG_NOSIGNAL) })
        .map(drop)
}

/// Descriptors that came with a packet; those not taken are closed.
#[derive(Debug)]
pub struct Fds {
    fds: [i32; FDS_MAX],
    len: usize,
    cut: bool,
}

impl Fds {
    /// How many there are.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if more were sent than came: this process may not have that many.
    pub const fn is_cut(&self) -> bool {
        self.cut
    }

    /// Takes the descriptor at `index`, once.
    pub fn take(&mut self, index: usize) -> Option<Fd> {
        let fd = self.fds[..self.len].get_mut(index)?;
        if *fd < 0 {
            return None;
        }
        // SAFETY: the kernel made the descriptor for us, and the slot is emptied now.
        Some(unsafe { Fd::from_raw(core::mem::replace(fd, -1)) })
    }
}

impl Drop for Fds {
    fn drop(&mut self) {
        for index in 0..self.len {
            drop(self.take(index));
        }
    }
}

/// Receives one packet into `buffer`; returns its length (0: the other end is closed) and its descriptors.
///
/// # Errors
/// As recvmsg(2); `EMSGSIZE` if the packet does not fit.
pub fn receive(socket: &Fd, buffer: &mut [u8], flags: i32) -> Result<(usize, Fds)> {
    let mut control = Control { bytes: [0; 16 + 4 * FDS_MAX] };
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a valid msghdr.
    let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
    header.msg_iov = &mut iov;
    header.msg_iovlen = 1;
    header.msg_control = control.bytes.as_mut_ptr().cast();
    header.msg_controllen = control.bytes.len() as _;
    let flags = flags | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the kernel writes into `buffer` and `control` within the lengths given.
    let got = retry(|| unsafe { syscall!(libc::SYS_recvmsg, socket.raw(), core::ptr::from_mut(&mut header), flags) })?;
    let mut fds = Fds { fds: [-1; FDS_MAX], len: 0, cut: header.msg_flags & libc::MSG_CTRUNC != 0 };
    let mut at = 0;
    #[allow(clippy::unnecessary_cast)]
    let control_len = (header.msg_controllen as usize).min(control.bytes.len());
    while at + 16 <= control_len {
        let len = usize::from_ne_bytes(control.bytes[at..at + 8].try_into().unwrap_or([0; 8]));
        let level = i32::from_ne_bytes(control.bytes[at + 8..at + 12].try_into().unwrap_or([0; 4]));
        let kind = i32::from_ne_bytes(control.bytes[at + 12..at + 16].try_into().unwrap_or([0; 4]));
        if len < 16 || at + len > control_len {
            break;
        }
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            for fd in control.bytes[at + 16..at + len].chunks_exact(4) {
                if fds.len < FDS_MAX {
                    fds.fds[fds.len] = i32::from_ne_bytes(fd.try_into().unwrap_or([0xff; 4]));
                    fds.len += 1;
                }
            }
        }
        at += len.next_multiple_of(8);
    }
    if header.msg_flags & libc::MSG_TRUNC != 0 {
        return Err(Errno(libc::EMSGSIZE));
    }
    Ok((got, fds))
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    /// The caller need not use the listener's kind of socket. A path that is not a socket has no listener.
    #[test]
    fn a_listener_is_there_for_every_kind_of_socket_until_it_is_gone() {
        use std::os::unix::ffi::OsStrExt;
        let dir = std::env::temp_dir().join(format!("pagefold-served-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let at = |name: &str| dir.join(name);
        let served = |name: &str| is_served(at(name).as_os_str().as_bytes());
        let packets = listen(at("packets").as_os_str().as_bytes());
        let stream = std::os::unix::net::UnixListener::bind(at("stream"));
        let there = [served("packets"), served("stream"), served("none")];
        drop((packets, stream));
        let now = || [served("packets"), served("stream")];
        // A process that another test has just forked holds both until it executes its program.
        let mut gone = now();
        for _ in 0..1000 {
            if gone == [Ok(false), Ok(false)] {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
            gone = now();
        }
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!((there, gone), ([Ok(true), Ok(true), Ok(false)], [Ok(false), Ok(false)]));
        assert!(is_served(&[b'a'; 108]).is_err());
    }

    /// The name has its mode as soon as it is there: bind(2) gives it the one that the socket has by then.
    #[test]
    fn a_listener_is_its_owners_from_the_start() {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("pagefold-sock-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("s");
        // SAFETY: umask(2) takes no pointer. What other tests make meanwhile is temporary.
        let mask = unsafe { libc::umask(0) };
        let listener = listen(path.as_os_str().as_bytes());
        // SAFETY: umask(2) takes no pointer; `mask` is what it was.
        unsafe { libc::umask(mask) };
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(listener.is_ok());
        assert_eq!(mode & 0o777, 0o600);
    }
}
