//! The first packets of a connection: what live merging and the cold tier have in common.
//!
//! The agent sends `Hello` with its pagemap; the daemon answers `Welcome` with the channel and, if it has one,
//! /dev/userfaultfd; the agent sets itself up and sends `Ready`, with its status. In the cold tier the daemon's `ColdStart`
//! follows. Either side may refuse: the daemon by the status of `Welcome`, the agent by that of `Ready`.

use crate::channel::Channel;
use crate::message::{Op, Packet};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::sock::{self, Fds};
use pagefold_os::uffd;

/// What the userfaultfd that watches for writes can do.
pub const WATCH_FEATURES: u64 = uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_MOVE;

/// What the userfaultfd of merged memory can do.
pub const HOLD_FEATURES: u64 = WATCH_FEATURES
    | uffd::FEATURE_WP_HUGETLBFS_SHMEM
    | uffd::FEATURE_EVENT_REMOVE
    | uffd::FEATURE_MISSING_SHMEM
    | uffd::FEATURE_MINOR_SHMEM;

/// Agent: sends `hello` with the agent's pagemap, and with the end of a socket by which forked children will come.
///
/// # Errors
/// As sendmsg(2).
pub fn send_hello(socket: &Fd, hello: &Packet, pagemap: &Fd, children: Option<&Fd>) -> Result<()> {
    let fds = [Some(pagemap), children].map(|fd| fd.map_or(-1, Fd::raw));
    sock::send(socket, hello.bytes(), &fds[..1 + usize::from(children.is_some())])
}

/// Daemon: answers a `Hello` with the channel and /dev/userfaultfd.
///
/// # Errors
/// As sendmsg(2).
pub fn send_welcome(socket: &Fd, channel: &Channel, device: Option<&Fd>) -> Result<()> {
    let fds = [Some(channel.fd()), device].map(|fd| fd.map_or(-1, Fd::raw));
    sock::send(socket, Packet::new(Op::Welcome).bytes(), &fds[..1 + usize::from(device.is_some())])
}

/// Daemon: refuses a `Hello`.
pub fn refuse_hello(socket: &Fd, errno: Errno) {
    let _ = sock::send(socket, Packet { status: errno.0, ..Packet::new(Op::Welcome) }.bytes(), &[]);
}

/// Agent: tells the daemon that it cannot work, and why.
///
/// # Errors
/// As sendmsg(2).
pub fn send_unable(socket: &Fd, errno: Errno) -> Result<()> {
    sock::send(socket, Packet { status: errno.0, ..Packet::new(Op::Ready) }.bytes(), &[])
}

/// Receives the packet of the kind `op` that is due, whatever its status, with its descriptors.
///
/// # Errors
/// `ECONNRESET` if the other side has closed the connection, `EPROTO` for another packet; as recvmsg(2).
pub fn receive(socket: &Fd, op: Op) -> Result<(Packet, Fds)> {
    let mut buffer = [0u8; size_of::<Packet>()];
    let (got, fds) = sock::receive(socket, &mut buffer, 0)?;
    if got == 0 {
        return Err(Errno(libc::ECONNRESET));
    }
    let packet = Packet::parse(&buffer[..got]).filter(|packet| packet.op == op as u32);
    Ok((packet.ok_or(Errno(libc::EPROTO))?, fds))
}

/// Agent: receives the answer to `Hello`.
///
/// # Errors
/// The daemon's refusal; as [`receive`].
pub fn receive_welcome(socket: &Fd) -> Result<Fds> {
    let (welcome, fds) = receive(socket, Op::Welcome)?;
    if welcome.status == 0 { Ok(fds) } else { Err(Errno(welcome.status)) }
}

/// Agent: takes the channel and the device of userfaultfds from what came with `Welcome`. Without a device from the daemon
/// it opens the device itself; `None` if it may not.
///
/// # Errors
/// `EMFILE` and the like if descriptors or memory are short: that passes, and must not count as a lack of permission, which
/// would be reported for good. `EPROTO` if there is no valid channel.
pub fn take_welcome(fds: &mut Fds) -> Result<(Channel, Option<Fd>)> {
    if fds.is_cut() {
        return Err(Errno(libc::EMFILE));
    }
    let device = match fds.take(1).map_or_else(uffd::open_device, Ok) {
        Ok(device) => Some(device),
        Err(errno @ Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => return Err(errno),
        Err(_) => None,
    };
    let channel = Channel::open(fds.take(0).ok_or(Errno(libc::EPROTO))?)?;
    Ok((channel, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_welcome_brings_the_channel_and_a_refusal_its_reason() {
        let (daemon, agent) = sock::pair().unwrap();
        let channel = Channel::create(c"channel").unwrap();
        let null = Fd::open(c"/dev/null", libc::O_RDWR, 0).unwrap();
        send_welcome(&daemon, &channel, Some(&null)).unwrap();
        let (ours, device) = take_welcome(&mut receive_welcome(&agent).unwrap()).unwrap();
        channel.put_request(0, 7u64);
        assert!(device.is_some() && ours.request::<u64>(0) == 7);
        refuse_hello(&daemon, Errno(libc::EBUSY));
        assert_eq!(receive_welcome(&agent).err(), Some(Errno(libc::EBUSY)));
        send_unable(&agent, Errno(libc::EPERM)).unwrap();
        assert_eq!(receive(&daemon, Op::Welcome).err(), Some(Errno(libc::EPROTO)), "another packet");
        drop(agent);
        assert_eq!(receive(&daemon, Op::Ready).err(), Some(Errno(libc::ECONNRESET)));
    }

    #[test]
    fn a_welcome_without_a_channel_is_an_error_of_the_protocol() {
        let (daemon, agent) = sock::pair().unwrap();
        sock::send(&daemon, Packet::new(Op::Welcome).bytes(), &[]).unwrap();
        assert_eq!(take_welcome(&mut receive_welcome(&agent).unwrap()).err(), Some(Errno(libc::EPROTO)));
    }
}
