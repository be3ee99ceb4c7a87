//! One seeded run: a machine, a domain, an adversarial schedule, and the oracle.

use super::{Content, Hostile, Machine, Options, Process, Rng};
use crate::{ClientId, Config, Domain};
use pagefold_pool::{Key, Room, SLOTS_PER_SEGMENT, Slot};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How a run goes.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The machine.
    pub options: Options,
    /// The domain.
    pub config: Config,
    /// Steps of the schedule.
    pub steps: u32,
    /// One client in so many lies; 0 for none.
    pub hostile_one_in: u64,
    /// Periods after the writers stopped.
    pub quiet_periods: u32,
    /// Times come in which there is no memory for the pool.
    pub starves: bool,
    /// With the quiet periods over, every page that could be merged and has a twin must be.
    pub merges_all: bool,
}

impl Plan {
    /// Draws a plan from a seed, so that many seeds cover many kinds of machines and domains.
    pub fn of_seed(seed: u64) -> Plan {
        let mut rng = Rng::new(seed ^ 0x51A4);
        let options = Options {
            contents: [3, 8, 12, 40, 400][rng.below(5) as usize],
            interference: [0, 20, 100, 300][rng.below(4) as usize],
            pages_max: [60, 200, 400][rng.below(3) as usize],
            mappings_max: [None, None, Some(30)][rng.below(3) as usize],
            processes_max: 1 + rng.below(6) as usize,
            compare: true,
            exits: rng.chance(700),
            huge: rng.chance(200),
            reuse: [0, 300, 800][(seed / 3 % 3) as usize],
            lacks: seed.is_multiple_of(4),
            inherits: [0, 700, 1000][(seed / 5 % 3) as usize],
        };
        let config = Config {
            name: "sim".into(),
            user: None,
            period_ns: 1000,
            pool_max_bytes: [1, 24 << 20, 1 << 40][rng.below(3) as usize],
            room: Room::default(),
            vma_budget: [8, 50, 16_000][rng.below(3) as usize],
            index_capacity: 64,
            heal_periods: 1 + rng.below(3) as u32,
            predict: rng.chance(700),
            dead_slots_min: if seed.is_multiple_of(2) { 1 } else { u64::from(SLOTS_PER_SEGMENT) },
            // So few that runs of equal slots are there at all.
            copies: [1, 2, 5][(seed % 3) as usize],
            copies_from: 4,
            idle_pages_min: [0, 64][(seed % 5 / 3) as usize],
        };
        let hostile_one_in = if rng.chance(300) { 3 } else { 0 };
        Plan {
            options,
            config,
            steps: 600,
            hostile_one_in,
            quiet_periods: 20,
            starves: seed % 4 == 1,
            merges_all: false,
        }
    }
}

/// What a run did; a run that did nothing proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Processes that lived.
    pub processes: u64,
    /// Pages mapped to slots.
    pub merged: u64,
    /// Merged pages that were written again.
    pub cow_breaks: u64,
    /// Broken pages made plain again.
    pub pages_restored: u64,
    /// Merged pages moved so that their segment could go.
    pub pages_compacted: u64,
    /// Comparisons that failed.
    pub refuted: u64,
    /// Segments let go.
    pub released: u64,
    /// At the end of the quiet periods: pages that could be merged and have content that stands twice or more.
    pub duplicates: u64,
    /// Of those: not merged.
    pub left: u64,
    /// Pages and runs that were reported as left alone for want of mappings.
    pub over_budget: u64,
    /// Pages that were reported as left alone for want of memory for the pool.
    pub segment_alloc_failed_pages: u64,
    /// The most mappings that a process had at the end.
    pub mappings_max: u64,
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, other: Summary) {
        self.processes += other.processes;
        self.merged += other.merged;
        self.cow_breaks += other.cow_breaks;
        self.pages_restored += other.pages_restored;
        self.pages_compacted += other.pages_compacted;
        self.refuted += other.refuted;
        self.released += other.released;
        self.duplicates += other.duplicates;
        self.left += other.left;
        self.over_budget += other.over_budget;
        self.segment_alloc_failed_pages += other.segment_alloc_failed_pages;
        self.mappings_max = self.mappings_max.max(other.mappings_max);
    }
}

