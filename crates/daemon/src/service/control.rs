//! The control socket: one JSON request per connection, one JSON answer.

use crate::cold::Whom;
use crate::service::listener::Daemon;
use crate::status::{Status, Verified};
use pagefold_os::fd::Fd;
use pagefold_os::{procfs, sock};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of an answer that go into one packet.
const PACKET_BYTES: usize = 32 << 10;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Everything about everybody.
    Status {},
    /// Give the process its private memory back and leave it alone.
    Unmerge {
        /// Process id of the client.
        pid: i32,
    },
    /// Stop merging; what is merged stays. Without `pid`: everybody.
    Pause {
        /// Process id of the client.
        pid: Option<i32>,
    },
    /// Go on merging.
    Resume {
        /// Process id of the client.
        pid: Option<i32>,
    },
    /// Put everything of these clients of the cold tier out.
    Park {
        /// Whose.
        whom: Whom,
    },
    /// Bring everything of these clients of the cold tier back.
    Unpark {
        /// Whose.
        whom: Whom,
    },
    /// Compare every shared mapping with its slot.
    Verify {},
    /// Stop the daemon; clients keep what is merged.
    Stop {},
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// To `Status`.
    Status(Box<Status>),
    /// To `Verify`.
    Verified(Verified),
    /// Done; how many clients it concerned.
    Done {
        /// Clients.
        count: u64,
    },
    /// To `Unmerge`.
    Unmerged {
        /// Pages that are private again.
        count: u64,
        /// Pages that stay shared: a device may be reading into them, or there is no memory for copies.
        left: u64,
    },
    /// To `Park` and `Unpark`.
    Moved {
        /// Clients.
        clients: u64,
        /// Pages that went or came.
        pages: u64,
    },
    /// Not done.
    Error {
        /// One line: what, where, what to do.
        message: String,
    },
}

pub(crate) fn answer(daemon: &Arc<Daemon>, socket: &Fd, bytes: &[u8]) {
    let request = serde_json::from_slice(bytes);
    let reply = match &request {
        Ok(request) => perform(daemon, request),
        Err(error) => Answer::Error { message: format!("the request is no request of this version: {error}") },
    };
    let text = serde_json::to_vec(&reply).unwrap_or_default();
    let _ = text.chunks(PACKET_BYTES).try_for_each(|packet| sock::send(socket, packet, &[]).map(drop));
    // The process may end at once: who asked for it has the answer by then.
    if let Ok(Request::Stop {}) = request {
        daemon.stop();
    }
}

fn perform(daemon: &Arc<Daemon>, request: &Request) -> Answer {
    let unknown = |pid: &i32| Answer::Error {
        message: format!("{pid} is no client that is merged live; pagefold status lists them"),
    };
    match request {
        Request::Status {} => Answer::Status(Box::new(daemon.status())),
        Request::Verify {} => Answer::Verified(daemon.verify()),
        Request::Stop {} => Answer::Done { count: 0 },
        Request::Park { whom } | Request::Unpark { whom } => {
            let park = matches!(request, Request::Park { .. });
            match if park { daemon.park(whom) } else { Ok(daemon.unpark(whom)) } {
                Ok(Some((clients, pages))) => Answer::Moved { clients, pages },
                Ok(None) => {
                    let what = if park { "client" } else { "client of the cold tier" };
                    Answer::Error {
                        message: match whom {
                            Whom::Pid(pid) => format!("{pid} is no {what}; pagefold status lists them"),
                            Whom::Cgroup(path) => format!("no {what} is in the cgroup {path}"),
                            Whom::All if park => "there is no client; pagefold run starts one".into(),
                            Whom::All => "there is no client of the cold tier: nothing is parked".into(),
                        },
                    }
                }
                Err(message) => Answer::Error { message },
            }
        }
        Request::Unmerge { pid } => {
            let clients = daemon.clients_of(Some(*pid));
            if clients.is_empty() {
                return unknown(pid);
            }
            let done: Vec<_> = clients.iter().filter_map(|(domain, id)| domain.unmerge(*id).ok()).collect();
            if done.is_empty() {
                return Answer::Error { message: format!("{pid} is gone, or does not answer") };
            }
            let (count, left) = done.iter().fold((0, 0), |(count, left), one| (count + one.pages, left + one.left));
            Answer::Unmerged { count, left }
        }
        Request::Pause { pid } | Request::Resume { pid } => {
            let pause = matches!(request, Request::Pause { .. });
            let clients = daemon.clients_of(*pid);
            match pid {
                Some(pid) if clients.is_empty() => unknown(pid),
                _ => {
                    let done = clients.iter().filter(|(domain, id)| domain.pause(*id, pause)).count();
                    daemon.ring_workers();
                    Answer::Done { count: done as u64 }
                }
            }
        }
    }
}

/// How long a daemon may take for a question, and for a sign of life while it does what takes longer.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Time between two looks at how a daemon that says nothing is.
const LOOK: Duration = Duration::from_secs(1);

/// Asks the daemon at `socket` and waits for its answer: for a question [`PATIENCE`], for work as long as it answers
/// questions meanwhile.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` if no daemon listens there, `InvalidData` if it answers nonsense, `UnexpectedEof` if it
/// hangs up, `TimedOut`, with what to do about it, if it does not answer.
pub fn ask(socket: &Path, request: &Request) -> io::Result<Answer> {
    ask_within(socket, request, PATIENCE)
}

