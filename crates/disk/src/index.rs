//! The content index: from a block's fingerprint to the frame that holds it.
//!
//! The paper keeps two structures, a share tree of shared pages and a hash table of candidates, because there a
//! candidate may change under the scanner. Here every indexed frame is clean and clean frames never change, so one
//! index serves both: the frame itself says how many blocks share it, and one lookup answers "share tree first, then
//! candidates". The index is the SD tree: lock-free, so that loads of many images never wait for each other here. Its
//! leaves keep part of a fingerprint, so whoever looks decides by the frame's record what is the same.

use crate::fingerprint::Fingerprint;
use crate::frames::FrameIndex;
use llds::sd_tree::SdTree;

/// Frames by fingerprint. An entry is put in and taken out by the one who holds its frame, or its frame's lock.
pub(crate) struct ContentIndex {
    tree: SdTree,
}

/// From this size on the tree lies on huge pages: a smaller one would mostly fill them with air.
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

    /// Puts `new` under `fingerprint` and returns it, or returns the frame there that passes `is_same`. `None` if the
    /// index has no room, which well-spread fingerprints never make happen.
    pub(crate) fn get_or_insert(
        &self,
        fingerprint: Fingerprint,
        new: FrameIndex,
        mut is_same: impl FnMut(FrameIndex) -> bool,
    ) -> Option<FrameIndex> {
        let result = self.tree.get_or_insert_with(fingerprint.index_key(), new.0.into(), |value| is_same(frame(value)));
        result.ok().map(|there| there.map_or(new, frame))
    }

    /// Puts `new` in the place of `old`; tells whether it did.
    pub(crate) fn replace(&self, fingerprint: Fingerprint, old: FrameIndex, new: FrameIndex) -> bool {
        self.tree.replace(fingerprint.index_key(), old.0.into(), new.0.into())
    }

    /// Takes `gone` out.
    pub(crate) fn remove(&self, fingerprint: Fingerprint, gone: FrameIndex) {
        let was_there = self.tree.remove(fingerprint.index_key(), gone.0.into());
        debug_assert!(was_there, "an indexed frame is in the index");
    }

    /// Bytes of memory the index takes now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.tree.memory_bytes() as usize
    }
}

fn frame(value: u64) -> FrameIndex {
    FrameIndex(u32::try_from(value).expect("only frame numbers go in"))
}
