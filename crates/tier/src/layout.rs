//! The format of the arena: what a successor finds in the memory file.
//!
//! The arena is one sealed memory file of fixed length, used as an array of
//! 64-bit words; everything is named by word offset, so it may be mapped
//! anywhere. It is cut into slabs of 256 KiB:
//!
//! ```text
//! slab 0          word 0..         superblock: magic, geometry, key, owner
//!                 word 64..79      dictionary directory: one word per dictionary
//!                 16 KiB..256 KiB  15 dictionaries of 16 KiB
//! slab 1..first   slab table: one word per slab: kind | class << 8
//! slab first..    leaf slabs:    3640 keys, then 3640 lines of 8 page words
//!                 content slabs: slots of one size class
//! ```
//!
//! A *leaf* holds the words of eight neighbouring pages of a client, one cache
//! line. A client with a known number of pages has one more leaf, its *record*.
//! A *page word* says what a page holds: nothing, a 32-bit pattern that fills
//! it, the offset of a content, or "lost". A *content* is a header of three
//! words and a payload:
//!
//! ```text
//! word 0   fingerprint of the 4096 bytes, keyed by the domain: finds and verifies the content
//! word 1   payload bytes: 16 | codec: 8 | dictionary: 8 | compressed densely in vain: 1 | 0
//! word 2   references: 32 | tick of the last store: 16 | patches that use it as base: 16
//! ```
//!
//! The page words can be trusted after a crash at any instruction: a page word
//! (or, for a new leaf, its key) is stored last, with release order, when
//! everything it names is complete. Adoption derives reference counts, free
//! slots, the content index and the directories from the words, so stores to
//! these need no order.

/// Words in a slab.
pub(crate) const SLAB_WORDS: usize = 32 * 1024;
/// Bytes in a slab.
pub(crate) const SLAB_BYTES: usize = SLAB_WORDS * 8;
/// Most slabs of an arena: leaf numbers have 20 bits for the slab.
pub(crate) const SLABS_MAX: usize = 1 << 20;

/// First word of every arena.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"pgfdtier");
/// Changes with every change of the format.
pub(crate) const VERSION: u64 = 1;

/// Superblock words.
pub(crate) mod superblock {
    /// [`MAGIC`](super::MAGIC).
    pub const MAGIC: usize = 0;
    /// Version, pages per leaf and log2 of the slab, packed by [`geometry`](super::geometry).
    pub const GEOMETRY: usize = 1;
    /// Slabs in the arena.
    pub const SLABS: usize = 2;
    /// Key of the domain, two words.
    pub const KEY: usize = 3;
    /// Bytes that the tier may hold.
    pub const BYTES_MAX: usize = 5;
    /// Checksum of the words before.
    pub const CHECK: usize = 6;
    /// Process that owns the arena, or 0.
    pub const OWNER_PID: usize = 8;
    /// Start time of that process, in clock ticks since boot, which detects a reused process number.
    pub const OWNER_START: usize = 9;
    /// Directory of dictionaries: length | check << 32, 0 while unused.
    pub const DICTIONARIES: usize = 64;
}

/// Version and geometry as one word.
pub(crate) const fn geometry() -> u64 {
    VERSION | (LEAF_PAGES as u64) << 16 | (SLAB_BYTES.trailing_zeros() as u64) << 24
}

/// Dictionaries that an arena can hold; number 0 means "none".
pub(crate) const DICTIONARIES: usize = 15;
/// Bytes reserved for one dictionary.
pub(crate) const DICTIONARY_BYTES: usize = 16 * 1024;
/// First word of dictionary `number` (from 1).
pub(crate) const fn dictionary_word(number: usize) -> usize {
    number * DICTIONARY_BYTES / 8
}

/// First word of the slab table.
pub(crate) const TABLE_WORD: usize = SLAB_WORDS;
/// First slab behind the slab table of an arena of `slabs`.
pub(crate) const fn first_slab(slabs: usize) -> usize {
    1 + slabs.div_ceil(SLAB_WORDS)
}

