//! Image trees whose equal files share page cache.
//!
//! A [`store::Store`] keeps file contents by SHA-256 and trees as small EROFS
//! metadata images. A mount shows a tree with its own names, owners and modes through overlayfs, while the bytes come
//! from the shared objects: equal files are one file to the kernel's page cache, whichever image they belong to.
//!
//! What it does not promise: sharing below whole files (a page of page cache has one inode on every stock kernel),
//! sharing across domains, and a fair memory cgroup charge (the first reader pays).
//!
//! ```no_run
//! use pagefold_image::{build, ingest::Notes, mount, progress::Progress, store::Store};
//! # fn main() -> pagefold_image::Result<()> {
//! let store = Store::open("/var/lib/pagefold/images".as_ref(), "default")?;
//! let (build, mut notes) = (store.build()?, Notes::default());
//! let tree = build::from_directory(&build, "/srv/rootfs".as_ref(), Default::default(), &mut notes, &Progress::silent())?;
//! let record = build.publish("web:1", &tree, "/srv/rootfs", Default::default(), notes.lines())?;
//! drop(build);
//! mount::mount(&store, &record, "/mnt".as_ref(), &mount::Options::default())?;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

pub mod build;
pub mod config;
pub mod digest;
mod error;
mod format;
mod link_farm;
mod maintain;
pub mod progress;
mod remove_tree;
mod runtime;
pub mod store;
mod sys;
pub mod tree;

pub use build::apply_layer as ingest;
pub use error::{Error, Result};
pub use format::decompress::unpack;
pub use format::{erofs, oci, tar};
pub use maintain::{export, gc, scan, stat};
pub use runtime::doctor::{self, doctor};
pub use runtime::{exec, mount, mounts, profile};

use format::decompress as stream;
use link_farm as shelf;
use remove_tree as dirs;
