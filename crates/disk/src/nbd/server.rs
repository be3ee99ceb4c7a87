//! Serves NBD clients: after the handshake requests, several of a connection concurrently.

use super::answer::{HINT_BYTES_MAX, answer};
use super::export::Disk;
use super::handshake::{Terms, negotiate, protocol_error, read_array};
use super::wire::{Command, DATA_BYTES_MAX, Request};
use crate::control::accept_all;
use crate::engine::{Engine, is_refusal};
use crate::handle::Handle;
use pagefold_os::sock::{PATH_BYTES_MAX, is_served};
use parking_lot::{Condvar, Mutex};
use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// Requests of one connection that are served concurrently.
const WORKERS: usize = 4;
/// Most connections, so that a flood of them does not take all threads.
const CONNECTIONS_MAX: usize = 256;
/// Most bytes of requests in flight, over all connections.
const IN_FLIGHT_MAX: usize = 256 << 20;
/// A connection with nothing in flight may always start a request up to this size. Clients that do not read their replies
/// then delay no client that sends requests of a guest kernel's size.
const IDLE_ALLOWANCE: usize = 2 << 20;
/// How long the server waits for a client during the handshake, in total. After it a client may be idle for ever.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Removes a socket at `path` that a dead process has left.
fn remove_dead_socket(path: &Path) -> io::Result<()> {
    if path.as_os_str().len() > PATH_BYTES_MAX {
        let why = format!("a socket's path has {PATH_BYTES_MAX} bytes at most; name a shorter one");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    // Also finds a socket of another type, for example a daemon's, which takes packets.
    if is_served(path.as_os_str().as_bytes())? {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "a process serves there already; name another"));
    }
    match std::fs::symlink_metadata(path) {
        Ok(there) if std::os::unix::fs::FileTypeExt::is_socket(&there.file_type()) => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "exists and is not a socket; name another")),
        Err(_) => Ok(()),
    }
}

/// Serves the engine's images on a Unix socket at `path`; returns the path, for removal.
///
/// # Errors
/// The socket cannot be made, or another process serves it.
pub fn listen(engine: Arc<Engine>, path: &Path) -> io::Result<PathBuf> {
    remove_dead_socket(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    let connections = Arc::new(AtomicUsize::new(0));
    let budget = Arc::new(Budget::new(IN_FLIGHT_MAX, IDLE_ALLOWANCE));
    std::thread::Builder::new().name("nbd".to_owned()).spawn(move || {
        accept_all(&listener, |stream| {
            if connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
                connections.fetch_sub(1, Ordering::AcqRel);
                return;
            }
            let (engine, served, budget) = (engine.clone(), connections.clone(), budget.clone());
            let serve = move || {
                let open = |name: &[u8]| open_export(&engine, name);
                // An error, of the connection or of the protocol, ends this connection only.
                let _ = serve_client(&stream, || list_exports(&engine), open, &budget, HANDSHAKE_TIMEOUT);
                served.fetch_sub(1, Ordering::AcqRel);
            };
            if std::thread::Builder::new().name("nbd-client".to_owned()).spawn(serve).is_err() {
                // Without a thread the connection is closed; the others continue.
                connections.fetch_sub(1, Ordering::AcqRel);
            }
        })
    })?;
    Ok(path.to_owned())
}

fn list_exports(engine: &Engine) -> Vec<Vec<u8>> {
    let Ok(directory) = rustix::fs::Dir::read_from(engine.directory()) else { return Vec::new() };
    let files = directory.flatten().filter(|entry| entry.file_type() == rustix::fs::FileType::RegularFile);
    files.map(|entry| entry.file_name().to_bytes().to_vec()).take(1000).collect()
}

fn open_export(engine: &Arc<Engine>, name: &[u8]) -> Option<Handle> {
    let name = match name {
        // There is a default export if there is exactly one image.
        b"" => match &list_exports(engine)[..] {
            [only] => only.clone(),
            _ => return None,
        },
        name => name.to_vec(),
    };
    let path: PathBuf = <std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(name).into();
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return None;
    }
    match engine.open(&path, true) {
        Err(error) if is_refusal(&error) => engine.open(&path, false).ok(),
        opened => opened.ok(),
    }
}

/// Memory for requests, shared by all connections.
struct Budget {
    in_flight: Mutex<usize>,
    released: Condvar,
    in_flight_max: usize,
    idle_allowance: usize,
}

