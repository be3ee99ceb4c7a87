//! An arena with hostile bytes: shared by the property test and the fuzz target.

use pagefold_os::fd::Fd;
use pagefold_tier::{Config, Effort, LoadError, Tier};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const WORDS_PER_SLAB: u64 = 32 * 1024;
/// Clients that the arena begins with, and their pages.
const PAGES: u64 = 96;

/// A page of five kinds by turns; the number can be told from it.
fn page_of(number: u64) -> [u8; 4096] {
    let mut noise = fastrand::Rng::with_seed(number);
    let mut page = match number % 5 {
        0 => [number as u8; 4096],
        1 => std::array::from_fn(|_| noise.u8(..)),
        _ => std::array::from_fn(|at| b"what a stranger wrote must be checked"[(at * 7 + at / 64) % 37]),
    };
    if !number.is_multiple_of(5) {
        page[..8].copy_from_slice(&number.to_le_bytes());
    }
    page
}

/// Where a write goes: by what its first byte says, so that the few words that matter are met often.
fn target(kind: u8, place: u64, words: u64) -> u64 {
    let place = match kind % 6 {
        0 => place % 80,
        1 => WORDS_PER_SLAB + place % 300,
        // Leaves: the keys, then the lines, of the first slab behind the table.
        2 => 2 * WORDS_PER_SLAB + place % 64,
        3 => 2 * WORDS_PER_SLAB + 3640 + place % 512,
        // Contents: the slabs behind, near their starts.
        4 => (3 + place % 12) * WORDS_PER_SLAB + (place >> 8) % 2048,
        _ => place,
    };
    place % words
}

fn config() -> Config {
    Config { bytes_max: 4 << 20, key: [11, 12], recompress_ticks: 0, workers: 1, ..Config::default() }
}

/// Makes an arena, lets `input` write words into it (ten bytes each: kind, what to do, place or value), adopts it,
/// and uses it. Panics if a load returns bytes that were never stored.
pub fn adopt_written_by(input: &[u8]) {
    let tier = Tier::create(config(), None).unwrap();
    tier.add_client(1, PAGES).unwrap();
    for page in 0..PAGES {
        let effort = if page % 2 == 0 { Effort::Fast } else { Effort::Dense };
        tier.store(1 + (page % 3) as u32, page, &page_of(page), effort).unwrap();
    }
    // SAFETY: the descriptor is open, and the new one is owned by `arena` alone.
    let arena = unsafe { Fd::from_raw(libc::dup(tier.fds().0)) };
    drop(tier);
    let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", arena.raw())).unwrap();
    assert!(file.as_raw_fd() >= 0);
    let words = file.metadata().unwrap().len() / 8;
    for write in input.chunks_exact(10).take(64) {
        let value = u64::from_le_bytes(write[2..].try_into().unwrap());
        let at = target(write[0], value >> 16, words) * 8;
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        let word = u64::from_le_bytes(word);
        let written = match write[1] % 6 {
            0 => value,
            1 => word ^ 1 << (value % 64),
            2 => word.wrapping_add(value % 64).wrapping_sub(32),
            3 => 0,
            4 => u64::MAX,
            // A word from elsewhere: a reference that is valid, but not here.
            _ => {
                let from = target((value >> 8) as u8, value >> 24, words) * 8;
                let mut other = [0; 8];
                file.read_exact_at(&mut other, from).unwrap();
                u64::from_le_bytes(other)
            }
        };
        file.write_all_at(&written.to_le_bytes(), at).unwrap();
    }
    let Ok((tier, adopted)) = Tier::adopt(arena, None, config()) else { return };
    let known: std::collections::HashSet<[u8; 4096]> = (0..PAGES).map(page_of).collect();
    let mut data = [0; 4096];
    let mut seen = 0;
    let ids = tier.client_ids();
    for client in &ids {
        for page in tier.neighbours(*client, 0, 100_000) {
            match tier.load(*client, page, &mut data) {
                // A word may have been made to say "filled": that is a page like any other.
                Ok(()) => {
                    assert!(known.contains(&data) || data.chunks(4).all(|part| part == &data[..4]), "page {page}")
                }
                Err(LoadError::Damaged { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            seen += 1;
        }
    }
    assert_eq!(seen, adopted.pages);
    // It goes on working: what is stored now reads back, and nothing of it hits what was damaged.
    for page in 0..40 {
        if tier.store(5, page, &page_of(page + 1000), Effort::Dense).is_ok() {
            tier.load(5, page, &mut data).unwrap();
            assert!(data == page_of(page + 1000));
        }
    }
    tier.recompress_all();
    tier.compact_now();
    for client in tier.client_ids() {
        tier.remove_client(client);
    }
    assert_eq!(tier.stats().pages, 0);
}
