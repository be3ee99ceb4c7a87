//! The keeper: a tiny process that holds descriptors for whoever comes next.
//!
//! It knows nothing of tiers. Under a name it holds a handful of descriptors;
//! the owner puts them there (memory file, backing file, the clients'
//! userfaultfds), and its successor gets them. It speaks packets over a Unix
//! socket to its own user only, one answer per question:
//!
//! | question | answer |
//! |---|---|
//! | `P` name + descriptors: hold these, instead of what the name had | status |
//! | `G` name: what is held under the name | status + descriptors |
//! | `D` name: let go | status |
//! | `L` name: the names behind it, or all | status + names, as many as have room, each with a NUL behind it |
//! | `S` words of a command, each with a NUL behind it: run it when this connection ends | status |
//! | `Q`: end | status |
//!
//! The status is one byte: 0, or an error number. The loop never waits for one
//! connection: a peer that does not take its answer within a second is dropped.
//!
//! With `S` the keeper is also who replaces a daemon that was killed: when the
//! connection ends and something is held, it starts the command, at most once a
//! second, until a daemon says `S` again. Under a service manager that keeps
//! descriptors (`NOTIFY_SOCKET` is set) it lets that one go first, for three
//! seconds: a daemon that is not the manager's own could leave nothing with it.

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
/// Most connections at once; a new one pushes the oldest out.
const CONNECTIONS_MAX: usize = 64;
/// Pause after a connection that could not be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Longest list of names sent.
const LIST_BYTES_MAX: usize = 64 * 1024;

fn to_io(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// The keeper's whole life: listens at `path` and serves until told to end.
///
/// # Errors
/// Another keeper serves there (`AddrInUse`), or the socket fails.
pub fn run(path: &Path) -> io::Result<()> {
    let name = path.as_os_str().as_bytes();
    let _ = pagefold_os::fd::raise_limit();
    // A socket of a dead keeper is in the way; one of a living keeper answers.
    if sock::connect(name).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another keeper serves there"));
    }
    let _ = std::fs::remove_file(path);
    let served = sock::listen(name).map_err(to_io).and_then(|listener| serve(&listener));
    let _ = std::fs::remove_file(path);
    served
}

/// Serves on a listening socket until somebody sends `Q`.
///
/// # Errors
/// The listening socket fails; nothing that a peer does is an error here.
pub fn serve(listener: &Fd) -> io::Result<()> {
    // SAFETY: a call without arguments.
    let own_uid = unsafe { libc::geteuid() };
    let mut held: BTreeMap<Vec<u8>, Vec<Fd>> = BTreeMap::new();
    let mut peers: Vec<Fd> = Vec::new();
    let managed = std::env::var_os("NOTIFY_SOCKET").is_some();
    let mut watch = Watch { grace: if managed { MANAGER_GRACE } else { Duration::ZERO }, ..Watch::default() };
    // Nobody waits for the processes that we start.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        let fds = std::iter::once(listener).chain(&peers);
        let mut polls: Vec<libc::pollfd> =
            fds.map(|fd| libc::pollfd { fd: fd.raw(), events: libc::POLLIN, revents: 0 }).collect();
        poll(&mut polls, watch.wait_ms(!held.is_empty())).map_err(to_io)?;
        watch.start_if_due(!held.is_empty());
        let mut closed = Vec::new();
        for (index, ready) in polls[1..].iter().enumerate().filter(|(_, poll)| poll.revents != 0) {
            debug_assert_eq!(ready.fd, peers[index].raw());
            match answer(&peers[index], &mut held, &mut watch) {
                Ok(Served::More) => {}
                Ok(Served::End) => return Ok(()),
                Err(_) => {
                    watch.ended(peers[index].raw());
                    closed.push(index);
                }
            }
        }
        closed.into_iter().rev().for_each(|index| drop(peers.remove(index)));
        if polls[0].revents != 0 {
            let Ok(peer) = sock::accept(listener) else {
                // No descriptor is free, for instance: a busy loop would not free one.
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            let allowed = sock::peer(&peer).is_ok_and(|cred| cred.uid == own_uid || cred.uid == 0);
            if allowed && sock::set_timeout(&peer, 1000).is_ok() {
                if peers.len() == CONNECTIONS_MAX {
                    let oldest = peers.iter().position(|peer| !watch.is_owner(peer.raw())).unwrap_or(0);
                    peers.remove(oldest);
                }
                peers.push(peer);
            }
        }
    }
}

