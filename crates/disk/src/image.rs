//! An image in the cache: its blocks' entries, its file, its errors.
//!
//! Blocks are grouped in chunks of 1 MiB with one lock each. A block is *absent*, *loading*, *clean*, *dirty* or in
//! *writeback*. A loading block cannot be written, so loaded data never replaces newer data.

use crate::error::WritebackErrors;
use crate::file::{BlockFile, Stamp};
use crate::fingerprint_file::{self, BlockFingerprints};
use crate::frames::FrameIndex;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS, FRAME_BITS, FRAMES_MAX};
use crate::stats::ImageCounters;
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A block's entry: state in the upper two bits, frame in the lower thirty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockEntry(u32);

/// The paper's block states, and absent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlockState {
    Absent,
    /// The frame equals the disk and may be shared.
    Clean(FrameIndex),
    /// A block of zeros, which needs no frame.
    Zero,
    /// The frame is this block's own and newer than the disk.
    Dirty(FrameIndex),
    /// The frame is being written to the disk: no thread changes it.
    Writeback(FrameIndex),
}

impl BlockState {
    /// The frame with the block's bytes, if it has one.
    pub(crate) fn frame(self) -> Option<FrameIndex> {
        match self {
            Self::Absent | Self::Zero => None,
            Self::Clean(frame) | Self::Dirty(frame) | Self::Writeback(frame) => Some(frame),
        }
    }
}

const FRAME_MASK: u32 = (1 << FRAME_BITS) - 1;
/// The frame number that stands for zeros: [`FRAMES_MAX`] keeps it free.
const ZERO_FRAME: u32 = FRAMES_MAX as u32;

impl BlockEntry {
    pub(crate) const ABSENT: Self = Self(0);

    pub(crate) fn state(self) -> BlockState {
        let frame = FrameIndex(self.0 & FRAME_MASK);
        match self.0 >> FRAME_BITS {
            0 => BlockState::Absent,
            1 if frame.0 == ZERO_FRAME => BlockState::Zero,
            1 => BlockState::Clean(frame),
            2 => BlockState::Dirty(frame),
            _ => BlockState::Writeback(frame),
        }
    }
}

impl From<BlockState> for BlockEntry {
    fn from(state: BlockState) -> Self {
        match state {
            BlockState::Absent => Self::ABSENT,
            BlockState::Zero => Self(1 << FRAME_BITS | ZERO_FRAME),
            BlockState::Clean(frame) => Self(1 << FRAME_BITS | frame.0),
            BlockState::Dirty(frame) => Self(2 << FRAME_BITS | frame.0),
            BlockState::Writeback(frame) => Self(3 << FRAME_BITS | frame.0),
        }
    }
}

/// The entries of one chunk.
pub(crate) struct Entries {
    entries: [BlockEntry; CHUNK_BLOCKS],
    loading: [u64; CHUNK_BLOCKS / 64],
    /// Entries that are not absent.
    live: u16,
    /// Entries that are dirty.
    dirty: u16,
}

impl Entries {
    pub(crate) fn state(&self, at: usize) -> BlockState {
        self.entries[at].state()
    }

    /// Changes one entry and keeps the counts.
    pub(crate) fn set(&mut self, at: usize, state: BlockState) {
        let counts = |state: BlockState| {
            (u16::from(state != BlockState::Absent), u16::from(matches!(state, BlockState::Dirty(_))))
        };
        let (live_before, dirty_before) = counts(self.entries[at].state());
        let (live, dirty) = counts(state);
        self.live = self.live + live - live_before;
        self.dirty = self.dirty + dirty - dirty_before;
        self.entries[at] = state.into();
    }

    pub(crate) fn is_loading(&self, at: usize) -> bool {
        self.loading[at / 64] >> (at % 64) & 1 == 1
    }

    pub(crate) fn set_loading(&mut self, at: usize, loading: bool) {
        let bit = 1 << (at % 64);
        if loading { self.loading[at / 64] |= bit } else { self.loading[at / 64] &= !bit }
    }

    pub(crate) fn dirty(&self) -> usize {
        self.dirty.into()
    }

    fn is_idle(&self) -> bool {
        self.live == 0 && self.loading == [0; CHUNK_BLOCKS / 64]
    }

    /// Returns true if dropping the chunk would lose only the knowledge of which blocks are zeros.
    fn only_zeros(&self) -> bool {
        self.loading == [0; CHUNK_BLOCKS / 64]
            && self.entries.iter().all(|e| matches!(e.state(), BlockState::Absent | BlockState::Zero))
    }
}

/// 1 MiB of an image.
pub(crate) struct Chunk {
    pub(crate) entries: RwLock<Entries>,
    waiters: Mutex<()>,
    loaded: Condvar,
}

