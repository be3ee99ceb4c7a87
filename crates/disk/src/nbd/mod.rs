//! The NBD front end: the images as network block devices on a Unix socket, for VMMs that prefer a socket to a mount.
//!
//! Fixed newstyle handshake, simple replies, several requests of a connection at once, many connections to one image.
//! Written here because no library fits: the `nbd` crate serves one `Read + Write + Seek` object one request at a
//! time, with neither FUA nor flush reaching the disk, and nbdkit's crate would put our cache into another program.
//! The protocol is the specification's; `wire` reads and makes its bytes, `server` talks.

mod server;
pub mod wire;

pub use server::{Disk, converse, listen};
