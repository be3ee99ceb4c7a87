//! The control socket of a mount: one line in, one line of JSON out.
//!
//! Requests: `status`, `flush`, `stop`. `stop` gets a second line after the final write-back, which names data that
//! could not be written. A socket lies in the runtime directory of its user, named after its mount point. The server
//! answers only that user and root. A client has two seconds to send its line, so that it cannot delay others.

use crate::error::LostData;
use crate::stats::Status;
use pagefold_os::private_dir;
use pagefold_os::sock::{PATH_BYTES_MAX, in_time, is_served};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest request line.
const LINE_BYTES_MAX: u64 = 256;
/// How long the server waits for a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// A client's request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// Report what the cache holds and saves.
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

/// The directory of this user's sockets: see [`private_dir::runtime_dir`].
pub fn runtime_dir() -> PathBuf {
    // Without a current directory a relative name leads nowhere, and using it fails with an error.
    private_dir::runtime_dir().unwrap_or_else(|_| std::env::var_os("PAGEFOLD_RUNTIME_DIR").unwrap_or_default().into())
}

/// Makes the directory at `path`, for this user alone, if it is missing. Callers do this before they create files there.
///
/// # Errors
/// As [`private_dir::make_own`], and `InvalidInput` if the path is too long for sockets.
pub fn make_own(path: &Path) -> io::Result<()> {
    let cure = |error: io::Error| {
        io::Error::new(error.kind(), format!("{error}; set PAGEFOLD_RUNTIME_DIR to another directory"))
    };
    if path.as_os_str().len() > DIR_BYTES_MAX {
        let why = format!("{}: longer than {DIR_BYTES_MAX} bytes, too long for sockets", path.display());
        return Err(cure(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    private_dir::make_own(path).map_err(cure)
}

/// Longest directory path in which a mount's socket path still fits.
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

/// Binds the socket of `mountpoint`, and replaces one that a dead process left.
///
/// # Errors
/// The runtime directory belongs to another user, or another process serves the socket.
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
pub struct StopReport {
    /// Data that could not be written back, or not made durable.
    pub unwritten: Vec<LostData>,
}

impl StopReport {
    /// Sends the report to the clients that asked the mount to stop.
    pub(crate) fn send(&self, clients: impl IntoIterator<Item = UnixStream>) {
        let line = serde_json::to_string(self).unwrap_or_default() + "\n";
        for mut client in clients {
            // A client that has disconnected gets none.
            let _ = client.write_all(line.as_bytes());
        }
    }
}

/// Passes each connection to `serve`, as long as the process lives.
pub(crate) fn accept_all(listener: &UnixListener, mut serve: impl FnMut(UnixStream)) -> ! {
    loop {
        match listener.accept() {
            Ok((stream, _)) => serve(stream),
            // Descriptors or memory are short, and would still be on an immediate retry.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Serves one connection: reads a request and sends the result of `answer`, which may duplicate the connection.
///
/// # Errors
/// The connection's.
pub fn serve(stream: UnixStream, answer: impl FnOnce(Command, &UnixStream) -> String) -> io::Result<()> {
    stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
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

/// Connects to `socket`; neither connecting nor a call on the connection takes longer than `timeout`.
fn connect(socket: &Path, timeout: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
    let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let timeout = timeout.min(TIMEOUT_MAX);
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, Some(timeout))?;
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Recv, Some(timeout))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?).map_err(|errno| in_time(errno.into(), timeout))?;
    Ok(stream.into())
}

/// The longest timeout that the kernel accepts for a socket.
const TIMEOUT_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// Sends a request to the mount that serves `socket` and returns its answer.
///
/// # Errors
/// `ConnectionRefused` if its process is dead; `TimedOut` if it does not answer within `timeout`.
pub fn ask(socket: &Path, command: Command, timeout: Duration) -> io::Result<String> {
    let mut stream = connect(socket, timeout)?;
    let mut reply = String::new();
    let request = format!("{}\n", command.name());
    let asked = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut reply));
    asked.map_err(|error| in_time(error, timeout))?;
    Ok(reply)
}

/// Asks the mount that serves `socket` to stop and waits until it has, however long it writes back. `None` if it sent no
/// report.
///
/// # Errors
/// As [`ask`], until the mount has confirmed the request.
pub fn stop(socket: &Path, timeout: Duration) -> io::Result<Option<StopReport>> {
    let late = |error| in_time(error, timeout);
    let mut stream = connect(socket, timeout)?;
    stream.write_all(format!("{}\n", Command::Stop.name()).as_bytes()).map_err(late)?;
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    reader.read_line(&mut line).map_err(late)?;
    stream.set_read_timeout(None)?;
    // The report may come first if there is nothing to write back. A mount that dies sends no report.
    loop {
        if let Ok(report) = serde_json::from_str(&line) {
            return Ok(Some(report));
        }
        line.clear();
        if !matches!(reader.read_line(&mut line), Ok(1..)) {
            return Ok(None);
        }
    }
}

/// The process that listens on a mount's socket, whether it answers or not.
pub fn server(socket: &Path) -> Option<rustix::process::Pid> {
    let stream = UnixStream::connect(socket).ok()?;
    Some(rustix::net::sockopt::socket_peercred(stream).ok()?.pid)
}

/// The status of the mount that serves `socket`.
///
/// # Errors
/// As [`ask`], and `InvalidData` if the answer is not a status.
pub fn ask_status(socket: &Path) -> io::Result<Status> {
    let reply = ask(socket, Command::Status, Duration::from_secs(10))?;
    serde_json::from_str(&reply)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{error}: {reply}")))
}

/// The statuses of all mounts of this user; a mount that does not answer within `timeout` is left out.
pub fn statuses(timeout: Duration) -> Vec<Status> {
    let status = |socket: PathBuf| serde_json::from_str(&ask(&socket, Command::Status, timeout).ok()?).ok();
    sockets().into_iter().filter_map(status).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_server_times_out_for_every_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _silent = UnixListener::bind(&path).unwrap();
        let timeout = Duration::from_millis(50);
        let late = |asked: io::Result<()>| {
            let error = asked.unwrap_err();
            assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::TimedOut, "no word in 50ms".to_owned()));
        };
        late(ask(&path, Command::Status, timeout).map(drop));
        late(stop(&path, timeout).map(drop));
        // A connection that is not accepted times out, too.
        let short_queue = dir.path().join("short-queue");
        let _listener = listen_with_short_queue(&short_queue);
        let mut waiting = Vec::new();
        while let Ok(connection) = connect(&short_queue, timeout) {
            waiting.push(connection);
        }
        late(ask(&short_queue, Command::Status, timeout).map(drop));
    }

    /// A listener with a queue of one connection.
    fn listen_with_short_queue(path: &Path) -> rustix::fd::OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        socket
    }

    #[test]
    fn a_request_is_answered_and_an_unknown_one_gets_an_error() {
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
