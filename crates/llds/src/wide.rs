//! Detects whether the processor compares eight words in one instruction and counts the resulting bits.

use std::sync::atomic::{AtomicU8, Ordering};

/// Returns true if the processor has AVX-512F, BMI2 and POPCNT. The answer is cached.
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
