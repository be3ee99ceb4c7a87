//! systemd's fd store: a second process that holds the descriptors.
//!
//! A service with `FileDescriptorStoreMax=` may store descriptors in the
//! service manager, by name, and gets them back when it is started again. With
//! it, pages survive the death of both the daemon and the keeper.
//!
//! The keeper holds several descriptors under one name. Here each is stored
//! under a name of its own, because the manager passes them in any order:
//! `pagefold-N-` and the keeper's name, in which bytes that a name here may not
//! contain are written as `%` and two digits.

use pagefold_os::fd::Fd;
use pagefold_os::sock;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// First descriptor that the service manager passes.
const FIRST_FD: i32 = 3;
/// Prefix of all stored names.
const PREFIX: &str = "pagefold-";

fn to_io(errno: pagefold_os::Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// The name of the descriptor at `index` of those under `name`; `None` if it would be too long.
fn stored_name(name: &str, index: usize) -> Option<String> {
    use std::fmt::Write;
    let mut stored = format!("{PREFIX}{index}-");
    for byte in name.bytes() {
        if byte.is_ascii_graphic() && byte != b':' && byte != b'%' {
            stored.push(char::from(byte));
        } else {
            let _ = write!(stored, "%{byte:02x}");
        }
    }
    (stored.len() <= 255).then_some(stored)
}

/// Decodes a name of [`stored_name`] to name and index.
fn kept_name(stored: &str) -> Option<(String, usize)> {
    let (index, encoded) = stored.strip_prefix(PREFIX)?.split_once('-')?;
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    Some((String::from_utf8(bytes).ok()?, index.parse().ok()?))
}

/// Stores descriptors in the service manager, under the keeper's name for them; false if there is no manager
/// (`NOTIFY_SOCKET` is not set). Descriptors stored earlier stay.
///
/// # Errors
/// The manager's socket is not reachable, or the name is too long.
pub fn store(name: &str, fds: &[i32]) -> io::Result<bool> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(false) };
    for (index, fd) in fds.iter().enumerate() {
        let name = stored_name(name, index).ok_or(to_io(pagefold_os::Errno(libc::ENAMETOOLONG)))?;
        // Not polled: the manager would drop a userfaultfd that has an event to read.
        notify(path.as_bytes(), &format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &[*fd])?;
    }
    Ok(true)
}

/// Notifies the service manager, if there is one, that this process is ready.
pub fn notify_ready() {
    if let Some(path) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = notify(path.as_bytes(), "READY=1", &[]);
    }
}

/// Removes the descriptors stored under `name`, at most `count`, from the service manager; false as [`store`].
///
/// # Errors
/// As [`store`].
pub fn remove(name: &str, count: usize) -> io::Result<bool> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(false) };
    for name in (0..count).filter_map(|index| stored_name(name, index)) {
        notify(path.as_bytes(), &format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])?;
    }
    Ok(true)
}

/// Takes the stored descriptors that the service manager passed to this process, by the keeper's names and in the order in
/// which they were stored. Later calls return nothing. A name without its first descriptor is left out, and so are
/// descriptors after a gap.
pub fn take_passed() -> Vec<(String, Vec<Fd>)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::AcqRel) {
        return Vec::new();
    }
    let value = |name| std::env::var(name).unwrap_or_default();
    let names = std::env::var("LISTEN_FDNAMES").ok();
    let all = passed(std::process::id(), &value("LISTEN_PID"), &value("LISTEN_FDS"), names.as_deref());
    let mut found: BTreeMap<String, BTreeMap<usize, Fd>> = BTreeMap::new();
    for (stored, number) in all {
        let Some((name, index)) = kept_name(&stored) else { continue };
        // Child processes must not inherit it. Fails if the descriptor is not open.
        // SAFETY: `F_SETFD` takes no pointer.
        if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } == 0 {
            // SAFETY: the manager passed the descriptor to this process under a stored name, and `TAKEN` makes this the only
            // owner.
            let fd = unsafe { Fd::from_raw(number) };
            found.entry(name).or_default().insert(index, fd);
        }
    }
    let in_order = |fds: BTreeMap<usize, Fd>| -> Vec<Fd> {
        fds.into_iter().enumerate().map_while(|(wanted, (index, fd))| (wanted == index).then_some(fd)).collect()
    };
    let whole = found.into_iter().map(|(name, fds)| (name, in_order(fds)));
    whole.filter(|(_, fds)| !fds.is_empty()).collect()
}

fn notify(path: &[u8], text: &str, fds: &[i32]) -> io::Result<()> {
    let mut path = path.to_vec();
    if path.first() == Some(&b'@') {
        path[0] = 0;
    }
    let (address, len) = sock::address(&path).map_err(to_io)?;
    // SAFETY: socket(2) takes no pointer.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { Fd::from_raw(fd) };
    // SAFETY: the address outlives the call and is at least `len` bytes long.
    if unsafe { libc::connect(socket.raw(), (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    sock::send(&socket, text.as_bytes(), fds).map_err(to_io)
}

/// Names and numbers of the descriptors that the service manager passed to process `pid`, from the values of
/// `LISTEN_PID`, `LISTEN_FDS` and `LISTEN_FDNAMES`; without names, all are named "unknown".
fn passed(pid: u32, listen_pid: &str, listen_fds: &str, listen_fdnames: Option<&str>) -> Vec<(String, i32)> {
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
    fn the_manager_receives_name_and_descriptor() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        let file = pagefold_os::memfd::create(c"left", 4096).unwrap();
        file.write(b"left behind").unwrap();
        notify(path.as_os_str().as_bytes(), "FDSTORE=1\nFDNAME=tier", &[file.raw()]).unwrap();
        // SAFETY: the copy is owned by `socket` alone.
        let socket = unsafe { Fd::from_raw(libc::dup(manager.as_raw_fd())) };
        let mut text = [0; 100];
        let (len, mut fds) = sock::receive(&socket, &mut text, 0).unwrap();
        assert_eq!(&text[..len], b"FDSTORE=1\nFDNAME=tier");
        let mut bytes = [0; 11];
        fds.take(0).unwrap().read_at(&mut bytes, 0).unwrap();
        assert_eq!((fds.len(), &bytes), (1, b"left behind"));
    }

    #[test]
    fn any_name_survives_encoding() {
        for name in ["arena:1f:0:default", "", "a%3Ab", "client:1:2:3", "f\u{fc}r:\n=1", &"x".repeat(128)] {
            let stored = stored_name(name, 2).unwrap();
            assert!(stored.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':'), "{stored}");
            assert_eq!(kept_name(&stored), Some((name.to_owned(), 2)));
        }
        assert_eq!(stored_name(&":".repeat(128), 0), None);
        for other in
            ["unknown", "pagefold-", "pagefold-1", "pagefold-x-a", "pagefold-1-%f", "pagefold-1-%zz", "pagefold-1-%ff"]
        {
            assert_eq!(kept_name(other), None, "{other}");
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
