//! The cache: blocks of many images, equal content once.
//!
//! A *clean* block equals the disk; its frame is shared with every block of the same content, whichever image it is in.
//! A *write* to a shared block breaks it into a private *dirty* one. A flush takes dirty blocks through *writeback*,
//! in which nobody touches the frame; a write meanwhile goes to a new frame. After writeback the block is clean and
//! joins its equals again. Blocks of zeros take no frame at all.
//!
//! What it promises: a reader sees the last write; what a sync acknowledged is on the disk; equal bytes are compared
//! before they are shared (unless a strong fingerprint stands for them). What it does not: order of unsynced writes.
//!
//! Locks, outermost first: `Image::shape`, `Image::flush`, `Image::known`, `Image::kept`, a chunk's entries,
//! `Image::dirty_chunks`, a frame's record. Frames are allocated (which may flush and evict) with at most `shape` held. Nobody who holds
//! `flush` ever waits for a frame or for `shape`, so a full cache always drains.

use crate::BLOCK_BYTES;
use crate::config::Config;
use crate::error::Error;
use crate::file::{Allocate, BlockFile, Stamp};
use crate::fingerprint::{Fingerprint, Hasher, is_zero};
use crate::fingerprints::FingerprintDir;
use crate::frames::{FrameIndex, Frames, OwnedFrame};
use crate::image::{Chunk, Entries, Image, State};
use crate::index::ContentIndex;
use crate::policy::Queues;
use crate::stats::{Counters, add};
use crate::table::{BlockKey, FreeFrames, Sharers, Table, Use};
use parking_lot::{Condvar, Mutex, RwLock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Blocks per chunk: 1 MiB, the largest request of a front end.
pub(crate) const CHUNK_BLOCKS: usize = 256;
const CHUNK_BYTES: u64 = (CHUNK_BLOCKS * BLOCK_BYTES) as u64;
/// From so many frames (64 MiB) on they lie on huge pages, unless they are to be merged page by page.
const HUGE_PAGES_FROM: usize = 1 << 14;
/// Largest file: what a signed 64-bit offset can address, in whole blocks.
const FILE_BYTES_MAX: u64 = i64::MAX as u64 & !(BLOCK_BYTES as u64 - 1);

/// One cache for many images.
pub struct Cache {
    pub(crate) config: Config,
    pub(crate) frames: Frames,
    pub(crate) table: Table,
    pub(crate) free: FreeFrames,
    pub(crate) queues: Mutex<Queues>,
    pub(crate) index: ContentIndex,
    pub(crate) hasher: Hasher,
    images: RwLock<Vec<Option<Arc<Image>>>>,
    pub(crate) dirty_blocks: AtomicUsize,
    pub(crate) counters: Counters,
    flush_wanted: Mutex<bool>,
    flush_signal: Condvar,
    merging: bool,
    ended: AtomicBool,
}

/// What became of a frame that was offered for sharing.
pub(crate) enum Offered {
    /// It stands for its content now, or keeps it unshared.
    Kept,
    /// The content is in that frame already; the offered one is not needed.
    SharedWith(FrameIndex),
}

/// What a load brought in for one block.
enum Brought {
    Nothing,
    Zero,
    Shared(FrameIndex),
    New(OwnedFrame, Fingerprint),
}

/// Where the bytes of a load go besides the cache: the reader's buffer, and how many bytes of the first block to skip.
type Wanted<'a> = Option<(&'a mut [u8], usize)>;

impl Cache {
    /// Makes an empty cache.
    ///
    /// # Errors
    /// The memory cannot be mapped.
    pub fn new(config: Config) -> io::Result<Self> {
        let frame_count = config.frame_count();
        let frames = Frames::new(frame_count)?;
        let merging = config.merge && frames.allow_merging().is_ok();
        if !merging && frame_count >= HUGE_PAGES_FROM {
            frames.prefer_huge_pages();
        }
        Ok(Self {
            frames,
            table: Table::new(frame_count),
            free: FreeFrames::new(frame_count),
            queues: Mutex::new(Queues::new(frame_count)),
            index: ContentIndex::new(frame_count)?,
            hasher: Hasher::new(&config.key),
            images: RwLock::default(),
            dirty_blocks: AtomicUsize::new(0),
            counters: Counters::default(),
            flush_wanted: Mutex::new(false),
            flush_signal: Condvar::new(),
            merging,
            ended: AtomicBool::new(false),
            config,
        })
    }

