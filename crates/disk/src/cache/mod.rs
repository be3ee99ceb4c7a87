//! The cache: blocks of many images, equal content once.
//!
//! A *clean* block equals the disk; its frame is shared with every block of the same content, whichever image it is in.
//! A *write* to a shared block breaks it into a private *dirty* one. A flush takes dirty blocks through *writeback*.
//! During writeback no thread changes the frame: a write goes to a new frame. After writeback the block is clean and
//! shares a frame with its equals again. Blocks of zeros take no frame at all.
//!
//! What it promises: a reader sees the last write; a write that a sync acknowledged is on the disk; equal bytes are
//! compared before they are shared (unless a strong fingerprint stands for them). What it does not promise: the order
//! of unsynced writes.
//!
//! Locks, outermost first: `Image::layout`, `Image::flush`, `Image::stamp` (of two images in the order of their files'
//! keys), `Image::fingerprint_file`, a chunk's entries, `Image::dirty_chunks`, `Image::fingerprints`, `queues`, a frame's
//! record. Frames are allocated (which may flush and evict) with at most `layout` held. A thread that holds `flush` never
//! waits for a frame or for `layout`, so a full cache always drains.
//!
//! The modules, each of which calls only later ones: `read`, `write`, `resize` and `fingerprint_io` serve requests;
//! `load` loads blocks; `evict` finds frames, with `writeback` if need be; `invalidate` drops blocks; `share` knows the
//! sharers of each frame. `accounting` and `audit` only look. This file holds the parts that all of them use.

mod accounting;
mod audit;
mod evict;
mod fingerprint_io;
mod invalidate;
mod load;
mod read;
mod resize;
mod share;
mod write;
mod writeback;

use crate::config::Config;
use crate::content_index::ContentIndex;
use crate::error::Error;
use crate::file::{BlockFile, Stamp};
use crate::fingerprint::{Fingerprint, Hasher};
use crate::frame_table::{FrameTable, FreeFrames};
use crate::frames::{FrameIndex, Frames, OwnedFrame};
use crate::image::Image;
use crate::policy::Queues;
use crate::stats::CacheCounters;
use parking_lot::{Condvar, Mutex, RwLock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A cache of this many frames (64 MiB) or more uses huge pages, unless its frames are to be merged page by page.
const HUGE_PAGES_FROM: usize = 1 << 14;

/// One cache for many images.
pub struct Cache {
    config: Config,
    frames: Frames,
    table: FrameTable,
    free: FreeFrames,
    queues: Mutex<Queues>,
    index: ContentIndex,
    hasher: Hasher,
    images: RwLock<Vec<Option<Arc<Image>>>>,
    dirty_blocks: AtomicUsize,
    counters: CacheCounters,
    flush_requested: Mutex<bool>,
    flush_signal: Condvar,
    merging: bool,
    refuses_changes: AtomicBool,
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
            table: FrameTable::new(frame_count)?,
            free: FreeFrames::new(frame_count),
            queues: Mutex::new(Queues::new(frame_count)),
            index: ContentIndex::new(frame_count)?,
            hasher: Hasher::new(&config.key),
            images: RwLock::default(),
            dirty_blocks: AtomicUsize::new(0),
            counters: CacheCounters::default(),
            flush_requested: Mutex::new(false),
            flush_signal: Condvar::new(),
            merging,
            refuses_changes: AtomicBool::new(false),
            config,
        })
    }

    /// Refuses changes from now on. Changes under way are complete when this returns.
    pub(crate) fn refuse_changes(&self) {
        self.refuses_changes.store(true, Ordering::Release);
        for image in self.images() {
            drop(image.layout.write());
        }
    }

    /// Fails once changes are refused. Every change calls it with the image's layout locked.
    fn check_accepts_changes(&self) -> Result<(), Error> {
        if self.refuses_changes.load(Ordering::Acquire) { Err(Error::Ended) } else { Ok(()) }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the frames may be merged with equal pages of other processes.
    pub fn merging(&self) -> bool {
        self.merging
    }

    /// Adds an image. Its blocks are loaded when they are read.
    ///
    /// # Errors
    /// The file's version cannot be read.
    pub fn add_image(&self, name: &str, file: Arc<dyn BlockFile>) -> io::Result<Arc<Image>> {
        let stamp = file.stamp()?;
        Ok(self.add_image_at(name, file, stamp))
    }

    /// As [`Cache::add_image`], for a file of version `stamp`.
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

    /// All images of the cache.
    pub fn images(&self) -> Vec<Arc<Image>> {
        self.images.read().iter().flatten().cloned().collect()
    }

    fn image(&self, id: u32) -> Option<Arc<Image>> {
        self.images.read().get(id as usize).cloned().flatten()
    }

    /// Puts frames back on the free list.
    fn free_frames(&self, frames: Vec<OwnedFrame>) {
        if !frames.is_empty() {
            self.free.put(&self.frames, frames);
        }
    }

    /// Returns the memory of free frames to the kernel, while nothing needs it.
    pub(crate) fn trim_free_frames(&self) {
        self.free.trim(&self.frames);
    }

    /// Enters frames that became clean into the eviction queues.
    fn enqueue(&self, fresh: &[(FrameIndex, Fingerprint)]) {
        if fresh.is_empty() {
            return;
        }
        let mut queues = self.queues.lock();
        for &(frame, fingerprint) in fresh {
            let mut state = self.table.lock(frame);
            if !state.queued {
                state.queued = true;
                queues.push(frame, fingerprint.index_key());
            }
        }
    }

    /// Wakes the flusher.
    pub(crate) fn request_flush(&self) {
        let mut requested = self.flush_requested.lock();
        if !*requested {
            *requested = true;
            self.flush_signal.notify_all();
        }
    }

    /// Waits until a flush is requested or `timeout` is over; returns whether one is requested.
    pub(crate) fn wait_for_flush(&self, timeout: std::time::Duration) -> bool {
        let mut requested = self.flush_requested.lock();
        if !*requested {
            self.flush_signal.wait_for(&mut requested, timeout);
        }
        std::mem::take(&mut *requested)
    }
}
