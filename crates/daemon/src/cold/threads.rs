//! The threads of a group: one for each client, the prefetcher, the evictor, the cleaner and the parker.

use super::client::{CLUSTER_PAGES, Client};
use super::evict::{self, evictor};
use super::group::Group;
use super::groups::Groups;
use super::idle::parker::{self, Parker};
use super::idle::policy::ParkPolicy;
use super::prefetcher::Job;
use crate::domain_key::DOMAIN_IDLE;
use pagefold_os::PAGE_SIZE;
use pagefold_os::sync::lock;
use pagefold_os::wait;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Pauses of the evictor: where memory may soon be short, and the longest, after which it sees at the latest that memory got
/// short. Hints and clients that wait for memory wake it.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];
/// Stack of a thread that only loads: Zstandard's decoder lives on the heap, and the rest is small.
const LOADING_STACK_BYTES: usize = 256 << 10;
/// Stack of a thread that stores.
const STORING_STACK_BYTES: usize = 2 << 20;

/// Starts a thread without which the group still works: pages are evicted later or not at all, or one thread brings them
/// back.
fn start(name: String, stack_bytes: usize, body: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.clone()).stack_size(stack_bytes).spawn(body) {
        eprintln!("pagefold: no thread {name} for the cold tier: {error}");
    }
}

/// Serves a client's faults until it has ended.
///
/// # Errors
/// The kernel has no thread: a client with evicted pages would wait for ever.
pub(crate) fn start_client(group: &Arc<Group>, client: &Arc<Client>) -> io::Result<()> {
    let name = format!("cold-{}", client.pid);
    let (group, client) = (group.clone(), client.clone());
    thread::Builder::new().name(name).stack_size(LOADING_STACK_BYTES).spawn(move || client.run(&group)).map(drop)
}

/// Brings back, beside the client's own thread, the pages that its last wakings touched.
pub(crate) fn start_waking(group: &Arc<Group>, client: &Arc<Client>) {
    let (group, client) = (group.clone(), client.clone());
    start("cold-wake".into(), LOADING_STACK_BYTES, move || evict::park::bring_ahead(&group, &client));
}

/// Starts the prefetcher, which ends when the group is dropped.
pub(crate) fn start_prefetcher(group: &Arc<Group>, jobs: Receiver<Job>) {
    let group = Arc::downgrade(group);
    start("cold-ahead".into(), LOADING_STACK_BYTES, move || run_prefetcher(&jobs, &group));
}

/// Starts the evictor and the cleaner, and the parker if there is a policy for it.
pub(crate) fn start_evictor_and_cleaner(group: &Arc<Group>, groups: &Arc<Groups>) {
    let (evictor, cleaner, groups) = (group.clone(), group.clone(), groups.clone());
    start("cold-evict".into(), STORING_STACK_BYTES, move || run_evictor(&evictor));
    start("cold-clean".into(), STORING_STACK_BYTES, move || run_cleaner(&cleaner, &groups));
    if let Some(policy) = group.config.park {
        let group = group.clone();
        start("cold-idle".into(), STORING_STACK_BYTES, move || run_parker(&group, policy));
    }
}

/// Parks idle clients.
fn run_parker(group: &Group, policy: ParkPolicy) {
    let mut parking = Parker::new(policy);
    while !group.is_over() {
        let rung = group.bell.load(Ordering::Acquire);
        let pause = parking.turn(group, parker::monotonic());
        wait::any([(&group.bell, rung)], pause.as_millis() as u64);
    }
}

fn run_prefetcher(jobs: &Receiver<Job>, group: &Weak<Group>) {
    if let Some(group) = group.upgrade() {
        group.prefetcher.set_thread();
    }
    let mut buffer = vec![[0; PAGE_SIZE]; CLUSTER_PAGES];
    while let Ok(Job { client_id, pages }) = jobs.recv() {
        let Some(group) = group.upgrade() else { return };
        let client = lock(&group.clients).get(&client_id).cloned();
        if let Some(client) = client {
            client.bring_ahead(&group.tier, pages, &mut buffer);
        }
    }
}

fn run_evictor(group: &Group) {
    group.tier.warm_up();
    while !group.is_over() {
        let rung = group.bell.load(Ordering::Acquire);
        let clients: Vec<Arc<Client>> = lock(&group.clients).values().cloned().collect();
        let hinted: Vec<u32> =
            clients.iter().map(|client| client.table.head().hinted.load(Ordering::Acquire)).collect();
        let (mut more, mut tight) = (false, false);
        for client in &clients {
            let step = evictor::step(group, client);
            more |= step.more;
            tight |= step.tight;
        }
        if !more {
            let pause = (group.config.tick / 5).clamp(PAUSES[0], PAUSES[1]);
            let pause = if tight || clients.len() >= wait::WORDS_MAX { PAUSES[0] } else { pause };
            let heads = clients.iter().map(|client| &client.table.head().hinted).zip(hinted);
            wait::any(std::iter::once((&group.bell, rung)).chain(heads), pause.as_millis() as u64);
        }
    }
}

/// Recompresses what stays evicted, and compacts the tier, beside the evictor, which must not wait for that. Retires the
/// group in the end.
fn run_cleaner(group: &Group, groups: &Groups) {
    let mut ticked = Instant::now();
    let mut seen = 0;
    while !group.is_over() {
        let parked = group.parked.load(Ordering::Acquire);
        if parked != seen {
            seen = parked;
            group.tier.recompress_all();
        }
        if ticked.elapsed() >= group.config.tick {
            ticked = Instant::now();
            if groups.retire(group, DOMAIN_IDLE) {
                return;
            }
            if !lock(&group.clients).is_empty() {
                group.tier.tick();
            }
        }
        let rest = group.config.tick.saturating_sub(ticked.elapsed());
        wait::any([(&group.parked, parked)], rest.as_millis() as u64 + 1);
    }
}
