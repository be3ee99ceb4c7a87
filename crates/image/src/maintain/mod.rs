//! A store's upkeep: collection, figures, proof, export, and the dry run over directories.

pub mod export;
pub mod gc;
pub mod scan;
pub mod stat;
