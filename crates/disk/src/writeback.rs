//! Writing back: dirty blocks go to the disk, and are clean and shareable afterwards.

use crate::BLOCK_BYTES;
use crate::cache::{CHUNK_BLOCKS, Cache, Offered};
use crate::file::BlockFile;
use crate::fingerprint::Fingerprint;
use crate::frames::FrameIndex;
use crate::image::{Image, State};
use crate::stats::add;
use crate::table::BlockKey;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Blocks taken into writeback at once.
const BATCH_BLOCKS: usize = 1024;

/// A block on its way to the disk.
#[derive(Clone, Copy)]
struct Leaving {
    block: u64,
    frame: FrameIndex,
}

impl Cache {
    /// Writes the dirty blocks of `range` (in blocks) back and makes everything written so far durable. What goes
    /// wrong is noted in the image, to be told once to each of its handles.
    ///
    /// Returns whether nothing went wrong.
    pub fn sync(&self, image: &Image, range: Range<u64>) -> bool {
        let errors_before = image.errors.count();
        let flushed = self.flush_range(image, range);
        let _flush = image.flush.lock();
        if flushed.is_err() || !image.unsynced.swap(false, Ordering::AcqRel) {
            return flushed.is_ok() && image.errors.count() == errors_before;
        }
        // Other flushes wait: whoever syncs after us must not find `unsynced` cleared before the disk has answered.
        add(&self.counters.syncs, 1);
        let result = image.file().and_then(|file| file.sync());
        if let Err(error) = &result {
            add(&self.counters.writeback_errors, 1);
            image.errors.note(error);
            // Not durable, so the next sync asks the disk again instead of finding nothing to do.
            image.unsynced.store(true, Ordering::Release);
        }
        result.is_ok()
    }

    /// Writes all dirty blocks of `range` (in blocks) back.
    ///
    /// # Errors
    /// The first of the disk; it is noted in the image too, and the blocks concerned stay dirty.
    pub fn flush_range(&self, image: &Image, range: Range<u64>) -> io::Result<()> {
        // One pass upwards: it meets everything that is dirty now, and ends at the image's end whatever writers do.
        let mut from = range.start;
        while let (_, Some(next)) = self.flush_batch(image, BATCH_BLOCKS, from..range.end)? {
            from = next;
        }
        Ok(())
    }

