//! How to mount, and how it was done.

use crate::digest::Digest;
use crate::runtime::profile::Profile;
use crate::store::Store;
use std::path::PathBuf;

/// How the metadata is shown; see the module's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountKind {
    /// The best that this kernel and user have.
    #[default]
    Auto,
    /// Self-contained EROFS with `inode_share`.
    Native,
    /// EROFS from the plain file.
    Erofs,
    /// EROFS through a loop device.
    Loop,
    /// A metadata directory.
    Directory,
}

/// How to mount.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which metadata.
    pub kind: MountKind,
    /// Directory for changes (`upper` and `work` are made in it); read-only without.
    pub upper: Option<PathBuf>,
    /// Ignore set-user-id bits.
    pub nosuid: bool,
    /// Refuse device nodes.
    pub nodev: bool,
    /// Refuse to run programs.
    pub noexec: bool,
    /// Do not read ahead what the image's start profile names.
    pub no_prefetch: bool,
    /// A directory that shows the objects by their digests, those too that the store does not have yet.
    pub coming: Option<PathBuf>,
}

impl Options {
    /// The start profile to read ahead, if there is one and it may be.
    pub(crate) fn profile(&self, store: &Store, digest: &Digest) -> Option<Profile> {
        if self.no_prefetch { None } else { Profile::load(store, digest) }
    }
}

/// A mount as it was made.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Mounted {
    /// The kind used.
    pub kind: MountKind,
    /// What is not as in the image, and what the operator should know, one line each.
    pub notes: Vec<String>,
    /// Bytes that the image's start profile had the kernel read ahead.
    pub prefetched_bytes: u64,
}
