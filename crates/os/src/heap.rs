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

/// Gives each allocation from 4 MiB up a mapping of its own, from now on and for the whole process. What a request reads or
/// writes is smaller: a mapping for each of those would cost more than it saves.
///
/// The C library does so by itself from 128 KiB up, until the first such allocation is freed: from then on it takes
/// allocations of that size from the heap, for good. A zeroed buffer of the heap is written where the heap was used before,
/// and then has memory for all of its length. Each thread of a FUSE session has such a buffer of 16 MiB, and touches as much
/// of it as the largest request has.
pub fn map_large_allocations() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets two numbers of the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 20);
        // Twice that may stay at the heap's end, which is the C library's own proportion.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 8 << 20);
    }
}

#[cfg(test)]
mod tests {
    use crate::PAGE_SIZE;
    use crate::Range;
    use crate::fd::Fd;
    use crate::pagemap::each_alone;

    #[test]
    fn a_zeroed_buffer_has_memory_where_it_is_touched() {
        const LENGTH: usize = 16 << 20;
        super::map_large_allocations();
        // The heap learns the size, is written, and has the place free again.
        drop(std::hint::black_box(vec![0_u8; LENGTH]));
        drop(std::hint::black_box(vec![1_u8; LENGTH]));
        let buffer = std::hint::black_box(vec![0_u8; LENGTH]);
        let pages = PAGE_SIZE as u64;
        let start = buffer.as_ptr() as u64;
        let inside = Range { start: start.next_multiple_of(pages), end: (start + LENGTH as u64) / pages * pages };
        let pagemap = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).unwrap();
        let mut present = 0;
        each_alone(&pagemap, inside, |_| present += 1).unwrap();
        assert_eq!(present, 0);
    }
}
