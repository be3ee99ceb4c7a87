//! Recorded histories of threads that use few keys are explained by some order of one operation after the other that
//! respects real time: each operation took effect at one instant.
//!
//! Wing and Gong's search, per key: operations on different keys do not interfere.

use forrest::{Hash, Options, Store};
use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Debug, PartialEq)]
enum Call {
    Get(Option<Vec<u8>>),
    Set(Vec<u8>, bool),
    Insert(Vec<u8>, bool),
    Take(Option<Vec<u8>>),
    Delete(bool),
    Swap(Option<Vec<u8>>, Option<Vec<u8>>, bool),
}

#[derive(Clone, Debug)]
struct Event {
    begin: u64,
    end: u64,
    call: Call,
}

/// What the call makes of `state`, if it answers as recorded.
fn step(call: &Call, state: &Option<Vec<u8>>) -> Option<Option<Vec<u8>>> {
    match call {
        Call::Get(seen) => (seen == state).then(|| state.clone()),
        Call::Set(value, existed) => (*existed == state.is_some()).then(|| Some(value.clone())),
        Call::Insert(value, done) if *done == state.is_none() => {
            Some(if *done { Some(value.clone()) } else { state.clone() })
        }
        Call::Insert(..) => None,
        Call::Take(taken) => (taken == state).then_some(None),
        Call::Delete(existed) => (*existed == state.is_some()).then_some(None),
        Call::Swap(expected, new, done) if *done == (expected == state) => {
            Some(if *done { new.clone() } else { state.clone() })
        }
        Call::Swap(..) => None,
    }
}

fn is_linearizable(events: &[Event]) -> bool {
    assert!(events.len() < 64);
    let mut seen: HashSet<(u64, Option<Vec<u8>>)> = HashSet::new();
    let mut stack = vec![(0u64, None)];
    while let Some((done, state)) = stack.pop() {
        if done.count_ones() as usize == events.len() {
            return true;
        }
        let left = || (0..events.len()).filter(|index| done & 1 << index == 0);
        let first_end = left().map(|index| events[index].end).min().unwrap();
        for index in left().filter(|&index| events[index].begin <= first_end) {
            if let Some(next) = step(&events[index].call, &state) {
                let next = (done | 1 << index, next);
                if seen.insert(next.clone()) {
                    stack.push(next);
                }
            }
        }
    }
    false
}

/// A value that no other operation writes, of a length that makes entries change between slot and record.
fn value(random: &mut fastrand::Rng, unique: u64) -> Vec<u8> {
    let length = [3, 8, 8, 20, 150][random.usize(..5)];
    unique.to_le_bytes().iter().copied().cycle().take(length).collect()
}

fn record(store: &Store, threads: usize, rounds: u64, seed: u64) {
    const KEYS: usize = 3;
    const EACH: usize = 9;
    let clock = AtomicU64::new(0);
    let barrier = Barrier::new(threads);
    for round in 0..rounds {
        let key = |index: usize| -> Vec<u8> {
            let number = round * 8 + index as u64;
            if index == 2 { format!("key number {number}").into_bytes() } else { number.to_le_bytes().to_vec() }
        };
        let histories: Vec<Vec<(usize, Event)>> = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|thread| {
                    let (clock, barrier, key) = (&clock, &barrier, &key);
                    scope.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(seed ^ (round << 20) ^ ((thread as u64 + 1) << 50));
                        let mut history = Vec::new();
                        barrier.wait();
                        for at in 0..EACH as u64 {
                            let index = random.usize(..KEYS);
                            let name = key(index);
                            // Three bytes must tell values apart.
                            let new =
                                value(&mut random, (thread as u64 + 1) << 8 | at << 4 | (round & 15) | round << 16);
                            let kind = random.u64(..11);
                            let expected = if kind == 7 { store.get(&name).map(|v| v.to_vec()) } else { None };
                            let begin = clock.fetch_add(1, Ordering::SeqCst);
                            if kind == 8 {
                                // Each lookup of a batch takes effect at some instant of it.
                                let keys: Vec<_> = (0..KEYS).map(key).collect();
                                let mut calls = Vec::new();
                                store.get_many(&keys, |index, found| {
                                    calls.push((index, Call::Get(found.map(<[u8]>::to_vec))));
                                });
                                let end = clock.fetch_add(1, Ordering::SeqCst);
                                let event = |(index, call)| (index, Event { begin, end, call });
                                history.extend(calls.into_iter().map(event));
                                continue;
                            }
                            let call = match kind {
                                0..3 => Call::Get(store.get(&name).map(|found| found.to_vec())),
                                3 => Call::Get(store.get_ref(&name).map(|found| found.to_vec())),
                                4 => {
                                    let existed = store.set(&name, &new).unwrap();
                                    Call::Set(new, existed)
                                }
                                5 => {
                                    let done = store.insert(&name, &new).unwrap();
                                    Call::Insert(new, done)
                                }
                                6 => Call::Take(store.take(&name).unwrap()),
                                9 => Call::Delete(store.delete(&name).unwrap()),
                                10 => {
                                    let done = store.compare_swap(&name, None, Some(&new)).unwrap();
                                    Call::Swap(None, Some(new), done)
                                }
                                _ => {
                                    let done = store.compare_swap(&name, expected.as_deref(), Some(&new)).unwrap();
                                    Call::Swap(expected, Some(new), done)
                                }
                            };
                            let end = clock.fetch_add(1, Ordering::SeqCst);
                            history.push((index, Event { begin, end, call }));
                            // Neighbours of the keys, so that arrays grow and shrink meanwhile.
                            let neighbour = |at: u64| (1 << 60 | round << 32 | (thread as u64) << 8 | at).to_be_bytes();
                            let other = neighbour(at);
                            if at % 2 == 0 {
                                store.set(&other, &other).unwrap();
                            } else {
                                store.delete(&neighbour(at - 1)).unwrap();
                            }
                        }
                        history
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        for index in 0..KEYS {
            let events: Vec<Event> =
                histories.iter().flatten().filter(|one| one.0 == index).map(|one| one.1.clone()).collect();
            assert!(is_linearizable(&events), "round {round}, key {index}, seed {seed}: {events:#?}");
        }
    }
}

#[test]
fn histories_of_a_private_store_are_linearizable() {
    record(&Store::new().unwrap(), 3, 500, 0x1234_5678_9abc_def1);
    record(&Options::new().hash(Hash::Keyed).private().unwrap(), 4, 150, 0x0fed_cba9_8765_4321);
}

#[test]
fn the_checker_tells_a_wrong_history() {
    let event = |begin, end, call| Event { begin, end, call };
    let (a, b) = (b"a".to_vec(), b"b".to_vec());
    // A read that ends before a write begins cannot see it.
    assert!(!is_linearizable(&[event(0, 1, Call::Get(Some(a.clone()))), event(2, 3, Call::Set(a.clone(), false))]));
    assert!(is_linearizable(&[event(0, 3, Call::Get(Some(a.clone()))), event(1, 2, Call::Set(a.clone(), false))]));
    // A value that was overwritten does not come back.
    assert!(!is_linearizable(&[
        event(0, 1, Call::Set(a.clone(), false)),
        event(2, 3, Call::Set(b.clone(), true)),
        event(4, 5, Call::Get(Some(a))),
    ]));
    assert!(!is_linearizable(&[event(0, 1, Call::Insert(b.clone(), true)), event(2, 3, Call::Insert(b, true))]));
}
