//! LZ4's fast compressor for exactly one page.
//!
//! The C library's compressor fills a table twice as large as a page can use, and notices only at the end that a page does
//! not get small enough. Here the table fits the page. A page that compresses badly is given up early, unless its rest
//! looks different: of guests' pages with a first half that had not shrunk to 0.8, 97 of 100 did not get small enough.
//!
//! The output is an ordinary LZ4 block. The C library decodes it, in this crate too.

use pagefold_os::{PAGE_SIZE, Page};

/// Bytes after the longest block, because literals are written 16 at a time.
pub(crate) const SLOP: usize = 16;

/// The buffer for a block.
pub(crate) type Block = [u8; PAGE_SIZE + SLOP];

const TABLE_BITS: u32 = 12;
const MATCH_MIN: usize = 4;
/// The last offsets at which a match may begin and end, by the format.
const BEGIN_MAX: usize = PAGE_SIZE - 12;
const END_MAX: usize = PAGE_SIZE - 5;
/// Failed searches before the search step grows.
const PATIENCE_LOG: u32 = 6;
/// The offset from which a page may be given up, and by how many bytes it must exceed the wanted ratio then.
const LEFT_FROM: usize = 1024;
const LAG: usize = 128;
/// Lengths of at least this continue in further bytes.
const LONG: usize = 15;

/// A compressor.
pub(crate) struct Encoder {
    /// The last offset of each hash. 0 also stands for none, which is harmless because candidates are compared.
    places: [u16; 1 << TABLE_BITS],
}

/// The page, read in unaligned words.
#[derive(Clone, Copy)]
struct Source<'a>(&'a Page);

impl Source<'_> {
    /// # Safety
    /// The word must end inside the page.
    unsafe fn word(self, at: usize) -> u32 {
        debug_assert!(at + 4 <= PAGE_SIZE);
        // SAFETY: the word lies inside the page (the function's contract); the read is unaligned.
        unsafe { self.0.as_ptr().add(at).cast::<u32>().read_unaligned() }
    }

    /// # Safety
    /// The word must end inside the page.
    unsafe fn long(self, at: usize) -> u64 {
        debug_assert!(at + 8 <= PAGE_SIZE);
        // SAFETY: the word lies inside the page (the function's contract); the read is unaligned.
        unsafe { self.0.as_ptr().add(at).cast::<u64>().read_unaligned() }
    }

    /// # Safety
    /// Both words must lie inside the page.
    unsafe fn are_equal(self, at: usize, other: usize) -> bool {
        debug_assert!(at.max(other) < PAGE_SIZE);
        // SAFETY: the word lies inside the page (the function's contract); the read is unaligned.
        unsafe { self.0.get_unchecked(at) == self.0.get_unchecked(other) }
    }

    /// How many bytes from `at` on equal those from `before` on, up to the end of a match. `before` is less than `at`.
    #[inline(always)]
    fn equal(self, at: usize, before: usize) -> usize {
        debug_assert!(before < at);
        let mut len = 0;
        while at + len + 8 <= END_MAX {
            // SAFETY: the condition keeps the word at `at` inside the page, and the one at `before` ends earlier.
            let differ = unsafe { self.long(at + len) ^ self.long(before + len) };
            if differ != 0 {
                return len + differ.trailing_zeros() as usize / 8;
            }
            len += 8;
        }
        // SAFETY: `at` stays inside the page, and `before` is less.
        while at + len < END_MAX && unsafe { self.are_equal(at + len, before + len) } {
            len += 1;
        }
        len
    }
}

/// The block so far. Its length never exceeds `len_max`, which is at most a page.
struct Sink<'a> {
    block: &'a mut Block,
    len: usize,
    len_max: usize,
}

