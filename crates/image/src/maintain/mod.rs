//! A store's upkeep: collection, figures, proof, export, and the dry run over directories.

mod disk_usage;
pub mod export;
mod frames;
pub mod gc;
mod holes;
pub mod scan;
pub mod stat;
pub mod verify;
