//! Mappings of the pool that this domain did not make: what a client shows when it comes.
//!
//! A forked child shows its parent's slots. A program that outlived its daemon, or its domain, shows slots of an earlier
//! pool. The kernel's tables are the record of that, so nothing has to be saved: each mapping names its file and the place
//! in it, the page table tells pages that were written since from the others. The file is opened again,
//! [checked](Pool::inherit) and its slots are fingerprinted, once; from then on they are slots like all others.
//!
//! [`Pool::inherit`]: pagefold_pool::Pool::inherit

use super::Domain;
use super::listed_ranges::clip;
use super::member::Work;
use crate::client::{Gone, PoolMapping};
use crate::page::PageState;
use pagefold_os::page::is_zero;
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_pool::{Hold, Refused, Slot};
use std::collections::{BTreeMap, BTreeSet};

impl Domain {
    /// Enters pool mappings into the ledger that this domain did not make.
    ///
    /// Mappings of segments that cannot be taken in stay shared, by the kernel, until compaction comes to them. Of those
    /// only the broken pages are ours to heal.
    pub(super) fn adopt(&self, work: &mut Work, mappings: &[PoolMapping]) -> Result<(), Gone> {
        // Segments that were taken in here, until their sharers are counted, and those that cannot be.
        let mut tried: BTreeMap<u64, Result<Hold, Refused>> = BTreeMap::new();
        work.foreign.clear();
        work.not_inherited.begin();
        for mapping in mappings {
            let segment = match (self.pool.segment_of_inode(mapping.inode), tried.get(&mapping.inode)) {
                (Some(segment), _) => Ok(segment),
                (None, Some(Err(why))) => Err(Some(*why)),
                _ => {
                    let inherited = self.inherit(work, mapping);
                    let segment = inherited.as_ref().map(Hold::segment).map_err(|why| *why);
                    match inherited {
                        Ok(hold) => _ = tried.insert(mapping.inode, Ok(hold)),
                        Err(Some(why)) => _ = tried.insert(mapping.inode, Err(why)),
                        // By another of its mappings it may be opened.
                        Err(None) => {}
                    }
                    segment
                }
            };
            match segment {
                Ok(segment) => self.adopt_mapping(work, mapping, segment)?,
                Err(why) => {
                    self.mark_broken(work, mapping.range)?;
                    work.foreign.push(*mapping);
                    work.not_inherited.note(mapping.range.pages(), why);
                }
            }
        }
        Ok(())
    }

    /// Takes in the segment of an earlier pool that `mapping` shows.
    fn inherit(&self, work: &mut Work, mapping: &PoolMapping) -> Result<Hold, Option<Refused>> {
        let file = work.client.open_segment(mapping).ok_or(None)?;
        let mut notices = Vec::new();
        // Slots of zeros are the rest of a huge page that was begun.
        let hold = self.pool.inherit(&file, mapping.inode, |slot, page| {
            if !is_zero(page) {
                notices.extend(self.offer(slot, page));
            }
        })?;
        self.mark_index_dirty();
        self.notify_owners(&notices);
        Ok(hold)
    }

    /// Enters a mapping of `segment`: pages that were written are broken, the others share.
    fn adopt_mapping(&self, work: &mut Work, mapping: &PoolMapping, segment: u32) -> Result<(), Gone> {
        let mut addrs = (mapping.range.start..mapping.range.end).step_by(PAGE_SIZE);
        let is_new = addrs
            .any(|addr| work.table.find(addr).is_some_and(|(chunk, index)| chunk.state(index) == PageState::Unknown));
        if !is_new {
            return Ok(());
        }
        self.mark_broken(work, mapping.range)?;
        for (page, addr) in (mapping.range.start..mapping.range.end).step_by(PAGE_SIZE).enumerate() {
            let Some((chunk, index)) = work.table.find_mut(addr) else { continue };
            let slot = Slot::new(segment, mapping.index + page as u32);
            if chunk.state(index) == PageState::Unknown && self.pool.adopt_sharer(slot, mapping.inode) {
                chunk.set(index, PageState::Shared(slot));
            }
        }
        Ok(())
    }

    /// Enters the pages of a mapping that were written before this domain knew them.
    fn mark_broken(&self, work: &mut Work, range: Range) -> Result<(), Gone> {
        let mut broken = Vec::new();
        work.client.broken(range, &mut broken)?;
        let pages = broken.iter().map(|part| clip(*part, range));
        for addr in pages.flat_map(|part| (part.start..part.end).step_by(PAGE_SIZE)) {
            if work.table.state(addr) == PageState::Unknown {
                work.table.set(addr, PageState::Broken { age: 0, backoff: 2 });
            }
        }
        Ok(())
    }

    /// Once nothing more can be taken in: tells the client the numbers of what it has kept for that.
    pub(super) fn name_earlier(&self, work: &mut Work, mappings: &[PoolMapping]) -> Result<(), Gone> {
        if !work.client.keeps_earlier_segments() {
            return Ok(());
        }
        let named = |mapping: &PoolMapping| Some((mapping.inode, self.pool.segment_of_inode(mapping.inode)?));
        let names: BTreeSet<(u64, u32)> = mappings.iter().filter_map(named).collect();
        work.client.name_earlier_segments(&Vec::from_iter(names))
    }
}
