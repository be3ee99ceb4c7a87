//! Compression and decompression of one page.
//!
//! LZ4 blocks are decoded by the C library, which takes two thirds of
//! `lz4_flex`'s time, and encoded by [`lz4`](crate::lz4), which is written for
//! pages. Zstandard runs at level 1 with the domain's dictionary, which is
//! faster and denser than any level without one. The four magic bytes of a
//! Zstandard frame are always the same and are left out.
//!
//! A successful decoding proves nothing: the caller compares the fingerprint
//! of the decoded page.

use crate::layout::DICTIONARY_BYTES;
use crate::lz4::{self, Encoder};
use pagefold_os::{PAGE_SIZE, Page};
use std::sync::Arc;
use zstd_safe::{CCtx, CDict, DCtx, DDict};

/// A page that does not compress to this many bytes is kept as it is: above 73 % the saving is not worth the time.
pub const RAW_ABOVE_BYTES: usize = 2990;

/// Bytes at the start of a patch: the offset of its base.
pub(crate) const PATCH_HEAD: usize = 8;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const LEVEL: i32 = 1;

/// How the payload of a content is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// The page as it is.
    Raw = 1,
    /// Eight bytes that fill the page.
    Fill = 2,
    /// An LZ4 block.
    Lz4 = 3,
    /// A Zstandard frame, with the dictionary of the given number if it is not 0.
    Zstd = 4,
    /// The offset of the base content, and a Zstandard frame with the base page as its raw dictionary.
    Patch = 5,
}

impl Codec {
    /// The codec of that number.
    pub(crate) const fn from_number(number: u8) -> Option<Codec> {
        match number {
            1 => Some(Codec::Raw),
            2 => Some(Codec::Fill),
            3 => Some(Codec::Lz4),
            4 => Some(Codec::Zstd),
            5 => Some(Codec::Patch),
            _ => None,
        }
    }

    /// True if a payload of this codec can have `len` bytes. An adopted arena may hold anything.
    pub(crate) const fn may_have_len(self, len: usize) -> bool {
        match self {
            Codec::Raw => len == PAGE_SIZE,
            Codec::Fill => len == 8,
            Codec::Patch => len > PATCH_HEAD && len <= PAGE_SIZE,
            Codec::Lz4 | Codec::Zstd => len > 0 && len <= PAGE_SIZE,
        }
    }
}

/// A trained dictionary, digested for both directions.
pub(crate) struct Dictionary {
    number: u8,
    compress: CDict<'static>,
    decompress: DDict<'static>,
}

impl std::fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Dictionary {}", self.number)
    }
}

impl Dictionary {
    /// Digests `bytes` as dictionary `number`; `None` if the library refuses.
    pub(crate) fn new(number: u8, bytes: &[u8]) -> Option<Arc<Dictionary>> {
        let compress = CDict::try_create(bytes, LEVEL)?;
        let decompress = DDict::try_create(bytes)?;
        Some(Arc::new(Dictionary { number, compress, decompress }))
    }

    /// Number in the arena, from 1.
    pub(crate) const fn number(&self) -> u8 {
        self.number
    }

    /// Bytes of the digests.
    pub(crate) fn bytes(&self) -> usize {
        self.compress.sizeof() + self.decompress.sizeof()
    }
}

/// Trains a dictionary of at most 16 KiB from sample pages.
///
/// The identifier in it is set to 0, which saves four bytes in every page: the number of the dictionary stands in
/// the content's header.
pub(crate) fn train(samples: &[u8]) -> Option<Vec<u8>> {
    let mut dictionary = vec![0_u8; DICTIONARY_BYTES];
    let sizes = vec![PAGE_SIZE; samples.len() / PAGE_SIZE];
    let len = zstd_safe::train_from_buffer(&mut dictionary[..], &samples[..sizes.len() * PAGE_SIZE], &sizes).ok()?;
    dictionary.truncate(len);
    dictionary.get_mut(4..8)?.fill(0);
    Some(dictionary)
}

