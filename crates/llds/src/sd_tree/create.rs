//! Creating a tree, in private memory or in a file, and opening one that another handle created.
//!
//! The first static array is as large as the expected leaves need; address
//! space is reserved for some further doublings. In a file the first words store
//! the geometry, so that a tree with other constants is refused.

use super::word::SLOTS;
use super::{
    BITS_MAX, DENSE_LOAD_TENTHS, DOUBLINGS_MAX, FIRST_BITS_MIN, LOAD_TENTHS, SECTION_BITS, SECTIONS, SdTree, header,
};
#[cfg(not(loom))]
use crate::line_memory::LINE_BYTES;
use crate::line_memory::LineMemory;
use crate::primitive::Ordering;
use std::io;

/// "pagefold SD 4": refuses memory that is not a tree, or one with other constants.
const MAGIC: u64 = 0x7066_5344_0004_0000 | (SLOTS as u64) << 8 | SECTION_BITS as u64;

impl SdTree {
    /// Makes an empty tree that holds `capacity` leaves without growing and 10^4 times as many with it.
    ///
    /// Reserves address space only; memory comes with use, on huge pages where the system has them.
    ///
    /// # Errors
    /// When the address space cannot be reserved (a limit on it, or strict overcommit).
    pub fn with_capacity_hint(capacity: usize) -> io::Result<Self> {
        Self::with_pages(capacity, true)
    }

    /// Makes an empty tree as [`SdTree::with_pages`] does that takes an eighth less memory, 15.4 bytes for a leaf, and a
    /// quarter more time for a search.
    ///
    /// # Errors
    /// As [`SdTree::with_capacity_hint`].
    pub fn dense(capacity: usize, huge: bool) -> io::Result<Self> {
        Self::with_load(capacity, huge, DENSE_LOAD_TENTHS)
    }

    /// Makes an empty tree as [`SdTree::with_capacity_hint`] does, on huge pages or on ordinary ones.
    ///
    /// # Errors
    /// As [`SdTree::with_capacity_hint`].
    pub fn with_pages(capacity: usize, huge: bool) -> io::Result<Self> {
        Self::with_load(capacity, huge, LOAD_TENTHS)
    }

    fn with_load(capacity: usize, huge: bool, load_tenths: u64) -> io::Result<Self> {
        let (first_bits, ahead) = Self::geometry(capacity as u64, load_tenths);
        let mut max_bits = (first_bits + DOUBLINGS_MAX).min(BITS_MAX);
        loop {
            match LineMemory::reserve(Self::line_count(max_bits), huge) {
                Ok(memory) => return Ok(Self { memory, first_bits, ahead, max_bits, load_tenths }.format()),
                // A limit on address space: reserve less, grow less.
                Err(_) if max_bits > first_bits + 1 => max_bits -= 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes an empty tree in a file of zeros and sets the file's length; other handles of this process can
    /// [`attach`](SdTree::attach) to it.
    ///
    /// # Errors
    /// When the file cannot be extended or mapped.
    ///
    /// # Safety
    /// The file must contain only zeros, since links in it are followed; otherwise as [`SdTree::attach`].
    #[cfg(not(loom))]
    pub unsafe fn create_in(file: std::os::fd::BorrowedFd<'_>, capacity: usize) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        let load_tenths = LOAD_TENTHS;
        let (first_bits, ahead) = Self::geometry(capacity as u64, load_tenths);
        let max_bits = (first_bits + DOUBLINGS_MAX).min(BITS_MAX);
        let lines = Self::line_count(max_bits);
        // SAFETY: ftruncate takes no pointers; the descriptor is open while `file` is borrowed.
        if unsafe { libc::ftruncate(file.as_raw_fd(), (lines as usize * LINE_BYTES) as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { memory: LineMemory::map(file, lines)?, first_bits, ahead, max_bits, load_tenths }.format())
    }

    /// Opens the tree that [`SdTree::create_in`] made in this file, at any address.
    ///
    /// # Errors
    /// When the file cannot be mapped or holds no tree of this version.
    ///
    /// # Safety
    /// All handles that change the tree must be in one process, since they share its epochs; no other
    /// code may truncate or write the file while a handle exists.
    #[cfg(not(loom))]
    pub unsafe fn attach(file: std::os::fd::BorrowedFd<'_>) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        // SAFETY: stat consists of integers, so all zeros is a valid value.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open while `file` is borrowed, and the kernel writes only into `stat`.
        if unsafe { libc::fstat(file.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let lines = stat.st_size as u64 / LINE_BYTES as u64;
        let refuse = |why: &str| io::Error::new(io::ErrorKind::InvalidData, format!("no SD tree in this file: {why}"));
        if lines < 1 << FIRST_BITS_MIN {
            return Err(refuse("it is too short"));
        }
        let memory = LineMemory::map(file, lines)?;
        if memory.word(header::HEAD, 0).load(Ordering::Acquire) != MAGIC {
            return Err(refuse("another version, or not a tree"));
        }
        let geometry = memory.word(header::HEAD, 1).load(Ordering::Acquire);
        let (first_bits, max_bits) = (geometry as u8 as u32, (geometry >> 8) as u8 as u32);
        let (ahead, load_tenths) = (geometry >> 16 & 0xffff, geometry >> 32);
        let sane = (FIRST_BITS_MIN..=BITS_MAX).contains(&first_bits)
            && (first_bits..=BITS_MAX.min(first_bits + DOUBLINGS_MAX)).contains(&max_bits)
            && ahead < SECTIONS
            && [LOAD_TENTHS, DENSE_LOAD_TENTHS].contains(&load_tenths)
            && Self::line_count(max_bits) == lines;
        if !sane {
            return Err(refuse("its geometry does not fit its length"));
        }
        Ok(Self { memory, first_bits, ahead, max_bits, load_tenths })
    }

    /// The first array for `capacity` leaves: leading bits, and how many sections start with one bit more.
    fn geometry(capacity: u64, load_tenths: u64) -> (u32, u64) {
        let buckets = (capacity * 10).div_ceil(load_tenths).max(1 << FIRST_BITS_MIN);
        let first_bits = buckets.ilog2().min(BITS_MAX - 1);
        let base = 1u64 << first_bits;
        let ahead = (buckets.min(2 * base - 1) - base).saturating_mul(SECTIONS) >> first_bits;
        (first_bits, ahead)
    }

    /// Static arrays up to `max_bits`, and room for children.
    fn line_count(max_bits: u32) -> u64 {
        let children = if cfg!(loom) { 6 } else { (1 << max_bits) + (1 << 14) };
        (2 << max_bits) + children
    }

    /// Writes the words of an empty tree into memory of zeros.
    fn format(self) -> Self {
        for section in 0..SECTIONS {
            self.section_word(section).store(self.initial_bits(section).into(), Ordering::Relaxed);
        }
        let buckets = (1 << self.first_bits) + (self.ahead << (self.first_bits - SECTION_BITS));
        self.shared(header::BUCKETS).store(buckets, Ordering::Relaxed);
        let geometry =
            u64::from(self.first_bits) | u64::from(self.max_bits) << 8 | self.ahead << 16 | self.load_tenths << 32;
        self.memory.word(header::HEAD, 1).store(geometry, Ordering::Relaxed);
        self.memory.word(header::HEAD, 0).store(MAGIC, Ordering::Release);
        self
    }
}
