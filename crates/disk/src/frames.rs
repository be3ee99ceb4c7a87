//! The page frames: one anonymous mapping, cut into 4 KiB frames.
//!
//! Frames are page aligned and never move, so that other parts of the system
//! (the live-memory engine, KSM) may merge them with pages of other processes.
//! This is the only file of the crate with `unsafe`.
//!
//! # Access rule
//! The mapping outlives every reference, and an index is always in range, so
//! memory safety rests on one rule only: *no write overlaps another access*.
//! The cache keeps it by ownership:
//! * An [`OwnedFrame`] is a frame that only its owner can reach; the type is not `Clone`.
//! * A clean frame is never written. A thread may read it while it holds the lock of a chunk
//!   that refers to the frame, or the frame's own lock while the content index names the frame.
//! * A dirty frame belongs to one block; it is written and read under that block's chunk lock.
//! * A frame in writeback is read by the flusher and by readers, and never written.
//!
//! With debug assertions on, every frame counts its readers and writers, and a
//! breach of the rule panics, so that each test is also a test of this rule.

use crate::geometry::{BLOCK_BYTES, FRAMES_MAX};
use std::io::{IoSlice, IoSliceMut};
use std::ptr::NonNull;

#[cfg(debug_assertions)]
use std::sync::atomic::{AtomicI32, Ordering};

/// The number of a frame in the mapping.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct FrameIndex(pub(crate) u32);

impl FrameIndex {
    /// As an index into tables beside the mapping.
    pub(crate) fn at(self) -> usize {
        self.0 as usize
    }
}

/// A frame that only its owner can reach. It must go to the free list or into an entry.
#[derive(Debug)]
#[must_use]
pub(crate) struct OwnedFrame(pub(crate) FrameIndex);

impl OwnedFrame {
    /// The number of this frame.
    pub(crate) fn index(&self) -> FrameIndex {
        self.0
    }
}

/// Bytes at the start of a frame that [`Frames::prefetch`] loads into the processor's cache.
const PREFETCH_BYTES: usize = 512;

/// All frames of a cache.
pub(crate) struct Frames {
    base: NonNull<u8>,
    count: usize,
    /// The number of readers, or -1 for a writer. Checks the access rule of the module head.
    #[cfg(debug_assertions)]
    users: Box<[AtomicI32]>,
}

// SAFETY: the mapping is plain memory without thread affinity, and is unmapped only when `Frames` is dropped.
unsafe impl Send for Frames {}
// SAFETY: no method relies on exclusive access to `Frames`; the access rule of the module head keeps a write through one
// reference from overlapping any other access.
unsafe impl Sync for Frames {}

