//! The cold tier of live clients: the clients, the threads that serve them, and what survives the daemon.
//!
//! A `Group` is a domain's tier, its clients (a thread each, `client`) and
//! its `pump`. Everything that a successor needs lies in descriptors that the
//! keeper holds from before the first page goes out: the tier's arena and file,
//! and of each client userfaultfd, table and page map. See docs/design/tier.md,
//! section 6.
//!
//! A client comes by `greet` or, from a dead daemon, by `adopt`; both leave it with the keeper (`keep`) and give it its
//! thread (`threads`).

mod agent_connection;
pub(crate) mod client;
pub(crate) mod config;
mod evict;
mod fault_affinity;
mod group;
mod groups;
pub(crate) mod handover;
pub(crate) mod handshake;
pub(crate) mod park;
mod prefetcher;
mod random_id;
pub(crate) mod selector;
pub(crate) mod status;
mod threads;
pub(crate) mod tiers;

pub use client::FAULT_BUCKETS;
pub use config::Config;
pub use selector::ClientSelector;
pub use status::{ColdClient, ColdDomain, ColdStatus};