/// The word that fills the page, if one does.
pub(crate) fn same_filled(page: &Page) -> Option<u64> {
    let first: [u8; 8] = page[..8].try_into().ok()?;
    // 64 bytes at a time: the usual page differs in the first step.
    let line: [u8; 64] = std::array::from_fn(|at| first[at % 8]);
    page.chunks_exact(64).all(|chunk| chunk == line).then(|| u64::from_le_bytes(first))
}

/// Fills the page with a word.
pub(crate) fn fill(word: u64, page: &mut Page) {
    for chunk in page.chunks_exact_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

/// Compression state of one thread.
pub(crate) struct Coder {
    compress: CCtx<'static>,
    decompress: DCtx<'static>,
    lz4: Box<Encoder>,
    frame: Box<[u8; PAGE_SIZE + 64]>,
}

impl std::fmt::Debug for Coder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Coder")
    }
}

impl Coder {
    /// Makes the state: about 150 KiB, allocated here, so that a fault handler never allocates.
    pub(crate) fn new() -> Coder {
        Coder {
            compress: CCtx::create(),
            decompress: DCtx::create(),
            lz4: Box::new(Encoder::new()),
            frame: Box::new([0; PAGE_SIZE + 64]),
        }
    }

    /// Compresses with LZ4; `None` above `len_max` bytes, or if the encoder expects to exceed them.
    pub(crate) fn lz4(&mut self, page: &Page, len_max: usize) -> Option<&[u8]> {
        let block = self.frame.first_chunk_mut()?;
        let len = self.lz4.encode(page, block, len_max)?;
        Some(&self.frame[..len])
    }

    /// Compresses with Zstandard, with a dictionary if there is one; `None` above `len_max` bytes.
    pub(crate) fn zstd(&mut self, page: &Page, dictionary: Option<&Dictionary>, len_max: usize) -> Option<&[u8]> {
        let frame = &mut self.frame[..len_max.min(PAGE_SIZE) + ZSTD_MAGIC.len()];
        let len = match dictionary {
            Some(dictionary) => self.compress.compress_using_cdict(frame, page, &dictionary.compress),
            None => self.compress.compress(frame, page, LEVEL),
        };
        Self::without_magic(frame, len.ok()?)
    }

    /// Compresses against a near page; `None` above `len_max` bytes.
    pub(crate) fn patch(&mut self, page: &Page, base: &Page, len_max: usize) -> Option<&[u8]> {
        let frame = &mut self.frame[..len_max.min(PAGE_SIZE) + ZSTD_MAGIC.len()];
        let len = self.compress.compress_using_dict(frame, page, base, LEVEL).ok()?;
        Self::without_magic(frame, len)
    }

    fn without_magic(frame: &[u8], len: usize) -> Option<&[u8]> {
        frame[..len].strip_prefix(&ZSTD_MAGIC)
    }

