//! Reading: workers take units from one queue; the thread that started them
//! collects the records, reports progress, and gives up a source if its reader
//! makes no progress. Such a worker is left behind and another takes its place:
//! losing a reader is cheap, being held by a hostile process is not.

use crate::config::Config;
use crate::error::Lost;
use crate::record::{PageRecord, Printer};
use crate::shifted::Anchor;
use crate::source::{Counts, Identity, Pages, ScanPlan, Source, WorkUnit};
use pagefold_os::PAGE_SIZE;
use pagefold_os::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes that a worker reads at once.
const BUFFER: usize = 1 << 20;
/// How often progress is reported and workers are looked after.
const TICK: Duration = Duration::from_millis(100);

/// How far a scan is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read.
    pub done_bytes: u64,
    /// Bytes to read, as far as known.
    pub total_bytes: u64,
}

/// All that reading found.
pub(crate) struct Gathered {
    pub sources: Vec<Found>,
    pub lost: Vec<(Identity, Lost)>,
    /// Records of all sources, one source after the other, in the order of addresses.
    pub records: Vec<PageRecord>,
}

/// What reading found of one source.
pub(crate) struct Found {
    pub identity: Identity,
    pub counts: Counts,
    pub merged: u64,
    pub swapped: u64,
    pub pinned: u64,
    /// Where its records are.
    pub records: std::ops::Range<usize>,
    /// In the order of addresses.
    pub anchors: Vec<Anchor>,
}

struct Shared {
    sources: Vec<Job>,
    seed: u64,
    one_in: u32,
    beat: Arc<AtomicU64>,
}

struct Job {
    source: Box<dyn Source>,
    lost: AtomicBool,
    /// Units not read yet.
    open: AtomicU64,
}

#[derive(Clone, Copy)]
enum Task {
    ScanPlan { source: usize },
    Read { source: usize, index: usize, unit: WorkUnit },
}

impl Task {
    const fn source(self) -> usize {
        match self {
            Task::ScanPlan { source } | Task::Read { source, .. } => source,
        }
    }
}

enum Outcome {
    Planned(Result<ScanPlan, Lost>),
    Read { index: usize, pages: Result<Pages, Lost> },
}

/// A worker as the watchdog sees it.
struct Worker {
    id: u64,
    /// The task it is at, and a number that grows while it gets on.
    state: Arc<Mutex<Option<Task>>>,
    beat: Arc<AtomicU64>,
    seen: u64,
    since: Instant,
}

struct Message {
    worker: u64,
    source: usize,
    outcome: Outcome,
}

pub(crate) fn gather(sources: Vec<Box<dyn Source>>, config: &Config, progress: &mut dyn FnMut(Progress)) -> Gathered {
    let job = |source| Job { source, lost: AtomicBool::new(false), open: AtomicU64::new(0) };
    let shared = Arc::new(Shared {
        sources: sources.into_iter().map(job).collect(),
        seed: config.seed,
        one_in: config.one_in,
        beat: Arc::default(),
    });
    let mut collect = Collect::new(shared, config.workers.max(1));
    collect.run(config.patience, progress);
    collect.join()
}

type Queue = Arc<Mutex<VecDeque<Task>>>;

struct Collect {
    shared: Arc<Shared>,
    /// The tasks of this phase. Each phase has its own queue: a worker of the one before, on its way out, must
    /// not take a task from the next.
    queue: Queue,
    workers: Vec<Worker>,
    sender: Sender<Message>,
    receiver: Receiver<Message>,
    plans: Vec<Option<Result<ScanPlan, Lost>>>,
    pages: Vec<Vec<Option<Pages>>>,
    /// Tasks handed out and not answered.
    open: usize,
    next_worker: u64,
    worker_count: usize,
}

impl Collect {
    fn new(shared: Arc<Shared>, worker_count: usize) -> Collect {
        let (sender, receiver) = channel();
        let count = shared.sources.len();
        let plans = (0..count).map(|_| None).collect();
        let pages = (0..count).map(|_| Vec::new()).collect();
        Collect {
            shared,
            queue: Queue::default(),
            workers: Vec::new(),
            sender,
            receiver,
            plans,
            pages,
            open: 0,
            next_worker: 0,
            worker_count,
        }
    }

