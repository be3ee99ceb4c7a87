//! Every order in which threads may share, let go and release.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pagefold-pool --test loom --release`

#![cfg(loom)]

use loom::thread;
use pagefold_os::PAGE_SIZE;
use pagefold_pool::{Pool, Published, SEGMENT_LEN, SLOTS_PER_SEGMENT, Slot};
use std::sync::Arc;

fn publish(pool: &Pool) -> Published {
    let published = pool.publish(&[&[7; PAGE_SIZE]; SLOTS_PER_SEGMENT as usize]).unwrap();
    assert_eq!(published.taken, SLOTS_PER_SEGMENT as usize);
    published
}

fn pool() -> (Arc<Pool>, Slot) {
    let pool = Pool::new("loom", SEGMENT_LEN as u64);
    let slot = publish(&pool).first;
    (Arc::new(pool), slot)
}

/// A page that was just published can be shared, even if another worker releases segments meanwhile.
#[test]
fn a_held_segment_is_never_released() {
    loom::model(|| {
        let pool = Arc::new(Pool::new("loom", SEGMENT_LEN as u64));
        let releaser = {
            let pool = pool.clone();
            thread::spawn(move || pool.release(0, |_, _| {}))
        };
        let published = publish(&pool);
        assert!(pool.add_sharers(published.first, 1), "let go before it was shared");
        drop(published.hold);
        assert!(!releaser.join().unwrap());
        pool.remove_sharer(published.first);
        assert!(pool.release(0, |_, _| {}), "nobody shares it any more");
    });
}

/// A worker with a share keeps the segment until it returns the share; a worker without one has counted nothing.
#[test]
fn a_shared_segment_is_never_released() {
    loom::model(|| {
        let (pool, slot) = pool();
        let sharer = {
            let pool = pool.clone();
            thread::spawn(move || {
                let shared = pool.add_sharers(slot, 1);
                if shared {
                    assert!(pool.published_from(slot) > 0, "let go while it is shared");
                    assert_eq!(pool.sharers(slot), 1);
                    pool.remove_sharer(slot);
                }
                shared
            })
        };
        let released = pool.release(slot.segment(), |_, _| {});
        let shared = sharer.join().unwrap();
        assert!(released || shared, "one of them came first");
        let stats = pool.stats();
        assert_eq!((stats.pages_sharing, stats.pages_shared), (0, 0));
        assert_eq!(stats.segments, u64::from(!released));
        assert!(released || pool.release(slot.segment(), |_, _| {}), "nobody shares it any more");
    });
}

#[test]
fn a_segment_is_let_go_once() {
    loom::model(|| {
        let (pool, slot) = pool();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.release(slot.segment(), |_, _| {}))
        };
        let here = pool.release(slot.segment(), |_, _| {});
        let there = other.join().unwrap();
        assert!(here != there, "exactly one of two lets go");
        let stats = pool.stats();
        assert_eq!((stats.segments, stats.segments_released, stats.slots_published), (0, 1, 0));
    });
}

/// The last share goes while a new one comes and a third thread wants the segment gone.
#[test]
fn counts_are_exact_when_shares_come_and_go() {
    loom::model(|| {
        let (pool, slot) = pool();
        assert!(pool.add_sharers(slot, 1));
        let leaver = {
            let pool = pool.clone();
            thread::spawn(move || pool.remove_sharer(slot))
        };
        let releaser = {
            let pool = pool.clone();
            thread::spawn(move || pool.release(slot.segment(), |_, _| {}))
        };
        let shared = pool.add_sharers(slot, 1);
        leaver.join().unwrap();
        let released = releaser.join().unwrap();
        assert!(shared != released, "a new share keeps the segment, or it is gone");
        assert_eq!(pool.sharers(slot), u32::from(shared));
        let stats = pool.stats();
        assert_eq!((stats.pages_sharing, stats.pages_shared), (u64::from(shared), u64::from(shared)));
    });
}
