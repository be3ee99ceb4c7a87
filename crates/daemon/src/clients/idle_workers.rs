//! Workers of idle priority, which compete like other threads while a request waits.
//!
//! On a busy machine the kernel may leave a thread of idle priority alone for seconds, also while it holds a lock: whatever needs the
//! lock would wait for all other programs.

use pagefold_os::sched::{self, Policy};
use pagefold_os::sync::lock;
use std::sync::Mutex;

/// The workers' threads, and how many requests wait.
#[derive(Debug, Default)]
pub(crate) struct IdleWorkers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    threads: Vec<i32>,
    requests: usize,
}

/// The calling thread, a worker for as long as this lives.
pub(crate) struct Worker<'a>(&'a IdleWorkers);

/// A request that may need locks of the workers', for as long as this lives.
pub(crate) struct Request<'a>(&'a IdleWorkers);

impl IdleWorkers {
    /// Makes the calling thread a worker of idle priority.
    pub(crate) fn join(&self) -> Worker<'_> {
        let mut state = lock(&self.0);
        state.threads.push(sched::thread());
        if state.requests == 0 {
            let _ = sched::set_policy(0, Policy::Idle);
        }
        Worker(self)
    }

    /// Has the workers run like other threads until what is returned is dropped. A user without `CAP_SYS_NICE` may not do that:
    /// the request waits then.
    pub(crate) fn hurry(&self) -> Request<'_> {
        let mut state = lock(&self.0);
        state.requests += 1;
        if state.requests == 1 {
            state.set(Policy::Ordinary);
        }
        Request(self)
    }
}

impl State {
    fn set(&self, policy: Policy) {
        self.threads.iter().for_each(|thread| {
            let _ = sched::set_policy(*thread, policy);
        });
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        let me = sched::thread();
        lock(&self.0.0).threads.retain(|thread| *thread != me);
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.0);
        state.requests -= 1;
        if state.requests == 0 {
            state.set(Policy::Idle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn policy_of(thread: i32) -> i32 {
        // SAFETY: returns a number.
        unsafe { libc::sched_getscheduler(thread) }
    }

    #[test]
    fn workers_are_idle_but_while_requests_wait() {
        // SAFETY: returns a number.
        if unsafe { libc::geteuid() } != 0 {
            return eprintln!("SKIPPED: needs CAP_SYS_NICE, as root has it");
        }
        let (workers, (tell, told), (end, ended)) = (IdleWorkers::default(), mpsc::channel(), mpsc::channel::<()>());
        std::thread::scope(|scope| {
            let first = &workers;
            scope.spawn(move || {
                let _worker = first.join();
                tell.send(sched::thread()).unwrap();
                let _ = ended.recv();
            });
            let thread = told.recv().unwrap();
            assert_eq!(policy_of(thread), libc::SCHED_IDLE);
            let one = workers.hurry();
            let other = workers.hurry();
            drop(one);
            assert_eq!(policy_of(thread), libc::SCHED_OTHER, "the other waits still");
            drop(other);
            assert_eq!(policy_of(thread), libc::SCHED_IDLE);
            // A worker that begins while a request waits competes for the lock, too.
            let request = workers.hurry();
            let late = scope.spawn(|| (workers.join(), policy_of(0)).1);
            assert_eq!(late.join().unwrap(), libc::SCHED_OTHER);
            drop(request);
            drop(end);
        });
        assert!(lock(&workers.0).threads.is_empty());
    }
}
