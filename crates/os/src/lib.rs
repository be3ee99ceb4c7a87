//! Linux calls that pagefold needs, typed.
//!
//! Every call is made directly (module [`raw`]), not through the C library:
//! the same code runs inside a client, on a thread that has no thread-local
//! storage and therefore no `errno`, and in the daemon. The crates of the
//! field have no `PAGEMAP_SCAN`, `UFFDIO_MOVE` or asynchronous write
//! protection; those are what this floor adds.
//!
//! Without the feature `std` the crate neither allocates nor panics.

#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(not(target_os = "linux"))]
compile_error!("pagefold is made of Linux mechanisms; there is nothing to build on other systems");

pub mod fd;
pub mod maps;
pub mod mem;
pub mod memfd;
pub mod page;
pub mod pagemap;
pub mod raw;
pub mod sched;
pub mod signal;
pub mod sock;
pub mod stat;
pub mod uffd;
pub mod user;
pub mod wait;

#[cfg(feature = "std")]
pub mod cpu_latency;
#[cfg(feature = "std")]
pub mod exec_events;
#[cfg(feature = "std")]
pub mod file_watch;
#[cfg(feature = "std")]
pub mod filesystem;
#[cfg(feature = "std")]
pub mod fill;
#[cfg(feature = "std")]
pub mod heap;
#[cfg(feature = "std")]
pub mod ksm;
#[cfg(feature = "std")]
pub mod mountinfo;
#[cfg(feature = "std")]
pub mod patience;
#[cfg(feature = "std")]
pub mod private_dir;
#[cfg(feature = "std")]
pub mod probe;
#[cfg(feature = "std")]
pub mod procfs;
#[cfg(feature = "std")]
pub mod random;
#[cfg(feature = "std")]
pub mod ranges;
#[cfg(feature = "std")]
pub mod read_once;
#[cfg(feature = "std")]
pub mod sanitize;
#[cfg(feature = "std")]
pub mod smaps;
#[cfg(feature = "std")]
pub mod sync;

pub use raw::Errno;

/// Bytes in a page: pagefold shares memory in units of this size.
pub const PAGE_SIZE: usize = 4096;

/// The end of the addresses that a program may have on any machine: x86-64 with five levels of page tables has the most.
pub const ADDRESS_MAX: u64 = 1 << 56;

/// The end of the addresses that the kernel gives a program which does not ask for higher ones.
pub const ADDRESS_END: u64 = if cfg!(target_arch = "x86_64") { 1 << 47 } else { 1 << 48 };

/// A page's content.
pub type Page = [u8; PAGE_SIZE];

/// A half-open range of addresses in some process, in bytes, page aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address after the range.
    pub end: u64,
}

impl Range {
    /// Makes the range of `pages` pages from `start`.
    pub const fn pages_from(start: u64, pages: u64) -> Range {
        Range { start, end: start + pages * PAGE_SIZE as u64 }
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// True if the range holds nothing.
    pub const fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Length in pages.
    pub const fn pages(&self) -> u64 {
        self.len() / PAGE_SIZE as u64
    }

    /// True if the two ranges have an address in common.
    pub const fn overlaps(&self, other: &Range) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// What the two ranges have in common; empty if that is nothing.
    pub fn intersection(&self, other: &Range) -> Range {
        let start = self.start.max(other.start);
        Range { start, end: self.end.min(other.end).max(start) }
    }

    /// True if `other` lies inside this range.
    pub const fn contains(&self, other: &Range) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}
