//! The cold tier of live clients: the clients, the threads that serve them, and what survives the daemon.
//!
//! A `group` is a domain's tier with its clients (a fault thread each, `client`) and its evictor (`evict`); under a park
//! policy one more thread parks idle clients (`idle`). Everything that a successor needs lies in descriptors that the keeper
//! holds from before the first eviction: the tier's arena and file, and of each client userfaultfd, residency map and page
//! map. See docs/design/tier.md, section 6.
//!
//! A client comes by `handshake` or, from a dead daemon, by `handover::adopt`. Both leave it with the keeper and start its
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
pub(crate) mod idle;
pub(crate) mod park;
mod prefetcher;
mod random_id;
pub(crate) mod selector;
pub(crate) mod status;
mod threads;
pub(crate) mod tiers;

pub use client::FAULT_BUCKETS;
pub use config::Config;
pub use idle::policy::{Activity, ParkPolicy};
pub use selector::ClientSelector;
pub use status::{ColdClient, ColdDomain, ColdStatus};
pub use tiers::keeper_path;
