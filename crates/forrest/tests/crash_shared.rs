//! One of several processes is killed, at any instruction, over and over: the others go on, nothing is corrupt, and
//! what the dead one held comes back.
//!
//! Workers write their own keys in a known sequence, and note before and after each operation what they do in a
//! journal that outlives them. Most deaths are SIGKILLs from outside at random instants, a third is injected
//! between two stores to the shared memory. After each death every key of the dead worker must be as before or as
//! after its last operation; from time to time all workers are killed and the whole store is checked.
//!
//! Most keys share one shard and come and go in waves, so that its buckets are often full: entries move between buckets,
//! all workers want one lock, and so clean up after each other. Some values take many spans. A worker has two threads, with
//! keys of their own, so that two threads die at the same time. After an injected death the recovering processes die as
//! well, one after the other, each between two stores: beside others, and as the only one with the store open. Half of the
//! time the store is full but for little: then what is refused has changed nothing.
//!
//! Sums are exact: each thread counts by compare-and-swap in a word of its own of one value that all of them change.
//!
//! `FORREST_CRASH_KILLS` sets the number of deaths (default 3000), `FORREST_CRASH_SECONDS` the longest time (30).

use fastrand::Rng;
use forrest::{Error, Options, Ref, Store, fault};
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const WORKERS: usize = 3;
/// Threads of a worker.
const THREADS: usize = 2;
/// Threads of all workers: each has keys and a journal of its own.
const WRITERS: usize = WORKERS * THREADS;
const KEYS: usize = 64;
/// The first of each writer's keys that lie in one shard.
const NEAR: usize = 16;
/// The shard in which they do.
const SHARD: usize = 7;
/// Bytes of the longest value: eight spans.
const LONG: u64 = 4 << 20;
const COUNTER: &[u8] = b"counter";
/// A value with a word for each writer.
const COUNTS: &[u8] = b"counters";
const LIMIT: u64 = 64 << 20;
/// Bytes of each of the values that leave little room for the rest.
const BALLAST_BYTES: usize = 400 << 10;

/// What one writer notes where its death does not erase it.
#[repr(C)]
struct Journal {
    begun: [AtomicU64; KEYS],
    done: [AtomicU64; KEYS],
    counted: AtomicU64,
    begun_counts: AtomicU64,
    swapped: AtomicU64,
    begun_swaps: AtomicU64,
    refused: AtomicU64,
    operations: AtomicU64,
}

/// Keys that lie in one shard of the store. Which do is its own secret.
static NEAR_KEYS: OnceLock<Vec<[u8; 8]>> = OnceLock::new();

/// Finds them before the first fork, so that children need not.
fn find_near_keys(store: &Store) {
    let in_shard = |number: &[u8; 8]| store.shard_of(number) == SHARD;
    let keys = || (1u64 << 32..).map(u64::to_le_bytes).filter(in_shard).take(WRITERS * KEYS).collect();
    NEAR_KEYS.get_or_init(keys);
}

fn key(writer: usize, index: usize) -> Vec<u8> {
    // Keys of 8 bytes live in slots, others in records.
    match index {
        NEAR.. => NEAR_KEYS.get().expect("they were found")[writer * KEYS + index].to_vec(),
        _ if index.is_multiple_of(3) => format!("writer {writer}, key {index}").into_bytes(),
        _ => ((writer * 1000 + index) as u64).to_le_bytes().to_vec(),
    }
}

/// The state of a key after operation number `sequence` on it.
fn state(writer: usize, index: usize, sequence: u64) -> Option<Vec<u8>> {
    let mut mix = Rng::with_seed(sequence << 16 | (writer * KEYS + index) as u64);
    // Keys come and go together, so that arrays become full, and sparse, over and over.
    let absent_of_8 = if (sequence / 8).is_multiple_of(2) { 1 } else { 7 };
    if sequence == 0 || mix.u64(..8) < absent_of_8 {
        return None;
    }
    let length = match mix.u64(..8) {
        0..4 => 8,
        4 => mix.u64(..8),
        5 => 16 + mix.u64(..60),
        6 => mix.u64(..700),
        _ if index.is_multiple_of(16) && mix.u64(..8) == 0 => mix.u64(..LONG),
        _ => mix.u64(..9000),
    };
    let mut value: Vec<u8> = (0..length.div_ceil(8)).flat_map(|_| mix.u64(..).to_le_bytes()).collect();
    value.truncate(length as usize);
    Some(value)
}

