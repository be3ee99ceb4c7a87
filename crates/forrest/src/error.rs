//! Why an operation on a store could not be done.

use std::io;

/// Why an operation on a store could not be done.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The key is longer than [`crate::KEY_BYTES_MAX`].
    KeyTooLong {
        /// Bytes of the key.
        bytes: usize,
    },
    /// The value is longer than [`crate::VALUE_BYTES_MAX`].
    ValueTooLong {
        /// Bytes of the value.
        bytes: usize,
    },
    /// The value is not a number of 8 bytes.
    NotANumber {
        /// Bytes of the value.
        bytes: usize,
    },
    /// The name of a shared store is empty, too long, or holds a slash.
    Name(String),
    /// There is no store of this name.
    NotFound(String),
    /// There is a store of this name already.
    Exists(String),
    /// Other users can write the store's file.
    Untrusted {
        /// The file.
        path: String,
        /// What is wrong with it, and what helps.
        why: String,
    },
    /// The part of the table to which the key's hash leads is full, however much memory there is: either the store has
    /// thousands of millions of entries, or an attacker chose keys of similar hashes, which [`crate::Hash::Keyed`] prevents.
    Crowded {
        /// Entries there.
        entries: u64,
    },
    /// Room was asked for more entries than the store can hold.
    TooMany {
        /// Entries asked for.
        entries: u64,
        /// Entries for which there can be room, short ones and these alone.
        entries_max: u64,
    },
    /// The store was made with other settings than it is opened with.
    Settings(&'static str),
    /// The store does not keep its keys in order.
    NotOrdered,
    /// A shared store was asked to keep its keys in order.
    OrderedShared,
    /// Memory, sharing, or the file under the store.
    Arena(llds::arena::Error),
}

impl Error {
    /// Returns true if the memory limit of the store, or of a part of its table, is reached or would be.
    pub fn is_full(&self) -> bool {
        matches!(self, Error::Crowded { .. } | Error::TooMany { .. } | Error::Arena(llds::arena::Error::Full { .. }))
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::KeyTooLong { bytes } => {
                write!(f, "a key of {bytes} bytes is too long; the limit is {}", crate::KEY_BYTES_MAX)
            }
            Error::ValueTooLong { bytes } => {
                write!(f, "a value of {bytes} bytes is too long; the limit is {}", crate::VALUE_BYTES_MAX)
            }
            Error::NotANumber { bytes } => {
                write!(f, "a value of {bytes} bytes is not a number; numbers have 8 bytes, little-endian")
            }
            Error::Name(name) => {
                write!(f, "'{name}' cannot name a store: use 1 to 200 bytes without '/', not beginning with '.'")
            }
            Error::NotFound(name) => write!(f, "there is no store '{name}'; create it first"),
            Error::Exists(name) => write!(f, "there is a store '{name}' already; open it, or remove it first"),
            Error::Untrusted { path, why } => write!(f, "'{path}' cannot be trusted as a store: {why}"),
            Error::Crowded { entries } => write!(
                f,
                "the part of the table for keys of this hash is full with {entries} entries; if these are not a \
                 4,096th of all, an attacker chose keys of similar hashes: delete them, and make the store with Hash::Keyed"
            ),
            Error::TooMany { entries, entries_max } => write!(
                f,
                "room for {entries} entries was asked for, and the store can hold {entries_max} at most; ask for fewer"
            ),
            Error::Settings(what) => write!(f, "the store was made with another {what}; open it with the same"),
            Error::NotOrdered => write!(f, "the store does not keep its keys in order; make it with Options::ordered"),
            Error::OrderedShared => {
                write!(f, "a shared store cannot keep its keys in order; make a private one, or leave the order out")
            }
            Error::Arena(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Arena(error) => Some(error),
            _ => None,
        }
    }
}

impl From<llds::arena::Error> for Error {
    fn from(error: llds::arena::Error) -> Error {
        Error::Arena(error)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Arena(llds::arena::Error::Io(error))
    }
}
