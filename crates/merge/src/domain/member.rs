//! A client in a domain, and what the worker that has it in hand works on.

use super::not_inherited::NotInherited;
use super::{ClientId, EDGES, Managed};
use crate::client::{Client, PoolMapping};
use crate::plan::PageRun;
use crate::stats::ClientStats;
use crate::table::Table;
use pagefold_os::Range;
use pagefold_os::sync::lock;
use pagefold_pool::{Hold, Slot};
use pagefold_protocol::message::RefusalReason;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

/// A client in the domain.
pub(super) struct Member {
    pub(super) id: ClientId,
    pub(super) work: Mutex<Work>,
    /// What others found out about its candidates: the slot that a page shall show; none where it is to be looked up again.
    pub(super) notices: Mutex<Vec<(u64, Option<Slot>)>>,
    /// Mappings that this client's merged runs use, plus those its deferred runs will need. Other clients read it without a
    /// lock to decide whether a shared slot pays off; it may be stale.
    pub(super) mappings_claimed: AtomicI64,
    pub(super) due_ns: AtomicU64,
    /// The processor of its last step, plus one; 0 if unknown.
    pub(super) cpu: AtomicU64,
    pub(super) paused: AtomicBool,
    /// The cold tier has its plain memory for a while.
    pub(super) lent: AtomicBool,
    pub(super) gone: AtomicBool,
    /// It has pages that were not looked up yet.
    pub(super) indexing: AtomicBool,
    pub(super) stats: Mutex<ClientStats>,
    pub(super) managed: Mutex<Managed>,
}

impl Member {
    /// Returns true if nothing is to be done for it now. The worker that holds its lock sees every pause that ended before.
    pub(super) fn is_at_rest(&self) -> bool {
        self.paused.load(Ordering::Acquire) || self.lent.load(Ordering::Acquire)
    }

    /// The notices that have come.
    pub(super) fn take_notices(&self) -> Vec<(u64, Option<Slot>)> {
        std::mem::take(&mut *lock(&self.notices))
    }
}

/// What the worker that has the client in hand works on.
pub(super) struct Work {
    pub(super) client: Box<dyn Client>,
    pub(super) table: Table,
    pub(super) generation: Option<u64>,
    pub(super) period: u64,
    pub(super) next_period_ns: u64,
    /// Mappings that merging added, estimated; set right whenever the real ones are listed.
    pub(super) mappings: i64,
    /// Mappings of pool segments that are not this daemon's.
    pub(super) foreign: Vec<PoolMapping>,
    /// Ranges that were healed before the table had them: they are protected already, so no look will tell of them.
    pub(super) healed_unknown: Vec<Range>,
    /// Why they are not.
    pub(super) not_inherited: NotInherited,
    /// Chunks of huge pages to be probed in this period, the first last.
    pub(super) probes: Vec<u64>,
    /// Short runs that wait until all runs of this pass are known: the longest go first.
    pub(super) deferred: Vec<PageRun>,
    /// Mappings that they will add, about.
    pub(super) deferred_mappings: i64,
    /// Period in which the first of them came.
    pub(super) deferred_since: u64,
    /// Segments, by number, with slots that were published for runs that wait: they are kept until these are merged.
    pub(super) held_segments: BTreeMap<u32, Hold>,
    /// Merging rests until this period: the kernel refused a mapping.
    pub(super) rest_until: u64,
    /// Period since which pages with a twin stayed private because there are no mappings left for them.
    pub(super) left_out_since: Option<u64>,
    /// Broken pages are not healed before this period: the last time the budget of mappings did not allow all.
    pub(super) heal_from: u64,
    /// What the last look found out: nothing, and nothing has been done since.
    pub(super) idle: Option<Idle>,
    /// Selects the open segment for its slots: that of the worker on this client.
    pub(super) lane: usize,
    /// Pages per fetch: small after a hit (the rest is predicted), larger after misses.
    pub(super) block: usize,
    pub(super) cow_breaks: u64,
    pub(super) refused: BTreeMap<RefusalReason, u64>,
}

/// A client in which the last scan changed nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    /// Its page faults before that scan.
    pub(super) faults: u64,
    /// Scans that may still be skipped.
    pub(super) left: u32,
}

impl Work {
    /// Lets short runs wait.
    pub(super) fn defer(&mut self, runs: Vec<PageRun>) {
        if self.deferred.is_empty() {
            self.deferred_since = self.period;
        }
        for run in runs {
            // Neighbours have an edge in common.
            let joins = self.deferred.last().is_some_and(|last| last.range.end == run.range.start);
            self.deferred_mappings += if joins { 1 } else { EDGES };
            self.deferred.push(run);
        }
    }

    /// The short runs that waited.
    pub(super) fn take_deferred(&mut self) -> Vec<PageRun> {
        self.deferred_mappings = 0;
        std::mem::take(&mut self.deferred)
    }

    /// Notes that pages with a twin stay private because there are no mappings left for them.
    pub(super) fn leave_out(&mut self) {
        self.left_out_since.get_or_insert(self.period);
    }

    /// True while merging rests because the kernel refused a mapping.
    pub(super) fn is_resting(&self) -> bool {
        self.period < self.rest_until
    }
}