/// What was done, or nothing where the store is full.
fn unless_full<T>(done: Result<T, Error>) -> Option<T> {
    match done {
        Ok(done) => Some(done),
        Err(error) if error.is_full() => None,
        Err(error) => panic!("{error}"),
    }
}

/// Brings a key, which no other thread changes, from one state to another. Returns whether there was room for it.
fn change(store: &Store, key: &[u8], from: Option<&[u8]>, to: Option<&[u8]>, how: u64) -> bool {
    let done = match (to, how % 4) {
        (_, 0) => unless_full(store.compare_swap(key, from, to)),
        (Some(value), 1) if from.is_none() => unless_full(store.insert(key, value)),
        (Some(value), 1) => unless_full(store.set_many(&[(key, value)])).map(|()| true),
        (Some(value), _) => unless_full(store.set(key, value)).map(|existed| existed == from.is_some()),
        (None, 1) => unless_full(store.take(key)).map(|taken| taken.as_deref() == from),
        (None, _) => unless_full(store.delete(key)).map(|existed| existed == from.is_some()),
    };
    assert!(done != Some(false), "{} was not what its last change made it", key.escape_ascii());
    done.is_some()
}

/// The words of [`COUNTS`].
fn counts(value: Option<&[u8]>) -> [u64; WRITERS] {
    let Some(value) = value else { return [0; WRITERS] };
    assert_eq!(value.len(), WRITERS * 8);
    std::array::from_fn(|at| u64::from_le_bytes(value[at * 8..][..8].try_into().unwrap()))
}

/// Adds one to a writer's word of [`COUNTS`], unless another was quicker or the store is full.
fn count(store: &Store, journal: &Journal, number: usize) {
    let swapped = journal.swapped.load(Ordering::Relaxed);
    let now = store.get(COUNTS);
    let mut next = counts(now.as_deref());
    assert_eq!(next[number], swapped, "writer {number}'s own count");
    next[number] += 1;
    journal.begun_swaps.store(swapped + 1, Ordering::SeqCst);
    let next: Vec<u8> = next.into_iter().flat_map(u64::to_le_bytes).collect();
    let done = unless_full(store.compare_swap(COUNTS, now.as_deref(), Some(&next))) == Some(true);
    let settled = swapped + u64::from(done);
    journal.swapped.store(settled, Ordering::SeqCst);
    journal.begun_swaps.store(settled, Ordering::SeqCst);
}

/// What a writer has set is there when all entries are visited, and no key is seen twice.
fn visit(store: &Store, journal: &Journal, number: usize) {
    let mut seen: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
    let each = |key: &[u8], value: &[u8]| {
        // The ballast would only take time.
        let value = if key.starts_with(b"ballast") { &[] } else { value };
        assert!(seen.insert(key.to_vec(), value.to_vec()).is_none(), "{} twice", key.escape_ascii());
        true
    };
    store.for_each(each).expect("for_each");
    for index in 0..KEYS {
        let done = journal.done[index].load(Ordering::Relaxed);
        assert!(seen.get(&key(number, index)) == state(number, index, done).as_ref(), "writer {number}, key {index}");
    }
}

