//! Pages and descriptors for the tests.

#![allow(dead_code)]

use pagefold_os::fd::Fd;
use std::collections::HashMap;

/// The model: (client, page) to content number.
pub type Pages = HashMap<(u32, u64), u16>;

/// The page of content `number`: filled by a word, text, noise, and near copies of text, by turns.
pub fn page_of(number: u16) -> [u8; 4096] {
    let mut random = fastrand::Rng::with_seed(u64::from(number));
    match number % 8 {
        0 => {
            let word: u64 =
                if number.is_multiple_of(16) { u64::from(number) << 32 | u64::from(number) } else { u64::from(number) };
            std::array::from_fn(|at| word.to_le_bytes()[at % 8])
        }
        1 => std::array::from_fn(|_| random.u8(..)),
        2..=4 => text(number),
        // A near copy of a neighbour: a few bytes differ.
        _ => {
            let mut page = text(number / 8 * 8 + 2);
            for _ in 0..number % 8 {
                page[random.usize(..4096)] ^= number as u8 | 1;
            }
            page[..2].copy_from_slice(&number.to_le_bytes());
            page
        }
    }
}

fn text(number: u16) -> [u8; 4096] {
    let (mut random, mut word) = (fastrand::Rng::with_seed(u64::from(number)), 0);
    std::array::from_fn(|at| {
        if at % 12 == 0 {
            word = random.usize(..29);
        }
        b"a cold page waits for the hand that touches it"[word + at % 12]
    })
}

/// Another descriptor of the same file.
pub fn dup(fd: i32) -> Fd {
    // SAFETY: the caller's descriptor is open; the new one is owned by the result alone.
    unsafe { Fd::from_raw(libc::dup(fd)) }
}
