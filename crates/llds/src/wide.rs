//! Whether the processor compares eight words at once, and counts the bits that come of it.

use std::sync::atomic::{AtomicU8, Ordering};

/// Tells whether the processor has AVX-512F, and BMI2 and POPCNT, as all have that have the first; asks it once.
#[inline(always)]
pub(crate) fn has_avx512() -> bool {
    /// 0: not asked, 1: no, 2: yes.
    static ANSWER: AtomicU8 = AtomicU8::new(0);
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            let has = std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("bmi2")
                && std::arch::is_x86_feature_detected!("popcnt");
            ANSWER.store(1 + u8::from(has), Ordering::Relaxed);
            has
        }
        answer => answer == 2,
    }
}
