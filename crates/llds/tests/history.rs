//! Recorded histories of concurrent operations are checked for linearizability: there must be an
//! order of all operations, each somewhere between its call and its return, in which every answer is
//! the one a plain map would have given.
//!
//! Keys are independent in a map, so each key's history is checked alone (Herlihy and Wing's locality),
//! by Wing and Gong's search with Lowe's memory of visited states.

#![cfg(not(loom))]

use fastrand::Rng;
use llds::b_tree::BTree;
use llds::sd_tree::{SdTree, SweepCursor};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Get,
    /// Store unless there.
    Offer(u64),
    /// Store, and give what was there.
    Put(u64),
    /// Remove whatever is there.
    Take,
    /// Remove if it is this.
    Remove(u64),
    /// Replace the one by the other.
    Replace(u64, u64),
}

#[derive(Clone, Copy, Debug)]
struct Event {
    key: u64,
    call: Call,
    /// The value that came back; for `Remove` and `Replace` 1 for yes.
    answer: Option<u64>,
    began: u64,
    ended: u64,
}

/// What a plain map of one key answers, and holds afterwards.
fn apply(state: Option<u64>, call: Call) -> (Option<u64>, Option<u64>) {
    match call {
        Call::Get => (state, state),
        Call::Offer(value) => (state, state.or(Some(value))),
        Call::Put(value) => (state, Some(value)),
        Call::Take => (state, None),
        Call::Remove(value) if state == Some(value) => (Some(1), None),
        Call::Replace(old, new) if state == Some(old) => (Some(1), Some(new)),
        Call::Remove(_) | Call::Replace(..) => (None, state),
    }
}

/// Tells whether the events of one key have an order.
fn is_linearizable(events: &[Event]) -> bool {
    fn search(
        events: &[Event],
        done: &mut Vec<u64>,
        state: Option<u64>,
        left: usize,
        seen: &mut HashSet<(Vec<u64>, Option<u64>)>,
    ) -> bool {
        if left == 0 {
            return true;
        }
        if !seen.insert((done.clone(), state)) {
            return false;
        }
        let open = |done: &[u64], at: usize| done[at / 64] >> (at % 64) & 1 == 0;
        let horizon =
            (0..events.len()).filter(|&at| open(done, at)).map(|at| events[at].ended).min().expect("some left");
        for at in 0..events.len() {
            // Only what began before every open event ended can be next.
            if events[at].began > horizon {
                break;
            }
            if !open(done, at) {
                continue;
            }
            let (answer, next) = apply(state, events[at].call);
            if answer == events[at].answer {
                done[at / 64] |= 1 << (at % 64);
                if search(events, done, next, left - 1, seen) {
                    return true;
                }
                done[at / 64] &= !(1 << (at % 64));
            }
        }
        false
    }
    let mut sorted = events.to_vec();
    sorted.sort_by_key(|event| event.began);
    let mut done = vec![0; sorted.len().div_ceil(64)];
    search(&sorted, &mut done, None, sorted.len(), &mut HashSet::new())
}

/// Lets threads work on few keys, records their calls and answers, and checks every key's history.
fn check_histories(
    rounds: u64,
    choose: impl Fn(u64, u64) -> Call + Sync,
    perform: impl Fn(u64, Call) -> Option<u64> + Sync,
) {
    const THREADS: u64 = 4;
    const KEYS: u64 = 6;
    let clock = AtomicU64::new(0);
    let events: Vec<Event> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (clock, choose, perform) = (&clock, &choose, &perform);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(thread + 1);
                    let mut events = Vec::new();
                    for round in 0..rounds {
                        let key = random.u64(..KEYS);
                        let call = choose(random.u64(..), (round * THREADS + thread) % 3 + 1);
                        let began = clock.fetch_add(1, Ordering::SeqCst);
                        let answer = perform(key, call);
                        let ended = clock.fetch_add(1, Ordering::SeqCst);
                        events.push(Event { key, call, answer, began, ended });
                    }
                    events
                })
            })
            .collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    });
    for key in 0..KEYS {
        let history: Vec<_> = events.iter().copied().filter(|event| event.key == key).collect();
        // The search is as deep as the history is long.
        let checker = std::thread::Builder::new().stack_size(1 << 28);
        let orderly = checker.spawn(move || is_linearizable(&history)).unwrap().join().unwrap();
        assert!(orderly, "no order explains the history of key {key}");
    }
}

