//! One of several processes is killed, at any instruction, over and over: the others go on, nothing is corrupt, and
//! what the dead one held comes back.
//!
//! Workers write their own keys in a known sequence, and note before and after each operation what they do in a
//! journal that outlives them. Half of the deaths are SIGKILLs from outside at random instants, half are injected
//! between two stores to the shared memory. After each death every key of the dead worker must be as before or as
//! after its last operation; from time to time all workers are killed and the whole store is checked.
//!
//! Half of the keys share one segment, whose buckets are therefore full: entries move between buckets, all workers want
//! one lock, and so clean up after each other. Some values take many spans. After an injected death those who clean up
//! die as well, one after the other, each between two stores of it.
//!
//! `FORREST_CRASH_KILLS` sets the number of deaths (default 3000), `FORREST_CRASH_SECONDS` the longest time (30).

use forrest::{Options, Store, fault};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const WORKERS: usize = 3;
const KEYS: usize = 48;
/// The first of each worker's keys that lie in one segment.
const NEAR: usize = 24;
/// The segment in which they do.
const SEGMENT: usize = 7;
/// Bytes of the longest value: eight spans.
const LONG: u64 = 4 << 20;
const COUNTER: &[u8] = b"counter";

/// What one worker notes where its death does not erase it.
#[repr(C)]
struct Journal {
    begun: [AtomicU64; KEYS],
    done: [AtomicU64; KEYS],
    counted: AtomicU64,
    begun_counts: AtomicU64,
    operations: AtomicU64,
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// Keys that lie in one segment of the store. Which do is its own secret.
static NEAR_KEYS: OnceLock<Vec<[u8; 8]>> = OnceLock::new();

/// Finds them before the first fork, so that children need not.
fn find_near_keys(store: &Store) {
    let in_segment = |number: &[u8; 8]| store.segment_of(number) == SEGMENT;
    let keys = || (1u64 << 32..).map(u64::to_le_bytes).filter(in_segment).take(WORKERS * KEYS).collect();
    NEAR_KEYS.get_or_init(keys);
}

fn key(worker: usize, index: usize) -> Vec<u8> {
    // Keys of 8 bytes live in slots, others in records.
    match index {
        NEAR.. => NEAR_KEYS.get().expect("they were found")[worker * KEYS + index].to_vec(),
        _ if index.is_multiple_of(3) => format!("worker {worker}, key {index}").into_bytes(),
        _ => ((worker * 1000 + index) as u64).to_le_bytes().to_vec(),
    }
}

/// The state of a key after operation number `sequence` on it.
fn state(worker: usize, index: usize, sequence: u64) -> Option<Vec<u8>> {
    let mut mix = (sequence << 16 | (worker * KEYS + index) as u64) + 1;
    if sequence == 0 || random(&mut mix).is_multiple_of(4) {
        return None;
    }
    let length = match random(&mut mix) % 8 {
        0..4 => 8,
        4 => random(&mut mix) % 8,
        5 => 16 + random(&mut mix) % 60,
        6 => random(&mut mix) % 700,
        _ if index.is_multiple_of(16) && random(&mut mix).is_multiple_of(8) => random(&mut mix) % LONG,
        _ => random(&mut mix) % 9000,
    };
    let mut value: Vec<u8> = (0..length.div_ceil(8)).flat_map(|_| random(&mut mix).to_le_bytes()).collect();
    value.truncate(length as usize);
    Some(value)
}

fn worker(path: &std::path::Path, journals: &[Journal], number: usize, seed: u64, die_after: u64) -> ! {
    let mut seed = seed;
    fault::arm(die_after);
    let store = Options::new().open_existing_path(path).expect("open");
    let journal = &journals[number];
    loop {
        let index = random(&mut seed) as usize % KEYS;
        let sequence = journal.begun[index].load(Ordering::Relaxed) + 1;
        journal.begun[index].store(sequence, Ordering::SeqCst);
        let key = key(number, index);
        match state(number, index, sequence) {
            Some(value) => drop(store.set(&key, &value).expect("set")),
            None => drop(store.delete(&key).expect("delete")),
        }
        journal.done[index].store(sequence, Ordering::SeqCst);
        if sequence.is_multiple_of(8) {
            journal.begun_counts.fetch_add(1, Ordering::SeqCst);
            store.add(COUNTER, 1).expect("add");
            journal.counted.fetch_add(1, Ordering::SeqCst);
        }
        if sequence.is_multiple_of(256) {
            store.reserve(random(&mut seed) % (4 * KEYS * WORKERS) as u64).expect("reserve");
        }
        // Others' keys: whatever is read must be some state of that key, not a mixture.
        let (other, index) = (random(&mut seed) as usize % WORKERS, random(&mut seed) as usize % KEYS);
        let from = journals[other].done[index].load(Ordering::SeqCst);
        let mut value = None;
        if sequence.is_multiple_of(2) {
            value = store.get(&self::key(other, index)).map(|value| value.to_vec());
        } else {
            // A batch asks for the second home later.
            store.get_many(&[self::key(other, index)], |_, found| value = found.map(<[u8]>::to_vec));
        }
        let to = journals[other].begun[index].load(Ordering::SeqCst);
        // A state from before `from` would be stale; the one begun just now may be there already.
        let fits = (from.saturating_sub(1)..=to).any(|at| state(other, index, at).as_deref() == value.as_deref());
        if !fits {
            eprintln!("worker {number} read of key {index} of worker {other}: no state between {from} and {to}");
            std::process::abort();
        }
        journal.operations.fetch_add(1, Ordering::Relaxed);
    }
}

/// Checks the keys of a dead worker, and settles in the journal which of two states each has.
fn settle(store: &Store, journal: &Journal, number: usize, seed: u64) {
    for index in 0..KEYS {
        let (done, begun) = (journal.done[index].load(Ordering::SeqCst), journal.begun[index].load(Ordering::SeqCst));
        let value = store.get(&key(number, index));
        let is = |sequence| state(number, index, sequence).as_deref() == value.as_deref();
        assert!(
            is(done) || is(begun),
            "worker {number}, key {index}: neither state {done} nor {begun} but {} bytes; seed {seed}",
            value.map_or(-1, |value| value.len() as i64)
        );
        // The next worker goes on from the last number; a state that did not happen is as good as one that did.
        if !is(begun) {
            journal.begun[index].store(done, Ordering::SeqCst);
        }
        journal.done[index].store(journal.begun[index].load(Ordering::SeqCst), Ordering::SeqCst);
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
            // SAFETY: as in `kill`.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn start(cleanup: &mut Cleanup, journals: &[Journal], slot: usize, seed: &mut u64, inject: bool) {
    let (worker_seed, die_after) = (random(seed) | 1, if inject { 1 + random(seed) % 3000 } else { 0 });
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
    // SAFETY: as in `start`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        fault::arm(die_after);
        Options::new().open_existing_path(&cleanup.path).expect("open").recover();
        // SAFETY: ends this process at once: nothing of the parent's is to be dropped.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
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
    let mut seed = first_seed;
    let path = PathBuf::from(format!("/dev/shm/forrest-test-crash-{}", std::process::id()));
    let mut cleanup = Cleanup { path: path.clone(), children: vec![0; WORKERS] };
    let options = Options::new().limit_bytes(256 << 20);
    let mut store = options.create_path(&path).unwrap();
    // SAFETY: fresh zeroed memory shared with children; journals consist of atomics, for which zero is a value.
    let journals: &[Journal] = unsafe {
        let bytes = WORKERS * size_of::<Journal>();
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts(at.cast::<Journal>(), WORKERS)
    };
    let (mut kills, mut injected, mut recoverers, mut checks, mut lost) = (0u64, 0u64, 0u64, 0u64, 0u64);
    find_near_keys(&store);
    let can_inject = cfg!(any(debug_assertions, pagefold_stress));
    for slot in 0..WORKERS {
        start(&mut cleanup, journals, slot, &mut seed, false);
    }
    while kills < kills_wanted && Instant::now() < until {
        let slot = random(&mut seed) as usize % WORKERS;
        let inject = can_inject && kills % 2 == 1;
        if inject {
            // Replace the worker by one that dies between two stores, and wait for that.
            cleanup.kill(slot);
            settle(&store, &journals[slot], slot, first_seed);
            start(&mut cleanup, journals, slot, &mut seed, true);
            let mut status = 0;
            // SAFETY: waits for the child just made.
            unsafe { libc::waitpid(cleanup.children[slot], &raw mut status, 0) };
            cleanup.children[slot] = 0;
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
            injected += 1;
            kills += 1;
            // Half of the time nobody else is there who might clean up.
            let others: Vec<usize> = (0..WORKERS).filter(|&other| other != slot).collect();
            let alone = random(&mut seed).is_multiple_of(2);
            for &other in others.iter().filter(|_| alone) {
                cleanup.kill(other);
            }
            while !random(&mut seed).is_multiple_of(4) && recoverer_dies(&cleanup, 1 + random(&mut seed) % 20) {
                recoverers += 1;
            }
            for &other in others.iter().filter(|_| alone) {
                settle(&store, &journals[other], other, first_seed);
                start(&mut cleanup, journals, other, &mut seed, false);
            }
        } else {
            std::thread::sleep(Duration::from_micros(random(&mut seed) % 3000));
            cleanup.kill(slot);
        }
        kills += 1;
        settle(&store, &journals[slot], slot, first_seed);
        if kills.is_multiple_of(64) || kills % 64 == 1 {
            // The others must go on although nobody has cleaned up yet.
            let other = (slot + 1) % WORKERS;
            let before = journals[other].operations.load(Ordering::Relaxed);
            let patience = Instant::now() + Duration::from_secs(120);
            while journals[other].operations.load(Ordering::Relaxed) < before + 20 {
                assert!(Instant::now() < patience, "worker {other} hangs after a death; seed {first_seed}");
                std::thread::sleep(Duration::from_micros(200));
            }
            for slot in 0..WORKERS {
                cleanup.kill(slot);
            }
            store.recover();
            let report = store.check().unwrap_or_else(|wrong| panic!("{wrong}; seed {first_seed}"));
            lost += report.lost_blocks;
            for (slot, journal) in journals.iter().enumerate() {
                settle(&store, journal, slot, first_seed);
            }
            let counter = store.get(COUNTER).map_or(0, |value| u64::from_le_bytes((&*value).try_into().unwrap()));
            let counted: u64 = journals.iter().map(|journal| journal.counted.load(Ordering::SeqCst)).sum();
            let begun: u64 = journals.iter().map(|journal| journal.begun_counts.load(Ordering::SeqCst)).sum();
            assert!(counted <= counter && counter <= begun, "{counted} <= {counter} <= {begun}; seed {first_seed}");
            // Opened by nobody else, the store also finds what a death between two stores left without an owner.
            drop(store);
            store = options.open_path(&path).unwrap();
            let report = store.check().unwrap_or_else(|wrong| panic!("{wrong} after reopening; seed {first_seed}"));
            assert_eq!(report.lost_blocks, 0, "seed {first_seed}");
            checks += 1;
            for slot in 0..WORKERS {
                start(&mut cleanup, journals, slot, &mut seed, false);
            }
        } else {
            start(&mut cleanup, journals, slot, &mut seed, false);
        }
    }
    for (slot, journal) in journals.iter().enumerate() {
        cleanup.kill(slot);
        settle(&store, journal, slot, first_seed);
    }
    store.recover();
    store.check().unwrap_or_else(|wrong| panic!("{wrong}; seed {first_seed}"));
    let operations: u64 = journals.iter().map(|journal| journal.operations.load(Ordering::Relaxed)).sum();
    let recovered = store.stats().recovery_count;
    assert!(recovered > 0);
    println!(
        "crash_shared: {kills} deaths ({injected} between two stores), {recoverers} of recoverers, {recovered} \
         recoveries, {checks} whole checks, {lost} blocks found by audits, {operations} operations: ok"
    );
}
