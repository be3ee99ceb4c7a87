//! Waiting for a step of an entry, which another process takes.

use std::thread;
use std::time::{Duration, Instant};

/// How long the borrowed thread, and then the agent, may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Waits until `done` says something, for as long as a step may take.
pub(crate) fn wait_until<T>(done: impl FnMut() -> Option<T>) -> Option<T> {
    wait_for(PATIENCE, done)
}

pub(crate) fn wait_for<T>(patience: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(what) = done() {
            return Some(what);
        }
        if began.elapsed() > patience {
            return None;
        }
        thread::sleep(Duration::from_micros(200));
    }
}
