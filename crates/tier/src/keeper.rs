//! The keeper: a small process that holds descriptors for a successor.
//!
//! It does not know what they are. The owner stores a few descriptors under a
//! name (memory file, backing file, the clients' userfaultfds), and its
//! successor gets them. Requests and replies are packets over a Unix socket,
//! from processes of the same user only, one reply per request:
//!
//! | request | reply |
//! |---|---|
//! | `P` name + descriptors: hold these, instead of earlier ones under the name | status |
//! | `G` name: get the descriptors under the name | status + descriptors |
//! | `D` name: drop its descriptors | status |
//! | `L` name: list the names after it, or all | status + as many names as fit, each followed by a NUL |
//! | `F` + a socket: serve the forked children that come from it | status |
//! | `S` words of a command, each followed by a NUL: run it when this connection ends | status |
//! | `Q`: quit | status |
//!
//! The status is one byte: 0, or an error number. The loop never waits for one
//! connection: a peer that does not read its reply within a second is dropped.
//!
//! With `S` the keeper also replaces a daemon that was killed: when the
//! connection ends and descriptors are held, it starts the command, at most
//! once a second, until a daemon sends `S` again. Under a service manager with
//! an fd store (`NOTIFY_SOCKET` is set) it waits three seconds for the manager
//! to do so: a daemon that the manager did not start could not use its store.

use pagefold_os::fd::{Fd, poll};
use pagefold_os::sock;
use pagefold_os::{Errno, raw};
use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 128;
/// Longest command, in bytes.
const COMMAND_BYTES_MAX: usize = 8192;
/// Most names.
const NAMES_MAX: usize = 4096;
/// Most connections; a new one replaces the oldest.
const CONNECTIONS_MAX: usize = 64;
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Longest list of names sent.
const LIST_BYTES_MAX: usize = 64 * 1024;

fn to_io(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// Takes over a socket from which forked children come.
pub type TakeSocket<'a> = &'a dyn Fn(Fd);

/// How a keeper serves.
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    /// Where sockets of `F` go; without it they are refused.
    pub take_socket: Option<TakeSocket<'a>>,
    /// The keeper ends when it has held nothing and had no connection for so long: its owner was killed, and no successor
    /// came.
    pub unused_for: Option<Duration>,
}

/// Runs the keeper: listens at `path` and serves until a request to quit, or until it is [unused](Options::unused_for).
///
/// # Errors
/// Another keeper serves there (`AddrInUse`), or the socket fails.
pub fn run(path: &Path, options: Options<'_>) -> io::Result<()> {
    let name = path.as_os_str().as_bytes();
    let _ = pagefold_os::fd::raise_limit();
    // A socket of a dead keeper is replaced; a live keeper accepts the connection.
    if sock::connect(name).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another keeper serves there"));
    }
    let _ = std::fs::remove_file(path);
    let served = sock::listen(name).map_err(to_io).and_then(|listener| serve(&listener, options));
    let _ = std::fs::remove_file(path);
    served
}

