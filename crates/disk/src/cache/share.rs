//! Sharing: one frame for each content.
//!
//! A filled frame is *offered* for its content. Either it represents that content from then on, or its block shares the
//! frame that already does. A block *joins* a frame by a strong fingerprint alone, and *leaves* it when the block is
//! written, evicted or dropped. The index finds a frame and the frame's record lists its sharers. An entry of the index
//! may be outdated; the record, under its lock, decides.

use super::Cache;
use crate::fingerprint::{Fingerprint, is_zero};
use crate::frame_table::{BlockKey, FrameUse, Sharers};
use crate::frames::{FrameIndex, OwnedFrame};
use crate::stats::add;

/// What happened to a frame that was offered.
pub(super) enum Offered {
    /// It represents its content now, or keeps it unshared.
    Kept,
    /// That frame holds the content already; the offered one is not needed.
    SharedWith(FrameIndex),
}

impl Cache {
    pub(super) fn fingerprint(&self, frame: FrameIndex) -> Fingerprint {
        let of = |bytes: &[u8]| if is_zero(bytes) { Fingerprint::ZERO_BLOCK } else { self.hasher.fingerprint(bytes) };
        self.frames.read(frame, of)
    }

    /// Offers a filled frame for its content, for block `key`. The caller owns it, or holds it in writeback.
    pub(super) fn offer(&self, frame: FrameIndex, fingerprint: Fingerprint, key: BlockKey) -> Offered {
        {
            let mut state = self.table.lock(frame);
            state.used = FrameUse::Clean;
            state.indexed = true;
            state.fingerprint = fingerprint;
            state.sharers = Sharers::One(key);
        }
        let keep_unindexed = || {
            self.table.lock(frame).indexed = false;
            Offered::Kept
        };
        loop {
            // `represents` never locks this frame's own record, because the frame is not in the index yet.
            let there = match self.index.get_or_insert(fingerprint, frame, |other| self.represents(other, fingerprint))
            {
                Some(there) if there == frame => return Offered::Kept,
                Some(there) => there,
                None => return keep_unindexed(),
            };
            let mut state = self.table.lock(there);
            if !state.represents(fingerprint) {
                // It left the index between the look-up and the lock: look again.
                continue;
            }
            if !self.frames.equal(there, frame) {
                drop(state);
                add(&self.counters.collisions, 1);
                return keep_unindexed();
            }
            if state.sharers.len() >= self.config.sharers_max {
                // Full: the new frame replaces it in the index and collects later sharers.
                if self.index.replace(fingerprint, there, frame) {
                    state.indexed = false;
                    return Offered::Kept;
                }
                drop(state);
                return keep_unindexed();
            }
            state.sharers.push(key);
            drop(state);
            self.table.touch(there);
            let mut own = self.table.lock(frame);
            own.used = FrameUse::None;
            own.indexed = false;
            own.sharers = Sharers::None;
            return Offered::SharedWith(there);
        }
    }

    fn represents(&self, frame: FrameIndex, fingerprint: Fingerprint) -> bool {
        self.table.lock(frame).represents(fingerprint)
    }

    /// Adds `key` to the frame with this fingerprint, if there is one. Only for strong fingerprints: no bytes are compared.
    pub(super) fn join(&self, fingerprint: Fingerprint, key: BlockKey) -> Option<FrameIndex> {
        let frame = self.index.get(fingerprint, |other| self.represents(other, fingerprint))?;
        let mut state = self.table.lock(frame);
        let fits = state.represents(fingerprint) && state.sharers.len() < self.config.sharers_max;
        fits.then(|| {
            state.sharers.push(key);
            self.table.touch(frame);
            frame
        })
    }

    /// Removes block `key` from a clean frame, under its chunk's lock; returns the frame if no other block shares it.
    pub(super) fn leave(&self, frame: FrameIndex, key: BlockKey) -> Option<OwnedFrame> {
        self.leave_or(frame, key, || ()).ok()
    }

    /// As [`Cache::leave`]; if other blocks share the frame, returns the result of `copy`. The copy is made first: once the
    /// block has left, the last other sharer may be written in place, or free the frame.
    pub(super) fn leave_or<R>(
        &self,
        frame: FrameIndex,
        key: BlockKey,
        copy: impl FnOnce() -> R,
    ) -> Result<OwnedFrame, R> {
        let mut state = self.table.lock(frame);
        let copied = (state.sharers.len() > 1).then(copy);
        state.sharers.remove(key);
        if let Some(copied) = copied {
            return Err(copied);
        }
        if state.indexed {
            self.index.remove(state.fingerprint, frame);
        }
        state.indexed = false;
        state.used = FrameUse::None;
        Ok(OwnedFrame(frame))
    }

    /// Takes the frame from a dirty block, for use by another.
    pub(super) fn disown(&self, frame: FrameIndex) -> OwnedFrame {
        let mut state = self.table.lock(frame);
        state.used = FrameUse::None;
        state.sharers = Sharers::None;
        OwnedFrame(frame)
    }
}
