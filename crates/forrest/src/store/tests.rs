//! Tests that need the inside of a store.

use super::root::{ROOT_HEAD, init_root};
use super::*;
use crate::bucket::SLOTS;
#[cfg(any(debug_assertions, pagefold_stress))]
use crate::fault;
use crate::hash::Hash;
use crate::overflow_record::OverflowRecord;
use crate::table::{EntryPosition, Homes, OFFSETS_END, Spot};
use llds::arena::{Arena, Pages};
use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// A shared store of this test's own; its file is removed when the test ends, also if it fails.
struct Shared {
    store: Store,
    path: PathBuf,
}

impl Shared {
    fn new(what: &str) -> Shared {
        Shared::of(what, 64 << 20)
    }

    fn of(what: &str, limit_bytes: u64) -> Shared {
        let path = PathBuf::from(format!("/dev/shm/forrest-test-{what}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Shared { store: Options::new().limit_bytes(limit_bytes).create_path(&path).unwrap(), path }
    }

    fn again(&self) -> Store {
        Options::new().open_existing_path(&self.path).unwrap()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn a_store_of_an_older_layout_is_refused_by_its_number() {
    let shared = Shared::new("layout");
    std::fs::remove_file(&shared.path).unwrap();
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&shared.path).unwrap();
    let kind = u64::from_le_bytes(*b"forrest2");
    drop(Arena::create(file, &arena::Options { kind, ..Options::new().arena(64 << 20) }).unwrap());
    let error = Options::new().open_path(&shared.path).err().unwrap().to_string();
    assert!(error.contains("layout version 2, this code has 3"), "{error}");
}

#[test]
fn the_limit_ends_where_entries_can_point() {
    for limit in [1 << 40, (1 << 40) + 1, 3 << 40, u64::MAX] {
        match Options::new().limit_bytes(limit).pages(Pages::Small).private() {
            Ok(store) => assert!(store.table.arena.data_range().end <= OFFSETS_END, "{limit:#x}"),
            // The address space may not be available.
            Err(error) => println!("SKIPPED: a limit of {limit:#x} bytes: {error}"),
        }
    }
}

/// While a store grows, arrays that have room yet do not hold the extents that their neighbours have left.
#[test]
fn a_store_that_grows_is_dense() {
    let store = Options::new().limit_bytes(1 << 30).pages(Pages::Small).private().unwrap();
    let (mut held, mut allocated) = (0, 0);
    for number in 0..600_000u64 {
        store.set(&number.to_le_bytes(), &number.to_le_bytes()).unwrap();
        if number > 300_000 && number % 10_000 == 0 {
            let stats = store.stats();
            held += stats.held_bytes;
            allocated += stats.allocated_bytes;
        }
    }
    assert!(held < allocated * 13 / 10, "{held} bytes held, {allocated} in blocks");
}

/// Reads a value, but lets its key be deleted, and the freed memory be given back, when the record has just been found.
struct Late<'a> {
    other: &'a Store,
    key: &'a [u8],
    value: Vec<u8>,
}

impl Sink for Late<'_> {
    fn inline(&mut self, _bytes: [u8; 8], _length: usize) {}

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        self.other.delete(self.key).unwrap();
        self.other.trim().unwrap();
        self.value.clear();
        record.copy_value(&mut self.value);
    }
}

