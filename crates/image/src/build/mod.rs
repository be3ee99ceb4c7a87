//! Builds: trees from directories, archives and OCI images, with their files in a store.

mod acls;
mod apply_layer;
mod directory;
mod import;
mod omissions;
mod parts;
mod publish;
mod read_files;
mod source;
pub mod upper;
mod walk;

pub use apply_layer::apply_archive;
pub use directory::from_directory;
pub use import::{KnownChain, LayerImport, Source, import};
pub use omissions::Omissions;
pub use parts::Parts;
pub use publish::Build;
pub use walk::Options;
