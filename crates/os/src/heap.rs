//! The C library's heap.

/// Gives the kernel the heap's pages that no allocation is in. What is freed stays with the heap otherwise, for each thread
/// that allocated.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it reads no memory of ours.
    unsafe {
        libc::malloc_trim(0);
    }
}
