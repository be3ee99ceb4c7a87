//! Why a program is not entered.

use std::io;

/// Why a program was not entered. It goes on as if nothing had been.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// There is no such process.
    #[error("there is no such process")]
    Gone,
    /// It cannot be entered, and why.
    #[error("{0}")]
    Refused(String),
    /// A thread of it can be borrowed, but no agent can live in it, and why.
    #[error("{0}")]
    NoAgent(String),
    /// No thread of it could be borrowed.
    #[error("no thread of it could be borrowed: {0}")]
    Busy(String),
    /// The kernel refused a step.
    #[error("{step}: {error}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The kernel's reason.
        error: io::Error,
    },
}

pub(crate) fn step(step: &'static str) -> impl Fn(io::Error) -> EntryError {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH) => EntryError::Gone,
        _ => EntryError::System { step, error },
    }
}
