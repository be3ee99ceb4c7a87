//! Parking clients that are merged live.
//!
//! Merged memory stays merged: it costs nothing more. The plain memory is left to the cold tier for as long as the client
//! is parked; its agent becomes a client of the tier beside (see `agent::cold`), and merging leaves it alone. Both watch
//! writes through one bit per page, so they take turns.

use crate::cold::Whom;
use crate::service::listener::Daemon;
use pagefold_merge::domain::{ClientId, Domain};
use std::time::{Duration, Instant};

/// How long a client may take to become one of the tier.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may refuse: while it is about to come back.
const REFUSAL: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

impl Daemon {
    /// Puts everything of these clients out, after those that are merged live have parted; returns (clients, pages), `None`
    /// if there is no such client.
    ///
    /// # Errors
    /// One line, on who could not be parked; all others are. Who has ended is nobody's concern.
    pub(crate) fn park(&self, whom: &Whom) -> Result<Option<(u64, u64)>, String> {
        let live = self.clients_where(|pid| whom.has(pid)).into_iter();
        let refused: Vec<String> = live.filter_map(|(pid, domain, id)| self.lease(pid, &domain, id).err()).collect();
        let parked = self.cold.park(whom);
        if refused.is_empty() { Ok(parked) } else { Err(refused.join("; ")) }
    }

    /// Brings everything of these clients back that there is room for; what parted from live merging is merged again if
    /// that is all. As [`park`](Self::park).
    pub(crate) fn unpark(&self, whom: &Whom) -> Option<(u64, u64)> {
        let leased = self.cold.leased(whom);
        let moved = self.cold.unpark(whom);
        // Who is still linked has no room for all of it, and would have to find some if it were merged again.
        let let_go = leased.into_iter().filter(|pid| !self.cold.is_linked(*pid));
        for (domain, id) in let_go.flat_map(|pid| self.clients_of(Some(pid))) {
            // Gone: then there is nothing to take back.
            let _ = domain.part(id, false);
        }
        self.ring_workers();
        moved
    }

    /// Leaves what a client that is merged live has to the tier, or finds that it has ended.
    fn lease(&self, pid: i32, domain: &Domain, id: ClientId) -> Result<(), String> {
        let began = Instant::now();
        let mut parted = false;
        // A client of the tier alone, or parked already.
        while !self.cold.is_linked(pid) {
            if !parted {
                let Ok(left) = domain.part(id, true) else { return Ok(()) };
                parted = left;
            } else if !self.is_connected(pid, id) {
                return Ok(());
            }
            if began.elapsed() > if parted { PATIENCE } else { REFUSAL } {
                let _ = domain.part(id, false);
                let why = match (parted, self.why_not_covered(pid)) {
                    (true, Some(reason)) => reason,
                    (true, None) => "its agent does not come".into(),
                    (false, _) => "its agent refuses".into(),
                };
                return Err(format!("{pid} cannot be parked: {why}"));
            }
            std::thread::sleep(if parted { PAUSE } else { PAUSE * 10 });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::cold::Whom;
    use crate::service::listener::tests::{connected, daemon};

    /// Many programs end while all are parked: a command that names none of them has not failed for that.
    #[test]
    fn who_ends_while_all_are_parked_is_no_failure() {
        let daemon = daemon();
        // The kernel has closed its connection, and the daemon has not looked yet.
        daemon.list(connected(std::process::id() as i32));
        assert_eq!(daemon.park(&Whom::All), Ok(None));
        daemon.end();
    }
}
