//! Copied batches are stored a few pages at a time, in order: by workers that live as long as an eviction, and by the thread
//! that talks to the agent, whenever the agent has nothing left to do.
//!
//! A free thread takes the next pages, so no thread waits for another that shares its processor with other work. The agent
//! and the thread that talks to it never work at the same moment: with a worker for each other processor every processor has
//! one thread.

use super::batch::Copied;
use crate::cold::idle::waking::Wakings;
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Page};
use pagefold_protocol::channel::Channel;
use pagefold_tier::{Effort, Tier};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, Scope};

/// Most workers: the agent copies no faster than so many store.
const STORERS_MAX: usize = 8;

/// Pages that a worker takes at a time: a multiple of the number with words that lie together in the tier.
const TOGETHER: usize = 16;

/// Copied pages that are being stored.
pub(crate) struct Batch {
    pages: Vec<Copied>,
    effort: Effort,
    stored: Vec<AtomicBool>,
    /// Pages that are not done yet.
    left: AtomicUsize,
}

impl Batch {
    /// The pages that were stored; one that was refused stays where it is.
    fn into_stored(self: Arc<Batch>) -> Vec<Copied> {
        let stored = self.pages.iter().zip(&self.stored).filter(|(_, stored)| stored.load(Ordering::Relaxed));
        stored.map(|(one, _)| *one).collect()
    }
}

/// Some pages of a batch.
struct Job {
    batch: Arc<Batch>,
    part: Range<usize>,
}

#[derive(Default)]
struct Queue {
    /// Batches of which pages wait, and the first of those.
    batches: VecDeque<(Arc<Batch>, usize)>,
    /// No more pages come, or a worker is gone.
    is_over: bool,
}

/// What the transfer and its workers share.
#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    to_do: Condvar,
    done: Condvar,
}

impl Queue {
    fn take(&mut self) -> Option<Job> {
        let (batch, next) = self.batches.front_mut()?;
        let part = *next..(*next + TOGETHER).min(batch.pages.len());
        *next = part.end;
        let batch = batch.clone();
        if part.end == batch.pages.len() {
            self.batches.pop_front();
        }
        Some(Job { batch, part })
    }
}

impl Shared {
    /// The next pages to store, when there are some; `None` if none will come.
    fn take(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.is_over {
                return None;
            }
            if let Some(job) = queue.take() {
                return Some(job);
            }
            queue = self.to_do.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self) {
        lock(&self.queue).is_over = true;
        self.to_do.notify_all();
        self.done.notify_all();
    }
}

/// Ends the work of all threads when its own thread panics: none must wait for it.
struct Watch<'a>(&'a Shared);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end();
        }
    }
}

/// Where copies go.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub tier: &'a Tier,
    pub client_id: u32,
    pub channel: &'a Channel,
    /// What the client touches first when it wakes comes back soonest.
    pub wakings: &'a Wakings,
}

impl Target<'_> {
    /// Stores the copy of a page, by way of `buffer`; false if it is refused.
    pub(crate) fn store(&self, one: &Copied, buffer: &mut Page, effort: Effort) -> bool {
        self.channel.read_page(one.place as usize, buffer);
        let is_awaited = effort == Effort::Fast && self.wakings.remembers(one.page);
        self.tier.store(self.client_id, one.page, buffer, if is_awaited { Effort::Ready } else { effort }).is_ok()
    }

    fn perform(&self, shared: &Shared, job: Job, buffer: &mut Page) {
        let Job { batch, part } = job;
        let len = part.len();
        for (one, stored) in batch.pages[part.clone()].iter().zip(&batch.stored[part]) {
            stored.store(self.store(one, buffer, batch.effort), Ordering::Relaxed);
        }
        if batch.left.fetch_sub(len, Ordering::AcqRel) == len {
            // Under the lock: a thread that has just looked is asleep by now, and is woken.
            drop(lock(&shared.queue));
            shared.done.notify_one();
        }
    }
}

/// The threads; they end when this is dropped.
pub(crate) struct CompressWorkers<'a> {
    shared: Arc<Shared>,
    target: Target<'a>,
    buffer: Box<Page>,
}

impl<'a> CompressWorkers<'a> {
    /// Starts a worker for each processor but the caller's, or as many as the kernel grants.
    pub(crate) fn start<'scope>(scope: &'scope Scope<'scope, '_>, target: Target<'a>) -> CompressWorkers<'a>
    where
        'a: 'scope,
    {
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(STORERS_MAX) - 1;
        let shared = Arc::new(Shared::default());
        let start = |_: &usize| {
            let shared = shared.clone();
            Builder::new().spawn_scoped(scope, move || work(&shared, target)).is_ok()
        };
        let _ = (0..count).take_while(start).count();
        CompressWorkers { shared, target, buffer: Box::new([0; PAGE_SIZE]) }
    }

    /// Queues copied pages to be stored.
    pub(crate) fn store(&self, pages: Vec<Copied>, effort: Effort) -> Arc<Batch> {
        let stored = pages.iter().map(|_| AtomicBool::new(false)).collect();
        let batch = Arc::new(Batch { left: AtomicUsize::new(pages.len()), pages, effort, stored });
        if !batch.pages.is_empty() {
            lock(&self.shared.queue).batches.push_back((batch.clone(), 0));
            self.shared.to_do.notify_all();
        }
        batch
    }

    /// Stores until a batch is done; returns the pages of it that were stored.
    pub(crate) fn finish(&mut self, batch: Arc<Batch>) -> Vec<Copied> {
        let mut queue = lock(&self.shared.queue);
        while batch.left.load(Ordering::Acquire) > 0 {
            assert!(!queue.is_over, "a worker ended before its time");
            if let Some(job) = queue.take() {
                drop(queue);
                self.target.perform(&self.shared, job, &mut self.buffer);
                queue = lock(&self.shared.queue);
            } else {
                queue = self.shared.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
        drop(queue);
        batch.into_stored()
    }
}

impl Drop for CompressWorkers<'_> {
    fn drop(&mut self) {
        self.shared.end();
    }
}

fn work(shared: &Shared, target: Target<'_>) {
    let _watch = Watch(shared);
    let mut buffer = Box::new([0; PAGE_SIZE]);
    while let Some(job) = shared.take() {
        target.perform(shared, job, &mut buffer);
    }
}
