//! Sync points: places inside a change where a test can hold a thread.
//!
//! They lie between the steps that other threads must be able to finish. Outside
//! of tests they compile to nothing.

/// Places where a test can stop a thread to show that no other thread waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(all(test, not(loom))), allow(dead_code))]
pub(super) enum Point {
    /// A slot is claimed and not yet written.
    Claimed,
    /// A slot is written and not yet committed.
    Written,
    /// A node is marked as moving and has no link yet.
    Moving,
    /// The link is in place, the control word not yet changed.
    Linked,
    /// A bucket is frozen and nothing of it copied.
    Frozen,
    /// One half of a bucket is copied.
    HalfCopied,
}

#[cfg(all(test, not(loom)))]
type SyncHook = Box<dyn Fn(Point)>;

#[cfg(all(test, not(loom)))]
thread_local! {
    /// Called by this thread at every sync point.
    pub(super) static SYNC: std::cell::RefCell<Option<SyncHook>> = const { std::cell::RefCell::new(None) };
}

#[inline(always)]
pub(super) fn sync_here(_point: Point) {
    #[cfg(all(test, not(loom)))]
    SYNC.with(|stop| {
        if let Some(stop) = stop.borrow().as_ref() {
            stop(_point);
        }
    });
}
