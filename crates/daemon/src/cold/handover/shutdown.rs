//! The orderly stop of the cold tier.

use super::keeper::lives;
use super::pending_children::PendingChildren;
use super::records::forget;
use crate::cold::park::unpark;
use crate::cold::selector::ClientSelector;
use crate::cold::tiers::Tiers;
use pagefold_os::sync::lock;
use std::sync::atomic::Ordering;

/// Stops the tier: all pages are brought back, unless a successor is about to take over. Without clients there is nothing to
/// hand over, and a keeper that stayed would start a daemon without need. Returns false if pages stay out.
pub(crate) fn stop(tiers: &Tiers) -> bool {
    // A moved page for which the tier has no room under its new name would read zeros under a successor.
    for (group, client) in tiers.clients_of(&ClientSelector::All) {
        client.moved_at_once.store(true, Ordering::Relaxed);
        client.bring_all_moved(&group.tier);
    }
    if tiers.hand_over.load(Ordering::SeqCst) && tiers.is_in_use() {
        if lock(&tiers.keeper).as_ref().is_some_and(lives) {
            return false;
        }
        eprintln!("pagefold: no keeper holds the cold memory for the next daemon: it is returned");
    }
    let out = return_all(tiers);
    let keeper = lock(&tiers.keeper);
    let waiting = tiers.pending_children.count(keeper.as_ref());
    if let Some(keeper) = keeper.as_ref() {
        if out.is_empty() {
            let names = keeper.names().unwrap_or_default();
            names.iter().filter(|name| !PendingChildren::is_name(name)).for_each(|name| forget(keeper, name));
        }
        if out.is_empty() && waiting == 0 {
            let _ = keeper.quit();
        } else {
            // Threads that wait for pages that could not come back wait for the next daemon.
            let _ = keeper.supervise(&[]);
        }
    }
    if !out.is_empty() {
        let then = match keeper.as_ref() {
            Some(_) => "a thread that touches one waits until a daemon is started",
            None => "without a keeper they are lost, and a thread that touches one gets SIGBUS",
        };
        eprintln!(
            "pagefold: {} pages of {} {} do not fit into their memory limits and stay evicted: {then}",
            out.iter().sum::<u64>(),
            out.len(),
            if out.len() == 1 { "client" } else { "clients" }
        );
    }
    if waiting > 0 {
        let then = match keeper.as_ref() {
            Some(_) => "they go on waiting, and the keeper keeps the pages for them",
            None => "without a keeper those pages read as zeros",
        };
        eprintln!("pagefold: {waiting} children of forks that their agent did not see wait for pages: {then}");
    }
    out.is_empty() && waiting == 0
}

