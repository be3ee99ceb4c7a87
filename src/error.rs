//! The error of a command.

/// Why a command cannot do its work: one line for the user that names the cause and the cure.
pub type Error = Box<dyn std::error::Error>;
