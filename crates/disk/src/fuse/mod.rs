//! The FUSE front end: the directory's files under their own names, read and written through the cache.
//!
//! Files are opened for direct I/O, so the kernel keeps no copy of the data; names and attributes are the host's. An open
//! file is found by its inode even if its name is gone. The kernel itself keeps file locks, per mount.
//!
//! Each module uses only later ones: `session` mounts and chooses the transport; `classic` and `ring` are the transports,
//! which decode requests and encode answers; `names` changes the directory, `data` the images, `attributes` corrects the
//! host's attributes, `file_system` holds the state, `nodes` the files that the kernel knows.

mod attributes;
mod classic;
mod data;
mod file_system;
mod names;
mod nodes;
pub(crate) mod ring;
mod session;

pub use file_system::DiskFs;
pub use session::{ENABLE, Session, StartError, Transport};
