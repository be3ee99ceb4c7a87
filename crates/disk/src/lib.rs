//! VM disk images through one deduplicated cache.
//!
//! Many disk images are full of equal blocks; the kernel caches each image by itself. This crate serves the images
//! of a directory through a cache of its own in which equal blocks are in memory once, whichever image they are in.
//!
//! From the outside in: the front ends (`fuse`, `nbd`) talk to the [`engine`], which opens images and owns the
//! background threads; the [`cache`] keeps blocks and their states; below it lie the page frames, the content index
//! and the image files ([`mod@file`]). `docs/design/disk.md` tells the whole story.

mod account;
pub mod cache;
pub mod config;
pub mod control;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod file;
mod fingerprint;
pub mod fingerprints;
mod frames;
pub mod fuse;
pub mod image;
mod index;
pub mod metrics;
pub mod mount;
pub mod nbd;
mod policy;
pub mod scan;
pub mod sim;
pub mod stats;
mod table;
mod writeback;

pub use cache::Cache;
pub use config::{Config, FingerprintKey};
pub use error::Error;
pub use image::Image;
pub use stats::{ImageStatus, Status};

/// Size of a block and of a page, in bytes.
pub const BLOCK_BYTES: usize = 4096;