    /// Plans all sources, then reads them: the total is known before the long part begins.
    fn run(&mut self, patience: Duration, progress: &mut dyn FnMut(Progress)) {
        let plan_all = (0..self.shared.sources.len()).map(|source| Task::ScanPlan { source }).collect();
        self.complete(plan_all, patience, 0, progress);
        let mut total_bytes = 0u64;
        let mut tasks = VecDeque::new();
        for (source, plan) in self.plans.iter().enumerate() {
            let Some(Ok(plan)) = plan else { continue };
            total_bytes = plan.bytes.saturating_add(total_bytes);
            self.pages[source].resize_with(plan.units.len(), || None);
            self.shared.sources[source].open.store(plan.units.len() as u64, Ordering::Relaxed);
            tasks.extend(plan.units.iter().enumerate().map(|(index, &unit)| Task::Read { source, index, unit }));
        }
        self.shared.beat.store(0, Ordering::Relaxed);
        self.complete(tasks, patience, total_bytes, progress);
    }

    fn complete(
        &mut self,
        tasks: VecDeque<Task>,
        patience: Duration,
        total_bytes: u64,
        progress: &mut dyn FnMut(Progress),
    ) {
        self.open = tasks.len();
        self.queue = Arc::new(Mutex::new(tasks));
        for _ in 0..self.worker_count.min(self.open) {
            self.start_worker();
        }
        let mut ticked = Instant::now();
        while self.open > 0 {
            match self.receiver.recv_timeout(TICK) {
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.look_after_workers(patience);
                progress(Progress { done_bytes: self.shared.beat.load(Ordering::Relaxed), total_bytes });
            }
        }
        self.workers.clear();
    }

    fn start_worker(&mut self) {
        self.next_worker += 1;
        let worker = Worker {
            id: self.next_worker,
            state: Arc::default(),
            beat: Arc::default(),
            seen: 0,
            since: Instant::now(),
        };
        let (shared, queue, sender) = (self.shared.clone(), self.queue.clone(), self.sender.clone());
        let (id, state, beat) = (worker.id, worker.state.clone(), worker.beat.clone());
        std::thread::spawn(move || work(&shared, &queue, id, &state, &beat, &sender));
        self.workers.push(worker);
    }

    fn take(&mut self, message: Message) {
        if !self.workers.iter().any(|worker| worker.id == message.worker) {
            // A worker that was given up came back after all; its source is gone from the scan.
            return;
        }
        self.open -= 1;
        match message.outcome {
            Outcome::Planned(plan) => self.plans[message.source] = Some(plan),
            // A lost source has no places for its units any more.
            Outcome::Read { index, pages: Ok(pages) } => {
                if let Some(place) = self.pages[message.source].get_mut(index) {
                    *place = Some(pages);
                }
            }
            Outcome::Read { pages: Err(lost), .. } => self.lose(message.source, lost),
        }
    }

    /// Leaves `source` out; of several reasons the first counts.
    fn lose(&mut self, source: usize, lost: Lost) {
        self.shared.sources[source].lost.store(true, Ordering::Relaxed);
        self.pages[source].clear();
        if !matches!(self.plans[source], Some(Err(_))) {
            self.plans[source] = Some(Err(lost));
        }
    }

    fn look_after_workers(&mut self, patience: Duration) {
        let mut stuck = Vec::new();
        for (index, worker) in self.workers.iter_mut().enumerate() {
            let beat = worker.beat.load(Ordering::Relaxed);
            let at = *lock(&worker.state);
            if beat != worker.seen || at.is_none() {
                worker.seen = beat;
                worker.since = Instant::now();
                continue;
            }
            let Some(task) = at else { continue };
            // Planning a large process is one long call of the kernel.
            let patience = if matches!(task, Task::ScanPlan { .. }) { patience * 6 } else { patience };
            if worker.since.elapsed() > patience {
                stuck.push((index, task.source()));
            }
        }
        for (index, source) in stuck.into_iter().rev() {
            self.workers.swap_remove(index);
            self.lose(source, Lost::Stuck);
            self.open -= 1;
            self.start_worker();
        }
    }

