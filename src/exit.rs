//! Exit statuses of commands that become another program, as env(1), nohup(1) and others have them.

use std::io;
use std::process::{ExitCode, ExitStatus};

/// pagefold itself failed, or was used wrongly.
pub const FAILED: u8 = 125;
/// The program cannot be run.
pub const CANNOT_RUN: u8 = 126;
/// The program is not found.
pub const NOT_FOUND: u8 = 127;

/// The status for an exec(2) that failed with `error`.
pub fn of_exec(error: &io::Error) -> u8 {
    if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN }
}

/// The status of a program that failed, as the status of this one; 1 if a signal ended it.
pub fn of_child(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