#[test]
fn a_long_value_stays_while_it_is_copied() {
    let shared = Shared::new("late");
    let (store, other) = (&shared.store, &shared.again());
    let value: Vec<u8> = (0..8u32 << 20).map(|at| (at % 251) as u8 + 1).collect();
    let read = |key: &[u8]| {
        let mut late = Late { other, key, value: Vec::new() };
        let found = store.table.read(key, store.table.hasher.first(key), &mut late);
        (found, late.value)
    };
    store.set(b"long", &value).unwrap();
    assert!(read(b"long") == (true, value.clone()), "the value was not as it was when it was found");
    // The same pages serve again, and nothing is held back for good.
    assert!(store.get(b"long").is_none());
    other.trim().unwrap();
    assert_eq!(other.stats().held_bytes, store.stats().held_bytes);
    assert_eq!(store.check().unwrap().lost_blocks, 0);
    // Without a free hazard a reader notices the change afterwards, as with a short value.
    store.set(b"held", &[1; 5000]).unwrap();
    let held: Vec<_> = (0..arena::HAZARDS).map(|_| store.get_ref(b"held").unwrap()).collect();
    store.set(b"long", &value).unwrap();
    assert!(store.get(b"long").as_deref() == Some(&value));
    assert!(!read(b"long").0);
    drop(held);
    store.set(b"short", &[1; 500]).unwrap();
    assert!(!read(b"short").0);
}

/// The shard that the next tests use.
#[cfg(any(debug_assertions, pagefold_stress))]
const SHARD: usize = 7;

#[cfg(any(debug_assertions, pagefold_stress))]
fn entries(store: &Store) -> Vec<(EntryPosition, u64)> {
    let mut entries = Vec::new();
    store.table.each_in(SHARD, |place, remainder| entries.push((place, remainder)));
    entries
}

#[cfg(any(debug_assertions, pagefold_stress))]
fn homes_of(store: &Store, remainder: u64) -> Homes {
    Homes::of(remainder, store.table.dir(SHARD, Ordering::Relaxed).buckets())
}

/// The key of 8 bytes with this remainder.
#[cfg(any(debug_assertions, pagefold_stress))]
fn key_at(store: &Store, remainder: u64) -> [u8; 8] {
    store.table.hasher.word_of(Spot { shard: SHARD, remainder }.hash())
}

/// A key of 8 bytes in another shard: a process registers with it.
#[cfg(any(debug_assertions, pagefold_stress))]
fn elsewhere(store: &Store) -> [u8; 8] {
    store.table.hasher.word_of(Spot { shard: SHARD + 1, remainder: 1 }.hash())
}

/// A shared store with `count` entries in the shard, and how many there are in each bucket.
#[cfg(any(debug_assertions, pagefold_stress))]
fn filled(what: &str, count: u64, value: impl Fn(u64) -> Vec<u8>) -> (Shared, Vec<usize>) {
    let shared = Shared::new(what);
    let store = &shared.store;
    for number in 1..=count {
        store.set(&key_at(store, number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12), &value(number)).unwrap();
    }
    let mut counts = vec![0; store.table.dir(SHARD, Ordering::Relaxed).buckets()];
    entries(store).iter().for_each(|(place, _)| counts[place.bucket] += 1);
    (shared, counts)
}

