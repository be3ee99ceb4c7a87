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

/// Most runs of one batch that are tried again in halves: a disk that refuses everything is not asked for each block.
/// What a batch leaves is smaller runs, so the next one gets further.
const RETRIES_MAX: usize = 64;

/// A block on its way to the disk.
#[derive(Clone, Copy)]
struct Leaving {
    block: u64,
    frame: FrameIndex,
}

/// Blocks in a row, and what the disk said to them.
type Written<'a> = (&'a [Leaving], io::Result<()>);

/// What became of one batch, or of several in a row.
struct Batch {
    written: usize,
    /// Where the next batch starts, if there may be more.
    next: Option<u64>,
    /// The first error.
    result: io::Result<()>,
}

impl Cache {
    /// Writes the dirty blocks of `range` (in blocks) back and makes everything written so far durable. What goes
    /// wrong is noted in the image, to be told once to each of its handles.
    ///
    /// Returns whether nothing went wrong.
    pub fn sync(&self, image: &Image, range: Range<u64>) -> bool {
        self.sync_with(image, range, false)
    }

    /// As [`Cache::sync`]; with `attributes`, also what changed of mode, owner and times.
    pub(crate) fn sync_with(&self, image: &Image, range: Range<u64>, attributes: bool) -> bool {
        let errors_before = image.errors.count();
        // What the disk refused does not keep the rest from becoming durable.
        let flushed = self.flush_range(image, range).is_ok();
        let _flush = image.flush.lock();
        if !image.unsynced.swap(false, Ordering::AcqRel) && !attributes {
            return flushed && image.errors.count() == errors_before;
        }
        // Other flushes wait: whoever syncs after us must not find `unsynced` cleared before the disk has answered.
        add(&self.counters.syncs, 1);
        let result = image.file().and_then(|file| if attributes { file.sync_attributes() } else { file.sync() });
        if let Err(error) = &result {
            add(&self.counters.writeback_errors, 1);
            image.errors.note(error);
            // Not durable, so the next sync asks the disk again instead of finding nothing to do.
            image.unsynced.store(true, Ordering::Release);
        }
        flushed && result.is_ok() && image.errors.count() == errors_before
    }

    /// Writes all dirty blocks of `range` (in blocks) back.
    ///
    /// # Errors
    /// The first of the disk, after every other block was tried too; it is noted in the image, and the blocks
    /// concerned stay dirty.
    pub fn flush_range(&self, image: &Image, range: Range<u64>) -> io::Result<()> {
        self.flush_up_to(image, usize::MAX, range, false).result
    }

    /// Writes up to `count` dirty blocks back; returns how many. A disk that takes nothing of a batch is asked no
    /// further: whoever needs frames looks elsewhere.
    ///
    /// # Errors
    /// The disk's, when it took nothing at all.
    pub(crate) fn flush_some(&self, image: &Image, count: usize) -> io::Result<usize> {
        match self.flush_up_to(image, count, 0..u64::MAX, true) {
            Batch { written: 0, result: Err(error), .. } => Err(error),
            Batch { written, .. } => Ok(written),
        }
    }

    /// One pass upwards: it meets everything that is dirty now, once, and ends at the image's end whatever writers do.
    fn flush_up_to(&self, image: &Image, count: usize, range: Range<u64>, give_up: bool) -> Batch {
        let mut all = Batch { written: 0, next: Some(range.start), result: Ok(()) };
        while let Some(from) = all.next.filter(|_| all.written < count) {
            let batch = self.flush_batch(image, (count - all.written).min(BATCH_BLOCKS), from..range.end);
            let is_vain = batch.result.is_err() && batch.written == 0;
            all.written += batch.written;
            all.next = batch.next;
            all.result = all.result.and(batch.result);
            if give_up && is_vain {
                break;
            }
        }
        all
    }

