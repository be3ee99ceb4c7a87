//! What can go wrong, by operation.

use pagefold_os::Errno;
use thiserror::Error;

/// Why an arena could not be made.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The limit is outside of what the format can address.
    #[error("a tier of {bytes} bytes cannot be made: between 4 MiB and 200 GiB")]
    Size {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The kernel refused the memory file or its mapping.
    #[error("memory for the tier: {0}")]
    Memory(#[source] Errno),
}

/// Why a page was not taken. The page stays where it is: less saving, nothing else.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The tier holds all it may, and nothing could be written back.
    #[error("the tier is full: {bytes_held} of {bytes_max} bytes held")]
    Full {
        /// Bytes held now.
        bytes_held: u64,
        /// Bytes it may hold.
        bytes_max: u64,
    },
    /// The kernel gave no memory.
    #[error("no memory for the tier: {0}")]
    NoMemory(#[source] Errno),
    /// Region or page number out of range.
    #[error("region {region}, page {page} cannot be named: regions are 1 to 2^31-1, pages below 2^36")]
    Name {
        /// Region asked for.
        region: u32,
        /// Page asked for.
        page: u64,
    },
}

/// Why a page was not brought back.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The tier does not hold the page.
    #[error("region {region}, page {page}: not in the tier")]
    NotStored {
        /// Region asked for.
        region: u32,
        /// Page asked for.
        page: u64,
    },
    /// The bytes held are not those that were stored: checksum or form is wrong.
    #[error("region {region}, page {page}: its bytes were damaged ({what}); the page is lost")]
    Damaged {
        /// Region asked for.
        region: u32,
        /// Page asked for.
        page: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The backing file could not be read.
    #[error("region {region}, page {page}: reading it back from the file: {source}")]
    ReadBack {
        /// Region asked for.
        region: u32,
        /// Page asked for.
        page: u64,
        /// The cause.
        source: std::io::Error,
    },
}

/// Why an arena was not adopted.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// It is no arena of this format.
    #[error("no arena: {0}")]
    Format(&'static str),
    /// It is one of another version, which can take it over.
    #[error("an arena of another version of pagefold")]
    Version,
    /// Its owner lives: two owners would destroy it.
    #[error("the arena belongs to process {pid}, which is alive: stop it first")]
    OwnerAlive {
        /// The owner.
        pid: u32,
    },
    /// The kernel refused the mapping, or memory for what is derived.
    #[error("memory for the tier: {0}")]
    Memory(#[source] Errno),
}
