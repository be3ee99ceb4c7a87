//! OCI layouts, OCI archives, docker-archives and plain directories of blobs (skopeo's `dir:`): what podman, skopeo, buildah
//! and docker write.
//!
//! Digests and sizes are checked before anything is used.

mod blobs;
mod choose;
mod documents;
mod image;
mod platform;
mod remote;

pub use choose::Wanted;
pub use documents::parse_document;
pub(crate) use image::Image;
pub use image::Layer;
pub use image::is_image;
pub use platform::Platform;
pub use remote::{Documents, Next};
