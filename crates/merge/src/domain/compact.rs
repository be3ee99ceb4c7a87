//! Compaction: merged pages are moved out of segments that should go.
//!
//! A segment keeps all its memory while any slot of it is shared. So a segment of mostly dead slots is *retired*: its slots
//! get no more sharers. Each client gets its pages of it back as plain memory, in its own period; two periods later they
//! are candidates, find their twins, and share slots of the segment that is being filled. With its last sharer the
//! segment goes. A client with pages that cannot be moved (they may be pinned) ends the attempt, and the segment stays in
//! use.
//!
//! Segments of an earlier daemon that could not be [inherited](super::inherit) are emptied in the same way, a window of
//! slots at a time: their sharers can then share with others again, and the books know them.

use super::Domain;
use super::index_entry::IndexEntry;
use super::listed_ranges::within;
use super::member::{Member, Work};
use crate::client::{Gone, PoolMapping};
use pagefold_os::sync::{lock, read};
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_pool::{Fingerprint, SLOTS_PER_SEGMENT, Slot};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_SIZE as u64;

/// Periods of each client that the pool must be wasteful, for new slots are dead until their pages are mapped.
const WASTEFUL_PERIODS: usize = 4;
/// Periods that each client gets to move its pages out of a segment.
const EMPTYING_PERIODS: usize = 8;
/// The same out of a window.
const WINDOW_PERIODS: usize = 2;
/// Slots of an earlier daemon's segment that are left at a time: 2 MiB of every client that shares them become plain
/// memory for some periods.
const WINDOW: u32 = 512;

/// How far compaction is.
#[derive(Debug, Default)]
pub(super) struct Compaction {
    from: Option<Emptied>,
    /// While one is emptied: clients' periods left for it. Without: those in a row in which the pool was wasteful.
    periods: usize,
    /// Windows that were left as far as they could be.
    tried: BTreeSet<(u64, u32)>,
}

/// Where pages are moved away from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Emptied {
    /// A retired segment.
    Segment(u32),
    /// Slots of a segment that is not ours: inode, number of the window.
    Window(u64, u32),
}

impl Domain {
    /// Moves the client's pages out of a segment that is being emptied, if there is one.
    pub(super) fn compact_pool(&self, work: &mut Work) -> Result<(), Gone> {
        let Some(emptied) = self.emptied(work) else { return Ok(()) };
        let (inode, slots, may_show) = match emptied {
            Emptied::Segment(segment) => {
                let counts = work.table.counts();
                (self.pool.segment_inode(segment), 0..SLOTS_PER_SEGMENT, counts.shared + counts.broken > 0)
            }
            Emptied::Window(inode, window) => {
                let shows = work.foreign.iter().any(|mapping| mapping.inode == inode);
                (Some(inode), window * WINDOW..(window + 1) * WINDOW, shows)
            }
        };
        // While it rests the kernel refuses this client mappings, and moving needs some.
        if work.is_resting() || !may_show {
            return Ok(());
        }
        let Some(mappings) = self.pool_mappings(work)? else { return Ok(()) };
        // Whole mappings, broken pages and all: what stayed would cost mappings, and keep the file.
        let ours = mappings.iter().filter(|mapping| Some(mapping.inode) == inode);
        let ranges = ours.map(|mapping| shown(mapping, &slots)).filter(|range| !range.is_empty());
        let pieces: Vec<Range> = ranges.flat_map(|range| within(range, &mappings)).collect();
        if pieces.is_empty() {
            return Ok(());
        }
        let moved = self.heal(work, &pieces)?;
        self.count(|c| &c.pages_compacted, moved);
        self.mark_index_dirty();
        Ok(())
    }

