//! One structure measured in this process.

use super::registry;
use crate::options::Clock;
use bench_peers::Map;
use clap::ValueEnum;
use pagefold_os::procfs;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Which operations to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mix {
    /// Everything below.
    All,
    /// Lookups: hits one at a time and in batches, misses, scans.
    Read,
    /// 95 % lookups, 5 % inserts and removals.
    #[value(name = "95")]
    Mostly,
    /// Half lookups, half inserts and removals.
    #[value(name = "50")]
    Half,
    /// Inserts alone.
    Insert,
    /// Each key removed, a new one inserted, at constant size; then all deleted.
    Churn,
}

/// How keys are chosen for lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dist {
    /// Each as often as any other.
    Uniform,
    /// By Zipf's law with exponent 0.99.
    Zipf,
}

/// What to measure.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Plan {
    pub structure: String,
    pub keys: usize,
    pub threads: usize,
    pub mix: Mix,
    pub dist: Dist,
    pub clock: Clock,
    pub huge: bool,
    /// Operations per phase, over all threads.
    pub operations: usize,
    pub seed: u64,
}

/// Figures by name: million operations per second, or bytes per key.
pub type Figures = BTreeMap<String, f64>;

/// The columns of the table, in order.
pub const COLUMNS: &[&str] = &[
    "insert",
    "insert-batch",
    "get",
    "get-batch",
    "get-miss",
    "scan",
    "95/5",
    "50/50",
    "churn",
    "delete",
    "bytes/key",
    "bytes-after",
];

/// Entries per scan.
const SCAN_ENTRIES: usize = 100;
/// Keys per call of a batched lookup.
const BATCH: usize = 256;

/// The key of an index: a bijection (splitmix64's finish), so keys are distinct and evenly spread.
pub fn key(index: u64) -> u64 {
    let mut z = index.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Random numbers by a counter through the same function.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(key(seed ^ 0x5eed))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        key(self.0)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

/// The indexes a thread will look up, made before the clock starts.
fn samples(plan: &Plan, thread: usize, count: usize) -> Vec<u32> {
    let mut random = Random::new(plan.seed << 8 | thread as u64);
    let keys = plan.keys as u64;
    match plan.dist {
        Dist::Uniform => (0..count).map(|_| random.below(keys) as u32).collect(),
        Dist::Zipf => {
            // The generator of Gray et al. (SIGMOD 1994); ranks are scattered over the keys.
            let theta = 0.99f64;
            let zeta = |n: u64| (1..=n).map(|i| (i as f64).powf(-theta)).sum::<f64>();
            let (zeta_n, zeta_2) = (zeta(keys), zeta(2));
            let alpha = 1.0 / (1.0 - theta);
            let eta = (1.0 - (2.0 / keys as f64).powf(1.0 - theta)) / (1.0 - zeta_2 / zeta_n);
            (0..count)
                .map(|_| {
                    let u = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
                    let uz = u * zeta_n;
                    let rank = if uz < 1.0 {
                        0
                    } else if uz < 1.0 + 0.5f64.powf(theta) {
                        1
                    } else {
                        ((keys as f64) * (eta * u - eta + 1.0).powf(alpha)) as u64
                    };
                    (key(rank) % keys) as u32
                })
                .collect()
        }
    }
}

/// Counted page by page: the number in `statm` may be off by some dozen pages for each processor.
pub fn resident_bytes() -> f64 {
    procfs::memory(std::process::id() as i32).expect("Linux").rss as f64
}

/// Runs `work(thread)` in all threads at the same time and returns million operations per second: by the wall from
/// the first thread's start to the last one's end; or, on a busy machine, by the time the
/// threads had a processor (which leaves out the time that locking peers sleep).
pub fn timed(threads: usize, operations: usize, clock: Clock, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let times: Vec<(Instant, Instant, f64)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    barrier.wait();
                    let (start, cpu) = (Instant::now(), thread_seconds());
                    work(thread);
                    (start, Instant::now(), thread_seconds() - cpu)
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("the work asserts what it checks")).collect()
    });
    let seconds = match clock {
        Clock::Wall => {
            let start = times.iter().map(|time| time.0).min().expect("a thread at least");
            let end = times.iter().map(|time| time.1).max().expect("a thread at least");
            end.duration_since(start).as_secs_f64()
        }
        Clock::Cpu => times.iter().map(|time| time.2).sum::<f64>() / threads as f64,
    };
    operations as f64 / seconds / 1e6
}

