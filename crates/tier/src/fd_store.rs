//! systemd's fd store: the same descriptors in a second pair of hands.
//!
//! A service with `FileDescriptorStoreMax=` may leave descriptors with the
//! service manager, by name, and gets them back when it is started again. This
//! is the keeper of the keeper: with it, pages outlive even both of us.

use pagefold_os::fd::Fd;
use pagefold_os::sock;
use std::io;
use std::os::unix::ffi::OsStrExt;

/// First descriptor that the service manager passes.
const FIRST_FD: i32 = 3;

fn to_io(errno: pagefold_os::Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// Leaves descriptors with the service manager under `name`; false if there is none (`NOTIFY_SOCKET` is not set).
///
/// # Errors
/// The manager's socket is not reachable, or the name has a colon or a line break in it.
pub fn leave(name: &str, fds: &[i32]) -> io::Result<bool> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(false) };
    leave_at(path.as_bytes(), name, fds).map(|()| true)
}

fn leave_at(path: &[u8], name: &str, fds: &[i32]) -> io::Result<()> {
    if name.is_empty() || name.len() > 255 || name.contains([':', '\n']) || name.chars().any(char::is_control) {
        return Err(to_io(pagefold_os::Errno(libc::EINVAL)));
    }
    let mut path = path.to_vec();
    if path.first() == Some(&b'@') {
        path[0] = 0;
    }
    let (address, len) = sock::address(&path).map_err(to_io)?;
    // SAFETY: numbers only.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and is ours.
    let socket = unsafe { Fd::from_raw(fd) };
    // SAFETY: the address outlives the call and is at least `len` bytes long.
    if unsafe { libc::connect(socket.raw(), (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    sock::send(&socket, format!("FDSTORE=1\nFDNAME={name}").as_bytes(), fds).map_err(to_io)
}

/// Names and numbers of the descriptors that the service manager passed to process `pid`, from the values of
/// `LISTEN_PID`, `LISTEN_FDS` and `LISTEN_FDNAMES`.
///
/// The numbers are to be wrapped once, by whoever owns the process's start; without names, all are named "unknown".
pub fn passed(pid: u32, listen_pid: &str, listen_fds: &str, listen_fdnames: Option<&str>) -> Vec<(String, i32)> {
    if listen_pid.parse() != Ok(pid) {
        return Vec::new();
    }
    let count = listen_fds.parse().unwrap_or(0).clamp(0, 4096);
    let mut names = listen_fdnames.unwrap_or("").split(':');
    (FIRST_FD..FIRST_FD + count)
        .map(|fd| (names.next().filter(|name| !name.is_empty()).unwrap_or("unknown").to_owned(), fd))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn the_manager_gets_name_and_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        let file = pagefold_os::memfd::create(c"left", 4096).unwrap();
        file.write(b"left behind").unwrap();
        leave_at(path.as_os_str().as_bytes(), "tier", &[file.raw(), file.raw()]).unwrap();
        // SAFETY: the copy is owned by `socket` alone.
        let socket = unsafe { Fd::from_raw(libc::dup(manager.as_raw_fd())) };
        let mut text = [0; 100];
        let (len, mut fds) = sock::receive(&socket, &mut text, 0).unwrap();
        assert_eq!(&text[..len], b"FDSTORE=1\nFDNAME=tier");
        let mut bytes = [0; 11];
        fds.take(1).unwrap().read_at(&mut bytes, 0).unwrap();
        assert_eq!((fds.len(), &bytes), (2, b"left behind"));
        for name in ["", "a:b", "a\nFDSTOREREMOVE=1"] {
            assert!(leave_at(path.as_os_str().as_bytes(), name, &[file.raw()]).is_err());
        }
    }

    #[test]
    fn passed_descriptors_are_named_in_order() {
        assert_eq!(passed(7, "7", "2", Some("a:b")), [("a".to_owned(), 3), ("b".to_owned(), 4)]);
        assert_eq!(passed(7, "7", "1", None), [("unknown".to_owned(), 3)]);
        assert!(passed(7, "8", "2", Some("a:b")).is_empty());
        assert!(passed(7, "7", "-2", None).is_empty() && passed(7, "7", "x", None).is_empty());
    }
}
