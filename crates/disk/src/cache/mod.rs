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
//! Locks, outermost first: `Image::shape`, `Image::flush`, `Image::known` (of two images in the order of their files'
//! keys), `Image::kept`, a chunk's entries, `Image::dirty_chunks`, `Image::fingerprints`, `queues`, a frame's record.
//! Frames are allocated (which may flush and evict) with at most `shape` held. Nobody who holds `flush` ever waits for a
//! frame or for `shape`, so a full cache always drains.
//!
//! The rooms, each of which calls only those behind it: `read`, `write`, `shape` and `fingerprints` serve requests;
//! `load` brings blocks in, `room` finds frames, by `writeback` if need be; `drop` lets blocks go;
//! `share` knows who shares a frame. Here is what all of them stand on.

mod drop;
mod fingerprints;
mod load;
mod read;
mod room;
mod shape;
mod share;
mod write;

use crate::BLOCK_BYTES;
use crate::config::Config;
use crate::error::Error;
use crate::file::{BlockFile, Stamp};
use crate::fingerprint::{Fingerprint, Hasher};
use crate::frames::{FrameIndex, Frames, OwnedFrame};
use crate::image::Image;
use crate::index::ContentIndex;
use crate::policy::Queues;
use crate::stats::Counters;
use crate::table::{FreeFrames, Table};
use parking_lot::{Condvar, Mutex, RwLock};
pub(crate) use share::Offered;
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
            table: Table::new(frame_count)?,
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

    /// All images with a place in the cache.
    pub fn images(&self) -> Vec<Arc<Image>> {
        self.images.read().iter().flatten().cloned().collect()
    }

    fn image(&self, id: u32) -> Option<Arc<Image>> {
        self.images.read().get(id as usize).cloned().flatten()
    }

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
