//! A node's words, and how readers read them while a writer changes them.

use super::pool::Pool;
use super::{NODE_LINES, OBSOLETE, VERSION_STEP};
use crate::primitive::{AtomicU64, Ordering, fence};

/// Words per node.
pub(super) const NODE_WORDS: usize = NODE_LINES as usize * 8;
/// Words before the keys: version and shape.
const HEAD_WORDS: usize = 2;
const PAYLOAD_WORDS: usize = NODE_WORDS - HEAD_WORDS;

/// Set in a version while one thread writes the node.
pub(super) const LOCKED: u64 = 1;

mod sealed {
    pub trait Sealed {}
    impl Sealed for u64 {}
    impl Sealed for u128 {}
    impl Sealed for (u64, u64) {}
}

/// Keys of fixed size that a node can hold word by word: `u64`, `u128` and `(u64, u64)`.
pub trait FixedKey: Copy + Ord + std::fmt::Debug + Send + Sync + sealed::Sealed + 'static {
    /// Words per key.
    const WORDS: usize;
    /// The smallest key.
    const MIN: Self;
    /// The largest key.
    const MAX: Self;
    /// Returns the words, the most significant first; the second is 0 if `WORDS` is 1.
    fn to_words(self) -> [u64; 2];
    /// Makes the key from its words.
    fn from_words(words: [u64; 2]) -> Self;
}

impl FixedKey for u64 {
    const WORDS: usize = 1;
    const MIN: Self = 0;
    const MAX: Self = u64::MAX;

    fn to_words(self) -> [u64; 2] {
        [self, 0]
    }

    fn from_words(words: [u64; 2]) -> Self {
        words[0]
    }
}

impl FixedKey for u128 {
    const WORDS: usize = 2;
    const MIN: Self = 0;
    const MAX: Self = u128::MAX;

    fn to_words(self) -> [u64; 2] {
        [(self >> 64) as u64, self as u64]
    }

    fn from_words(words: [u64; 2]) -> Self {
        u128::from(words[0]) << 64 | u128::from(words[1])
    }
}

impl FixedKey for (u64, u64) {
    const WORDS: usize = 2;
    const MIN: Self = (0, 0);
    const MAX: Self = (u64::MAX, u64::MAX);

    fn to_words(self) -> [u64; 2] {
        [self.0, self.1]
    }

    fn from_words(words: [u64; 2]) -> Self {
        (words[0], words[1])
    }
}

/// Entries in a leaf.
pub(super) const fn leaf_capacity<K: FixedKey>() -> usize {
    PAYLOAD_WORDS / (K::WORDS + 1)
}

/// Keys in an inner node; it has one child more. Children are numbers of 32 bits.
pub(super) const fn inner_capacity<K: FixedKey>() -> usize {
    (2 * PAYLOAD_WORDS - 2) / (2 * K::WORDS + 1)
}

/// The most entries a node of any kind has, for buffers.
pub(super) const CAPACITY_MAX: usize = PAYLOAD_WORDS;

/// A node's second word: how many keys, and how far above the leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) count: usize,
    pub(super) level: u32,
}

impl Pool {
    #[inline(always)]
    pub(super) fn word(&self, node: u64, index: usize) -> &AtomicU64 {
        self.memory.word(node * NODE_LINES, index)
    }

    /// Prefetches all lines of a node.
    #[inline(always)]
    pub(super) fn prefetch(&self, node: u64) {
        for line in 0..NODE_LINES {
            self.memory.prefetch(node * NODE_LINES + line);
        }
    }

    /// Reads a node's version; `None` if the node is locked or was freed.
    #[inline(always)]
    pub(super) fn read_version(&self, node: u64) -> Option<u64> {
        let version = self.word(node, 0).load(Ordering::Acquire);
        (version & (LOCKED | OBSOLETE) == 0 && version != 0).then_some(version)
    }

    /// Returns true if everything read since `read_version` was the node at that version.
    #[inline(always)]
    pub(super) fn is_at(&self, node: u64, version: u64) -> bool {
        // Pairs with the release fence in `lock`: had we read a word of a writer, we would see its lock here.
        fence(Ordering::Acquire);
        self.word(node, 0).load(Ordering::Relaxed) == version
    }

    /// Locks a node that is still at the version.
    #[inline(always)]
    pub(super) fn lock(&self, node: u64, version: u64) -> bool {
        let locked = self
            .word(node, 0)
            .compare_exchange(version, version | LOCKED, Ordering::Acquire, Ordering::Relaxed)
            .is_ok();
        // Pairs with the acquire fence in `is_at`.
        fence(Ordering::Release);
        locked
    }

    /// Unlocks a node that was changed.
    #[inline(always)]
    pub(super) fn unlock(&self, node: u64) {
        let version = self.word(node, 0).load(Ordering::Relaxed);
        debug_assert_ne!(version & LOCKED, 0);
        self.word(node, 0).store((version & !(LOCKED | OBSOLETE)) + VERSION_STEP, Ordering::Release);
    }

