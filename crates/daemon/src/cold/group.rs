//! A domain's tier and its clients.

use super::client::Client;
use super::config::Config;
use super::handover::pending_children::PendingChildren;
use super::handover::records;
use super::prefetcher::Prefetcher;
use crate::domain_key::DomainKey;
use pagefold_os::cpu_latency::Awake;
use pagefold_os::sync::lock;
use pagefold_os::wait;
use pagefold_tier::Tier;
use pagefold_tier::keeper::Keeper;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A domain's tier and its clients.
pub(crate) struct Group {
    pub(crate) key: DomainKey,
    pub(crate) tier: Tier,
    /// Tells arenas apart.
    pub(crate) id: u64,
    pub(crate) clients: Mutex<BTreeMap<u32, Arc<Client>>>,
    /// Processor time of the agents of clients that have ended; changes while `clients` is held.
    pub(crate) past_cpu_ns: AtomicU64,
    pub(crate) next_client_id: AtomicU32,
    pub(crate) config: Config,
    pub(crate) keeper: Arc<Mutex<Option<Keeper>>>,
    pub(crate) awake: Arc<Awake>,
    pub(crate) closing: Arc<AtomicBool>,
    pub(crate) pending_children: Arc<PendingChildren>,
    pub(crate) prefetcher: Arc<Prefetcher>,
    /// Changes when the evictor has something to do that no hint tells it.
    pub(crate) bell: AtomicU32,
    /// Changes when the cleaner has something to recompress: a client was parked.
    pub(crate) parked: AtomicU32,
    /// When its last client was seen, or a process was about to become one.
    pub(crate) last_busy: Mutex<Instant>,
    /// It was retired: its threads end, and it gets no new client. Changes while `clients` is held.
    pub(crate) over: AtomicBool,
}

impl Group {
    /// Has the cleaner recompress evicted pages now.
    pub(crate) fn densify(&self) {
        self.parked.fetch_add(1, Ordering::Release);
        wait::wake(&self.parked);
    }

    /// Has the evictor look now.
    pub(crate) fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release);
        wait::wake(&self.bell);
    }

    /// True once its threads must end.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// True when nothing may be evicted any more. To a thread that holds a client's link this means that the last `unpark`
    /// of that client is still to come, or done.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Removes a client, which has ended.
    pub(crate) fn remove(&self, client_id: u32) {
        let mut clients = lock(&self.clients);
        let Some(client) = clients.remove(&client_id) else { return };
        self.past_cpu_ns.fetch_add(client.counters.agent_cpu_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        drop(clients);
        client.gone.store(true, Ordering::Release);
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            records::forget(keeper, &self.name_of(&client));
        }
        // A thread that talks to its agent finds the connection ended; after that nothing is stored for it any more.
        let _held = lock(&client.link);
        self.tier.remove_client(client_id);
    }

    /// The name under which the keeper holds the tier.
    pub(crate) fn arena_name(&self) -> String {
        records::arena_name(self.id, &self.key)
    }

    /// The name under which the keeper holds a client.
    pub(crate) fn name_of(&self, client: &Client) -> String {
        records::client_name(self.id, client.client_id, client.token, client.pid, client.uid)
    }

    /// Processor time of the agents of all clients that there are and were.
    pub(crate) fn agents_cpu_ns(&self) -> u64 {
        let clients = lock(&self.clients);
        let of_clients: u64 = clients.values().map(|client| client.counters.agent_cpu_ns.load(Ordering::Relaxed)).sum();
        of_clients + self.past_cpu_ns.load(Ordering::Relaxed)
    }
}