/// A writer dies with an entry in two places, the second in a record. Then the recovering process dies as well, at each kill
/// point in turn. The next recovery finishes both, and frees the record once.
#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn recoverers_may_be_killed_too() {
    // A shard of records. One of them lies in its second home bucket, which is full, while its first has a free slot:
    // it moves there when its value becomes short.
    let prepare = || {
        let (shared, counts) = filled("recoverers", 400, |_| vec![1; 100]);
        let store = &shared.store;
        let away = |&(place, remainder): &(EntryPosition, u64)| {
            let homes = homes_of(store, remainder);
            place.bucket != homes.first && counts[place.bucket] == SLOTS && counts[homes.first] < SLOTS
        };
        let remainder = entries(store).into_iter().find(away).unwrap().1;
        let moving = key_at(store, remainder);
        (shared, moving, remainder)
    };
    let mut twice = 0;
    for first in 1..12 {
        for second in 1.. {
            let (shared, moving, remainder) = prepare();
            let store = &shared.store;
            let opened = || {
                let store = shared.again();
                fault::arm(0);
                store.set(&elsewhere(&store), b"").unwrap();
                store
            };
            fault::dies(1 << 40, || {
                let store = opened();
                fault::arm(first);
                store.set(&moving, b"short").unwrap();
                // SAFETY: ends this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            });
            if entries(store).iter().filter(|entry| entry.1 == remainder).count() < 2 {
                break;
            }
            twice += 1;
            let died = fault::dies(second, || drop(shared.again()));
            let at = format!("deaths at points {first} and {second}");
            store.recover();
            store.trim().unwrap();
            let report = store.check().unwrap_or_else(|wrong| panic!("{at}: {wrong}"));
            assert!(report.lost_blocks <= 1, "{at}: {} blocks lost", report.lost_blocks);
            assert_eq!(store.get(&moving).unwrap(), b"short", "{at}");
            // Each new record must lie where no other record is.
            for number in 0..200u64 {
                store.set(&number.to_le_bytes(), &[2; 100]).unwrap();
            }
            for (_, remainder) in entries(store) {
                let key = key_at(store, remainder);
                let value = store.get(&key).unwrap();
                assert!(value == &[1; 100] || value == &[2; 100] || value == b"short", "{at}: {key:?} is {value:?}");
            }
            store.check().unwrap_or_else(|wrong| panic!("{at}, after more: {wrong}"));
            if !died {
                break;
            }
        }
    }
    assert!(twice > 5, "{twice} recoveries of a double entry");
}

/// A writer dies while it displaces an entry, a record or not, at each kill point in turn; then the recovering process dies.
/// All entries keep their values, each in one place, and no record is freed.
#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn a_writer_may_be_killed_while_it_displaces_an_entry() {
    let value = |number: u64| if number.is_multiple_of(2) { vec![number as u8; 8] } else { vec![number as u8; 50] };
    let mut doubles = 0;
    for first in 1.. {
        let mut is_over = false;
        for second in 1.. {
            // Few enough that the array is not copied meanwhile, and enough that some buckets are full.
            let (shared, counts) = filled("moves", 500, value);
            let store = &shared.store;
            let is_crowded = |remainder: &u64| {
                let homes = homes_of(store, *remainder);
                homes.first != homes.second && counts[homes.first] == SLOTS && counts[homes.second] == SLOTS
            };
            let remainders = (1u64..).map(|number| number.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 12);
            let remainder = { remainders }.find(is_crowded).unwrap();
            let (new, before) = (key_at(store, remainder), entries(store).len());
            let done = !fault::dies(1 << 40, || {
                let store = shared.again();
                store.set(&elsewhere(&store), b"").unwrap();
                fault::arm(first);
                store.set(&new, b"new").unwrap();
                fault::arm(0);
            });
            is_over = done;
            let mut remainders: Vec<u64> = entries(store).iter().map(|entry| entry.1).collect();
            let all = remainders.len();
            remainders.sort_unstable();
            remainders.dedup();
            doubles += all - remainders.len();
            let died = !done && fault::dies(second, || drop(shared.again()));
            let at = format!("deaths at points {first} and {second}");
            store.recover();
            let report = store.check().unwrap_or_else(|wrong| panic!("{at}: {wrong}"));
            assert_eq!(report.lost_blocks, 0, "{at}");
            let is_new = store.get(&new).map(|value| assert_eq!(value, b"new")).is_some();
            assert_eq!(entries(store).len(), before + usize::from(is_new), "{at}");
            assert!(is_new || !done, "{at}");
            for number in 1..=500u64 {
                let key = key_at(store, number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12);
                assert_eq!(&*store.get(&key).unwrap(), &value(number)[..], "{at}");
            }
            if !died {
                break;
            }
        }
        if is_over {
            break;
        }
    }
    assert!(doubles > 5, "{doubles} entries were in two places");
}

/// Reads a value; when the record has just been found, another process replaces the value and dies at some kill point. That
/// process is recovered, and the memory of the record is reused.
#[cfg(any(debug_assertions, pagefold_stress))]
struct Bereaved<'a> {
    shared: &'a Shared,
    key: &'a [u8],
    point: u64,
    times: usize,
    died: bool,
    value: Vec<u8>,
}

