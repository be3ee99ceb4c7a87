//! Writing dirty blocks back to the disk, which makes them clean and shareable.

use super::Cache;
use super::share::Offered;
use crate::file::BlockFile;
use crate::fingerprint::Fingerprint;
use crate::frame_table::BlockKey;
use crate::frames::FrameIndex;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS};
use crate::image::{BlockState, Image};
use crate::stats::add;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most blocks of one batch.
const BATCH_BLOCKS: usize = 1024;

/// Most runs of one batch that are retried in halves, so that a disk that refuses everything is not asked once a block.
/// A batch leaves smaller runs behind, so the next one gets further.
const RETRIES_MAX: usize = 64;

/// A block in writeback.
#[derive(Clone, Copy)]
struct InFlight {
    block: u64,
    frame: FrameIndex,
}

/// A run of consecutive blocks, and the result of its write.
type WrittenRun<'a> = (&'a [InFlight], io::Result<()>);

/// The result of one batch, or of several.
struct Batch {
    written: usize,
    /// Where the next batch starts, if there may be more.
    next: Option<u64>,
    /// The first error.
    result: io::Result<()>,
}

impl Cache {
    /// Writes the dirty blocks of `range` (in blocks) back and makes everything written so far durable. Errors are noted
    /// in the image, which reports them once to each of its handles.
    ///
    /// Returns true if there was no error.
    pub fn sync(&self, image: &Image, range: Range<u64>) -> bool {
        self.sync_with(image, range, false)
    }

    /// As [`Cache::sync`]; with `attributes`, mode, owner and times too.
    pub(crate) fn sync_with(&self, image: &Image, range: Range<u64>, attributes: bool) -> bool {
        let errors_before = image.errors.count();
        // Even if the disk refused blocks, the others become durable.
        let flushed = self.flush_range(image, range).is_ok();
        let _flush = image.flush.lock();
        if !image.unsynced.swap(false, Ordering::AcqRel) && !attributes {
            return flushed && image.errors.count() == errors_before;
        }
        // With `flush` locked, a later sync cannot find `unsynced` cleared before the disk has answered this one.
        add(&self.counters.syncs, 1);
        let result = image.file().and_then(|file| if attributes { file.sync_attributes() } else { file.sync() });
        if let Err(error) = &result {
            add(&self.counters.writeback_errors, 1);
            image.errors.note(error);
            // Set again, so that the next sync asks the disk instead of finding nothing to do.
            image.unsynced.store(true, Ordering::Release);
        }
        flushed && result.is_ok() && image.errors.count() == errors_before
    }

    /// Writes all dirty blocks of `range` (in blocks) back.
    ///
    /// # Errors
    /// The disk's first error, after every other block was tried too. It is noted in the image, and the refused blocks
    /// stay dirty.
    pub fn flush_range(&self, image: &Image, range: Range<u64>) -> io::Result<()> {
        self.flush_up_to(image, usize::MAX, range, false).result
    }

    /// Writes up to `count` dirty blocks back; returns how many. Stops at a batch of which the disk accepts nothing, so
    /// that a caller that needs frames can flush another image.
    ///
    /// # Errors
    /// The disk's, if it accepted nothing at all.
    pub(crate) fn flush_some(&self, image: &Image, count: usize) -> io::Result<usize> {
        match self.flush_up_to(image, count, 0..u64::MAX, true) {
            Batch { written: 0, result: Err(error), .. } => Err(error),
            Batch { written, .. } => Ok(written),
        }
    }