/// Slab kinds in the slab table.
pub(crate) const KIND_FREE: u64 = 0;
/// A slab of leaves.
pub(crate) const KIND_LEAVES: u64 = 1;
/// A slab of contents; the class stands in bits 8 to 15.
pub(crate) const KIND_CONTENTS: u64 = 2;

/// Pages per leaf: eight words are one cache line, and eight pages one fault cluster.
pub(crate) const LEAF_PAGES: usize = 8;
/// Leaves in a slab: 72 bytes each.
pub(crate) const LEAVES_PER_SLAB: usize = 3640;
/// First word of the lines in a leaf slab, behind the keys, on a cache line.
pub(crate) const LEAF_LINES: usize = LEAVES_PER_SLAB;
const _: () = assert!(LEAF_LINES.is_multiple_of(8) && LEAF_LINES + LEAVES_PER_SLAB * LEAF_PAGES <= SLAB_WORDS);

/// Bits of a cluster number (a page number without its low three bits).
pub(crate) const CLUSTER_BITS: u32 = 33;
/// The cluster of the client's record: its leaf's first word holds the client's number of pages.
pub(crate) const RECORD_CLUSTER: u64 = (1 << CLUSTER_BITS) - 1;
/// First page number that does not fit.
pub(crate) const PAGES_MAX: u64 = RECORD_CLUSTER * LEAF_PAGES as u64;

/// Tag of a client's record. It is not the tag of a page word.
const TAG_RECORD: u64 = 0x7f;

/// First word of the record of a client of `pages` pages.
pub(crate) const fn record_word(pages: u64) -> u64 {
    TAG_RECORD | pages << 8
}

/// The client's number of pages, from the first word of its record.
pub(crate) const fn record_pages(word: u64) -> Option<u64> {
    if word & 0xff == TAG_RECORD && word >> 8 <= PAGES_MAX { Some(word >> 8) } else { None }
}

/// First client number that does not fit.
pub(crate) const CLIENTS_MAX: u32 = 1 << 31;

/// Key of a leaf: client and cluster; never 0, because clients count from 1.
pub(crate) const fn leaf_key(client: u32, cluster: u64) -> u64 {
    (client as u64) << CLUSTER_BITS | cluster
}

/// Client and cluster of a key.
pub(crate) const fn split_key(key: u64) -> (u32, u64) {
    ((key >> CLUSTER_BITS) as u32, key & ((1 << CLUSTER_BITS) - 1))
}

/// What a page word says of its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// The page is not in the tier.
    Nothing,
    /// The 32-bit pattern that fills the page.
    Fill(u32),
    /// The content at this word offset.
    Content(u64),
    /// The tier held the page, and its content could not be recovered.
    Lost,
}

const TAG_FILL: u64 = 1;
const TAG_CONTENT: u64 = 2;
const TAG_LOST: u64 = 3;

impl Shown {
    /// Packs into a page word.
    pub(crate) const fn word(self) -> u64 {
        match self {
            Shown::Nothing => 0,
            Shown::Fill(pattern) => TAG_FILL | (pattern as u64) << 32,
            Shown::Content(at) => TAG_CONTENT | at << 8,
            Shown::Lost => TAG_LOST,
        }
    }

    /// Decodes a page word; an invalid word is [`Shown::Lost`].
    pub(crate) const fn from_word(word: u64) -> Shown {
        match word & 0xff {
            0 if word == 0 => Shown::Nothing,
            TAG_FILL if word & 0xffff_ff00 == 0 => Shown::Fill((word >> 32) as u32),
            TAG_CONTENT if word >> 48 == 0 => Shown::Content(word >> 8),
            _ => Shown::Lost,
        }
    }
}

/// Words of a content's header.
pub(crate) const HEADER_WORDS: usize = 3;
/// Bytes of a content's header.
pub(crate) const HEADER_BYTES: usize = HEADER_WORDS * 8;

/// The second word of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Payload bytes; of a written-back content, those in the file.
    pub len: u16,
    /// How the payload is encoded, and [`Meta::ON_DISK`].
    pub codec: u8,
    /// Dictionary number, 0 for none.
    pub dictionary: u8,
}

