//! OCI layouts, OCI archives, docker-archives and plain directories of blobs (skopeo's `dir:`): what podman, skopeo, buildah
//! and docker write.
//!
//! Digests and sizes are checked before anything is used.

mod blobs;
mod choose;
mod documents;
mod image;
mod platform;

pub use choose::Wanted;
pub use documents::parse_document;
pub use image::is_image;
pub(crate) use image::{Image, Layer};
pub use platform::Platform;
