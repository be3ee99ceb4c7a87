//! Pages leave their clients.

pub(crate) mod compress_workers;
pub(crate) mod evictor;
pub(crate) mod transfer;
