//! A simulated machine: processes with memory to merge, without a kernel.
//!
//! It is the second implementer of [`Client`](crate::Client), and an example of that seam. A [`Process`] is what a program
//! sees of its memory: it writes, reads, discards, unmaps, maps, moves, forks, exits. Its [`SimClient`] is what
//! the agent and the kernel do with the same memory: freeze, compare, map, heal, report. Between any two of their
//! steps other threads of the program act, drawn from a seed, so a run replays exactly.
//!
//! The model keeps two books per page. One is mechanism: private page or pool slot, write-protected or not,
//! exclusive or shared by fork, pinned, in swap, part of a huge page. The other, the *truth*, is what the
//! program wrote last, kept by nothing but its own writes. The oracle is that both agree at every read
//! ([`Machine::failure`]).
//!
//! ```
//! use pagefold_merge::sim::{Machine, Options};
//! use pagefold_merge::{Config, Domain};
//! use pagefold_pool::Key;
//!
//! let machine = Machine::new(1, Options { interference: 0, ..Options::default() });
//! let domain = Domain::with_key(Config::default(), Key::from_seed(1))?;
//! let twins: Vec<_> = (0..2)
//!     .map(|_| {
//!         let process = machine.spawn();
//!         let memory = process.map(8);
//!         (0..8).for_each(|page| process.write(memory.start + page * 4096, 7));
//!         domain.add(Box::new(process.client()));
//!         process
//!     })
//!     .collect();
//! for period in 0..6 {
//!     let now_ns = period * domain.config().period_ns;
//!     while domain.step_any(now_ns, None, &mut Vec::new()).is_some() {}
//! }
//! assert_eq!(domain.stats().pages_sharing, 16);
//! twins.iter().for_each(|process| process.check());
//! assert_eq!(machine.failure(), None);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! What it does not model: other processors' caches and page-table races inside the kernel (those are the
//! kernel's), and raw `fork` or `mmap(MAP_FIXED)` calls that pass by the agent while pages are frozen (see
//! `docs/design/merge.md`, "Known limits").

mod client;
mod memory;
mod run;

pub use client::{Hostile, SimClient};
pub use memory::{Machine, Options, Process};
pub use run::{Failure, Plan, Summary, run};

use pagefold_os::{PAGE_SIZE, Page};

/// A page's content: 0 is the zero page, every other number a page of its own.
pub type Content = u32;

const MARK: u64 = 0x9E37_79B9_7F4A_7C15;

/// The bytes of a content. Contents `2n` and `2n + 1` differ in their last byte only.
pub fn page_of(content: Content) -> Page {
    let mut page = [0; PAGE_SIZE];
    if content != 0 {
        let word = (u64::from(content >> 1) + 1).wrapping_mul(MARK).to_le_bytes();
        page.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word));
        page[..4].copy_from_slice(&(content >> 1).to_le_bytes());
        page[PAGE_SIZE - 1] = 1 + (content & 1) as u8;
    }
    page
}

/// The content of some bytes; `None` if they are no whole content, a torn copy for instance.
pub fn content_of(page: &Page) -> Option<Content> {
    let half = u32::from_le_bytes([page[0], page[1], page[2], page[3]]);
    [half << 1, half << 1 | 1, 0].into_iter().find(|content| page_of(*content) == *page)
}

/// Random numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Begins the sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(MARK);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 if `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { self.number() % limit }
    }

    /// True `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_and_pages_are_one_to_one() {
        for content in (0..200).chain([1 << 20, u32::MAX - 1, u32::MAX]) {
            assert_eq!(content_of(&page_of(content)), Some(content));
        }
        let mut torn = page_of(8);
        torn[2048..].copy_from_slice(&page_of(20)[2048..]);
        assert_eq!(content_of(&torn), None);
    }
}