/// A run that the oracle rejects.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its seed; [`run`] with it fails again.
    pub seed: u64,
    /// The step of the schedule.
    pub step: u32,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {} failed at step {}: {} (replay with PAGEFOLD_SIM_SEED={})",
            self.seed, self.step, self.what, self.seed
        )
    }
}

impl std::error::Error for Failure {}

struct Run {
    machine: Machine,
    domain: Domain,
    rng: Rng,
    plan: Plan,
    now_ns: u64,
    clients: BTreeMap<ClientId, (Process, bool)>,
    /// There is no memory for the pool now.
    starving: Arc<AtomicBool>,
    /// What earlier daemons did.
    past: Summary,
}

/// Runs `plan` with `seed`.
///
/// # Errors
/// [`Failure`] at the first page that reads wrongly, the first count that is not exact, the first segment that
/// cannot be let go at the end, the first page that is left though it could be merged.
pub fn run(seed: u64, mut plan: Plan) -> Result<Summary, Failure> {
    let fail = |step, what: String| Failure { seed, step, what };
    let starving = Arc::new(AtomicBool::new(false));
    let asked = starving.clone();
    plan.config.room = Room::new(move |_| !asked.load(Ordering::Relaxed));
    let domain =
        Domain::with_key(plan.config.clone(), Key::from_seed(seed)).map_err(|error| fail(0, error.to_string()))?;
    let machine = Machine::new(seed, plan.options.clone());
    let mut run = Run {
        machine,
        domain,
        rng: Rng::new(seed),
        plan,
        now_ns: 0,
        clients: BTreeMap::new(),
        starving,
        past: Summary::default(),
    };
    for step in 0..run.plan.steps {
        run.step();
        run.oracle(step % 16 == 0).map_err(|what| fail(step, what))?;
    }
    run.finish().map_err(|what| fail(run.plan.steps, what))
}

impl Run {
    fn add(&mut self, process: Process) {
        let liar = self.rng.below(self.plan.hostile_one_in) == 0 && self.plan.hostile_one_in > 0;
        let client = process.client();
        let id = match liar {
            true => self.domain.add(Box::new(Hostile::new(client, self.rng.number()))),
            false => self.domain.add(Box::new(client)),
        };
        self.clients.insert(id, (process, liar));
    }

    fn some_client(&mut self) -> Option<(ClientId, Process)> {
        let at = self.rng.below(self.clients.len() as u64) as usize;
        self.clients.iter().nth(at).map(|(id, (process, _))| (*id, process.clone()))
    }

    fn step_client(&mut self, id: ClientId) {
        if self.domain.step(id, self.now_ns).is_err() {
            self.clients.remove(&id);
        }
    }

