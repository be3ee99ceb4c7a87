//! Searches forty keys in twenty instructions.

/// Keys compared by one search: those of the largest node.
pub(super) const KEYS: usize = 40;

/// Counts, among the first `count` (at most 255) keys at `keys`, those less than `key` (or equal to it).
///
/// All [`KEYS`] words are compared, whatever `count` is: a loop that ends at `count` would be
/// mispredicted at every node, and that would end the overlap with the next search. For the same
/// reason it is short: a search begins while the one before it waits for its leaf, if the processor
/// can hold the instructions of both.
///
/// It is assembly, because other threads may write the keys meanwhile: for the language the loads are
/// opaque reads, for the processor they are in order with those around them. A result from a torn view
/// is discarded by the version check.
///
/// # Safety
/// [`has_avx512`](crate::wide::has_avx512), and [`KEYS`] words at `keys` can be read.
#[inline(always)]
pub(super) unsafe fn count_below(keys: *const u64, count: usize, key: u64, or_equal: bool) -> usize {
    let below: usize;
    // The registers are named because the compiler does not allocate these classes in a function
    // without the feature; for the same reason it keeps nothing in them.
    macro_rules! count {
        ($predicate:literal) => {
            // SAFETY: the caller guarantees AVX-512 and KEYS (five times eight) readable words; nothing is written.
            unsafe {
                std::arch::asm!(
                    "vpbroadcastq zmm31, {key}",
                    concat!("vpcmpuq k1, zmm31, [{keys}], ", $predicate),
                    concat!("vpcmpuq k2, zmm31, [{keys} + 64], ", $predicate),
                    concat!("vpcmpuq k3, zmm31, [{keys} + 128], ", $predicate),
                    concat!("vpcmpuq k4, zmm31, [{keys} + 192], ", $predicate),
                    concat!("vpcmpuq k5, zmm31, [{keys} + 256], ", $predicate),
                    "kunpckbw k1, k2, k1",
                    "kunpckbw k3, k4, k3",
                    "kmovw {below:e}, k1",
                    "kmovw {middle:e}, k3",
                    "kmovw {last:e}, k5",
                    "shl {middle:e}, 16",
                    "shl {last}, 32",
                    "or {below:e}, {middle:e}",
                    "or {below}, {last}",
                    "bzhi {below}, {below}, {count}", // words after the last key are no keys
                    "popcnt {below}, {below}",
                    key = in(reg) key,
                    keys = in(reg) keys,
                    count = in(reg) count,
                    below = out(reg) below,
                    middle = out(reg) _,
                    last = out(reg) _,
                    out("xmm31") _,
                    out("k1") _,
                    out("k2") _,
                    out("k3") _,
                    out("k4") _,
                    out("k5") _,
                    options(nostack, readonly),
                )
            }
        };
    }
    if or_equal {
        count!("5"); // wanted >= key in the node
    } else {
        count!("6"); // wanted > key in the node
    }
    below
}

#[cfg(test)]
mod tests {
    use super::KEYS;

    #[test]
    fn counts_as_a_loop_does() {
        if !crate::wide::has_avx512() {
            println!("SKIPPED: this processor has no AVX-512");
            return;
        }
        let keys: Vec<u64> = (0..KEYS as u64).map(|index| index * 3 + u64::MAX / 2).collect();
        // A torn view of a node may give a count above the number of keys.
        for count in (0..KEYS + 24).chain([255]) {
            for key in keys.iter().flat_map(|&key| [key - 1, key, key + 1]).chain([0, u64::MAX]) {
                for or_equal in [false, true] {
                    let expected = keys[..count.min(KEYS)]
                        .iter()
                        .filter(|&&other| other < key || (or_equal && other == key))
                        .count();
                    // SAFETY: `has_avx512` was checked above; `keys` has KEYS words.
                    let counted = unsafe { super::count_below(keys.as_ptr(), count, key, or_equal) };
                    assert_eq!(counted, expected, "{count} keys");
                }
            }
        }
    }
}
