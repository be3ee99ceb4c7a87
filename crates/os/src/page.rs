//! What a page holds.

use crate::{PAGE_SIZE, Page};

const LINE: usize = 64;

/// True if every byte is zero. Ends at the first line that is not.
pub fn is_zero(page: &Page) -> bool {
    // SAFETY: a page is 512 words, and any bytes are valid words; unaligned reads are asked for.
    let lines = page.as_ptr().cast::<[u64; LINE / 8]>();
    (0..PAGE_SIZE / LINE).all(|line| {
        // SAFETY: `line` stays inside the page.
        let words = unsafe { core::ptr::read_unaligned(lines.add(line)) };
        words.iter().fold(0, |all, word| all | word) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_found_wherever_a_bit_is_set() {
        let mut page = [0u8; PAGE_SIZE];
        assert!(is_zero(&page));
        for at in 0..PAGE_SIZE {
            for bit in [1, 0x80] {
                page[at] = bit;
                assert!(!is_zero(&page), "byte {at}");
            }
            page[at] = 0;
        }
    }
}
