//! Who connects: agents, which become clients, requests, and who is refused and why.

use super::listener::{Connected, Daemon};
use crate::clients::connection::Peer;
use crate::clients::domains::ring;
use crate::clients::merge_client::{GreetError, Link};
use crate::memory_limits::{self, CLIENT_BYTES};
use crate::service::control;
use crate::status::NotCovered;
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::{procfs, sock};
use pagefold_protocol::handshake::refuse_hello;
use pagefold_protocol::message::{Op, Packet};
use std::sync::Arc;

/// Most connections of one process: a new one may come before the end of the one before is seen.
const LINKS_MAX: usize = 4;
/// Processes remembered that could not be managed.
const NOT_COVERED_MAX: usize = 64;
const NO_ROOM: &str = "the daemon is near the memory limit of its control group: raise it (MemoryMax=)";
const TOO_MANY_LINKS: &str = "it is connected several times already";

impl Daemon {
    /// Finds out who connected: an agent, or somebody with a control request.
    pub(crate) fn greet(self: &Arc<Daemon>, socket: Fd) {
        let mut buffer = vec![0; 64 << 10];
        if sock::set_timeout(&socket, 5_000).is_err() {
            return;
        }
        let Ok((got, fds)) = sock::receive(&socket, &mut buffer, 0) else { return };
        let bytes = &buffer[..got];
        if bytes.first() == Some(&b'{') {
            control::answer(self, &socket, bytes);
            return;
        }
        match Packet::parse(bytes).filter(|packet| packet.op == Op::Hello as u32) {
            Some(hello) => self.add_client(socket, &hello, fds),
            None => {
                refuse_hello(&socket, pagefold_os::Errno(libc::EPROTO));
            }
        }
    }

    fn add_client(self: &Arc<Daemon>, socket: Fd, hello: &Packet, fds: sock::Fds) {
        let Ok(cred) = sock::peer(&socket) else { return };
        let text: Vec<u8> = hello.text.iter().copied().take_while(|byte| *byte != 0).collect();
        // Two names must not become one: a domain is what its clients trust.
        let Ok(name) = String::from_utf8(text) else {
            return self.note_not_covered(cred.pid, "the name of its domain is not UTF-8".into());
        };
        let name = if name.is_empty() { "default".to_owned() } else { name };
        if fds.is_cut() {
            return self.note_not_greeted(cred.pid, &GreetError::NoDescriptor);
        }
        if hello.a & pagefold_protocol::message::HELLO_COLD != 0 {
            let key = (cred.uid, name);
            return match self.cold.greet(socket, hello, fds, self.device.as_ref(), key) {
                Ok(()) => self.forget_not_covered(cred.pid),
                Err(error) => self.note_not_greeted(cred.pid, &error),
            };
        }
        if self.has_all_links(&lock(&self.connected), cred.pid) {
            return self.note_not_covered(cred.pid, TOO_MANY_LINKS.into());
        }
        if !memory_limits::own().has(CLIENT_BYTES) {
            return self.note_not_covered(cred.pid, NO_ROOM.into());
        }
        let socket = Arc::new(Peer::from(socket));
        let link = match Link::greet(socket.clone(), hello, fds, self.device.as_ref()) {
            Ok(link) => link,
            Err(error) => return self.note_not_greeted(cred.pid, &error),
        };
        let shared = link.shared();
        let key = (cred.uid, name);
        let (domain, wake) = match self.join(&key) {
            Ok(joined) => joined,
            Err(error) => {
                self.note_not_covered(cred.pid, format!("no domain for it: {error}"));
                return;
            }
        };
        let mut connected = lock(&self.connected);
        // Others of it may have come meanwhile.
        let refused = self.has_all_links(&connected, cred.pid);
        if !refused {
            let id = domain.add(Box::new(link));
            connected.push(Connected { key: key.clone(), id, shared, socket });
        }
        drop(connected);
        if let Some(group) = lock(&self.groups).get_mut(&key) {
            group.joining -= 1;
        }
        if refused {
            return self.note_not_covered(cred.pid, TOO_MANY_LINKS.into());
        }
        self.forget_not_covered(cred.pid);
        self.bells[1].ring();
        ring(&wake);
    }