impl Meta {
    /// Bit of `codec`: the payload is one word, the offset in the backing file. Set by writeback, read by loads.
    pub(crate) const ON_DISK: u8 = 0x80;

    pub(crate) const fn word(self) -> u64 {
        self.len as u64 | (self.codec as u64) << 16 | (self.dictionary as u64) << 24
    }

    pub(crate) const fn from_word(word: u64) -> Meta {
        Meta { len: word as u16, codec: (word >> 16) as u8, dictionary: (word >> 24) as u8 }
    }

    pub(crate) const fn is_on_disk(self) -> bool {
        self.codec & Meta::ON_DISK != 0
    }

    /// Codec number without the flag.
    pub(crate) const fn codec_number(self) -> u8 {
        self.codec & !Meta::ON_DISK
    }

    /// Payload bytes in the slot.
    pub(crate) const fn resident_len(self) -> usize {
        if self.is_on_disk() { 8 } else { self.len as usize }
    }
}

/// Bit of a content's second word: dense compression saved nothing. Set and read by the cleaner.
pub(crate) const TRIED: u64 = 1 << 32;

/// Fields of a content's third word.
pub(crate) const REFS_MASK: u64 = 0xffff_ffff;
/// Where the tick starts.
pub(crate) const TICK_SHIFT: u32 = 32;
/// Where the count of patches starts.
pub(crate) const PATCHES_SHIFT: u32 = 48;

/// Number of size classes.
pub(crate) const CLASSES: usize = class_count();
/// Slot bytes of each class: steps of 16 bytes up to 512, then about 3 %.
pub(crate) const CLASS_BYTES: [usize; CLASSES] = class_bytes();

/// Largest slot: header and an uncompressed page.
const SLOT_MAX: usize = HEADER_BYTES + pagefold_os::PAGE_SIZE;

const fn next_class(bytes: usize) -> usize {
    let step = if bytes < 512 { 16 } else { (bytes / 32).next_multiple_of(8) };
    if bytes + step > SLOT_MAX { SLOT_MAX } else { bytes + step }
}

const fn class_count() -> usize {
    let (mut bytes, mut count) = (32, 1);
    while bytes < SLOT_MAX {
        bytes = next_class(bytes);
        count += 1;
    }
    count
}

const fn class_bytes() -> [usize; CLASSES] {
    let mut table = [32; CLASSES];
    let mut class = 1;
    while class < CLASSES {
        table[class] = next_class(table[class - 1]);
        class += 1;
    }
    table
}

/// Smallest class with slots for `bytes`, header included.
pub(crate) fn class_of(bytes: usize) -> usize {
    CLASS_BYTES.partition_point(|slot| *slot < bytes)
}

/// Slots of `class` in a slab.
pub(crate) const fn slots_per_slab(class: usize) -> usize {
    SLAB_BYTES / CLASS_BYTES[class]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_words_decode_and_invalid_ones_are_lost() {
        for shown in [Shown::Nothing, Shown::Fill(0), Shown::Fill(!0), Shown::Content(1 << 39), Shown::Lost] {
            assert_eq!(Shown::from_word(shown.word()), shown);
        }
        for word in [4, 0x100, TAG_FILL | 0x100, TAG_CONTENT | 1 << 48, u64::MAX] {
            assert_eq!(Shown::from_word(word), Shown::Lost);
        }
    }

    #[test]
    fn every_payload_has_a_class_that_wastes_little() {
        assert!(CLASSES < 256 && CLASS_BYTES[CLASSES - 1] == SLOT_MAX);
        assert!(CLASS_BYTES.iter().all(|bytes| bytes % 8 == 0));
        for bytes in 32..=SLOT_MAX {
            let slot = CLASS_BYTES[class_of(bytes)];
            assert!(slot >= bytes && slot - bytes <= 16 + bytes / 32);
        }
    }

    #[test]
    fn keys_split() {
        let key = leaf_key(CLIENTS_MAX - 1, (1 << CLUSTER_BITS) - 1);
        assert_eq!(split_key(key), (CLIENTS_MAX - 1, (1 << CLUSTER_BITS) - 1));
    }
}