impl Sink<'_> {
    /// # Safety
    /// The block must not be longer than a page and [`SLOP`] bytes.
    unsafe fn push(&mut self, byte: u8) {
        debug_assert!(self.len < self.block.len());
        // SAFETY: the offset lies inside the buffer (the function's contract).
        unsafe { *self.block.get_unchecked_mut(self.len) = byte };
        self.len += 1;
    }

    /// Writes the rest of a length; its first [`LONG`] is in the token.
    ///
    /// # Safety
    /// The buffer must have space for it.
    unsafe fn push_rest(&mut self, mut rest: usize) {
        while rest >= 255 {
            // SAFETY: the buffer has space (the function's contract).
            unsafe { self.push(255) };
            rest -= 255;
        }
        // SAFETY: the buffer has space (the function's contract).
        unsafe { self.push(rest as u8) };
    }

    /// Writes a token and the literals after it, `from..to` of the page; returns the token's offset. `None` if they and the
    /// start of a match would exceed `len_max`.
    #[inline(always)]
    fn literals(&mut self, source: Source<'_>, from: usize, to: usize) -> Option<usize> {
        let (token, len) = (self.len, to - from);
        if token + 1 + len / 255 + 1 + len + 2 > self.len_max {
            return None;
        }
        // SAFETY: the check above leaves enough space.
        unsafe {
            self.push((len.min(LONG) << 4) as u8);
            if len >= LONG {
                self.push_rest(len - LONG);
            }
        }
        if to + SLOP <= PAGE_SIZE {
            debug_assert!(self.len + len + SLOP <= self.block.len());
            let mut done = 0;
            while done < len {
                // SAFETY: the read ends less than 16 bytes after `to`, and the write less than 16 bytes after `len_max`:
                // inside page and buffer.
                unsafe {
                    let piece = source.0.as_ptr().add(from + done).cast::<[u8; SLOP]>().read();
                    self.block.as_mut_ptr().add(self.len + done).cast::<[u8; SLOP]>().write(piece);
                }
                done += SLOP;
            }
        } else {
            self.block[self.len..self.len + len].copy_from_slice(&source.0[from..to]);
        }
        self.len += len;
        Some(token)
    }

    /// Writes a match of the given length, `offset` bytes back, after the literals of `token`; `None` if it would exceed
    /// `len_max`.
    #[inline(always)]
    fn push_match(&mut self, token: usize, offset: usize, len: usize) -> Option<()> {
        if self.len + 2 + len / 255 + 1 > self.len_max {
            return None;
        }
        let rest = len - MATCH_MIN;
        self.block[token] |= rest.min(LONG) as u8;
        // SAFETY: the check above leaves enough space.
        unsafe {
            self.push(offset as u8);
            self.push((offset >> 8) as u8);
            if rest >= LONG {
                self.push_rest(rest - LONG);
            }
        }
        Some(())
    }
}

/// Returns true if the rest of a page may compress although its start did not: samples of it have fewer values.
#[inline(never)]
fn differs((before, rest): (&[u8], &[u8])) -> bool {
    const SAMPLES: usize = 64;
    let values = |part: &[u8]| -> u32 {
        let mut seen = [0_u64; 4];
        for byte in part.iter().step_by((part.len() / SAMPLES) | 1) {
            seen[usize::from(byte >> 6)] |= 1 << (byte & 63);
        }
        seen.iter().map(|bits| bits.count_ones()).sum()
    };
    values(rest) * 5 < values(before) * 4
}

fn hash(word: u32) -> usize {
    (word.wrapping_mul(2_654_435_761) >> (32 - TABLE_BITS)) as usize
}

/// Decodes a block with the C library; false if it does not decode to exactly a page.
pub(crate) fn decode(block: &[u8], page: &mut Page) -> bool {
    // SAFETY: the function gets both lengths, reads at most the block and writes at most the page, for any input bytes.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(
            block.as_ptr().cast(),
            page.as_mut_ptr().cast(),
            block.len() as i32,
            PAGE_SIZE as i32,
        )
    };
    len == PAGE_SIZE as i32
}

impl Encoder {
    pub(crate) fn new() -> Encoder {
        Encoder { places: [0; 1 << TABLE_BITS] }
    }

