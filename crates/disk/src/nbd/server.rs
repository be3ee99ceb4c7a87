//! Talks NBD to one client: handshake, then requests, several at once.

use super::wire::{self, Command, DATA_BYTES_MAX, OPTION_BYTES_MAX, Request, can, option, reply};
use crate::control::accept_all;
use crate::engine::{Engine, Handle, is_refusal};
use crate::error::Error;
use parking_lot::Mutex;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

/// Requests of one connection that are worked on at once.
const WORKERS: usize = 4;
/// Connections at once: a flood of them must not take all threads.
const CONNECTIONS_MAX: usize = 256;

/// What a client can do with an export. Errors are error numbers.
pub trait Disk: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Whether writing is refused.
    fn read_only(&self) -> bool;
    /// Fills `buffer` from `offset`; the range lies inside the size.
    ///
    /// # Errors
    /// An error number.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32>;
    /// Writes `data` at `offset`; the range lies inside the size.
    ///
    /// # Errors
    /// An error number.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32>;
    /// Makes a range read as zeros; with `hole`, its disk space may be given back.
    ///
    /// # Errors
    /// An error number.
    fn zero(&self, offset: u64, length: u64, hole: bool) -> Result<(), i32>;
    /// Makes what was written durable.
    ///
    /// # Errors
    /// An error number.
    fn flush(&self) -> Result<(), i32>;
}

impl Disk for Handle {
    fn size(&self) -> u64 {
        self.image().size()
    }

