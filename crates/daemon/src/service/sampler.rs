//! Samples of the status, for graphs and for the waits of the last minutes: the past that a view begins with.

use crate::service::daemon::Daemon;
use crate::service::report;
use crate::status::Status;
use pagefold_os::fd;
use pagefold_os::sync::lock;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// Time between two samples, where the page takes none: long, for it is paid at rest too.
const INTERVAL: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(10) };

/// How long a client may keep a worker waiting until another takes that worker's place.
const WORKER_PATIENCE: Duration = Duration::from_secs(5);

/// The status now, which the history takes.
pub(super) fn sample(daemon: &Daemon) -> Status {
    let status = report::status(daemon);
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    lock(&daemon.history).push((time * 1e3).round() / 1e3, &status);
    status
}

/// Takes samples while there are clients, until the daemon stops, and has no client keep the workers waiting.
pub(super) fn follow(daemon: &Daemon) {
    while !daemon.is_stopping() {
        let mut polls = [libc::pollfd { fd: daemon.stopped.fd().raw(), events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut polls, INTERVAL.as_millis() as i32);
        daemon.live.replace_waiting_workers(WORKER_PATIENCE);
        let has_clients = !daemon.live.is_empty() || daemon.cold.is_in_use();
        if has_clients && !daemon.page_samples.load(Ordering::Relaxed) {
            sample(daemon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::domains::tests::connected;
    use crate::service::daemon::tests::daemon;
    use std::thread;

    #[test]
    fn the_past_grows_while_there_is_a_client() {
        let daemon = daemon();
        daemon.live.list(connected(std::process::id() as i32));
        let sampled = daemon.clone();
        let sampler = thread::spawn(move || follow(&sampled));
        let samples = || lock(&daemon.history).fine(None).len();
        for _ in 0..6000 {
            if samples() > 1 {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        assert!(samples() > 1, "no samples");
        daemon.stop();
        sampler.join().unwrap();
        daemon.live.end();
    }
}
