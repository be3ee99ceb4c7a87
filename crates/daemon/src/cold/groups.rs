//! The groups of all domains.

use super::group::Group;
use super::handover::records::forget;
use crate::domain_key::DomainKey;
use pagefold_os::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The groups of all domains.
#[derive(Default)]
pub(crate) struct Groups {
    pub(crate) all: Mutex<BTreeMap<DomainKey, Arc<Group>>>,
    /// Processor time of the agents of retired groups; changes while `all` is held.
    pub(crate) past_cpu_ns: AtomicU64,
}

impl Groups {
    /// Retires a group that has had no client for `rest`: its name may never come again. True if it is retired.
    pub(crate) fn retire(&self, group: &Group, rest: Duration) -> bool {
        let mut all = lock(&self.all);
        let clients = lock(&group.clients);
        let mut last_busy = lock(&group.last_busy);
        if !clients.is_empty() {
            *last_busy = Instant::now();
        }
        if !clients.is_empty() || last_busy.elapsed() < rest {
            return false;
        }
        group.over.store(true, Ordering::Release);
        all.remove(&group.key);
        self.past_cpu_ns.fetch_add(group.past_cpu_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        drop((all, clients, last_busy));
        if let Some(keeper) = lock(&group.keeper).as_ref() {
            forget(keeper, &group.arena_name());
        }
        group.ring();
        group.densify();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::client;
    use crate::cold::config::Config;
    use crate::cold::handover::deposit::deposit_arena;
    use crate::cold::handover::keeper::tests::with_keeper;
    use crate::cold::status::agents_cpu_ns;
    use crate::cold::tiers::Tiers;
    use pagefold_tier::keeper::Keeper;

    #[test]
    fn a_tier_without_clients_is_dropped_after_a_while() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        client.counters.agent_cpu_ns.store(5, Ordering::Relaxed);
        let act = || {
            *lock(&cold.keeper) = Some(Keeper::connect(&cold.keeper_path).unwrap());
            let group = cold.group(&(0, "sandbox".into()), 4 << 20).unwrap();
            lock(&group.clients).insert(1, Arc::new(client));
            assert!(!cold.groups.retire(&group, Duration::ZERO), "it has a client");
            group.remove(1);
            assert!(!cold.groups.retire(&group, Duration::from_secs(3600)), "it is kept for a while");
            assert!(cold.groups.retire(&group, Duration::ZERO) && cold.all_groups().is_empty());
            // Known to the end of the closure, as to a thread that is greeting a client of it.
            deposit_arena(&group, lock(&cold.keeper).as_ref().unwrap());
            *lock(&cold.keeper) = None;
            Arc::downgrade(&group)
        };
        let (group, asked) = with_keeper(&cold.keeper_path, |_, _| vec![0], act);
        let of_arena = |question: &&Vec<u8>| question[1..].starts_with(b"arena:");
        assert_eq!(asked.iter().filter(of_arena).map(|question| question[0]).collect::<Vec<_>>(), b"PD");
        assert_eq!(agents_cpu_ns(&cold), 5);
        // Its threads end, and all that it held is freed.
        let is_gone = (0..6000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            group.upgrade().is_none()
        });
        assert!(is_gone, "its threads go on");
    }
}
