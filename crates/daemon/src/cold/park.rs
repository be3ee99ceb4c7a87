//! Parking and unparking: everything of some clients is evicted, or brought back.

use super::client::Client;
use super::evict;
use super::group::Group;
use super::selector::ClientSelector;
use super::tiers::Tiers;
use std::collections::HashSet;
use std::sync::Arc;

/// Evicts everything of these clients; returns (clients, pages), `None` if there is no such client.
pub(crate) fn park(tiers: &Tiers, selector: &ClientSelector) -> Option<(u64, u64)> {
    let clients = tiers.clients_of(selector);
    let mut pages = 0;
    for (group, client) in &clients {
        pages += evict::park::park(group, client).unwrap_or(0);
    }
    if tiers.config.park_densely {
        // After all clients: before that the processors are needed for parking.
        clients.iter().for_each(|(group, _)| group.densify());
    }
    processes(&clients).map(|count| (count, pages))
}

/// Brings everything of these clients back that their limits have room for. A client that is merged live as well leaves the
/// tier if that is all. Returns as [`park`].
pub(crate) fn unpark(tiers: &Tiers, selector: &ClientSelector) -> Option<(u64, u64)> {
    let clients = tiers.clients_of(selector);
    let pages = clients.iter().map(|(group, client)| evict::park::unpark(group, client)).sum();
    processes(&clients).map(|count| (count, pages))
}

/// How many processes these clients are; `None` if there is none. A process that left and joins again is there twice for a
/// while.
fn processes(clients: &[(Arc<Group>, Arc<Client>)]) -> Option<u64> {
    let pids: HashSet<i32> = clients.iter().map(|(_, client)| client.pid).collect();
    (!pids.is_empty()).then_some(pids.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::client;
    use crate::cold::config::Config;
    use crate::cold::tiers::tests::with_group;
    use pagefold_os::sync::lock;
    use std::sync::atomic::Ordering;

    /// It left the tier, and is a client again before its end was noticed.
    #[test]
    fn a_process_counts_once() {
        let Some((first, _memory)) = client::tests::own(0, 1) else { return };
        let Some((mut second, _memory)) = client::tests::own(0, 1) else { return };
        second.client_id = 2;
        let (_dir, cold, group) = with_group(Config::default());
        assert_eq!(park(&cold, &ClientSelector::All), None);
        lock(&group.clients).extend([first, second].map(|client| (client.client_id, Arc::new(client))));
        assert_eq!(
            (park(&cold, &ClientSelector::All), unpark(&cold, &ClientSelector::All)),
            (Some((1, 0)), Some((1, 0)))
        );
        group.remove(1);
        group.remove(2);
    }

    /// It is quicker to bring back while it is LZ4, and takes more memory.
    #[test]
    fn parked_pages_are_recompressed_right_away_unless_configured_otherwise() {
        for park_densely in [true, false] {
            let Some((client, _memory)) = client::tests::own(0, 1) else { return };
            let (_dir, cold, group) = with_group(Config { park_densely, ..Config::default() });
            lock(&group.clients).insert(1, Arc::new(client));
            assert!(park(&cold, &ClientSelector::All).is_some());
            assert_eq!(group.parked.load(Ordering::Acquire) > 0, park_densely);
            group.remove(1);
        }
    }
}
