//! What the index leads to: entries, and the numbers of chunks in them.

use super::ClientId;
use crate::table::{CHUNK_PAGES, Indexed};
use pagefold_os::PAGE_SIZE;
use pagefold_pool::Slot;
use std::sync::Arc;

/// What an index entry stands for: a candidate page, a slot, or the slot that some worker is just making. Without that
/// claim two workers could make one each: the one to which the index does not lead gets no sharers, and its memory stays
/// until its segment goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexEntry {
    Candidate { chunk: u32, page: u32 },
    Slot(Slot),
    Claimed,
}

const SLOT_BIT: u64 = 1 << 39;
/// No slot has such a number.
const CLAIMED: u64 = SLOT_BIT | 1 << 38;

impl IndexEntry {
    pub(super) fn value(self) -> u64 {
        match self {
            IndexEntry::Candidate { chunk, page } => u64::from(chunk) << 9 | u64::from(page),
            IndexEntry::Slot(slot) => SLOT_BIT | u64::from(slot.number()),
            IndexEntry::Claimed => CLAIMED,
        }
    }

    pub(super) fn from_value(value: u64) -> IndexEntry {
        if value == CLAIMED {
            IndexEntry::Claimed
        } else if value & SLOT_BIT != 0 {
            IndexEntry::Slot(Slot::from_number((value & !SLOT_BIT) as u32))
        } else {
            IndexEntry::Candidate { chunk: (value >> 9) as u32, page: (value & (CHUNK_PAGES as u64 - 1)) as u32 }
        }
    }
}

/// Where a chunk number leads.
#[derive(Clone, Debug)]
pub(super) struct ChunkRef {
    pub(super) client: ClientId,
    pub(super) addr: u64,
    pub(super) indexed: Arc<Indexed>,
}

#[derive(Debug, Default)]
pub(super) struct ChunkRefs {
    pub(super) refs: Vec<Option<ChunkRef>>,
    pub(super) free: Vec<u32>,
}

impl ChunkRefs {
    /// The client and address of the page that a candidate's entry stands for.
    pub(super) fn place(&self, entry: IndexEntry) -> Option<(ClientId, u64)> {
        let IndexEntry::Candidate { chunk, page } = entry else { return None };
        let to = self.refs.get(chunk as usize)?.as_ref()?;
        Some((to.client, to.addr + u64::from(page) * PAGE_SIZE as u64))
    }

    /// A number for what is at `to`.
    pub(super) fn take(&mut self, to: ChunkRef) -> u32 {
        if let Some(number) = self.free.pop() {
            self.refs[number as usize] = Some(to);
            return number;
        }
        self.refs.push(Some(to));
        self.refs.len() as u32 - 1
    }

    /// The chunk of this number is gone.
    pub(super) fn give_back(&mut self, number: u32) {
        self.refs[number as usize] = None;
        self.free.push(number);
    }

    /// True if the page that a candidate's entry names is still what the entry says, as far as anybody knows.
    pub(super) fn is_indexed(&self, chunk: u32, page: u32) -> bool {
        let to = self.refs.get(chunk as usize).and_then(Option::as_ref);
        to.is_some_and(|to| to.indexed.get(page as usize))
    }
}