    /// Puts the units together. Their memory is given back one by one, so that the peak is far below twice the whole.
    fn join(self) -> Gathered {
        let total = self.pages.iter().flatten().flatten().map(|pages| pages.records.len()).sum();
        let mut gathered = Gathered { sources: Vec::new(), lost: Vec::new(), records: Vec::with_capacity(total) };
        for ((job, plan), units) in self.shared.sources.iter().zip(self.plans).zip(self.pages) {
            let identity = job.source.identity();
            let plan = match plan {
                Some(Ok(plan)) => plan,
                Some(Err(lost)) => {
                    gathered.lost.push((identity, lost));
                    continue;
                }
                None => continue,
            };
            let start = gathered.records.len();
            let mut counts = Counts { left_out: plan.left_out, ..Counts::default() };
            let (mut last_page, mut anchors) = (None, Vec::new());
            for (unit, pages) in plan.units.iter().zip(units) {
                let Some(mut pages) = pages else { continue };
                let adjacent = last_page.is_some() && pages.first_page.map(|page| page.wrapping_sub(1)) == last_page;
                if let (true, true, Some(record)) = (unit.continues, adjacent, pages.records.first_mut()) {
                    record.set_follows();
                }
                last_page = pages.last_page;
                let before = gathered.records.len() - start;
                anchors.extend(pages.anchors.iter().map(|anchor| anchor.after(before)));
                gathered.records.append(&mut pages.records);
                counts.add(pages.counts);
            }
            let records = start..gathered.records.len();
            let ScanPlan { merged, swapped, pinned, .. } = plan;
            gathered.sources.push(Found { identity, counts, merged, swapped, pinned, records, anchors });
        }
        gathered
    }
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.examined += other.examined;
        self.zero += other.zero;
        self.zero_kernel_only += other.zero_kernel_only;
        self.zero_shared += other.zero_shared;
        self.zero_mapped += other.zero_mapped;
        for (reason, pages) in other.left_out {
            *self.left_out.entry(reason).or_default() += pages;
        }
    }
}

/// What a worker does until the queue is empty.
fn work(
    shared: &Shared,
    queue: &Mutex<VecDeque<Task>>,
    id: u64,
    state: &Mutex<Option<Task>>,
    beat: &Arc<AtomicU64>,
    sender: &Sender<Message>,
) {
    let mut buffer = Vec::new();
    loop {
        let task = {
            // Both locks: the watchdog must not see a task without a worker.
            let mut queue = lock(queue);
            let task = queue.pop_front();
            beat.fetch_add(1, Ordering::Relaxed);
            *lock(state) = task;
            task
        };
        let Some(task) = task else { return };
        let job = &shared.sources[task.source()];
        let outcome = match task {
            Task::ScanPlan { .. } => Outcome::Planned(job.source.plan()),
            Task::Read { index, unit, .. } => {
                buffer.resize(BUFFER, 0);
                let pages = read(shared, job, unit, beat, &mut buffer);
                if job.open.fetch_sub(1, Ordering::AcqRel) == 1 {
                    job.source.close();
                }
                Outcome::Read { index, pages }
            }
        };
        *lock(state) = None;
        if sender.send(Message { worker: id, source: task.source(), outcome }).is_err() {
            return;
        }
    }
}

fn read(shared: &Shared, job: &Job, unit: WorkUnit, beat: &Arc<AtomicU64>, buffer: &mut [u8]) -> Result<Pages, Lost> {
    if job.lost.load(Ordering::Relaxed) {
        // Whatever is answered is not looked at: the source is lost already.
        return Err(Lost::Vanished);
    }
    let printer = Printer::new(shared.seed, job.source.identity().domain, shared.one_in);
    let mut pages = Pages::new(printer, unit, beat.clone());
    job.source.read(&unit, buffer, &mut pages)?;
    pages.records.shrink_to_fit();
    pages.anchors.shrink_to_fit();
    shared.beat.fetch_add(pages.counts.examined * PAGE_SIZE as u64, Ordering::Relaxed);
    Ok(pages)
}
