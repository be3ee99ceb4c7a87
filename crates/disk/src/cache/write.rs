//! Writing, which breaks sharing.
//!
//! A write allocates its frames before it locks a chunk, and loads blocks that it writes partly. Then it changes the
//! blocks under the chunk's lock: in place if a block is dirty or the only sharer of its frame, else in a new frame.

use super::Cache;
use super::load::ChunkBlocks;
use crate::error::Error;
use crate::frame_table::{BlockKey, FrameUse, Sharers};
use crate::frames::OwnedFrame;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS, CHUNK_BYTES, FILE_BYTES_MAX};
use crate::image::{BlockState, Entries, Image};
use crate::stats::add;
use std::sync::atomic::Ordering;

impl Cache {
    /// Writes `data` at byte `offset`, growing the image if it reaches beyond its end.
    ///
    /// # Errors
    /// The disk's (reading the rest of a partly written block, growing the file), or [`Error::Full`].
    pub fn write(&self, image: &Image, offset: u64, data: &[u8]) -> Result<(), Error> {
        let end = self.range_end(offset, data.len() as u64)?;
        self.accept_change(image)?;
        if !image.file()?.writable() {
            return Err(Error::ReadOnly);
        }
        if data.is_empty() {
            return Ok(());
        }
        {
            let _layout = image.layout.read();
            self.check_accepts_changes()?;
            if end <= image.size() {
                return self.write_blocks(image, offset, data, u64::MAX);
            }
        }
        // Growing is exclusive, so no other request has written beyond the old end.
        let _layout = image.layout.write();
        self.check_accepts_changes()?;
        let size_before = image.size();
        if end > size_before {
            self.grow(image, end)?;
        }
        // Data that another program appended is on the disk.
        let empty_from = if image.changed_externally.load(Ordering::Acquire) { u64::MAX } else { size_before };
        self.write_blocks(image, offset, data, empty_from)
    }

    /// Returns true if `count` more dirty blocks find room now without a flush.
    pub(crate) fn has_room_for_writes(&self, count: usize) -> bool {
        self.dirty_blocks.load(Ordering::Relaxed) + count < self.config.dirty_max()
    }

    /// Makes an image `end` bytes long, with the layout locked for writing. Data that another program has appended is not
    /// cut off.
    pub(super) fn grow(&self, image: &Image, end: u64) -> Result<(), Error> {
        image.change_content(|file| {
            if file.stamp()?.size < end {
                file.set_len(end)?;
            }
            image.size.store(end, Ordering::Release);
            Ok(())
        })?;
        image.unsynced.store(true, Ordering::Release);
        Ok(())
    }

    pub(super) fn range_end(&self, offset: u64, length: u64) -> Result<u64, Error> {
        offset.checked_add(length).filter(|&end| end <= FILE_BYTES_MAX).ok_or(Error::Range { offset, length })
    }

    /// Writes with the layout locked. Blocks from byte `empty_from` on were never on the disk.
    pub(super) fn write_blocks(&self, image: &Image, offset: u64, data: &[u8], empty_from: u64) -> Result<(), Error> {
        let mut spare = Vec::new();
        let mut done = 0;
        let part_max = self.config.io_blocks_max() * BLOCK_BYTES;
        let mut result = Ok(());
        while done < data.len() && result.is_ok() {
            let at = offset + done as u64;
            let (to_chunk_end, skip) = ((CHUNK_BYTES - at % CHUNK_BYTES) as usize, at as usize % BLOCK_BYTES);
            let mut part = to_chunk_end.min(part_max - skip).min(data.len() - done);
            // Not both a first and a last block that are partly written: in a full cache, loading one could evict the
            // other, without end.
            if skip > 0 && skip + part > BLOCK_BYTES {
                part -= (skip + part) % BLOCK_BYTES;
            }
            result = self.write_in_chunk(image, at, &data[done..done + part], empty_from, &mut spare);
            done += part;
        }
        self.free_frames(spare);
        result
    }

