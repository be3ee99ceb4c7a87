//! The threads of a group: one per client, a second hand, the pump and the cleaner.

use crate::clients::domains::DOMAIN_REST;
use crate::cold::client::Client;
use crate::cold::evict::evictor;
use crate::cold::prefetcher::{Hand, Job};
use crate::cold::{Group, Groups};
use pagefold_os::sync::lock;
use pagefold_os::wait;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Pause of the pump where memory may soon be short, and the longest: how late it sees that memory got short. Hints and
/// starving clients ring.
const TURNS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];
/// Stack of who only loads: Zstandard's decoder lives on the heap; what is on the stack is small.
const SMALL_BYTES: usize = 256 << 10;
/// Stack of who stores.
const LARGE_BYTES: usize = 2 << 20;

/// Without such a thread pages go out later or not at all, or come back by one hand.
fn start(name: String, stack_bytes: usize, body: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.clone()).stack_size(stack_bytes).spawn(body) {
        eprintln!("pagefold: no thread {name} for the cold tier: {error}");
    }
}

/// Serves a client's faults until it has ended.
///
/// # Errors
/// No thread is to be had: a client that has pages out, or gets them out, would wait for ever.
pub(crate) fn start_client(group: &Arc<Group>, client: &Arc<Client>) -> io::Result<()> {
    let name = format!("cold-{}", client.pid);
    let (group, client) = (group.clone(), client.clone());
    thread::Builder::new().name(name).stack_size(SMALL_BYTES).spawn(move || client.run(&group)).map(drop)
}

/// The second hand, until the group is gone.
pub(crate) fn start_hand(group: &Arc<Group>, jobs: mpsc::Receiver<Job>) {
    let group = Arc::downgrade(group);
    start("cold-ahead".into(), SMALL_BYTES, move || Hand::run(&jobs, &group));
}

/// Those who move pages out, and make them dense.
pub(crate) fn start_movers(group: &Arc<Group>, groups: &Arc<Groups>) {
    let (pump, cleaner, groups) = (group.clone(), group.clone(), groups.clone());
    start("cold-pump".into(), LARGE_BYTES, move || run_pump(&pump));
    start("cold-clean".into(), LARGE_BYTES, move || run_cleaner(&cleaner, &groups));
}

fn run_pump(group: &Group) {
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
            let turn = (group.config.tick / 5).clamp(TURNS[0], TURNS[1]);
            let turn = if tight || clients.len() >= wait::WORDS_MAX { TURNS[0] } else { turn };
            let heads = clients.iter().map(|client| &client.table.head().hinted).zip(hinted);
            wait::any(std::iter::once((&group.bell, rung)).chain(heads), turn.as_millis() as u64);
        }
    }
}

/// Makes dense what stays out, and compacts: beside the pump, which must not wait for it. Lets go of the group in the end.
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
            if groups.let_go(group, DOMAIN_REST) {
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