    fn step(&mut self) {
        for process in self.machine.born() {
            self.add(process);
        }
        let chosen = self.rng.below(100);
        let room = self.clients.len() < self.plan.options.processes_max;
        match (chosen, self.some_client()) {
            (_, None) => {
                let process = self.machine.spawn();
                process.map(10 + self.rng.below(60));
                self.add(process);
            }
            (0..2, _) if room => {
                let process = self.machine.spawn();
                if self.plan.options.huge {
                    process.map_huge(512);
                }
                self.add(process);
            }
            (2..50, Some((_, process))) => (0..10).for_each(|_| process.act_randomly()),
            (50..75, Some((id, _))) => self.step_client(id),
            (75..85, Some(_)) => self.period(),
            (85..88, Some(_)) => self.domain.pool().close_open_segments(),
            (88..90, Some((id, _))) => {
                let paused = self.rng.chance(300);
                self.domain.pause(id, paused);
            }
            (90, Some((id, _))) => {
                if self.domain.unmerge(id).is_err() {
                    self.step_client(id);
                }
                self.domain.pause(id, false);
            }
            // The daemon forgets a client that lives on, and finds it again.
            (91, Some((id, process))) => {
                self.domain.remove(id);
                self.clients.remove(&id);
                self.add(process);
            }
            (92, Some((id, process))) if self.plan.options.exits => {
                // Killed, and the daemon knows it before the next step.
                process.exit();
                self.domain.remove(id);
                self.clients.remove(&id);
            }
            (93, Some(_)) if self.rng.chance(300) => self.replace_daemon(),
            // Parked, or back.
            (94, Some((id, _))) => {
                let lent = self.rng.chance(500);
                if self.domain.lend_memory(id, lent).is_err() {
                    self.clients.remove(&id);
                }
            }
            (95..97, _) if self.plan.starves => {
                let starving = self.rng.chance(600);
                self.starving.store(starving, Ordering::Relaxed);
            }
            _ => self.now_ns += self.rng.below(2000),
        }
    }

    /// The daemon is killed; the next one knows nothing, and finds everybody as they are.
    fn replace_daemon(&mut self) {
        self.past += self.done();
        let key = Key::from_seed(self.rng.number());
        let Ok(domain) = Domain::with_key(self.plan.config.clone(), key) else { return };
        self.domain = domain;
        for (process, _) in std::mem::take(&mut self.clients).into_values() {
            self.add(process);
        }
    }

    /// What this daemon did so far.
    fn done(&self) -> Summary {
        let events = self.domain.stats().events;
        Summary {
            merged: events.pages_merged,
            cow_breaks: events.cow_breaks,
            pages_restored: events.pages_restored,
            pages_compacted: events.pages_compacted,
            refuted: events.compare_failed,
            released: self.domain.pool().stats().segments_released,
            over_budget: events.over_vma_budget_runs,
            segment_alloc_failed_pages: events.segment_alloc_failed_pages,
            ..Summary::default()
        }
    }

    /// A period in which every client has its steps.
    fn period(&mut self) {
        self.now_ns += self.plan.config.period_ns;
        for step in 0..20 * (1 + self.clients.len() as u64) {
            let mut gone = Vec::new();
            // As workers on three processors that take turns.
            let next = self.domain.step_any(self.now_ns, Some(step % 3), &mut gone);
            gone.iter().for_each(|id| drop(self.clients.remove(id)));
            if next.is_none() {
                break;
            }
        }
    }

