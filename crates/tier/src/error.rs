//! Errors, by operation.

use pagefold_os::Errno;
use thiserror::Error;

/// Why an arena could not be created.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The format cannot address a limit of this size.
    #[error("a tier of {bytes} bytes cannot be created: the limit is 4 MiB to 200 GiB")]
    Size {
        /// Requested bytes.
        bytes: u64,
    },
    /// The kernel refused the memory file or its mapping.
    #[error("memory for the tier: {0}")]
    Memory(#[source] Errno),
}

/// Why a page was not stored. It stays in the client's memory: less is saved, nothing is lost.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The tier is at its limit, and nothing could be written back.
    #[error("the tier is full: {bytes_held} of {bytes_max} bytes held")]
    Full {
        /// Bytes held now.
        bytes_held: u64,
        /// Most bytes it may hold.
        bytes_max: u64,
    },
    /// The kernel refused memory.
    #[error("no memory for the tier: {0}")]
    NoMemory(#[source] Errno),
    /// Client or page number out of range.
    #[error("client {client}, page {page} is out of range: clients are 1 to 2^31-1, pages below 2^36")]
    Name {
        /// Requested client.
        client: u32,
        /// Requested page.
        page: u64,
    },
}

/// Why a page was not loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The tier does not hold the page.
    #[error("client {client}, page {page}: not in the tier")]
    NotStored {
        /// Requested client.
        client: u32,
        /// Requested page.
        page: u64,
    },
    /// The held bytes are not the stored ones: the fingerprint or the encoding is wrong.
    #[error("client {client}, page {page}: its bytes were damaged ({what}); the page is lost")]
    Damaged {
        /// Requested client.
        client: u32,
        /// Requested page.
        page: u64,
        /// Which check failed.
        what: &'static str,
    },
    /// The backing file could not be read.
    #[error("client {client}, page {page}: reading it back from the file: {source}")]
    ReadBack {
        /// Requested client.
        client: u32,
        /// Requested page.
        page: u64,
        /// The cause.
        source: std::io::Error,
    },
}

/// Why an arena was not adopted.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// It is not an arena of this format.
    #[error("not an arena: {0}")]
    Format(&'static str),
    /// It is an arena of another version, which can adopt it.
    #[error("an arena of another version of pagefold")]
    Version,
    /// Its owner is alive: two owners would destroy it.
    #[error("the arena belongs to process {pid}, which is alive: stop it first")]
    OwnerAlive {
        /// The owner.
        pid: u32,
    },
    /// The kernel refused the mapping, or memory for the indexes.
    #[error("memory for the tier: {0}")]
    Memory(#[source] Errno),
}