/// Processor time of this thread.
pub fn thread_seconds() -> f64 {
    pagefold_os::sched::thread_cpu_ns() as f64 / 1e9
}

/// A filled structure, and what its phases share.
struct Run<'a> {
    plan: &'a Plan,
    map: &'a dyn Map,
    /// Indexes that each thread looks up.
    samples: Vec<Vec<u32>>,
    per_thread: usize,
    /// Keys of a thread.
    share: usize,
    figures: Figures,
}

impl Run<'_> {
    fn wants(&self, mix: Mix) -> bool {
        self.plan.mix == mix || self.plan.mix == Mix::All
    }

    fn range(&self, thread: usize) -> std::ops::Range<usize> {
        thread * self.share..((thread + 1) * self.share).min(self.plan.keys)
    }

    fn timed(&self, operations: usize, work: impl Fn(usize) + Sync) -> f64 {
        timed(self.plan.threads, operations, self.plan.clock, work)
    }

    /// Operations of a phase, over all threads.
    fn operations(&self) -> usize {
        self.per_thread * self.plan.threads
    }

    fn note(&mut self, name: &str, figure: f64) {
        self.figures.insert(name.into(), figure);
    }

    fn insert(&self) -> f64 {
        self.timed(self.plan.keys, |thread| {
            let failed = self.range(thread).filter(|&index| !self.map.insert(key(index as u64), index as u64)).count();
            check_few(failed, self.share, "inserts found a key that was not there");
        })
    }

    fn insert_batches(&mut self, other: &dyn Map) {
        if !other.insert_many(&[(key(0), 0)]) {
            return;
        }
        let rate = self.timed(self.plan.keys, |thread| {
            let mut pairs = Vec::with_capacity(BATCH);
            for index in self.range(thread) {
                pairs.push((key(index as u64), index as u64));
                if pairs.len() == BATCH {
                    other.insert_many(&pairs);
                    pairs.clear();
                }
            }
            other.insert_many(&pairs);
        });
        self.note("insert-batch", rate);
    }

    fn reads(&mut self) {
        let (map, operations) = (self.map, self.operations());
        let hits = |samples: &[u32]| {
            let mut sum = 0;
            for &index in samples {
                sum += map.get(key(index.into())).map_or(1 << 40, |value| value ^ u64::from(index));
            }
            check_few((sum >> 40) as usize + usize::from(sum & 0xff_ffff != 0), self.share, "lookups went wrong");
        };
        // Once before the clock: first touches by this many threads.
        self.timed(operations, |thread| hits(&self.samples[thread][..self.per_thread / 8]));
        let get = self.timed(operations, |thread| hits(&self.samples[thread]));
        let misses = self.timed(operations, |thread| {
            let samples = self.samples[thread].iter();
            let wrong = samples.filter(|&&index| map.get(key(u64::from(index) + (1 << 40))).is_some()).count();
            check_few(wrong, self.per_thread, "misses were hits");
        });
        self.note("get", get);
        self.note("get-miss", misses);
        self.read_batches();
        if map.scan(0, 1).is_some() {
            let scans = (operations / SCAN_ENTRIES / self.plan.threads).max(1);
            let rate = self.timed(scans * self.plan.threads * SCAN_ENTRIES, |thread| {
                let mut sum = 0u64;
                for &index in &self.samples[thread][..scans] {
                    sum = sum.wrapping_add(map.scan(key(index.into()), SCAN_ENTRIES).expect("ordered"));
                }
                black_box(sum);
            });
            self.note("scan", rate);
        }
    }

    fn read_batches(&mut self) {
        if !self.map.get_many(&[], &mut []) {
            return;
        }
        let rate = self.timed(self.operations(), |thread| {
            let (mut keys, mut found, mut wrong) = ([0; BATCH], [None; BATCH], 0);
            for indexes in self.samples[thread].chunks(BATCH) {
                for (key_at, &index) in keys.iter_mut().zip(indexes) {
                    *key_at = key(index.into());
                }
                self.map.get_many(&keys[..indexes.len()], &mut found[..indexes.len()]);
                wrong += found.iter().zip(indexes).filter(|(found, index)| **found != Some(u64::from(**index))).count();
            }
            check_few(wrong, self.per_thread, "batched lookups went wrong");
        });
        self.note("get-batch", rate);
    }

    /// Lookups with one insert or removal in `one_in` operations.
    fn mix(&mut self, name: &str, one_in: u64) {
        let map = self.map;
        let rate = self.timed(self.operations(), |thread| {
            let (mut wrong, mut inserted) = (0, false);
            let mut fresh = (thread as u64 + 1) << 41 | one_in << 56;
            for (at, &index) in self.samples[thread].iter().enumerate() {
                if !(at as u64).is_multiple_of(one_in) {
                    wrong += usize::from(map.get(key(index.into())) != Some(index.into()));
                } else if inserted {
                    wrong += usize::from(!map.remove(key(fresh), fresh & 0xffff_ffff));
                    fresh += 1;
                    inserted = false;
                } else {
                    inserted = map.insert(key(fresh), fresh & 0xffff_ffff);
                }
            }
            check_few(wrong, self.per_thread, "operations of the mix went wrong");
            if inserted {
                map.remove(key(fresh), fresh & 0xffff_ffff);
            }
        });
        self.note(name, rate);
    }

    /// Each key removed and a new one inserted, then all deleted.
    fn churn(&mut self) {
        let (map, keys) = (self.map, self.plan.keys as u64);
        let pairs = (self.per_thread / 2).min(self.share / 2);
        let newer = |thread: usize, at: usize| keys + (thread * self.share + at) as u64;
        let churn = self.timed(2 * pairs * self.plan.threads, |thread| {
            let mut wrong = 0;
            for (at, index) in self.range(thread).take(pairs).enumerate() {
                let fresh = newer(thread, at);
                wrong += usize::from(!map.remove(key(index as u64), index as u64));
                wrong += usize::from(!map.insert(key(fresh), fresh));
            }
            check_few(wrong, pairs, "operations of the churn went wrong");
        });
        let delete = self.timed(self.plan.keys, |thread| {
            let mut wrong = 0;
            for (at, index) in self.range(thread).enumerate() {
                let index = if at < pairs { newer(thread, at) } else { index as u64 };
                wrong += usize::from(!map.remove(key(index), index));
            }
            check_few(wrong, self.share, "deletes went wrong");
        });
        self.note("churn", churn);
        self.note("delete", delete);
    }
}

