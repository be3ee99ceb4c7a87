//! Stop points: places inside a change where a test can hold a thread.
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
type StopHook = Box<dyn Fn(Point)>;

#[cfg(all(test, not(loom)))]
thread_local! {
    /// Called by this thread at every stop point.
    pub(super) static STOP: std::cell::RefCell<Option<StopHook>> = const { std::cell::RefCell::new(None) };
}

#[inline(always)]
pub(super) fn stop_here(_point: Point) {
    #[cfg(all(test, not(loom)))]
    STOP.with(|stop| {
        if let Some(stop) = stop.borrow().as_ref() {
            stop(_point);
        }
    });
}