/// Serves on a listening socket until a peer sends `Q`, or the keeper is [unused](Options::unused_for).
///
/// # Errors
/// The listening socket fails. Errors of a peer end only its connection.
pub fn serve(listener: &Fd, options: Options<'_>) -> io::Result<()> {
    let own_uid = pagefold_os::user::effective();
    let mut held: BTreeMap<Vec<u8>, Vec<Fd>> = BTreeMap::new();
    let mut peers: Vec<Fd> = Vec::new();
    let managed = std::env::var_os("NOTIFY_SOCKET").is_some();
    let mut supervision =
        Supervision { grace: if managed { MANAGER_GRACE } else { Duration::ZERO }, ..Supervision::default() };
    // The kernel reaps the processes that the keeper starts.
    // SAFETY: SIG_IGN installs no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        let fds = std::iter::once(listener).chain(&peers);
        let mut polls: Vec<libc::pollfd> =
            fds.map(|fd| libc::pollfd { fd: fd.raw(), events: libc::POLLIN, revents: 0 }).collect();
        let unused_for = options.unused_for.filter(|_| held.is_empty() && peers.is_empty());
        let wait_ms = unused_for.map_or_else(|| supervision.wait_ms(!held.is_empty()), |time| time.as_millis() as i32);
        let began = Instant::now();
        let ready = poll(&mut polls, wait_ms).map_err(to_io)?;
        if ready == 0 && unused_for.is_some_and(|time| began.elapsed() >= time) {
            return Ok(());
        }
        supervision.start_if_due(!held.is_empty());
        let mut closed = Vec::new();
        for (index, ready) in polls[1..].iter().enumerate().filter(|(_, poll)| poll.revents != 0) {
            debug_assert_eq!(ready.fd, peers[index].raw());
            match serve_request(&peers[index], &mut held, &mut supervision, options.take_socket) {
                Ok(Served::More) => {}
                Ok(Served::End) => return Ok(()),
                Err(_) => {
                    supervision.ended(peers[index].raw());
                    closed.push(index);
                }
            }
        }
        closed.into_iter().rev().for_each(|index| drop(peers.remove(index)));
        if polls[0].revents != 0 {
            let Ok(peer) = sock::accept(listener) else {
                // Without a free descriptor, for example, an immediate retry would fail again.
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            let allowed = sock::peer(&peer).is_ok_and(|cred| cred.uid == own_uid || cred.uid == 0);
            if allowed && sock::set_timeout(&peer, 1000).is_ok() {
                if peers.len() == CONNECTIONS_MAX {
                    let oldest = peers.iter().position(|peer| !supervision.is_owner(peer.raw())).unwrap_or(0);
                    peers.remove(oldest);
                }
                peers.push(peer);
            }
        }
    }
}

/// Pause between two starts of the daemon.
const START_PAUSE: Duration = Duration::from_secs(1);
/// How long a service manager has to start the daemon first; less than agents wait for a daemon.
const MANAGER_GRACE: Duration = Duration::from_secs(3);

/// The supervision of the owner: its connection, and how to replace it.
#[derive(Default)]
struct Supervision {
    owner: Option<i32>,
    command: Vec<Vec<u8>>,
    /// When the owner's connection ended, if no other owner has come since.
    missing: Option<Instant>,
    /// How long the service manager may take to replace the owner.
    grace: Duration,
    started: Option<Instant>,
}

impl Supervision {
    fn is_owner(&self, peer: i32) -> bool {
        self.owner == Some(peer)
    }

    fn ended(&mut self, peer: i32) {
        if self.is_owner(peer) {
            self.owner = None;
            self.missing = Some(Instant::now());
        }
    }

    /// A keeper without descriptors starts nothing, and sleeps until the next packet.
    fn wait_ms(&self, holds: bool) -> i32 {
        if holds && self.missing.is_some() { 50 } else { -1 }
    }

    fn start_if_due(&mut self, holds: bool) {
        use std::os::unix::ffi::OsStringExt;
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};
        let due = self.missing.is_some_and(|since| since.elapsed() >= self.grace);
        if !due || !holds || self.started.is_some_and(|at| at.elapsed() < START_PAUSE) {
            return;
        }
        self.started = Some(Instant::now());
        let mut words = self.command.iter().map(|word| std::ffi::OsString::from_vec(word.clone()));
        let Some(program) = words.next() else { return };
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        // The kernel reaps the process (SIGCHLD is ignored); a failed start is retried.
        let _ = command.spawn();
    }
}

enum Served {
    More,
    End,
}

