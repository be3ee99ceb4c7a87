//! The handle of a group's prefetcher: a thread that brings back halves of fault windows, beside the clients' own threads.
//!
//! `threads` runs it.

use pagefold_os::sched::{self, Cpus};
use pagefold_os::sync::lock;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};

/// Pages of a client to bring back.
pub(crate) struct Job {
    pub(crate) client_id: u32,
    pub(crate) pages: Range<u64>,
}

/// The handle of a prefetcher thread.
pub(crate) struct Prefetcher {
    jobs: SyncSender<Job>,
    /// The number of the thread; 0 before it runs.
    thread: AtomicI32,
    /// Where the thread may run, and the part of that to which it was bound last.
    allowed_and_bound: Mutex<[Cpus; 2]>,
    /// The processor that the thread keeps off, plus one.
    kept_off: AtomicU64,
}

impl Prefetcher {
    /// Makes the handle, and the end at which the thread receives jobs.
    pub(crate) fn new() -> (Prefetcher, Receiver<Job>) {
        // Without a buffer: the thread takes a job at the moment it is offered, or not at all.
        let (jobs, end) = mpsc::sync_channel(0);
        let cpus = Cpus::of_thread().unwrap_or(Cpus::NONE);
        let (thread, kept_off) = Default::default();
        (Prefetcher { jobs, thread, allowed_and_bound: Mutex::new([cpus; 2]), kept_off }, end)
    }

    /// The calling thread is the prefetcher.
    pub(crate) fn set_thread(&self) {
        self.thread.store(sched::thread(), Ordering::Relaxed);
    }

    /// Has pages of a client brought back; false if the prefetcher is busy.
    pub(crate) fn offer(&self, client_id: u32, pages: Range<u64>) -> bool {
        self.move_off_this_cpu();
        self.jobs.try_send(Job { client_id, pages }).is_ok()
    }

    /// Moves the prefetcher to another processor than the caller's. The caller goes on working there, and a prefetcher that
    /// wakes on the same processor might wait for it.
    fn move_off_this_cpu(&self) {
        let (Some(here), thread) = (sched::cpu(), self.thread.load(Ordering::Relaxed)) else { return };
        if thread == 0 || self.kept_off.swap(here + 1, Ordering::Relaxed) == here + 1 {
            return;
        }
        let mut allowed_and_bound = lock(&self.allowed_and_bound);
        let [allowed, bound] = &mut *allowed_and_bound;
        if let Ok(now) = Cpus::of(thread)
            && now != *bound
        {
            // Another process has set its affinity meanwhile: that holds.
            *allowed = now;
        }
        allowed.bind_off(here, thread);
        *bound = Cpus::of(thread).unwrap_or(*allowed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_affinity_that_another_process_sets_is_kept() {
        let (prefetcher, _) = Prefetcher::new();
        let all = Cpus::of_thread().expect("a set");
        let mut cpus = all.iter();
        let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
            return eprintln!("SKIPPED: one processor only");
        };
        let from = |cpu: u64| {
            Cpus::one(cpu).expect("a processor").bind_thread().expect("allowed");
            prefetcher.move_off_this_cpu();
        };
        std::thread::scope(|scope| {
            let ((tell, told), (end, ended)) = (mpsc::channel(), mpsc::channel::<()>());
            scope.spawn(move || {
                tell.send(sched::thread()).expect("it listens");
                let _ = ended.recv();
            });
            let thread = told.recv().expect("its number");
            prefetcher.thread.store(thread, Ordering::Relaxed);
            let now = || Cpus::of(thread).expect("a set");
            for cpu in [first, second, first] {
                from(cpu);
                assert_eq!(now(), all.without(cpu));
            }
            let one = Cpus::one(first).expect("a processor");
            one.bind(thread).expect("allowed");
            for cpu in [second, first, second] {
                from(cpu);
                assert_eq!(now(), one, "it went where it may not run any more");
            }
            drop(end);
        });
    }
}
