//! Why a request fails, in the classes that containerd acts on.

use std::path::Path;

/// Why a request fails.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such snapshot.
    #[error("snapshot {0:?} does not exist")]
    NotFound(String),
    /// There is one already.
    #[error("snapshot {0:?} exists already")]
    Exists(String),
    /// The snapshot's state does not allow it.
    #[error("{0}")]
    Precondition(String),
    /// The request makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The store failed.
    #[error(transparent)]
    Image(#[from] pagefold_image::Error),
    /// The system failed.
    #[error("{what}: {source}")]
    System {
        /// A path, or a step.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Gives a system error the path it happened on.
pub(crate) trait At<T> {
    /// Names `path` in the error.
    fn at(self, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| Error::System { what: path.as_ref().display().to_string(), source: error.into() })
    }
}
