//! What to run, and how.

use crate::runtime::mount::Options;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// What to run and how.
#[derive(Clone, Debug, Default)]
pub struct ExecOptions {
    /// Program and arguments; the image's own entry point when empty.
    pub command: Vec<OsString>,
    /// NAME=VALUE, over the image's.
    pub env: Vec<String>,
    /// Host paths to show in the tree: from, to.
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// Start directory in the tree; the image's when empty.
    pub workdir: String,
    /// `USER[:GROUP]` to run as, by names of the tree or numbers; the image's when empty.
    pub user: String,
    /// Changes go to memory and vanish at the end.
    pub scratch: bool,
    /// How to mount; `upper` keeps the changes.
    pub mount: Options,
    /// How long to record what the command opens, as the image's start profile.
    pub learn: Option<Duration>,
}
