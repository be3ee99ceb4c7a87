//! A store's upkeep: collection, figures, proof, export, and the dry run over directories.

pub mod any;
mod disk_usage;
pub mod export;
mod frames;
pub mod gc;
mod holes;
mod plain_files;
mod resident;
pub mod scan;
pub mod stat;
pub mod verify;