impl Budget {
    fn new(in_flight_max: usize, idle_allowance: usize) -> Self {
        Self { in_flight: Mutex::new(0), released: Condvar::new(), in_flight_max, idle_allowance }
    }
}

/// One connection's share of the budget.
struct ConnectionBudget<'a> {
    budget: &'a Budget,
    /// Changes with the budget's lock held.
    in_flight: AtomicUsize,
}

/// Bytes taken from a budget until this is dropped.
struct BudgetGuard<'a> {
    connection: &'a ConnectionBudget<'a>,
    bytes: usize,
}

impl<'a> ConnectionBudget<'a> {
    /// Waits until `bytes` may be taken. Only the thread that reads requests waits here. The workers never do, so every
    /// guard is dropped in the end.
    fn take(&'a self, bytes: usize) -> BudgetGuard<'a> {
        let budget = self.budget;
        let mut in_flight = budget.in_flight.lock();
        let is_idle = || bytes <= budget.idle_allowance && self.in_flight.load(Ordering::Relaxed) == 0;
        while bytes > 0 && *in_flight + bytes > budget.in_flight_max && !is_idle() {
            budget.released.wait(&mut in_flight);
        }
        *in_flight += bytes;
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
        BudgetGuard { connection: self, bytes }
    }
}

impl Drop for BudgetGuard<'_> {
    fn drop(&mut self) {
        let budget = self.connection.budget;
        let mut in_flight = budget.in_flight.lock();
        *in_flight -= self.bytes;
        self.connection.in_flight.fetch_sub(self.bytes, Ordering::Relaxed);
        budget.released.notify_all();
    }
}

/// A connection on which all reads and writes together may wait for `left`.
struct LimitedStream<'a> {
    stream: &'a UnixStream,
    left: &'a Cell<Duration>,
}

impl LimitedStream<'_> {
    fn wait<R>(&self, call: impl FnOnce(&UnixStream) -> io::Result<R>) -> io::Result<R> {
        let left = self.left.get();
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.set_write_timeout(Some(left))?;
        let began = Instant::now();
        let result = call(self.stream);
        self.left.set(left.saturating_sub(began.elapsed()));
        result
    }
}

impl Read for LimitedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.read(buffer))
    }
}

impl Write for LimitedStream<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.write(buffer))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Serves one client until it disconnects. All waits of the handshake together take at most `timeout`.
fn serve_client<D: Disk>(
    stream: &UnixStream,
    list: impl Fn() -> Vec<Vec<u8>>,
    open: impl Fn(&[u8]) -> Option<D>,
    budget: &Budget,
    timeout: Duration,
) -> io::Result<()> {
    let left = Cell::new(timeout);
    let limited = || LimitedStream { stream, left: &left };
    let Some((disk, terms)) = negotiate(&mut limited(), &mut limited(), list, open)? else { return Ok(()) };
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    transmit(stream, stream, (&disk, terms), WORKERS, budget)
}

/// Serves one client until it disconnects: `list` names the exports, `open` opens one. With `workers` 0, or if no thread
/// can be started, requests are served one after the other.
///
/// # Errors
/// The connection broke, or the client does not speak NBD.
pub fn serve_stream<D: Disk>(
    mut reader: impl Read,
    mut writer: impl Write + Send,
    list: impl Fn() -> Vec<Vec<u8>>,
    open: impl Fn(&[u8]) -> Option<D>,
    workers: usize,
) -> io::Result<()> {
    match negotiate(&mut reader, &mut writer, list, open)? {
        Some((disk, terms)) => {
            transmit(reader, writer, (&disk, terms), workers, &Budget::new(IN_FLIGHT_MAX, IDLE_ALLOWANCE))
        }
        None => Ok(()),
    }
}

/// A request with its data, and its share of the budget.
struct Job<'a> {
    request: Request,
    data: Vec<u8>,
    budget: BudgetGuard<'a>,
}