/// Serves one request; an error ends the connection.
fn serve_request(
    peer: &Fd,
    held: &mut BTreeMap<Vec<u8>, Vec<Fd>>,
    supervision: &mut Supervision,
    take_socket: Option<TakeSocket<'_>>,
) -> raw::Result<Served> {
    let mut packet = [0; COMMAND_BYTES_MAX];
    let (len, mut came) = sock::receive(peer, &mut packet, libc::MSG_DONTWAIT)?;
    let Some((request, name)) = packet[..len].split_first() else { return Err(Errno(libc::EPIPE)) };
    let status = |errno: i32| [errno as u8];
    if name.len() > NAME_BYTES_MAX && *request != b'S' {
        sock::send(peer, &status(libc::EINVAL), &[])?;
        return Ok(Served::More);
    }
    match request {
        b'S' if name.len() < COMMAND_BYTES_MAX - 1 => {
            supervision.command =
                name.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(<[u8]>::to_vec).collect();
            supervision.owner = (!supervision.command.is_empty()).then_some(peer.raw());
            supervision.missing = None;
            sock::send(peer, &status(0), &[])?;
        }
        b'P' if (!came.is_empty() || came.is_cut()) && !name.is_empty() => {
            if held.len() >= NAMES_MAX && !held.contains_key(name) {
                sock::send(peer, &status(libc::ENOSPC), &[])?;
                return Ok(Served::More);
            }
            // A part of the descriptors is useless to a successor.
            if came.is_cut() {
                sock::send(peer, &status(libc::EMFILE), &[])?;
                return Ok(Served::More);
            }
            held.insert(name.to_vec(), (0..came.len()).filter_map(|index| came.take(index)).collect());
            sock::send(peer, &status(0), &[])?;
        }
        b'F' => {
            let errno = match (came.take(0), take_socket) {
                (Some(socket), Some(take)) => {
                    take(socket);
                    0
                }
                _ if came.is_cut() => libc::EMFILE,
                _ => libc::EINVAL,
            };
            sock::send(peer, &status(errno), &[])?;
        }
        b'G' => match held.get(name) {
            Some(fds) => sock::send(peer, &status(0), &fds.iter().map(Fd::raw).collect::<Vec<_>>())?,
            None => sock::send(peer, &status(libc::ENOENT), &[])?,
        },
        b'D' => {
            let errno = if held.remove(name).is_some() { 0 } else { libc::ENOENT };
            sock::send(peer, &status(errno), &[])?;
        }
        b'L' => {
            let mut list = vec![0];
            // After the last name that the client has already.
            for name in held.range::<[u8], _>((Bound::Excluded(name), Bound::Unbounded)).map(|(name, _)| name) {
                if list.len() + name.len() + 1 > LIST_BYTES_MAX {
                    break;
                }
                list.extend_from_slice(name);
                list.push(0);
            }
            sock::send(peer, &list, &[])?;
        }
        b'Q' => {
            sock::send(peer, &status(0), &[])?;
            return Ok(Served::End);
        }
        _ => sock::send(peer, &status(libc::EINVAL), &[])?,
    }
    Ok(Served::More)
}

/// A connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: Fd,
    /// Requests without an awaited reply: these replies come first.
    unread: AtomicU32,
}

impl Keeper {
    /// Connects to the keeper at `path`.
    ///
    /// # Errors
    /// As connect(2).
    pub fn connect(path: &Path) -> io::Result<Keeper> {
        let socket = sock::connect(path.as_os_str().as_bytes()).map_err(to_io)?;
        sock::set_timeout(&socket, 5000).map_err(to_io)?;
        Ok(Keeper { socket, unread: AtomicU32::new(0) })
    }

    /// Starts the keeper's program on `path`, in a process group of its own so that it outlives this process, and connects
    /// to it.
    ///
    /// # Errors
    /// It cannot be started, or does not accept a connection within thirty seconds.
    pub fn start(program: &Path, path: &Path) -> io::Result<(Keeper, std::process::Child)> {
        Keeper::start_with(program, &[], path)
    }

