//! One structure measured in this process.

use super::maps::{self, Map};
use super::{Dist, Mix};
use crate::options::Clock;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

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

/// Counted page by page: what `statm` tells may be off by some dozen pages for each processor.
fn resident_bytes() -> f64 {
    let memory = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux");
    let resident = memory.lines().find_map(|line| line.strip_prefix("Rss:")).expect("its second line");
    let kib: f64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024.0
}

/// Runs `work(thread)` in all threads at once and gives million operations per second: by the wall from
/// the first thread's start to the last one's end; or, on a machine that others use too, by the time the
/// threads had a processor (which spares locking peers the time they sleep).
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
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux and `time` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Measures what the plan says. Every answer is checked, so that all structures do the same work.
pub fn measure(plan: &Plan) -> Figures {
    let maker = maps::all().into_iter().find(|maker| maker.0 == plan.structure).expect("the driver knows the names");
    let mut figures = Figures::new();
    let threads = plan.threads;
    let all = |mix: Mix| plan.mix == mix || plan.mix == Mix::All;
    let per_thread = plan.operations / threads;
    let operations = per_thread * threads;
    let samples: Vec<Vec<u32>> = (0..threads).map(|thread| samples(plan, thread, per_thread)).collect();

    let before = resident_bytes();
    let map = (maker.2)(plan.keys, plan.huge);
    let map: &dyn Map = &*map;
    let share = plan.keys.div_ceil(threads);
    let range = |thread: usize| thread * share..((thread + 1) * share).min(plan.keys);
    let insert = timed(threads, plan.keys, plan.clock, |thread| {
        let mut failed = 0;
        for index in range(thread) {
            failed += usize::from(!map.insert(key(index as u64), index as u64));
        }
        check_few(failed, share, "inserts found a key that was not there");
    });
    figures.insert("bytes/key".into(), (resident_bytes() - before) / plan.keys as f64);
    if all(Mix::Insert) {
        figures.insert("insert".into(), insert);
        let other = (maker.2)(plan.keys, plan.huge);
        if other.insert_many(&[(key(0), 0)]) {
            let rate = timed(threads, plan.keys, plan.clock, |thread| {
                let mut pairs = Vec::with_capacity(BATCH);
                for index in range(thread) {
                    pairs.push((key(index as u64), index as u64));
                    if pairs.len() == BATCH {
                        other.insert_many(&pairs);
                        pairs.clear();
                    }
                }
                other.insert_many(&pairs);
            });
            figures.insert("insert-batch".into(), rate);
        }
    }
    if all(Mix::Read) {
        // Once before the clock: first touches by this many threads.
        let hits = |thread: usize, samples: &[u32]| {
            let mut sum = 0;
            for &index in samples {
                sum += map.get(key(index.into())).map_or(1 << 40, |value| value ^ u64::from(index));
            }
            check_few((sum >> 40) as usize + usize::from(sum & 0xff_ffff != 0), share, "lookups went wrong");
            black_box(thread);
        };
        timed(threads, operations, plan.clock, |thread| hits(thread, &samples[thread][..per_thread / 8]));
        figures.insert("get".into(), timed(threads, operations, plan.clock, |thread| hits(thread, &samples[thread])));
        if map.get_many(&[], &mut []) {
            let rate = timed(threads, operations, plan.clock, |thread| {
                let mut keys = [0; BATCH];
                let mut found = [None; BATCH];
                let mut wrong = 0;
                for indexes in samples[thread].chunks(BATCH) {
                    for (key_at, &index) in keys.iter_mut().zip(indexes) {
                        *key_at = key(index.into());
                    }
                    map.get_many(&keys[..indexes.len()], &mut found[..indexes.len()]);
                    for (found, &index) in found.iter().zip(indexes) {
                        wrong += usize::from(*found != Some(index.into()));
                    }
                }
                check_few(wrong, per_thread, "batched lookups went wrong");
            });
            figures.insert("get-batch".into(), rate);
        }
        let rate = timed(threads, operations, plan.clock, |thread| {
            let mut wrong = 0;
            for &index in &samples[thread] {
                wrong += usize::from(map.get(key(u64::from(index) + (1 << 40))).is_some());
            }
            check_few(wrong, per_thread, "misses were hits");
        });
        figures.insert("get-miss".into(), rate);
        if map.scan(0, 1).is_some() {
            let scans = (operations / SCAN_ENTRIES / threads).max(1);
            let rate = timed(threads, scans * threads * SCAN_ENTRIES, plan.clock, |thread| {
                let mut sum = 0u64;
                for &index in &samples[thread][..scans] {
                    sum = sum.wrapping_add(map.scan(key(index.into()), SCAN_ENTRIES).expect("ordered"));
                }
                black_box(sum);
            });
            figures.insert("scan".into(), rate);
        }
    }
    for (mix, name, one_in) in [(Mix::Mostly, "95/5", 20), (Mix::Half, "50/50", 2)] {
        if !all(mix) {
            continue;
        }
        let rate = timed(threads, operations, plan.clock, |thread| {
            let mut wrong = 0;
            let mut fresh = (thread as u64 + 1) << 41 | one_in << 56;
            let mut inserted = false;
            for (at, &index) in samples[thread].iter().enumerate() {
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
            check_few(wrong, per_thread, "operations of the mix went wrong");
            if inserted {
                map.remove(key(fresh), fresh & 0xffff_ffff);
            }
        });
        figures.insert(name.into(), rate);
    }
    if all(Mix::Churn) {
        let pairs = (per_thread / 2).min(share / 2);
        let keys = plan.keys as u64;
        let newer = |thread: usize, at: usize| keys + (thread * share + at) as u64;
        let rate = timed(threads, 2 * pairs * threads, plan.clock, |thread| {
            let mut wrong = 0;
            for (at, index) in range(thread).take(pairs).enumerate() {
                wrong += usize::from(!map.remove(key(index as u64), index as u64));
                let fresh = newer(thread, at);
                wrong += usize::from(!map.insert(key(fresh), fresh));
            }
            check_few(wrong, pairs, "operations of the churn went wrong");
        });
        figures.insert("churn".into(), rate);
        let rate = timed(threads, plan.keys, plan.clock, |thread| {
            let mut wrong = 0;
            for (at, index) in range(thread).enumerate() {
                let index = if at < pairs { newer(thread, at) } else { index as u64 };
                wrong += usize::from(!map.remove(key(index), index));
            }
            check_few(wrong, share, "deletes went wrong");
        });
        figures.insert("delete".into(), rate);
        // SAFETY: malloc_trim takes no pointer and keeps the heap whole.
        unsafe { libc::malloc_trim(0) };
        figures.insert("bytes-after".into(), ((resident_bytes() - before) / plan.keys as f64).max(0.0));
    }
    if let Some(bytes) = map.memory_bytes() {
        black_box(bytes);
    }
    figures
}

/// A structure that finds by fingerprint may be wrong once in a hundred thousand; no other may be wrong at all,
/// but a bench is no test: this only makes sure that all do the work.
fn check_few(wrong: usize, of: usize, what: &str) {
    assert!(wrong <= of / 10_000 + 2, "{wrong} of {of} {what}");
}