impl Frames {
    /// Maps `count` frames; the kernel provides memory when a frame is first touched.
    ///
    /// # Errors
    /// The mapping is refused (address space or overcommit limit), or `count` exceeds [`FRAMES_MAX`].
    pub(crate) fn new(count: usize) -> std::io::Result<Self> {
        assert!(count > 0, "a cache has frames");
        if count > FRAMES_MAX {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "a cache takes less than 4 TiB"));
        }
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count * BLOCK_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // While a core is written the dying process answers no request, so the cache is left out of it. It should not be
        // written to a file either. A kernel that does not know the advice writes a larger core.
        // SAFETY: the range is exactly the new mapping; the advice changes no content.
        unsafe { libc::madvise(base, count * BLOCK_BYTES, libc::MADV_DONTDUMP) };
        Ok(Self {
            base: NonNull::new(base.cast()).expect("the kernel never maps at address zero"),
            count,
            #[cfg(debug_assertions)]
            users: (0..count).map(|_| AtomicI32::new(0)).collect(),
        })
    }

    /// How many frames there are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Lets the kernel and the live-memory agent merge frames with equal pages of other processes.
    ///
    /// Calls the C library's `madvise`, which a preloaded agent interposes.
    ///
    /// # Errors
    /// The kernel is built without KSM (`EINVAL`).
    pub(crate) fn allow_merging(&self) -> std::io::Result<()> {
        // The first merge would split a huge page; small pages from the start cost less.
        // SAFETY: the range is exactly the mapping of `new`; NOHUGEPAGE and MERGEABLE change no content.
        let failed = unsafe {
            let base = self.base.as_ptr().cast();
            libc::madvise(base, self.count * BLOCK_BYTES, libc::MADV_NOHUGEPAGE);
            libc::madvise(base, self.count * BLOCK_BYTES, libc::MADV_MERGEABLE) != 0
        };
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Asks for huge pages: neighbouring frames are then neighbours in physical memory too, and copying them costs less.
    /// The free list hands out neighbours in order, so few huge pages are partly empty.
    pub(crate) fn prefer_huge_pages(&self) {
        // SAFETY: the range is exactly the mapping of `new`; the advice changes no content. A refusal is harmless.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.count * BLOCK_BYTES, libc::MADV_HUGEPAGE) };
    }

    /// Returns the memory of `frames` to the kernel; they read as zeros when next used. Sorts `frames`.
    pub(crate) fn release(&self, frames: &mut [OwnedFrame]) {
        frames.sort_unstable_by_key(OwnedFrame::index);
        for run in frames.chunk_by(|a, b| a.0.0 + 1 == b.0.0) {
            let first = self.address(run[0].index());
            // SAFETY: the run lies inside the mapping (indexes are in range) and its frames are owned by the caller,
            // so no reference into them exists.
            unsafe { libc::madvise(first.cast(), run.len() * BLOCK_BYTES, libc::MADV_DONTNEED) };
        }
    }

    /// Copies `into.len()` bytes out of `frame`, starting at byte `offset`.
    pub(crate) fn copy_out(&self, frame: FrameIndex, offset: usize, into: &mut [u8]) {
        self.read(frame, |bytes| into.copy_from_slice(&bytes[offset..offset + into.len()]));
    }

    /// Loads the start of `frame` into the processor's cache: its own prefetcher stops at the end of each page.
    #[inline]
    pub(crate) fn prefetch(&self, frame: FrameIndex) {
        let at = self.address(frame);
        (0..PREFETCH_BYTES).step_by(64).for_each(|byte| llds::prefetch(at.wrapping_add(byte)));
    }

    /// Copies `from` into `frame`, starting at byte `offset`. The caller owns the frame or holds the lock of its dirty
    /// block.
    pub(crate) fn copy_in(&self, frame: FrameIndex, offset: usize, from: &[u8]) {
        self.write(frame, |bytes| bytes[offset..offset + from.len()].copy_from_slice(from));
    }

    /// Zeroes bytes `range` of `frame`. The caller owns the frame or holds the lock of its dirty block.
    pub(crate) fn zero(&self, frame: FrameIndex, range: std::ops::Range<usize>) {
        self.write(frame, |bytes| bytes[range].fill(0));
    }

    /// Copies the whole of `from` into `to`.
    pub(crate) fn copy(&self, from: FrameIndex, to: &OwnedFrame) {
        self.read(from, |source| self.write(to.index(), |bytes| bytes.copy_from_slice(source)));
    }

    /// Whether two frames hold the same bytes.
    pub(crate) fn equal(&self, a: FrameIndex, b: FrameIndex) -> bool {
        self.read(a, |a| self.read(b, |b| a == b))
    }

    /// Passes the bytes of `frame` to `look`. The caller keeps the access rule of the module head.
    pub(crate) fn read<R>(&self, frame: FrameIndex, look: impl FnOnce(&[u8]) -> R) -> R {
        let _user = self.user(frame, false);
        // SAFETY: in range (`address` checks), initialised (anonymous memory is), and not written while `look` runs (the
        // access rule of the module head).
        look(unsafe { std::slice::from_raw_parts(self.address(frame), BLOCK_BYTES) })
    }

    /// As [`Frames::read`], for `count` neighbouring frames in one piece.
    pub(crate) fn read_run<R>(&self, first: FrameIndex, count: usize, look: impl FnOnce(&[u8]) -> R) -> R {
        assert!(first.at() + count <= self.count, "{count} frames from {} of {}", first.0, self.count);
        #[cfg(debug_assertions)]
        let _users: Vec<_> = (0..count as u32).map(|n| self.user(FrameIndex(first.0 + n), false)).collect();
        // SAFETY: the run is in range (the assertion), initialised (anonymous memory is), and none of its frames is written
        // while `look` runs (the access rule of the module head).
        look(unsafe { std::slice::from_raw_parts(self.address(first), count * BLOCK_BYTES) })
    }

    fn write<R>(&self, frame: FrameIndex, change: impl FnOnce(&mut [u8]) -> R) -> R {
        let _user = self.user(frame, true);
        // SAFETY: in range (`address` checks), initialised (anonymous memory is), and no other access overlaps `change` (the
        // access rule of the module head).
        change(unsafe { std::slice::from_raw_parts_mut(self.address(frame), BLOCK_BYTES) })
    }

    /// Passes `frames`, in their order, as buffers to `fill`; neighbours in memory become one buffer.
    pub(crate) fn fill<R>(&self, frames: &mut [OwnedFrame], fill: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> R {
        let _users: Vec<_> = frames.iter().map(|frame| self.user(frame.index(), true)).collect();
        let mut buffers: Vec<IoSliceMut<'_>> = frames
            .chunk_by(|a, b| a.0.0 + 1 == b.0.0)
            .map(|run| {
                let first = self.address(run[0].index());
                // SAFETY: the run is contiguous (`chunk_by`) and in range (every index is). `frames` is borrowed mutably and
                // no other thread can reach an owned frame, so the buffers are exclusive; distinct frames do not overlap.
                IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(first, run.len() * BLOCK_BYTES) })
            })
            .collect();
        fill(&mut buffers)
    }

    /// Passes `frames`, in their order and cut to `bytes` in total, as buffers to `out`.
    pub(crate) fn gather<R>(&self, frames: &[FrameIndex], bytes: usize, out: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        let _users: Vec<_> = frames.iter().map(|frame| self.user(*frame, false)).collect();
        let mut left = bytes;
        let mut buffers = Vec::new();
        for run in frames.chunk_by(|a, b| a.0 + 1 == b.0) {
            let length = left.min(run.len() * BLOCK_BYTES);
            // SAFETY: contiguous (`chunk_by`), in range (every index is), initialised (anonymous memory is); the caller's
            // frames are in writeback, and such frames are never written (module head).
            buffers.push(IoSlice::new(unsafe { std::slice::from_raw_parts(self.address(run[0]), length) }));
            left -= length;
        }
        out(&buffers)
    }

    fn address(&self, frame: FrameIndex) -> *mut u8 {
        assert!(frame.at() < self.count, "frame {} of {}", frame.0, self.count);
        // SAFETY: the assertion keeps the offset inside the mapping.
        unsafe { self.base.as_ptr().add(frame.at() * BLOCK_BYTES) }
    }

    #[cfg(debug_assertions)]
    fn user(&self, frame: FrameIndex, writes: bool) -> User<'_> {
        let users = &self.users[frame.at()];
        if writes {
            let before = users.swap(-1, Ordering::Acquire);
            assert_eq!(before, 0, "frame {} is written while in use", frame.0);
        } else {
            let before = users.fetch_add(1, Ordering::Acquire);
            assert!(before >= 0, "frame {} is read while written", frame.0);
        }
        User { users, writes }
    }

    #[cfg(not(debug_assertions))]
    #[inline(always)]
    fn user(&self, _frame: FrameIndex, _writes: bool) -> User {
        User
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: the range is exactly the mapping of `new`. References into it borrow `self`, so none is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.count * BLOCK_BYTES) };
    }
}