#[cfg(any(debug_assertions, pagefold_stress))]
impl Sink for Bereaved<'_> {
    fn inline(&mut self, _bytes: [u8; 8], _length: usize) {}

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        self.times += 1;
        if self.times == 1 {
            self.died = fault::dies(0, || {
                let store = self.shared.again();
                store.set(&elsewhere(&store), b"").unwrap();
                fault::arm(self.point);
                store.set(self.key, &[2; 500]).unwrap();
                fault::arm(0);
            });
            self.shared.store.recover();
            // Odd remainders: none of these inserts triggers the copy of a shard.
            for number in 1..=8u64 {
                let (store, remainder) = (&self.shared.store, number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12 | 1);
                let other = store.table.hasher.word_of(Spot { shard: SHARD + 1, remainder }.hash());
                store.set(&other, &[3; 500]).unwrap();
            }
        }
        self.value.clear();
        record.copy_value(&mut self.value);
    }
}

/// A writer replaces a record and dies before it changes the header: a reader of the old record starts over.
#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn a_reader_of_a_record_that_a_dead_writer_replaced_starts_over() {
    let mut seen = std::collections::HashSet::new();
    for point in 1.. {
        let shared = Shared::new("bereaved");
        let store = &shared.store;
        let key = key_at(store, 5);
        store.set(&key, &[1; 500]).unwrap();
        let mut sink = Bereaved { shared: &shared, key: &key, point, times: 0, died: false, value: Vec::new() };
        assert!(store.table.read(&key, store.table.hasher.first(&key), &mut sink));
        let (died, value) = (sink.died, sink.value);
        assert!(value == [1; 500] || value == [2; 500], "death at point {point}: {:?}", &value[..8]);
        assert_eq!(&*store.get(&key).unwrap(), &value[..], "death at point {point}");
        assert_eq!(store.check().unwrap().lost_blocks, 0, "death at point {point}");
        seen.insert(value[0]);
        if !died {
            break;
        }
    }
    assert_eq!(seen.len(), 2);
}

/// A shard is repeatedly filled until it must grow, and emptied again: entries move between their home buckets and to
/// other arrays. Every lookup and iteration sees the permanent entries, each once, and no change of them is lost.
#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn a_moving_entry_is_always_found_exactly_once() {
    // With few entries each is looked up often; with many, some always have full home buckets.
    moves_beside(24);
    moves_beside(120);
}