    /// Compresses `page` into `block`; `None` above `len_max` bytes, or if it expects to exceed them.
    pub(crate) fn encode(&mut self, page: &Page, block: &mut Block, len_max: usize) -> Option<usize> {
        let len_max = len_max.min(PAGE_SIZE);
        let source = Source(page);
        let mut sink = Sink { block, len: 0, len_max };
        self.places.fill(0);
        let (mut from, mut at, mut is_hopeful) = (0, 1, false);
        while let Some((mut place, mut before)) = self.find(source, at) {
            // SAFETY: `at` is at most the last offset at which a match may begin, so the words lie inside the page.
            while place > from && before > 0 && unsafe { source.are_equal(place - 1, before - 1) } {
                (place, before) = (place - 1, before - 1);
            }
            let token = sink.literals(source, from, place)?;
            if place >= LEFT_FROM && !is_hopeful && sink.len > len_max * place / PAGE_SIZE + LAG {
                is_hopeful = differs(page.split_at(place));
                if !is_hopeful {
                    return None;
                }
            }
            from = self.follow(source, &mut sink, token, place, before)?;
            if from > BEGIN_MAX {
                break;
            }
            at = from + 1;
        }
        sink.literals(source, from, PAGE_SIZE).map(|_| sink.len)
    }

    /// The next offset from `at` on that has a match, and the match.
    #[inline(always)]
    fn find(&mut self, source: Source<'_>, at: usize) -> Option<(usize, usize)> {
        let (mut at, mut looks) = (at, 1_usize << PATIENCE_LOG);
        while at <= BEGIN_MAX {
            // SAFETY: a match may begin at `at`, so 12 bytes follow.
            let word = unsafe { source.word(at) };
            let before = usize::from(std::mem::replace(&mut self.places[hash(word)], at as u16));
            // SAFETY: entered offsets are less than `at`, so their words end inside the page too.
            if unsafe { source.word(before) } == word {
                return Some((at, before));
            }
            at += looks >> PATIENCE_LOG;
            looks += 1;
        }
        None
    }

