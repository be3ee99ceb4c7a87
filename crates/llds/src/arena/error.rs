//! Errors: why an arena could not be made or opened, or a block not be allocated.
//!
//! Each error holds the values found and expected, and its text says what to do.

use super::THREADS_MAX;
use std::io;

/// Why an arena could not be made or opened, or a block not be allocated.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The address space (or the explicit huge pages) could not be reserved.
    Reserve {
        /// Bytes asked for.
        bytes: u64,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The arena's capacity is used up.
    Full {
        /// The capacity.
        limit_bytes: u64,
    },
    /// The system has no memory left for the file, e.g. the tmpfs is full.
    NoMemory {
        /// The kernel's reason.
        source: io::Error,
    },
    /// All thread records are taken by living threads.
    TooManyThreads,
    /// The handle was made before this process was forked.
    Forked,
    /// The file is not an arena, or of another kind.
    Foreign,
    /// The file was written by another version of the code.
    Version {
        /// The file's version.
        found: u32,
        /// The version this code writes.
        expected: u32,
    },
    /// The file was written on another kind of machine.
    Architecture {
        /// The file's mark.
        found: u32,
        /// The mark of this machine.
        expected: u32,
    },
    /// The file is shorter than its header says.
    Truncated {
        /// Bytes it has.
        found: u64,
        /// Bytes it must have.
        expected: u64,
    },
    /// The header's checksum or geometry does not fit.
    Damaged(&'static str),
    /// Processes of another pid or time namespace use the file, so deaths could not be noticed.
    Namespace,
    /// The file system's own error.
    Io(io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Reserve { bytes, source } => write!(
                f,
                "cannot reserve {bytes} bytes of address space: {source}; choose a smaller capacity, or raise ulimit -v"
            ),
            Error::Full { limit_bytes } => {
                write!(
                    f,
                    "the store is full: its limit of {limit_bytes} bytes is in use, and no free block is as large as this \
                     entry, also of what threads that are idle or have died held; delete entries of this size or larger, \
                     or make the store with a larger limit"
                )
            }
            Error::NoMemory { source } => write!(f, "the system has no memory left for the store: {source}"),
            Error::TooManyThreads => write!(f, "{THREADS_MAX} threads use the store already; end some, or share them"),
            Error::Forked => write!(f, "the store was opened before fork; open it again in the child"),
            Error::Foreign => write!(f, "the file is not a store of this kind; choose another name"),
            Error::Version { found, expected } => write!(
                f,
                "the file has layout version {found}, this code has {expected}; use the matching version, or remove it"
            ),
            Error::Architecture { found, expected } => write!(
                f,
                "the file was written on another kind of machine (mark {found:#x}, here {expected:#x}); remove it"
            ),
            Error::Truncated { found, expected } => {
                write!(f, "the file is truncated: {found} bytes instead of {expected}; remove it")
            }
            Error::Damaged(what) => write!(f, "the file is damaged: {what}; remove it"),
            Error::Namespace => write!(
                f,
                "processes of another pid or time namespace use the store; share theirs (e.g. --pid=host) to use it too"
            ),
            Error::Io(source) => write!(f, "{source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Reserve { source, .. } | Error::NoMemory { source } | Error::Io(source) => Some(source),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Io(error)
    }
}
