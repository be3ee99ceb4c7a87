//! How an image wants to be run.

use serde::{Deserialize, Serialize};

/// How an image wants to be run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Environment, NAME=VALUE.
    #[serde(default)]
    pub env: Vec<String>,
    /// Entry point, before the command.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Command.
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Directory to start in.
    #[serde(default)]
    pub working_dir: String,
    /// User to run as, as the image names it.
    #[serde(default)]
    pub user: String,
    /// What its programs run on, such as linux/amd64; empty if it does not say.
    #[serde(default)]
    pub platform: String,
}

impl RunConfig {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