/// As [`ask`], with a patience of one's own.
///
/// # Errors
/// As [`ask`].
pub fn ask_within(socket: &Path, request: &Request, patience: Duration) -> io::Result<Answer> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, InvalidData, UnexpectedEof};
    let text = exchange(socket, request, patience);
    let text = text.and_then(|text| if text.is_empty() { Err(ConnectionReset.into()) } else { Ok(text) });
    let text = text.map_err(|error| match error.kind() {
        BrokenPipe | ConnectionReset => {
            io::Error::new(UnexpectedEof, "it hung up: it ended, or serves as many as it can")
        }
        _ => error,
    })?;
    serde_json::from_slice(&text).map_err(|error| io::Error::new(InvalidData, error))
}

/// The bytes of the answer.
fn exchange(socket: &Path, request: &Request, patience: Duration) -> io::Result<Vec<u8>> {
    let path = socket.as_os_str().as_bytes();
    let connection = sock::connect_within(path, millis(patience))
        .map_err(|errno| with_cure(sock::in_time(errno.into(), patience), None))?;
    let pid = sock::peer(&connection).ok().map(|peer| peer.pid).filter(|pid| *pid > 0);
    sock::set_timeout(&connection, millis(LOOK.min(patience)))?;
    sock::send(&connection, &serde_json::to_vec(request)?, &[])?;
    let mut text = Vec::new();
    let mut buffer = vec![0; PACKET_BYTES];
    let mut heard = Instant::now();
    loop {
        let error = match sock::receive(&connection, &mut buffer, 0) {
            Ok((0, _)) => return Ok(text),
            Ok((got, _)) => {
                text.extend_from_slice(&buffer[..got]);
                heard = Instant::now();
                continue;
            }
            Err(errno) => sock::in_time(errno.into(), patience),
        };
        let goes_on = error.kind() == io::ErrorKind::TimedOut
            && !pid.is_some_and(procfs::is_stopped)
            // Moving or comparing terabytes takes time, and there one that hangs is told by what takes none.
            && if is_question(request) { heard.elapsed() < patience } else { answers(socket, patience) };
        if !goes_on {
            return Err(with_cure(error, pid));
        }
    }
}

fn millis(time: Duration) -> u64 {
    // None at all would be no limit.
    time.as_millis().clamp(1, u64::MAX.into()) as u64
}

/// True for what takes no time, whatever there is to be done.
fn is_question(request: &Request) -> bool {
    matches!(request, Request::Status {} | Request::Stop {})
}

/// True unless who listens at `socket` has no word even for a question.
fn answers(socket: &Path, patience: Duration) -> bool {
    let asked = ask_within(socket, &Request::Status {}, patience);
    !asked.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

/// `error` with what to do about a daemon, process `pid`, that says nothing.
fn with_cure(error: io::Error, pid: Option<i32>) -> io::Error {
    if error.kind() != io::ErrorKind::TimedOut {
        return error;
    }
    let said = match pid {
        Some(pid) if procfs::is_stopped(pid) => format!("process {pid} is stopped; kill -CONT {pid} lets it go on"),
        Some(pid) => format!(
            "{error} from process {pid}; if it stays so, kill -KILL {pid}: clients keep what they have, and greet the next daemon"
        ),
        None => format!("{error}; is it stopped?"),
    };
    io::Error::new(error.kind(), said)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    fn listener() -> (tempfile::TempDir, std::path::PathBuf, Fd) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = sock::listen(path.as_os_str().as_bytes()).unwrap();
        (dir, path, listener)
    }

    #[test]
    fn who_takes_no_connections_is_not_waited_for_for_ever() {
        let (_dir, path, _listener) = listener();
        let mut waiting = Vec::new();
        while let Ok(connection) = sock::connect_within(path.as_os_str().as_bytes(), 50) {
            waiting.push(connection);
        }
        let error = ask_within(&path, &Request::Status {}, SHORT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "no word in 50ms; is it stopped?");
    }

    #[test]
    fn who_answers_nothing_is_named() {
        let (_dir, path, _listener) = listener();
        for request in [Request::Status {}, Request::Verify {}, Request::Pause { pid: None }] {
            let error = ask_within(&path, &request, SHORT).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{request:?}");
            let me = format!("no word in 50ms from process {}; ", std::process::id());
            assert!(error.to_string().starts_with(&me), "{error}");
        }
    }

    #[test]
    fn long_work_is_waited_for_as_long_as_questions_are_answered() {
        let (_dir, path, listener) = listener();
        let daemon = std::thread::spawn(move || {
            let reply = |connection: Fd, answer: &Answer| {
                let mut request = [0; 100];
                let (got, _) = sock::receive(&connection, &mut request, 0).unwrap();
                sock::send(&connection, &serde_json::to_vec(answer).unwrap(), &[]).unwrap();
                serde_json::from_slice::<Request>(&request[..got]).unwrap()
            };
            let work = sock::accept(&listener).unwrap();
            assert_eq!(reply(sock::accept(&listener).unwrap(), &Answer::Status(Box::default())), Request::Status {});
            reply(work, &Answer::Verified(Verified::default()))
        });
        // Longer for a question than what this machine may take for one.
        let answer = ask_within(&path, &Request::Verify {}, Duration::from_secs(60));
        assert_eq!(answer.unwrap(), Answer::Verified(Verified::default()));
        assert_eq!(daemon.join().unwrap(), Request::Verify {});
    }
}
