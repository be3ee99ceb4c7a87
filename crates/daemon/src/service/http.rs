//! A small HTTP server for what people and collectors read: metrics and the web page.
//!
//! It answers GET and nothing else, one request per connection. What may be sent is bounded in bytes, time and
//! connections, and a request is taken only if it is exactly well-formed: a head that two parsers could read
//! differently is refused. On loopback the `Host` must be this machine's own name: a page of another
//! host, with a name that was made to point here (DNS rebinding), must not read what is meant for this machine.

use pagefold_os::sock::PATH_BYTES_MAX;
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest head of a request that is read.
pub const HEAD_BYTES_MAX: usize = 8 << 10;
/// Most fields in a head.
pub const FIELDS_MAX: usize = 64;
/// Most connections at once, for each address that is served.
pub const CONNECTIONS_MAX: usize = 16;
/// How long a whole exchange may take, however slowly the other side reads and writes.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for a connection beyond the limit: all others wait while it is refused.
const BUSY_PATIENCE: Duration = Duration::from_millis(50);

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The target up to the question mark.
    pub path: String,
    /// Names and values after it, decoded.
    pub query: Vec<(String, String)>,
    /// The `Host` field.
    pub host: Option<String>,
    /// The `Accept` fields, in small letters.
    pub accept: Option<String>,
}

impl Request {
    /// The first value of `name` in the query.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Why a request is not answered: status and one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Status code and reason phrase.
    pub status: &'static str,
    /// For the reader of the answer.
    pub why: &'static str,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status code and reason phrase.
    pub status: &'static str,
    /// Of the body.
    pub content_type: &'static str,
    /// What a browser may do with the body; for everything but a page: nothing.
    pub policy: String,
    /// The body.
    pub body: Vec<u8>,
}

/// The policy of what is no page.
const NOTHING: &str = "default-src 'none'; frame-ancestors 'none'";

impl Response {
    /// Found.
    pub fn ok(content_type: &'static str, body: impl Into<Vec<u8>>) -> Response {
        Response { status: "200 OK", content_type, policy: NOTHING.into(), body: body.into() }
    }

    /// A line of text with a status of its own.
    pub fn line(status: &'static str, text: &str) -> Response {
        let body = format!("{text}\n").into_bytes();
        Response { status, content_type: "text/plain; charset=utf-8", policy: NOTHING.into(), body }
    }

    fn head(&self) -> String {
        let allow = if self.status.starts_with("405") { "Allow: GET\r\n" } else { "" };
        format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n\
             Content-Security-Policy: {}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n{allow}\r\n",
            self.status,
            self.content_type,
            self.body.len(),
            self.policy
        )
    }
}

const fn refuse(status: &'static str, why: &'static str) -> Refusal {
    Refusal { status, why }
}

/// Reads the head of a request. `Ok(None)`: it is well-formed so far and not at its end.
///
/// # Errors
/// What to answer, if this can never become a request that is served.
pub fn parse(bytes: &[u8]) -> Result<Option<Request>, Refusal> {
    const BAD: &str = "400 Bad Request";
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return match bytes.len() {
            // What is no letter of a method cannot become one.
            1.. if !bytes[0].is_ascii_uppercase() => Err(refuse(BAD, "this is no HTTP request")),
            0..HEAD_BYTES_MAX => Ok(None),
            _ => Err(refuse("431 Request Header Fields Too Large", "the head of a request has at most 8 KiB here")),
        };
    };
    if end + 4 > HEAD_BYTES_MAX {
        return Err(refuse("431 Request Header Fields Too Large", "the head of a request has at most 8 KiB here"));
    }
    if bytes.len() > end + 4 {
        return Err(refuse(BAD, "one request per connection, and no body"));
    }
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| refuse(BAD, "the head is no text"))?;
    let mut lines = head.split("\r\n");
    let line = lines.next().unwrap_or_default();
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(refuse(BAD, "the first line is not METHOD TARGET VERSION"));
    };
    if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Err(refuse(BAD, "this is no method"));
    }
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return Err(refuse("505 HTTP Version Not Supported", "HTTP/1.1 and 1.0 are served"));
    }
    if method != "GET" {
        return Err(refuse("405 Method Not Allowed", "only GET is served: nothing here can be changed"));
    }
    let mut request = Request::default();
    for (count, line) in lines.enumerate() {
        let (name, value) = line.split_once(':').ok_or(refuse(BAD, "a field of the head has no colon"))?;
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        // A space before the colon and a folded line are read differently by different programs.
        if name.is_empty() || !name.bytes().all(token) {
            return Err(refuse(BAD, "the name of a field is no token"));
        }
        if value.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
            return Err(refuse(BAD, "a field has control characters"));
        }
        if count >= FIELDS_MAX {
            return Err(refuse("431 Request Header Fields Too Large", "at most 64 fields are read"));
        }
        let value = value.trim_matches([' ', '\t']);
        match name.to_ascii_lowercase().as_str() {
            "host" if request.host.is_some() => return Err(refuse(BAD, "two Host fields")),
            "host" => request.host = Some(value.to_owned()),
            "accept" => {
                let kinds = request.accept.get_or_insert_default();
                kinds.push(',');
                kinds.push_str(&value.to_ascii_lowercase());
            }
            "content-length" if value != "0" => return Err(refuse(BAD, "GET has no body here")),
            "transfer-encoding" => return Err(refuse(BAD, "GET has no body here")),
            _ => {}
        }
    }
    if request.host.is_none() && version == "HTTP/1.1" {
        return Err(refuse(BAD, "a Host field is missing"));
    }
    if !target.starts_with('/') || !target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
        return Err(refuse(BAD, "the target is no path"));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    request.path = path.to_owned();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let bad = refuse(BAD, "the query is not percent-encoded UTF-8");
        request.query.push((decoded(name).ok_or(bad)?, decoded(value).ok_or(bad)?));
    }
    Ok(Some(request))
}

