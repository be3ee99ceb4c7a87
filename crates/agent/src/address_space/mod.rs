//! The process's mappings: where they are, which are managed, and what became of them.

pub(crate) mod anonymous;
pub(crate) mod discarded_ranges;
pub(crate) mod glibc_arenas;
pub(crate) mod heap;
pub(crate) mod list_clock;
pub(crate) mod maps;
pub(crate) mod prefault;
pub(crate) mod regions;
pub(crate) mod rss_watch;
pub(crate) mod smaps;
pub(crate) mod vm_flags;
