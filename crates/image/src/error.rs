//! Errors of the image crate: the text is one line and names the cause and the cure.

use std::io;
use std::path::{Path, PathBuf};

/// Why an image command could not do its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was being read or written.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The file system of the store has no room; nothing of the unfinished build was published.
    #[error("{}: no space left on the store's file system; free some, or run `pagefold image gc`", path.display())]
    Full {
        /// The file that did not fit.
        path: PathBuf,
    },
    /// The input (tar, OCI layout, image file) breaks its format or one of our limits.
    #[error("{0}")]
    Input(String),
    /// The input is something else: no archive, or no image.
    #[error("{0}")]
    Foreign(String),
    /// The bytes do not have the digest that names them.
    #[error("{what}: digest is {found}, expected {expected}; fetch it again")]
    Digest {
        /// What was read.
        what: String,
        /// The digest it should have had.
        expected: String,
        /// The digest of what was read.
        found: String,
    },
    /// No image of that name.
    #[error("no image {name:?} in domain {domain:?} of {}; see `pagefold image ls`", store.display())]
    NoImage {
        /// The name asked for.
        name: String,
        /// The domain looked in.
        domain: String,
        /// The store looked in.
        store: PathBuf,
    },
    /// The store was written by a later version of this program.
    #[error("{}: store format {found}, this program reads up to {known}; use a newer pagefold", path.display())]
    Newer {
        /// The store.
        path: PathBuf,
        /// Its format number.
        found: u64,
        /// The newest format we read.
        known: u64,
    },
    /// Something in the store is damaged.
    #[error("{0}")]
    Damaged(String),
    /// The kernel refused a mount.
    #[error("mount: {what}: {source}; `pagefold doctor` says which mounts this kernel and user have")]
    Mount {
        /// The step that failed.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A command could not be started in an image.
    #[error("exec: {program}: {source} (in image {image})")]
    Exec {
        /// The command.
        program: String,
        /// The image.
        image: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The request cannot be done as asked.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// Input that breaks the format from the start is of another kind.
    pub(crate) fn foreign(self) -> Self {
        match self {
            Error::Input(what) => Error::Foreign(what),
            other => other,
        }
    }

    /// Gives an error on output, which has no path where it is written, the path that the operator knows.
    pub fn of_output(self, name: impl Into<PathBuf>) -> Self {
        match self {
            Error::Io { path, source } if path == Path::new(OUTPUT) => Error::Io { path: name.into(), source },
            other => other,
        }
    }

    /// Returns true if nothing more can be written to the store: its disk is full, or its file system is read-only.
    pub fn is_full_or_read_only(&self) -> bool {
        let is_read_only = |source: &io::Error| source.raw_os_error() == Some(libc::EROFS);
        matches!(self, Error::Full { .. }) || matches!(self, Error::Io { source, .. } if is_read_only(source))
    }

    /// A full disk, where the path is in the store.
    pub(crate) fn in_store(self) -> Self {
        match self {
            Error::Io { path, source } if matches!(source.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {
                Error::Full { path }
            }
            other => other,
        }
    }
}

/// The path of output in errors, before [`Error::of_output`].
pub(crate) const OUTPUT: &str = "output";

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Gives a system error the path it happened on.
pub(crate) trait At<T> {
    /// Names `path` in the error; a full disk becomes [`Error::Full`].
    fn at(self, path: impl AsRef<Path>) -> Result<T>;

    /// The same for files outside of the store: their full disk is not the store's.
    fn at_output(self, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.at_output(path).map_err(Error::in_store)
    }

    fn at_output(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| Error::Io { path: path.as_ref().to_path_buf(), source: error.into() })
    }
}

/// An [`Error::Input`] from format arguments.
macro_rules! input {
    ($($arg:tt)*) => { $crate::error::Error::Input(format!($($arg)*)) };
}
pub(crate) use input;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_store_that_is_full_is_told_to_collect() {
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            let full = || io::Result::<()>::Err(io::Error::from_raw_os_error(errno));
            assert!(matches!(full().at("s").unwrap_err(), Error::Full { .. }));
            let outside = full().at_output("out").unwrap_err();
            assert!(outside.to_string().starts_with("out: ") && !outside.to_string().contains("gc"), "{outside}");
            assert!(matches!(outside.in_store(), Error::Full { .. }));
        }
    }
}
