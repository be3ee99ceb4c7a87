//! Every interleaving of a reader with a writer on one bucket, by loom, on the code of `src/bucket.rs` itself.
//!
//! The reader takes the steps of `Table::read_as`, the writer those of `Table::put` and `Table::delete`; the writers'
//! lock is left out, since there is one writer.

#[allow(dead_code)]
#[path = "../src/bucket.rs"]
mod bucket;

/// Stands for `src/primitive.rs`.
mod primitive {
    pub use loom::sync::atomic::{AtomicU64, Ordering};
}

use bucket::{Bucket, Kind};
use loom::sync::Arc;
use loom::sync::atomic::{Ordering, fence};
use loom::thread;

const OLD: u64 = 0x1_2222_3333_4444;
const NEW: u64 = 0x9_8888_7777_6666;

/// A lookup; `None` when the bucket changed meanwhile and the reader must start over.
fn look(bucket: &Bucket, remainder: u64) -> Option<Option<u64>> {
    let head = bucket.head(Ordering::Acquire);
    let mut mask = bucket.matches(remainder);
    while mask != 0 {
        let slot = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        if head.kind(slot) == Kind::EMPTY || head.extra(slot) != remainder >> 48 {
            continue;
        }
        let value = bucket.words[slot].load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        return (bucket.head(Ordering::Relaxed) == head).then_some(Some(value));
    }
    fence(Ordering::Acquire);
    (bucket.head(Ordering::Relaxed) == head).then_some(None)
}

fn insert(bucket: &Bucket, remainder: u64, value: u64) {
    let head = bucket.head(Ordering::Relaxed);
    let slot = head.free_slot().unwrap();
    fence(Ordering::Release);
    bucket.fill(slot, remainder, value);
    bucket.head.store(head.with_entry(slot, Kind::inline(8), remainder).next().0, Ordering::Release);
}

fn delete(bucket: &Bucket, slot: usize) {
    let head = bucket.head(Ordering::Relaxed).with_kind(slot, Kind::EMPTY).next();
    bucket.head.store(head.0, Ordering::Release);
}

fn bucket_with_old() -> Arc<Bucket> {
    let bucket = Bucket::empty();
    insert(&bucket, OLD, 1);
    Arc::new(bucket)
}

#[test]
fn a_reused_slot_never_gives_its_new_value_to_the_old_key() {
    loom::model(|| {
        let bucket = bucket_with_old();
        let reading = bucket.clone();
        let reader = thread::spawn(move || {
            if let Some(found) = look(&reading, OLD) {
                assert!(found == Some(1) || found.is_none(), "the old key has the new key's value: {found:?}");
            }
            if let Some(found) = look(&reading, NEW) {
                assert!(found == Some(2) || found.is_none(), "the new key has the old key's value: {found:?}");
            }
        });
        delete(&bucket, 0);
        insert(&bucket, NEW, 2);
        reader.join().unwrap();
        assert_eq!((look(&bucket, OLD), look(&bucket, NEW)), (Some(None), Some(Some(2))));
    });
}

#[test]
fn an_entry_that_changes_its_kind_is_never_missed() {
    loom::model(|| {
        let bucket = bucket_with_old();
        let reading = bucket.clone();
        let reader = thread::spawn(move || {
            if let Some(found) = look(&reading, OLD) {
                assert!(found == Some(1) || found == Some(2), "the key was there all the time: {found:?}");
            }
        });
        // As `put` does when the kind changes: a copy in another slot, and both switched by one store.
        let head = bucket.head(Ordering::Relaxed);
        fence(Ordering::Release);
        bucket.fill(1, OLD, 2);
        let head = head.with_entry(1, Kind::RECORD, OLD).with_kind(0, Kind::EMPTY).next();
        bucket.head.store(head.0, Ordering::Release);
        reader.join().unwrap();
        assert_eq!(look(&bucket, OLD), Some(Some(2)));
    });
}

#[test]
fn a_move_between_buckets_is_never_missed() {
    loom::model(|| {
        // Home, and the bucket after it; the entry moves from the second into the home bucket.
        let home = Arc::new(Bucket::empty());
        let next = bucket_with_old();
        let (home_read, next_read) = (home.clone(), next.clone());
        let reader = thread::spawn(move || {
            let before = home_read.head(Ordering::Acquire);
            let found = match (look(&home_read, OLD), look(&next_read, OLD)) {
                (Some(Some(value)), _) | (_, Some(Some(value))) => Some(value),
                (Some(None), Some(None)) => None,
                _ => return,
            };
            fence(Ordering::Acquire);
            if found.is_none() && home_read.head(Ordering::Relaxed) == before {
                panic!("the key was there all the time");
            }
        });
        insert(&home, OLD, 1);
        delete(&next, 0);
        reader.join().unwrap();
    });
}

/// Without the second look at the header the model finds the mixture: the test above can fail.
#[test]
#[should_panic(expected = "mixture")]
fn a_reader_that_does_not_look_again_is_caught() {
    loom::model(|| {
        let bucket = bucket_with_old();
        let reading = bucket.clone();
        let reader = thread::spawn(move || {
            let head = reading.head(Ordering::Acquire);
            if reading.matches(OLD) & 1 == 1 && head.kind(0) != Kind::EMPTY {
                assert_eq!(reading.words[0].load(Ordering::Relaxed), 1, "mixture");
            }
        });
        delete(&bucket, 0);
        insert(&bucket, NEW, 2);
        reader.join().unwrap();
    });
}
