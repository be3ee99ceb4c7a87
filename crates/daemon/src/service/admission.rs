//! Admission of agents: they become clients or are refused.

use crate::clients::connection::Connection;
use crate::clients::domains::wake;
use crate::clients::handshake::GreetError;
use crate::clients::merge_client::MergeClient;
use crate::cold::handover::keeper::leave_keepers_end;
use crate::cold::handshake;
use crate::domain_key::UNNAMED_DOMAIN;
use crate::memory_limits::{self, CLIENT_BYTES};
use crate::service::daemon::Daemon;
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use pagefold_protocol::handshake::refuse_hello;
use pagefold_protocol::message::{Op, Packet};
use std::sync::Arc;

/// How long a new connection may take to send its first packet.
const FIRST_PACKET_MS: u64 = 5_000;
const OUT_OF_MEMORY: &str = "the daemon is near the memory limit of its control group: raise it (MemoryMax=)";
const TOO_MANY_CONNECTIONS: &str = "it is connected several times already";

/// The first packet of a new connection: an agent's greeting, or a control request.
pub(crate) struct FirstPacket {
    pub(crate) bytes: Vec<u8>,
    fds: sock::Fds,
}

/// Receives the first packet of a connection; `None` if none arrives in time.
pub(crate) fn first_packet(socket: &Fd) -> Option<FirstPacket> {
    let mut bytes = vec![0; 64 << 10];
    sock::set_timeout(socket, FIRST_PACKET_MS).ok()?;
    let (got, fds) = sock::receive(socket, &mut bytes, 0).ok()?;
    bytes.truncate(got);
    Some(FirstPacket { bytes, fds })
}

/// Makes the agent a client that sends this greeting, or refuses it.
pub(crate) fn admit(daemon: &Daemon, socket: Fd, greeting: FirstPacket) {
    let is_led = Packet::parse(&greeting.bytes).is_some_and(|packet| packet.op == Op::Connect as u32);
    // The keeper is of our own user.
    if is_led && sock::is_of_own_user(&socket) {
        admit_led(daemon, greeting.fds);
    } else {
        admit_greeting(daemon, socket, greeting);
    }
}

/// Admits an agent that the keeper has led here: it greets on the socket that came. The kernel names the process that made
/// that socket.
fn admit_led(daemon: &Daemon, mut fds: sock::Fds) {
    let Some(socket) = fds.take(0) else { return };
    if let Some(greeting) = first_packet(&socket) {
        admit_greeting(daemon, socket, greeting);
    }
}

fn admit_greeting(daemon: &Daemon, socket: Fd, greeting: FirstPacket) {
    match Packet::parse(&greeting.bytes).filter(|packet| packet.op == Op::Hello as u32) {
        Some(hello) => admit_agent(daemon, socket, &hello, greeting.fds),
        None => refuse_hello(&socket, pagefold_os::Errno(libc::EPROTO)),
    }
}

fn admit_agent(daemon: &Daemon, socket: Fd, hello: &Packet, mut fds: sock::Fds) {
    let Ok(cred) = sock::peer(&socket) else { return };
    let text: Vec<u8> = hello.text.iter().copied().take_while(|byte| *byte != 0).collect();
    // Lossy decoding could make one name of two, and the clients of a domain trust each other.
    let Ok(name) = String::from_utf8(text) else {
        return daemon.refusals.note(cred.pid, "the name of its domain is not UTF-8".into());
    };
    let name = if name.is_empty() { UNNAMED_DOMAIN.to_owned() } else { name };
    if fds.is_cut() {
        return note_failure(daemon, cred.pid, &GreetError::NoDescriptor);
    }
    let key = (cred.uid, name);
    if hello.a & pagefold_protocol::message::HELLO_COLD != 0 {
        pass_keepers_end(daemon, &mut fds);
        return match handshake::greet(&daemon.cold, socket, hello, fds, daemon.userfault_device.as_ref(), key) {
            Ok(()) => daemon.refusals.forget(cred.pid),
            Err(error) => note_failure(daemon, cred.pid, &error),
        };
    }
    if daemon.live.is_connected_too_often(cred.pid) {
        return daemon.refusals.note(cred.pid, TOO_MANY_CONNECTIONS.into());
    }
    if !memory_limits::own().has(CLIENT_BYTES) {
        return daemon.refusals.note(cred.pid, OUT_OF_MEMORY.into());
    }
    pass_keepers_end(daemon, &mut fds);
    let connection = Arc::new(Connection::from(socket));
    let leftover = (daemon.config.leftover, key.clone());
    let client = match MergeClient::greet(connection.clone(), hello, fds, daemon.userfault_device.as_ref(), leftover) {
        Ok(client) => client,
        Err(error) => return note_failure(daemon, cred.pid, &error),
    };
    let (domain, workers) = match daemon.live.join(&key) {
        Ok(joined) => joined,
        Err(error) => return daemon.refusals.note(cred.pid, format!("no domain for it: {error}")),
    };
    if !daemon.live.add(&key, &domain, client, connection) {
        return daemon.refusals.note(cred.pid, TOO_MANY_CONNECTIONS.into());
    }
    daemon.refusals.forget(cred.pid);
    wake(&workers);
}

