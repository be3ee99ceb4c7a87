//! The control verbs: what can be asked, what is answered, and what the daemon does about it.
//!
//! A new verb is a variant of [`Request`], with an arm in [`perform`] and one in [`Request::is_quick`]; both matches are
//! exhaustive, so the compiler names what is missing.

use crate::cold::handover::shutdown;
use crate::cold::selector::ClientSelector;
use crate::cold::tiers::Tiers;
use crate::config::Backend;
use crate::history::History;
use crate::service::attach::Manage;
use crate::service::daemon::Daemon;
use crate::service::{attach, park, report, verify};
use crate::status::{Status, Verified};
use pagefold_os::sync::lock;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

/// A control request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// The status of everything.
    Status {},
    /// The same, but what is not managed is as an earlier look found it: the answer waits for no walk of page tables.
    Counts {},
    /// The samples of the last minutes.
    History {},
    /// Give the process private copies of its merged pages, and merge it no more.
    Unmerge {
        /// Process id of the client.
        pid: i32,
    },
    /// Stop merging; merged pages stay merged. Without `pid`: all clients.
    Pause {
        /// Process id of the client.
        pid: Option<i32>,
    },
    /// Merge again.
    Resume {
        /// Process id of the client.
        pid: Option<i32>,
    },
    /// Evict all memory of these clients to the cold tier.
    Park {
        /// The clients.
        clients: ClientSelector,
    },
    /// Bring all memory of these clients back from the cold tier.
    Unpark {
        /// The clients.
        clients: ClientSelector,
    },
    /// Enter a process that runs already, and merge it.
    Attach {
        /// Process id.
        pid: i32,
        /// Name of the domain.
        domain: String,
        /// Evict idle memory to the cold tier instead of merging.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        cold: bool,
        /// What merges its pages.
        #[serde(default)]
        backend: Backend,
    },
    /// Give an attached process private memory, and take the agent out of it.
    Detach {
        /// Process id.
        pid: i32,
    },
    /// Compare every shared mapping with its slot.
    Verify {},
    /// Stop the daemon; clients keep their merged pages.
    Stop {
        /// What becomes of cold memory; without it the daemon's configuration decides.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cold: Option<ColdOnStop>,
    },
}

