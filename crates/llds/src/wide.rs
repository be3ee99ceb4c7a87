//! Whether the processor compares eight words at once.

use std::sync::atomic::{AtomicU8, Ordering};

/// Tells whether the processor has AVX-512F; asks it once.
#[inline(always)]
pub(crate) fn has_avx512() -> bool {
    /// 0: not asked, 1: no, 2: yes.
    static ANSWER: AtomicU8 = AtomicU8::new(0);
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            let has = std::arch::is_x86_feature_detected!("avx512f");
            ANSWER.store(1 + u8::from(has), Ordering::Relaxed);
            has
        }
        answer => answer == 2,
    }
}
