//! Connections to clients, and closing what they sent.
//!
//! The maker of a file decides how long its last close(2) takes: the file may be a socket that lingers, or lie in a file
//! system that the client itself serves. Closing a descriptor that a client passed would wait for that, and so would closing
//! a connection on which such a descriptor was not yet received. Workers and the monitor have other clients to serve and
//! must not wait, so a thread of its own closes.

use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::sock;
use std::ops::Deref;
use std::thread;

/// Drops `what` on a thread of its own.
pub(crate) fn drop_aside<T: Send + 'static>(what: T) {
    let _ = thread::Builder::new().name("closing".into()).stack_size(64 << 10).spawn(move || drop(what));
}

/// A connection to a client. Dropping it does not wait for its close(2).
#[derive(Debug)]
pub struct Connection(Option<Fd>);

impl From<Fd> for Connection {
    fn from(socket: Fd) -> Connection {
        Connection(Some(socket))
    }
}

impl Deref for Connection {
    type Target = Fd;

    fn deref(&self) -> &Fd {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The other end sees the end now, however long the close takes.
        self.shut();
        drop_aside(self.0.take());
    }
}

impl Connection {
    /// Ends the connection in both directions, and wakes all threads that wait at it.
    pub(crate) fn shut(&self) {
        // SAFETY: shutdown(2) reads and writes no memory of this process.
        let _ = unsafe { pagefold_os::syscall!(libc::SYS_shutdown, self.raw(), libc::SHUT_RDWR) };
    }

    /// Receives a packet that brings no descriptors: one that does has length 0, as the end has.
    ///
    /// # Errors
    /// As [`sock::receive`].
    pub(crate) fn receive_plain(&self, buffer: &mut [u8]) -> Result<usize> {
        let (got, fds) = sock::receive(self, buffer, 0)?;
        if fds.is_empty() && !fds.is_cut() {
            return Ok(got);
        }
        drop_aside(fds);
        Ok(0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::sync::mpsc;
    use std::time::Duration;

    pub(crate) fn pair() -> (Fd, Fd) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        (OwnedFd::from(ours).into(), OwnedFd::from(theirs).into())
    }

    /// A descriptor with a last close(2) that takes an hour while the other value lives.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        ours.set_nonblocking(false).unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 3600 };
        // SAFETY: the structure outlives the call.
        let set = unsafe {
            let (linger, len) = (&raw const linger, size_of::<libc::linger>() as u32);
            libc::setsockopt(ours.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, linger.cast(), len)
        };
        assert_eq!(set, 0);
        (ours.into(), theirs)
    }

    /// Has a client send `packet` twice, with as many descriptors as a packet takes, each slow to close, and end. `served`
    /// gets the other end, and must not wait for them.
    pub(crate) fn does_not_wait_for_files_that_are_slow_to_close(
        packet: &[u8],
        served: impl FnOnce(Connection) + Send + 'static,
    ) {
        let (ours, theirs) = sock::pair().unwrap();
        // More than a packet may bring: the kernel closes the rest, in the receiving thread.
        let slow: Vec<_> = (0..2).map(|_| lingering()).collect();
        for (slow, _) in &slow {
            sock::send(&theirs, packet, &[slow.as_raw_fd(); sock::FDS_MAX]).unwrap();
        }
        let held: Vec<TcpStream> = slow.into_iter().map(|(_, held)| held).collect();
        drop(theirs);
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            served(ours.into());
            let _ = tell.send(());
        });
        let done = told.recv_timeout(Duration::from_secs(30));
        drop(held);
        done.expect("it waits for what a client sent");
    }

    #[test]
    fn received_descriptors_are_closed_by_a_thread_of_their_own() {
        does_not_wait_for_files_that_are_slow_to_close(b"x", |peer| {
            assert_eq!(peer.receive_plain(&mut [0; 8]), Ok(0));
        });
    }
}
