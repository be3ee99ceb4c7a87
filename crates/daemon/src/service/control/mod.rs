//! The control socket: one JSON request per connection, one JSON answer.

mod ask;
mod verbs;

pub use crate::config::Backend;
pub use ask::{PATIENCE, ask, ask_within};
pub use verbs::{Answer, ColdOnStop, Request};

use crate::service::daemon::Daemon;
use pagefold_os::fd::Fd;
use pagefold_os::sock;

/// Bytes of an answer in one packet.
const PACKET_BYTES: usize = 32 << 10;

/// Answers the request that consists of `bytes`.
pub(crate) fn answer(daemon: &Daemon, socket: &Fd, bytes: &[u8]) {
    let asker = sock::peer(socket).map_or(u32::MAX, |peer| peer.uid);
    let request = serde_json::from_slice(bytes);
    let reply = match &request {
        Ok(request) => verbs::perform(daemon, request, asker),
        Err(error) => Answer::Error { message: format!("the request is no request of this version: {error}") },
    };
    let text = serde_json::to_vec(&reply).unwrap_or_default();
    let _ = text.chunks(PACKET_BYTES).try_for_each(|packet| sock::send(socket, packet, &[]).map(drop));
    // Last: the process may end as soon as the daemon stops, and the answer must be on its way by then.
    if let Ok(Request::Stop { .. }) = request {
        daemon.stop();
    }
}
