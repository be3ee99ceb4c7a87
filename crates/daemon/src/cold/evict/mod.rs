//! Pages leave their clients, and are brought back before they are asked for.

pub(crate) mod batch;
mod bring_back;
mod compress_workers;
pub(crate) mod evictor;
pub(crate) mod park;
mod resident;
mod transfer;
