//! Clients that are merged live: their connections, their domains and the domains' workers.

mod agent_requests;
pub(crate) mod agent_time;
pub(crate) mod attached;
pub(crate) mod connection;
pub(crate) mod domains;
pub(crate) mod forked_children;
pub(crate) mod handshake;
mod held_segments;
pub(crate) mod leftover;
pub(crate) mod look;
pub(crate) mod looks;
pub(crate) mod merge_client;
pub(crate) mod pinning;
pub(crate) mod refusals;
pub(crate) mod shared_client;
pub(crate) mod unmanaged;
