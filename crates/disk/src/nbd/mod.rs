//! The NBD front end: the images as network block devices on a Unix socket, for VMMs that prefer a socket to a mount.
//!
//! Fixed newstyle handshake, simple replies, several concurrent requests per connection, many connections to one image.
//! Written here because no library fits: the `nbd` crate serves one `Read + Write + Seek` object one request at a
//! time, with neither FUA nor flush reaching the disk, and nbdkit's crate would put our cache into another program.
//! `wire` encodes and decodes the protocol of the NBD specification, `server` serves connections.

mod server;
pub mod wire;

pub use server::{Disk, listen, serve_stream};
