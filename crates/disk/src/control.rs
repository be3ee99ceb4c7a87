//! The control socket of a mount: one line in, one line of JSON out.
//!
//! Requests: `status`, `flush`, `stop`; the last is answered by a second line when everything is written back, which
//! tells what was not. A socket lies in the runtime directory of its user, named after its mount
//! point; only that user and root are answered. Whoever connects gets two seconds for his line, so nobody can hold
//! the others up.

use crate::stats::Status;
use pagefold_os::own;
use pagefold_os::sock::{PATH_BYTES_MAX, in_time, is_served};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest request line.
const LINE_BYTES_MAX: u64 = 256;
const PATIENCE: Duration = Duration::from_secs(2);

/// What a client can ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// What the cache holds and saves.
    Status,
    /// Make everything durable.
    Flush,
    /// Unmount and end.
    Stop,
}

impl Command {
    /// Reads a request line.
    pub fn parse(line: &[u8]) -> Option<Self> {
        match line.trim_ascii() {
            b"status" => Some(Self::Status),
            b"flush" => Some(Self::Flush),
            b"stop" => Some(Self::Stop),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Flush => "flush",
            Self::Stop => "stop",
        }
    }
}

/// The directory of this user's sockets: see [`own::runtime_dir`].
pub fn runtime_dir() -> PathBuf {
    // Without a current directory a relative name leads nowhere, and whoever goes there says so.
    own::runtime_dir().unwrap_or_else(|_| std::env::var_os("PAGEFOLD_RUNTIME_DIR").unwrap_or_default().into())
}

/// Makes the directory at `path`, for this user alone, if it is missing. To be called before anything is put there.
///
/// # Errors
/// As [`own::make_own`], and a path too long for a socket's.
pub fn make_own(path: &Path) -> io::Result<()> {
    let cure = |error: io::Error| {
        io::Error::new(error.kind(), format!("{error}; set PAGEFOLD_RUNTIME_DIR to another directory"))
    };
    if path.as_os_str().len() > DIR_BYTES_MAX {
        let why = format!("{}: longer than {DIR_BYTES_MAX} bytes, too long for sockets", path.display());
        return Err(cure(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    own::make_own(path).map_err(cure)
}

/// Longest directory in which a mount's socket has such a path.
const DIR_BYTES_MAX: usize = PATH_BYTES_MAX - "/disk-0123456789abcdef.sock".len();

/// The socket of the mount at `mountpoint`, which must be absolute and without links.
pub fn socket_path(mountpoint: &Path) -> PathBuf {
    let hash = xxhash_rust::xxh3::xxh3_64(mountpoint.as_os_str().as_bytes());
    runtime_dir().join(format!("disk-{hash:016x}.sock"))
}

/// The sockets of all mounts of this user, dead ones included.
pub fn sockets() -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(runtime_dir()) else { return Vec::new() };
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("disk-") && name.ends_with(".sock")
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_ours).collect();
    paths.sort();
    paths
}

/// Binds the socket of `mountpoint`, taking the place of one whose process is gone.
///
/// # Errors
/// The runtime directory is somebody else's, or another process answers there.
pub fn bind(mountpoint: &Path) -> io::Result<(UnixListener, PathBuf)> {
    make_own(&runtime_dir())?;
    let path = socket_path(mountpoint);
    if is_served(path.as_os_str().as_bytes())? {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok((listener, path))
}

/// How a mount ended: the second line of the answer to `stop`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// What could not be written back, or not made durable.
    pub unwritten: Vec<Lost>,
}

/// Data of one image that the disk refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    /// The image.
    pub name: String,
    /// How many bytes could not be written; 0 if all were, and only to have them made durable failed.
    pub bytes: u64,
    /// What the disk said.
    pub error: String,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Lost { name, bytes, error } = self;
        match bytes {
            0 => {
                write!(out, "{name} was written, but fsync failed, and a crash may lose what was written last: {error}")
            }
            _ => write!(out, "{bytes} bytes of {name} could not be written and are lost: {error}"),
        }
    }
}

impl Ended {
    /// Tells those who asked the mount to end.
    pub(crate) fn tell(&self, clients: impl IntoIterator<Item = UnixStream>) {
        let line = serde_json::to_string(self).unwrap_or_default() + "\n";
        for mut client in clients {
            // Who went away need not know.
            let _ = client.write_all(line.as_bytes());
        }
    }
}