    /// As [`start`](Self::start), with `arguments` before the path.
    ///
    /// # Errors
    /// As there.
    pub fn start_with(program: &Path, arguments: &[&str], path: &Path) -> io::Result<(Keeper, std::process::Child)> {
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};
        let mut command = Command::new(program);
        command
            .args(arguments)
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let mut child = command.spawn()?;
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            match Keeper::connect(path) {
                Ok(keeper) => return Ok((keeper, child)),
                Err(_) if Instant::now() < end && child.try_wait()?.is_none() => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(error);
                }
            }
        }
    }

    /// A descriptor that hangs up when the keeper ends.
    ///
    /// # Errors
    /// As dup(2).
    pub fn liveness(&self) -> io::Result<Fd> {
        self.socket.duplicate().map_err(to_io)
    }

    /// Stores descriptors under `name`, instead of earlier ones.
    ///
    /// # Errors
    /// `EINVAL` for a name that is empty or too long or for no descriptors, `ENOSPC` for too many names, `EMFILE` for too
    /// many descriptors, and the errors of sendmsg(2), if the keeper has died.
    pub fn put(&self, name: &str, fds: &[i32]) -> io::Result<()> {
        self.ask(b'P', name, fds, &mut [0]).map(drop)
    }

    /// Gets the descriptors under `name`; the keeper continues to hold them.
    ///
    /// # Errors
    /// `ENOENT` if there are none; `EMFILE` if this process may not open that many.
    pub fn get(&self, name: &str) -> io::Result<Vec<Fd>> {
        let (_, mut fds) = self.ask(b'G', name, &[], &mut [0])?;
        if fds.is_cut() {
            return Err(to_io(Errno(libc::EMFILE)));
        }
        Ok((0..fds.len()).filter_map(|index| fds.take(index)).collect())
    }

    /// Lets the keeper drop the descriptors under `name`.
    ///
    /// # Errors
    /// `ENOENT` if there are none.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        self.ask(b'D', name, &[], &mut [0]).map(drop)
    }

    /// As [`put`](Self::put), but does not wait for a slow keeper's reply. For callers that must not delay others.
    ///
    /// # Errors
    /// As [`put`](Self::put), if it waits.
    pub fn put_soon(&self, name: &str, fds: &[i32]) -> io::Result<()> {
        self.send_soon(b'P', name, fds)
    }

    /// As [`forget`](Self::forget), but does not wait for a slow keeper's reply.
    ///
    /// # Errors
    /// As [`forget`](Self::forget), if it waits.
    pub fn forget_soon(&self, name: &str) -> io::Result<()> {
        self.send_soon(b'D', name, &[])
    }

    /// The names that have descriptors, in order.
    ///
    /// # Errors
    /// The keeper has died; `InvalidData` if it is of an old version, which lists the first names only, and holds more.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut buffer = vec![0; LIST_BYTES_MAX];
        let mut all: Vec<Vec<u8>> = Vec::new();
        loop {
            let after = all.last().map_or(&[][..], Vec::as_slice);
            let (len, _) = self.ask_packet(&[b"L", after].concat(), &[], &mut buffer)?;
            let names = buffer[1..len.max(1)].split(|byte| *byte == 0).filter(|name| !name.is_empty());
            let first = all.len();
            all.extend(names.map(<[u8]>::to_vec));
            // An old keeper ignores the name after which the list should begin.
            if first > 0 && all.get(first).is_some_and(|name| *name <= all[first - 1]) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a keeper of an older version holds more names than it can list",
                ));
            }
            // The reply had space for any name, so there are no more.
            if all.len() == first || len + NAME_BYTES_MAX < LIST_BYTES_MAX {
                break;
            }
        }
        Ok(all.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// Lets the keeper start `command` when this connection ends while it holds descriptors; an empty one ends that.
    ///
    /// # Errors
    /// The command is too long, or the keeper has died.
    pub fn supervise(&self, command: &[std::ffi::OsString]) -> io::Result<()> {
        let mut packet = vec![b'S'];
        for word in command {
            packet.extend_from_slice(word.as_bytes());
            packet.push(0);
        }
        if packet.len() >= COMMAND_BYTES_MAX {
            return Err(to_io(Errno(libc::E2BIG)));
        }
        self.ask_packet(&packet, &[], &mut [0]).map(drop)
    }

    /// Has the keeper serve the forked children that come from `socket`.
    ///
    /// # Errors
    /// `EINVAL` from a keeper that serves none; `EMFILE` if it has no descriptor left; the keeper has died.
    pub fn serve_children(&self, socket: &Fd) -> io::Result<()> {
        self.ask(b'F', "", &[socket.raw()], &mut [0]).map(drop)
    }

    /// Ends the keeper, which closes its descriptors.
    ///
    /// # Errors
    /// The keeper has died already.
    pub fn quit(&self) -> io::Result<()> {
        self.ask(b'Q', "", &[], &mut [0]).map(drop)
    }

    fn ask(&self, request: u8, name: &str, fds: &[i32], reply: &mut [u8]) -> io::Result<(usize, sock::Fds)> {
        if name.len() > NAME_BYTES_MAX {
            return Err(to_io(Errno(libc::EINVAL)));
        }
        self.ask_packet(&[&[request], name.as_bytes()].concat(), fds, reply)
    }

    fn ask_packet(&self, packet: &[u8], fds: &[i32], reply: &mut [u8]) -> io::Result<(usize, sock::Fds)> {
        // Sent even if earlier requests are not answered yet, because a descriptor must be dropped although the keeper was
        // slow once.
        sock::send(&self.socket, packet, fds).map_err(to_io)?;
        loop {
            let answer = sock::receive(&self.socket, reply, 0);
            if matches!(answer, Err(Errno(libc::EAGAIN))) {
                self.unread.fetch_add(1, Ordering::Relaxed);
            }
            let is_earlier =
                matches!(answer, Ok((1.., _)) | Err(Errno(libc::EMSGSIZE))) && self.unread.load(Ordering::Relaxed) > 0;
            // Each request has one reply, in order: a reply to an earlier request is skipped.
            if is_earlier {
                self.unread.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            return match answer.map_err(to_io)? {
                (0, _) => Err(to_io(Errno(libc::EPIPE))),
                (len, fds) if reply[0] == 0 => Ok((len, fds)),
                _ => Err(to_io(Errno(i32::from(reply[0])))),
            };
        }
    }

    /// As [`ask`](Self::ask), but does not wait for the reply if earlier replies have not come.
    fn send_soon(&self, request: u8, name: &str, fds: &[i32]) -> io::Result<()> {
        while self.unread.load(Ordering::Relaxed) > 0 {
            match sock::receive(&self.socket, &mut [0], libc::MSG_DONTWAIT) {
                Ok((1.., _)) | Err(Errno(libc::EMSGSIZE)) => self.unread.fetch_sub(1, Ordering::Relaxed),
                _ => {
                    sock::send(&self.socket, &[&[request], name.as_bytes()].concat(), fds).map_err(to_io)?;
                    self.unread.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
            };
        }
        self.ask(request, name, fds, &mut [0]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_that_holds_nothing_sleeps() {
        let mut supervision = Supervision { owner: Some(7), ..Supervision::default() };
        assert_eq!(supervision.wait_ms(true), -1);
        supervision.ended(7);
        assert_eq!(supervision.wait_ms(false), -1);
        assert!(supervision.wait_ms(true) > 0);
    }

    /// Runs `keeper` at a listening socket, and `ask` as its client.
    fn with_keeper(keeper: impl FnOnce(Fd) + Send + 'static, ask: impl FnOnce(&Keeper)) {
        let dir = std::env::temp_dir().join(format!("pagefold-keeper-{}-{:?}", std::process::id(), Instant::now()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("s");
        let listener = sock::listen(path.as_os_str().as_bytes()).unwrap();
        let serving = std::thread::spawn(move || keeper(listener));
        ask(&Keeper::connect(&path).unwrap());
        serving.join().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn more_names_than_fit_in_one_reply_are_listed_in_order() {
        with_keeper(
            |listener| serve(&listener, Options::default()).unwrap(),
            |keeper| {
                let memory = pagefold_os::memfd::create(c"kept", 4096).unwrap();
                let names: Vec<String> = (0..NAMES_MAX).map(|number| format!("{number:0>100}")).collect();
                names.iter().for_each(|name| keeper.put(name, &[memory.raw()]).unwrap());
                assert!(names.len() * 101 > 2 * LIST_BYTES_MAX && keeper.names().unwrap() == names);
                keeper.forget(&names[0]).unwrap();
                assert!(keeper.names().unwrap() == names[1..]);
                keeper.quit().unwrap();
            },
        );
    }

    #[test]
    fn an_unused_keeper_ends() {
        let unused_for = Some(Duration::from_millis(100));
        with_keeper(
            move |listener| serve(&listener, Options { unused_for, ..Options::default() }).unwrap(),
            |keeper| {
                let memory = pagefold_os::memfd::create(c"kept", 4096).unwrap();
                keeper.put("kept", &[memory.raw()]).unwrap();
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(keeper.names().unwrap(), ["kept"]);
                keeper.forget("kept").unwrap();
                std::thread::sleep(Duration::from_millis(300));
                assert!(keeper.names().unwrap().is_empty(), "an owner is connected");
            },
        );
    }

    #[test]
    fn an_old_keeper_that_lists_only_the_first_names_is_detected() {
        // As in the first version: it ignores the name after which the list should begin.
        let tell = |list: Vec<u8>| {
            move |listener: Fd| {
                let peer = loop {
                    poll(&mut [libc::pollfd { fd: listener.raw(), events: libc::POLLIN, revents: 0 }], -1).unwrap();
                    if let Ok(peer) = sock::accept(&listener) {
                        break peer;
                    }
                };
                while sock::receive(&peer, &mut [0; 256], 0).is_ok_and(|(len, _)| len > 0) {
                    sock::send(&peer, &[&[0], list.as_slice()].concat(), &[]).unwrap();
                }
            }
        };
        let names = |count: usize| (0..count).map(|number| format!("{number:0>57}\0")).collect::<String>().into_bytes();
        let ask = |list: Vec<u8>| {
            let told = std::sync::Mutex::new(None);
            with_keeper(tell(list), |keeper| *told.lock().unwrap() = Some(keeper.names()));
            told.into_inner().unwrap().unwrap()
        };
        assert_eq!(ask(names(1129)).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // A reply with space for another name is the whole list.
        assert_eq!(ask(names(1000)).unwrap().len(), 1000);
    }

    /// Waits for the first connection.
    fn first_peer(listener: &Fd) -> Fd {
        poll(&mut [libc::pollfd { fd: listener.raw(), events: libc::POLLIN, revents: 0 }], -1).unwrap();
        sock::accept(listener).unwrap()
    }

    #[test]
    fn a_late_reply_is_not_taken_for_another_requests() {
        let (go, wait) = std::sync::mpsc::channel();
        // Does not reply to the first request before the client has given up.
        let slow = move |listener: Fd| {
            let peer = first_peer(&listener);
            let mut question = [0; 256];
            sock::receive(&peer, &mut question, 0).unwrap();
            wait.recv().unwrap();
            sock::send(&peer, b"\0late\0", &[]).unwrap();
            for name in ["first", "second", "third"] {
                let (len, _) = sock::receive(&peer, &mut question, 0).unwrap();
                assert_eq!(&question[..len], [b"D", name.as_bytes()].concat());
                sock::send(&peer, &[if name == "third" { libc::ENOENT as u8 } else { 0 }], &[]).unwrap();
            }
        };
        with_keeper(slow, |keeper| {
            sock::set_timeout(&keeper.socket, 100).unwrap();
            assert_eq!(keeper.names().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            assert_eq!(
                keeper.forget("first").unwrap_err().kind(),
                io::ErrorKind::WouldBlock,
                "the first is not answered"
            );
            // Neither request is lost: the keeper reads both later.
            keeper.forget_soon("second").unwrap();
            sock::set_timeout(&keeper.socket, 20_000).unwrap();
            go.send(()).unwrap();
            assert_eq!(keeper.forget("third").unwrap_err().kind(), io::ErrorKind::NotFound);
        });
    }

    #[test]
    fn the_service_manager_may_restart_the_daemon_first() {
        let lost = |grace| {
            let mut supervision =
                Supervision { owner: Some(7), command: vec![b"true".to_vec()], grace, ..Supervision::default() };
            supervision.start_if_due(true);
            supervision.ended(8);
            supervision.start_if_due(true);
            assert!(supervision.started.is_none(), "the owner is connected");
            supervision.ended(7);
            supervision.start_if_due(false);
            assert!(supervision.started.is_none(), "nothing is held");
            supervision.start_if_due(true);
            supervision.started.is_some()
        };
        assert!(lost(Duration::ZERO) && !lost(Duration::from_secs(3600)));
    }
}
