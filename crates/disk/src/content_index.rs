//! The content index: from a content's fingerprint to the frame that holds it.
//!
//! The paper keeps two structures, a share tree of shared pages and a hash table of candidates, because there a
//! candidate may change under the scanner. Here every indexed frame is clean and clean frames never change, so one
//! index serves both: the frame itself says how many blocks share it, and one lookup answers "share tree first, then
//! candidates". The index is the SD tree: lock-free, so that loads of many images never wait for each other here. Its
//! leaves keep part of a fingerprint only, so a caller compares the whole one in the frame's record.

use crate::fingerprint::Fingerprint;
use crate::frames::FrameIndex;
use llds::sd_tree::SdTree;

/// Frames by fingerprint. Only a thread that owns a frame, or holds its record's lock, inserts or removes its entry.
pub(crate) struct ContentIndex {
    tree: SdTree,
}

/// From this size on the tree uses huge pages. A smaller tree would leave most of each page empty.
const HUGE_FROM_FRAMES: usize = 1 << 20;

impl ContentIndex {
    /// Makes an index for `frame_count` frames.
    pub(crate) fn new(frame_count: usize) -> std::io::Result<Self> {
        Ok(Self { tree: SdTree::with_pages(frame_count, frame_count >= HUGE_FROM_FRAMES)? })
    }

    /// A frame under `fingerprint` that passes `is_same`.
    pub(crate) fn get(
        &self,
        fingerprint: Fingerprint,
        mut is_same: impl FnMut(FrameIndex) -> bool,
    ) -> Option<FrameIndex> {
        self.tree.get_with(fingerprint.index_key(), |value| is_same(frame(value))).map(frame)
    }

    /// Inserts `new` under `fingerprint` and returns it, or returns the frame there that passes `is_same`. `None` if the
    /// index is full, which does not happen with well-spread fingerprints.
    pub(crate) fn get_or_insert(
        &self,
        fingerprint: Fingerprint,
        new: FrameIndex,
        mut is_same: impl FnMut(FrameIndex) -> bool,
    ) -> Option<FrameIndex> {
        let result = self.tree.get_or_insert_with(fingerprint.index_key(), new.0.into(), |value| is_same(frame(value)));
        result.ok().map(|there| there.map_or(new, frame))
    }

    /// Replaces `old` by `new`; returns whether it did.
    pub(crate) fn replace(&self, fingerprint: Fingerprint, old: FrameIndex, new: FrameIndex) -> bool {
        self.tree.replace(fingerprint.index_key(), old.0.into(), new.0.into())
    }

    /// Removes `frame`.
    pub(crate) fn remove(&self, fingerprint: Fingerprint, frame: FrameIndex) {
        let was_there = self.tree.remove(fingerprint.index_key(), frame.0.into());
        debug_assert!(was_there, "an indexed frame is in the index");
    }

    /// Bytes of memory the index takes now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.tree.memory_bytes() as usize
    }
}

fn frame(value: u64) -> FrameIndex {
    FrameIndex(u32::try_from(value).expect("the index holds frame numbers only"))
}
