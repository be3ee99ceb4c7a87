//! The control socket: one JSON request per connection, one JSON answer.

use crate::cold::Whom;
use crate::server::Daemon;
use crate::status::{Status, Verified};
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;

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

/// Asks the daemon at `socket` and waits for its answer.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` if no daemon listens there, `InvalidData` if it answers nonsense.
pub fn ask(socket: &Path, request: &Request) -> io::Result<Answer> {
    // A daemon that dies ends the connection: the limit is for one that hangs. Moving or comparing terabytes takes time.
    let patience_ms = match request {
        Request::Park { .. } | Request::Unpark { .. } | Request::Unmerge { .. } | Request::Verify {} => 3_600_000,
        _ => 120_000,
    };
    ask_within(socket, request, patience_ms)
}

/// As [`ask`], for who has other things to do: `WouldBlock` once `patience_ms` are over.
///
/// # Errors
/// As [`ask`].
pub fn ask_within(socket: &Path, request: &Request, patience_ms: u64) -> io::Result<Answer> {
    use std::os::unix::ffi::OsStrExt;
    let connection = sock::connect_within(socket.as_os_str().as_bytes(), patience_ms)?;
    sock::send(&connection, &serde_json::to_vec(request)?, &[])?;
    let mut text = Vec::new();
    let mut buffer = vec![0; PACKET_BYTES];
    loop {
        let (got, _) = sock::receive(&connection, &mut buffer, 0)?;
        if got == 0 {
            break;
        }
        text.extend_from_slice(&buffer[..got]);
    }
    serde_json::from_slice(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_no_connections_is_not_waited_for_for_ever() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = sock::listen(path.as_os_str().as_bytes()).unwrap();
        let mut waiting = Vec::new();
        while let Ok(connection) = sock::connect_within(path.as_os_str().as_bytes(), 50) {
            waiting.push(connection);
        }
        let error = ask_within(&path, &Request::Status {}, 50).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