    /// True if process `pid` has as many connections as it may.
    fn has_all_links(&self, connected: &[Connected], pid: i32) -> bool {
        // Those that cannot be seen from here all have the number 0.
        pid != 0 && connected.iter().filter(|client| client.shared.pid == pid).count() >= LINKS_MAX
    }

    /// Why a process was refused last.
    pub(crate) fn why_not_covered(&self, pid: i32) -> Option<String> {
        lock(&self.not_covered).iter().rev().find(|one| one.pid == pid).map(|one| one.reason.clone())
    }

    /// Notes why a greeting came to nothing, but not of a process that ended meanwhile.
    fn note_not_greeted(&self, pid: i32, error: &GreetError) {
        if !matches!(error, GreetError::HungUp) {
            self.note_not_covered(pid, error.to_string());
        }
    }

    /// What was noted of process `pid` is over: it is covered now, or there is something newer.
    fn forget_not_covered(&self, pid: i32) {
        // Those that cannot be seen from here all have the number 0.
        lock(&self.not_covered).retain(|one| one.pid != pid || pid == 0);
    }

    fn note_not_covered(&self, pid: i32, reason: String) {
        self.forget_not_covered(pid);
        let mut list = lock(&self.not_covered);
        // Who is refused asks again and again; the others stay in the list.
        list.retain(|one| one.pid != pid || one.reason != reason);
        if list.len() == NOT_COVERED_MAX {
            list.pop_front();
        }
        list.push_back(NotCovered { pid, name: procfs::name(pid).unwrap_or_default(), reason });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::domains::DOMAINS_MAX;
    use crate::service::listener::tests::{connected, daemon, pair};

    #[test]
    fn domains_and_links_of_one_process_have_an_end() {
        let daemon = daemon();
        for number in 0..DOMAINS_MAX {
            daemon.join(&(0, number.to_string())).unwrap();
        }
        assert!(daemon.join(&(0, "one more".into())).is_err());
        assert!(daemon.join(&(0, "7".into())).is_ok(), "it is there already");
        // A process that is connected as often as it may be.
        let me = std::process::id() as i32;
        *lock(&daemon.connected) = (0..LINKS_MAX).map(|_| connected(me)).collect();
        let (ours, theirs) = pair();
        sock::send(&theirs, b"x", &[]).unwrap();
        let (_, fds) = sock::receive(&ours, &mut [0], 0).unwrap();
        daemon.add_client(ours, &Packet::new(Op::Hello), fds);
        assert_eq!(daemon.why_not_covered(me).as_deref(), Some(TOO_MANY_LINKS));
        assert!(!daemon.has_all_links(&lock(&daemon.connected), me + 1));
        daemon.end();
    }

    /// A program that forks many short-lived children does not fill the list of those that cannot be managed.
    #[test]
    fn who_ends_while_it_is_greeted_is_not_named() {
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
            daemon.greet(ours);
            daemon.why_not_covered(me)
        };
        for flags in [0, pagefold_protocol::message::HELLO_COLD] {
            // After its greeting, and before it was looked at.
            assert_eq!([&here, &ended].map(|pagemap| greeted(flags, pagemap)), [None, None]);
        }
        // One that says why is.
        daemon.note_not_greeted(me, &GreetError::ClientCannot(pagefold_os::Errno(libc::EPERM)));
        daemon.note_not_greeted(me, &GreetError::Protocol);
        assert_eq!(lock(&daemon.not_covered).len(), 1, "the last reason of a process is the one that holds");
        daemon.forget_not_covered(me);
        assert_eq!(daemon.why_not_covered(me), None);
    }

    #[test]
    fn names_that_cannot_be_told_apart_are_no_domains() {
        let daemon = daemon();
        for byte in [0xfe, 0xff] {
            let (ours, theirs) = pair();
            sock::send(&theirs, b"x", &[]).unwrap();
            let (_, fds) = sock::receive(&ours, &mut [0], 0).unwrap();
            let mut hello = Packet::new(Op::Hello);
            hello.text[..2].copy_from_slice(&[b'a', byte]);
            daemon.add_client(ours, &hello, fds);
        }
        let reason = daemon.why_not_covered(std::process::id() as i32).unwrap();
        assert!(reason.contains("not UTF-8"), "{reason}");
        // Who asks again and again takes one place.
        assert!(lock(&daemon.groups).is_empty() && lock(&daemon.not_covered).len() == 1);
    }
}
