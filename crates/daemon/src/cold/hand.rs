//! The second hand of a group: brings back halves of windows beside the clients' own threads.

use super::Group;
use super::client::CLUSTER_PAGES;
use crate::server::lock;
use pagefold_os::PAGE_SIZE;
use pagefold_os::sched::{self, Cpus};
use std::ops::Range;
use std::sync::Weak;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};

/// Pages of a client that the second hand shall bring back.
pub(super) struct Job {
    region: u32,
    pages: Range<u64>,
}

/// The way to the second hand.
pub(super) struct Hand {
    jobs: SyncSender<Job>,
    /// Its thread; 0 before it runs.
    thread: AtomicI32,
    /// Where it may run.
    cpus: Cpus,
    /// The processor that it keeps off, plus one.
    off: AtomicU64,
}

impl Hand {
    /// Makes the way, and its end.
    pub fn new() -> (Hand, Receiver<Job>) {
        // Without a place: a job is taken by a hand that waits for one, or not at all.
        let (jobs, end) = mpsc::sync_channel(0);
        let cpus = Cpus::of_thread().unwrap_or(Cpus::NONE);
        (Hand { jobs, thread: AtomicI32::new(0), cpus, off: AtomicU64::new(0) }, end)
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
        self.cpus.bind_off(here, thread);
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