fn writer(path: &Path, journals: &[Journal], number: usize, seed: u64) -> ! {
    let mut random = Rng::with_seed(seed);
    let journal = &journals[number];
    loop {
        let store = Options::new().open_existing_path(path).expect("open");
        let mut held: Option<(Ref<'_>, Vec<u8>)> = None;
        for turn in 1..1000u64 {
            let index = random.usize(..KEYS);
            let sequence = journal.begun[index].load(Ordering::Relaxed) + 1;
            journal.begun[index].store(sequence, Ordering::SeqCst);
            let from = state(number, index, journal.done[index].load(Ordering::Relaxed));
            let to = state(number, index, sequence);
            if change(&store, &key(number, index), from.as_deref(), to.as_deref(), random.u64(..)) {
                journal.done[index].store(sequence, Ordering::SeqCst);
            } else {
                journal.refused.fetch_add(1, Ordering::Relaxed);
            }
            if turn.is_multiple_of(8) {
                journal.begun_counts.fetch_add(1, Ordering::SeqCst);
                match unless_full(store.add(COUNTER, 1)) {
                    Some(_) => journal.counted.fetch_add(1, Ordering::SeqCst),
                    None => journal.begun_counts.fetch_sub(1, Ordering::SeqCst),
                };
                count(&store, journal, number);
            }
            if turn.is_multiple_of(256) {
                unless_full(store.reserve(random.u64(..(4 * KEYS * WRITERS) as u64)));
                visit(&store, journal, number);
                store.trim().expect("trim");
            }
            // Others' keys: whatever is read must be some state of that key, not a mixture.
            let (other, index) = (random.usize(..WRITERS), random.usize(..KEYS));
            let from = journals[other].done[index].load(Ordering::SeqCst);
            let mut value = None;
            match random.u64(..3) {
                0 => value = store.get(&key(other, index)).map(|value| value.to_vec()),
                // A batch reads the second home bucket later.
                1 => store.get_many(&[key(other, index)], |_, found| value = found.map(<[u8]>::to_vec)),
                _ => {
                    assert!(held.take().is_none_or(|(held, copy)| *held == copy[..]), "a value changed under a guard");
                    held = store.get_ref(&key(other, index)).map(|found| (found, Vec::new()));
                    if let Some((found, copy)) = &mut held {
                        copy.extend_from_slice(found);
                        value = Some(copy.clone());
                    }
                }
            }
            let to = journals[other].begun[index].load(Ordering::SeqCst);
            // A state from before `from` would be stale; the one begun just now may be there already.
            let fits = (from..=to).any(|at| state(other, index, at).as_deref() == value.as_deref());
            assert!(fits, "writer {number} read key {index} of writer {other}: no state between {from} and {to}");
            journal.operations.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn worker(path: &Path, journals: &[Journal], slot: usize, seed: u64, die_after: u64) -> ! {
    // What one thread finds wrong ends both: the parent sees that it was no kill.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    fault::arm(die_after);
    std::thread::scope(|scope| {
        for thread in 1..THREADS {
            scope.spawn(move || writer(path, journals, slot * THREADS + thread, seed ^ (thread as u64) << 32));
        }
        writer(path, journals, slot * THREADS, seed)
    })
}

/// Checks what the writers of a dead worker did, and settles in the journal which of two states each key has.
fn settle(store: &Store, journals: &[Journal], slot: usize, seed: u64) {
    for (number, journal) in journals.iter().enumerate().filter(|(number, _)| number / THREADS == slot) {
        for index in 0..KEYS {
            let (done, begun) =
                (journal.done[index].load(Ordering::SeqCst), journal.begun[index].load(Ordering::SeqCst));
            let value = store.get(&key(number, index));
            let is = |sequence| state(number, index, sequence).as_deref() == value.as_deref();
            assert!(
                is(done) || is(begun),
                "writer {number}, key {index}: neither state {done} nor {begun} but {} bytes; seed {seed}",
                value.map_or(-1, |value| value.len() as i64)
            );
            // The next one goes on from the last number; a state that did not happen is as good as one that did.
            if !is(begun) {
                journal.begun[index].store(done, Ordering::SeqCst);
            }
            journal.done[index].store(journal.begun[index].load(Ordering::SeqCst), Ordering::SeqCst);
        }
        let swapped = counts(store.get(COUNTS).as_deref())[number];
        let (done, begun) = (&journal.swapped, &journal.begun_swaps);
        let range = done.load(Ordering::SeqCst)..=begun.load(Ordering::SeqCst);
        assert!(range.contains(&swapped), "writer {number} counted {swapped}, not in {range:?}; seed {seed}");
        [done, begun].iter().for_each(|count| count.store(swapped, Ordering::SeqCst));
    }
}

/// Checks the sum of all writers, which are dead, and settles which of their last additions happened.
fn settle_sum(store: &Store, journals: &[Journal], seed: u64) {
    let counter = store.get(COUNTER).map_or(0, |value| u64::from_le_bytes((&*value).try_into().unwrap()));
    let sum = |of: fn(&Journal) -> &AtomicU64| -> u64 { journals.iter().map(|j| of(j).load(Ordering::SeqCst)).sum() };
    let (counted, begun) = (sum(|journal| &journal.counted), sum(|journal| &journal.begun_counts));
    assert!(counted <= counter && counter <= begun, "{counted} <= {counter} <= {begun}; seed {seed}");
    for (at, journal) in journals.iter().enumerate() {
        let own = journal.counted.load(Ordering::SeqCst) + if at == 0 { counter - counted } else { 0 };
        [&journal.counted, &journal.begun_counts].iter().for_each(|count| count.store(own, Ordering::SeqCst));
    }
}

struct Cleanup {
    path: PathBuf,
    children: Vec<i32>,
}

impl Cleanup {
    fn kill(&mut self, slot: usize) {
        let child = self.children[slot];
        if child > 0 {
            let mut status = 0;
            // SAFETY: signals and reaps a child of this process that was not reaped before.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            self.children[slot] = 0;
            let signal = libc::WTERMSIG(status);
            assert!(libc::WIFSIGNALED(status) && signal == libc::SIGKILL, "a worker ended by itself: {status:#x}");
        }
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        for &child in self.children.iter().filter(|&&child| child > 0) {
            // SAFETY: signals and reaps a child of this process; `kill` sets the entry of a reaped one to 0.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn start(cleanup: &mut Cleanup, journals: &[Journal], slot: usize, random: &mut Rng, inject: bool) {
    let (worker_seed, die_after) = (random.u64(..), if inject { random.u64(1..=3000) } else { 0 });
    // SAFETY: this process has one thread, so the child may go on as an ordinary program.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        worker(&cleanup.path.clone(), journals, slot, worker_seed, die_after);
    }
    cleanup.children[slot] = child;
}

/// Cleans up in a child that dies at the `die_after`-th store of it. Whether it came so far.
fn recoverer_dies(cleanup: &Cleanup, die_after: u64) -> bool {
    // SAFETY: this process has one thread, and the child ends by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        fault::arm(die_after);
        Options::new().open_existing_path(&cleanup.path).expect("open").recover();
        // SAFETY: _exit ends this process without running destructors of the parent's objects.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(status == 0 || libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
    status != 0
}

fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn main() {
    // `cargo test NAME` and `--list` reach us too: run only when nothing else is meant.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if std::env::args().any(|arg| arg == "--list") || args.iter().any(|arg| !"crash_shared".contains(arg.as_str())) {
        return;
    }
    let kills_wanted = env("FORREST_CRASH_KILLS", 3000);
    let until = Instant::now() + Duration::from_secs(env("FORREST_CRASH_SECONDS", 30));
    let first_seed = env("FORREST_CRASH_SEED", u64::from(std::process::id()) << 20 | 1);
    let mut random = Rng::with_seed(first_seed);
    let path = PathBuf::from(format!("/dev/shm/forrest-test-crash-{}", std::process::id()));
    let mut cleanup = Cleanup { path: path.clone(), children: vec![0; WORKERS] };
    let options = Options::new().limit_bytes(LIMIT);
    let mut store = options.create_path(&path).unwrap();
    // SAFETY: fresh zeroed memory shared with children; journals consist of atomics, for which zero is a value.
    let journals: &[Journal] = unsafe {
        let bytes = WRITERS * size_of::<Journal>();
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts(at.cast::<Journal>(), WRITERS)
    };
    let (mut kills, mut injected, mut recoverers, mut checks, mut lost) = (0u64, 0u64, 0u64, 0u64, 0u64);
    let mut ballast: Vec<Vec<u8>> = Vec::new();
    find_near_keys(&store);
    let can_inject = cfg!(any(debug_assertions, pagefold_stress));
    for slot in 0..WORKERS {
        start(&mut cleanup, journals, slot, &mut random, false);
    }
    while kills < kills_wanted && Instant::now() < until {
        let slot = random.usize(..WORKERS);
        let inject = can_inject && random.u64(..2) == 0;
        if inject {
            // Replace the worker by one that dies between two stores, and wait for that.
            cleanup.kill(slot);
            settle(&store, journals, slot, first_seed);
            start(&mut cleanup, journals, slot, &mut random, true);
            let mut status = 0;
            // SAFETY: waitpid writes only the status; the child was just forked.
            unsafe { libc::waitpid(cleanup.children[slot], &raw mut status, 0) };
            cleanup.children[slot] = 0;
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
            injected += 1;
            kills += 1;
            // Half of the time no other process is there to recover.
            let others: Vec<usize> = (0..WORKERS).filter(|&other| other != slot).collect();
            let alone = random.u64(..2) == 0;
            for &other in others.iter().filter(|_| alone) {
                cleanup.kill(other);
            }
            while random.u64(..4) != 0 && recoverer_dies(&cleanup, 1 + random.u64(..20)) {
                recoverers += 1;
            }
            for &other in others.iter().filter(|_| alone) {
                settle(&store, journals, other, first_seed);
                start(&mut cleanup, journals, other, &mut random, false);
            }
        } else {
            std::thread::sleep(Duration::from_micros(random.u64(..3000)));
            cleanup.kill(slot);
        }
        kills += 1;
        settle(&store, journals, slot, first_seed);
        if kills.is_multiple_of(64) || kills % 64 == 1 {
            // The others must continue although no process has recovered the dead one yet.
            let other = (slot + 1) % WORKERS * THREADS + random.usize(..THREADS);
            let before = journals[other].operations.load(Ordering::Relaxed);
            let deadline = Instant::now() + Duration::from_secs(120);
            while journals[other].operations.load(Ordering::Relaxed) < before + 20 {
                assert!(Instant::now() < deadline, "writer {other} hangs after a death; seed {first_seed}");
                std::thread::sleep(Duration::from_micros(200));
            }
            for slot in 0..WORKERS {
                cleanup.kill(slot);
            }
            // Recovered here, or by a process that opens the store alone; it may die too, also in the audit that follows.
            if random.u64(..2) == 0 {
                store.recover();
                let report = store.check().unwrap_or_else(|wrong| panic!("{wrong}; seed {first_seed}"));
                lost += report.lost_blocks;
            }
            drop(store);
            while random.u64(..4) != 0 && recoverer_dies(&cleanup, 1 + random.u64(..40)) {
                recoverers += 1;
            }
            // Opened alone, the store also finds what a death between two stores left unreachable.
            store = options.open_path(&path).unwrap();
            let report = store.check().unwrap_or_else(|wrong| panic!("{wrong} after reopening; seed {first_seed}"));
            assert_eq!(report.lost_blocks, 0, "seed {first_seed}");
            for slot in 0..WORKERS {
                settle(&store, journals, slot, first_seed);
            }
            settle_sum(&store, journals, first_seed);
            // By turns there is room, and little.
            if ballast.is_empty() {
                let keys = (0..).map(|number| format!("ballast {number}").into_bytes());
                let value = vec![7; BALLAST_BYTES];
                ballast = keys.take_while(|key| unless_full(store.set(key, &value)).is_some()).collect();
                for key in ballast.drain(..(random.usize(..8)).min(ballast.len())) {
                    assert!(store.delete(&key).unwrap());
                }
            } else {
                for key in ballast.drain(..) {
                    let value = store.take(&key).unwrap();
                    assert!(value.is_some_and(|value| value == vec![7; BALLAST_BYTES]), "ballast; seed {first_seed}");
                }
            }
            checks += 1;
            for slot in 0..WORKERS {
                start(&mut cleanup, journals, slot, &mut random, false);
            }
        } else {
            start(&mut cleanup, journals, slot, &mut random, false);
        }
    }
    for slot in 0..WORKERS {
        cleanup.kill(slot);
        settle(&store, journals, slot, first_seed);
    }
    store.recover();
    store.check().unwrap_or_else(|wrong| panic!("{wrong}; seed {first_seed}"));
    settle_sum(&store, journals, first_seed);
    let recovered = store.stats().recovery_count;
    assert!(recovered > 0);
    // All memory is freed, whichever process died with some of it.
    drop(store);
    let store = options.open_path(&path).unwrap();
    store.clear().unwrap();
    let stats = store.stats();
    assert_eq!((stats.allocated_bytes, stats.held_bytes), (0, 0), "{stats:?}; seed {first_seed}");
    let bytes = std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(bytes < 8 << 20, "{bytes} bytes of an empty store; seed {first_seed}");
    let sum = |of: fn(&Journal) -> &AtomicU64| -> u64 { journals.iter().map(|j| of(j).load(Ordering::Relaxed)).sum() };
    let (operations, refused) = (sum(|journal| &journal.operations), sum(|journal| &journal.refused));
    println!(
        "crash_shared: {kills} deaths ({injected} between two stores), {recoverers} of recoverers, {recovered} \
         recoveries, {checks} whole checks, {lost} blocks found by audits, {operations} operations, {refused} refused: ok"
    );
}
