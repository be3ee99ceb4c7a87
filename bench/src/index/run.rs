//! One structure measured in this process.

use super::registry;
use crate::process::{self, Failure, Running, wait_for};
use bench_peers::{BATCH, Map};
use pagefold_os::procfs;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// What to measure.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    pub structure: String,
    pub keys: usize,
    pub threads: usize,
    /// Operations per phase, over all threads.
    pub operations: usize,
    pub seed: u64,
}

/// The longest time for one measurement.
const MEASURE_MAX: Duration = Duration::from_secs(600);

/// Has `bench` measure this plan in a process of its own, so that no structure inherits another's heap; returns its figures.
pub fn in_child<T: DeserializeOwned>(bench: &str, what: &str, plan: &impl Serialize) -> Result<T, Failure> {
    let mut command = process::own(bench)?;
    command.args(["--child", &serde_json::to_string(plan)?]);
    // glibc 2.35 and later: malloc asks for huge pages, as our structures do.
    command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    let mut child = Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    // Its output fits into the pipe, so it can be read after the end.
    let status = wait_for(what, MEASURE_MAX, || child.0.try_wait().transpose())??;
    if !status.success() {
        return Err(format!("measuring {what} failed: {status}").into());
    }
    Ok(serde_json::from_reader(child.0.stdout.take().ok_or("no pipe")?)?)
}

/// Figures by name: million operations per second, or bytes per key.
pub type Figures = BTreeMap<String, f64>;

/// The key of an index: a bijection (splitmix64's finish), so keys are distinct and evenly spread.
fn key(index: u64) -> u64 {
    let mut z = index.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// The indexes a thread will look up, made before the clock starts: random numbers by a counter through the same function.
fn samples(plan: &Plan, thread: usize, count: usize) -> Vec<u32> {
    let start = key((plan.seed << 8 | thread as u64) ^ 0x5eed);
    let random = |at: u64| key(start.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (1..=count as u64).map(|at| ((u128::from(random(at)) * plan.keys as u128) >> 64) as u32).collect()
}

/// Counted page by page: the number in `statm` may be off by some dozen pages for each processor.
fn resident_bytes() -> f64 {
    procfs::memory(std::process::id() as i32).expect("Linux").rss as f64
}

/// Runs `work(thread)` in all threads at the same time and returns million operations per second, from the first thread's
/// start to the last one's end.
pub fn timed(threads: usize, operations: usize, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    barrier.wait();
                    let start = Instant::now();
                    work(thread);
                    (start, Instant::now())
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("the work asserts what it checks")).collect()
    });
    let start = times.iter().map(|time| time.0).min().expect("a thread at least");
    let end = times.iter().map(|time| time.1).max().expect("a thread at least");
    operations as f64 / end.duration_since(start).as_secs_f64() / 1e6
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
    fn range(&self, thread: usize) -> std::ops::Range<usize> {
        thread * self.share..((thread + 1) * self.share).min(self.plan.keys)
    }

    /// Runs a phase of `operations` and returns its rate.
    fn timed(&self, operations: usize, work: impl Fn(usize) + Sync) -> f64 {
        timed(self.plan.threads, operations, work)
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
        let (map, operations) = (self.map, self.per_thread * self.plan.threads);
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
        if !map.get_many(&[], &mut []) {
            return;
        }
        let rate = self.timed(operations, |thread| {
            let (mut keys, mut found, mut wrong) = ([0; BATCH], [None; BATCH], 0);
            for indexes in self.samples[thread].chunks(BATCH) {
                for (key_at, &index) in keys.iter_mut().zip(indexes) {
                    *key_at = key(index.into());
                }
                map.get_many(&keys[..indexes.len()], &mut found[..indexes.len()]);
                wrong += found.iter().zip(indexes).filter(|(found, index)| **found != Some(u64::from(**index))).count();
            }
            check_few(wrong, self.per_thread, "batched lookups went wrong");
        });
        self.note("get-batch", rate);
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
    let (_, make) = known.iter().find(|maker| maker.0 == plan.structure).expect("the driver knows the names");
    let per_thread = plan.operations / plan.threads;
    let samples = (0..plan.threads).map(|thread| samples(plan, thread, per_thread)).collect();
    let before = resident_bytes();
    let map = make(plan.keys);
    let share = plan.keys.div_ceil(plan.threads);
    let mut run = Run { plan, map: &*map, samples, per_thread, share, figures: Figures::new() };
    let insert = run.insert();
    run.note("bytes/key", (resident_bytes() - before) / plan.keys as f64);
    run.note("insert", insert);
    run.insert_batches(&*make(plan.keys));
    run.reads();
    run.churn();
    run.figures
}

/// A structure that finds by fingerprint may be wrong once in a hundred thousand, others never. A bench is not a test: this
/// only makes sure that all structures do the work.
fn check_few(wrong: usize, of: usize, what: &str) {
    assert!(wrong <= of / 10_000 + 2, "{wrong} of {of} {what}");
}