fn transmit(
    mut reader: impl Read,
    writer: impl Write + Send,
    (disk, terms): (&impl Disk, Terms),
    workers: usize,
    budget: &Budget,
) -> io::Result<()> {
    let writer = Mutex::new(writer);
    let connection = ConnectionBudget { budget, in_flight: AtomicUsize::new(0) };
    let (send, receive) = sync_channel::<Job<'_>>(workers);
    let receive = Mutex::new(receive);
    std::thread::scope(|scope| {
        let spawn = || std::thread::Builder::new().spawn_scoped(scope, || run_worker(disk, terms, &writer, &receive));
        let spawned = (0..workers).filter(|_| spawn().is_ok()).count();
        if spawned == 0 {
            while let Some(job) = next_request(&mut reader, &connection)? {
                reply(disk, terms, &writer, job)?;
            }
            return Ok(());
        }
        let result = loop {
            match next_request(&mut reader, &connection) {
                Ok(Some(next)) => {
                    if send.send(next).is_err() {
                        break Ok(());
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // The workers finish the queued requests and end.
        drop(send);
        result
    })
}

fn run_worker(disk: &impl Disk, terms: Terms, writer: &Mutex<impl Write>, requests: &Mutex<Receiver<Job<'_>>>) {
    loop {
        let next = requests.lock().recv();
        let Ok(job) = next else { return };
        // If a reply cannot be sent, the reading thread meets the same broken connection and ends it.
        let _ = reply(disk, terms, writer, job);
    }
}

/// The next request with its data; `None` if the client disconnects.
fn next_request<'a>(reader: &mut impl Read, connection: &'a ConnectionBudget<'a>) -> io::Result<Option<Job<'a>>> {
    let head = match read_array(reader) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        head => head?,
    };
    let request = Request::parse(&head).ok_or_else(|| protocol_error("a request was expected"))?;
    let bytes = match request.command {
        Command::Disconnect => return Ok(None),
        Command::Write if request.length > DATA_BYTES_MAX => {
            return Err(protocol_error("more data than the announced maximum"));
        }
        Command::Read if request.length > DATA_BYTES_MAX => 0,
        Command::Read | Command::Write => request.length,
        Command::Cache => request.length.min(HINT_BYTES_MAX),
        _ => 0,
    };
    let budget = connection.take(bytes as usize);
    let mut data = Vec::new();
    if request.command == Command::Write {
        data.resize(request.length as usize, 0);
        reader.read_exact(&mut data)?;
    }
    Ok(Some(Job { request, data, budget }))
}

fn reply(disk: &impl Disk, terms: Terms, writer: &Mutex<impl Write>, job: Job<'_>) -> io::Result<()> {
    let Job { request, data, budget } = job;
    let out = answer(disk, terms, &request, &data);
    // While a slow client reads the reply, only the reply's memory is kept.
    drop(data);
    let has_data = request.command == Command::Read && out.len() > request.length as usize;
    let budget = has_data.then_some(budget);
    let mut writer = writer.lock();
    writer.write_all(&out)?;
    writer.flush()?;
    drop(writer);
    drop(out);
    drop(budget);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::wire::{self, chunk, option};
    use super::*;

    struct Plain(Mutex<Vec<u8>>);

    impl Disk for Arc<Plain> {
        fn size(&self) -> u64 {
            self.0.lock().len() as u64
        }
        fn read_only(&self) -> bool {
            false
        }
        fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32> {
            let data = self.0.lock();
            buffer.copy_from_slice(&data[offset as usize..][..buffer.len()]);
            Ok(())
        }
        fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
            self.0.lock()[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }
        fn zero(&self, offset: u64, length: u64, hole: bool) -> Result<(), i32> {
            self.0.lock()[offset as usize..][..length as usize].fill(if hole { 0 } else { b'0' });
            Ok(())
        }
        fn flush(&self) -> Result<(), i32> {
            Err(libc::ENOSPC)
        }
        /// Zeros are holes.
        fn extent(&self, offset: u64) -> Result<(u64, bool), i32> {
            let data = self.0.lock();
            let rest = &data[offset as usize..];
            let length = rest.iter().take_while(|byte| (**byte == 0) == (rest[0] == 0)).count();
            Ok((offset + length as u64, rest[0] == 0))
        }
    }

    fn request(command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> Vec<u8> {
        let mut out = wire::REQUEST_MAGIC.to_be_bytes().to_vec();
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&77u64.to_be_bytes());
        out.extend_from_slice(&offset.to_be_bytes());
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(data);
        out
    }

    fn talk(disk: &Arc<Plain>, requests: &[Vec<u8>]) -> Vec<u8> {
        let mut input = 3u32.to_be_bytes().to_vec();
        input.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        input.extend_from_slice(&option::EXPORT_NAME.to_be_bytes());
        input.extend_from_slice(&0u32.to_be_bytes());
        requests.iter().for_each(|request| input.extend_from_slice(request));
        let mut output = Vec::new();
        serve_stream(&input[..], &mut output, Vec::new, |_| Some(disk.clone()), 0).unwrap();
        output.split_off(18 + 10)
    }

    #[test]
    fn data_is_read_and_written_and_errors_are_reported() {
        let disk = Arc::new(Plain(Mutex::new(vec![0; 100])));
        let replies = talk(
            &disk,
            &[
                request(1, 0, 10, 3, b"abc"),
                request(0, 0, 9, 5, b""),
                request(3, 0, 0, 0, b""),
                request(1, 1, 0, 1, b"x"),
                request(0, 0, 98, 3, b""),
                request(1, 0, u64::MAX, 2, b"zz"),
                request(9, 0, 0, 0, b""),
            ],
        );
        let mut expected = wire::reply_head(77, 0).to_vec();
        expected.extend_from_slice(&wire::reply_head(77, 0));
        expected.extend_from_slice(b"\0abc\0");
        for error in [28, 28, 22, 28, 22] {
            expected.extend_from_slice(&wire::reply_head(77, error));
        }
        assert_eq!(replies, expected, "the flush and the FUA write report the disk's error");
    }

    fn asked(option: u32, data: &[u8]) -> Vec<u8> {
        let mut out = wire::OPTION_MAGIC.to_be_bytes().to_vec();
        out.extend_from_slice(&option.to_be_bytes());
        out.extend_from_slice(&(data.len() as u32).to_be_bytes());
        out.extend_from_slice(data);
        out
    }

    /// The data of an option about metadata of the default export.
    fn queries(texts: &[&[u8]]) -> Vec<u8> {
        let mut out = [&[0; 4][..], &(texts.len() as u32).to_be_bytes()].concat();
        for text in texts {
            out.extend_from_slice(&(text.len() as u32).to_be_bytes());
            out.extend_from_slice(text);
        }
        out
    }

    /// What a server says to options and requests, its greeting left out.
    fn converse(disk: &Arc<Plain>, parts: &[Vec<u8>]) -> Vec<u8> {
        let input = [&3u32.to_be_bytes()[..], &parts.concat()].concat();
        let mut output = Vec::new();
        serve_stream(&input[..], &mut output, Vec::new, |name| name.is_empty().then(|| disk.clone()), 0).unwrap();
        output.split_off(18)
    }

    #[test]
    fn a_client_that_asks_is_told_of_holes() {
        let disk = Arc::new(Plain(Mutex::new([vec![0; 10], vec![1; 5], vec![0; 85]].concat())));
        let name = b"base:allocation";
        let said = converse(
            &disk,
            &[
                asked(option::SET_META_CONTEXT, &queries(&[name])),
                asked(option::STRUCTURED_REPLY, b""),
                asked(option::LIST_META_CONTEXT, &queries(&[])),
                asked(option::SET_META_CONTEXT, &queries(&[b"other:x", name])),
                asked(option::EXPORT_NAME, b""),
                request(7, 0, 2, 50, b""),
                request(7, 8, 12, 50, b""),
                request(7, 0, 99, 2, b""),
                request(7, 0, 5, 0, b""),
                request(0, 0, 9, 3, b""),
                request(0, 0, 99, 3, b""),
                request(3, 0, 0, 0, b""),
            ],
        );
        let number = |number: u32| number.to_be_bytes().to_vec();
        let mut wanted = wire::option_reply(option::SET_META_CONTEXT, wire::reply::INVALID, b"");
        wanted.extend(wire::option_reply(option::STRUCTURED_REPLY, wire::reply::ACK, b""));
        for (asked, id) in [(option::LIST_META_CONTEXT, 0), (option::SET_META_CONTEXT, 1)] {
            wanted.extend(wire::option_reply(asked, wire::reply::META_CONTEXT, &[&number(id)[..], name].concat()));
            wanted.extend(wire::option_reply(asked, wire::reply::ACK, b""));
        }
        wanted.extend([&100u64.to_be_bytes()[..], &0x05ed_u16.to_be_bytes()].concat());
        let holes = |list: &[u32]| {
            let payload: Vec<u8> = list.iter().flat_map(|&value| number(value)).collect();
            wire::chunk(77, true, chunk::BLOCK_STATUS, &[&payload])
        };
        let error = || wire::chunk(77, true, chunk::ERROR, &[&number(22), &[0; 2]]);
        wanted.extend(holes(&[1, 8, 3, 5, 0, 37, 3]));
        wanted.extend(holes(&[1, 3, 0]));
        wanted.extend(error());
        wanted.extend(error());
        wanted.extend(wire::chunk(77, true, chunk::DATA, &[&9u64.to_be_bytes(), b"\0\x01\x01"]));
        wanted.extend(error());
        wanted.extend(wire::reply_head(77, 28));
        assert_eq!(said, wanted);
    }

    #[test]
    fn holes_are_told_only_of_the_export_that_was_agreed_on() {
        let disk = Arc::new(Plain(Mutex::new(vec![0; 100])));
        for options in [
            vec![asked(option::STRUCTURED_REPLY, b"")],
            vec![
                asked(option::STRUCTURED_REPLY, b""),
                asked(option::SET_META_CONTEXT, &queries(&[b"base:allocation"])),
                asked(option::SET_META_CONTEXT, &queries(&[b"base:"])),
            ],
            // Another export, which there is not.
            vec![
                asked(option::STRUCTURED_REPLY, b""),
                asked(option::SET_META_CONTEXT, b"\0\0\0\x01x\0\0\0\x01\0\0\0\x0fbase:allocation"),
            ],
        ] {
            let parts = [options, vec![asked(option::EXPORT_NAME, b""), request(7, 0, 0, 50, b"")]].concat();
            let refused = wire::chunk(77, true, chunk::ERROR, &[&22u32.to_be_bytes(), &[0; 2]]);
            assert!(converse(&disk, &parts).ends_with(&refused));
        }
    }

    #[test]
    fn zeros_are_a_hole_unless_the_client_wants_none() {
        let disk = Arc::new(Plain(Mutex::new(vec![1; 6])));
        // Trim, write zeroes, the same with NO_HOLE.
        talk(&disk, &[request(4, 0, 0, 1, b""), request(6, 0, 2, 1, b""), request(6, 2, 4, 1, b"")]);
        assert_eq!(*disk.0.lock(), [0, 1, 0, 1, b'0', 1]);
    }

    #[test]
    fn a_write_longer_than_announced_ends_the_connection() {
        let disk = Arc::new(Plain(Mutex::new(vec![0; 100])));
        let mut input = 3u32.to_be_bytes().to_vec();
        input.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        input.extend_from_slice(&option::EXPORT_NAME.to_be_bytes());
        input.extend_from_slice(&0u32.to_be_bytes());
        input.extend_from_slice(&request(1, 0, 0, u32::MAX, b""));
        let result = serve_stream(&input[..], Vec::new(), Vec::new, |_| Some(disk.clone()), 0);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    /// A disk that counts its reads.
    struct Counted(Arc<Plain>, Arc<AtomicUsize>);

    impl Disk for Counted {
        fn size(&self) -> u64 {
            self.0.size()
        }
        fn read_only(&self) -> bool {
            false
        }
        fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32> {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.read(offset, buffer)
        }
        fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
            self.0.write(offset, data)
        }
        fn zero(&self, offset: u64, length: u64, hole: bool) -> Result<(), i32> {
            self.0.zero(offset, length, hole)
        }
        fn flush(&self) -> Result<(), i32> {
            self.0.flush()
        }
        fn extent(&self, offset: u64) -> Result<(u64, bool), i32> {
            self.0.extent(offset)
        }
    }

    /// The client's part of a handshake for the default export.
    fn choose() -> Vec<u8> {
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        hello.extend_from_slice(&option::EXPORT_NAME.to_be_bytes());
        hello.extend_from_slice(&0u32.to_be_bytes());
        hello
    }

    const LONG_TIMEOUT: Duration = Duration::from_secs(120);

    /// Sends [`choose`] and reads the server's part.
    fn shake_hands(client: &mut UnixStream) {
        client.set_read_timeout(Some(LONG_TIMEOUT)).unwrap();
        client.write_all(&choose()).unwrap();
        client.read_exact(&mut [0; 18 + 10]).unwrap();
    }

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let [packets, dead, file] = ["packets", "dead", "file"].map(|name| dir.path().join(name));
        let _daemon = pagefold_os::sock::listen(packets.as_os_str().as_bytes()).unwrap();
        drop(UnixListener::bind(&dead).unwrap());
        std::fs::write(&file, "precious").unwrap();
        let refused = [&packets, &file].map(|path| remove_dead_socket(path).unwrap_err().kind());
        assert_eq!(refused, [io::ErrorKind::AddrInUse, io::ErrorKind::AlreadyExists]);
        remove_dead_socket(&dead).unwrap();
        assert_eq!([packets.exists(), file.exists(), dead.exists()], [true, true, false]);
    }

    #[test]
    fn clients_that_read_no_replies_take_a_bounded_budget_and_delay_no_other_client() {
        const MIB: usize = 1 << 20;
        let plain = Arc::new(Plain(Mutex::new(vec![7; 2 * MIB])));
        let (reads, budget) = (Arc::new(AtomicUsize::new(0)), Budget::new(4 * MIB, 64 << 10));
        std::thread::scope(|scope| {
            let connect = || {
                let (mut client, server) = UnixStream::pair().unwrap();
                let (disk, budget) = ((plain.clone(), reads.clone()), &budget);
                scope.spawn(move || {
                    let open = |_: &[u8]| Some(Counted(disk.0.clone(), disk.1.clone()));
                    serve_client(&server, Vec::new, open, budget, LONG_TIMEOUT).unwrap();
                });
                shake_hands(&mut client);
                client
            };
            let mut stalled: Vec<UnixStream> = (0..4).map(|_| connect()).collect();
            for client in &mut stalled {
                (0..4).for_each(|_| client.write_all(&request(0, 0, 0, MIB as u32, b"")).unwrap());
            }
            let began = Instant::now();
            while reads.load(Ordering::SeqCst) < 4 {
                assert!(began.elapsed() < LONG_TIMEOUT, "nothing is read");
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(reads.load(Ordering::SeqCst), 4, "as many as the budget allows");
            let mut other = connect();
            for _ in 0..3 {
                other.write_all(&request(1, 0, MIB as u64, 4096, &[8; 4096])).unwrap();
                other.write_all(&request(0, 0, MIB as u64, 8192, b"")).unwrap();
                let mut replies = vec![0; 16 + 16 + 8192];
                other.read_exact(&mut replies).unwrap();
            }
            // Each waits for budget that another one holds.
            for mut client in stalled {
                scope.spawn(move || {
                    let mut bytes = vec![0; 16 + MIB];
                    for _ in 0..4 {
                        client.read_exact(&mut bytes).unwrap();
                        assert!(bytes[16..].iter().all(|&byte| byte == 7));
                    }
                });
            }
        });
        assert_eq!(*budget.in_flight.lock(), 0);
    }

    #[test]
    fn a_slow_handshake_times_out_and_a_client_may_be_idle_after_it() {
        let disk = Arc::new(Plain(Mutex::new(vec![0; 100])));
        let budget = Budget::new(1 << 20, 4096);
        let serve = |server: UnixStream, timeout| {
            serve_client(&server, Vec::new, |_: &[u8]| Some(disk.clone()), &budget, timeout)
        };
        let short = Duration::from_secs(1);
        let (mut client, server) = UnixStream::pair().unwrap();
        assert!(serve(server, short).is_err(), "silent");
        client.read_exact(&mut [0; 18]).unwrap();
        std::thread::scope(|scope| {
            // A client that sends a byte before each single wait could time out, and has many to send.
            let (mut client, server) = UnixStream::pair().unwrap();
            let slow = scope.spawn(|| serve(server, short));
            let began = Instant::now();
            let mut head = choose();
            head.truncate(12);
            head.extend_from_slice(&[option::INFO.to_be_bytes(), u32::MAX.to_be_bytes()].concat());
            let drops = head.iter().chain([0].iter().cycle());
            for byte in drops {
                if slow.is_finished() || client.write_all(&[*byte]).is_err() {
                    break;
                }
                assert!(began.elapsed() < LONG_TIMEOUT, "the server waits for ever");
                std::thread::sleep(short / 100);
            }
            assert!(slow.join().unwrap().is_err());
            let (mut client, server) = UnixStream::pair().unwrap();
            let idle = scope.spawn(|| serve(server, LONG_TIMEOUT));
            shake_hands(&mut client);
            std::thread::sleep(short);
            client.write_all(&request(0, 0, 0, 10, b"")).unwrap();
            client.read_exact(&mut [0; 26]).unwrap();
            drop(client);
            idle.join().unwrap().unwrap();
        });
    }
}
