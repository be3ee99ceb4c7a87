//! What the greetings of both kinds of agents have in common: how they fail, and the second packet.

use pagefold_os::fd::Fd;
use pagefold_os::sock;
use pagefold_protocol::handshake::receive;
use pagefold_protocol::message::{Op, Packet};

/// Why a greeting came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum GreetError {
    /// The kernel refused something on our side.
    #[error("{0}")]
    System(pagefold_os::Errno),
    /// The client cannot be managed; the error is its own.
    #[error("the client's kernel refused userfaultfd: {0}; see pagefold doctor")]
    ClientCannot(pagefold_os::Errno),
    /// The client said something that is no part of the protocol.
    #[error("not a greeting of this version")]
    Protocol,
    /// We have no number for what the client sent.
    #[error("the daemon has no descriptor left for it: raise its LimitNOFILE=, or ulimit -n")]
    NoDescriptor,
    /// The client has ended, or will greet again.
    #[error("it hung up")]
    HungUp,
    /// The cold tier does not take it.
    #[error("{0}")]
    Cold(String),
}

impl From<pagefold_os::Errno> for GreetError {
    fn from(errno: pagefold_os::Errno) -> GreetError {
        match errno.0 {
            libc::EPIPE | libc::ECONNRESET => GreetError::HungUp,
            _ => GreetError::System(errno),
        }
    }
}

/// What the client says to its welcome, with its descriptors.
pub(crate) fn receive_ready(socket: &Fd) -> Result<(Packet, sock::Fds), GreetError> {
    let (ready, fds) = receive(socket, Op::Ready).map_err(|errno| match errno.0 {
        libc::EPROTO => GreetError::Protocol,
        _ => errno.into(),
    })?;
    if fds.is_cut() {
        return Err(GreetError::NoDescriptor);
    }
    if ready.status != 0 {
        return Err(GreetError::ClientCannot(pagefold_os::Errno(ready.status)));
    }
    Ok((ready, fds))
}
