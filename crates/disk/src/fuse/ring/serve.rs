//! The threads: one for each processor's queue, and workers for requests that may wait.
//!
//! A queue's thread answers what is in memory by itself, on the processor of the caller: the kernel changes from the caller
//! to it and back, and wakes no other processor. Everything else goes to a worker, so that a read from the disk delays
//! no other request. The worker returns the answered entry, because only the queue's thread may submit.

use super::dispatch::{Access, answer, answer_quickly};
use super::queue::{Queue, Slot, Waker};
use crate::fuse::file_system::DiskFs;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;

/// What all threads of a session share.
pub(super) struct Shared {
    pub(super) fs: Arc<DiskFs>,
    pub(super) access: Access,
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    ended: bool,
}

/// A request for a worker, and where its entry returns.
struct Job {
    slot: Slot,
    returns: Arc<Returns>,
}

/// Answered entries on their way back to their queue.
struct Returns {
    slots: Mutex<Vec<Slot>>,
    waker: Arc<Waker>,
}

impl Shared {
    pub(super) fn new(fs: Arc<DiskFs>, access: Access) -> Self {
        Self { fs, access, jobs: Mutex::default(), more: Condvar::new() }
    }

    /// Answers the requests of a queue until the connection has ended.
    ///
    /// # Panics
    /// The kernel refuses the ring's calls. That ends the process, and with it all waits for answers.
    pub(super) fn serve(&self, mut queue: Queue) {
        let returns = Arc::new(Returns { slots: Mutex::default(), waker: queue.waker() });
        let (mut ready, mut with_workers) = (Vec::new(), 0);
        while queue.in_kernel() + with_workers > 0 {
            queue.wait(&mut ready).expect("the kernel serves its ring");
            for mut slot in ready.drain(..) {
                let (header, payload) = slot.parts();
                if answer_quickly(&self.fs, self.access, header, payload) {
                    queue.commit(slot);
                } else {
                    with_workers += 1;
                    self.jobs.lock().waiting.push_back(Job { slot, returns: returns.clone() });
                    self.more.notify_one();
                }
            }
            for slot in std::mem::take(&mut *returns.slots.lock()) {
                with_workers -= 1;
                queue.commit(slot);
            }
        }
    }

    /// A worker: answers requests until [`Shared::end`].
    pub(super) fn work(&self) {
        while let Some(Job { mut slot, returns }) = self.next_job() {
            let (header, payload) = slot.parts();
            answer(&self.fs, self.access, header, payload);
            let is_first = {
                let mut slots = returns.slots.lock();
                slots.push(slot);
                slots.len() == 1
            };
            if is_first {
                returns.waker.wake();
            }
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            match jobs.waiting.pop_front() {
                None if !jobs.ended => self.more.wait(&mut jobs),
                job => return job,
            }
        }
    }

    /// Ends the workers, after all queues have ended.
    pub(super) fn end(&self) {
        self.jobs.lock().ended = true;
        self.more.notify_all();
    }
}
