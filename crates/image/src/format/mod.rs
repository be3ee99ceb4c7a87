//! Formats that are read and written without a store: tar, compressed streams, OCI documents, EROFS.

pub(crate) mod acl;
pub(crate) mod budget;
pub mod chunked;
pub(crate) mod decompress;
pub mod erofs;
pub mod fleet;
pub mod oci;
pub mod tar;