/// Gives each connection to `serve`, for as long as the process lives.
pub(crate) fn accept_all(listener: &UnixListener, mut serve: impl FnMut(UnixStream)) -> ! {
    loop {
        match listener.accept() {
            Ok((stream, _)) => serve(stream),
            // Descriptors or memory are short, and would be at once again.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Serves one connection: reads a request, sends what `answer` gives for it, which may keep the connection for more.
///
/// # Errors
/// The connection's; the server only goes on to the next one.
pub fn serve(stream: UnixStream, answer: impl FnOnce(Command, &UnixStream) -> String) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    let mut stream = stream;
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        return stream.write_all(b"{\"error\":\"not your mount\"}\n");
    }
    let mut line = Vec::new();
    BufReader::new((&stream).take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    let mut reply = match Command::parse(&line) {
        Some(command) => answer(command, &stream),
        None => r#"{"error":"unknown request; there are status, flush and stop"}"#.to_owned(),
    };
    reply.push('\n');
    stream.write_all(reply.as_bytes())
}

/// Connects to `socket`; neither that nor a call on it takes longer than `patience`.
fn connect(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
    let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let patience = patience.min(PATIENCE_MAX);
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, Some(patience))?;
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Recv, Some(patience))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?).map_err(|errno| in_time(errno.into(), patience))?;
    Ok(stream.into())
}

/// Longer than anybody waits, and no more than the kernel takes.
const PATIENCE_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// Sends a request to the mount behind `socket` and returns its answer.
///
/// # Errors
/// `ConnectionRefused` when its process is gone; `TimedOut` when it does not answer within `patience`.
pub fn ask(socket: &Path, command: Command, patience: Duration) -> io::Result<String> {
    let mut stream = connect(socket, patience)?;
    let mut reply = String::new();
    let request = format!("{}\n", command.name());
    let asked = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut reply));
    asked.map_err(|error| in_time(error, patience))?;
    Ok(reply)
}

/// Asks the mount behind `socket` to end and waits until it has, however long it writes back. `None` if it did not say
/// how it ended.
///
/// # Errors
/// As [`ask`], as long as it has not agreed.
pub fn stop(socket: &Path, patience: Duration) -> io::Result<Option<Ended>> {
    let late = |error| in_time(error, patience);
    let mut stream = connect(socket, patience)?;
    stream.write_all(format!("{}\n", Command::Stop.name()).as_bytes()).map_err(late)?;
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    reader.read_line(&mut line).map_err(late)?;
    stream.set_read_timeout(None)?;
    // The first line may come second where there is nothing to write back. A mount that dies says no more.
    loop {
        if let Ok(ended) = serde_json::from_str(&line) {
            return Ok(Some(ended));
        }
        line.clear();
        if !matches!(reader.read_line(&mut line), Ok(1..)) {
            return Ok(None);
        }
    }
}

/// The status of the mount behind `socket`.
///
/// # Errors
/// As [`ask`], and an answer that is no status.
pub fn ask_status(socket: &Path) -> io::Result<Status> {
    let reply = ask(socket, Command::Status, Duration::from_secs(10))?;
    serde_json::from_str(&reply)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{error}: {reply}")))
}

/// The statuses of all mounts of this user that answer within `patience` each.
pub fn statuses(patience: Duration) -> Vec<Status> {
    let status = |socket: PathBuf| serde_json::from_str(&ask(&socket, Command::Status, patience).ok()?).ok();
    sockets().into_iter().filter_map(status).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_not_called_lost() {
        let said = |bytes| Lost { name: "a".into(), bytes, error: "EIO".into() }.to_string();
        assert_eq!(said(4096), "4096 bytes of a could not be written and are lost: EIO");
        assert_eq!(said(0), "a was written, but fsync failed, and a crash may lose what was written last: EIO");
    }

    #[test]
    fn who_says_nothing_is_late_whatever_it_was_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let patience = Duration::from_millis(50);
        let late = |asked: io::Result<()>| {
            let error = asked.unwrap_err();
            assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::TimedOut, "no word in 50ms".to_owned()));
        };
        late(ask(&path, Command::Status, patience).map(drop));
        late(stop(&path, patience).map(drop));
        // Nor is the connection waited for.
        let (_few, few) = (sock_of_few(&dir.path().join("few")), dir.path().join("few"));
        let mut waiting = Vec::new();
        while let Ok(connection) = connect(&few, patience) {
            waiting.push(connection);
        }
        late(ask(&few, Command::Status, patience).map(drop));
    }

    /// A listener that has room for few who wait.
    fn sock_of_few(path: &Path) -> rustix::fd::OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        socket
    }

    #[test]
    fn a_request_is_answered_and_nonsense_is_told_so() {
        for (sent, expected) in
            [("status\n", "{\"is\":\"Status\"}\n"), ("stat", "unknown"), (&"x".repeat(5000), "unknown")]
        {
            let (client, server) = UnixStream::pair().unwrap();
            let thread = std::thread::spawn(move || serve(server, |command, _| format!("{{\"is\":\"{command:?}\"}}")));
            let mut client = client;
            // The server may stop reading and close before all of a long line is sent.
            let _ = client.write_all(sent.as_bytes());
            let _ = client.shutdown(std::net::Shutdown::Write);
            let mut reply = String::new();
            let _ = client.read_to_string(&mut reply);
            let _ = thread.join().unwrap();
            assert!(reply.contains(expected), "{sent:.20} got {reply}");
        }
    }
}