/// Undoes percent-encoding; `None` if it is none, or what comes out is no text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                (digit(bytes.next()?)? << 4 | digit(bytes.next()?)?) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

/// True if `host`, a `Host` field, names this machine by a name that no other host can point here. The port is not
/// compared: `ssh -L` gives another one.
pub fn is_own_name(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address stand in brackets.
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    if port.is_some_and(|port| port.parse::<u16>().is_err()) {
        return false;
    }
    if name.eq_ignore_ascii_case("localhost") {
        return true;
    }
    let address = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(inner) => inner.parse::<IpAddr>().ok().filter(IpAddr::is_ipv6),
        None => name.parse::<IpAddr>().ok().filter(IpAddr::is_ipv4),
    };
    address.is_some_and(|address| address.is_loopback())
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// An address of loopback.
    Loopback(std::net::SocketAddr),
    /// A socket in the file system: for its owner (0600), or for a group as well (0660).
    Unix {
        /// Where.
        path: PathBuf,
        /// The group's number.
        group: Option<u32>,
    },
}

impl ListenAddress {
    /// Reads `HOST:PORT`, `unix:PATH` or `unix:PATH,group=NAME`.
    ///
    /// # Errors
    /// One line, if it is neither, or not on loopback.
    pub fn parse(at: &str) -> io::Result<ListenAddress> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        if let Some(path) = at.strip_prefix("unix:") {
            let (path, group) = match path.rsplit_once(",group=") {
                Some((path, name)) => {
                    let number = group(name).ok_or_else(|| {
                        bad(format!("there is no group {name:?}: give a name of /etc/group, or a number"))
                    })?;
                    (path, Some(number))
                }
                None => (path, None),
            };
            if path.is_empty() {
                return Err(bad("unix: wants a path: unix:PATH".into()));
            }
            let path = std::path::absolute(path)?;
            let len = path.as_os_str().len();
            if len > PATH_BYTES_MAX {
                return Err(bad(format!(
                    "{}: {len} bytes, and a socket's path has {PATH_BYTES_MAX} at most; name a shorter one",
                    path.display()
                )));
            }
            return Ok(ListenAddress::Unix { path, group });
        }
        let wanted = "use 127.0.0.1:PORT or unix:PATH";
        let addresses =
            at.to_socket_addrs().map_err(|error| bad(format!("`{at}` is no address ({error}); {wanted}")))?;
        match addresses.into_iter().next() {
            Some(address) if address.ip().is_loopback() => Ok(ListenAddress::Loopback(address)),
            Some(_) => Err(bad(format!("{at} is not a loopback address, and this is for this machine only; {wanted}"))),
            None => Err(bad(format!("`{at}` is no address; {wanted}"))),
        }
    }
}