    /// One ascending pass: it meets every block that is dirty now once, and ends at the image's end whatever writers do.
    fn flush_up_to(&self, image: &Image, count: usize, range: Range<u64>, stop_if_refused: bool) -> Batch {
        let mut all = Batch { written: 0, next: Some(range.start), result: Ok(()) };
        while let Some(from) = all.next.filter(|_| all.written < count) {
            let batch = self.flush_batch(image, (count - all.written).min(BATCH_BLOCKS), from..range.end);
            let is_refused = batch.result.is_err() && batch.written == 0;
            all.written += batch.written;
            all.next = batch.next;
            all.result = all.result.and(batch.result);
            if stop_if_refused && is_refused {
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
        let runs: Vec<&[InFlight]> =
            batch.chunk_by(|a, b| a.block + 1 == b.block).flat_map(|run| run.chunks(CHUNK_BLOCKS)).collect();
        // Read after the blocks went into writeback, so all of their data lies inside this size.
        let size = image.size();
        let mut results: Vec<WrittenRun<'_>> = Vec::new();
        let changed = image.change_content(|file| {
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
                    run.iter().for_each(|block| self.complete(image, *block, &mut fresh));
                }
                Err(error) => {
                    run.iter().for_each(|block| self.fail(image, *block));
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
    fn take_dirty(&self, image: &Image, count: usize, range: Range<u64>) -> (Vec<InFlight>, Option<u64>) {
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
                if let BlockState::Dirty(frame) = entries.state(at)
                    && range.contains(&block)
                {
                    entries.set(at, BlockState::Writeback(frame));
                    batch.push(InFlight { block, frame });
                }
            }
            if entries.dirty() == 0 {
                image.dirty_chunks.lock().remove(&number);
            }
        }
        (batch, None)
    }

    fn write_runs<'a>(&self, file: &dyn BlockFile, runs: &[&'a [InFlight]], size: u64) -> Vec<WrittenRun<'a>> {
        let retries = AtomicUsize::new(RETRIES_MAX);
        let next = AtomicUsize::new(0);
        let worker = || {
            let mut done = Vec::new();
            while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.write_run(file, run, size, &retries, &mut done);
            }
            done
        };
        // Many small runs are written by several threads, or the disk would idle between them.
        let others = self.config.workers.min(runs.len() / 4).saturating_sub(1);
        let mut results = std::thread::scope(|scope| {
            // The system may refuse threads; this one writes in any case.
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

    /// Writes a run of blocks. Retries a refused run in halves, so that a bad block keeps no neighbour from the disk.
    fn write_run<'a>(
        &self,
        file: &dyn BlockFile,
        run: &'a [InFlight],
        size: u64,
        retries: &AtomicUsize,
        done: &mut Vec<WrittenRun<'a>>,
    ) {
        let offset = run[0].block * BLOCK_BYTES as u64;
        let frames: Vec<FrameIndex> = run.iter().map(|block| block.frame).collect();
        let bytes = size.saturating_sub(offset).min((run.len() * BLOCK_BYTES) as u64) as usize;
        let result = self.frames.gather(&frames, bytes, |buffers| file.write_at(buffers, offset));
        let may_retry =
            || retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        if result.is_err() && run.len() > 1 && may_retry() {
            let (low, high) = run.split_at(run.len() / 2);
            self.write_run(file, low, size, retries, done);
            self.write_run(file, high, size, retries, done);
        } else {
            done.push((run, result));
        }
    }

    /// Makes a written block clean, and shared if its content is in memory already.
    fn complete(&self, image: &Image, written: InFlight, fresh: &mut Vec<(FrameIndex, Fingerprint)>) {
        let key = BlockKey { image: image.id, block: written.block };
        let fingerprint = self.fingerprint(written.frame);
        let chunk = image.chunk(written.block / CHUNK_BLOCKS as u64);
        let at = written.block as usize % CHUNK_BLOCKS;
        let mut freed = None;
        {
            let mut entries = chunk.entries.write();
            if entries.state(at) != BlockState::Writeback(written.frame) {
                // Written again since: the newer content is in another frame.
                freed = Some(self.disown(written.frame));
            } else if fingerprint == Fingerprint::ZERO_BLOCK {
                entries.set(at, BlockState::Zero);
                freed = Some(self.disown(written.frame));
            } else {
                match self.offer(written.frame, fingerprint, key) {
                    Offered::Kept => {
                        entries.set(at, BlockState::Clean(written.frame));
                        fresh.push((written.frame, fingerprint));
                    }
                    Offered::SharedWith(other) => {
                        add(&self.counters.shared_after_writeback, 1);
                        entries.set(at, BlockState::Clean(other));
                        freed = Some(self.disown(written.frame));
                    }
                }
                if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                    fingerprints.learn(written.block, &[fingerprint]);
                }
            }
        }
        self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
        image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
        self.free_frames(freed.into_iter().collect());
    }

    /// Makes a refused block dirty again, unless it was written again and its newer content is in another frame.
    fn fail(&self, image: &Image, refused: InFlight) {
        let number = refused.block / CHUNK_BLOCKS as u64;
        let chunk = image.chunk(number);
        let at = refused.block as usize % CHUNK_BLOCKS;
        let mut entries = chunk.entries.write();
        if entries.state(at) == BlockState::Writeback(refused.frame) {
            entries.set(at, BlockState::Dirty(refused.frame));
            image.dirty_chunks.lock().insert(number);
        } else {
            drop(entries);
            let freed = self.disown(refused.frame);
            self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            self.free_frames(vec![freed]);
        }
    }

    /// The periodic flush: up to `flush_batch` blocks of each image. It continues where the last one ended, so that a part
    /// that is written all the time does not keep the rest from the disk. If more than the background mark is left, it
    /// requests the next one. Returns how many blocks were written. Errors are noted in their images.
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
        // If the disks accepted nothing, the next flush comes with the interval only.
        if written > 0 && self.dirty_blocks.load(Ordering::Relaxed) > self.config.dirty_background() {
            self.request_flush();
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
    fn flushes_continue_in_batches_down_to_the_background_mark() {
        let config =
            Config { cache_bytes: 4 << 20, flush_batch: 16, dirty_background_percent: 10, ..Config::default() };
        let cache = Cache::new(config).unwrap();
        let file = Arc::new(SimFile::new(vec![0; 4 << 20]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let dirty = || image.dirty_bytes() as usize / BLOCK_BYTES;
        // The writes request a flush; no write follows.
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
        // A disk that accepts nothing is not asked again until the interval is over.
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
        // After the end it continues at the beginning.
        assert!(cache.flush_tick() > 0);
        assert_eq!(file.data()[0], 3);
    }
}
