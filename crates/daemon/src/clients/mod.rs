//! Clients that are merged live: their connections, their domains and the domains' workers.

pub(crate) mod connection;
pub(crate) mod domains;
pub mod merge_client;