    /// Writes the match at `at`, and the matches that follow without a literal; returns the offset where they end.
    #[inline(always)]
    fn follow(
        &mut self,
        source: Source<'_>,
        sink: &mut Sink<'_>,
        token: usize,
        at: usize,
        before: usize,
    ) -> Option<usize> {
        let (mut token, mut at, mut before) = (token, at, before);
        loop {
            let len = MATCH_MIN + source.equal(at + MATCH_MIN, before + MATCH_MIN);
            sink.push_match(token, at - before, len)?;
            at += len;
            if at > BEGIN_MAX {
                return Some(at);
            }
            // SAFETY: the condition leaves 12 bytes after `at`; the earlier offset is at least that of the match.
            let (word, behind) = unsafe { (source.word(at), source.word(at - 2)) };
            self.places[hash(behind)] = (at - 2) as u16;
            before = usize::from(std::mem::replace(&mut self.places[hash(word)], at as u16));
            // SAFETY: an entered offset is less than `at`, so its word ends inside the page.
            if unsafe { source.word(before) } != word {
                return Some(at);
            }
            token = sink.literals(source, at, at)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::tests::texty;
    use proptest::prelude::*;

    /// The page that the C library decodes from a block.
    fn read(block: &[u8]) -> Option<Page> {
        let mut page = [0; PAGE_SIZE];
        decode(block, &mut page).then_some(page)
    }

    /// A page of noise, runs, and repetitions of earlier bytes.
    fn page_of(pieces: &[(u8, u16, u16, u64)]) -> Page {
        let mut page = [0; PAGE_SIZE];
        let mut at = 0;
        for (kind, len, back, seed) in pieces.iter().cycle() {
            let end = (at + usize::from(*len).max(1)).min(PAGE_SIZE);
            let mut noise = fastrand::Rng::with_seed(*seed);
            while at < end {
                page[at] = match kind % 3 {
                    0 => noise.u8(..),
                    1 => *seed as u8,
                    _ => page[at.saturating_sub(usize::from(*back).max(1))],
                };
                at += 1;
            }
            if at == PAGE_SIZE {
                return page;
            }
        }
        page
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_library_decodes_every_block(
            pieces in proptest::collection::vec((any::<u8>(), 0_u16..700, 0_u16..4000, any::<u64>()), 1..40),
            len_max in 0_usize..5000,
        ) {
            let page = page_of(&pieces);
            let mut encoder = Encoder::new();
            let mut block = [0xa5; PAGE_SIZE + SLOP];
            if let Some(len) = encoder.encode(&page, &mut block, len_max) {
                prop_assert!(len <= len_max);
                prop_assert!(read(&block[..len]) == Some(page));
            }
            prop_assert!(block[PAGE_SIZE.min(len_max) + SLOP..].iter().all(|byte| *byte == 0xa5));
            // A page finds no match in the one before.
            let (mut first, mut second) = ([0; PAGE_SIZE + SLOP], [0; PAGE_SIZE + SLOP]);
            let again = encoder.encode(&page, &mut first, PAGE_SIZE);
            prop_assert_eq!(again, Encoder::new().encode(&page, &mut second, PAGE_SIZE));
            prop_assert!(first[..again.unwrap_or(0)] == second[..again.unwrap_or(0)]);
        }
    }

    /// Lengths around those that take one more byte, and the format's rules for a block's end.
    #[test]
    fn literals_and_matches_of_any_length_are_decoded() {
        let noise = page_of(&[(0, 4096, 0, 5)]);
        let lens = || (0..24).chain(268..276).chain(523..531);
        let mut encoder = Encoder::new();
        for (literals, run) in lens().flat_map(|literals| lens().map(move |run| (literals, run))) {
            for tail in 0..24 {
                let mut page = [0; PAGE_SIZE];
                page[..literals].copy_from_slice(&noise[..literals]);
                page[literals..literals + run].fill(1);
                page[PAGE_SIZE - tail..].copy_from_slice(&noise[PAGE_SIZE - tail..]);
                let mut block = [0xa5; PAGE_SIZE + SLOP];
                let len = encoder.encode(&page, &mut block, PAGE_SIZE).expect("small");
                assert!(len < literals + tail + 48, "{literals}, {run}, {tail}: {len} bytes");
                assert!(read(&block[..len]) == Some(page), "{literals}, {run}, {tail}");
                // With exactly enough space, and with less.
                for len_max in [len, len - 1] {
                    let mut block = [0xa5; PAGE_SIZE + SLOP];
                    if let Some(len) = encoder.encode(&page, &mut block, len_max) {
                        assert!(len <= len_max && read(&block[..len]) == Some(page), "{literals}, {run}, {tail}");
                    }
                    assert!(block[len_max + SLOP..].iter().all(|byte| *byte == 0xa5));
                }
            }
        }
    }

    #[test]
    fn blocks_are_about_as_small_as_the_librarys() {
        let (mut ours, mut theirs) = (0, 0);
        for seed in 0..500 {
            let page = texty(seed);
            let mut block = [0; PAGE_SIZE + SLOP];
            ours += Encoder::new().encode(&page, &mut block, PAGE_SIZE).expect("text");
            // SAFETY: both lengths passed are those of the buffers.
            let len = unsafe {
                lz4_sys::LZ4_compress_default(
                    page.as_ptr().cast(),
                    block.as_mut_ptr().cast(),
                    PAGE_SIZE as i32,
                    PAGE_SIZE as i32,
                )
            };
            theirs += len as usize;
        }
        assert!(ours <= theirs + theirs / 50, "{ours} bytes, the library's {theirs}");
    }

    #[test]
    fn noise_is_given_up_early_unless_the_rest_compresses() {
        let mut block = [0; PAGE_SIZE + SLOP];
        let noise = page_of(&[(0, 4096, 0, 77)]);
        assert_eq!(Encoder::new().encode(&noise, &mut block, PAGE_SIZE), None);
        // Noise before zeros, and before text.
        for rest in [[0; PAGE_SIZE], texty(3)] {
            for noisy in [PAGE_SIZE / 4, PAGE_SIZE / 2] {
                let mut page = rest;
                page[..noisy].copy_from_slice(&noise[..noisy]);
                let mut alone = [0; PAGE_SIZE + SLOP];
                let quiet = Encoder::new().encode(&rest, &mut alone, 2990).expect("small");
                let len = Encoder::new().encode(&page, &mut block, 2990).expect("small enough");
                assert!(len < noisy + quiet + 64, "{noisy} bytes of noise, {len} in all");
            }
        }
    }
}