/// The number of group `name`, which may be a number.
fn group(name: &str) -> Option<u32> {
    let known = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let of_line = |line: &str| {
        let mut words = line.split(':');
        (words.next() == Some(name)).then(|| words.nth(1)?.parse().ok())?
    };
    known.lines().find_map(of_line).or_else(|| name.parse().ok())
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Lets the next read and write wait until `deadline` and no longer.
    fn wait_until(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(Some(left)).and(stream.set_write_timeout(Some(left))),
            Stream::Unix(stream) => stream.set_read_timeout(Some(left)).and(stream.set_write_timeout(Some(left))),
        }
    }

    fn read(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        self.wait_until(deadline)?;
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            self.wait_until(deadline)?;
            let sent = match self {
                Stream::Tcp(stream) => stream.write(bytes)?,
                Stream::Unix(stream) => stream.write(bytes)?,
            };
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Sends `response`, the last that is said.
    fn tell(&mut self, response: &Response, deadline: Instant) -> io::Result<()> {
        self.write_all(response.head().as_bytes(), deadline)?;
        self.write_all(&response.body, deadline)?;
        self.end(deadline);
        Ok(())
    }

    /// Says that nothing follows, and takes what the other side still sends: closing with bytes unread would reset
    /// the connection, and the answer could be lost with it.
    fn end(&mut self, deadline: Instant) {
        let shut = match self {
            Stream::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
        };
        let mut rest = [0; 4096];
        let mut room = 64 * HEAD_BYTES_MAX;
        let deadline = deadline.min(Instant::now() + Duration::from_secs(1));
        while shut.is_ok() && room > 0 {
            match self.read(&mut rest, deadline) {
                Ok(got @ 1..) => room = room.saturating_sub(got),
                _ => return,
            }
        }
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

/// Binds a socket that no process can connect to before its mode is set: it is made in a directory that only this user may
/// enter.
fn bind(path: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    let told = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            let why = "is there and is no socket; name another, or remove it";
            return Err(told(io::Error::new(io::ErrorKind::AlreadyExists, why)));
        }
        // Not of our kind, perhaps: the daemon's own socket takes packets.
        Ok(_) if pagefold_os::sock::is_served(path.as_os_str().as_bytes())? => {
            return Err(told(io::Error::new(io::ErrorKind::AddrInUse, "a process serves there already; name another")));
        }
        _ => {}
    }
    if let Some(dir) = path.parent().filter(|dir| !dir.is_dir()) {
        let why = format!("{} is no directory; make it, or name another", dir.display());
        return Err(told(io::Error::new(io::ErrorKind::NotFound, why)));
    }
    let mut private = path.as_os_str().to_owned();
    private.push(format!(".{}", std::process::id()));
    let private = PathBuf::from(private);
    let make = || {
        std::fs::DirBuilder::new().mode(0o700).create(&private)?;
        let made = private.join("s");
        // Its whole path may be too long for a socket's where `path` is not.
        let dir = std::fs::File::open(&private)?;
        let listener = UnixListener::bind(format!("/proc/self/fd/{}/s", dir.as_raw_fd()))?;
        if group.is_some() {
            std::os::unix::fs::chown(&made, None, group)?;
        }
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        std::fs::set_permissions(&made, std::fs::Permissions::from_mode(mode))?;
        std::fs::rename(&made, path)?;
        Ok(listener)
    };
    let listener = make();
    let _ = std::fs::remove_file(private.join("s"));
    let _ = std::fs::remove_dir(&private);
    listener.map_err(told)
}

/// Serves `answer` at `at` (see [`ListenAddress::parse`]) on threads of its own, the first called `name`. `answer` gives
/// `None` to end a connection without a word. What is returned removes the socket's name, if there is one, when it goes.
///
/// # Errors
/// If the address is none, is not on loopback, or cannot be listened at.
pub fn serve(
    name: &'static str,
    at: &str,
    answer: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static,
) -> io::Result<Served> {
    let address = ListenAddress::parse(at)?;
    let (listener, served) = match &address {
        ListenAddress::Loopback(address) => {
            let listener = TcpListener::bind(address)
                .map_err(|error| io::Error::new(error.kind(), format!("{at}: {error}; name another port")))?;
            // The port that was bound: the one asked for may be 0.
            let at = format!("http://{}/", listener.local_addr()?);
            (Listener::Tcp(listener), Served { at, name: None })
        }
        ListenAddress::Unix { path, group } => {
            let listener = bind(path, *group)?;
            let at = format!("unix:{}", path.display());
            (Listener::Unix(listener), Served { at, name: Some((path.clone(), device_and_inode(path)?)) })
        }
    };
    let check_host = matches!(address, ListenAddress::Loopback(_));
    let answer = Arc::new(answer);
    let open = Arc::new(AtomicUsize::new(0));
    thread::Builder::new().name(name.into()).spawn(move || {
        loop {
            let Ok(mut stream) = listener.accept() else {
                // No descriptor is free, for instance: a busy loop would not free one.
                thread::sleep(Duration::from_millis(50));
                continue;
            };
            if open.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
                open.fetch_sub(1, Ordering::AcqRel);
                let busy = Response::line("503 Service Unavailable", "too many connections at once");
                let _ = stream.tell(&busy, Instant::now() + BUSY_PATIENCE);
                continue;
            }
            let (answer, permit) = (answer.clone(), ConnectionPermit(open.clone()));
            let _ = thread::Builder::new().name(name.into()).stack_size(512 << 10).spawn(move || {
                let _seat = permit;
                let _ = exchange(&mut stream, check_host, &*answer);
            });
        }
    })?;
    Ok(served)
}