impl Chunk {
    fn new() -> Self {
        let entries =
            Entries { entries: [BlockEntry::ABSENT; CHUNK_BLOCKS], loading: [0; CHUNK_BLOCKS / 64], live: 0, dirty: 0 };
        Self { entries: RwLock::new(entries), waiters: Mutex::new(()), loaded: Condvar::new() }
    }

    /// Waits until block `at` is not being loaded. No lock of this chunk may be held.
    pub(crate) fn wait_loaded(&self, at: usize) {
        let mut waiters = self.waiters.lock();
        while self.entries.read().is_loading(at) {
            self.loaded.wait(&mut waiters);
        }
    }

    /// Wakes threads that wait for a load that ended. The entries' lock must not be held.
    pub(crate) fn wake(&self) {
        // Taken after the loading bits were cleared: every waiter has seen them clear, or is waiting already.
        let _waiters = self.waiters.lock();
        self.loaded.notify_all();
    }
}

/// One image file and its blocks in the cache.
///
/// For the order of its locks see [`crate::cache`]. While a thread holds the chunk map's lock it waits for no lock but a
/// chunk's.
pub struct Image {
    pub(crate) id: u32,
    pub(crate) name: Mutex<String>,
    /// Guards size and holes: every request holds it for reading, a change of size or holes holds it for writing.
    pub(crate) layout: RwLock<()>,
    /// Held while blocks are in writeback. With one flush at a time an older write cannot overtake a newer one.
    pub(crate) flush: Mutex<()>,
    /// Changes together with the file's size, with `stamp` locked.
    pub(crate) size: AtomicU64,
    chunks: RwLock<HashMap<u64, Arc<Chunk>>>,
    pub(crate) dirty_chunks: Mutex<BTreeSet<u64>>,
    pub(crate) dirty_blocks: AtomicUsize,
    /// The block where the next periodic flush starts.
    pub(crate) flushed_to: AtomicU64,
    file: RwLock<Option<Arc<dyn BlockFile>>>,
    /// The file's version after the cache's last change. Any other version was made by another program.
    pub(crate) stamp: Mutex<Stamp>,
    /// Another program changed the file: clean blocks must be dropped before the next request.
    pub(crate) changed_externally: AtomicBool,
    /// Bytes were written that no sync has covered yet.
    pub(crate) unsynced: AtomicBool,
    pub(crate) errors: WritebackErrors,
    pub(crate) fingerprints: Mutex<Option<BlockFingerprints>>,
    /// The fingerprint file that may exist: it is removed before the content changes. Locked after `stamp`.
    pub(crate) fingerprint_file: Mutex<Option<PathBuf>>,
    pub(crate) counters: ImageCounters,
    pub(crate) discarded: AtomicBool,
    /// When the last write came, in nanoseconds since 1970; 0 once the file's own times show it.
    written_at: AtomicU64,
}

impl Image {
    pub(crate) fn new(id: u32, name: String, file: Arc<dyn BlockFile>, stamp: Stamp) -> Self {
        Self {
            id,
            name: Mutex::new(name),
            layout: RwLock::new(()),
            flush: Mutex::new(()),
            size: AtomicU64::new(stamp.size),
            chunks: RwLock::default(),
            dirty_chunks: Mutex::default(),
            dirty_blocks: AtomicUsize::new(0),
            flushed_to: AtomicU64::new(0),
            file: RwLock::new(Some(file)),
            stamp: Mutex::new(stamp),
            changed_externally: AtomicBool::new(false),
            // An earlier image of this file may have written data that no sync has covered yet.
            unsynced: AtomicBool::new(true),
            errors: WritebackErrors::default(),
            fingerprints: Mutex::new(None),
            fingerprint_file: Mutex::new(None),
            counters: ImageCounters::default(),
            discarded: AtomicBool::new(false),
            written_at: AtomicU64::new(0),
        }
    }

