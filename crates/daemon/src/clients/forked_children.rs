//! Children that attached programs fork: their memory shows the pool, no agent is in them, and one thread answers for all of them.
//!
//! The agent of the parent sends each child's userfaultfd before the child runs. The thread keeps it until the child's memory is
//! gone: it ends with the child, or when the child becomes another program.

use crate::clients::connection::drop_aside;
use pagefold_os::fd::{self, Fd};
use pagefold_os::sock;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_os::wait::Bell;
use pagefold_protocol::forked_memory::ForkedMemory;
use pagefold_protocol::message::{Op, Packet};
use std::sync::{Arc, Mutex, Once};
use std::thread;

/// How often the thread looks for children that have ended.
const LOOK_MS: i32 = 1000;
/// Most children at a time: each has a descriptor here.
const CHILDREN_MAX: usize = 4096;

/// The thread that answers, and what it is to take over.
pub(crate) struct ForkedChildren {
    /// Sockets of agents that are new.
    inbox: Mutex<Vec<Fd>>,
    wake: Bell,
    begun: Once,
}

impl ForkedChildren {
    pub(crate) fn new() -> Arc<ForkedChildren> {
        Arc::new(ForkedChildren {
            inbox: Mutex::default(),
            wake: Bell::new().expect("the first descriptors are there"),
            begun: Once::new(),
        })
    }

    /// Takes over the children that come from `socket`, an agent's.
    pub(crate) fn take(self: &Arc<ForkedChildren>, socket: Fd) {
        lock(&self.inbox).push(socket);
        self.begun.call_once(|| {
            let children = self.clone();
            let _ = thread::Builder::new().name("children".into()).stack_size(256 << 10).spawn(move || children.run());
        });
        self.wake.ring();
    }

    fn run(&self) {
        let mut sockets: Vec<Fd> = Vec::new();
        let mut children: Vec<Box<ForkedMemory>> = Vec::new();
        loop {
            let mut polls = vec![libc::pollfd { fd: self.wake.fd().raw(), events: libc::POLLIN, revents: 0 }];
            let readable = |fd: &Fd| libc::pollfd { fd: fd.raw(), events: libc::POLLIN, revents: 0 };
            polls.extend(sockets.iter().map(readable));
            polls.extend(children.iter().map(|child| readable(child.uffd().fd())));
            // Without children only a socket or the wakeup can bring anything.
            let _ = fd::poll(&mut polls, if children.is_empty() { -1 } else { LOOK_MS });
            let (of_sockets, of_children) = polls[1..].split_at(sockets.len());
            let mut born = Vec::new();
            for (child, _) in children.iter_mut().zip(of_children).filter(|(_, poll)| poll.revents != 0) {
                child.serve(|uffd| born.push(uffd));
            }
            for index in (0..sockets.len()).rev() {
                if of_sockets[index].revents != 0 && !receive(&sockets[index], &mut born) {
                    drop_aside(sockets.swap_remove(index));
                }
            }
            children.retain(|child| child.uffd().is_alive());
            let room = CHILDREN_MAX.saturating_sub(children.len());
            children.extend(born.into_iter().take(room).map(|uffd| Box::new(ForkedMemory::new(uffd))));
            if polls[0].revents != 0 {
                self.wake.hush();
            }
            sockets.append(&mut lock(&self.inbox));
        }
    }
}

/// Receives what `socket` brings; false if it brings nothing any more.
fn receive(socket: &Fd, born: &mut Vec<Uffd>) -> bool {
    let mut buffer = [0; size_of::<Packet>()];
    loop {
        match sock::receive(socket, &mut buffer, libc::MSG_DONTWAIT) {
            Ok((got, mut fds)) if got > 0 => {
                let is_child = Packet::parse(&buffer[..got]).is_some_and(|packet| packet.op == Op::ForkedChild as u32);
                let uffd = fds.take(0).map(Uffd::from_fd).filter(Uffd::is_one);
                match uffd.filter(|_| is_child) {
                    Some(uffd) => born.push(uffd),
                    None => return false,
                }
            }
            Err(errno) if errno.0 == libc::EAGAIN => return true,
            _ => return false,
        }
    }
}