fn device_and_inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// What is served. When this is dropped the socket's name in the file system is removed, unless it names another socket by
/// then.
pub struct Served {
    /// Where: `http://ADDRESS/` or `unix:PATH`.
    pub at: String,
    name: Option<(PathBuf, (u64, u64))>,
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some((path, ours)) = &self.name
            && device_and_inode(path).is_ok_and(|found| found == *ours)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The permit of one connection.
struct ConnectionPermit(Arc<AtomicUsize>);

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn exchange(stream: &mut Stream, check_host: bool, answer: &dyn Fn(&Request) -> Option<Response>) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    let mut buffer = [0; 2048];
    let parsed = loop {
        match parse(&bytes) {
            Ok(None) => {}
            Ok(Some(request)) => break Ok(request),
            Err(refusal) => break Err(refusal),
        }
        let got = match stream.read(&mut buffer, deadline) {
            Ok(0) => return Ok(()),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break Err(refuse("408 Request Timeout", "the request took too long")),
        };
        bytes.extend_from_slice(&buffer[..got]);
    };
    let response = match parsed {
        Err(refusal) => Response::line(refusal.status, refusal.why),
        Ok(request) if check_host && !request.host.as_deref().is_some_and(is_own_name) => {
            Response::line("403 Forbidden", "the Host must be localhost or a loopback address")
        }
        Ok(request) => match answer(&request) {
            Some(response) => response,
            None => return Ok(()),
        },
    };
    let deadline = Instant::now() + PATIENCE;
    stream.tell(&response, deadline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn status(text: &str) -> &'static str {
        match parse(text.as_bytes()) {
            Ok(Some(_)) => "200",
            Ok(None) => "more",
            Err(refusal) => &refusal.status[..3],
        }
    }

