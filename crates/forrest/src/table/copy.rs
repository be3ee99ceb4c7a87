//! Copying: the entries of one array are copied to another, unpublished one.
//!
//! A copy alternates between two steps. The first reads some hundred entries and
//! computes their new home buckets, eight at a time where the processor can.
//! The second writes each entry to the emptier home. The fill of the new
//! buckets is counted separately, so that the second step does not read the lines
//! it writes; the headers are written once, at the end.

use super::{Dir, Homes, Table};
use crate::bucket::{Bucket, Mark, SLOTS, SlotKind};
use std::hint::select_unpredictable;
use std::sync::atomic::Ordering;

/// Buckets read in one turn: their entries fit the first-level cache.
const BUCKETS_PER_TURN: usize = 32;

/// Entries being copied. The arrays have eight elements more than entries, because the vector code stores eight at a time.
struct Batch {
    first: [u32; Batch::ROOM],
    second: [u32; Batch::ROOM],
    low: [u32; Batch::ROOM],
    /// 8 bits mark, 16 bits of the remainder.
    high: [u32; Batch::ROOM],
    words: [u64; Batch::ROOM],
}

impl Batch {
    const ROOM: usize = BUCKETS_PER_TURN * SLOTS + 8;

    fn new() -> Batch {
        let zero = [0; Batch::ROOM];
        Batch { first: zero, second: zero, low: zero, high: zero, words: [0; Batch::ROOM] }
    }

    /// The entry `at` of the batch.
    fn entry(&self, at: usize) -> (SlotKind, u64, u64) {
        let (low, high) = (u64::from(self.low[at]), u64::from(self.high[at]));
        let mark = Mark((high >> 16) as u8);
        (mark.kind(), u64::from(mark.0 & 15) << 48 | (high & 0xffff) << 32 | low, self.words[at])
    }
}

/// An array that is being filled.
struct Filling<'t> {
    buckets: &'t [Bucket],
    /// How many entries each bucket has.
    counts: Vec<u8>,
    /// Entries that found both home buckets full.
    overflow: Vec<(SlotKind, u64, u64)>,
}

impl Table {
    /// Copies all entries of `from` to the unpublished array `to`. Returns false if one finds no free slot.
    pub(super) fn copy(&self, from: Dir, to: Dir) -> bool {
        let from = self.buckets(from);
        let mut filling = Filling { buckets: self.buckets(to), counts: vec![0; to.buckets()], overflow: Vec::new() };
        // In order, so that the lines are in the cache before they are written in random order.
        for bucket in filling.buckets {
            bucket.head.store(0, Ordering::Relaxed);
            bucket.words[0].store(0, Ordering::Relaxed);
        }
        let mut batch = Batch::new();
        for from in from.chunks(BUCKETS_PER_TURN) {
            let count = self.take_out(from, to.buckets(), &mut batch);
            filling.put_in(&batch, count);
        }
        for (bucket, &count) in filling.buckets.iter().zip(&filling.counts) {
            bucket.head.store((1 << count) - 1, Ordering::Relaxed);
        }
        filling.overflow.into_iter().all(|(kind, remainder, word)| {
            let homes = Homes::of(remainder, to.buckets());
            let Some(free) = self.free_slot_for(to, homes, None).or_else(|| self.displace(to, homes)) else {
                return false;
            };
            let bucket = self.bucket(to, free.bucket);
            bucket.fill(free.slot, kind, remainder, word);
            bucket.head.store(bucket.head(Ordering::Relaxed).with(free.slot).0, Ordering::Relaxed);
            true
        })
    }

    /// Puts the entries of up to [`BUCKETS_PER_TURN`] buckets, which no thread changes, into `batch`, with their homes
    /// in an array of `buckets`. Returns their number.
    fn take_out(&self, from: &[Bucket], buckets: usize, batch: &mut Batch) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.wide {
            // SAFETY: `wide` is the result of `has_avx512`, which checks the features that the function enables.
            return unsafe { take_out_avx512(from, buckets, batch) };
        }
        take_out_each(from, buckets, batch)
    }

    /// The array of a shard.
    fn buckets(&self, dir: Dir) -> &[Bucket] {
        // SAFETY: as argued in `bucket`, the array lies in the arena, and it has `dir.buckets()` buckets.
        unsafe { std::slice::from_raw_parts(self.bucket(dir, 0), dir.buckets()) }
    }
}

impl Filling<'_> {
    /// Writes the first `count` entries of a batch to their emptier home buckets.
    fn put_in(&mut self, batch: &Batch, count: usize) {
        for at in 0..count {
            let (first, second) = (batch.first[at] as usize, batch.second[at] as usize);
            let (in_first, in_second) = (self.counts[first], self.counts[second]);
            let is_second = in_second < in_first;
            let (index, slot) =
                (select_unpredictable(is_second, second, first), select_unpredictable(is_second, in_second, in_first));
            if usize::from(slot) == SLOTS {
                self.overflow.push(batch.entry(at));
                continue;
            }
            self.counts[index] = slot + 1;
            self.buckets[index].put(usize::from(slot), batch.low[at], batch.high[at], batch.words[at]);
        }
    }
}

