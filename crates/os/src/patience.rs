//! Reading of a process that may keep its reader waiting.
//!
//! Much of what /proc tells of a process is read under the lock of its memory. While one of its threads waits there for a
//! server of files that does not answer, so does each reader.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// What `read` returns; `None` if that takes longer than `patience`. A thread of its own goes on with it then, and drops the
/// result.
pub fn within<T: Send + 'static>(patience: Duration, read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = mpsc::sync_channel(1);
    thread::Builder::new().name("look".into()).spawn(move || tell.send(read())).ok()?;
    told.recv_timeout(patience).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_is_kept_waiting_is_left() {
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        let (go_on, waits) = mpsc::channel::<()>();
        assert_eq!(within(Duration::from_millis(10), move || waits.recv().is_ok()), None);
        drop(go_on);
    }
}
