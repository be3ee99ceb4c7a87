//! Parking and unparking of clients, those that are merged live included.
//!
//! Merged memory stays merged: it costs nothing more. The client's other memory is lent to the cold tier for as long as the
//! client is parked: its agent becomes a client of the tier as well (see `agent::cold`), and merging leaves that memory
//! alone. Merging and the tier both watch writes by one bit per page, so they take turns.

use crate::cold::park as cold_park;
use crate::cold::selector::ClientSelector;
use crate::service::daemon::Daemon;
use pagefold_merge::domain::{ClientId, Domain};
use std::time::{Duration, Instant};

/// How long a client may take to become one of the tier.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long its agent may refuse to lend: while the client is about to leave the tier.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// Evicts everything of the selected clients, after those that are merged live have lent their memory. Returns (clients,
/// pages), `None` if there is no such client.
///
/// # Errors
/// One line about the clients that could not be parked; all others are. A client that has ended is not an error.
pub(crate) fn park(daemon: &Daemon, clients: &ClientSelector) -> Result<Option<(u64, u64)>, String> {
    let live = daemon.live.clients_where(|pid| clients.has(pid)).into_iter();
    let refused: Vec<String> = live.filter_map(|(pid, domain, id)| lend(daemon, pid, &domain, id).err()).collect();
    let parked = cold_park::park(&daemon.cold, clients);
    if refused.is_empty() { Ok(parked) } else { Err(refused.join("; ")) }
}

/// Brings everything of the selected clients back, as far as their limits have room. Memory that live merging had lent is
/// merged again once all of it is back. Returns as [`park`].
pub(crate) fn unpark(daemon: &Daemon, clients: &ClientSelector) -> Option<(u64, u64)> {
    let lent = daemon.cold.lent(clients);
    let moved = cold_park::unpark(&daemon.cold, clients);
    // A client that is still linked has no room for all of its memory, and merging would need more.
    let returned = lent.into_iter().filter(|pid| !daemon.cold.is_linked(*pid));
    for (domain, id) in returned.flat_map(|pid| daemon.live.clients_of(Some(pid))) {
        // An error means that the client has ended: nothing is left to take back.
        let _ = domain.lend_memory(id, false);
    }
    daemon.live.wake_workers();
    moved
}

/// Lends the memory of a client that is merged live to the tier, or finds that the client has ended.
pub(crate) fn lend(daemon: &Daemon, pid: i32, domain: &Domain, id: ClientId) -> Result<(), String> {
    let began = Instant::now();
    let mut is_lent = false;
    // A linked client is one of the tier alone, or is parked already.
    while !daemon.cold.is_linked(pid) {
        if !is_lent {
            let Ok(lent) = domain.lend_memory(id, true) else { return Ok(()) };
            is_lent = lent;
        } else if !daemon.live.is_connected(pid, id) {
            return Ok(());
        }
        if began.elapsed() > if is_lent { JOIN_TIMEOUT } else { REFUSAL_TIMEOUT } {
            let _ = domain.lend_memory(id, false);
            let reason = match (is_lent, daemon.refusals.reason(pid)) {
                (true, Some(reason)) => reason,
                (true, None) => "its agent does not come".into(),
                (false, _) => "its agent refuses".into(),
            };
            return Err(format!("{pid} cannot be parked: {reason}"));
        }
        std::thread::sleep(if is_lent { PAUSE } else { PAUSE * 10 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::domains::tests::connected;
    use crate::service::daemon::tests::daemon;

    /// Many programs may end while all clients are parked: a command that names none of them has not failed for that.
    #[test]
    fn a_client_that_ends_while_all_are_parked_is_not_a_failure() {
        let daemon = daemon();
        // The kernel has closed its connection, and the daemon has not noticed yet.
        daemon.live.list(connected(std::process::id() as i32));
        assert_eq!(park(&daemon, &ClientSelector::All), Ok(None));
        daemon.live.end();
    }
}