    /// Unlocks a node that was not changed: reads of it meanwhile stay valid.
    pub(super) fn unlock_unchanged(&self, node: u64) {
        let version = self.word(node, 0).load(Ordering::Relaxed);
        debug_assert_ne!(version & LOCKED, 0);
        self.word(node, 0).store(version & !LOCKED, Ordering::Release);
    }

    /// Marks a locked node as obsolete and frees it.
    pub(super) fn discard(&self, node: u64) {
        let version = self.word(node, 0).load(Ordering::Relaxed);
        self.word(node, 0).store(((version & !LOCKED) + VERSION_STEP) | OBSOLETE, Ordering::Release);
        self.free(node);
    }

    /// Makes an allocated and filled node valid.
    pub(super) fn publish(&self, node: u64) {
        let version = self.word(node, 0).load(Ordering::Relaxed);
        self.word(node, 0).store((version & !(LOCKED | OBSOLETE)) + VERSION_STEP, Ordering::Release);
    }

    #[inline(always)]
    pub(super) fn shape(&self, node: u64) -> Shape {
        let word = self.word(node, 1).load(Ordering::Relaxed);
        // A stale reader may see any value; clamping the count keeps its search inside the node.
        Shape { count: (word as u16 as usize).min(CAPACITY_MAX), level: (word >> 16) as u8 as u32 }
    }

    pub(super) fn set_shape(&self, node: u64, shape: Shape) {
        self.word(node, 1).store(shape.count as u64 | u64::from(shape.level) << 16, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn key<K: FixedKey>(&self, node: u64, index: usize) -> K {
        let at = HEAD_WORDS + index * K::WORDS;
        let high = self.word(node, at).load(Ordering::Relaxed);
        let low = if K::WORDS == 2 { self.word(node, at + 1).load(Ordering::Relaxed) } else { 0 };
        K::from_words([high, low])
    }

    pub(super) fn set_key<K: FixedKey>(&self, node: u64, index: usize, key: K) {
        let words = key.to_words();
        for (part, &word) in words[..K::WORDS].iter().enumerate() {
            self.word(node, HEAD_WORDS + index * K::WORDS + part).store(word, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn value_word<K: FixedKey>(&self, leaf: u64, index: usize) -> &AtomicU64 {
        self.word(leaf, HEAD_WORDS + leaf_capacity::<K>() * K::WORDS + index)
    }

    #[inline(always)]
    pub(super) fn value<K: FixedKey>(&self, leaf: u64, index: usize) -> u64 {
        self.value_word::<K>(leaf, index).load(Ordering::Relaxed)
    }

    pub(super) fn set_value<K: FixedKey>(&self, leaf: u64, index: usize, value: u64) {
        self.value_word::<K>(leaf, index).store(value, Ordering::Relaxed);
    }

    #[inline(always)]
    fn child_word<K: FixedKey>(&self, inner: u64, index: usize) -> &AtomicU64 {
        self.word(inner, HEAD_WORDS + inner_capacity::<K>() * K::WORDS + index / 2)
    }

    #[inline(always)]
    pub(super) fn child<K: FixedKey>(&self, inner: u64, index: usize) -> u64 {
        self.child_word::<K>(inner, index).load(Ordering::Relaxed) >> (32 * (index % 2)) & 0xffff_ffff
    }

    pub(super) fn set_child<K: FixedKey>(&self, inner: u64, index: usize, child: u64) {
        let word = self.child_word::<K>(inner, index);
        let shift = 32 * (index % 2);
        word.store(word.load(Ordering::Relaxed) & !(0xffff_ffff << shift) | child << shift, Ordering::Relaxed);
    }

    /// How many keys are less than `key`, or less than or equal to it. The result is valid if the
    /// node proves unchanged.
    #[inline(always)]
    pub(super) fn count_below<K: FixedKey>(&self, node: u64, count: usize, key: K, or_equal: bool) -> usize {
        #[cfg(all(target_arch = "x86_64", not(loom), not(miri), not(pagefold_stress)))]
        if K::WORDS == 1 && crate::wide::has_avx512() {
            use super::search::{KEYS, count_below};
            const { assert!(KEYS <= PAYLOAD_WORDS && inner_capacity::<u64>() <= KEYS) };
            let keys = std::ptr::from_ref(self.word(node, HEAD_WORDS)).cast::<u64>();
            // SAFETY: `has_avx512` was checked; a node has PAYLOAD_WORDS >= KEYS words after its head (asserted above), and
            // is mapped as long as the pool lives.
            return unsafe { count_below(keys, count, key.to_words()[0], or_equal) };
        }
        let (mut low, mut high) = (0, count.min(inner_capacity::<K>()));
        while low < high {
            let middle = (low + high) / 2;
            let middle_key = self.key::<K>(node, middle);
            if middle_key < key || (or_equal && middle_key == key) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}
