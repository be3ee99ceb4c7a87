//! Compares all words of a line in one instruction.

use super::word::VALUE_MAX;

/// One bit per word of the line with known tag bits equal to the key's: what [`matches`](super::word::matches)
/// tells, for all eight words (the first is the control word: its bit means nothing).
///
/// The load is assembly because other threads may write the words meanwhile: for the language it is an
/// opaque read, for the processor each word is read in one access and in order with the control word's
/// loads before and after it.
///
/// # Safety
/// The processor has AVX-512F; eight words at `line` are mapped, and the address is a multiple of 64.
#[inline(always)]
pub(super) unsafe fn matching_words(line: *const u64, key: u64) -> u64 {
    let mask: u32;
    // SAFETY: one aligned read of eight mapped words (required of the caller); nothing is written. The
    // registers are named because the compiler does not allocate these classes in a function without the
    // feature; for the same reason it keeps nothing in them.
    unsafe {
        std::arch::asm!(
            "vmovdqa64 zmm31, [{line}]",
            "vpbroadcastq zmm30, {key}",
            "vpbroadcastq zmm29, {tag_bits}",
            "vpxorq zmm30, zmm30, zmm31", // where leaf and key differ
            "vpandq zmm31, zmm31, zmm29", // the tags
            "vpxorq zmm29, zmm29, zmm29",
            "vpsubq zmm29, zmm29, zmm31",
            "vpandq zmm31, zmm31, zmm29", // the lowest set bit of each tag
            "vpsrlq zmm30, zmm30, 1",
            "vpcmpuq k7, zmm30, zmm31, 1", // less: all known bits are equal
            "kmovw {mask:e}, k7",
            line = in(reg) line,
            key = in(reg) key,
            tag_bits = in(reg) !VALUE_MAX,
            mask = out(reg) mask,
            out("xmm29") _,
            out("xmm30") _,
            out("xmm31") _,
            out("k7") _,
            options(nostack, readonly, preserves_flags),
        );
    }
    u64::from(mask & 0xff)
}

#[cfg(test)]
mod tests {
    use super::super::word;
    use proptest::prelude::*;

    #[repr(align(64))]
    struct Line([u64; 8]);

    proptest! {
        #[test]
        fn sees_what_one_compare_at_a_time_sees(key: u64, words: [u64; 8], near: [bool; 8], level in 0u32..30) {
            if !crate::wide::has_avx512() {
                println!("SKIPPED: this processor has no AVX-512");
                return Ok(());
            }
            let mut line = Line(words);
            for (word, near) in line.0.iter_mut().zip(near) {
                if near {
                    *word = word::leaf(key ^ (*word & 1) << 50, level, *word & word::VALUE_MAX);
                }
            }
            // SAFETY: `has_avx512` was checked above; the line is aligned.
            let seen = unsafe { super::matching_words(line.0.as_ptr(), key << level) };
            for (index, &word) in line.0.iter().enumerate() {
                prop_assert_eq!(seen >> index & 1 == 1, word::matches(word, key << level), "word {}", index);
            }
        }
    }
}
