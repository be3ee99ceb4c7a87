//! Loading absent blocks: from a frame that holds the same content already, else from the disk.
//!
//! A loading thread marks its blocks under their chunk's lock. No other thread loads or writes a marked block, so loaded
//! data never replaces newer data. The reader gets the bytes on the way, even if there was no frame to keep them in.

use super::Cache;
use super::share::Offered;
use crate::error::Error;
use crate::file::BlockFile;
use crate::fingerprint::Fingerprint;
use crate::frame_table::BlockKey;
use crate::frames::{FrameIndex, OwnedFrame};
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS};
use crate::image::{BlockState, Chunk, Entries, Image};
use crate::stats::add;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Blocks of one chunk that are to be loaded.
pub(super) struct ChunkBlocks<'a> {
    pub(super) image: &'a Image,
    pub(super) chunk: &'a Chunk,
    /// The chunk's number in the image.
    pub(super) number: u64,
    /// Positions of the blocks in the chunk.
    pub(super) blocks: Range<usize>,
}

/// The buffer of the reader that a load serves.
pub(super) struct ReaderBuffer<'a> {
    pub(super) bytes: &'a mut [u8],
    /// Bytes of the load's first block that precede the buffer.
    pub(super) skip: usize,
}

impl ReaderBuffer<'_> {
    /// Fills the part of the buffer that block `n` of the load covers. `copy` gets an offset in the block, and that part.
    fn fill(&mut self, n: usize, copy: impl FnOnce(usize, &mut [u8])) {
        let (from, in_block) = if n == 0 { (0, self.skip) } else { (n * BLOCK_BYTES - self.skip, 0) };
        if from < self.bytes.len() {
            let part = (BLOCK_BYTES - in_block).min(self.bytes.len() - from);
            copy(in_block, &mut self.bytes[from..from + part]);
        }
    }
}

/// What a load found for one block.
enum LoadedBlock {
    /// Nothing yet, or nothing at all.
    Missing,
    Zero,
    Shared(FrameIndex),
    New(OwnedFrame, Fingerprint),
}

/// A load under way. `blocks` are the results, for the image's blocks from `first_block` on.
struct Load<'a, 'b> {
    image: &'a Image,
    first_block: u64,
    blocks: Vec<LoadedBlock>,
    /// `None` for a load that serves no reader: read-ahead, or the rest of a partly written block.
    reader: Option<ReaderBuffer<'b>>,
}

impl Load<'_, '_> {
    fn key(&self, n: usize) -> BlockKey {
        BlockKey { image: self.image.id, block: self.first_block + n as u64 }
    }

    fn give_reader(&mut self, n: usize, copy: impl FnOnce(usize, &mut [u8])) {
        if let Some(reader) = &mut self.reader {
            reader.fill(n, copy);
        }
    }
}