/// Passes on the end of an agent's socket that is the keeper's, or ours without a keeper. Before the welcome: from then on
/// the agent uses the other end.
fn pass_keepers_end(daemon: &Daemon, fds: &mut sock::Fds) {
    if let Some(end) = fds.take(1)
        && let Err(end) = leave_keepers_end(&daemon.cold, end)
    {
        daemon.forked_children.take(end);
    }
}

/// Notes why a greeting failed, unless the process ended meanwhile.
fn note_failure(daemon: &Daemon, pid: i32, error: &GreetError) {
    if !matches!(error, GreetError::HungUp) {
        daemon.refusals.note(pid, error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::connection::tests::pair;
    use crate::clients::domains::CONNECTIONS_PER_PROCESS;
    use crate::clients::domains::tests::connected;
    use crate::service::daemon::tests::daemon;
    use pagefold_os::sync::lock;

    #[test]
    fn connections_of_one_process_are_bounded() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        *lock(&daemon.live.connected) = (0..CONNECTIONS_PER_PROCESS).map(|_| connected(me)).collect();
        let (ours, theirs) = pair();
        sock::send(&theirs, b"x", &[]).unwrap();
        let (_, fds) = sock::receive(&ours, &mut [0], 0).unwrap();
        admit_agent(&daemon, ours, &Packet::new(Op::Hello), fds);
        assert_eq!(daemon.refusals.reason(me).as_deref(), Some(TOO_MANY_CONNECTIONS));
        assert!(!daemon.live.is_connected_too_often(me + 1));
        daemon.live.end();
    }

    /// A program that forks many short-lived children does not fill the list of those that cannot be managed.
    #[test]
    fn a_process_that_ends_while_it_is_greeted_is_not_listed() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let of_child = std::ffi::CString::new(format!("/proc/{}/pagemap", child.id())).unwrap();
        let ended = Fd::open(&of_child, libc::O_RDONLY, 0).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let here = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).unwrap();
        let greeted = |flags: u64, pagemap: &Fd| {
            let (ours, theirs) = pair();
            let hello = Packet { a: flags, ..Packet::new(Op::Hello) };
            sock::send(&theirs, hello.bytes(), &[pagemap.raw()]).unwrap();
            drop(theirs);
            let greeting = first_packet(&ours).unwrap();
            admit(&daemon, ours, greeting);
            daemon.refusals.reason(me)
        };
        for flags in [0, pagefold_protocol::message::HELLO_COLD] {
            // After its greeting, and before it was looked at.
            assert_eq!([&here, &ended].map(|pagemap| greeted(flags, pagemap)), [None, None]);
        }
        // A process that gives a reason is listed.
        note_failure(&daemon, me, &GreetError::ClientCannot(pagefold_os::Errno(libc::EPERM)));
        note_failure(&daemon, me, &GreetError::Protocol);
        assert_eq!(daemon.refusals.all().len(), 1, "the last reason of a process is the one that holds");
        daemon.refusals.forget(me);
        assert_eq!(daemon.refusals.reason(me), None);
    }

    #[test]
    fn a_domain_name_that_is_not_utf8_is_refused() {
        let daemon = daemon();
        for byte in [0xfe, 0xff] {
            let (ours, theirs) = pair();
            sock::send(&theirs, b"x", &[]).unwrap();
            let (_, fds) = sock::receive(&ours, &mut [0], 0).unwrap();
            let mut hello = Packet::new(Op::Hello);
            hello.text[..2].copy_from_slice(&[b'a', byte]);
            admit_agent(&daemon, ours, &hello, fds);
        }
        let reason = daemon.refusals.reason(std::process::id() as i32).unwrap();
        assert!(reason.contains("not UTF-8"), "{reason}");
        // A process that asks again and again has one entry.
        assert!(lock(&daemon.live.domains).is_empty() && daemon.refusals.all().len() == 1);
    }
}
