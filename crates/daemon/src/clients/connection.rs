//! Connections to clients, and closing what they sent.
//!
//! The last close(2) of a file may take as long as who made the file likes: that of a socket that lingers, or of a file of a
//! system that he serves himself. Who closes a descriptor that a client passed, or a connection on which one lies that
//! nobody took, would wait with it: no worker may, nor the monitor, for they have other clients to serve.

use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::sock;
use std::ops::Deref;
use std::thread;

/// Drops `what` where nobody waits for it.
pub(crate) fn drop_aside<T: Send + 'static>(what: T) {
    let _ = thread::Builder::new().name("closing".into()).stack_size(64 << 10).spawn(move || drop(what));
}

/// A connection to a client, which nobody waits to close.
#[derive(Debug)]
pub struct Peer(Option<Fd>);

impl From<Fd> for Peer {
    fn from(socket: Fd) -> Peer {
        Peer(Some(socket))
    }
}

impl Deref for Peer {
    type Target = Fd;

    fn deref(&self) -> &Fd {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // At once, whenever it is closed.
        self.shut();
        drop_aside(self.0.take());
    }
}

impl Peer {
    /// Ends the connection in both directions, for whoever waits at it.
    pub(crate) fn shut(&self) {
        // SAFETY: numbers only.
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

    /// A descriptor whose last close(2) takes an hour, as long as the other value lives.
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

    /// Has a client send `packet` twice with as many descriptors as go, each slow to close, and end; `served` is who has the
    /// other end, and must not wait for them.
    pub(crate) fn serves_who_sends_what_is_slow_to_close(packet: &[u8], served: impl FnOnce(Peer) + Send + 'static) {
        let (ours, theirs) = sock::pair().unwrap();
        // More than a packet may bring: what does not come is closed by the kernel, in the name of who receives.
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
    fn what_a_client_sent_is_closed_by_nobody_who_serves_others() {
        serves_who_sends_what_is_slow_to_close(b"x", |peer| {
            assert_eq!(peer.receive_plain(&mut [0; 8]), Ok(0));
        });
    }
}