    fn oracle(&mut self, thorough: bool) -> Result<(), String> {
        if thorough {
            self.machine.check();
        }
        if let Some(failure) = self.machine.failure() {
            return Err(failure);
        }
        if thorough {
            let wrong = self.domain.audit();
            if !wrong.is_empty() {
                return Err(format!("the books disagree: {wrong:?}"));
            }
            for (_, addr, slot) in self.domain.ledger() {
                if self.domain.pool().segment_inode(slot.segment()).is_none() {
                    return Err(format!("the ledger has {slot:?} at {addr:#x}, whose segment was let go"));
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Summary, String> {
        // All threads stop, and whatever went unseen becomes seen: the ledgers must now tell the truth.
        self.machine.set_quiet(true);
        self.starving.store(false, Ordering::Relaxed);
        for process in self.machine.born() {
            self.add(process);
        }
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for id in ids {
            self.domain.pause(id, false);
            // Not of the others: all their memory would be looked at anew, and what was forgotten with it.
            let lent = self.clients.get(&id).is_some_and(|(process, liar)| *liar || process.lock().lent);
            if lent && self.domain.lend_memory(id, false).is_err() {
                self.clients.remove(&id);
            }
        }
        self.clients.values().for_each(|(process, _)| {
            process.touch();
            process.unpin_all();
        });
        for _ in 0..self.plan.quiet_periods.max(3) {
            self.period();
        }
        self.oracle(true)?;
        self.ledgers_are_exact()?;
        self.agents_let_go()?;
        let (duplicates, left) = self.duplicates();
        if let (Some(page), true) = (left.first(), self.plan.merges_all) {
            return Err(format!("{page}, and so are {} more", left.len() - 1));
        }
        let mappings_max = self.clients.values().map(|(process, _)| process.mappings() as u64).max().unwrap_or(0);
        let processes = self.machine.processes();
        for process in &processes {
            process.exit_if_alive();
        }
        self.period();
        // A client without memory is asked nothing, so its end is learned from its socket.
        let idle = self.domain.stats().clients;
        for (id, client) in idle {
            if client.pages > 0 {
                return Err(format!("client {id} is gone, and still there"));
            }
            self.domain.remove(id);
        }
        let stats = self.domain.stats();
        if (stats.pages_sharing, stats.pages_shared) != (0, 0) {
            return Err(format!(
                "nobody is left, and {} pages are shared {} times",
                stats.pages_shared, stats.pages_sharing
            ));
        }
        let pool = self.domain.pool().stats();
        if (pool.segments, pool.bytes) != (0, 0) {
            return Err(format!("nobody is left, and the pool has {pool:?}"));
        }
        let mut summary = Summary {
            processes: processes.len() as u64,
            duplicates,
            left: left.len() as u64,
            mappings_max,
            ..Summary::default()
        };
        summary += self.past;
        summary += self.done();
        Ok(summary)
    }

    /// No agent keeps the file of a segment that the pool has let go.
    fn agents_let_go(&mut self) -> Result<(), String> {
        loop {
            let released = self.domain.pool().stats().segments_released;
            self.period();
            // What is let go in a period is known to all clients in the next one.
            if self.domain.pool().stats().segments_released == released {
                break;
            }
        }
        match self.machine.idle_files(self.domain.pool()) {
            0 => Ok(()),
            files => Err(format!("{files} files are kept that nobody uses")),
        }
    }

    /// The pages that could be merged and have a twin: how many, and which of them are not.
    fn duplicates(&self) -> (u64, Vec<String>) {
        let mut contents: BTreeMap<Content, Vec<(ClientId, u64, bool)>> = BTreeMap::new();
        for (id, (process, _)) in self.clients.iter().filter(|(_, (_, liar))| !liar) {
            for (addr, content, merged) in process.mergeable(self.domain.pool()) {
                contents.entry(content).or_default().push((*id, addr, merged));
            }
        }
        contents.retain(|_, pages| pages.len() > 1);
        let left = contents.iter().flat_map(|(content, pages)| pages.iter().map(move |page| (content, page)));
        let left = left.filter(|(_, (.., merged))| !merged).map(|(content, (id, addr, _))| {
            let state = self.domain.page_state(*id, *addr);
            format!("client {id}: page {addr:#x} of content {content} has a twin and is {state:?}")
        });
        (contents.values().map(|pages| pages.len() as u64).sum(), left.collect())
    }

    /// Compares the ledger of each honest client with the mappings that its process really has.
    fn ledgers_are_exact(&self) -> Result<(), String> {
        let mut ledgers: BTreeMap<ClientId, BTreeSet<(u64, Slot)>> = BTreeMap::new();
        for (id, addr, slot) in self.domain.ledger() {
            ledgers.entry(id).or_default().insert((addr, slot));
        }
        for (id, (process, _)) in self.clients.iter().filter(|(_, (_, liar))| !liar) {
            let real: BTreeSet<(u64, Slot)> = process.slots_of(self.domain.pool());
            let ledger = ledgers.remove(id).unwrap_or_default();
            if let Some((addr, slot)) = ledger.symmetric_difference(&real).next() {
                let has = if real.contains(&(*addr, *slot)) { "shows" } else { "does not show" };
                return Err(format!("client {id} {has} {slot:?} at {addr:#x}, its ledger says otherwise"));
            }
        }
        Ok(())
    }
}