    fn write_in_chunk(
        &self,
        image: &Image,
        offset: u64,
        data: &[u8],
        empty_from: u64,
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<(), Error> {
        let number = offset / CHUNK_BYTES;
        let base = number * CHUNK_BYTES;
        let start = (offset - base) as usize;
        let end = start + data.len();
        let blocks = start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        self.limit_dirty(image, blocks.len())?;
        // One more than the blocks: a partly written block may have to be loaded first.
        self.allocate_all(blocks.len() + 1, spare)?;
        let chunk = image.chunk(number);
        let partial = |at: usize| at * BLOCK_BYTES < start || (at + 1) * BLOCK_BYTES > end;
        let on_disk = |at: usize| base + ((at * BLOCK_BYTES) as u64) < empty_from;
        loop {
            let mut entries = chunk.entries.write();
            if let Some(at) = blocks.clone().find(|&at| entries.is_loading(at)) {
                drop(entries);
                chunk.wait_loaded(at);
                continue;
            }
            let missing = |at: &usize| partial(*at) && on_disk(*at) && entries.state(*at) == BlockState::Absent;
            let edge = [blocks.start, blocks.end - 1].into_iter().find(missing);
            if let Some(at) = edge {
                drop(entries);
                self.load(&ChunkBlocks { image, chunk: &chunk, number, blocks: at..at + 1 }, None, spare)?;
                self.allocate_all(blocks.len(), spare)?;
                continue;
            }
            let dirty_before = entries.dirty();
            for at in blocks.clone() {
                let from = start.max(at * BLOCK_BYTES);
                let to = end.min((at + 1) * BLOCK_BYTES);
                let piece = &data[from - start..to - start];
                let block = base / BLOCK_BYTES as u64 + at as u64;
                self.write_block(image, &mut entries, block, from % BLOCK_BYTES, piece, spare);
            }
            if dirty_before == 0 {
                image.dirty_chunks.lock().insert(number);
            }
            // Still under the chunk's lock: blocks that were written back and evicted could otherwise be found by their
            // old fingerprints.
            if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                let first = base / BLOCK_BYTES as u64;
                fingerprints.forget(first + blocks.start as u64..first + blocks.end as u64);
            }
            break;
        }
        image.note_written();
        if self.dirty_blocks.load(Ordering::Relaxed) > self.config.dirty_background() {
            self.request_flush();
        }
        Ok(())
    }

    /// Writes into one block under its chunk's lock.
    fn write_block(
        &self,
        image: &Image,
        entries: &mut Entries,
        block: u64,
        skip: usize,
        piece: &[u8],
        spare: &mut Vec<OwnedFrame>,
    ) {
        let at = block as usize % CHUNK_BLOCKS;
        let key = BlockKey { image: image.id, block };
        let whole = piece.len() == BLOCK_BYTES;
        let mut fresh = || spare.pop().expect("as many frames as blocks were allocated");
        let frame = match entries.state(at) {
            BlockState::Dirty(frame) => {
                self.frames.copy_in(frame, skip, piece);
                self.table.touch(frame);
                return;
            }
            BlockState::Absent | BlockState::Zero => {
                let frame = fresh();
                if !whole {
                    self.frames.zero(frame.index(), 0..BLOCK_BYTES);
                }
                frame
            }
            BlockState::Clean(shared) => {
                let copy = || {
                    let frame = fresh();
                    if !whole {
                        self.frames.copy(shared, &frame);
                    }
                    add(&self.counters.cow_breaks, 1);
                    frame
                };
                // A frame that no other block shares leaves the index and is written in place.
                self.leave_or(shared, key, copy).unwrap_or_else(|copy| copy)
            }
            BlockState::Writeback(writing) => {
                // The frame in writeback is not changed; the flusher finds it replaced and frees it.
                let frame = fresh();
                if !whole {
                    self.frames.copy(writing, &frame);
                }
                frame
            }
        };
        self.frames.copy_in(frame.index(), skip, piece);
        {
            let mut state = self.table.lock(frame.index());
            state.used = FrameUse::Dirty;
            state.indexed = false;
            state.sharers = Sharers::One(key);
        }
        self.table.set_touches(frame.index(), 0);
        entries.set(at, BlockState::Dirty(frame.index()));
        self.dirty_blocks.fetch_add(1, Ordering::Relaxed);
        image.dirty_blocks.fetch_add(1, Ordering::Relaxed);
    }
}