    /// Refuses changes from here on; those under way are done when this returns.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        for image in self.images() {
            drop(image.shape.write());
        }
    }

    /// Asked by every change with the image's shape held.
    fn refuse_after_end(&self) -> Result<(), Error> {
        if self.ended.load(Ordering::Acquire) { Err(Error::Ended) } else { Ok(()) }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the frames may be merged with equal pages of other processes.
    pub fn merging(&self) -> bool {
        self.merging
    }

    /// Takes an image in; its blocks come when they are read.
    ///
    /// # Errors
    /// The file cannot be looked at.
    pub fn add_image(&self, name: &str, file: Arc<dyn BlockFile>) -> io::Result<Arc<Image>> {
        let stamp = file.stamp()?;
        Ok(self.add_image_at(name, file, stamp))
    }

    /// As [`Cache::add_image`], for a file that is `stamp` now.
    pub(crate) fn add_image_at(&self, name: &str, file: Arc<dyn BlockFile>, stamp: Stamp) -> Arc<Image> {
        let mut images = self.images.write();
        let id = images.iter().position(Option::is_none).unwrap_or_else(|| {
            images.push(None);
            images.len() - 1
        });
        let image = Arc::new(Image::new(id as u32, name.to_owned(), file, stamp));
        images[id] = Some(image.clone());
        image
    }

    /// Drops an image and all its blocks, dirty ones too: for a file that is gone.
    pub fn discard_image(&self, image: &Image) {
        let _shape = image.shape.write();
        let _flush = image.flush.lock();
        self.drop_blocks(image, 0, u64::MAX, true);
        image.gone.store(true, Ordering::Release);
        image.set_file(None);
        self.images.write()[image.id as usize] = None;
    }

    /// All images with a place in the cache.
    pub fn images(&self) -> Vec<Arc<Image>> {
        self.images.read().iter().flatten().cloned().collect()
    }

    fn image(&self, id: u32) -> Option<Arc<Image>> {
        self.images.read().get(id as usize).cloned().flatten()
    }

    // ---- reading ----

    /// Reads into `buffer` from byte `offset`; returns fewer bytes than asked only at the end of the image.
    ///
    /// # Errors
    /// The disk's. What precedes the failing block is not returned.
    pub fn read(&self, image: &Image, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.accept_change(image)?;
        if offset.saturating_add(buffer.len() as u64) > image.size() && self.look_behind(image) {
            self.accept_change(image)?;
        }
        let _shape = image.shape.read();
        let length = (image.size().saturating_sub(offset)).min(buffer.len() as u64) as usize;
        let mut rest = &mut buffer[..length];
        let mut at = offset;
        let mut spare = Vec::new();
        while !rest.is_empty() {
            let part = ((CHUNK_BYTES - at % CHUNK_BYTES) as usize).min(rest.len());
            let (now, later) = rest.split_at_mut(part);
            let result = self.read_in_chunk(image, at, now, &mut spare);
            if result.is_err() {
                self.give(spare);
                return result.map(|()| 0);
            }
            rest = later;
            at += part as u64;
        }
        self.give(spare);
        Ok(length)
    }

    /// Gives `length` bytes from `offset` to `give` as they lie in the cache, without a copy, if they are one piece
    /// there; else returns `give`, and [`Cache::read`] serves. The end of the image cuts what is given.
    ///
    /// Images that were read in sequence lie in ascending frames, and so does what shares them: most requests are one
    /// piece. The chunk stays locked for reading while `give` runs, so `give` must not wait for other requests.
    pub(crate) fn read_in_place<R, G>(&self, image: &Image, offset: u64, length: usize, give: G) -> Result<R, G>
    where
        G: FnOnce(&[u8]) -> R,
    {
        if image.changed.load(Ordering::Acquire) || offset.saturating_add(length as u64) > image.size() {
            return Err(give);
        }
        let _shape = image.shape.read();
        if length == 0 || offset.saturating_add(length as u64) > image.size() {
            return Err(give);
        }
        let first = (offset % CHUNK_BYTES) as usize;
        if first + length > CHUNK_BYTES as usize {
            return Err(give);
        }
        let Some(chunk) = image.existing_chunk(offset / CHUNK_BYTES) else { return Err(give) };
        let entries = chunk.entries.read();
        let blocks = first / BLOCK_BYTES..(first + length).div_ceil(BLOCK_BYTES);
        let Some(start) = entries.state(blocks.start).frame() else { return Err(give) };
        let in_line = |at: usize| {
            let expected = FrameIndex(start.0 + (at - blocks.start) as u32);
            entries.state(at).frame() == Some(expected)
        };
        if !blocks.clone().skip(1).all(in_line) {
            return Err(give);
        }
        (0..blocks.len() as u32).for_each(|n| self.table.touch(FrameIndex(start.0 + n)));
        add(&image.counters.hits, blocks.len());
        Ok(self.frames.read_run(start, blocks.len(), |bytes| give(&bytes[first % BLOCK_BYTES..][..length])))
    }

    fn read_in_chunk(
        &self,
        image: &Image,
        offset: u64,
        buffer: &mut [u8],
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<(), Error> {
        let chunk = image.chunk(offset / CHUNK_BYTES);
        let base = offset / CHUNK_BYTES * CHUNK_BYTES;
        let mut done = 0;
        while done < buffer.len() {
            let before = done;
            let (at, skip) = {
                let entries = chunk.entries.read();
                loop {
                    let position = (offset - base) as usize + done;
                    let (at, skip) = (position / BLOCK_BYTES, position % BLOCK_BYTES);
                    if done == buffer.len() {
                        break (at, skip);
                    }
                    let part = (BLOCK_BYTES - skip).min(buffer.len() - done);
                    match entries.state(at) {
                        State::Absent => break (at, skip),
                        State::Zero => buffer[done..done + part].fill(0),
                        State::Clean(frame) | State::Dirty(frame) | State::Writeback(frame) => {
                            if done + part < buffer.len()
                                && at + 1 < CHUNK_BLOCKS
                                && let Some(next) = entries.state(at + 1).frame()
                            {
                                self.frames.prefetch(next);
                            }
                            self.frames.copy_out(frame, skip, &mut buffer[done..done + part]);
                            self.table.touch(frame);
                        }
                    }
                    done += part;
                }
            };
            add(&image.counters.hits, (done - before).div_ceil(BLOCK_BYTES));
            if done == buffer.len() {
                break;
            }
            let limit = at + (skip + buffer.len() - done).div_ceil(BLOCK_BYTES);
            let wanted = Some((&mut buffer[done..], skip));
            match self.load(image, &chunk, base, at, limit, wanted, spare)? {
                0 => chunk.wait_loaded(at),
                blocks => {
                    add(&image.counters.misses, blocks);
                    done = (done + blocks * BLOCK_BYTES - skip).min(buffer.len());
                }
            }
        }
        Ok(())
    }

    /// Whether a block of `range` (in bytes) inside the image is not in memory and not on its way there.
    pub(crate) fn has_absent(&self, image: &Image, range: std::ops::Range<u64>) -> bool {
        let blocks = range.start / BLOCK_BYTES as u64..range.end.min(image.size()).div_ceil(BLOCK_BYTES as u64);
        let mut at = blocks.start;
        while at < blocks.end {
            let Some(chunk) = image.existing_chunk(at / CHUNK_BLOCKS as u64) else { return true };
            let entries = chunk.entries.read();
            let first = at as usize % CHUNK_BLOCKS;
            let last = CHUNK_BLOCKS.min(first + (blocks.end - at) as usize);
            if (first..last).any(|n| entries.state(n) == State::Absent && !entries.is_loading(n)) {
                return true;
            }
            at += (last - first) as u64;
        }
        false
    }

    /// Brings absent blocks of `range` in before they are asked for. Errors are left to the reader who comes for them.
    pub fn read_ahead(&self, image: &Image, range: std::ops::Range<u64>) {
        let _shape = image.shape.read();
        let end = range.end.min(image.size());
        let mut at = range.start / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let mut spare = Vec::new();
        while at < end && !image.gone.load(Ordering::Acquire) {
            let base = at / CHUNK_BYTES * CHUNK_BYTES;
            let chunk = image.chunk(at / CHUNK_BYTES);
            let first = ((at - base) / BLOCK_BYTES as u64) as usize;
            let limit = ((end - base).div_ceil(BLOCK_BYTES as u64) as usize).min(CHUNK_BLOCKS);
            let absent = {
                let entries = chunk.entries.read();
                (first..limit).find(|&n| entries.state(n) == State::Absent && !entries.is_loading(n))
            };
            let Some(first) = absent else {
                at = base + CHUNK_BYTES;
                continue;
            };
            match self.load(image, &chunk, base, first, limit, None, &mut spare) {
                Ok(blocks) => {
                    add(&self.counters.read_ahead_blocks, blocks);
                    at = base + ((first + blocks.max(1)) * BLOCK_BYTES) as u64;
                }
                Err(_) => break,
            }
        }
        self.give(spare);
    }

    /// Loads absent blocks from `first` up to `limit` of a chunk, stopping at the first that is present or in other
    /// hands, and returns how many. They are in the cache afterwards unless memory was short, and in `wanted` anyway.
    #[allow(clippy::too_many_arguments, reason = "the request, spelled out")]
    fn load(
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

    pub(crate) fn fingerprint(&self, frame: FrameIndex) -> Fingerprint {
        self.frames.read(
            frame,
            |bytes| {
                if is_zero(bytes) { Fingerprint::ZERO_BLOCK } else { self.hasher.fingerprint(bytes) }
            },
        )
    }

    // ---- sharing ----

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
    fn join(&self, fingerprint: Fingerprint, key: BlockKey) -> Option<FrameIndex> {
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
    pub(crate) fn leave(&self, frame: FrameIndex, key: BlockKey) -> Option<OwnedFrame> {
        let mut body = self.table.lock(frame);
        body.sharers.remove(key);
        if body.sharers.len() > 0 {
            return None;
        }
        if body.indexed {
            self.index.remove(body.fingerprint, frame);
        }
        body.indexed = false;
        body.used = Use::None;
        Some(OwnedFrame(frame))
    }

    // ---- writing ----

    /// Writes `data` at byte `offset`, growing the image if it reaches beyond its end.
    ///
    /// # Errors
    /// The disk's (reading the rest of a half-written block, growing the file), or [`Error::Full`].
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
            let _shape = image.shape.read();
            self.refuse_after_end()?;
            if end <= image.size() {
                return self.write_blocks(image, offset, data, u64::MAX);
            }
        }
        // Growing is exclusive: nobody else can have put anything beyond the old end.
        let _shape = image.shape.write();
        self.refuse_after_end()?;
        let size_before = image.size();
        if end > size_before {
            image.change(|file| file.set_len(end))?;
            image.unsynced.store(true, Ordering::Release);
            image.size.store(end, Ordering::Release);
        }
        self.write_blocks(image, offset, data, size_before)
    }

    fn range_end(&self, offset: u64, length: u64) -> Result<u64, Error> {
        offset.checked_add(length).filter(|&end| end <= FILE_BYTES_MAX).ok_or(Error::Range { offset, length })
    }

    /// Writes with the shape held. Blocks from byte `empty_from` on were never on the disk.
    fn write_blocks(&self, image: &Image, offset: u64, data: &[u8], empty_from: u64) -> Result<(), Error> {
        let mut spare = Vec::new();
        let mut done = 0;
        let part_max = self.config.io_blocks_max() * BLOCK_BYTES;
        let mut result = Ok(());
        while done < data.len() && result.is_ok() {
            let at = offset + done as u64;
            let to_chunk_end = (CHUNK_BYTES - at % CHUNK_BYTES) as usize;
            let part = to_chunk_end.min(part_max).min(data.len() - done);
            result = self.write_in_chunk(image, at, &data[done..done + part], empty_from, &mut spare);
            done += part;
        }
        self.give(spare);
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
        let base = offset / CHUNK_BYTES * CHUNK_BYTES;
        let start = (offset - base) as usize;
        let end = start + data.len();
        let blocks = start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        // One more than the blocks: a half-written block may have to be loaded first.
        let needed = blocks.len() + 1;
        self.make_room_for_dirty(image, blocks.len())?;
        if spare.len() < needed {
            self.allocate(needed - spare.len(), spare);
            if spare.len() < needed {
                return Err(Error::Full(io::Error::from_raw_os_error(libc::ENOMEM)));
            }
        }
        let chunk = image.chunk(offset / CHUNK_BYTES);
        let partial = |at: usize| at * BLOCK_BYTES < start || (at + 1) * BLOCK_BYTES > end;
        let on_disk = |at: usize| base + ((at * BLOCK_BYTES) as u64) < empty_from;
        loop {
            let mut entries = chunk.entries.write();
            if let Some(at) = blocks.clone().find(|&at| entries.is_loading(at)) {
                drop(entries);
                chunk.wait_loaded(at);
                continue;
            }
            let missing = |at: &usize| partial(*at) && on_disk(*at) && entries.state(*at) == State::Absent;
            let edge = [blocks.start, blocks.end - 1].into_iter().find(missing);
            if let Some(at) = edge {
                drop(entries);
                self.load(image, &chunk, base, at, at + 1, None, spare)?;
                if spare.len() < blocks.len() {
                    self.allocate(needed - spare.len(), spare);
                }
                continue;
            }
            if spare.len() < blocks.len() {
                return Err(Error::Full(io::Error::from_raw_os_error(libc::ENOMEM)));
            }
            let dirty_before = entries.dirty();
            for at in blocks.clone() {
                let from = start.max(at * BLOCK_BYTES);
                let to = end.min((at + 1) * BLOCK_BYTES);
                let piece = &data[from - start..to - start];
                let block = base / BLOCK_BYTES as u64 + at as u64;
                self.write_block(image, &mut entries, at, block, from % BLOCK_BYTES, piece, spare);
            }
            if dirty_before == 0 {
                image.dirty_chunks.lock().insert(base / CHUNK_BYTES);
            }
            drop(entries);
            if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                let first = base / BLOCK_BYTES as u64;
                fingerprints.forget(first + blocks.start as u64..first + blocks.end as u64);
            }
            break;
        }
        image.note_written();
        if self.dirty_blocks.load(Ordering::Relaxed) > self.config.dirty_background() {
            self.want_flush();
        }
        Ok(())
    }

    /// Writes into one block under its chunk's lock; this is where sharing breaks.
    #[allow(clippy::too_many_arguments, reason = "the request, spelled out")]
    fn write_block(
        &self,
        image: &Image,
        entries: &mut Entries,
        at: usize,
        block: u64,
        skip: usize,
        piece: &[u8],
        spare: &mut Vec<OwnedFrame>,
    ) {
        let key = BlockKey { image: image.id, block };
        let whole = piece.len() == BLOCK_BYTES;
        let mut fresh = || spare.pop().expect("as many frames as blocks were allocated");
        let (frame, becomes_dirty) = match entries.state(at) {
            State::Dirty(frame) => {
                self.frames.copy_in(frame, skip, piece);
                self.table.touch(frame);
                return;
            }
            State::Absent | State::Zero => {
                let frame = fresh();
                if !whole {
                    self.frames.zero(frame.index(), 0..BLOCK_BYTES);
                }
                (frame, true)
            }
            State::Clean(shared) => match self.leave(shared, key) {
                // Nobody else has it: it leaves the index and is written in place.
                Some(own) => (own, true),
                None => {
                    let frame = fresh();
                    if !whole {
                        self.frames.copy(shared, &frame);
                    }
                    add(&self.counters.breaks, 1);
                    (frame, true)
                }
            },
            State::Writeback(leaving) => {
                // The frame on its way to the disk is left alone; the flusher finds it replaced and frees it.
                let frame = fresh();
                if !whole {
                    self.frames.copy(leaving, &frame);
                }
                (frame, true)
            }
        };
        self.frames.copy_in(frame.index(), skip, piece);
        {
            let mut body = self.table.lock(frame.index());
            body.used = Use::Dirty;
            body.indexed = false;
            body.sharers = Sharers::One(key);
        }
        self.table.set_touches(frame.index(), 0);
        entries.set(at, State::Dirty(frame.index()));
        if becomes_dirty {
            self.dirty_blocks.fetch_add(1, Ordering::Relaxed);
            image.dirty_blocks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sets the size of an image; a longer one reads as zeros there.
    ///
    /// # Errors
    /// The file system's; nothing has changed then.
    pub fn set_size(&self, image: &Image, size: u64) -> Result<(), Error> {
        self.range_end(size, 0)?;
        self.accept_change(image)?;
        if !image.file()?.writable() {
            return Err(Error::ReadOnly);
        }
        let _shape = image.shape.write();
        self.refuse_after_end()?;
        self.set_size_exclusive(image, size)
    }

    fn set_size_exclusive(&self, image: &Image, size: u64) -> Result<(), Error> {
        // No writeback may be on its way to what is cut off: it would bring it back.
        let _flush = image.flush.lock();
        let before = image.size();
        image.change(|file| file.set_len(size))?;
        image.unsynced.store(true, Ordering::Release);
        image.size.store(size, Ordering::Release);
        if size < before {
            self.cut_blocks(image, size);
        }
        Ok(())
    }

    /// Drops the blocks beyond `size`, and what the last one held there. `shape` and `flush` are held.
    fn cut_blocks(&self, image: &Image, size: u64) {
        let whole = size / BLOCK_BYTES as u64;
        let inside = (size % BLOCK_BYTES as u64) as usize;
        let mut first_gone = whole;
        if inside > 0 {
            first_gone += 1;
            let at = whole as usize % CHUNK_BLOCKS;
            if let Some(chunk) = image.existing_chunk(whole / CHUNK_BLOCKS as u64) {
                let mut entries = chunk.entries.write();
                if let State::Dirty(frame) = entries.state(at) {
                    self.frames.zero(frame, inside..BLOCK_BYTES);
                } else {
                    // It comes again from the disk, with zeros beyond the end.
                    let mut freed = Vec::new();
                    self.drop_block(image, &mut entries, at, whole, &mut freed);
                    drop(entries);
                    self.give(freed);
                }
            }
        }
        self.drop_blocks(image, first_gone, u64::MAX, true);
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.forget(whole..u64::MAX);
        }
    }

    /// Makes `length` bytes from `offset` read as zeros and gives their disk space back; the size stays.
    ///
    /// # Errors
    /// The disk's.
    pub fn punch(&self, image: &Image, offset: u64, length: u64) -> Result<(), Error> {
        self.clear(image, Allocate::Punch, offset, length)
    }

    /// Makes `length` bytes from `offset` read as zeros and keeps or reserves their disk space; the size stays.
    ///
    /// # Errors
    /// The disk's.
    pub fn zero(&self, image: &Image, offset: u64, length: u64) -> Result<(), Error> {
        self.clear(image, Allocate::Zero, offset, length)
    }

    fn clear(&self, image: &Image, how: Allocate, offset: u64, length: u64) -> Result<(), Error> {
        let end = self.range_end(offset, length)?;
        self.accept_change(image)?;
        if !image.file()?.writable() {
            return Err(Error::ReadOnly);
        }
        let _shape = image.shape.write();
        self.refuse_after_end()?;
        let end = end.min(image.size());
        if offset >= end {
            return Ok(());
        }
        let block = BLOCK_BYTES as u64;
        // The block at the end of the file may be dropped whole: beyond the end there are only zeros.
        let last = if end == image.size() { end.next_multiple_of(block) } else { end / block * block };
        let first = offset.next_multiple_of(block).min(last.max(offset));
        let zeros = [0; BLOCK_BYTES];
        if first >= last {
            return self.write_zeros(image, offset, end, &zeros);
        }
        self.write_zeros(image, offset, first, &zeros)?;
        if last < end {
            self.write_zeros(image, last, end, &zeros)?;
        }
        {
            let _flush = image.flush.lock();
            let cleared = image.change(|file| file.allocate(how, first, last - first));
            match cleared {
                Ok(()) => {
                    image.unsynced.store(true, Ordering::Release);
                    self.drop_blocks(image, first / block, last / block, true);
                    if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                        fingerprints.forget(first / block..last / block);
                    }
                    return Ok(());
                }
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.write_zeros(image, first, last.min(end), &zeros)
    }

    fn write_zeros(&self, image: &Image, from: u64, to: u64, zeros: &[u8; BLOCK_BYTES]) -> Result<(), Error> {
        let mut at = from;
        while at < to {
            let part = (BLOCK_BYTES as u64 - at % BLOCK_BYTES as u64).min(to - at);
            self.write_blocks(image, at, &zeros[..part as usize], u64::MAX)?;
            at += part;
        }
        Ok(())
    }

    /// Reserves disk space for `length` bytes from `offset`; grows the image unless `keep_size`.
    ///
    /// # Errors
    /// The file system's, `ENOSPC` above all.
    pub fn reserve(&self, image: &Image, offset: u64, length: u64, keep_size: bool) -> Result<(), Error> {
        let end = self.range_end(offset, length)?;
        self.accept_change(image)?;
        let _shape = image.shape.write();
        self.refuse_after_end()?;
        image.change(|file| file.allocate(Allocate::Reserve, offset, length))?;
        image.unsynced.store(true, Ordering::Release);
        if !keep_size && end > image.size() {
            self.set_size_exclusive(image, end)?;
        }
        Ok(())
    }

    /// Finds data or a hole at or after `offset`.
    ///
    /// # Errors
    /// `ENXIO` when there is none; the disk's when dirty blocks cannot be written first.
    pub fn seek(&self, image: &Image, offset: u64, data: bool) -> Result<u64, Error> {
        if image.dirty_bytes() > 0 {
            // A dirty block may lie in what is still a hole on the disk.
            self.flush_range(image, 0..u64::MAX)?;
        }
        Ok(image.file()?.seek(offset, data)?)
    }

    // ---- dropping ----

    /// Drops blocks `from..to`. With `dirty_too`, unwritten data as well, and `flush` must be held.
    pub(crate) fn drop_blocks(&self, image: &Image, from: u64, to: u64, dirty_too: bool) {
        for number in image.chunk_numbers(from / CHUNK_BLOCKS as u64) {
            let first = number * CHUNK_BLOCKS as u64;
            if first >= to {
                continue;
            }
            let Some(chunk) = image.existing_chunk(number) else { continue };
            let mut freed = Vec::new();
            let mut entries = chunk.entries.write();
            for at in 0..CHUNK_BLOCKS {
                let block = first + at as u64;
                let unwritten = matches!(entries.state(at), State::Dirty(_) | State::Writeback(_));
                if (from..to).contains(&block) && (dirty_too || !unwritten) {
                    self.drop_block(image, &mut entries, at, block, &mut freed);
                }
            }
            if entries.dirty() == 0 {
                image.dirty_chunks.lock().remove(&number);
            }
            drop(entries);
            self.give(freed);
        }
        image.sweep(false);
    }

    fn drop_block(&self, image: &Image, entries: &mut Entries, at: usize, block: u64, freed: &mut Vec<OwnedFrame>) {
        let key = BlockKey { image: image.id, block };
        match entries.state(at) {
            State::Absent => return,
            State::Zero => {}
            State::Clean(frame) => freed.extend(self.leave(frame, key)),
            State::Dirty(frame) => {
                freed.push(self.disown(frame));
                self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
                image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            }
            State::Writeback(_) => unreachable!("whoever drops unwritten blocks holds the flush lock"),
        }
        entries.set(at, State::Absent);
    }

    /// Makes a dirty block's frame free to use again.
    pub(crate) fn disown(&self, frame: FrameIndex) -> OwnedFrame {
        let mut body = self.table.lock(frame);
        body.used = Use::None;
        body.sharers = Sharers::None;
        OwnedFrame(frame)
    }

    // ---- changes behind our back ----

    /// Whether the file is another version than the one we know; if so, it is noted for the next request.
    pub fn look_behind(&self, image: &Image) -> bool {
        let Some(known) = image.known.try_lock() else {
            // We are changing it ourselves right now.
            return false;
        };
        let Ok(file) = image.file() else { return false };
        match file.stamp() {
            Ok(stamp) if stamp != *known => {
                image.changed.store(true, Ordering::Release);
                true
            }
            _ => false,
        }
    }

    /// Drops what somebody else's change made stale. Unwritten blocks stay: they are newer.
    pub(crate) fn accept_change(&self, image: &Image) -> Result<(), Error> {
        if !image.changed.load(Ordering::Acquire) {
            return Ok(());
        }
        let _shape = image.shape.write();
        let _flush = image.flush.lock();
        if !image.changed.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let stamp = image.file()?.stamp()?;
        *image.known.lock() = stamp;
        add(&image.counters.changed_behind, 1);
        self.drop_blocks(image, 0, u64::MAX, false);
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.forget(0..u64::MAX);
        }
        let before = image.size();
        image.size.store(stamp.size, Ordering::Release);
        if stamp.size < before {
            self.cut_blocks(image, stamp.size);
        }
        Ok(())
    }

    // ---- fingerprints beside images ----

    /// Takes up what is known about an image's content; a file that does not fit is counted and learnt anew.
    pub fn load_fingerprints(&self, image: &Image, store: &FingerprintDir) {
        let Ok(file) = image.file() else { return };
        let before = *image.known.lock();
        *image.kept.lock() = Some(store.file_of(before.ino));
        let (mut known, rejected) = store.load(&file.lasting(before));
        if rejected.is_some() {
            add(&self.counters.fingerprint_files_rejected, 1);
        }
        let now = image.known.lock();
        if *now != before {
            // It was changed while we read.
            known.forget(0..u64::MAX);
        }
        *image.fingerprints.lock() = Some(known);
    }

    /// Keeps what is known about an image's content, once that is durable, unless the image changes meanwhile.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save_fingerprints(&self, image: &Image, store: &FingerprintDir) -> io::Result<()> {
        if !self.sync(image, 0..u64::MAX) {
            return Ok(());
        }
        // A change within one tick of the file system's clock would carry the same times: let the tick pass first.
        let tick = std::time::Duration::from_millis(20);
        let stamp = *image.known.lock();
        let changed = std::time::UNIX_EPOCH + std::time::Duration::new(stamp.ctime.0.max(0) as u64, stamp.ctime.1);
        if std::time::SystemTime::now().duration_since(changed).is_ok_and(|age| age < tick) {
            std::thread::sleep(tick);
        }
        let file = image.file()?;
        let bytes = match &*image.fingerprints.lock() {
            Some(known) if known.block_count() > 0 => known.encode(&file.lasting(stamp), &store.key()),
            _ => return Ok(()),
        };
        let new = store.write(stamp.ino, &bytes)?;
        // Nobody writes back, and nobody changes the file, until the new one has its name.
        let _flush = image.flush.lock();
        let known = image.known.lock();
        let same = *known == stamp && file.stamp()? == stamp && !image.changed.load(Ordering::Acquire);
        if !same || image.unsynced.load(Ordering::Acquire) {
            return std::fs::remove_file(new);
        }
        let path = store.file_of(stamp.ino);
        let mut kept = image.kept.lock();
        std::fs::rename(new, &path)?;
        *kept = Some(path);
        Ok(())
    }

    // ---- memory ----

    /// Frees what is not needed any more.
    pub(crate) fn give(&self, frames: Vec<OwnedFrame>) {
        if !frames.is_empty() {
            self.free.give(&self.frames, frames);
        }
    }

    /// Gives the memory of free frames back to the kernel, for times when nothing needs it.
    pub(crate) fn cool(&self) {
        self.free.cool(&self.frames);
    }

    /// Enters frames that became clean into the eviction queues.
    pub(crate) fn enqueue(&self, fresh: &[(FrameIndex, Fingerprint)]) {
        if fresh.is_empty() {
            return;
        }
        let mut queues = self.queues.lock();
        for &(frame, fingerprint) in fresh {
            let mut body = self.table.lock(frame);
            if !body.queued {
                body.queued = true;
                queues.push(frame, fingerprint.index_key());
            }
        }
    }

    /// Finds up to `count` frames: free ones, then those of evicted blocks, then of flushed ones.
    pub(crate) fn allocate(&self, count: usize, into: &mut Vec<OwnedFrame>) {
        let goal = into.len() + count;
        for _ in 0..8 {
            self.free.take(goal - into.len(), into);
            if into.len() >= goal {
                return;
            }
            // A few more than asked, so that the next one need not evict at once.
            if self.evict(goal - into.len() + 32) == 0 && self.flush_others(None) == 0 {
                break;
            }
        }
        self.free.take(goal - into.len(), into);
    }

    /// Evicts until `count` frames became free or nothing more can go; returns how many did.
    fn evict(&self, count: usize) -> usize {
        let mut freed = Vec::new();
        let mut tries = self.frames.count() * 2;
        while freed.len() < count && tries > 0 {
            tries -= 1;
            let victim = self.queues.lock().pop(|f| self.table.touches(f), |f, n| self.table.set_touches(f, n));
            let Some(frame) = victim else { break };
            let sharers: Vec<BlockKey> = {
                let mut body = self.table.lock(frame);
                body.queued = false;
                if body.used != Use::Clean {
                    continue;
                }
                body.sharers.as_slice().to_vec()
            };
            let fingerprint = self.table.lock(frame).fingerprint;
            let mut gone = None;
            for key in sharers {
                let Some(image) = self.image(key.image) else { continue };
                let Some(chunk) = image.existing_chunk(key.block / CHUNK_BLOCKS as u64) else { continue };
                let at = key.block as usize % CHUNK_BLOCKS;
                let mut entries = chunk.entries.write();
                if entries.state(at) == State::Clean(frame) {
                    gone = self.leave(frame, key);
                    entries.set(at, State::Absent);
                }
            }
            match gone {
                Some(frame) => {
                    self.queues.lock().remember(fingerprint.index_key());
                    freed.push(frame);
                }
                None => {
                    // It gained a sharer meanwhile, or one is just being installed.
                    let mut queues = self.queues.lock();
                    let mut body = self.table.lock(frame);
                    if body.used == Use::Clean && !body.queued {
                        body.queued = true;
                        queues.put_back(frame);
                    }
                }
            }
        }
        let count = freed.len();
        add(&self.counters.evictions, count);
        self.give(freed);
        count
    }

    /// Flushes some blocks of the image with the most dirty ones whose disk takes them; returns how many went.
    fn flush_others(&self, except: Option<&Image>) -> usize {
        let mut images = self.images();
        images.retain(|image| image.dirty_bytes() > 0 && except.is_none_or(|e| e.id != image.id));
        images.sort_by_key(|image| std::cmp::Reverse(image.dirty_bytes()));
        let flushed = images.iter().map(|image| self.flush_some(image, 1024).unwrap_or(0));
        flushed.into_iter().find(|&count| count > 0).unwrap_or(0)
    }

    /// Flushes until `count` more dirty blocks of `image` are allowed.
    ///
    /// A writer answers for his own image's disk only: where another one refuses its blocks, he goes on with none of
    /// his own left dirty.
    fn make_room_for_dirty(&self, image: &Image, count: usize) -> Result<(), Error> {
        let room = self.config.dirty_max().max(count + 1) - count;
        while self.dirty_blocks.load(Ordering::Relaxed) > room {
            if image.dirty_bytes() > 0 {
                self.flush_some(image, 1024).map_err(Error::Full)?;
            } else if self.flush_others(Some(image)) == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Wakes the flusher.
    pub(crate) fn want_flush(&self) {
        let mut wanted = self.flush_wanted.lock();
        if !*wanted {
            *wanted = true;
            self.flush_signal.notify_all();
        }
    }

    /// Waits until a flush is wanted or `pause` is over; returns whether one is wanted.
    pub(crate) fn wait_for_flush(&self, pause: std::time::Duration) -> bool {
        let mut wanted = self.flush_wanted.lock();
        if !*wanted {
            self.flush_signal.wait_for(&mut wanted, pause);
        }
        std::mem::take(&mut *wanted)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimFile;

    #[test]
    fn bytes_given_in_place_are_the_images() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let mut seed = 1u64;
        let mut random = move |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        let mut model: Vec<u8> = (0..2 << 20).map(|_| random(256) as u8).collect();
        // A piece of zeros, which has no frame, and a size that is no multiple of a block.
        model[700 << 10..900 << 10].fill(0);
        model.truncate((2 << 20) - 1234);
        let images: Vec<_> =
            (0..2).map(|n| cache.add_image(&format!("{n}"), Arc::new(SimFile::new(model.clone()))).unwrap()).collect();
        let mut models = [model.clone(), model];
        let (mut in_place, mut elsewhere) = (0, 0);
        for step in 0..4000 {
            let n = random(2);
            let (image, model) = (&images[n], &mut models[n]);
            let offset = random(model.len());
            let length = (1 + random(200_000)).min(model.len() - offset);
            match step % 8 {
                0 => {
                    let data: Vec<u8> = (0..length.min(9000)).map(|_| random(256) as u8).collect();
                    cache.write(image, offset as u64, &data).unwrap();
                    model[offset..offset + data.len()].copy_from_slice(&data);
                }
                1 if step % 40 == 1 => assert!(cache.sync(image, 0..u64::MAX)),
                2 => {
                    cache.read(image, offset as u64, &mut vec![0; length]).unwrap();
                }
                _ => {
                    let given = cache.read_in_place(image, offset as u64, length, <[u8]>::to_vec);
                    match given {
                        Ok(bytes) => {
                            assert!(bytes == model[offset..offset + length], "step {step}");
                            in_place += 1;
                        }
                        Err(_) => elsewhere += 1,
                    }
                }
            }
        }
        assert!(in_place > 100 && elsewhere > 100, "{in_place} in place, {elsewhere} not: both ways must be taken");
        let beyond = models[0].len() as u64 - 10;
        assert!(cache.read_in_place(&images[0], beyond, 20, |_| ()).is_err(), "the end is the other way's business");
        cache.verify().unwrap();
    }
}
