//! Builds: trees from directories and from layers, with their files in a store.

pub mod apply_layer;
mod directory;

pub use directory::{Options, from_directory};
