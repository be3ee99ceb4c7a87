//! Several workers, programs that act all the time, and an operator, on one domain: the books are right in the end.

use pagefold_merge::sim::{Hostile, Machine, Options, Process, Rng};
use pagefold_merge::{Config, Domain};
use pagefold_pool::Key;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PERIOD_NS: u64 = 1000;

fn stress(seed: u64, rounds: u64) -> (u64, u64) {
    let options = Options { contents: 30, interference: 20, processes_max: 8, ..Options::default() };
    let machine = Machine::new(seed, options);
    let config = Config {
        name: "threads".into(),
        period_ns: PERIOD_NS,
        pool_max_bytes: 64 << 20,
        vma_budget: 200,
        index_capacity: 64,
        heal_periods: 1,
        predict: seed.is_multiple_of(2),
        dead_slots_min: 1,
        copies: 3,
        copies_from: 4,
        idle_pages_min: 0,
        ..Config::default()
    };
    let domain = Domain::with_key(config, Key::from_seed(seed)).unwrap();
    let now_ns = AtomicU64::new(PERIOD_NS);
    let done = AtomicBool::new(false);
    let start = || {
        let process = machine.spawn();
        process.map(60);
        domain.add(Box::new(process.client()));
    };
    (0..4).for_each(|_| start());
    let mut wrong = Vec::new();
    std::thread::scope(|scope| {
        for cpu in [None, Some(0), Some(1)] {
            let (done, now_ns, domain) = (&done, &now_ns, &domain);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    if domain.step_any(now_ns.load(Ordering::Relaxed), cpu, &mut Vec::new()).is_none() {
                        now_ns.fetch_add(PERIOD_NS / 4, Ordering::Relaxed);
                        std::thread::yield_now();
                    }
                }
            });
        }
        // The programs' own threads, besides those that the machine lets act between the clients' steps.
        scope.spawn(|| {
            let mut rng = Rng::new(seed);
            while !done.load(Ordering::Relaxed) {
                let living: Vec<Process> = machine.processes().into_iter().filter(Process::is_alive).collect();
                if let Some(process) = living.get(rng.below(living.len() as u64) as usize) {
                    (0..20).for_each(|_| process.act_randomly());
                }
            }
        });
        // The operator.
        let mut rng = Rng::new(!seed);
        for _ in 0..rounds {
            for process in machine.born() {
                domain.add(Box::new(process.client()));
            }
            let clients = domain.clients();
            let Some(id) = clients.get(rng.below(clients.len() as u64) as usize).copied() else {
                start();
                continue;
            };
            match rng.below(40) {
                0..4 if clients.len() < 8 => start(),
                4 => drop(domain.remove(id)),
                5 => drop(domain.unmerge(id)),
                6 => domain.pool().close_open_segments(),
                7 if clients.len() < 8 => {
                    let process = machine.spawn();
                    process.map(30);
                    domain.add(Box::new(Hostile::new(process.client(), rng.number())));
                }
                8..16 => drop(domain.pause(id, rng.chance(200))),
                16 => drop(domain.stats()),
                // At any moment, not only when all rest.
                24 => wrong.extend(domain.audit()),
                // A step on demand, of a client that a worker may have in hand.
                17..24 => drop(domain.step(id, now_ns.load(Ordering::Relaxed))),
                _ => std::thread::sleep(std::time::Duration::from_micros(50)),
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    machine.set_quiet(true);
    machine.check();
    assert_eq!(machine.failure(), None, "seed {seed}");
    wrong.extend(domain.audit());
    assert_eq!(wrong, Vec::<String>::new(), "seed {seed}");
    let events = domain.stats().events;
    for id in domain.clients() {
        domain.remove(id);
    }
    let pool = domain.pool().stats();
    assert_eq!((pool.segments, pool.bytes, pool.pages_sharing, pool.pages_shared), (0, 0, 0, 0), "seed {seed}");
    (events.pages_merged, pool.segments_released)
}

#[test]
fn books_are_right_after_threads_did_their_worst() {
    let seeds = std::env::var("PAGEFOLD_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let (mut merged, mut released) = (0, 0);
    for seed in 0..seeds {
        let done = stress(seed, 4000);
        merged += done.0;
        released += done.1;
    }
    println!("{merged} pages merged, {released} segments released");
    assert!(merged > 1000 && released > 3);
}

/// Workers that find one content at the same time make one slot for it: a second would hold memory that no page shows.
#[test]
fn one_content_gets_one_slot_from_however_many_workers() {
    const PAGES: u64 = 3000;
    for seed in 0..8 {
        let options = Options { interference: 0, pages_max: 2 * PAGES as usize, ..Options::default() };
        let machine = Machine::new(seed, options);
        let config = Config { name: "slots".into(), period_ns: PERIOD_NS, predict: false, ..Config::default() };
        let domain = Domain::with_key(config, Key::from_seed(seed)).unwrap();
        for _ in 0..4 {
            let process = machine.spawn();
            let pages = (process.map(PAGES).start..).step_by(pagefold_os::PAGE_SIZE);
            pages.take(PAGES as usize).zip(1..).for_each(|(addr, content)| process.write(addr, content));
            domain.add(Box::new(process.client()));
        }
        let shared = || domain.pool().stats().pages_sharing;
        for period in 1..40 {
            let work = || while domain.step_any(period * PERIOD_NS, None, &mut Vec::new()).is_some() {};
            std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(work))));
        }
        assert_eq!(shared(), 4 * PAGES, "seed {seed}");
        let pool = domain.pool().stats();
        assert_eq!((pool.pages_shared, pool.slots_published), (PAGES, PAGES), "seed {seed}");
        assert_eq!(domain.audit(), Vec::<String>::new(), "seed {seed}");
        machine.check();
        assert_eq!(machine.failure(), None, "seed {seed}");
    }
}
