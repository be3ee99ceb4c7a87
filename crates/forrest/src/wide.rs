//! Compares two buckets in one step.
//!
//! The loads are assembly because other threads may write the compared words meanwhile: for the language they are opaque
//! reads, for the processor each word is read in one access, in order with the loads of the headers before and after it.

use crate::bucket::{Bucket, Head};

/// A bucket and its header as read.
pub type Side<'t> = (&'t Bucket, Head);

/// A bit for each slot in use, the low eight of `first` and the next of `second`, with low 48 bits equal to those of
/// `remainder`: what [`Bucket::matches`] tells of both. `wide` is what [`has_avx512`] says.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub fn matches(_wide: bool, first: Side<'_>, second: Side<'_>, remainder: u64) -> u32 {
    first.0.matches(first.1, remainder) | second.0.matches(second.1, remainder) << 8
}

/// A bit for each slot in use, the low eight of `first` and the next of `second`, with low 48 bits equal to those of
/// `remainder`: what [`Bucket::matches`] tells of both. `wide` is what [`has_avx512`] says.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn matches(wide: bool, first: Side<'_>, second: Side<'_>, remainder: u64) -> u32 {
    if wide {
        // SAFETY: `wide` is the result of `has_avx512`, so the processor has AVX-512F, BW and VL.
        unsafe { matches_avx512(first.0, first.1, second.0, second.1, remainder) }
    } else {
        matches_sse2(first.0, first.1, second.0, second.1, remainder)
    }
}

/// Whether the processor compares under masks of bits (AVX-512F, BW, DQ and VL).
pub fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// # Safety
/// The processor has AVX-512F, BW and VL.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn matches_avx512(first: &Bucket, first_head: Head, second: &Bucket, second_head: Head, remainder: u64) -> u32 {
    let mask: u32;
    // SAFETY: aligned reads of two buckets, which the references keep valid; nothing is written. The registers are named
    // because the compiler does not allocate these classes in a function without the feature; for the same reason it keeps
    // nothing in them.
    unsafe {
        std::arch::asm!(
            "vpbroadcastd ymm31, {low:e}",
            "vpbroadcastw xmm30, {middle:e}",
            // Of eight lanes only the low eight bits count.
            "kmovw k6, {first_used:e}",
            "kmovw k7, {second_used:e}",
            "vpcmpeqd k6 {{k6}}, ymm31, [{first} + 32]",
            "vpcmpeqd k7 {{k7}}, ymm31, [{second} + 32]",
            "vpcmpeqw k6 {{k6}}, xmm30, [{first} + 16]",
            "vpcmpeqw k7 {{k7}}, xmm30, [{second} + 16]",
            "kunpckbw k7, k7, k6",
            "kmovw {mask:e}, k7",
            low = in(reg) remainder,
            middle = in(reg) remainder >> 32,
            first = in(reg) std::ptr::from_ref(first),
            second = in(reg) std::ptr::from_ref(second),
            first_used = in(reg) first_head.0,
            second_used = in(reg) second_head.0,
            mask = lateout(reg) mask,
            out("xmm30") _,
            out("xmm31") _,
            out("k6") _,
            out("k7") _,
            options(nostack, readonly, preserves_flags),
        );
    }
    mask
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn matches_sse2(first: &Bucket, first_head: Head, second: &Bucket, second_head: Head, remainder: u64) -> u32 {
    let mask: u32;
    // SAFETY: aligned reads of two buckets by instructions that every x86-64 has; nothing is written.
    unsafe {
        std::arch::asm!(
            "movd {low}, {remainder:e}",
            "pshufd {low}, {low}, 0",
            "movd {middle}, {high:e}",
            "pshuflw {middle}, {middle}, 0",
            "punpcklqdq {middle}, {middle}",
            "movdqa {a}, [{first} + 32]",
            "pcmpeqd {a}, {low}",
            "movdqa {b}, [{first} + 48]",
            "pcmpeqd {b}, {low}",
            "packssdw {a}, {b}",
            "movdqa {b}, [{first} + 16]",
            "pcmpeqw {b}, {middle}",
            "pand {a}, {b}",
            "movdqa {b}, [{second} + 32]",
            "pcmpeqd {b}, {low}",
            "pcmpeqd {low}, [{second} + 48]",
            "packssdw {b}, {low}",
            "pcmpeqw {middle}, [{second} + 16]",
            "pand {b}, {middle}",
            "packsswb {a}, {b}",
            "pmovmskb {mask:e}, {a}",
            remainder = in(reg) remainder,
            high = in(reg) remainder >> 32,
            first = in(reg) std::ptr::from_ref(first),
            second = in(reg) std::ptr::from_ref(second),
            mask = lateout(reg) mask,
            low = out(xmm_reg) _,
            middle = out(xmm_reg) _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            options(nostack, readonly, preserves_flags),
        );
    }
    mask & (first_head.used() | second_head.used() << 8) as u32
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::bucket::{SLOTS, SlotKind};
    use proptest::prelude::*;
    use std::sync::atomic::Ordering;

    proptest! {
        #[test]
        fn sees_what_one_slot_at_a_time_sees(
            words in proptest::array::uniform16(0u64..1 << 52), used: [u8; 2], pick in 0usize..16, near in 0u64..1 << 52,
        ) {
            let buckets = [Bucket::empty(), Bucket::empty()];
            // Some are equal in part, or as a whole.
            let remainder = words[pick] ^ (near & near >> 17 & near >> 31);
            for (index, word) in words.into_iter().enumerate() {
                let word = if index % 3 == 0 { word & 0xffff_0000_0000 | remainder & 0xf_0000_ffff_ffff } else { word };
                let word = if index % 5 == 0 { remainder } else { word };
                buckets[index / SLOTS].fill(index % SLOTS, SlotKind::inline(8), word, 0);
            }
            for (bucket, used) in buckets.iter().zip(used) {
                bucket.head.store(0x1234_5600 | u64::from(used), Ordering::Relaxed);
            }
            let heads = [0, 1].map(|at: usize| buckets[at].head(Ordering::Relaxed));
            let [first, second] = [0, 1].map(|at: usize| (&buckets[at], heads[at]));
            let expected = buckets[0].matches(heads[0], remainder) | buckets[1].matches(heads[1], remainder) << 8;
            prop_assert_eq!(matches(false, first, second, remainder), expected);
            if has_avx512() {
                prop_assert_eq!(matches(true, first, second, remainder), expected);
            } else {
                println!("SKIPPED: this processor has no AVX-512");
            }
        }
    }
}