    /// One batch; its error is noted in the image.
    fn flush_batch(&self, image: &Image, count: usize, range: Range<u64>) -> Batch {
        let _flush = image.flush.lock();
        let (batch, next) = self.take_dirty(image, count, range);
        if batch.is_empty() {
            return Batch { written: 0, next: None, result: Ok(()) };
        }
        let runs: Vec<&[Leaving]> =
            batch.chunk_by(|a, b| a.block + 1 == b.block).flat_map(|run| run.chunks(CHUNK_BLOCKS)).collect();
        // Read after the blocks went into writeback: whatever they hold was inside this size.
        let size = image.size();
        let mut results: Vec<Written<'_>> = Vec::new();
        let changed = image.change(|file| {
            results = self.write_runs(file, &runs, size);
            Ok(())
        });
        image.unsynced.store(true, Ordering::Release);
        if let Err(error) = changed {
            let code = error.raw_os_error().unwrap_or(libc::EIO);
            results = runs.iter().map(|run| (*run, Err(io::Error::from_raw_os_error(code)))).collect();
        }
        let mut first_error = None;
        let mut written = 0;
        let mut fresh = Vec::new();
        for (run, result) in results {
            match result {
                Ok(()) => {
                    written += run.len();
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
        if let Some(error) = &first_error {
            add(&self.counters.writeback_errors, 1);
            image.errors.note(error);
        }
        Batch { written, next, result: first_error.map_or(Ok(()), Err) }
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

    fn write_runs<'a>(&self, file: &dyn BlockFile, runs: &[&'a [Leaving]], size: u64) -> Vec<Written<'a>> {
        let retries = AtomicUsize::new(RETRIES_MAX);
        let next = AtomicUsize::new(0);
        let worker = || {
            let mut done = Vec::new();
            while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.write_run(file, run, size, &retries, &mut done);
            }
            done
        };
        // Many small runs: several in flight, or the disk idles between them.
        let others = self.config.workers.min(runs.len() / 4).saturating_sub(1);
        let mut results = std::thread::scope(|scope| {
            // Threads may be refused; this one writes in any case.
            let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, worker).ok();
            let others: Vec<_> = (0..others).filter_map(spawn).collect();
            let mut results = worker();
            for other in others {
                results.extend(other.join().expect("a writer does not panic"));
            }
            results
        });
        results.sort_unstable_by_key(|(run, _)| run[0].block);
        results
    }

    /// Writes a run of blocks. A refused one is tried again in halves, so that a bad block keeps none of its
    /// neighbours from the disk.
    fn write_run<'a>(
        &self,
        file: &dyn BlockFile,
        run: &'a [Leaving],
        size: u64,
        retries: &AtomicUsize,
        done: &mut Vec<Written<'a>>,
    ) {
        let offset = run[0].block * BLOCK_BYTES as u64;
        let frames: Vec<FrameIndex> = run.iter().map(|leaving| leaving.frame).collect();
        let bytes = size.saturating_sub(offset).min((run.len() * BLOCK_BYTES) as u64) as usize;
        let result = self.frames.gather(&frames, bytes, |buffers| file.write_at(buffers, offset));
        let again = || retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        if result.is_err() && run.len() > 1 && again() {
            let (low, high) = run.split_at(run.len() / 2);
            self.write_run(file, low, size, retries, done);
            self.write_run(file, high, size, retries, done);
        } else {
            done.push((run, result));
        }
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

    /// The periodic flush: up to the batch of each image, on from where the last one ended, so that a part that is written
    /// all the time does not keep the rest from the disk. Where more than the background mark is left, the next one is
    /// wanted at once. Returns how many blocks were written. Errors are noted in their images.
    pub fn flush_tick(&self) -> usize {
        let mut written = 0;
        for image in self.images().iter().filter(|image| image.dirty_bytes() > 0) {
            let from = image.flushed_to.swap(0, Ordering::Relaxed);
            let mut left = self.config.flush_batch;
            for range in [from..u64::MAX, 0..from] {
                let part = self.flush_up_to(image, left, range, false);
                written += part.written;
                left = left.saturating_sub(part.written);
                if let Some(next) = part.next {
                    image.flushed_to.store(next, Ordering::Relaxed);
                    break;
                }
            }
        }
        // Disks that take nothing are asked again in time.
        if written > 0 && self.dirty_blocks.load(Ordering::Relaxed) > self.config.dirty_background() {
            self.want_flush();
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::sim::{Faults, SimFile};
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_flush_goes_on_in_batches_down_to_the_background_mark() {
        let config =
            Config { cache_bytes: 4 << 20, flush_batch: 16, dirty_background_percent: 10, ..Config::default() };
        let cache = Cache::new(config).unwrap();
        let file = Arc::new(SimFile::new(vec![0; 4 << 20]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let dirty = || image.dirty_bytes() as usize / BLOCK_BYTES;
        // The writers ask for a flush; after that nobody writes.
        let write = |byte| (0..4).for_each(|n| cache.write(&image, n << 20, &[byte; 100 * BLOCK_BYTES]).unwrap());
        write(7);
        let mut ticks = 0;
        while cache.wait_for_flush(Duration::ZERO) {
            cache.flush_tick();
            ticks += 1;
            assert!(ticks < 1000, "it never ends");
        }
        let mark = cache.config.dirty_background();
        assert!((1..=mark).contains(&dirty()), "{} blocks after {ticks} ticks", dirty());
        // A disk that takes nothing is left alone until the interval is over.
        write(8);
        file.set_faults(Faults { write: Some(libc::EIO), ..Faults::default() });
        assert!(cache.wait_for_flush(Duration::ZERO));
        assert_eq!(cache.flush_tick(), 0);
        assert!(!cache.wait_for_flush(Duration::ZERO));
    }

    #[test]
    fn blocks_that_are_written_all_the_time_do_not_keep_others_from_the_disk() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, flush_batch: 16, ..Config::default() }).unwrap();
        let file = Arc::new(SimFile::new(vec![0; 4 << 20]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let old = (3 << 20) + 4096;
        cache.write(&image, old, &[7; 100]).unwrap();
        for turn in 1..=3 {
            cache.write(&image, 0, &[turn; 20 * BLOCK_BYTES]).unwrap();
            cache.write(&image, 1 << 20, &[turn; 20 * BLOCK_BYTES]).unwrap();
            assert!(cache.flush_tick() > 0);
        }
        assert_eq!(file.data()[old as usize], 7);
        // Nor is the beginning left alone: there they go on after the end.
        assert!(cache.flush_tick() > 0);
        assert_eq!(file.data()[0], 3);
    }
}
