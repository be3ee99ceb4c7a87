//! Records: keys and values that do not fit a slot.
//!
//! ```text
//! word 0     key length (low 32 bits), value length (high 32 bits)
//! word 1..   key bytes, padded to 8; value bytes, padded to 8
//! ```
//!
//! A record is written before it is linked and never changes afterwards. A
//! reader without a guard may read a record that was freed meanwhile: it reads
//! word by word, trusts no length beyond the arena's end, and checks afterwards
//! whether the record was linked all the time. Records of more than a page are
//! read under a hazard, which keeps them: in a shared store always, in a private
//! one after the first failed attempt, so that a reader does not retry for ever.

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

/// A record that was checked to lie inside the arena as a whole.
#[derive(Clone, Copy)]
pub struct OverflowRecord<'a> {
    /// All words of the record, from the lengths on.
    words: &'a [AtomicU64],
    pub key_bytes: usize,
    pub value_bytes: usize,
}

impl<'a> OverflowRecord<'a> {
    /// Reads the lengths at `offset`. `None` if the words there cannot be a record.
    #[inline]
    pub fn at(arena: &'a Arena, offset: u64) -> Option<OverflowRecord<'a>> {
        let range = arena.data_range();
        if !range.contains(&offset) || !offset.is_multiple_of(16) {
            return None;
        }
        let words = arena.at(offset).cast::<AtomicU64>().cast_const();
        // SAFETY: the offset lies in the arena's data range and is a multiple of 16 (checked above); the range's length is
        // a multiple of 16, and every bit pattern is a valid atomic.
        let lengths = unsafe { (*words).load(Ordering::Relaxed) };
        let (key_bytes, value_bytes) = ((lengths & 0xffff_ffff) as usize, (lengths >> 32) as usize);
        let bytes = record_bytes(key_bytes, value_bytes);
        if bytes as u64 > range.end - offset {
            return None;
        }
        // SAFETY: all `bytes`, a multiple of 8, lie inside the arena's data (just checked), which stays mapped while `arena`
        // is borrowed; every bit pattern is a valid atomic.
        let words = unsafe { std::slice::from_raw_parts(words, bytes / 8) };
        Some(OverflowRecord { words, key_bytes, value_bytes })
    }

    /// Returns true if reading it takes so long that it should be protected by a hazard.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.key_bytes + self.value_bytes > LONG_BYTES
    }

    #[inline]
    fn key_words(&self) -> &'a [AtomicU64] {
        &self.words[1..self.value_index()]
    }

    #[inline]
    fn value_words(&self) -> &'a [AtomicU64] {
        &self.words[self.value_index()..]
    }

    /// Returns true if the record's key is `key`.
    #[inline]
    pub fn has_key(&self, key: &[u8]) -> bool {
        if self.key_bytes != key.len() {
            return false;
        }
        key.chunks(8).zip(self.key_words()).all(|(chunk, word)| {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.load(Ordering::Relaxed) == u64::from_ne_bytes(padded)
        })
    }

    fn value_index(&self) -> usize {
        1 + self.key_bytes.div_ceil(8)
    }

    /// Appends the record's value to `out`.
    pub fn copy_value(&self, out: &mut Vec<u8>) {
        copy(self.value_words(), self.value_bytes, out);
    }

    /// The record's value, padded with zeros, if it has up to 8 bytes.
    pub fn short_value(&self) -> Option<[u8; 8]> {
        match self.value_bytes {
            0 => Some([0; 8]),
            1..=8 => Some(self.value_words()[0].load(Ordering::Relaxed).to_ne_bytes()),
            _ => None,
        }
    }

    /// Copies the record's value to the beginning of `out`, which must be long enough.
    pub fn copy_value_to(&self, out: &mut [MaybeUninit<u8>]) {
        copy_to(self.value_words(), &mut out[..self.value_bytes]);
    }

    /// Appends the record's key to `out`.
    pub fn copy_key(&self, out: &mut Vec<u8>) {
        copy(self.key_words(), self.key_bytes, out);
    }

    /// Returns the value in place.
    ///
    /// # Safety
    /// The record must be linked, and stay so or be named by a hazard, for all of `'a`.
    pub unsafe fn value(&self) -> &'a [u8] {
        // SAFETY: `at` checked that the record lies inside the arena; the caller guarantees that it is linked or named by a
        // hazard for all of `'a`, and linked records are not written.
        unsafe { std::slice::from_raw_parts(self.value_words().as_ptr().cast::<u8>(), self.value_bytes) }
    }

    /// Prefetches the first 64 bytes of the record at `offset`. Any offset is allowed: a writer may be replacing it.
    pub fn prefetch(arena: &Arena, offset: u64) {
        let at = arena.at(0).wrapping_add((offset & 0xff_ffff_fff0) as usize);
        prefetch(at);
        // Records are aligned to 16: nearly half of those of 48 bytes lie in two lines.
        prefetch(at.wrapping_add(48));
    }
}

/// Appends the first `bytes` bytes of `words` to `out`.
fn copy(words: &[AtomicU64], bytes: usize, out: &mut Vec<u8>) {
    out.reserve(bytes);
    copy_to(words, &mut out.spare_capacity_mut()[..bytes]);
    // SAFETY: `copy_to` initialised exactly `bytes` bytes after the vector's end, within its capacity.
    unsafe { out.set_len(out.len() + bytes) };
}

/// Fills all of `out` with the bytes of `words`, which must not be fewer.
fn copy_to(words: &[AtomicU64], out: &mut [MaybeUninit<u8>]) {
    let (whole, rest) = out.as_chunks_mut::<8>();
    let (words, last) = words.split_at(whole.len());
    for (chunk, word) in whole.iter_mut().zip(words) {
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes().map(MaybeUninit::new);
    }
    if !rest.is_empty() {
        let last = last[0].load(Ordering::Relaxed).to_ne_bytes().map(MaybeUninit::new);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Writes a record into the block at `offset`.
///
/// # Safety
/// The caller allocated the block with at least [`record_bytes`] and has not linked it.
pub unsafe fn write(arena: &Arena, offset: u64, key: &[u8], value: &[u8]) {
    let words = arena.at(offset).cast::<AtomicU64>();
    let mut index = 0;
    let mut put = |word: u64| {
        // SAFETY: the caller guarantees `record_bytes` at `offset`, and no more words than that are stored. Atomics, because
        // a reader may still read an earlier use of the block.
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
            OverflowRecord::prefetch(&arena, offset);
        }
    }
}