/// Puts the entries of up to [`BUCKETS_PER_TURN`] buckets into `batch`, one at a time.
fn take_out_each(from: &[Bucket], buckets: usize, batch: &mut Batch) -> usize {
    assert!(from.len() <= BUCKETS_PER_TURN);
    let mut count = 0;
    for bucket in from {
        let mut used = bucket.head(Ordering::Relaxed).used();
        while used != 0 {
            let slot = used.trailing_zeros() as usize;
            used &= used - 1;
            let remainder = bucket.remainder(slot);
            let homes = Homes::of(remainder, buckets);
            (batch.first[count], batch.second[count]) = (homes.first as u32, homes.second as u32);
            batch.low[count] = remainder as u32;
            batch.high[count] = u32::from(bucket.mark(slot).0) << 16 | (remainder >> 32) as u32 & 0xffff;
            batch.words[count] = bucket.words[slot].load(Ordering::Relaxed);
            count += 1;
        }
    }
    count
}

/// [`take_out_each`], a bucket at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn take_out_avx512(from: &[Bucket], buckets: usize, batch: &mut Batch) -> usize {
    use std::arch::x86_64::*;
    assert!(from.len() <= BUCKETS_PER_TURN);
    let many = _mm256_set1_epi64x(buckets as i64);
    // The high half of each of eight products of 32 bits.
    let places = |parts: __m256i| {
        let even = _mm256_srli_epi64::<32>(_mm256_mul_epu32(parts, many));
        let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(parts), many);
        _mm256_mask_blend_epi32(0b1010_1010, even, odd)
    };
    let mut count = 0;
    for bucket in from {
        let head = bucket.head(Ordering::Relaxed);
        let used = head.used() as u8;
        let at = std::ptr::from_ref(bucket).cast::<u8>();
        // SAFETY: the offsets are those of the bucket's fields (`repr(C)`), aligned for their vectors; the shard's lock
        // keeps writers away.
        let (marks, middle, low, words) = unsafe {
            (
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(8).cast())),
                _mm256_cvtepu16_epi32(_mm_load_si128(at.add(16).cast())),
                _mm256_load_si256(at.add(32).cast()),
                _mm512_load_si512(at.add(64).cast()),
            )
        };
        // As `Homes::of` has it: bits 20 to 51 of the remainder, and bits 0 to 31.
        let high_part = _mm256_or_si256(
            _mm256_or_si256(_mm256_slli_epi32::<28>(marks), _mm256_slli_epi32::<12>(middle)),
            _mm256_srli_epi32::<20>(low),
        );
        let high = _mm256_or_si256(_mm256_slli_epi32::<16>(marks), middle);
        // SAFETY: `count` is at most BUCKETS_PER_TURN * SLOTS (length asserted above), and each array has eight more
        // elements.
        unsafe {
            let put = |to: &mut [u32; Batch::ROOM], what: __m256i| {
                let packed = _mm256_maskz_compress_epi32(used, what);
                _mm256_storeu_si256(to.as_mut_ptr().add(count).cast(), packed);
            };
            put(&mut batch.first, places(high_part));
            put(&mut batch.second, places(low));
            put(&mut batch.low, low);
            put(&mut batch.high, high);
            let packed = _mm512_maskz_compress_epi64(used, words);
            _mm512_storeu_si512(batch.words.as_mut_ptr().add(count).cast(), packed);
        }
        count += used.count_ones() as usize;
    }
    count
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn eight_at_a_time_are_what_one_after_the_other_are(
            entries in proptest::collection::vec((0u64..1 << 52, 1u8..12, any::<u64>()), BUCKETS_PER_TURN * SLOTS),
            used in proptest::collection::vec(any::<u8>(), 1..=BUCKETS_PER_TURN),
            buckets in 1usize..1 << 18,
        ) {
            if !crate::wide::has_avx512() {
                println!("SKIPPED: this processor has no AVX-512");
                return Ok(());
            }
            let from: Vec<Bucket> = used.iter().map(|_| Bucket::empty()).collect();
            for (index, (bucket, &used)) in from.iter().zip(&used).enumerate() {
                for slot in 0..SLOTS {
                    let (remainder, kind, word) = entries[index * SLOTS + slot];
                    bucket.fill(slot, SlotKind(kind), remainder, word);
                }
                bucket.head.store(0x1234_5600 | u64::from(used), Ordering::Relaxed);
            }
            let (mut one, mut eight) = (Batch::new(), Batch::new());
            let count = take_out_each(&from, buckets, &mut one);
            // SAFETY: `has_avx512` was checked above.
            prop_assert_eq!(unsafe { take_out_avx512(&from, buckets, &mut eight) }, count);
            let of = |batch: &Batch, at: usize| (batch.first[at], batch.second[at], batch.entry(at));
            prop_assert!((0..count).all(|at| of(&one, at) == of(&eight, at)));
        }
    }
}