/// Returns all pages to their clients, and evicts no page any more. Where a client's memory limits have no room, pages stay
/// out: returns how many, for each such client.
pub(crate) fn return_all(tiers: &Tiers) -> Vec<u64> {
    // Pages that come back make memory short: without this the evictor would evict them again, and lose them with the
    // daemon.
    tiers.closing.store(true, Ordering::SeqCst);
    let _ = unpark(tiers, &ClientSelector::All);
    let groups = tiers.all_groups().into_iter();
    let out = groups.flat_map(|group| {
        let clients = lock(&group.clients);
        // A client that ended meanwhile needs no page, and its thread may not have noticed the end yet.
        let living = clients.values().filter(|client| client.uffd.is_alive());
        living.map(|client| client.pages_out(&group.tier)).collect::<Vec<_>>()
    });
    out.filter(|pages| *pages > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::client;
    use crate::cold::config::Config;
    use crate::cold::handover::keeper::tests::with_keeper;
    use crate::cold::tiers::tests::with_group;
    use crate::memory_limits::tests::limited;
    use pagefold_tier::keeper::Keeper;
    use std::sync::Arc;

    /// Stops the tiers beside a keeper. Returns whether no page stays out, and whether the keeper was told to quit.
    fn stop_with_keeper(cold: &Tiers) -> (bool, bool) {
        let act = || {
            *lock(&cold.keeper) = Some(Keeper::connect(&cold.keeper_path).unwrap());
            stop(cold)
        };
        let (nothing_out, asked) = with_keeper(&cold.keeper_path, |_, _| vec![0], act);
        std::fs::remove_file(&cold.keeper_path).unwrap();
        (nothing_out, asked.contains(&b"Q".to_vec()))
    }

    /// A keeper that stays starts the next daemon: it must stay only if there is a client to hand over.
    #[test]
    fn a_daemon_without_clients_hands_nothing_over() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, group) = with_group(Config { hand_over: true, ..Config::default() });
        lock(&group.clients).insert(client.client_id, Arc::new(client));
        assert!(!stop_with_keeper(&cold).1);
        group.remove(1);
        assert!(stop_with_keeper(&cold).1);
    }

    /// Near a memory limit, where a moved page waits for memory as long as the daemon runs.
    #[test]
    fn moved_pages_are_brought_in_before_a_daemon_stops() {
        for hand_over in [false, true] {
            let Some((mut client, memory)) = client::tests::own(0, 2) else { return };
            let (dir, cold, group) = with_group(Config { hand_over, ..Config::default() });
            client.limits = limited(dir.path(), 999, 1000);
            let [to, from] = [memory.addr() + 4096, 1 << 30];
            group.tier.store(client.client_id, from / 4096, &[7; 4096], pagefold_tier::Effort::Fast).unwrap();
            client::tests::await_moved(&client, from, to);
            let client = Arc::new(client);
            lock(&group.clients).insert(client.client_id, client.clone());
            assert_eq!(stop_with_keeper(&cold).0, !hand_over);
            let there = client.uffd.zero(pagefold_os::Range::pages_from(to, 1), 0).1;
            assert_eq!(there, Some(pagefold_os::Errno(libc::EEXIST)), "it reads zeros");
            // SAFETY: there, mapped and ours.
            assert_eq!(unsafe { (to as *const u8).read_volatile() }, 7);
            group.remove(client.client_id);
        }
    }

    /// As when the service manager ends a daemon together with its clients: no process asks for those pages any more.
    #[test]
    fn pages_of_an_ended_process_do_not_keep_the_keeper() {
        let Some((mut client, memory)) = client::tests::own(0, 1) else { return };
        client.uffd = client::tests::of_an_ended_process();
        let (_dir, cold, group) = with_group(Config::default());
        let page = memory.addr() / 4096;
        group.tier.store(client.client_id, page, &[7; 4096], pagefold_tier::Effort::Fast).unwrap();
        client.table.find_or_add(memory.addr()).unwrap();
        client.table.set_state(memory.addr(), pagefold_protocol::residency_map::EVICTED);
        assert_eq!(client.pages_out(&group.tier), 1);
        lock(&group.clients).insert(client.client_id, Arc::new(client));
        assert_eq!(stop_with_keeper(&cold), (true, true));
        group.remove(1);
    }

    /// Else they would read zeros.
    #[test]
    fn children_that_wait_keep_the_keeper() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, _group) = with_group(Config::default());
        let child = pagefold_os::uffd::Uffd::from_fd(client.uffd.fd().duplicate().unwrap());
        cold.pending_children.hold(std::iter::once(child));
        assert_eq!(stop_with_keeper(&cold), (false, false));
    }

    /// Pages that no keeper holds are lost with the daemon.
    #[test]
    fn without_a_keeper_nothing_is_handed_over() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, group) = with_group(Config { hand_over: true, ..Config::default() });
        lock(&group.clients).insert(client.client_id, Arc::new(client));
        assert!(stop(&cold) && cold.closing.load(Ordering::SeqCst), "pages were not returned");
        group.remove(1);
    }

    /// A client's own table must not keep the keeper, and all that it holds, beyond an orderly stop.
    #[test]
    fn a_false_claim_of_evicted_pages_does_not_keep_the_keeper() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, group) = with_group(Config::default());
        client.table.head().evicted.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(client.pages_out(&group.tier), 0);
        lock(&group.clients).insert(client.client_id, Arc::new(client));
        assert_eq!(stop_with_keeper(&cold), (true, true));
        group.remove(1);
    }
}