    fn read_only(&self) -> bool {
        !self.writable()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32> {
        let count = Handle::read(self, offset, buffer).map_err(|error| error.errno())?;
        // The image was cut after the size was told: what is gone reads as zeros.
        buffer[count..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
        Handle::write(self, offset, data).map_err(|error: Error| error.errno())
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> Result<(), i32> {
        let result = if hole { self.punch(offset, length) } else { Handle::zero(self, offset, length) };
        result.map_err(|error| error.errno())
    }

    fn flush(&self) -> Result<(), i32> {
        self.sync().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Serves the engine's images on a Unix socket at `path`; returns the path, for removal.
///
/// # Errors
/// The socket cannot be made; another server answers there.
pub fn listen(engine: Arc<Engine>, path: &Path) -> io::Result<PathBuf> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    match std::fs::symlink_metadata(path) {
        Ok(there) if std::os::unix::fs::FileTypeExt::is_socket(&there.file_type()) => std::fs::remove_file(path)?,
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    let connections = Arc::new(AtomicUsize::new(0));
    std::thread::Builder::new().name("nbd".to_owned()).spawn(move || {
        accept_all(&listener, |stream| {
            if connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
                connections.fetch_sub(1, Ordering::AcqRel);
                return;
            }
            let (engine, served) = (engine.clone(), connections.clone());
            let serve = move || {
                let open = |name: &[u8]| open_export(&engine, name);
                // A client that breaks off or talks nonsense ends its own connection only.
                let _ = converse(&stream, &stream, || list_exports(&engine), open, WORKERS);
                served.fetch_sub(1, Ordering::AcqRel);
            };
            if std::thread::Builder::new().name("nbd-client".to_owned()).spawn(serve).is_err() {
                // No thread for it: its connection is closed, the others go on.
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
        // The default export is there when there is no doubt which.
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

/// Talks to one client until it leaves: `list` names the exports, `open` opens one. With `workers` 0, or where threads
/// are refused, requests are worked on in their order.
///
/// # Errors
/// The connection broke, or the client does not speak NBD.
pub fn converse<D: Disk>(
    mut reader: impl Read,
    mut writer: impl Write + Send,
    list: impl Fn() -> Vec<Vec<u8>>,
    open: impl Fn(&[u8]) -> Option<D>,
    workers: usize,
) -> io::Result<()> {
    match shake_hands(&mut reader, &mut writer, list, open)? {
        Some(disk) => transmit(reader, writer, &disk, workers),
        None => Ok(()),
    }
}

fn description(disk: &impl Disk) -> (u64, u16) {
    let writing = if disk.read_only() { can::READ_ONLY } else { can::FUA | can::TRIM | can::WRITE_ZEROES };
    (disk.size(), can::HAS_FLAGS | can::FLUSH | can::MULTI_CONN | can::CACHE | writing)
}

fn shake_hands<D: Disk>(
    reader: &mut impl Read,
    writer: &mut impl Write,
    list: impl Fn() -> Vec<Vec<u8>>,
    open: impl Fn(&[u8]) -> Option<D>,
) -> io::Result<Option<D>> {
    let mut greeting = wire::MAGIC.to_be_bytes().to_vec();
    greeting.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    greeting.extend_from_slice(&(wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
    writer.write_all(&greeting)?;
    let client_flags = wire::number(&take::<4>(reader)?);
    if client_flags & !u64::from(wire::FIXED_NEWSTYLE | wire::NO_ZEROES) != 0 {
        return Err(nonsense("unknown client flags"));
    }
    let no_zeroes = client_flags & u64::from(wire::NO_ZEROES) != 0;
    loop {
        let head: [u8; 16] = take(reader)?;
        if wire::number(&head[..8]) != wire::OPTION_MAGIC {
            return Err(nonsense("no option where one must be"));
        }
        let (asked, length) = (wire::number(&head[8..12]) as u32, wire::number(&head[12..]) as u32);
        if length > OPTION_BYTES_MAX {
            // Read past it, so that the client hears why.
            io::copy(&mut reader.take(length.into()), &mut io::sink())?;
            writer.write_all(&wire::option_reply(asked, reply::TOO_BIG, b""))?;
            continue;
        }
        let mut data = vec![0; length as usize];
        reader.read_exact(&mut data)?;
        match asked {
            option::EXPORT_NAME => {
                let disk = open(&data).ok_or_else(|| nonsense("no such export"))?;
                let (size, flags) = description(&disk);
                let mut out = size.to_be_bytes().to_vec();
                out.extend_from_slice(&flags.to_be_bytes());
                out.resize(out.len() + if no_zeroes { 0 } else { 124 }, 0);
                writer.write_all(&out)?;
                return Ok(Some(disk));
            }
            option::ABORT => {
                writer.write_all(&wire::option_reply(asked, reply::ACK, b""))?;
                return Ok(None);
            }
            option::LIST if length == 0 => {
                for name in list() {
                    let mut data = (name.len() as u32).to_be_bytes().to_vec();
                    data.extend_from_slice(&name);
                    writer.write_all(&wire::option_reply(asked, reply::SERVER, &data))?;
                }
                writer.write_all(&wire::option_reply(asked, reply::ACK, b""))?;
            }
            option::INFO | option::GO => {
                let Some(name) = wire::chosen_name(&data) else {
                    writer.write_all(&wire::option_reply(asked, reply::INVALID, b""))?;
                    continue;
                };
                let Some(disk) = open(name) else {
                    writer.write_all(&wire::option_reply(asked, reply::UNKNOWN, b"no such image"))?;
                    continue;
                };
                let (size, flags) = description(&disk);
                let mut export = 0u16.to_be_bytes().to_vec();
                export.extend_from_slice(&size.to_be_bytes());
                export.extend_from_slice(&flags.to_be_bytes());
                writer.write_all(&wire::option_reply(asked, reply::INFO, &export))?;
                let mut sizes = 3u16.to_be_bytes().to_vec();
                for size in [1, crate::BLOCK_BYTES as u32, DATA_BYTES_MAX] {
                    sizes.extend_from_slice(&size.to_be_bytes());
                }
                writer.write_all(&wire::option_reply(asked, reply::INFO, &sizes))?;
                writer.write_all(&wire::option_reply(asked, reply::ACK, b""))?;
                if asked == option::GO {
                    return Ok(Some(disk));
                }
            }
            option::LIST => writer.write_all(&wire::option_reply(asked, reply::INVALID, b""))?,
            _ => writer.write_all(&wire::option_reply(asked, reply::UNSUPPORTED, b""))?,
        }
    }
}

fn transmit(mut reader: impl Read, writer: impl Write + Send, disk: &impl Disk, workers: usize) -> io::Result<()> {
    let writer = Mutex::new(writer);
    let (send, receive) = sync_channel::<(Request, Vec<u8>)>(workers);
    let receive = Mutex::new(receive);
    std::thread::scope(|scope| {
        let spawn = || std::thread::Builder::new().spawn_scoped(scope, || work(disk, &writer, &receive));
        let spawned = (0..workers).filter(|_| spawn().is_ok()).count();
        if spawned == 0 {
            while let Some((request, data)) = next_request(&mut reader)? {
                answer(disk, &writer, request, data)?;
            }
            return Ok(());
        }
        let result = loop {
            match next_request(&mut reader) {
                Ok(Some(next)) => {
                    if send.send(next).is_err() {
                        break Ok(());
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // The workers finish what they have and leave.
        drop(send);
        result
    })
}

fn work(disk: &impl Disk, writer: &Mutex<impl Write>, requests: &Mutex<Receiver<(Request, Vec<u8>)>>) {
    loop {
        let next = requests.lock().recv();
        let Ok((request, data)) = next else { return };
        // A reply that cannot be sent: the reader meets the same broken connection and ends it.
        let _ = answer(disk, writer, request, data);
    }
}

/// The next request with its data; `None` when the client leaves.
fn next_request(reader: &mut impl Read) -> io::Result<Option<(Request, Vec<u8>)>> {
    let head = match take(reader) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        head => head?,
    };
    let request = Request::parse(&head).ok_or_else(|| nonsense("no request where one must be"))?;
    match request.command {
        Command::Disconnect => Ok(None),
        Command::Write if request.length > DATA_BYTES_MAX => Err(nonsense("more data than was agreed on")),
        Command::Write => {
            let mut data = vec![0; request.length as usize];
            reader.read_exact(&mut data)?;
            Ok(Some((request, data)))
        }
        _ => Ok(Some((request, Vec::new()))),
    }
}

fn answer(disk: &impl Disk, writer: &Mutex<impl Write>, request: Request, data: Vec<u8>) -> io::Result<()> {
    let mut out = Vec::new();
    let result = perform(disk, &request, &data, &mut out);
    let head = wire::reply_head(request.cookie, result.map_or_else(wire::error_code, |()| 0));
    let mut writer = writer.lock();
    writer.write_all(&head)?;
    if result.is_ok() {
        writer.write_all(&out)?;
    }
    writer.flush()
}

fn perform(disk: &impl Disk, request: &Request, data: &[u8], out: &mut Vec<u8>) -> Result<(), i32> {
    let (offset, length) = (request.offset, u64::from(request.length));
    let changes = matches!(request.command, Command::Write | Command::Trim | Command::WriteZeroes);
    if changes && disk.read_only() {
        return Err(libc::EPERM);
    }
    let inside = offset.checked_add(length).is_some_and(|end| end <= disk.size());
    if !inside && request.command != Command::Flush {
        return Err(if changes { libc::ENOSPC } else { libc::EINVAL });
    }
    match request.command {
        Command::Read if request.length > DATA_BYTES_MAX => return Err(libc::EINVAL),
        Command::Read => {
            out.resize(length as usize, 0);
            disk.read(offset, out)?;
        }
        Command::Write => disk.write(offset, data)?,
        Command::Trim => disk.zero(offset, length, true)?,
        Command::WriteZeroes => disk.zero(offset, length, !request.no_hole)?,
        Command::Flush => disk.flush()?,
        Command::Cache => {
            // A hint; a bounded part of it is enough.
            let mut buffer = vec![0; length.min(1 << 20) as usize];
            disk.read(offset, &mut buffer)?;
        }
        Command::Disconnect | Command::Unknown => return Err(libc::EINVAL),
    }
    if changes && request.fua { disk.flush() } else { Ok(()) }
}

fn take<const COUNT: usize>(reader: &mut impl Read) -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn nonsense(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

#[cfg(test)]
mod tests {
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
        converse(&input[..], &mut output, Vec::new, |_| Some(disk.clone()), 0).unwrap();
        output.split_off(18 + 10)
    }

    #[test]
    fn data_goes_both_ways_and_errors_are_told() {
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
        assert_eq!(replies, expected, "the flush and the FUA write report what the disk said");
    }

    #[test]
    fn zeros_are_a_hole_unless_the_client_wants_none() {
        let disk = Arc::new(Plain(Mutex::new(vec![1; 6])));
        // Trim, write zeroes, the same with NO_HOLE.
        talk(&disk, &[request(4, 0, 0, 1, b""), request(6, 0, 2, 1, b""), request(6, 2, 4, 1, b"")]);
        assert_eq!(*disk.0.lock(), [0, 1, 0, 1, b'0', 1]);
    }

    #[test]
    fn a_write_longer_than_agreed_ends_the_connection() {
        let disk = Arc::new(Plain(Mutex::new(vec![0; 100])));
        let mut input = 3u32.to_be_bytes().to_vec();
        input.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        input.extend_from_slice(&option::EXPORT_NAME.to_be_bytes());
        input.extend_from_slice(&0u32.to_be_bytes());
        input.extend_from_slice(&request(1, 0, 0, u32::MAX, b""));
        let result = converse(&input[..], Vec::new(), Vec::new, |_| Some(disk.clone()), 0);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