impl Cache {
    /// Loads the absent blocks at the start of `wanted`, up to the first block that is present or being loaded, and
    /// returns how many. They are in the cache afterwards unless memory was short, and in the reader's buffer anyway.
    pub(super) fn load(
        &self,
        wanted: &ChunkBlocks<'_>,
        reader: Option<ReaderBuffer<'_>>,
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<usize, Error> {
        let (image, chunk, first) = (wanted.image, wanted.chunk, wanted.blocks.start);
        let count = {
            let mut entries = chunk.entries.write();
            let limit = wanted.blocks.end.min(first + self.config.io_blocks_max());
            let is_free =
                |entries: &Entries, at: usize| entries.state(at) == BlockState::Absent && !entries.is_loading(at);
            let count = (first..limit).take_while(|&at| is_free(&entries, at)).count();
            (first..first + count).for_each(|at| entries.set_loading(at, true));
            count
        };
        if count == 0 {
            return Ok(0);
        }
        let is_read_ahead = reader.is_none();
        let first_block = wanted.number * CHUNK_BLOCKS as u64 + first as u64;
        let blocks = (0..count).map(|_| LoadedBlock::Missing).collect();
        let mut load = Load { image, first_block, blocks, reader };
        let result = self.find_content(&mut load, spare);

        let mut fresh = Vec::new();
        {
            let mut entries = chunk.entries.write();
            for (n, block) in std::mem::take(&mut load.blocks).into_iter().enumerate() {
                let at = first + n;
                entries.set_loading(at, false);
                match block {
                    LoadedBlock::Missing => {}
                    LoadedBlock::Zero => entries.set(at, BlockState::Zero),
                    LoadedBlock::Shared(frame) => entries.set(at, BlockState::Clean(frame)),
                    LoadedBlock::New(frame, fingerprint) => match self.offer(frame.index(), fingerprint, load.key(n)) {
                        Offered::Kept => {
                            if is_read_ahead {
                                self.table.mark_read_ahead(frame.index());
                            }
                            entries.set(at, BlockState::Clean(frame.index()));
                            fresh.push((frame.index(), fingerprint));
                        }
                        Offered::SharedWith(other) => {
                            add(&self.counters.shared_on_load, 1);
                            entries.set(at, BlockState::Clean(other));
                            spare.push(frame);
                        }
                    },
                }
            }
        }
        chunk.wake();
        self.enqueue(&fresh);
        result.map(|()| count)
    }

    /// Finds the content of the load's blocks: by fingerprint, else from the disk.
    fn find_content(&self, load: &mut Load<'_, '_>, spare: &mut Vec<OwnedFrame>) -> Result<(), Error> {
        self.find_by_fingerprint(load);
        let file = load.image.file()?;
        let mut at = 0;
        while at < load.blocks.len() {
            let run = load.blocks[at..].iter().take_while(|block| matches!(block, LoadedBlock::Missing)).count();
            if run == 0 {
                at += 1;
                continue;
            }
            if spare.len() < run {
                self.allocate(run - spare.len(), spare);
            }
            if spare.len() < run {
                self.read_uncached(&*file, load, at, run)?;
            } else {
                self.read_run(&*file, load, at, run, spare)?;
            }
            at += run;
        }
        Ok(())
    }

    /// Reads `run` blocks of the load, from block `at` on, into frames of `spare`.
    fn read_run(
        &self,
        file: &dyn BlockFile,
        load: &mut Load<'_, '_>,
        at: usize,
        run: usize,
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<(), Error> {
        let image = load.image;
        let first_block = load.first_block + at as u64;
        let offset = first_block * BLOCK_BYTES as u64;
        // The last frames, in their order: fresh frames come in ascending runs, which make few buffers.
        let mut frames = spare.split_off(spare.len() - run);
        let read = match self.frames.fill(&mut frames, |buffers| file.read_at(buffers, offset)) {
            Ok(read) => read,
            Err(error) => {
                spare.append(&mut frames);
                return Err(error.into());
            }
        };
        add(&image.counters.disk_read_bytes, read);
        if (offset + read as u64) < image.size().min(offset + (run * BLOCK_BYTES) as u64) {
            // Another program has cut the file. The missing bytes read as zeros until the change is accepted.
            image.changed_externally.store(true, Ordering::Release);
        }
        let mut learnt = Vec::new();
        for (n, frame) in frames.into_iter().enumerate() {
            let valid = read.saturating_sub(n * BLOCK_BYTES).min(BLOCK_BYTES);
            if valid < BLOCK_BYTES {
                self.frames.zero(frame.index(), valid..BLOCK_BYTES);
            }
            load.give_reader(at + n, |skip, into| self.frames.copy_out(frame.index(), skip, into));
            let fingerprint = self.fingerprint(frame.index());
            learnt.push(fingerprint);
            load.blocks[at + n] = if fingerprint == Fingerprint::ZERO_BLOCK {
                spare.push(frame);
                LoadedBlock::Zero
            } else {
                LoadedBlock::New(frame, fingerprint)
            };
        }
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.learn(first_block, &learnt);
        }
        Ok(())
    }

    /// Finds blocks by known fingerprints that other blocks in memory have, without disk I/O.
    fn find_by_fingerprint(&self, load: &mut Load<'_, '_>) {
        if !self.hasher.proves_equality() {
            return;
        }
        let image = load.image;
        let known: Vec<Fingerprint> = match &*image.fingerprints.lock() {
            Some(known) => (0..load.blocks.len()).map(|n| known.get(load.first_block + n as u64)).collect(),
            None => return,
        };
        if known.iter().all(|&fingerprint| fingerprint == Fingerprint::UNKNOWN) || self.detect_change(image) {
            // Nothing is known, or it is known of an older version: the disk must be read.
            return;
        }
        let mut saved = 0;
        for (n, fingerprint) in known.into_iter().enumerate() {
            load.blocks[n] = match fingerprint {
                Fingerprint::UNKNOWN => continue,
                Fingerprint::ZERO_BLOCK => {
                    load.give_reader(n, |_, into| into.fill(0));
                    LoadedBlock::Zero
                }
                _ => match self.join(fingerprint, load.key(n)) {
                    Some(frame) => {
                        load.give_reader(n, |skip, into| self.frames.copy_out(frame, skip, into));
                        LoadedBlock::Shared(frame)
                    }
                    None => continue,
                },
            };
            saved += 1;
        }
        add(&image.counters.io_saved_bytes, saved * BLOCK_BYTES);
    }

    /// Reads `run` blocks of the load for its reader only, because there are no free frames.
    fn read_uncached(&self, file: &dyn BlockFile, load: &mut Load<'_, '_>, at: usize, run: usize) -> Result<(), Error> {
        add(&self.counters.uncached_reads, run);
        if load.reader.is_none() {
            return Ok(());
        }
        let offset = (load.first_block + at as u64) * BLOCK_BYTES as u64;
        let mut buffer = vec![0; run * BLOCK_BYTES];
        let read = file.read_at(&mut [io::IoSliceMut::new(&mut buffer)], offset)?;
        add(&load.image.counters.disk_read_bytes, read);
        buffer[read..].fill(0);
        for (n, block) in buffer.chunks_exact(BLOCK_BYTES).enumerate() {
            load.give_reader(at + n, |skip, into| into.copy_from_slice(&block[skip..skip + into.len()]));
        }
        Ok(())
    }
}