/// The same with `count` permanent entries.
#[cfg(any(debug_assertions, pagefold_stress))]
fn moves_beside(count: u64) {
    use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
    const ADDS: usize = 3;
    let store = &Store::new().unwrap();
    let number_of = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12;
    let short: Vec<_> = (1..=count).map(|number| key_at(store, number_of(number)).to_vec()).collect();
    let numbers = (0u32..).map(|number| format!("a key of more bytes {number}").into_bytes());
    let long: Vec<_> = numbers.filter(|key| store.shard_of(key) == SHARD).take(6).collect();
    let stay: Vec<Vec<u8>> = short.into_iter().chain(long).collect();
    // The length of a value tells how often it was written, and a mixture of two values is recognised.
    let value = |at: usize, turn: usize| vec![(at * 3 + turn % 3) as u8; [8, 5, 30][turn % 3]];
    let is_value = |at: usize, found: &[u8]| (0..3).any(|turn| found == value(at, turn));
    let counters: Vec<_> = (0..ADDS as u64).map(|number| key_at(store, number_of(500 + number))).collect();
    for (at, key) in stay.iter().enumerate() {
        store.set(key, &value(at, 0)).unwrap();
    }
    counters.iter().for_each(|key| assert_eq!(store.add(key, 0).unwrap(), 0));
    let (ended, sum, swapped) = (&AtomicBool::new(false), &AtomicI64::new(0), &AtomicI64::new(0));
    let going = || !ended.load(Ordering::Relaxed);
    let wanted = 1_000_000 / count;
    let passes = &[const { AtomicU64::new(0) }; 2];
    /// Stops the other threads when dropped, also in a panic.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _end = End(ended);
            while going() {
                for (at, key) in stay.iter().enumerate() {
                    let found = store.get(key).unwrap_or_else(|| panic!("entry {at} was missed"));
                    assert!(is_value(at, &found), "entry {at}: {found:?}");
                    assert!(store.contains(key) && is_value(at, &store.get_ref(key).expect("there all the time")));
                }
                assert!(store.get(&key_at(store, number_of(1 << 40))).is_none());
                passes[0].fetch_add(1, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            let _end = End(ended);
            while going() {
                store.get_many(&stay, |at, found| {
                    let found = found.unwrap_or_else(|| panic!("a batch missed entry {at}"));
                    assert!(is_value(at, found), "entry {at}: {found:?}");
                });
                if passes[1].fetch_add(1, Ordering::Relaxed) % 16 != 0 {
                    continue;
                }
                let mut seen = std::collections::HashSet::new();
                store
                    .for_each(|key, _| {
                        assert!(seen.insert(key.to_vec()), "{key:?} twice");
                        true
                    })
                    .unwrap();
                assert!(stay.iter().all(|key| seen.contains(key)), "one was passed over");
            }
        });
        scope.spawn(|| {
            let _end = End(ended);
            for turn in (0..).take_while(|_| going()) {
                let at = turn % stay.len();
                // From a slot to a record and back, and to a slot of another length.
                assert!(store.set(&stay[at], &value(at, turn / stay.len())).unwrap());
                let counter = &counters[turn % ADDS];
                store.add(counter, 3).unwrap();
                sum.fetch_add(3, Ordering::Relaxed);
                let now = store.get(counter).expect("there all the time");
                let next = (i64::from_le_bytes((*now).try_into().unwrap()) + 1000).to_le_bytes();
                swapped
                    .fetch_add(store.compare_swap(counter, Some(&now), Some(&next)).unwrap().into(), Ordering::Relaxed);
            }
        });
        let _end = End(ended);
        let buckets = || store.table.dir(SHARD, Ordering::Relaxed).buckets();
        let mut next = 1000;
        while going() && passes.iter().any(|passes| passes.load(Ordering::Relaxed) < wanted) {
            let (from, before) = (next, buckets());
            // Beyond the first growth, so that the shard becomes full in arrays of several lengths.
            while buckets() < before * 2 && next - from < 4000 {
                let key = key_at(store, number_of(next));
                if next % 2 == 0 {
                    store.set(&key, &key).unwrap();
                } else {
                    store.set_many(&[(key, &key[..3])]).unwrap();
                }
                store.add(&counters[next as usize % ADDS], 1).unwrap();
                sum.fetch_add(1, Ordering::Relaxed);
                next += 1;
            }
            for number in from..next {
                assert!(store.delete(&key_at(store, number_of(number))).unwrap());
            }
        }
    });
    let total: i64 = counters.iter().map(|key| store.add(key, 0).unwrap()).sum();
    assert_eq!(total, sum.load(Ordering::Relaxed) + 1000 * swapped.load(Ordering::Relaxed));
    assert_eq!(store.check().unwrap().entries, (stay.len() + ADDS) as u64);
}

