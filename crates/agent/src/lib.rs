//! The few lines that live inside a client.
//!
//! The agent is one thread that does what only the process itself can do:
//! freeze pages, compare them with pool slots, and map the slots in their
//! place. It comes in by the preloaded library (feature `preload`), which also
//! follows the program's own memory calls, or through [`client`], for programs
//! that opt in by code. It does not allocate, does not panic, and keeps its
//! descriptors to itself.
//!
//! `shared` is what the program's threads and ours meet in, with [`guard`] and
//! [`table`]; `thread`, `seat`, `bell`, `own`, `maps`, `plain`, `arena`, `listing` and `growth` stand on that. The
//! thread of live merging is `engine`, with `remap` and `heap`; that of the
//! tier is [`cold`]. [`wire`] and [`residency_map`] are what the daemon sees.

#![cfg_attr(feature = "preload", no_std)]

#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod bell;
#[cfg(not(loom))]
mod chores;
#[cfg(all(not(feature = "preload"), not(loom)))]
pub mod client;
#[cfg(not(loom))]
pub mod cold;
#[cfg(not(loom))]
mod engine;
#[cfg(not(loom))]
pub mod filter;
#[cfg(not(loom))]
mod growth;
pub mod guard;
#[cfg(not(loom))]
mod heal;
#[cfg(not(loom))]
mod heap;
#[cfg(not(loom))]
mod listing;
#[cfg(not(loom))]
mod maps;
#[cfg(not(loom))]
mod own;
#[cfg(not(loom))]
mod plain;
#[cfg(not(loom))]
mod populate;
#[cfg(not(loom))]
mod remap;
#[cfg(not(loom))]
mod seat;
#[cfg(not(loom))]
mod shared;
#[cfg(not(loom))]
pub mod table;
#[cfg(not(loom))]
mod thread;
#[cfg(not(loom))]
mod voids;
#[cfg(not(loom))]
mod whole;

#[cfg(all(feature = "preload", not(loom)))]
mod preload;
#[cfg(all(feature = "preload", not(loom)))]
mod process;