/// Pause between two starts of the daemon.
const START_PAUSE: Duration = Duration::from_secs(1);
/// How long a service manager has to start the daemon first; less than agents wait for somebody.
const MANAGER_GRACE: Duration = Duration::from_secs(3);

/// Who owns what we hold, and how to replace it.
#[derive(Default)]
struct Watch {
    owner: Option<i32>,
    command: Vec<Vec<u8>>,
    /// The owner has gone, then, and nobody has come since.
    missing: Option<Instant>,
    /// How long somebody else may take to replace it.
    grace: Duration,
    started: Option<Instant>,
}

impl Watch {
    fn is_owner(&self, peer: i32) -> bool {
        self.owner == Some(peer)
    }

    fn ended(&mut self, peer: i32) {
        if self.is_owner(peer) {
            self.owner = None;
            self.missing = Some(Instant::now());
        }
    }

    /// Who holds nothing starts nobody, and hears when something comes.
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
        // Its end is the kernel's business (SIGCHLD is ignored); a failed start is tried again.
        let _ = command.spawn();
    }
}

enum Served {
    More,
    End,
}

/// Answers one question; an error ends the connection.
fn answer(peer: &Fd, held: &mut BTreeMap<Vec<u8>, Vec<Fd>>, watch: &mut Watch) -> raw::Result<Served> {
    let mut packet = [0; COMMAND_BYTES_MAX];
    let (len, mut came) = sock::receive(peer, &mut packet, libc::MSG_DONTWAIT)?;
    let Some((question, name)) = packet[..len].split_first() else { return Err(Errno(libc::EPIPE)) };
    let status = |errno: i32| [errno as u8];
    if name.len() > NAME_BYTES_MAX && *question != b'S' {
        sock::send(peer, &status(libc::EINVAL), &[])?;
        return Ok(Served::More);
    }
    match question {
        b'S' if name.len() < COMMAND_BYTES_MAX - 1 => {
            watch.command = name.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(<[u8]>::to_vec).collect();
            watch.owner = (!watch.command.is_empty()).then_some(peer.raw());
            watch.missing = None;
            sock::send(peer, &status(0), &[])?;
        }
        b'P' if (!came.is_empty() || came.is_cut()) && !name.is_empty() => {
            if held.len() >= NAMES_MAX && !held.contains_key(name) {
                sock::send(peer, &status(libc::ENOSPC), &[])?;
                return Ok(Served::More);
            }
            // A part of them is worth nothing to anybody.
            if came.is_cut() {
                sock::send(peer, &status(libc::EMFILE), &[])?;
                return Ok(Served::More);
            }
            held.insert(name.to_vec(), (0..came.len()).filter_map(|index| came.take(index)).collect());
            sock::send(peer, &status(0), &[])?;
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
            // Behind the name that the asker has already.
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
    /// Questions whose answers we did not wait for: they come first.
    late: AtomicU32,
}

impl Keeper {
    /// Connects to the keeper at `path`.
    ///
    /// # Errors
    /// As connect(2).
    pub fn connect(path: &Path) -> io::Result<Keeper> {
        let socket = sock::connect(path.as_os_str().as_bytes()).map_err(to_io)?;
        sock::set_timeout(&socket, 5000).map_err(to_io)?;
        Ok(Keeper { socket, late: AtomicU32::new(0) })
    }

    /// Starts `program` (the keeper's own program) on `path`, as a process of its own group that outlives us, and
    /// connects to it.
    ///
    /// # Errors
    /// It cannot be started, or does not answer within thirty seconds.
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

    /// Leaves descriptors under `name`, instead of what was there.
    ///
    /// # Errors
    /// `EINVAL` for a name that is empty or too long or for no descriptors, `ENOSPC` for too many names, `EMFILE` for too
    /// many descriptors, and what sendmsg(2) says: the keeper is gone.
    pub fn put(&self, name: &str, fds: &[i32]) -> io::Result<()> {
        self.ask(b'P', name, fds, &mut [0]).map(drop)
    }

    /// Gets the descriptors under `name`; the keeper goes on holding them.
    ///
    /// # Errors
    /// `ENOENT` if there are none; `EMFILE` if we may not have so many.
    pub fn get(&self, name: &str) -> io::Result<Vec<Fd>> {
        let (_, mut fds) = self.ask(b'G', name, &[], &mut [0])?;
        if fds.is_cut() {
            return Err(to_io(Errno(libc::EMFILE)));
        }
        Ok((0..fds.len()).filter_map(|index| fds.take(index)).collect())
    }

    /// Lets the keeper drop what is under `name`.
    ///
    /// # Errors
    /// `ENOENT` if there is nothing.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        self.ask(b'D', name, &[], &mut [0]).map(drop)
    }

    /// As [`put`](Self::put), for who holds up others: does not wait for a keeper that is behind with its answers.
    ///
    /// # Errors
    /// As there, where it waits.
    pub fn put_soon(&self, name: &str, fds: &[i32]) -> io::Result<()> {
        self.tell(b'P', name, fds)
    }

    /// As [`forget`](Self::forget), in the way of [`put_soon`](Self::put_soon).
    ///
    /// # Errors
    /// As there, where it waits.
    pub fn forget_soon(&self, name: &str) -> io::Result<()> {
        self.tell(b'D', name, &[])
    }

    /// The names that something is held under, in order.
    ///
    /// # Errors
    /// The keeper is gone; `InvalidData` if it is of a version that tells the first names only, and holds more.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut buffer = vec![0; LIST_BYTES_MAX];
        let mut all: Vec<Vec<u8>> = Vec::new();
        loop {
            let behind = all.last().map_or(&[][..], Vec::as_slice);
            let (len, _) = self.ask_packet(&[b"L", behind].concat(), &[], &mut buffer)?;
            let names = buffer[1..len.max(1)].split(|byte| *byte == 0).filter(|name| !name.is_empty());
            let first = all.len();
            all.extend(names.map(<[u8]>::to_vec));
            // It did not look at what it was to begin behind.
            if first > 0 && all.get(first).is_some_and(|name| *name <= all[first - 1]) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a keeper of an older version holds more names than it can tell",
                ));
            }
            // Any name would have found room.
            if all.len() == first || len + NAME_BYTES_MAX < LIST_BYTES_MAX {
                break;
            }
        }
        Ok(all.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// Lets the keeper start `command` when this connection ends while something is held; an empty one ends that.
    ///
    /// # Errors
    /// The command is too long, or the keeper is gone.
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

    /// Ends the keeper, and with it what only it holds.
    ///
    /// # Errors
    /// The keeper is gone already.
    pub fn quit(&self) -> io::Result<()> {
        self.ask(b'Q', "", &[], &mut [0]).map(drop)
    }

    fn ask(&self, question: u8, name: &str, fds: &[i32], reply: &mut [u8]) -> io::Result<(usize, sock::Fds)> {
        if name.len() > NAME_BYTES_MAX {
            return Err(to_io(Errno(libc::EINVAL)));
        }
        self.ask_packet(&[&[question], name.as_bytes()].concat(), fds, reply)
    }

    fn ask_packet(&self, packet: &[u8], fds: &[i32], reply: &mut [u8]) -> io::Result<(usize, sock::Fds)> {
        // Also behind questions that are not answered yet: what is to be let go must not stay because the keeper was slow once.
        sock::send(&self.socket, packet, fds).map_err(to_io)?;
        loop {
            let answer = sock::receive(&self.socket, reply, 0);
            if matches!(answer, Err(Errno(libc::EAGAIN))) {
                self.late.fetch_add(1, Ordering::Relaxed);
            }
            let is_late =
                matches!(answer, Ok((1.., _)) | Err(Errno(libc::EMSGSIZE))) && self.late.load(Ordering::Relaxed) > 0;
            // Each question has one answer, in order: what comes late is not the answer to this one.
            if is_late {
                self.late.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            return match answer.map_err(to_io)? {
                (0, _) => Err(to_io(Errno(libc::EPIPE))),
                (len, fds) if reply[0] == 0 => Ok((len, fds)),
                _ => Err(to_io(Errno(i32::from(reply[0])))),
            };
        }
    }

    /// As [`ask_packet`](Self::ask_packet), but waits for no answer as long as earlier ones are not there.
    fn tell(&self, question: u8, name: &str, fds: &[i32]) -> io::Result<()> {
        while self.late.load(Ordering::Relaxed) > 0 {
            match sock::receive(&self.socket, &mut [0], libc::MSG_DONTWAIT) {
                Ok((1.., _)) | Err(Errno(libc::EMSGSIZE)) => self.late.fetch_sub(1, Ordering::Relaxed),
                _ => {
                    sock::send(&self.socket, &[&[question], name.as_bytes()].concat(), fds).map_err(to_io)?;
                    self.late.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
            };
        }
        self.ask(question, name, fds, &mut [0]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_that_holds_nothing_sleeps() {
        let mut watch = Watch { owner: Some(7), ..Watch::default() };
        assert_eq!(watch.wait_ms(true), -1);
        watch.ended(7);
        assert_eq!(watch.wait_ms(false), -1);
        assert!(watch.wait_ms(true) > 0);
    }

    /// Runs `keeper` at a listening socket of its own, and `ask` against it.
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
    fn more_names_than_one_answer_holds_are_told_in_order() {
        with_keeper(
            |listener| serve(&listener).unwrap(),
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
    fn a_keeper_that_tells_the_first_names_only_is_not_believed() {
        // As the first version did: whatever it is asked to begin behind.
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
        // What leaves room for another is all.
        assert_eq!(ask(names(1000)).unwrap().len(), 1000);
    }

    /// Waits for the first connection.
    fn first_peer(listener: &Fd) -> Fd {
        poll(&mut [libc::pollfd { fd: listener.raw(), events: libc::POLLIN, revents: 0 }], -1).unwrap();
        sock::accept(listener).unwrap()
    }

    #[test]
    fn an_answer_that_comes_late_is_nobodys() {
        let (go, wait) = std::sync::mpsc::channel();
        // Says nothing to the first question before it was given up.
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
            // Neither is lost: the keeper has been told when it looks.
            keeper.forget_soon("second").unwrap();
            sock::set_timeout(&keeper.socket, 20_000).unwrap();
            go.send(()).unwrap();
            assert_eq!(keeper.forget("third").unwrap_err().kind(), io::ErrorKind::NotFound);
        });
    }

    #[test]
    fn a_service_manager_goes_first() {
        let lost = |grace| {
            let mut watch = Watch { owner: Some(7), command: vec![b"true".to_vec()], grace, ..Watch::default() };
            watch.start_if_due(true);
            watch.ended(8);
            watch.start_if_due(true);
            assert!(watch.started.is_none(), "the owner is there");
            watch.ended(7);
            watch.start_if_due(false);
            assert!(watch.started.is_none(), "nothing is held");
            watch.start_if_due(true);
            watch.started.is_some()
        };
        assert!(lost(Duration::ZERO) && !lost(Duration::from_secs(3600)));
    }
}
