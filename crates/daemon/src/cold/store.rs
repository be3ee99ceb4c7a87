//! The threads that store: each batch is dealt out among them, while the agent is at work on the batches beside it.
//!
//! They live as long as a client's pages go out. Two threads for each batch of 128 pages cost a twelfth of what storing
//! it does, and came late where processors were busy.

use super::out::{Copied, Half};
use pagefold_tier::{Effort, Tier};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope};

/// Threads at most: the agent copies no faster than some can store.
const STORERS_MAX: usize = 8;

/// Pages whose words lie together in the tier: the business of one storer.
const TOGETHER: usize = 8;

/// A part of a batch.
struct Job {
    half: Arc<Half>,
    batch: Arc<Vec<Copied>>,
    part: Range<usize>,
    effort: Effort,
}

struct Storer {
    jobs: SyncSender<Job>,
    /// Whether each page of the part was stored.
    done: Receiver<Vec<bool>>,
}

impl Storer {
    fn start<'scope>(scope: &'scope Scope<'scope, '_>, tier: &'scope Tier, region: u32) -> io::Result<Storer> {
        let (jobs, to_do) = sync_channel::<Job>(1);
        let (say, done) = sync_channel(1);
        let store = move || {
            for Job { half, batch, part, effort } in to_do {
                let store = |one: &Copied| tier.store(region, one.page, half.page(one), effort).is_ok();
                let stored = batch[part].iter().map(store).collect();
                // Before it is said: whoever hears it takes the batch back.
                drop((half, batch));
                if say.send(stored).is_err() {
                    return;
                }
            }
        };
        Builder::new().spawn_scoped(scope, store).map(|_| Storer { jobs, done })
    }
}

/// The threads; they end when this is dropped.
pub(super) struct Storers(Vec<Storer>);

impl Storers {
    /// Starts one for each processor, or as many as there are to be had; `None` if that is none.
    pub(super) fn start<'scope>(scope: &'scope Scope<'scope, '_>, tier: &'scope Tier, region: u32) -> Option<Storers> {
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(STORERS_MAX);
        let storers: Vec<Storer> = (0..count).map_while(|_| Storer::start(scope, tier, region).ok()).collect();
        (!storers.is_empty()).then_some(Storers(storers))
    }

    /// Has a batch stored whose copies lie in `half`.
    pub(super) fn store(&self, half: Half, batch: Vec<Copied>, effort: Effort) -> Storing<'_> {
        let len = batch.len().div_ceil(self.0.len()).next_multiple_of(TOGETHER).max(TOGETHER);
        let (half, batch) = (Arc::new(half), Arc::new(batch));
        let parts = (0..batch.len()).step_by(len).map(|from| from..(from + len).min(batch.len()));
        let busy: Vec<&Storer> = self
            .0
            .iter()
            .zip(parts)
            .map(|(storer, part)| {
                let job = Job { half: half.clone(), batch: batch.clone(), part, effort };
                storer.jobs.send(job).expect("a storer ends after us");
                storer
            })
            .collect();
        Storing { half, batch, busy }
    }
}

/// A batch that is being stored.
pub(super) struct Storing<'a> {
    half: Arc<Half>,
    batch: Arc<Vec<Copied>>,
    busy: Vec<&'a Storer>,
}

impl Storing<'_> {
    /// Waits for its end; returns what was given, and which pages were stored.
    pub(super) fn wait(self) -> (Half, Vec<Copied>, Vec<bool>) {
        let done = |storer: &Storer| storer.done.recv().expect("a storer ends after us");
        let stored = self.busy.into_iter().flat_map(done).collect();
        let back = "no storer has it any more";
        (Arc::into_inner(self.half).expect(back), Arc::into_inner(self.batch).expect(back), stored)
    }
}
