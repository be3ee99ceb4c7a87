//! Which processes have become another program. The kernel reports it to subscribers, so that they need not look at all
//! processes (its connector of process events, see `linux/cn_proc.h`).

use crate::fd::Fd;
use crate::raw::{Errno, Result, retry};
use crate::syscall;

const NETLINK_CONNECTOR: i32 = 11;
/// The connector's group and number of process events.
const CN_IDX_PROC: u32 = 1;
/// `PROC_CN_MCAST_LISTEN`
const LISTEN: u32 = 1;
/// `PROC_EVENT_EXEC`
const EXEC: u32 = 2;

/// Room for events that were not read yet, in bytes: some thousand.
const BUFFER_LEN: i32 = 1 << 21;

/// Bytes of a netlink header, and of a connector's.
const NETLINK_LEN: usize = 16;
const CONNECTOR_LEN: usize = 20;
/// Bytes of an event before what depends on its kind: kind, processor, time.
const EVENT_LEN: usize = 16;
/// Bytes of a request: what is asked for, and the kinds of events (Linux 6.6).
const REQUEST_LEN: usize = 8;

/// A subscription to the kernel's process events.
#[derive(Debug)]
pub struct ExecEvents {
    socket: Fd,
}

impl ExecEvents {
    /// Subscribes.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_ADMIN`, `ECONNREFUSED` in a network namespace that is not the machine's first,
    /// `EPROTONOSUPPORT` if the kernel has no connector.
    pub fn open() -> Result<ExecEvents> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2) takes no pointer; the descriptor is new and has this one owner.
        let socket = unsafe {
            let fd = syscall!(libc::SYS_socket, libc::AF_NETLINK, kind, NETLINK_CONNECTOR)?;
            Fd::from_raw(fd as i32)
        };
        // SAFETY: all-zero is a valid address.
        let mut address: libc::sockaddr_nl = unsafe { core::mem::zeroed() };
        (address.nl_family, address.nl_groups) = (libc::AF_NETLINK as u16, CN_IDX_PROC);
        // SAFETY: the address outlives the call.
        unsafe {
            let len = size_of::<libc::sockaddr_nl>();
            syscall!(libc::SYS_bind, socket.raw(), core::ptr::from_ref(&address), len)
        }?;
        // Without the privilege the room stays what it is: events that do not fit are told as lost.
        // SAFETY: the value outlives the call.
        let _ = unsafe {
            let (room, len) = (core::ptr::from_ref(&BUFFER_LEN), size_of_val(&BUFFER_LEN));
            syscall!(libc::SYS_setsockopt, socket.raw(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, room, len)
        };
        let message = listen();
        // SAFETY: the message outlives the call, and goes to the kernel.
        retry(|| unsafe {
            syscall!(libc::SYS_sendto, socket.raw(), message.as_ptr(), message.len(), libc::MSG_NOSIGNAL, 0, 0)
        })?;
        Ok(ExecEvents { socket })
    }

    /// Waits until there is something to read, for a time in milliseconds at most.
    pub fn wait(&self, ms: i32) {
        let _ = crate::fd::poll(&mut [libc::pollfd { fd: self.socket.raw(), events: libc::POLLIN, revents: 0 }], ms);
    }

    /// Adds the processes that have become another program since the last call to `pids`. Returns false if events were lost
    /// meanwhile, for want of room: any process may be one.
    pub fn read(&self, pids: &mut Vec<i32>) -> bool {
        let mut buffer = [0u8; 512];
        let mut has_all = true;
        loop {
            match self.socket.read(&mut buffer) {
                Ok(0) => return has_all,
                Ok(got) => pids.extend(exec_of(&buffer[..got])),
                Err(Errno(libc::ENOBUFS)) => has_all = false,
                Err(Errno(libc::EINTR)) => {}
                Err(_) => return has_all,
            }
        }
    }
}

/// The message that asks for events.
fn listen() -> [u8; NETLINK_LEN + CONNECTOR_LEN + REQUEST_LEN] {
    let mut message = [0; NETLINK_LEN + CONNECTOR_LEN + REQUEST_LEN];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &((NETLINK_LEN + CONNECTOR_LEN + REQUEST_LEN) as u32).to_ne_bytes());
    put(4, &(libc::NLMSG_DONE as u16).to_ne_bytes());
    put(NETLINK_LEN, &CN_IDX_PROC.to_ne_bytes());
    // The number of process events within the group is 1 as well.
    put(NETLINK_LEN + 4, &1u32.to_ne_bytes());
    put(NETLINK_LEN + 16, &(REQUEST_LEN as u16).to_ne_bytes());
    put(NETLINK_LEN + CONNECTOR_LEN, &LISTEN.to_ne_bytes());
    // Forks and ends, which are far more, do not take the room.
    put(NETLINK_LEN + CONNECTOR_LEN + 4, &EXEC.to_ne_bytes());
    message
}

/// The process that the event in `message` says has become another program.
fn exec_of(message: &[u8]) -> Option<i32> {
    let word = |at: usize| Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?));
    let event = NETLINK_LEN + CONNECTOR_LEN;
    let is_exec = word(NETLINK_LEN)? == CN_IDX_PROC && word(event)? == EXEC;
    // Behind the thread's number stands that of its process.
    if is_exec { word(event + EVENT_LEN + 4).map(|pid| pid as i32) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_starts_is_told() {
        let events = match ExecEvents::open() {
            Ok(events) => events,
            Err(errno) => return std::eprintln!("SKIPPED: no process events for us: {errno}"),
        };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let mut pids = Vec::new();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !pids.contains(&pid) {
            assert!(std::time::Instant::now() < deadline, "{pids:?}");
            assert!(events.read(&mut pids), "there is room for some thousand");
            std::thread::yield_now();
        }
        assert!(!pids.contains(&(std::process::id() as i32)), "it only forked");
    }

    #[test]
    fn events_that_found_no_room_are_told_as_lost() {
        let events = match ExecEvents::open() {
            Ok(events) => events,
            Err(errno) => return std::eprintln!("SKIPPED: no process events for us: {errno}"),
        };
        let least = 1;
        // SAFETY: the value outlives the call.
        unsafe {
            let (room, len) = (core::ptr::from_ref(&least), size_of_val(&least));
            syscall!(libc::SYS_setsockopt, events.socket.raw(), libc::SOL_SOCKET, libc::SO_RCVBUF, room, len).unwrap();
        }
        // The kernel rounds the room up to a few events.
        for _ in 0..50 {
            std::process::Command::new("true").status().unwrap();
        }
        let mut pids = Vec::new();
        assert!(!events.read(&mut pids), "{pids:?}");
        assert!(pids.len() < 50, "{pids:?}");
        assert!(events.read(&mut pids), "the loss is told once");
    }

    #[test]
    fn what_is_no_event_is_ignored() {
        assert_eq!([0, 16, 36, 40, 59].map(|len| exec_of(&[1; 60][..len])), [None; 5]);
        assert_eq!(exec_of(&listen()), None);
    }
}
