//! The second hand of a group: brings back halves of windows beside the clients' own threads.

use crate::cold::Group;
use crate::cold::client::CLUSTER_PAGES;
use pagefold_os::PAGE_SIZE;
use pagefold_os::sched::{self, Cpus};
use pagefold_os::sync::lock;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Mutex, Weak};

/// Pages of a client that the second hand shall bring back.
pub(crate) struct Job {
    region: u32,
    pages: Range<u64>,
}

/// The way to the second hand.
pub(crate) struct Hand {
    jobs: SyncSender<Job>,
    /// Its thread; 0 before it runs.
    thread: AtomicI32,
    /// Where it may run, and where it was sent out of these.
    places: Mutex<[Cpus; 2]>,
    /// The processor that it keeps off, plus one.
    off: AtomicU64,
}

impl Hand {
    /// Makes the way, and its end.
    pub fn new() -> (Hand, Receiver<Job>) {
        // Without a place: a job is taken by a hand that waits for one, or not at all.
        let (jobs, end) = mpsc::sync_channel(0);
        let cpus = Cpus::of_thread().unwrap_or(Cpus::NONE);
        (Hand { jobs, thread: AtomicI32::new(0), places: Mutex::new([cpus; 2]), off: AtomicU64::new(0) }, end)
    }

    /// Has pages of a client brought back; false if the hand is not free.
    pub fn give(&self, region: u32, pages: Range<u64>) -> bool {
        self.keep_off();
        self.jobs.try_send(Job { region, pages }).is_ok()
    }

    /// Sends the hand to another processor than the caller's, who goes on working: woken here, it might well wait here.
    fn keep_off(&self) {
        let (Some(here), thread) = (sched::cpu(), self.thread.load(Ordering::Relaxed)) else { return };
        if thread == 0 || self.off.swap(here + 1, Ordering::Relaxed) == here + 1 {
            return;
        }
        let mut places = lock(&self.places);
        let [home, sent] = &mut *places;
        if let Ok(now) = Cpus::of(thread)
            && now != *sent
        {
            // Whoever has said meanwhile where it may run means it.
            *home = now;
        }
        home.bind_off(here, thread);
        *sent = Cpus::of(thread).unwrap_or(*home);
    }

    /// The hand's thread: works until the group is gone.
    pub fn run(jobs: &Receiver<Job>, group: &Weak<Group>) {
        if let Some(group) = group.upgrade() {
            group.hand.thread.store(sched::thread(), Ordering::Relaxed);
        }
        let mut buffer = vec![[0; PAGE_SIZE]; CLUSTER_PAGES];
        while let Ok(Job { region, pages }) = jobs.recv() {
            let Some(group) = group.upgrade() else { return };
            let client = lock(&group.clients).get(&region).cloned();
            if let Some(client) = client {
                client.bring_ahead(&group.tier, pages, &mut buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_else_says_of_the_hand_stands() {
        let (hand, _) = Hand::new();
        let all = Cpus::of_thread().expect("a set");
        let mut cpus = all.iter();
        let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
            return eprintln!("SKIPPED: one processor only");
        };
        let from = |cpu: u64| {
            Cpus::one(cpu).expect("a processor").bind_thread().expect("allowed");
            hand.keep_off();
        };
        std::thread::scope(|scope| {
            let ((tell, told), (end, ended)) = (mpsc::channel(), mpsc::channel::<()>());
            scope.spawn(move || {
                tell.send(sched::thread()).expect("it listens");
                let _ = ended.recv();
            });
            let thread = told.recv().expect("its number");
            hand.thread.store(thread, Ordering::Relaxed);
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