#[cfg(debug_assertions)]
struct User<'a> {
    users: &'a AtomicI32,
    writes: bool,
}

#[cfg(debug_assertions)]
impl Drop for User<'_> {
    fn drop(&mut self) {
        if self.writes {
            self.users.store(0, Ordering::Release);
        } else {
            self.users.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(not(debug_assertions))]
struct User;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_buffer() {
        assert_eq!(Frames::new(1 << 30).err().map(|e| e.kind()), Some(std::io::ErrorKind::InvalidInput));
        let frames = Frames::new(8).unwrap();
        let mut owned: Vec<OwnedFrame> = [1, 2, 5].map(|n| OwnedFrame(FrameIndex(n))).into();
        let sizes = frames.fill(&mut owned, |buffers| {
            for (n, buffer) in buffers.iter_mut().enumerate() {
                buffer.fill(n as u8 + 1);
            }
            buffers.iter().map(|b| b.len()).collect::<Vec<_>>()
        });
        assert_eq!(sizes, [2 * BLOCK_BYTES, BLOCK_BYTES]);
        let mut out = [0; 3];
        frames.copy_out(FrameIndex(5), 10, &mut out);
        assert_eq!(out, [2, 2, 2]);
        assert!(frames.equal(FrameIndex(1), FrameIndex(2)));
        let lengths = frames.gather(&[FrameIndex(1), FrameIndex(2)], BLOCK_BYTES + 7, |buffers| {
            buffers.iter().map(|b| b.len()).collect::<Vec<_>>()
        });
        assert_eq!(lengths, [BLOCK_BYTES + 7]);
    }

    #[test]
    fn released_frames_read_as_zeros() {
        let frames = Frames::new(4).unwrap();
        frames.copy_in(FrameIndex(2), 0, b"old");
        frames.release(&mut [OwnedFrame(FrameIndex(2)), OwnedFrame(FrameIndex(1))]);
        assert!(frames.read(FrameIndex(2), |bytes| bytes.iter().all(|&b| b == 0)));
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "is written while in use")]
    fn a_breach_of_the_rule_is_caught() {
        let frames = Frames::new(1).unwrap();
        frames.read(FrameIndex(0), |_| frames.copy_in(FrameIndex(0), 0, b"x"));
    }
}