    /// What is being emptied; chooses one when it is time.
    fn emptied(&self, work: &Work) -> Option<Emptied> {
        let (clients, paused) = {
            let members = read(&self.members);
            let keeps =
                |member: &Member| member.paused.load(Ordering::Acquire) && lock(&member.stats).pages_sharing > 0;
            (members.len(), members.values().any(|member| keeps(member)))
        };
        let mut compaction = lock(&self.compaction);
        if let Some(from) = compaction.from {
            let is_there = match from {
                Emptied::Segment(segment) => self.pool.segment_inode(segment).is_some(),
                Emptied::Window(..) => true,
            };
            if is_there && compaction.periods > 0 {
                compaction.periods -= 1;
                return Some(from);
            }
            match from {
                Emptied::Segment(segment) => self.keep(segment),
                Emptied::Window(inode, window) => {
                    compaction.tried.insert((inode, window));
                }
            }
            compaction.from = None;
            compaction.periods = WASTEFUL_PERIODS * clients;
        }
        // A paused client that has pages to move moves none; and while pages are looked up, slots are about to be shared.
        // A client with lent memory moves none either. But a client says that of itself, so it must not hold up the others.
        let at_rest = !paused && self.indexing.load(Ordering::Acquire) == 0;
        let wasteful = self.pool.wasteful(self.config.dead_slots_min);
        compaction.periods = if wasteful.is_some() { compaction.periods + 1 } else { 0 };
        let from = match wasteful {
            _ if !at_rest => None,
            Some(segment) if compaction.periods > WASTEFUL_PERIODS * clients => {
                self.pool.retire(segment);
                self.list_instead_of_retired();
                compaction.periods = EMPTYING_PERIODS * clients;
                Some(Emptied::Segment(segment))
            }
            _ => {
                // What can still be taken in is not moved.
                let mut windows = windows(&work.foreign).filter(|_| !work.not_inherited.waits());
                let window = windows.find(|window| !compaction.tried.contains(window));
                window.map(|(inode, window)| {
                    compaction.periods = WINDOW_PERIODS * clients;
                    Emptied::Window(inode, window)
                })
            }
        };
        compaction.from = from;
        from
    }

    /// Offers a retired segment's slots again: entries of theirs may have gone, and pages with their content come as
    /// candidates in the meantime.
    fn keep(&self, segment: u32) {
        let mut notices = Vec::new();
        self.pool.keep(segment, |slot, page| notices.extend(self.offer(slot, page)));
        self.notify_owners(&notices);
    }

    /// Has the index lead to `slot` for pages that equal `page`, its content. Returns what the owner of a candidate with
    /// that content is to be told.
    pub(super) fn offer(&self, slot: Slot, page: &Page) -> Option<(IndexEntry, Option<Slot>)> {
        self.offer_as(self.key.fingerprint(page), slot)
    }

    /// The same by the fingerprint of the content.
    pub(super) fn offer_as(&self, fingerprint: Fingerprint, slot: Slot) -> Option<(IndexEntry, Option<Slot>)> {
        let mine = IndexEntry::Slot(slot).value();
        // Where the index is full, this slot gets no new sharers.
        let Ok(Some(found)) = self.index.get_or_insert(fingerprint, mine) else { return None };
        match IndexEntry::from_value(found) {
            IndexEntry::Slot(other) if other == slot => None,
            IndexEntry::Slot(_) | IndexEntry::Claimed => {
                self.note_unlisted(fingerprint, slot);
                None
            }
            entry @ IndexEntry::Candidate { .. } => {
                self.index.replace(fingerprint, found, mine).then_some((entry, Some(slot)))
            }
        }
    }
}

/// The windows that the mappings show.
fn windows(foreign: &[PoolMapping]) -> impl Iterator<Item = (u64, u32)> {
    foreign.iter().flat_map(|mapping| {
        let last = mapping.index + (mapping.range.pages() as u32).saturating_sub(1);
        (mapping.index / WINDOW..=last / WINDOW).map(|window| (mapping.inode, window))
    })
}

/// The part of a mapping that shows these slots.
fn shown(mapping: &PoolMapping, slots: &std::ops::Range<u32>) -> Range {
    let pages = mapping.range.pages() as u32;
    let at = |slot: u32| mapping.range.start + u64::from(slot.saturating_sub(mapping.index).min(pages)) * PAGE;
    Range { start: at(slots.start), end: at(slots.end) }
}
