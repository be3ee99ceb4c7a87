//! Eight keys per instruction.

/// Counts the keys, of the first `count` at `keys`, that are less than `key` (or equal to it).
///
/// All `VECTORS * 8` words are compared, whatever `count` is: a loop that ends at `count` would be
/// mispredicted at every node, and that would end the overlap with the next search.
///
/// The loads are assembly, because others may write the keys meanwhile: for the language each is an
/// opaque read, for the processor one in order with those around it. What a torn view gives is
/// thrown away with the version.
///
/// # Safety
/// The processor has AVX-512F, and `VECTORS * 8` words at `keys` can be read.
#[inline(always)]
pub(super) unsafe fn count_below<const VECTORS: usize>(
    keys: *const u64,
    count: usize,
    key: u64,
    or_equal: bool,
) -> usize {
    let mut below = 0u64;
    for vector in 0..VECTORS {
        let mask: u32;
        // The registers are named because the compiler hands out none of these classes to a function
        // without the feature; for the same reason it keeps nothing in them.
        macro_rules! compare {
            ($predicate:literal) => {
                // SAFETY: eight words at this place can be read; nothing is written.
                unsafe {
                    std::arch::asm!(
                        "vpbroadcastq zmm31, {key}",
                        concat!("vpcmpuq k7, zmm31, [{keys}], ", $predicate),
                        "kmovw {mask:e}, k7",
                        key = in(reg) key,
                        keys = in(reg) keys.add(vector * 8),
                        mask = out(reg) mask,
                        out("xmm31") _,
                        out("k7") _,
                        options(nostack, readonly, preserves_flags),
                    )
                }
            };
        }
        if or_equal {
            compare!("5"); // wanted >= key in the node
        } else {
            compare!("6"); // wanted > key in the node
        }
        below |= u64::from(mask & 0xff) << (vector * 8);
    }
    (below & ((1u64 << count) - 1)).count_ones() as usize
}

#[cfg(test)]
mod tests {
    #[test]
    fn counts_as_a_loop_does() {
        if !crate::wide::has_avx512() {
            println!("SKIPPED: this processor has no AVX-512");
            return;
        }
        let keys: Vec<u64> = (0..64).map(|index| index * 3 + u64::MAX / 2).collect();
        for count in 0..56 {
            for key in keys.iter().flat_map(|&key| [key - 1, key, key + 1]).chain([0, u64::MAX]) {
                for or_equal in [false, true] {
                    let expected =
                        keys[..count].iter().filter(|&&other| other < key || (or_equal && other == key)).count();
                    // SAFETY: checked above; 64 words can be read.
                    let counted = unsafe { super::count_below::<7>(keys.as_ptr(), count, key, or_equal) };
                    assert_eq!(counted, expected);
                }
            }
        }
    }
}