    /// Decompresses a payload of `codec` into `page`.
    ///
    /// `base` is the base page of a patch. On failure the page's bytes are undefined.
    pub(crate) fn decode(
        &mut self,
        codec: Codec,
        payload: &[u8],
        dictionary: Option<&Dictionary>,
        base: Option<&Page>,
        page: &mut Page,
    ) -> Result<(), &'static str> {
        match codec {
            Codec::Raw => {
                page.copy_from_slice(payload.get(..PAGE_SIZE).ok_or("length")?);
                Ok(())
            }
            Codec::Fill => {
                fill(u64::from_le_bytes(payload.get(..8).and_then(|word| word.try_into().ok()).ok_or("length")?), page);
                Ok(())
            }
            Codec::Lz4 => lz4::decode(payload, page).then_some(()).ok_or("LZ4 block"),
            Codec::Zstd | Codec::Patch => {
                let payload = if codec == Codec::Patch { payload.get(PATCH_HEAD..).ok_or("length")? } else { payload };
                let frame = self.frame.get_mut(..ZSTD_MAGIC.len() + payload.len()).ok_or("length")?;
                frame[..ZSTD_MAGIC.len()].copy_from_slice(&ZSTD_MAGIC);
                frame[ZSTD_MAGIC.len()..].copy_from_slice(payload);
                let len = match (codec, base, dictionary) {
                    (Codec::Patch, Some(base), _) => self.decompress.decompress_using_dict(&mut page[..], frame, base),
                    (Codec::Patch, None, _) => return Err("base of the patch"),
                    (_, _, Some(dictionary)) => {
                        self.decompress.decompress_using_ddict(&mut page[..], frame, &dictionary.decompress)
                    }
                    (_, _, None) => self.decompress.decompress(&mut page[..], frame),
                };
                if len == Ok(PAGE_SIZE) { Ok(()) } else { Err("Zstandard frame") }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Text-like bytes: words of a small vocabulary.
    pub(crate) fn texty(seed: u64) -> Page {
        let (mut random, mut word) = (fastrand::Rng::with_seed(seed), 0);
        std::array::from_fn(|at| {
            if at % 16 == 0 {
                word = random.usize(..27);
            }
            b"the cold page is a page that nobody touches"[word + at % 16]
        })
    }

    /// Bytes that no codec makes shorter.
    pub(crate) fn noise(seed: u64) -> Page {
        let mut page = [0; PAGE_SIZE];
        fastrand::Rng::with_seed(seed).fill(&mut page);
        page
    }

    #[test]
    fn each_codec_decodes_to_the_same_page() {
        let mut coder = Coder::new();
        let samples: Vec<u8> = (0..400).flat_map(texty).collect();
        let dictionary = Dictionary::new(1, &train(&samples).unwrap()).unwrap();
        let (page, mut out) = (texty(1000), [0; PAGE_SIZE]);
        let lz4 = coder.lz4(&page, RAW_ABOVE_BYTES).unwrap().to_vec();
        coder.decode(Codec::Lz4, &lz4, None, None, &mut out).unwrap();
        assert_eq!(out, page);
        let plain = coder.zstd(&page, None, RAW_ABOVE_BYTES).unwrap().to_vec();
        out.fill(0);
        coder.decode(Codec::Zstd, &plain, None, None, &mut out).unwrap();
        assert_eq!(out, page);
        let dense = coder.zstd(&page, Some(&dictionary), RAW_ABOVE_BYTES).unwrap().to_vec();
        out.fill(0);
        coder.decode(Codec::Zstd, &dense, Some(&dictionary), None, &mut out).unwrap();
        assert_eq!(out, page);
        assert!(dense.len() < plain.len(), "{} {}", dense.len(), plain.len());
        let mut near = page;
        near[700] ^= 1;
        let mut patch = vec![0; PATCH_HEAD];
        patch.extend_from_slice(coder.patch(&near, &page, RAW_ABOVE_BYTES).unwrap());
        assert!(patch.len() < 128, "{}", patch.len());
        coder.decode(Codec::Patch, &patch, None, Some(&page), &mut out).unwrap();
        assert_eq!(out, near);
    }

    #[test]
    fn noise_is_not_compressed() {
        let mut coder = Coder::new();
        assert!(coder.lz4(&noise(3), RAW_ABOVE_BYTES).is_none());
        assert!(coder.zstd(&noise(3), None, RAW_ABOVE_BYTES).is_none());
    }

    #[test]
    fn only_equal_words_make_a_same_filled_page() {
        let mut page = [0; PAGE_SIZE];
        fill(0x0102_0304_0506_0708, &mut page);
        assert_eq!(same_filled(&page), Some(0x0102_0304_0506_0708));
        for at in [0, 63, 64, PAGE_SIZE - 1] {
            page[at] ^= 1;
            assert_eq!(same_filled(&page), None);
            page[at] ^= 1;
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..4200), number in 1_u8..6) {
            let codec = Codec::from_number(number).unwrap();
            let mut out = [0; PAGE_SIZE];
            let _ = Coder::new().decode(codec, &bytes, None, Some(&[7; PAGE_SIZE]), &mut out);
        }
    }
}
