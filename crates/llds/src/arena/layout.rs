//! The layout: where the parts of an arena lie, and the header that stores it in a file.
//!
//! Order: header, thread records, table of spans, hints, tables of tiles, the
//! structure's fixed part, spans. The tables and hints of a file get pages by
//! parts, when a span of the part is first claimed. The header's first words
//! never change and carry a checksum, so that a file of another kind, version or
//! machine is refused.

use super::Inner;
use super::class::{CLASS_COUNT, SPAN_BYTES, TILES};
use super::thread_record::{THREADS_MAX, ThreadRecord};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// First bytes of an arena file.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"lldsaren");

/// Version of the layout below; any change of it, or of what blocks hold, is a new number.
pub(super) const VERSION: u32 = 3;

/// Processor family, byte order and word size; families without a number of their own share one. The page size does not
/// change the layout.
pub(super) const ARCHITECTURE: u32 = {
    let family = if cfg!(target_arch = "x86_64") {
        1
    } else if cfg!(target_arch = "aarch64") {
        2
    } else {
        3
    };
    let order = if cfg!(target_endian = "little") { 0x10 } else { 0x20 };
    let narrow = if size_of::<usize>() == 8 { 0 } else { 0x40 };
    0xa700 | narrow | order | family
};

/// The first page of an arena. The part up to `checksum` never changes after creation.
#[repr(C)]
pub(super) struct Header {
    magic: u64,
    version: u32,
    architecture: u32,
    kind: u64,
    span_bytes: u64,
    span_count: u64,
    record_count: u64,
    root_bytes: u64,
    file_bytes: u64,
    checksum: u64,
    _pad: [u64; 7],
    /// Spans at and above this index were never used.
    pub(super) fresh: AtomicU64,
    /// Free spans that still have pages; a hint.
    pub(super) kept: AtomicU64,
    /// Thread records at and above this index were never taken.
    pub(super) records_high: AtomicU64,
    /// Number of completed recoveries.
    pub(super) recoveries: AtomicU64,
    /// The namespaces in which the `state` words of records have meaning; changes only while one process has the file alone.
    pub(super) namespaces: AtomicU64,
    /// `recoveries` when idle spans without a hint were last looked for.
    pub(super) swept: AtomicU64,
    /// `recoveries` when lost memory was last looked for.
    pub(super) audited: AtomicU64,
    /// Parts of table and hints that have pages.
    pub(super) parts: AtomicU64,
    /// Spans that are not free; a hint, counted again after each death.
    pub(super) used: AtomicU64,
    _pad_used: [u64; 7],
    /// Tiles in slabs of each class; a hint, counted again after each death.
    pub(super) slab_tiles: [AtomicU32; CLASS_COUNT],
}

const _: () = assert!(size_of::<Header>() <= 4096);

/// Bytes of the table entry of a span or a tile.
pub(super) const ENTRY_BYTES: usize = 16;

/// Spans whose table entries and hints get pages together.
pub(super) const PART_SPANS: usize = 512;

/// Hint: the split span has free tiles. Rows below it are classes.
pub(super) const SPLIT_HINT: usize = CLASS_COUNT;

/// Rows of hints.
const HINT_ROWS: usize = CLASS_COUNT + 1;

/// Words of one row of hints for a part: a line, so that a search for a class reads eight words from each line.
const PART_WORDS: usize = PART_SPANS / 64;

/// Bytes of the table of a span's tiles: an entry for each, then a byte for each.
pub(super) const TILE_TABLE_BYTES: usize = TILES * (ENTRY_BYTES + 1);

/// Spans of the largest arena: the numbers of units have 32 bits.
pub(super) const SPANS_MAX: usize = 1 << 23;

/// Words of the header that the checksum covers.
pub(super) const SEALED_WORDS: usize = 8;

/// Where the parts of an arena lie, in bytes from its start.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) spans: usize,
    pub(super) records: usize,
    pub(super) table: usize,
    pub(super) hints: usize,
    pub(super) tiles: usize,
    pub(super) root: usize,
    pub(super) root_bytes: usize,
    pub(super) data: usize,
    pub(super) bytes: usize,
}

impl Layout {
    pub(super) fn new(spans: usize, root_bytes: usize) -> Layout {
        let records = 4096;
        let table = records + (THREADS_MAX * size_of::<ThreadRecord>()).next_multiple_of(4096);
        let parts = spans.div_ceil(PART_SPANS);
        let hints = table + parts * PART_SPANS * ENTRY_BYTES;
        let tiles = (hints + parts * HINT_ROWS * PART_WORDS * 8).next_multiple_of(4096);
        let root = (tiles + spans * TILE_TABLE_BYTES).next_multiple_of(2 << 20);
        let data = (root + root_bytes).next_multiple_of(2 << 20);
        let bytes = (data + spans * SPAN_BYTES).next_multiple_of(2 << 20);
        Layout { spans, records, table, hints, tiles, root, root_bytes, data, bytes }
    }

    /// Returns where word `index` of a row of hints lies.
    #[inline]
    pub(super) fn hint(&self, row: usize, index: usize) -> usize {
        self.hints + ((index / PART_WORDS * HINT_ROWS + row) * PART_WORDS + index % PART_WORDS) * 8
    }

    /// Returns where the hints of a part lie, and how many bytes they have.
    pub(super) fn hints_of(&self, part: usize) -> (usize, usize) {
        (self.hint(0, part * PART_WORDS), HINT_ROWS * PART_WORDS * 8)
    }
}

impl Inner {
    pub(super) fn format(&self, kind: u64) {
        let layout = &self.layout;
        let sealed = [
            MAGIC,
            0,
            kind,
            SPAN_BYTES as u64,
            layout.spans as u64,
            THREADS_MAX as u64,
            layout.root_bytes as u64,
            layout.bytes as u64,
        ];
        let header = self.map.base().cast::<Header>();
        // SAFETY: no other thread or process has the mapping before `Arena::private` or `Arena::create` returns, and it is
        // larger than a header.
        unsafe {
            (&raw mut (*header).magic).write(MAGIC);
            (&raw mut (*header).version).write(VERSION);
            (&raw mut (*header).architecture).write(ARCHITECTURE);
            (&raw mut (*header).kind).write(kind);
            (&raw mut (*header).span_bytes).write(sealed[3]);
            (&raw mut (*header).span_count).write(sealed[4]);
            (&raw mut (*header).record_count).write(sealed[5]);
            (&raw mut (*header).root_bytes).write(sealed[6]);
            (&raw mut (*header).file_bytes).write(sealed[7]);
            let words = std::slice::from_raw_parts(header.cast::<u64>(), SEALED_WORDS).to_vec();
            (&raw mut (*header).checksum).write(checksum(&words));
        }
    }

    #[inline]
    pub(super) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header; fields that change after creation are atomics.
        unsafe { &*self.map.base().cast::<Header>() }
    }
}

/// FNV-1a over words: it finds damage, it does not resist forgery.
pub(super) fn checksum(words: &[u64]) -> u64 {
    words
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23))
}
