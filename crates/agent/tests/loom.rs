//! The mapping lock in every order of two threads and the agent.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pagefold-agent --test loom --release`

#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::thread;
use pagefold_agent::mapping_lock::MappingLock;
use std::sync::Arc;

/// What the mapping lock protects; loom objects if two touch it at once, or if one does not see what the other did.
struct Protected {
    mapping_lock: MappingLock,
    changes: UnsafeCell<u32>,
}

// SAFETY: the cell is touched only while the mapping lock is held; that this excludes races is what the model checks.
unsafe impl Sync for Protected {}

impl Protected {
    fn change(&self) {
        // SAFETY: the mapping lock is held by the caller.
        self.changes.with_mut(|changes| unsafe { *changes += 1 });
    }
}

fn protected() -> Arc<Protected> {
    Arc::new(Protected { mapping_lock: MappingLock::new(), changes: UnsafeCell::new(0) })
}

#[test]
fn program_and_agent_exclude_each_other() {
    loom::model(|| {
        let shared = protected();
        let agent = {
            let shared = shared.clone();
            thread::spawn(move || {
                let held = shared.mapping_lock.lock_serving(1, || {});
                shared.change();
                drop(held);
            })
        };
        {
            let _held = shared.mapping_lock.lock(2);
            shared.change();
        }
        agent.join().unwrap();
        let _held = shared.mapping_lock.lock(2);
        // SAFETY: the mapping lock is held.
        assert_eq!(shared.changes.with(|changes| unsafe { *changes }), 2);
    });
}

/// A signal handler that interrupts its own thread inside the mapping lock passes through; the mapping lock stays held until
/// the outer frame lets go.
#[test]
fn the_owner_passes_and_others_wait_for_the_outer_frame() {
    loom::model(|| {
        let shared = protected();
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                if let Some(_held) = shared.mapping_lock.try_lock(3) {
                    shared.change();
                }
            })
        };
        {
            let _outer = shared.mapping_lock.lock(2);
            shared.change();
            drop(shared.mapping_lock.lock(2));
            assert!(shared.mapping_lock.try_lock(2).is_some(), "the owner always passes");
            shared.change();
        }
        other.join().unwrap();
        assert!(shared.mapping_lock.try_lock(4).is_some(), "it is free in the end");
    });
}

/// fork(2) takes the mapping lock in one frame and frees it in another.
#[test]
fn a_forgotten_guard_is_freed_by_its_owner_only() {
    loom::model(|| {
        let shared = protected();
        std::mem::forget(shared.mapping_lock.lock(2));
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                // Not the owner: nothing happens.
                shared.mapping_lock.unlock_forgotten(3);
                let _held = shared.mapping_lock.lock(3);
                shared.change();
            })
        };
        shared.change();
        shared.mapping_lock.unlock_forgotten(2);
        other.join().unwrap();
        // SAFETY: the other thread has ended.
        assert_eq!(shared.changes.with(|changes| unsafe { *changes }), 2);
    });
}

/// A handler that forks in the middle of an interposed call undoes its own hold, not that of the frame it interrupted.
#[test]
fn a_forgotten_guard_of_an_inner_frame_leaves_the_outer_one() {
    loom::model(|| {
        let shared = protected();
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                let _held = shared.mapping_lock.lock(3);
                shared.change();
            })
        };
        {
            let outer = shared.mapping_lock.lock(2);
            shared.change();
            std::mem::forget(shared.mapping_lock.lock(2));
            shared.mapping_lock.unlock_forgotten(2);
            shared.change();
            assert!(!outer.is_nested());
        }
        other.join().unwrap();
        let _held = shared.mapping_lock.lock(2);
        // SAFETY: the mapping lock is held.
        assert_eq!(shared.changes.with(|changes| unsafe { *changes }), 3);
    });
}
