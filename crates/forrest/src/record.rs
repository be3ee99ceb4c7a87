//! Records: keys and values that do not fit a slot.
//!
//! ```text
//! word 0     key length (low 32 bits), value length (high 32 bits)
//! word 1..   key bytes, padded to 8; value bytes, padded to 8
//! ```
//!
//! A record is written before it is linked and never changes afterwards. A
//! reader without a guard may look at one that was freed meanwhile: it reads
//! word by word, trusts no length beyond the arena's end, and checks
//! afterwards whether the record was linked all the time. One of more than a
//! page in a shared store is read under a hazard, which keeps it; in a private
//! one by a reader who was late once, so that he is not late for ever.

use llds::arena::Arena;
use llds::prefetch;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

/// Records of more bytes than a page are read under a hazard.
const LONG_BYTES: usize = 4096;

/// Bytes a record of this key and value takes.
pub fn record_bytes(key_bytes: usize, value_bytes: usize) -> usize {
    8 + key_bytes.next_multiple_of(8) + value_bytes.next_multiple_of(8)
}

/// A record at a place that was checked to lie inside the arena as a whole.
#[derive(Clone, Copy)]
pub struct Record<'a> {
    words: *const AtomicU64,
    pub key_bytes: usize,
    pub value_bytes: usize,
    _arena: std::marker::PhantomData<&'a Arena>,
}

impl<'a> Record<'a> {
    /// Looks at `offset`. `None` if what is there cannot be a record.
    #[inline]
    pub fn at(arena: &'a Arena, offset: u64) -> Option<Record<'a>> {
        let range = arena.data_range();
        if !range.contains(&offset) || !offset.is_multiple_of(16) {
            return None;
        }
        let words = arena.at(offset).cast::<AtomicU64>().cast_const();
        // SAFETY: the offset lies in the arena's data and is aligned (checked above); the data is a multiple of 16.
        let lengths = unsafe { (*words).load(Ordering::Relaxed) };
        let (key_bytes, value_bytes) = ((lengths & 0xffff_ffff) as usize, (lengths >> 32) as usize);
        if record_bytes(key_bytes, value_bytes) as u64 > range.end - offset {
            return None;
        }
        Some(Record { words, key_bytes, value_bytes, _arena: std::marker::PhantomData })
    }

    /// Whether reading it takes so long that it should not be done without a hazard.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.key_bytes + self.value_bytes > LONG_BYTES
    }

    #[inline]
    fn word(&self, index: usize) -> u64 {
        // SAFETY: `at` checked that the whole record lies inside the arena; callers stay below its length.
        unsafe { (*self.words.add(index)).load(Ordering::Relaxed) }
    }

    /// Whether the record's key is `key`.
    #[inline]
    pub fn has_key(&self, key: &[u8]) -> bool {
        if self.key_bytes != key.len() {
            return false;
        }
        key.chunks(8).enumerate().all(|(index, chunk)| {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            self.word(1 + index) == u64::from_le_bytes(padded).to_le()
        })
    }

    fn value_index(&self) -> usize {
        1 + self.key_bytes.div_ceil(8)
    }

    /// Appends the record's value to `out`.
    pub fn copy_value(&self, out: &mut Vec<u8>) {
        self.copy(self.value_index(), self.value_bytes, out);
    }

    /// The record's value if it has up to 8 bytes, and zeros behind it.
    pub fn short_value(&self) -> Option<[u8; 8]> {
        match self.value_bytes {
            0 => Some([0; 8]),
            1..=8 => Some(self.word(self.value_index()).to_ne_bytes()),
            _ => None,
        }
    }

    /// Copies the record's value to `out`, which has its length.
    pub fn copy_value_to(&self, out: &mut [MaybeUninit<u8>]) {
        self.copy_to(self.value_index(), &mut out[..self.value_bytes]);
    }

    /// Appends the record's key to `out`.
    pub fn copy_key(&self, out: &mut Vec<u8>) {
        self.copy(1, self.key_bytes, out);
    }

    fn copy(&self, first: usize, bytes: usize, out: &mut Vec<u8>) {
        out.reserve(bytes);
        self.copy_to(first, &mut out.spare_capacity_mut()[..bytes]);
        // SAFETY: as many bytes were written behind its end.
        unsafe { out.set_len(out.len() + bytes) };
    }

    /// Fills `out` with the bytes from word `first` on.
    fn copy_to(&self, first: usize, out: &mut [MaybeUninit<u8>]) {
        let (whole, rest) = out.as_chunks_mut::<8>();
        let count = whole.len();
        for (index, chunk) in whole.iter_mut().enumerate() {
            *chunk = self.word(first + index).to_ne_bytes().map(MaybeUninit::new);
        }
        if !rest.is_empty() {
            let last = self.word(first + count).to_ne_bytes().map(MaybeUninit::new);
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }

    /// Returns the value in place.
    ///
    /// # Safety
    /// The record must be linked, and stay so or be named by a hazard, for all of `'a`.
    pub unsafe fn value(&self) -> &'a [u8] {
        // SAFETY: inside the arena by `at`; not written any more by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.words.add(self.value_index()).cast::<u8>(), self.value_bytes) }
    }

    /// Asks for the first 64 bytes of the record at `offset`, which may be anything: a writer may just replace it.
    pub fn prefetch(arena: &Arena, offset: u64) {
        let at = arena.at(0).wrapping_add((offset & 0xff_ffff_fff0) as usize);
        prefetch(at);
        // Records are aligned to 16: nearly half of those of 48 bytes lie in two lines.
        prefetch(at.wrapping_add(48));
    }
}

/// Writes a record into the block at `offset`, which must be ours and large enough.
pub fn write(arena: &Arena, offset: u64, key: &[u8], value: &[u8]) {
    let words = arena.at(offset).cast::<AtomicU64>();
    let mut index = 0;
    let mut put = |word: u64| {
        // SAFETY: the block is ours and holds `record_bytes` (the caller allocated that much); atomics, because a
        // reader of the block's former life may still look.
        unsafe { (*words.add(index)).store(word, Ordering::Relaxed) };
        index += 1;
    };
    put(key.len() as u64 | (value.len() as u64) << 32);
    for part in [key, value] {
        let mut chunks = part.chunks_exact(8);
        for chunk in &mut chunks {
            put(u64::from_ne_bytes(chunk.try_into().unwrap_or_default()));
        }
        if !chunks.remainder().is_empty() {
            let mut padded = [0; 8];
            padded[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
            put(u64::from_ne_bytes(padded));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_word_may_be_prefetched() {
        let options = llds::arena::Options { capacity_bytes: 1 << 20, ..Default::default() };
        let arena = Arena::private(&options).unwrap();
        for offset in [0, 7, 1 << 39, u64::MAX] {
            Record::prefetch(&arena, offset);
        }
    }
}