    /// Writes up to `count` dirty blocks of `range` back; returns how many.
    ///
    /// # Errors
    /// As [`Cache::flush_range`].
    pub(crate) fn flush_some(&self, image: &Image, count: usize, range: Range<u64>) -> io::Result<usize> {
        let mut done = 0;
        let mut from = range.start;
        while done < count {
            let (written, next) = self.flush_batch(image, (count - done).min(BATCH_BLOCKS), from..range.end)?;
            done += written;
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        Ok(done)
    }

    /// One batch: returns how many blocks were written and where the next batch starts, if there may be more.
    fn flush_batch(&self, image: &Image, count: usize, range: Range<u64>) -> io::Result<(usize, Option<u64>)> {
        let _flush = image.flush.lock();
        let (batch, next) = self.take_dirty(image, count, range);
        if batch.is_empty() {
            return Ok((0, None));
        }
        let runs: Vec<&[Leaving]> =
            batch.chunk_by(|a, b| a.block + 1 == b.block).flat_map(|run| run.chunks(CHUNK_BLOCKS)).collect();
        // Read after the blocks went into writeback: whatever they hold was inside this size.
        let size = image.size();
        let mut results: Vec<io::Result<()>> = Vec::new();
        let changed = image.change(|file| {
            results = self.write_runs(file, &runs, size);
            Ok(())
        });
        image.unsynced.store(true, Ordering::Release);
        if let Err(error) = changed {
            results = runs
                .iter()
                .map(|_| Err(io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))))
                .collect();
        }
        let mut first_error = None;
        let mut fresh = Vec::new();
        for (run, result) in runs.iter().zip(results) {
            match result {
                Ok(()) => {
                    add(&image.counters.disk_written_bytes, run.len() * BLOCK_BYTES);
                    run.iter().for_each(|leaving| self.arrived(image, *leaving, &mut fresh));
                }
                Err(error) => {
                    run.iter().for_each(|leaving| self.refused(image, *leaving));
                    first_error.get_or_insert(error);
                }
            }
        }
        self.enqueue(&fresh);
        match first_error {
            None => Ok((batch.len(), next)),
            Some(error) => {
                add(&self.counters.writeback_errors, 1);
                image.errors.note(&error);
                Err(error)
            }
        }
    }

    /// Moves up to `count` dirty blocks of `range` into writeback, in ascending order.
    fn take_dirty(&self, image: &Image, count: usize, range: Range<u64>) -> (Vec<Leaving>, Option<u64>) {
        let chunk_blocks = CHUNK_BLOCKS as u64;
        let first = range.start / chunk_blocks;
        let last = range.end.div_ceil(chunk_blocks);
        let numbers: Vec<u64> = image.dirty_chunks.lock().range(first..last).copied().collect();
        let mut batch = Vec::new();
        for number in numbers {
            if batch.len() >= count {
                return (batch, Some(number * chunk_blocks));
            }
            let Some(chunk) = image.existing_chunk(number) else { continue };
            let mut entries = chunk.entries.write();
            for at in 0..CHUNK_BLOCKS {
                let block = number * chunk_blocks + at as u64;
                if let State::Dirty(frame) = entries.state(at)
                    && range.contains(&block)
                {
                    entries.set(at, State::Writeback(frame));
                    batch.push(Leaving { block, frame });
                }
            }
            if entries.dirty() == 0 {
                image.dirty_chunks.lock().remove(&number);
            }
        }
        (batch, None)
    }

    fn write_runs(&self, file: &dyn BlockFile, runs: &[&[Leaving]], size: u64) -> Vec<io::Result<()>> {
        let write = |run: &[Leaving]| {
            let offset = run[0].block * BLOCK_BYTES as u64;
            let frames: Vec<FrameIndex> = run.iter().map(|leaving| leaving.frame).collect();
            let bytes = size.saturating_sub(offset).min((run.len() * BLOCK_BYTES) as u64) as usize;
            self.frames.gather(&frames, bytes, |buffers| file.write_at(buffers, offset))
        };
        let threads = self.config.workers.min(runs.len() / 4);
        if threads < 2 {
            return runs.iter().map(|run| write(run)).collect();
        }
        // Many small runs: several in flight, or the disk idles between them.
        let next = AtomicUsize::new(0);
        let mut results: Vec<io::Result<()>> = runs.iter().map(|_| Ok(())).collect();
        let parts: Vec<Vec<(usize, io::Result<()>)>> = std::thread::scope(|scope| {
            let worker = || {
                let mut done = Vec::new();
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(run) = runs.get(at) else { return done };
                    done.push((at, write(run)));
                }
            };
            let handles: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            handles.into_iter().map(|handle| handle.join().expect("a writer does not panic")).collect()
        });
        for (at, result) in parts.into_iter().flatten() {
            results[at] = result;
        }
        results
    }

    /// The disk has the block: it is clean, and shared if its content is there already.
    fn arrived(&self, image: &Image, leaving: Leaving, fresh: &mut Vec<(FrameIndex, Fingerprint)>) {
        let key = BlockKey { image: image.id, block: leaving.block };
        let fingerprint = self.fingerprint(leaving.frame);
        let chunk = image.chunk(leaving.block / CHUNK_BLOCKS as u64);
        let at = leaving.block as usize % CHUNK_BLOCKS;
        let mut freed = None;
        {
            let mut entries = chunk.entries.write();
            if entries.state(at) != State::Writeback(leaving.frame) {
                // Written again meanwhile: the newer content is in another frame.
                freed = Some(self.disown(leaving.frame));
            } else if fingerprint == Fingerprint::ZERO_BLOCK {
                entries.set(at, State::Zero);
                freed = Some(self.disown(leaving.frame));
            } else {
                match self.offer(leaving.frame, fingerprint, key) {
                    Offered::Kept => {
                        entries.set(at, State::Clean(leaving.frame));
                        fresh.push((leaving.frame, fingerprint));
                    }
                    Offered::SharedWith(other) => {
                        add(&self.counters.shared_after_writeback, 1);
                        entries.set(at, State::Clean(other));
                        freed = Some(self.disown(leaving.frame));
                    }
                }
                if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                    fingerprints.learn(leaving.block, &[fingerprint]);
                }
            }
        }
        self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
        image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
        self.give(freed.into_iter().collect());
    }

    /// The disk refused the block: it stays dirty, unless it was written again and the newer content is what counts.
    fn refused(&self, image: &Image, leaving: Leaving) {
        let number = leaving.block / CHUNK_BLOCKS as u64;
        let chunk = image.chunk(number);
        let at = leaving.block as usize % CHUNK_BLOCKS;
        let mut entries = chunk.entries.write();
        if entries.state(at) == State::Writeback(leaving.frame) {
            entries.set(at, State::Dirty(leaving.frame));
            image.dirty_chunks.lock().insert(number);
        } else {
            drop(entries);
            let freed = self.disown(leaving.frame);
            self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            self.give(vec![freed]);
        }
    }

    /// The periodic flush: up to the batch of each image, and down to the background mark when there is more.
    /// Returns how many blocks were written. Errors are noted in their images.
    pub fn flush_tick(&self) -> usize {
        let mut written = 0;
        for image in self.images() {
            if image.dirty_bytes() > 0 {
                written += self.flush_some(&image, self.config.flush_batch, 0..u64::MAX).unwrap_or(0);
            }
        }
        written
    }
}