/// Measures what the plan says. Every answer is checked, so that all structures do the same work.
pub fn measure(plan: &Plan) -> Figures {
    let known = registry::all();
    let maker = known.iter().find(|maker| maker.0 == plan.structure).expect("the driver knows the names");
    let per_thread = plan.operations / plan.threads;
    let samples = (0..plan.threads).map(|thread| samples(plan, thread, per_thread)).collect();
    let before = resident_bytes();
    let map = (maker.2)(plan.keys, plan.huge);
    let share = plan.keys.div_ceil(plan.threads);
    let mut run = Run { plan, map: &*map, samples, per_thread, share, figures: Figures::new() };
    let insert = run.insert();
    run.note("bytes/key", (resident_bytes() - before) / plan.keys as f64);
    if run.wants(Mix::Insert) {
        run.note("insert", insert);
        run.insert_batches(&*(maker.2)(plan.keys, plan.huge));
    }
    if run.wants(Mix::Read) {
        run.reads();
    }
    for (mix, name, one_in) in [(Mix::Mostly, "95/5", 20), (Mix::Half, "50/50", 2)] {
        if run.wants(mix) {
            run.mix(name, one_in);
        }
    }
    if run.wants(Mix::Churn) {
        run.churn();
        // SAFETY: malloc_trim takes no pointer and keeps every allocation.
        unsafe { libc::malloc_trim(0) };
        run.note("bytes-after", ((resident_bytes() - before) / plan.keys as f64).max(0.0));
    }
    run.figures
}

/// A structure that finds by fingerprint may be wrong once in a hundred thousand, others never. A bench is not a test: this
/// only makes sure that all structures do the work.
fn check_few(wrong: usize, of: usize, what: &str) {
    assert!(wrong <= of / 10_000 + 2, "{wrong} of {of} {what}");
}
