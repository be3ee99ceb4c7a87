//! Sharing: one frame for each content.
//!
//! A filled frame is *offered* as the one of its content, and either stands for it from then on or finds the one that
//! does; a block *joins* a frame by a strong fingerprint alone, and *leaves* it when it is written, evicted or dropped.
//! The index finds a frame, the frame's record says who shares it; the record decides, under its lock.

use super::Cache;
use crate::fingerprint::{Fingerprint, is_zero};
use crate::frames::{FrameIndex, OwnedFrame};
use crate::stats::add;
use crate::table::{BlockKey, Sharers, Use};

/// What became of a frame that was offered for sharing.
pub(crate) enum Offered {
    /// It stands for its content now, or keeps it unshared.
    Kept,
    /// The content is in that frame already; the offered one is not needed.
    SharedWith(FrameIndex),
}

impl Cache {
    pub(crate) fn fingerprint(&self, frame: FrameIndex) -> Fingerprint {
        self.frames.read(
            frame,
            |bytes| {
                if is_zero(bytes) { Fingerprint::ZERO_BLOCK } else { self.hasher.fingerprint(bytes) }
            },
        )
    }

    /// Offers a filled frame as the one of its content, for block `key`. The caller owns it, or holds it in writeback.
    pub(crate) fn offer(&self, frame: FrameIndex, fingerprint: Fingerprint, key: BlockKey) -> Offered {
        {
            let mut body = self.table.lock(frame);
            body.used = Use::Clean;
            body.indexed = true;
            body.fingerprint = fingerprint;
            body.sharers = Sharers::One(key);
        }
        let keep_unindexed = || {
            self.table.lock(frame).indexed = false;
            Offered::Kept
        };
        loop {
            // Our own record is not looked at: the frame is not in the index yet.
            let there = match self.index.get_or_insert(fingerprint, frame, |other| self.stands_for(other, fingerprint))
            {
                Some(there) if there == frame => return Offered::Kept,
                Some(there) => there,
                None => return keep_unindexed(),
            };
            let mut body = self.table.lock(there);
            if !body.stands_for(fingerprint) {
                // It left the index between our look-up and the lock; look again.
                continue;
            }
            if !self.frames.equal(there, frame) {
                drop(body);
                add(&self.counters.collisions, 1);
                return keep_unindexed();
            }
            if body.sharers.len() >= self.config.sharers_max {
                // Full: the new frame takes its place in the index and gathers the sharers to come.
                if self.index.replace(fingerprint, there, frame) {
                    body.indexed = false;
                    return Offered::Kept;
                }
                drop(body);
                return keep_unindexed();
            }
            body.sharers.push(key);
            drop(body);
            self.table.touch(there);
            let mut own = self.table.lock(frame);
            own.used = Use::None;
            own.indexed = false;
            own.sharers = Sharers::None;
            return Offered::SharedWith(there);
        }
    }

    fn stands_for(&self, frame: FrameIndex, fingerprint: Fingerprint) -> bool {
        self.table.lock(frame).stands_for(fingerprint)
    }

    /// Adds `key` to the frame with exactly this fingerprint, if there is one. Only strong fingerprints may ask.
    pub(super) fn join(&self, fingerprint: Fingerprint, key: BlockKey) -> Option<FrameIndex> {
        let frame = self.index.get(fingerprint, |other| self.stands_for(other, fingerprint))?;
        let mut body = self.table.lock(frame);
        let fits = body.stands_for(fingerprint) && body.sharers.len() < self.config.sharers_max;
        fits.then(|| {
            body.sharers.push(key);
            self.table.touch(frame);
            frame
        })
    }

    /// Takes block `key` off a clean frame, under its chunk's lock; returns the frame if nobody else shares it.
    pub(super) fn leave(&self, frame: FrameIndex, key: BlockKey) -> Option<OwnedFrame> {
        self.leave_or(frame, key, || ()).ok()
    }

    /// As [`Cache::leave`]; where others share the frame, what `copy` made of it. That is made first: once the block has
    /// left, the last of them may write the frame in place, or give it away.
    pub(super) fn leave_or<R>(
        &self,
        frame: FrameIndex,
        key: BlockKey,
        copy: impl FnOnce() -> R,
    ) -> Result<OwnedFrame, R> {
        let mut body = self.table.lock(frame);
        let copied = (body.sharers.len() > 1).then(copy);
        body.sharers.remove(key);
        if let Some(copied) = copied {
            return Err(copied);
        }
        if body.indexed {
            self.index.remove(body.fingerprint, frame);
        }
        body.indexed = false;
        body.used = Use::None;
        Ok(OwnedFrame(frame))
    }

    /// Makes a dirty block's frame free to use again.
    pub(crate) fn disown(&self, frame: FrameIndex) -> OwnedFrame {
        let mut body = self.table.lock(frame);
        body.used = Use::None;
        body.sharers = Sharers::None;
        OwnedFrame(frame)
    }
}
