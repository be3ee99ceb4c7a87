//! Children that attached programs fork: their memory shows the pool, no agent is in them, and one thread answers for all of
//! them.
//!
//! The agent of the parent sends each child's userfaultfd before the child runs. The thread keeps it until the child's
//! memory is gone: it ends with the child, or when the child becomes another program.
//!
//! The thread is the keeper's, because what a child has discarded is known nowhere else: a daemon may be killed and replaced
//! while the child lives. A daemon without a keeper has such a thread of its own.

use crate::clients::connection::drop_aside;
use pagefold_os::fd::{self, Fd};
use pagefold_os::sock;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_os::wait::Bell;
use pagefold_protocol::forked_memory::ForkedMemory;
use pagefold_protocol::message::{KEEPER_SUFFIX, Op, Packet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// How often the thread looks for children that have ended.
const LOOK_MS: i32 = 1000;
/// How long the daemon may take to accept an agent's connection, in milliseconds: children wait meanwhile.
const LEAD_MS: u64 = 20;

/// The thread that answers, and what it is to take over.
#[derive(Debug)]
pub struct ForkedChildren {
    /// Where the daemon listens.
    daemon: PathBuf,
    /// Sockets of agents that are new.
    inbox: Mutex<Vec<Fd>>,
    wake: Bell,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// No further socket comes.
    is_ending: AtomicBool,
}

impl ForkedChildren {
    /// Without a thread: that begins with the first socket. Agents that ask for the daemon are led to `daemon`, its socket.
    ///
    /// # Panics
    /// There is no descriptor left.
    pub fn new(daemon: PathBuf) -> Arc<ForkedChildren> {
        Arc::new(ForkedChildren {
            daemon,
            inbox: Mutex::default(),
            wake: Bell::new().expect("the first descriptors are there"),
            thread: Mutex::default(),
            is_ending: AtomicBool::new(false),
        })
    }

    /// As [`new`](Self::new), for the keeper that listens at `keeper`.
    ///
    /// # Panics
    /// There is no descriptor left.
    pub fn of_keeper(keeper: &Path) -> Arc<ForkedChildren> {
        let bytes = keeper.as_os_str().as_bytes();
        let daemon = bytes.strip_suffix(KEEPER_SUFFIX).unwrap_or(bytes);
        ForkedChildren::new(OsStr::from_bytes(daemon).into())
    }

    /// Takes over the children that come from `socket`, an agent's.
    pub fn take(self: &Arc<ForkedChildren>, socket: Fd) {
        lock(&self.inbox).push(socket);
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let children = self.clone();
            let begun = thread::Builder::new().name("children".into()).stack_size(256 << 10);
            *thread = begun.spawn(move || children.run()).ok();
        }
        self.wake.ring();
    }

    /// Returns once no agent can send a child any more, and all that came have ended.
    pub fn wait_for_end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.wake.ring();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn run(&self) {
        // Each child has a descriptor, and so has a child of its that waits to be taken over. Beyond that agents keep
        // theirs.
        let most = pagefold_os::fd::limit().unwrap_or(1024) as usize / 2;
        let mut sockets: Vec<Fd> = Vec::new();
        let mut children: Vec<Box<ForkedMemory>> = Vec::new();
        loop {
            let mut polls = vec![libc::pollfd { fd: self.wake.fd().raw(), events: libc::POLLIN, revents: 0 }];
            let readable = |fd: i32| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let has_room = children.len() < most;
            polls.extend(sockets.iter().map(|socket| readable(if has_room { socket.raw() } else { -1 })));
            polls.extend(children.iter().map(|child| readable(child.uffd().fd().raw())));
            // Without children only a socket or the wakeup can bring anything.
            let _ = fd::poll(&mut polls, if children.is_empty() { -1 } else { LOOK_MS });
            let (of_sockets, of_children) = polls[1..].split_at(sockets.len());
            let mut born = Vec::new();
            for (child, _) in children.iter_mut().zip(of_children).filter(|(_, poll)| poll.revents != 0) {
                child.serve(|uffd| born.push(uffd));
            }
            for index in (0..sockets.len()).rev() {
                let room = most.saturating_sub(children.len() + born.len());
                if of_sockets[index].revents != 0 && !self.receive(&sockets[index], room, &mut born) {
                    drop_aside(sockets.swap_remove(index));
                }
            }
            children.retain(|child| child.uffd().is_alive());
            children.extend(born.into_iter().map(|uffd| Box::new(ForkedMemory::new(uffd))));
            if polls[0].revents != 0 {
                self.wake.hush();
            }
            let is_ending = self.is_ending.load(Ordering::Acquire);
            sockets.append(&mut lock(&self.inbox));
            if is_ending && sockets.is_empty() && children.is_empty() {
                return;
            }
        }
    }

    /// Receives what `socket` brings, `room` children at most; false if it brings nothing any more.
    ///
    /// Whatever an agent of another version says of a child, its descriptor is kept: without it the child would read old
    /// bytes.
    fn receive(&self, socket: &Fd, room: usize, born: &mut Vec<Uffd>) -> bool {
        let mut buffer = [0; size_of::<Packet>()];
        for _ in 0..room {
            let (got, carried) = match sock::receive(socket, &mut buffer, libc::MSG_DONTWAIT) {
                Ok((got, mut fds)) if got > 0 => (got, fds.take(0)),
                Err(errno) if errno.0 == libc::EAGAIN => return true,
                _ => return false,
            };
            let Some(carried) = carried.map(Uffd::from_fd) else { continue };
            if carried.is_one() {
                born.push(carried);
                continue;
            }
            if Packet::parse(&buffer[..got]).is_some_and(|packet| packet.op == Op::Connect as u32) {
                self.lead_to_daemon(carried.fd());
            }
            // The close of a file of FUSE waits for the process that serves it.
            drop_aside(carried);
            // An agent that asks all the time must not keep the others from being served.
            return true;
        }
        true
    }

    /// Passes the end of an agent's new socket on to the daemon. Where there is none the agent sees the end, and asks again.
    fn lead_to_daemon(&self, end: &Fd) {
        let daemon = sock::connect_within(self.daemon.as_os_str().as_bytes(), LEAD_MS);
        if let Some(daemon) = daemon.ok().filter(sock::is_of_own_user) {
            let _ = sock::set_timeout(&daemon, LEAD_MS);
            let _ = sock::send(&daemon, Packet::new(Op::Connect).bytes(), &[end.raw()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an agent sends is passed on as it is; what it sends beside children and this is dropped.
    #[test]
    fn an_agent_that_asks_for_the_daemon_is_led_there() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = dir.path().join("s");
        let listener = sock::listen(daemon.as_os_str().as_bytes()).unwrap();
        let children = ForkedChildren::of_keeper(&dir.path().join("s.keeper"));
        let (agent, end) = sock::pair().unwrap();
        children.take(end);
        let (ours, theirs) = sock::pair().unwrap();
        sock::send(&agent, Packet::new(Op::ForkedChild).bytes(), &[theirs.raw()]).unwrap();
        sock::send(&agent, Packet::new(Op::Connect).bytes(), &[]).unwrap();
        sock::send(&agent, Packet::new(Op::Connect).bytes(), &[theirs.raw()]).unwrap();
        drop(theirs);
        let led = sock::accept(&listener).unwrap();
        let mut buffer = [0; size_of::<Packet>()];
        let (_, mut fds) = sock::receive(&led, &mut buffer, 0).unwrap();
        assert_eq!(Packet::parse(&buffer).unwrap().op, Op::Connect as u32);
        let passed_on = fds.take(0).unwrap();
        sock::send(&ours, b"hello", &[]).unwrap();
        let (got, _) = sock::receive(&passed_on, &mut buffer, 0).unwrap();
        assert_eq!(&buffer[..got], b"hello");
        // Without a daemon the agent sees the end.
        drop((led, listener, passed_on));
        let (ours, theirs) = sock::pair().unwrap();
        sock::send(&agent, Packet::new(Op::Connect).bytes(), &[theirs.raw()]).unwrap();
        drop(theirs);
        assert_eq!(sock::receive(&ours, &mut buffer, 0).unwrap().0, 0);
        drop(agent);
        children.wait_for_end();
    }
}