/// What becomes of cold memory when the daemon stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColdOnStop {
    /// It is returned to its clients first, as far as there is memory for it.
    Return,
    /// It stays with the keeper for the daemon that starts next. Without a keeper it is returned.
    Keep,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// To `Status` and `Counts`.
    Status(Box<Status>),
    /// To `History`.
    History(Box<History>),
    /// To `Verify`.
    Verified(Verified),
    /// Done, for so many clients. To `Stop`: so many clients' cold memory was not returned.
    Done {
        /// Clients.
        count: u64,
    },
    /// To `Attach`.
    Attached {
        /// For how long one thread of the program stood still, in nanoseconds.
        still_ns: u64,
        /// Why KSM merges it and no agent, if that is so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ksm: Option<String>,
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

impl Request {
    /// True for a request that takes no time, however much memory the daemon manages.
    pub(super) fn is_quick(&self) -> bool {
        match self {
            Request::Status {}
            | Request::Counts {}
            | Request::History {}
            | Request::Stop { cold: None | Some(ColdOnStop::Keep) } => true,
            Request::Stop { cold: Some(ColdOnStop::Return) }
            | Request::Unmerge { .. }
            | Request::Pause { .. }
            | Request::Resume { .. }
            | Request::Park { .. }
            | Request::Unpark { .. }
            | Request::Attach { .. }
            | Request::Detach { .. }
            | Request::Verify {} => false,
        }
    }
}

/// Does what `request` of user `asker` asks. The caller stops the daemon after a [`Request::Stop`], when the answer is on
/// its way.
pub(super) fn perform(daemon: &Daemon, request: &Request, asker: u32) -> Answer {
    match request {
        Request::Status {} => {
            daemon.looks.look(&daemon.live);
            Answer::Status(Box::new(report::status(daemon)))
        }
        Request::Counts {} => Answer::Status(Box::new(report::status(daemon))),
        Request::History {} => Answer::History(Box::new(lock(&daemon.history).clone())),
        Request::Verify {} => Answer::Verified(verify::verify(daemon)),
        Request::Stop { cold } => Answer::Done { count: cold.map_or(0, |cold| prepare_stop(&daemon.cold, cold)) },
        Request::Park { clients } => match park::park(daemon, clients) {
            Ok(Some((clients, pages))) => Answer::Moved { clients, pages },
            Ok(None) => no_client(clients, "client", "there is no client; pagefold run starts one"),
            Err(message) => Answer::Error { message },
        },
        Request::Unpark { clients } => match park::unpark(daemon, clients) {
            Some((clients, pages)) => Answer::Moved { clients, pages },
            None => {
                no_client(clients, "client of the cold tier", "there is no client of the cold tier: nothing is parked")
            }
        },
        Request::Attach { pid, domain, cold, backend } => {
            match attach::attach_by(daemon, *pid, domain, Manage::all(*cold), *backend, asker) {
                Ok((still, ksm)) => Answer::Attached { still_ns: still.as_nanos() as u64, ksm },
                Err(message) => Answer::Error { message: format!("{pid}: {message}") },
            }
        }
        Request::Detach { pid } => match attach::detach(daemon, *pid, asker) {
            Ok(count) => Answer::Unmerged { count, left: 0 },
            Err(message) => Answer::Error { message: format!("{pid}: {message}") },
        },
        Request::Unmerge { pid } => unmerge(daemon, *pid),
        Request::Pause { pid } => set_paused(daemon, *pid, true),
        Request::Resume { pid } => set_paused(daemon, *pid, false),
    }
}

/// Does what a daemon can do about cold memory while it still answers, so that the asker sees the progress. Returns for
/// how many clients it could not return the cold memory.
fn prepare_stop(tiers: &Tiers, cold: ColdOnStop) -> u64 {
    tiers.hand_over.store(cold == ColdOnStop::Keep, Ordering::SeqCst);
    match cold {
        ColdOnStop::Keep => tiers.clients_of(&ClientSelector::All).len() as u64,
        ColdOnStop::Return => shutdown::return_all(tiers).len() as u64,
    }
}

fn unmerge(daemon: &Daemon, pid: i32) -> Answer {
    if daemon.live.clients_of(Some(pid)).is_empty() {
        return not_merged(pid);
    }
    match attach::make_private(daemon, pid) {
        Ok((count, left)) => Answer::Unmerged { count, left },
        Err(_) => Answer::Error { message: format!("{pid} is gone, or does not answer") },
    }
}

fn set_paused(daemon: &Daemon, pid: Option<i32>, is_paused: bool) -> Answer {
    let clients = daemon.live.clients_of(pid);
    if let Some(pid) = pid.filter(|_| clients.is_empty()) {
        return not_merged(pid);
    }
    let done = clients.iter().filter(|(domain, id)| domain.pause(*id, is_paused)).count();
    daemon.live.wake_workers();
    Answer::Done { count: done as u64 }
}

fn not_merged(pid: i32) -> Answer {
    Answer::Error { message: format!("{pid} is no client that is merged live; pagefold status lists them") }
}

/// The selector selects no `kind`; `none` says that there is none at all.
fn no_client(clients: &ClientSelector, kind: &str, none: &str) -> Answer {
    Answer::Error {
        message: match clients {
            ClientSelector::Pid(pid) => format!("{pid} is no {kind}; pagefold status lists them"),
            ClientSelector::Cgroup(path) => format!("no {kind} is in the cgroup {path}"),
            ClientSelector::All => none.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Daemons and clients of other versions know this text.
    #[test]
    fn a_plain_stop_is_what_it_always_was() {
        let text = |request: &Request| serde_json::to_string(request).unwrap();
        assert_eq!(text(&Request::Stop { cold: None }), r#"{"ask":"stop"}"#);
        assert_eq!(text(&Request::Stop { cold: Some(ColdOnStop::Keep) }), r#"{"ask":"stop","cold":"keep"}"#);
        let read: Request = serde_json::from_str(r#"{"ask":"stop"}"#).unwrap();
        assert_eq!(read, Request::Stop { cold: None });
    }
}