    /// Size in bytes, as a reader of the mount sees it.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Bytes in memory that are newer than the disk.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_blocks.load(Ordering::Relaxed) as u64 * BLOCK_BYTES as u64
    }

    /// The name the image was opened under.
    pub fn name(&self) -> String {
        self.name.lock().clone()
    }

    /// Whether reads of the image bypass the kernel's page cache.
    pub fn direct(&self) -> bool {
        self.file.read().as_ref().is_some_and(|file| file.direct())
    }

    pub(crate) fn set_name(&self, name: &str) {
        *self.name.lock() = name.to_owned();
    }

    /// When the last write came.
    pub(crate) fn written_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.written_at.load(Ordering::Relaxed))
    }

    pub(crate) fn note_written(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.written_at.store(now.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Makes the file's own times count from now on, because everything written is in the file.
    pub(crate) fn forget_written_at(&self) {
        self.written_at.store(0, Ordering::Relaxed);
    }

    /// The open file.
    pub(crate) fn file(&self) -> std::io::Result<Arc<dyn BlockFile>> {
        self.file.read().clone().ok_or_else(|| std::io::Error::from_raw_os_error(libc::EBADF))
    }

    /// Replaces the image's file, or takes it away; returns the old one.
    pub(crate) fn set_file(&self, file: Option<Arc<dyn BlockFile>>) -> Option<Arc<dyn BlockFile>> {
        std::mem::replace(&mut *self.file.write(), file)
    }

    pub(crate) fn has_file(&self) -> bool {
        self.file.read().is_some()
    }

    /// Changes the file's content and notes the new version.
    pub(crate) fn change_content<R>(
        &self,
        change: impl FnOnce(&dyn BlockFile) -> std::io::Result<R>,
    ) -> std::io::Result<R> {
        let file = self.file()?;
        let stamp = || file.stamp();
        self.change_metadata(stamp, || {
            // With `stamp` locked, so that no thread saves a new fingerprint file before the change.
            let mut file_path = self.fingerprint_file.lock();
            if let Some(path) = &*file_path {
                fingerprint_file::remove(path)?;
                *file_path = None;
            }
            drop(file_path);
            change(&*file)
        })
    }

    /// As [`Image::change_content`], for a change of attributes or names. `stamp` reads the file's version.
    pub(crate) fn change_metadata<R>(
        &self,
        stamp: impl Fn() -> std::io::Result<Stamp>,
        change: impl FnOnce() -> std::io::Result<R>,
    ) -> std::io::Result<R> {
        let mut known = self.stamp.lock();
        if stamp().is_ok_and(|stamp| stamp != *known) {
            // Noted now, because the change below hides it.
            self.changed_externally.store(true, Ordering::Release);
        }
        let result = change();
        if let Ok(stamp) = stamp() {
            // The times are those of the change above, but a different size comes from another program.
            if stamp.size != self.size() {
                self.changed_externally.store(true, Ordering::Release);
            }
            *known = stamp;
        }
        result
    }

    /// The chunk with number `number`, made if it does not exist.
    pub(crate) fn chunk(&self, number: u64) -> Arc<Chunk> {
        if let Some(chunk) = self.chunks.read().get(&number) {
            return chunk.clone();
        }
        self.chunks.write().entry(number).or_insert_with(|| Arc::new(Chunk::new())).clone()
    }

    /// The chunk with number `number`, if it exists.
    pub(crate) fn existing_chunk(&self, number: u64) -> Option<Arc<Chunk>> {
        self.chunks.read().get(&number).cloned()
    }

    /// The numbers of all chunks at or after `from`.
    pub(crate) fn chunk_numbers(&self, from: u64) -> Vec<u64> {
        self.chunks.read().keys().copied().filter(|&n| n >= from).collect()
    }

    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.read().len()
    }

    /// Drops chunks without blocks; with `zeros_too`, also those that only know zeros.
    pub(crate) fn sweep(&self, zeros_too: bool) {
        self.chunks.write().retain(|_, chunk| {
            // While the map is locked, no thread can reach the chunk but one that holds a reference already.
            let idle = Arc::strong_count(chunk) == 1 && {
                let entries = chunk.entries.read();
                entries.is_idle() || zeros_too && entries.only_zeros()
            };
            !idle
        });
    }

    /// How many blocks are known to be zeros.
    pub(crate) fn count_zeros(&self) -> u64 {
        let chunks: Vec<Arc<Chunk>> = self.chunks.read().values().cloned().collect();
        let zeros = |chunk: &Arc<Chunk>| {
            chunk.entries.read().entries.iter().filter(|e| e.state() == BlockState::Zero).count() as u64
        };
        chunks.iter().map(zeros).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_keep_state_and_frame() {
        let frame = FrameIndex(FRAME_MASK - 1);
        for state in [
            BlockState::Absent,
            BlockState::Zero,
            BlockState::Clean(frame),
            BlockState::Dirty(frame),
            BlockState::Writeback(frame),
        ] {
            assert_eq!(BlockEntry::from(state).state(), state);
        }
    }

    #[test]
    fn counts_follow_the_entries() {
        let chunk = Chunk::new();
        let mut entries = chunk.entries.write();
        entries.set(3, BlockState::Dirty(FrameIndex(0)));
        entries.set(3, BlockState::Writeback(FrameIndex(0)));
        entries.set(4, BlockState::Dirty(FrameIndex(1)));
        assert_eq!((entries.live, entries.dirty()), (2, 1));
        entries.set(3, BlockState::Absent);
        entries.set(4, BlockState::Zero);
        assert_eq!((entries.live, entries.dirty(), entries.only_zeros()), (1, 0, true));
        entries.set_loading(200, true);
        assert!(entries.is_loading(200) && !entries.only_zeros());
    }
}