#[test]
fn a_forked_child_cannot_change_what_another_thread_was_changing() {
    let store = &Options::new().ordered().private().unwrap();
    let hash = store.table.hasher.first(b"key");
    let (begun, go_on) = (&std::sync::Barrier::new(2), &std::sync::Barrier::new(2));
    let mut status = -1;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let stop = |_: Option<&[u8]>| {
                begun.wait();
                go_on.wait();
                Ok(Change::Keep)
            };
            store.modify(b"key", hash, stop).unwrap();
        });
        begun.wait();
        // SAFETY: the child reads memory, takes no lock of other threads and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: alarm takes no pointers; it ends the child if that waits for a thread that it does not have.
            unsafe { libc::alarm(60) };
            let forked = |error: Error| matches!(error, Error::Arena(arena::Error::Forked));
            let refused = store.set(b"key", b"1").is_err_and(forked)
                && store.insert(b"key", b"1").is_err_and(forked)
                && store.add(b"key", 1).is_err_and(forked)
                && store.delete(b"key").is_err_and(forked)
                && store.take(b"key").is_err_and(forked)
                && store.compare_swap(b"key", None, Some(b"1")).is_err_and(forked);
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        // SAFETY: waitpid writes only the status; the child was just forked.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        go_on.wait();
    });
    assert_eq!(status, 0);
}

/// A signal handler calls exit, as many do, while the thread that it interrupts holds a lock.
#[test]
fn exit_inside_a_call_is_recovered_like_a_death() {
    let shared = Shared::new("exit");
    let hash = shared.store.table.hasher.first(b"key");
    // SAFETY: the child opens the store anew and ends inside of it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let store = shared.again();
        let _call = arena::Call::begin();
        // SAFETY: nothing is registered to run at exit, and no other thread is there.
        let _ = store.table.modify(b"key", hash, |_| unsafe { libc::exit(0) });
    }
    let mut status = -1;
    // SAFETY: waits for the child just made; then ends the test if it waits for ever.
    unsafe {
        libc::waitpid(child, &raw mut status, 0);
        libc::alarm(60);
    }
    assert_eq!(status, 0);
    shared.store.set(b"key", b"value").unwrap();
    // SAFETY: waitpid writes only the status; the child was forked above.
    unsafe { libc::alarm(0) };
    assert_eq!((shared.store.stats().recovery_count, shared.store.stats().thread_count), (1, 1));
    assert_eq!(shared.store.check().unwrap().entries, 1);
}

#[test]
fn a_store_with_a_damaged_page_is_refused() {
    let outside = |word: u64| move |store: &Store, shard| store.table.dir_word(shard).store(word, Ordering::SeqCst);
    let locked = |word: u64| move |store: &Store, shard| store.table.lock_word(shard).store(word, Ordering::SeqCst);
    type Damage = Box<dyn Fn(&Store, usize)>;
    let damages: [(&str, Damage); 6] = [
        ("a directory of ones", Box::new(outside(!(1 << 52)))),
        ("buckets before the data", Box::new(outside(1 << 34 | 1))),
        ("buckets beyond the end", Box::new(outside((200_000 << 34) | (1 << 20)))),
        ("a lock of a free thread record", Box::new(locked(900 << 48))),
        ("a lock of no thread record", Box::new(locked(0xffff << 48))),
        ("more entries than room", Box::new(locked(1 << 30))),
    ];
    for (what, damage) in damages {
        let mut shared = Shared::new("damaged");
        shared.store.set(b"some key", b"1").unwrap();
        drop(shared.again());
        let shard = Spot::of(shared.store.table.hasher.first(b"some key")).shard;
        damage(&shared.store, shard);
        // Closed: the store here is another one from now on.
        shared.store = Store::new().unwrap();
        let opened = Options::new().open_existing_path(&shared.path).map(|_| ());
        assert!(matches!(opened, Err(Error::Arena(arena::Error::Damaged(_)))), "{what}: {opened:?}");
    }
}

#[test]
fn a_store_without_room_for_its_directory_is_refused() {
    let mut shared = Shared::new("rootless");
    shared.store = Store::new().unwrap();
    std::fs::remove_file(&shared.path).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(&shared.path).unwrap();
    let options = arena::Options { root_bytes: ROOT_HEAD, ..Options::new().limit_bytes(64 << 20).arena(0) };
    let arena = Arena::create(file, &options).unwrap();
    init_root(&arena, Hash::default()).unwrap();
    drop(arena);
    let opened = Options::new().open_existing_path(&shared.path).map(|_| ());
    assert!(matches!(opened, Err(Error::Arena(arena::Error::Damaged(_)))), "{opened:?}");
}