/// Keys of one bucket and its children: they differ in the bits after the bucket's.
fn close(key: u64) -> u64 {
    0x12 << 56 | key << 53 | 0x55_5555
}

#[test]
fn sd_tree_histories_have_an_order() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Growth and sweeps run beside them: other keys are inserted and removed.
        scope.spawn(|| {
            let mut random = Rng::with_seed(99);
            let mut cursor = SweepCursor::new();
            while !stop.load(Ordering::Relaxed) {
                for value in 100..140 {
                    let _ = tree.get_or_insert(0x12 << 56 | random.u64(..) >> 8, value);
                    let _ = tree.get_or_insert(random.u64(..), 50);
                }
                tree.retain(&mut cursor, 600, |value| value < 100);
            }
        });
        check_histories(
            8_000,
            |random, value| match random % 8 {
                0..=2 => Call::Offer(value),
                3 => Call::Remove(value),
                4 => Call::Replace(value, value % 3 + 1),
                _ => Call::Get,
            },
            |key, call| match call {
                Call::Get => tree.get_with(close(key), |value| value < 4),
                Call::Offer(value) => tree.get_or_insert_with(close(key), value, |value| value < 4).unwrap(),
                Call::Remove(value) => tree.remove(close(key), value).then_some(1),
                Call::Replace(old, new) => tree.replace(close(key), old, new).then_some(1),
                Call::Put(_) | Call::Take => unreachable!("not chosen"),
            },
        );
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn b_tree_histories_have_an_order() {
    let tree = BTree::<u64>::new().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Splits and merges run beside them: neighbours are inserted and removed.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for key in 0..600 {
                    tree.insert_or_replace(key * 10 + 1, key).unwrap();
                }
                for key in 0..600 {
                    tree.remove(key * 10 + 1);
                }
            }
        });
        check_histories(
            8_000,
            |random, value| match random % 8 {
                0 => Call::Offer(value),
                1..=2 => Call::Put(value),
                3..=4 => Call::Take,
                _ => Call::Get,
            },
            |key, call| match call {
                Call::Get => tree.get(key * 500),
                Call::Offer(value) => tree.get_or_insert(key * 500, value).unwrap(),
                Call::Put(value) => tree.insert_or_replace(key * 500, value).unwrap(),
                Call::Take => tree.remove(key * 500),
                Call::Remove(_) | Call::Replace(..) => unreachable!("not chosen"),
            },
        );
        stop.store(true, Ordering::Relaxed);
    });
}

/// The checker itself: it must refuse what no order explains.
#[test]
fn impossible_histories_are_refused() {
    let event = |call, answer, began, ended| Event { key: 0, call, answer, began, ended };
    let stale =
        [event(Call::Offer(1), None, 0, 1), event(Call::Remove(1), Some(1), 2, 3), event(Call::Get, Some(1), 4, 5)];
    assert!(!is_linearizable(&stale), "a value read after its removal");
    let overlapping =
        [event(Call::Offer(1), None, 0, 1), event(Call::Remove(1), Some(1), 2, 5), event(Call::Get, Some(1), 3, 4)];
    assert!(is_linearizable(&overlapping), "but while the removal runs it may be seen");
    let twice = [event(Call::Offer(1), None, 0, 5), event(Call::Offer(2), None, 1, 4)];
    assert!(!is_linearizable(&twice), "two winners");
}
