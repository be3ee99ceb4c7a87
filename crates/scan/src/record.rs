//! What stays of a page: its fingerprint and four bits, in one word.
//!
//! 60 bits of a keyed hash: among 2^30 pages (4 TiB) the expected number of
//! pairs that only look equal is one half. A dry run may say so; a merge may
//! not, and compares bytes.

use pagefold_os::Page;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What a page is to a merge. Stored in the low bits of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum PageKind {
    /// Not shared with another process, and mergeable by pagefold.
    Own = 0,
    /// The process's own, but only the kernel's KSM could merge it.
    KernelOnly = 1,
    /// Already shared with another process, by fork or by KSM.
    Shared = 2,
    /// In pagefold's pool: a content that a merge need not store again.
    Pool = 3,
}

const KIND: u64 = 0b0011;
/// The page before it, in the same mapping, has the record before it.
const FOLLOWS: u64 = 0b0100;
/// The page is part of a huge page.
const HUGE: u64 = 0b1000;
const FLAGS: u64 = 0b1111;

/// One page. Two records have equal [`PageRecord::print`]s if their pages are equal and in one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRecord(u64);

impl PageRecord {
    pub(crate) fn new(print: u64, kind: PageKind, huge: bool) -> PageRecord {
        PageRecord((print & !FLAGS) | kind as u64 | if huge { HUGE } else { 0 })
    }

    pub(crate) const fn print(self) -> u64 {
        self.0 & !FLAGS
    }

    pub(crate) const fn kind(self) -> PageKind {
        match self.0 & KIND {
            0 => PageKind::Own,
            1 => PageKind::KernelOnly,
            2 => PageKind::Shared,
            _ => PageKind::Pool,
        }
    }

    pub(crate) const fn huge(self) -> bool {
        self.0 & HUGE != 0
    }

    pub(crate) const fn follows(self) -> bool {
        self.0 & FOLLOWS != 0
    }

    pub(crate) const fn set_follows(&mut self) {
        self.0 |= FOLLOWS;
    }
}

/// Hashes pages of one domain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Printer {
    key: u64,
    /// Prints up to this one are remembered.
    limit: u64,
}

impl Printer {
    /// The key of the domain's prints.
    pub(crate) const fn key(self) -> u64 {
        self.key
    }

    /// True if it keeps every content.
    pub(crate) const fn keeps_all(self) -> bool {
        self.limit == u64::MAX
    }

    /// A printer for `domain` that keeps one content in `one_in`.
    pub(crate) fn new(seed: u64, domain: u64, one_in: u32) -> Printer {
        // Domains that differ in one bit get keys that differ in half of them.
        let key = xxh3_64_with_seed(&domain.to_le_bytes(), seed);
        Printer { key, limit: u64::MAX / u64::from(one_in.max(1)) }
    }

    /// The page's fingerprint, or `None` if this content is not in the sample.
    pub(crate) fn print(self, page: &Page) -> Option<u64> {
        let print = xxh3_64_with_seed(page, self.key);
        (print <= self.limit).then_some(print)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_print_do_not_touch() {
        for kind in [PageKind::Own, PageKind::KernelOnly, PageKind::Shared, PageKind::Pool] {
            for huge in [false, true] {
                let mut record = PageRecord::new(u64::MAX, kind, huge);
                assert_eq!((record.kind(), record.huge(), record.follows()), (kind, huge, false));
                record.set_follows();
                assert_eq!((record.kind(), record.huge(), record.follows()), (kind, huge, true));
                assert_eq!(record.print(), u64::MAX - 15);
            }
        }
    }

    #[test]
    fn domains_do_not_meet() {
        let page = [7; 4096];
        let print = |domain| Printer::new(1, domain, 1).print(&page);
        assert_eq!(print(0), print(0));
        assert_ne!(print(0), print(1));
        assert_ne!(Printer::new(2, 0, 1).print(&page), print(0), "the key is secret");
    }

    #[test]
    fn a_sample_keeps_its_share() {
        let printer = Printer::new(3, 0, 16);
        let kept = (0..4096u32).filter(|n| {
            let mut page = [0; 4096];
            page[..4].copy_from_slice(&n.to_le_bytes());
            printer.print(&page).is_some()
        });
        let kept = kept.count();
        assert!((170..350).contains(&kept), "{kept} of 4096 for a share of 1/16");
    }
}
