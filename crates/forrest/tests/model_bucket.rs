//! Every interleaving of a reader with a writer on one bucket, or on an entry's two home buckets, by loom, on the code of
//! `src/bucket.rs` itself.
//!
//! The reader takes the steps of `Table::read_as`, the writer those of `Table::put`, `Table::delete` and
//! `Table::move_entry`; the writers' lock is left out, since there is one writer.

#[allow(dead_code)]
#[path = "../src/bucket.rs"]
mod bucket;

/// Stands for `src/primitive.rs`.
mod primitive {
    pub use loom::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
}

use bucket::{Bucket, SlotKind};
use loom::sync::Arc;
use loom::sync::atomic::{Ordering, fence};
use loom::thread;

const OLD: u64 = 0x1_2222_3333_4444;
const NEW: u64 = 0x9_8888_7777_6666;

/// A lookup; `None` when what was read changed meanwhile and the reader must start over.
fn look_in(buckets: &[&Bucket], remainder: u64) -> Option<Option<u64>> {
    let heads: Vec<_> = buckets.iter().map(|bucket| bucket.head(Ordering::Acquire)).collect();
    for (bucket, &head) in buckets.iter().zip(&heads) {
        let mask = bucket.matches(head, remainder);
        if mask != 0 {
            let slot = mask.trailing_zeros() as usize;
            let (mark, value) = (bucket.mark(slot), bucket.words[slot].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let unchanged = bucket.head(Ordering::Relaxed) == head;
            assert!(!unchanged || mark.fits(remainder), "the mark of another entry");
            return unchanged.then_some(Some(value));
        }
    }
    fence(Ordering::Acquire);
    let unchanged = buckets.iter().zip(&heads).all(|(bucket, &head)| bucket.head(Ordering::Relaxed) == head);
    unchanged.then_some(None)
}

fn look(bucket: &Bucket, remainder: u64) -> Option<Option<u64>> {
    look_in(&[bucket], remainder)
}

fn insert(bucket: &Bucket, remainder: u64, value: u64) {
    let head = bucket.head(Ordering::Relaxed);
    fence(Ordering::Release);
    bucket.fill(head.free_slot(), SlotKind::inline(8), remainder, value);
    bucket.head.store(head.filled().0, Ordering::Release);
}

fn delete(bucket: &Bucket, slot: usize) {
    bucket.head.store(bucket.head(Ordering::Relaxed).without(slot).0, Ordering::Release);
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
        bucket.fill(1, SlotKind::RECORD, OLD, 2);
        bucket.head.store(head.with(1).without(0).0, Ordering::Release);
        reader.join().unwrap();
        assert_eq!(look(&bucket, OLD), Some(Some(2)));
    });
}

/// Moves the entry from one home bucket to the other while a reader looks for it, which reads either one first.
fn moves(look_for: fn(&[&Bucket]) -> Option<Option<u64>>) {
    for from in 0..2 {
        loom::model(move || {
            let buckets = [Arc::new(Bucket::empty()), Arc::new(Bucket::empty())];
            insert(&buckets[from], OLD, 1);
            let reading = buckets.clone();
            let reader = thread::spawn(move || {
                let found = look_for(&[&*reading[0], &*reading[1]]);
                assert!(found != Some(None), "the key was there all the time");
                assert!(found.is_none_or(|value| value == Some(1)));
            });
            insert(&buckets[1 - from], OLD, 1);
            delete(&buckets[from], 0);
            reader.join().unwrap();
        });
    }
}

#[test]
fn a_move_between_home_buckets_is_never_missed() {
    moves(|buckets| look_in(buckets, OLD));
}

/// Checking each bucket separately is not enough: the test above can fail.
#[test]
#[should_panic(expected = "the key was there all the time")]
fn a_reader_that_reads_one_bucket_after_the_other_is_caught() {
    moves(|buckets| match (look(buckets[0], OLD), look(buckets[1], OLD)) {
        (Some(Some(value)), _) | (_, Some(Some(value))) => Some(Some(value)),
        (Some(None), Some(None)) => Some(None),
        _ => None,
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
            if reading.matches(head, OLD) == 1 {
                assert_eq!(reading.words[0].load(Ordering::Relaxed), 1, "mixture");
            }
        });
        delete(&bucket, 0);
        insert(&bucket, NEW, 2);
        reader.join().unwrap();
    });
}