    #[test]
    fn what_is_a_request_and_what_is_none() {
        let get = "GET / HTTP/1.1\r\nHost: localhost\r\n";
        for (text, expected) in [
            ("".to_owned(), "more"),
            ("GET / HTTP/1.1\r\n".into(), "more"),
            (format!("{get}\r\n"), "200"),
            ("GET / HTTP/1.0\r\n\r\n".into(), "200"),
            ("GET / HTTP/1.1\r\n\r\n".into(), "400"),
            (format!("{get}Host: localhost\r\n\r\n"), "400"),
            (format!("{get}Content-Length: 0\r\n\r\n"), "200"),
            (format!("{get}Content-Length: 5\r\n\r\n"), "400"),
            (format!("{get}Transfer-Encoding: chunked\r\n\r\n"), "400"),
            (format!("{get}\r\nbody"), "400"),
            (format!("{get}A : b\r\n\r\n"), "400"),
            (format!("{get} folded\r\n\r\n"), "400"),
            (format!("{get}A: b\nC: d\r\n\r\n"), "400"),
            (format!("{get}A: \0\r\n\r\n"), "400"),
            ("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "405"),
            ("HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "405"),
            ("get / HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "400"),
            ("GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "400"),
            ("GET / HTTP/2.0\r\nHost: localhost\r\n\r\n".into(), "505"),
            ("GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "400"),
            ("GET /?a=%zz HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "400"),
            ("GET /?a=%ff HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "400"),
            ("\x16\x03\x01".into(), "400"),
            (format!("{get}{}\r\n", "A: b\r\n".repeat(FIELDS_MAX)), "431"),
            (format!("{get}A: {}\r\n\r\n", "b".repeat(HEAD_BYTES_MAX)), "431"),
            ("G".repeat(HEAD_BYTES_MAX), "431"),
        ] {
            assert_eq!(status(&text), expected, "{text:.80?}");
        }
    }

    /// The whole answer, and not half of one that says it is longer.
    #[test]
    fn one_connection_too_many_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        let _name = serve("test", &format!("unix:{}", path.display()), |_| None).expect("served");
        let connect = || UnixStream::connect(&path).expect("it listens");
        let _idle: Vec<UnixStream> = (0..CONNECTIONS_MAX).map(|_| connect()).collect();
        let mut one_more = connect();
        // It may be told before it asks.
        let _ = one_more.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let mut told = Vec::new();
        let _ = one_more.read_to_end(&mut told);
        let told = String::from_utf8(told).expect("text");
        assert!(
            told.starts_with("HTTP/1.1 503 ") && told.ends_with("\r\n\r\ntoo many connections at once\n"),
            "{told}"
        );
    }

    #[test]
    fn queries_are_decoded() {
        let text = "GET /history.json?domain=a%20b%26c&since=1.5&x HTTP/1.1\r\nHost: h\r\n\r\n";
        let request = parse(text.as_bytes()).expect("good").expect("whole");
        assert_eq!((request.path.as_str(), request.value("domain")), ("/history.json", Some("a b&c")));
        assert_eq!((request.value("since"), request.value("x"), request.value("y")), (Some("1.5"), Some(""), None));
    }

    #[test]
    fn only_names_of_this_machine_are_its_own() {
        for good in ["localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:9200", "127.9.9.9:1", "[::1]", "[::1]:80"] {
            assert!(is_own_name(good), "{good}");
        }
        for bad in [
            "",
            ":",
            "evil.example",
            "evil.example:80",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "::1",
            "[127.0.0.1]",
            "localhost:",
            "localhost:99999",
            "localhost:80:80",
            "localhost,x",
            "2130706433",
            "127.1",
        ] {
            assert!(!is_own_name(bad), "{bad}");
        }
    }

    #[test]
    fn places_are_on_this_machine() {
        assert!(matches!(ListenAddress::parse("127.0.0.1:0"), Ok(ListenAddress::Loopback(_))));
        assert!(matches!(ListenAddress::parse("[::1]:0"), Ok(ListenAddress::Loopback(_))));
        let unix = ListenAddress::parse("unix:/x/y,group=0").expect("an address");
        assert_eq!(unix, ListenAddress::Unix { path: "/x/y".into(), group: Some(0) });
        let long = format!("unix:/{}", "x".repeat(107));
        for bad in ["0.0.0.0:80", "192.0.2.1:80", "[::]:80", "9200", "unix:", "unix:/x,group=no such group", &long] {
            let error = ListenAddress::parse(bad).expect_err(bad).to_string();
            assert!(!error.contains('\n') && error.len() < 200, "{error}");
            assert!(!error.contains("SUN_LEN"), "{error}");
        }
    }

    proptest! {
        /// Whatever comes, the parser ends, and what it takes is within its bounds and read the same when cut anywhere.
        #[test]
        fn any_bytes_are_borne(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_request_is_not_taken_before_its_end(
            path in "/[a-z./%0-9]{0,20}", host in "[a-z.:0-9\\[\\]]{0,20}", at in 0usize..200,
        ) {
            let text = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n");
            let at = at.min(text.len() - 1);
            prop_assert!(!matches!(parse(&text.as_bytes()[..at]), Ok(Some(_))));
            let request = parse(text.as_bytes()).expect("good").expect("whole");
            prop_assert_eq!(request.path, path);
            prop_assert_eq!(request.host.as_deref(), Some(host.as_str()));
        }

        #[test]
        fn near_requests_are_borne(
            parts in prop::collection::vec(prop::sample::select(vec![
                "GET ", "/", " HTTP/1.1", "\r\n", "\n", "Host", ":", " ", "localhost", "%", "?", "=", "&", "\r\n\r\n",
                "Content-Length: 9", "\0", "é",
            ]), 0..40),
        ) {
            let text = parts.concat();
            if let Ok(Some(request)) = parse(text.as_bytes()) {
                prop_assert!(request.path.starts_with('/'));
                prop_assert!(text.starts_with("GET /") && text.ends_with("\r\n\r\n"));
            }
        }
    }
}
