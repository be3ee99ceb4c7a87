//! Loading: absent blocks come in, by a fingerprint that another block has in memory already, else from the disk.
//!
//! Whoever loads a block marks it under its chunk's lock and excludes everybody until it is there, so a load is never
//! older than a write. The reader gets the bytes on the way, also where no frame was to be had.

use super::Cache;
use super::share::Offered;
use crate::BLOCK_BYTES;
use crate::error::Error;
use crate::file::BlockFile;
use crate::fingerprint::Fingerprint;
use crate::frames::{FrameIndex, OwnedFrame};
use crate::image::{Chunk, Entries, Image, State};
use crate::stats::add;
use crate::table::BlockKey;
use std::io;
use std::sync::atomic::Ordering;

/// What a load brought in for one block.
enum Brought {
    Nothing,
    Zero,
    Shared(FrameIndex),
    New(OwnedFrame, Fingerprint),
}

/// Where the bytes of a load go besides the cache: the reader's buffer, and how many bytes of the first block to skip.
pub(super) type Wanted<'a> = Option<(&'a mut [u8], usize)>;

impl Cache {
    /// Loads absent blocks from `first` up to `limit` of a chunk, stopping at the first that is present or in other
    /// hands, and returns how many. They are in the cache afterwards unless memory was short, and in `wanted` anyway.
    #[allow(clippy::too_many_arguments, reason = "the request, spelled out")]
    pub(super) fn load(
        &self,
        image: &Image,
        chunk: &Chunk,
        base: u64,
        first: usize,
        limit: usize,
        wanted: Wanted<'_>,
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<usize, Error> {
        let count = {
            let mut entries = chunk.entries.write();
            let limit = limit.min(first + self.config.io_blocks_max());
            let free = |entries: &Entries, at: usize| entries.state(at) == State::Absent && !entries.is_loading(at);
            let count = (first..limit).take_while(|&at| free(&entries, at)).count();
            (first..first + count).for_each(|at| entries.set_loading(at, true));
            count
        };
        if count == 0 {
            return Ok(0);
        }
        let first_block = base / BLOCK_BYTES as u64 + first as u64;
        let ahead = wanted.is_none();
        let mut brought: Vec<Brought> = (0..count).map(|_| Brought::Nothing).collect();
        let result = self.bring(image, first_block, &mut brought, wanted, spare);

        let mut fresh = Vec::new();
        {
            let mut entries = chunk.entries.write();
            for (n, brought) in brought.into_iter().enumerate() {
                let at = first + n;
                entries.set_loading(at, false);
                let key = BlockKey { image: image.id, block: first_block + n as u64 };
                match brought {
                    Brought::Nothing => {}
                    Brought::Zero => entries.set(at, State::Zero),
                    Brought::Shared(frame) => entries.set(at, State::Clean(frame)),
                    Brought::New(frame, fingerprint) => match self.offer(frame.index(), fingerprint, key) {
                        Offered::Kept => {
                            if ahead {
                                self.table.mark_ahead(frame.index());
                            }
                            entries.set(at, State::Clean(frame.index()));
                            fresh.push((frame.index(), fingerprint));
                        }
                        Offered::SharedWith(other) => {
                            add(&self.counters.shared_on_load, 1);
                            entries.set(at, State::Clean(other));
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

    /// Finds the content of `brought.len()` blocks from `first_block` on: by fingerprint, else from the disk.
    fn bring(
        &self,
        image: &Image,
        first_block: u64,
        brought: &mut [Brought],
        mut wanted: Wanted<'_>,
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<(), Error> {
        self.bring_by_fingerprint(image, first_block, brought, &mut wanted);
        let file = image.file()?;
        let mut at = 0;
        while at < brought.len() {
            let run = brought[at..].iter().take_while(|b| matches!(b, Brought::Nothing)).count();
            if run == 0 {
                at += 1;
                continue;
            }
            if spare.len() < run {
                self.allocate(run - spare.len(), spare);
            }
            let offset = (first_block + at as u64) * BLOCK_BYTES as u64;
            if spare.len() < run {
                self.read_uncached(&*file, image, offset, at, run, &mut wanted)?;
                at += run;
                continue;
            }
            // The last ones, in their order: fresh frames come in ascending runs, which makes few buffers.
            let mut frames = spare.split_off(spare.len() - run);
            let read = self.frames.fill(&mut frames, |buffers| file.read_at(buffers, offset));
            let read = match read {
                Ok(read) => read,
                Err(error) => {
                    spare.append(&mut frames);
                    return Err(error.into());
                }
            };
            add(&image.counters.disk_read_bytes, read);
            if (offset + read as u64) < image.size().min(offset + (run * BLOCK_BYTES) as u64) {
                // Shorter than it was: somebody cut it. What is missing reads as zeros until the change is accepted.
                image.changed.store(true, Ordering::Release);
            }
            let mut known = Vec::new();
            for (n, frame) in frames.into_iter().enumerate() {
                let valid = read.saturating_sub(n * BLOCK_BYTES).min(BLOCK_BYTES);
                if valid < BLOCK_BYTES {
                    self.frames.zero(frame.index(), valid..BLOCK_BYTES);
                }
                hand_over(&mut wanted, at + n, |skip, into| self.frames.copy_out(frame.index(), skip, into));
                let fingerprint = self.fingerprint(frame.index());
                known.push(fingerprint);
                brought[at + n] = if fingerprint == Fingerprint::ZERO_BLOCK {
                    spare.push(frame);
                    Brought::Zero
                } else {
                    Brought::New(frame, fingerprint)
                };
            }
            if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                fingerprints.learn(first_block + at as u64, &known);
            }
            at += run;
        }
        Ok(())
    }

    /// Fills in what fingerprints beside the image name and another block has in memory, with no disk I/O.
    fn bring_by_fingerprint(&self, image: &Image, first_block: u64, brought: &mut [Brought], wanted: &mut Wanted<'_>) {
        if !self.hasher.proves() {
            return;
        }
        let known: Vec<Fingerprint> = match &*image.fingerprints.lock() {
            Some(known) => (0..brought.len() as u64).map(|n| known.get(first_block + n)).collect(),
            None => return,
        };
        if known.iter().all(|&f| f == Fingerprint::UNKNOWN) || self.look_behind(image) {
            // Nothing known, or known of another version: the disk is asked.
            return;
        }
        let mut saved = 0;
        for (n, fingerprint) in known.into_iter().enumerate() {
            let key = BlockKey { image: image.id, block: first_block + n as u64 };
            brought[n] = match fingerprint {
                Fingerprint::UNKNOWN => continue,
                Fingerprint::ZERO_BLOCK => Brought::Zero,
                _ => match self.join(fingerprint, key) {
                    Some(frame) => Brought::Shared(frame),
                    None => continue,
                },
            };
            match &brought[n] {
                Brought::Shared(frame) => {
                    hand_over(wanted, n, |skip, into| self.frames.copy_out(*frame, skip, into));
                }
                _ => hand_over(wanted, n, |_, into| into.fill(0)),
            }
            saved += 1;
        }
        add(&image.counters.io_saved_bytes, saved * BLOCK_BYTES);
    }

    /// Reads for the caller alone, when no frame is to be had.
    fn read_uncached(
        &self,
        file: &dyn BlockFile,
        image: &Image,
        offset: u64,
        at: usize,
        run: usize,
        wanted: &mut Wanted<'_>,
    ) -> Result<(), Error> {
        add(&self.counters.uncached_reads, run);
        if wanted.is_none() {
            return Ok(());
        }
        let mut buffer = vec![0; run * BLOCK_BYTES];
        let read = file.read_at(&mut [io::IoSliceMut::new(&mut buffer)], offset)?;
        add(&image.counters.disk_read_bytes, read);
        buffer[read..].fill(0);
        for n in 0..run {
            let block = &buffer[n * BLOCK_BYTES..][..BLOCK_BYTES];
            hand_over(wanted, at + n, |skip, into| into.copy_from_slice(&block[skip..skip + into.len()]));
        }
        Ok(())
    }
}

/// Copies block `n` of a load into the reader's buffer, as far as he asked for it.
fn hand_over(wanted: &mut Wanted<'_>, n: usize, copy: impl FnOnce(usize, &mut [u8])) {
    let Some((buffer, skip)) = wanted else { return };
    // Block 0 gives its bytes from `skip` on; the buffer starts there.
    let (from, in_block) = if n == 0 { (0, *skip) } else { (n * BLOCK_BYTES - *skip, 0) };
    if from < buffer.len() {
        let part = (BLOCK_BYTES - in_block).min(buffer.len() - from);
        copy(in_block, &mut buffer[from..from + part]);
    }
}
