//! Image trees: equal files of all of them share page cache.
//!
//! A [`store::Store`] keeps file contents by SHA-256 and trees as small EROFS
//! metadata images. A mount shows a tree with its own names, owners and modes through overlayfs, while the bytes come
//! from the shared objects: equal files are one file to the kernel's page cache, whichever image they belong to.
//!
//! The layers, each of which uses only those before it: files without a store (`tree`, `digest`, `layout`, `format`), the
//! `store`, the `link_farm` of an image, builds (`build`), mounts and programs (`runtime`), and upkeep (`maintain`).
//!
//! What it does not promise: sharing below whole files (a page of page cache has one inode on every stock kernel),
//! sharing across domains, and a fair memory cgroup charge (the first reader pays).
//!
//! ```no_run
//! use pagefold_image::{build, build::Omissions, mount, progress::Progress, store::Store};
//! # fn main() -> pagefold_image::Result<()> {
//! let store = Store::open("/var/lib/pagefold/images".as_ref(), "default")?;
//! let (build, mut omissions) = (store.build()?, Omissions::default());
//! let tree = build::from_directory(&build, "/srv/rootfs".as_ref(), Default::default(), &mut omissions, &Progress::silent())?;
//! let record = build.publish("web:1", &tree, "/srv/rootfs", Default::default(), omissions.lines())?;
//! drop(build);
//! mount::mount(&store, &record, "/mnt".as_ref(), &mount::Options::default())?;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod buffer;
pub mod build;
pub mod config;
pub mod digest;
mod error;
mod format;
mod in_use;
mod layout;
mod link_farm;
mod maintain;
mod parallel;
mod proc_fd;
pub mod progress;
mod random_id;
mod remove_tree;
mod run_config;
mod runtime;
pub mod store;
mod sys;
pub mod tree;

pub use error::{Error, Result};
pub use format::decompress::unpack;
pub use format::{erofs, fleet, tar};
pub use maintain::{export, gc, scan};
pub use runtime::doctor::{self, doctor};
pub use runtime::{exec, mount, mounts, profile};

/// OCI layouts and what container engines write.
pub mod oci {
    pub use crate::build::{LayerImport, Parts, Source, import};
    pub use crate::format::chunked::{Content, Part, Plan, TableLocation, TableOfContents};
    pub use crate::format::oci::{Documents, Layer, Next, Platform, Wanted, is_image, parse_document};
}

/// What images cost, and the proof that they are whole.
pub mod stat {
    pub use crate::maintain::any::*;
    pub use crate::maintain::stat::*;
    pub use crate::maintain::verify::*;
}