/// Reads a value, but lets another thread of the same store be quicker a few times.
struct Overtaken<'a> {
    store: &'a Store,
    key: &'a [u8],
    times: usize,
    value: Vec<u8>,
}

impl Sink for Overtaken<'_> {
    fn inline(&mut self, _bytes: [u8; 8], _length: usize) {}

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        self.times += 1;
        if self.times < 10 {
            self.store.set(self.key, &vec![self.times as u8; 1 << 20]).unwrap();
        }
        self.value.clear();
        record.copy_value(&mut self.value);
    }
}

#[test]
fn a_reader_of_a_long_value_retries_once() {
    let store = Options::new().limit_bytes(256 << 20).private().unwrap();
    store.set(b"long", &[0; 1 << 20]).unwrap();
    let mut sink = Overtaken { store: &store, key: b"long", times: 0, value: Vec::new() };
    assert!(store.table.read(b"long", store.table.hasher.first(b"long"), &mut sink));
    assert_eq!(sink.times, 2, "times that it began to copy");
    assert!(sink.value == vec![1; 1 << 20], "the value is not what it was at one instant");
}

#[test]
fn batched_lookups_do_not_touch_memory_that_the_callback_freed() {
    let shared = Shared::of("many", 256 << 20);
    let (store, other) = (&shared.store, &shared.again());
    for number in 0..1_000_000u64 {
        store.set(&number.to_le_bytes(), b"12345678").unwrap();
    }
    let blocks = || std::fs::metadata(&shared.path).unwrap().blocks();
    let keys: Vec<[u8; 8]> = (0..LOOKUPS as u64).map(u64::to_le_bytes).collect();
    let mut cleared = 0;
    store.get_many(&keys, |index, value| {
        if index == 0 {
            other.clear().unwrap();
            cleared = blocks();
        }
        assert_eq!(value.is_some(), index == 0);
    });
    assert!(cleared != 0 && blocks() == cleared, "{cleared} blocks became {}", blocks());
}

#[test]
fn a_store_is_opened_without_looking_at_its_blocks() {
    let mut shared = Shared::new("opened");
    for number in 0..100_000u32 {
        shared.store.set(&number.to_le_bytes(), &[1; 300]).unwrap();
    }
    // Drop this handle, so that the next one has the only mapping of the file.
    shared.store = Store::new().unwrap();
    let store = shared.again();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let path = shared.path.to_str().unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.ends_with(path));
    let resident = lines.find(|line| line.starts_with("Rss:")).unwrap();
    let kib: u64 = resident.split_whitespace().nth(1).unwrap().parse().unwrap();
    // Reading the bitmap of each span would fault in pages around it: more than a tenth of the store.
    // All of them are 30 MiB, and a page may be a huge one.
    assert!(kib < 10 << 10, "{kib} KiB were looked at");
    assert_eq!(store.len(), 100_000);
}

#[test]
fn a_store_larger_than_files_may_be_is_an_error() {
    let path = PathBuf::from(format!("/dev/shm/forrest-test-fsize-{}", std::process::id()));
    // SAFETY: the child opens a store of its own, for which it uses malloc, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
        // SAFETY: sets a timer of this process.
        unsafe { libc::alarm(60) };
        // SAFETY: passes a structure of ours.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
        let refused = Options::new().create_path(&path).is_err_and(|error| error.to_string().contains("ulimit -f"));
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!refused || path.exists())) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    let _ = std::fs::remove_file(&path);
    assert_eq!(status, 0);
}

