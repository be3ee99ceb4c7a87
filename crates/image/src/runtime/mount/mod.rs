//! Mounts: the metadata image under overlayfs, with the objects as its data-only layer.
//!
//! Two files of equal content, in whatever images, lead overlayfs to one object, and the page cache belongs to the
//! object: the kernel does the sharing. What mounts where:
//!
//! | kind | metadata | needs |
//! |---|---|---|
//! | `erofs` | EROFS image, mounted from the plain file | root, Linux 6.12 |
//! | `loop` | the same through a loop device | root, Linux 6.8 |
//! | `directory` | a directory of empty files with overlay attributes | root on 6.8; a user namespace on 6.16 |
//! | `native` | self-contained EROFS with `inode_share` | root, Linux 7.0 with EROFS_FS_PAGE_CACHE_SHARE |
//!
//! A mount names its store, domain and image in the mount table, so that the table alone says what is mounted: there
//! is no separate record that could go stale. While a mount is set up, its image is leased.

mod choose;
mod directory;
mod erofs;
mod kernel;
pub mod layers;
mod native;
mod options;
mod request;
mod umount;
mod upper;

pub(crate) use choose::mount_detached;
pub use choose::{mount, mount_tree};
pub(crate) use directory::{NO_DEV_NODES, difference};
pub(crate) use kernel::{attach, erofs_mount, in_initial_namespace, overlay_mount};
pub(crate) use native::{SHARED_OPTION, mount_shows_option};
pub use options::{MountKind, Mounted, Options};
pub use umount::umount;
