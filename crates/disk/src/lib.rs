//! VM disk images through one deduplicated cache.
//!
//! Many disk images are full of equal blocks, and the kernel caches each image by itself. This crate serves the images
//! of a directory through its own cache, in which equal blocks are in memory once, whichever image they are in.
//!
//! From the outside in: the front ends (`fuse`, `nbd`) use the [`engine`], which opens images and owns the
//! background threads; the [`cache`] keeps blocks and their states; below it lie the page frames, the content index
//! and the image files ([`mod@file`]). `docs/design/disk.md` describes the whole design.

pub mod cache;
pub mod config;
mod content_index;
pub mod control;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod file;
mod fingerprint;
pub mod fingerprint_file;
mod frame_table;
mod frames;
pub mod fuse;
mod geometry;
mod handle;
mod housekeeping;
pub mod image;
pub mod metrics;
pub mod mount;
pub mod nbd;
mod open_images;
mod policy;
mod read_ahead;
pub mod scan;
pub mod sim;
pub mod stats;

pub use cache::Cache;
pub use config::Config;
pub use error::Error;
pub use fingerprint::FingerprintKey;
pub use geometry::BLOCK_BYTES;
pub use image::Image;
pub use stats::{ImageStatus, Status};