#[test]
fn pages_of_freed_arrays_go_back_with_later_writes() {
    let shared = Shared::of("idle", 256 << 20);
    let store = &shared.store;
    let blocks = || std::fs::metadata(&shared.path).unwrap().blocks();
    let empty = blocks();
    for number in 0..500_000u64 {
        store.set(&number.to_le_bytes(), b"").unwrap();
    }
    // As quick deletes do, all within the moment for which pages stay; `Store::clear` would trim.
    let thread = store.table.thread().unwrap();
    (0..SHARDS).for_each(|shard| assert!(store.table.clear_shard(&thread, shard) < 500_000));
    assert!(store.is_empty());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // Free spans kept for the next claims, and the memory that this thread takes itself.
    while blocks() > empty + (8 << 20) / 512 {
        assert!(std::time::Instant::now() < deadline, "{} of 512 bytes stay, {empty} when it was empty", blocks());
        // No array goes with these.
        for number in 0..1000u64 {
            store.set(b"another", &number.to_le_bytes()).unwrap();
        }
    }
}

#[test]
fn memory_of_an_ended_thread_under_a_guard_is_reused_before_the_limit() {
    let store = Options::new().limit_bytes(64 << 20).private().unwrap();
    let value = vec![1; 34 << 20];
    store.set(b"large", &value).unwrap();
    let held = store.get_ref(b"large").unwrap();
    // The thread replaces the value and ends; the block that the guard reads stays retired in the thread's record.
    std::thread::scope(|scope| scope.spawn(|| store.set(b"large", b"small").unwrap()).join().unwrap());
    assert!(store.set(b"large", &value).is_err_and(|error| error.is_full()));
    assert!(*held == value[..]);
    drop(held);
    store.set(b"large", &value).unwrap();
}

#[test]
fn memory_of_an_ended_thread_under_a_guard_goes_back_by_trim() {
    let store = Options::new().limit_bytes(64 << 20).private().unwrap();
    store.set(b"large", &vec![1; 34 << 20]).unwrap();
    let held = store.get_ref(b"large").unwrap();
    std::thread::scope(|scope| scope.spawn(|| store.delete(b"large").unwrap()).join().unwrap());
    store.trim().unwrap();
    assert!(store.stats().held_bytes > 34 << 20 && held.iter().all(|&byte| byte == 1), "taken under a guard");
    drop(held);
    store.trim().unwrap();
    assert_eq!(store.stats().held_bytes, 0);
}

#[test]
fn a_full_shard_says_so_and_holds_what_it_can() {
    let store = Store::new().unwrap();
    let key = |number: u64| {
        let remainder = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12;
        store.table.hasher.word_of(Spot { shard: 3, remainder }.hash())
    };
    let refused = (0..2_200_000u64).map(|number| (number, store.set(&key(number), b"")));
    let (count, error) = refused.into_iter().find_map(|(number, set)| Some((number, set.err()?))).unwrap();
    assert!(error.is_full() && error.to_string().contains("Keyed"), "{error}");
    // Most of the 262,143 possible buckets of eight, whichever of them is full last.
    assert!(count > 1_900_000, "{count} entries");
    assert_eq!(store.len(), count);
    assert!((0..count).all(|number| store.contains(&key(number))));
    assert!(store.delete(&key(7)).unwrap());
    store.set(&key(7), b"").unwrap();
}

#[test]
fn keys_of_equal_hashes_do_not_take_all_memory() {
    let store = Store::new().unwrap();
    // All have the same two home buckets, whatever the length of the array.
    let key = |number: u64| store.table.hasher.word_of(Spot { shard: 3, remainder: number }.hash());
    let set = (0..100).take_while(|&number| store.set(&key(number), b"1").is_ok()).count() as u64;
    assert!((8..=2 * SLOTS as u64).contains(&set), "{set}");
    assert!(store.set(&key(set), b"1").is_err_and(|error| matches!(error, Error::Crowded { .. })));
    assert!((0..set).all(|number| store.contains(&key(number))));
    assert!(store.stats().held_bytes < 8 << 20, "{:?}", store.stats());
}
