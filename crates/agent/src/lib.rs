//! The few lines that live inside a client.
//!
//! The agent is one thread that does what only the process itself can do:
//! freeze pages, compare them with pool slots, and map the slots in their
//! place. It comes in by the preloaded library (feature `preload`), which also
//! follows the program's own memory calls, or through [`client`], for programs
//! that opt in by code. It does not allocate, does not panic, and keeps its
//! descriptors to itself.

#![cfg_attr(feature = "preload", no_std)]

#[cfg(all(not(feature = "preload"), not(loom)))]
pub mod client;
#[cfg(not(loom))]
pub mod cold;
#[cfg(not(loom))]
pub mod cold_table;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
pub mod filter;
pub mod guard;
#[cfg(not(loom))]
mod heap;
pub mod pins;
#[cfg(not(loom))]
pub mod remap;
#[cfg(not(loom))]
pub mod table;
pub mod wire;

#[cfg(all(feature = "preload", not(loom)))]
mod preload;
