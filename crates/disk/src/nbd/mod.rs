//! The NBD front end: the images as network block devices on a Unix socket, for VMMs that prefer a socket to a mount.
//!
//! Fixed newstyle handshake, simple and structured replies, the state of blocks, several concurrent requests per connection,
//! many connections to one image. Written here because no library fits: the `nbd` crate serves one `Read + Write + Seek`
//! object one request at a time, with neither FUA nor flush reaching the disk, and nbdkit's crate would put our cache into
//! another program. `wire` encodes and decodes the protocol of the NBD specification; `handshake` agrees with a client,
//! `server` serves its connection, `answer` performs its requests on an `export`.

mod answer;
mod export;
mod handshake;
mod server;
pub mod wire;

pub use export::Disk;
pub use server::{listen, serve_stream};
