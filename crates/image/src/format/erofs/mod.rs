//! EROFS images: the metadata image that overlayfs mounts over the objects, and the self-contained one.
//!
//! Only the small part of the format that a read-only tree needs is written:
//! extended inodes, inline and block data, one null chunk per file. The fields
//! and their order are those of the kernel's `fs/erofs/erofs_fs.h`.

mod inodes;
mod on_disk;
mod plan;
mod reader;
mod superblock;
mod writer;
mod xattrs;

pub use on_disk::BLOCK;
pub use plan::Layout;
pub(crate) use plan::check_size;
pub use reader::{Limits, read};
pub use writer::{Image, write};
pub(crate) use xattrs::xattr_fits;
