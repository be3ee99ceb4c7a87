//! The agent: the part of pagefold that runs inside a client.
//!
//! The agent is one thread that does what only the process itself can do: it freezes pages, compares them with pool slots,
//! and maps the slots in their place. It enters a process as the preloaded library (feature `preload`), which also follows
//! the program's own memory calls; in a program that runs already (feature `attached`); or through [`client`], for programs
//! that opt in by code. It does not allocate, does not panic, and keeps its descriptors to itself. What it and the daemon
//! say to each other is [`pagefold_protocol`].
//!
//! Each layer uses only those above it in this list:
//!
//! * `limits`, `owned_ranges`, [`mapping_lock`]: constants, our own ranges, and the lock on mappings.
//! * `runtime`: our threads and signals. [`range_attributes`] and `state`: what the program's threads and ours share.
//! * `attached`: what an agent in a program that ran already has from its entry, and how it leaves.
//! * `address_space`: which mappings there are, and which of them are managed.
//! * [`cold`]: the thread and calls of a client of the cold tier.
//! * `live`: the thread of live merging.
//! * `preload`: the interposed functions.
//! * `entered`: how the agent begins in a program that runs already.

#![cfg_attr(any(feature = "preload", feature = "attached"), no_std)]
// How the other forms start their threads.
#![cfg_attr(feature = "attached", allow(dead_code))]

pub mod mapping_lock;

#[cfg(not(loom))]
mod address_space;
#[cfg(all(feature = "attached", not(loom)))]
mod attached;
#[cfg(all(not(feature = "attached"), not(loom)))]
#[path = "unattached.rs"]
mod attached;
#[cfg(all(not(any(feature = "preload", feature = "attached")), not(loom)))]
pub mod client;
#[cfg(not(loom))]
pub mod cold;
#[cfg(all(feature = "attached", not(loom)))]
mod entered;
#[cfg(not(loom))]
mod limits;
#[cfg(not(loom))]
mod live;
#[cfg(not(loom))]
mod owned_ranges;
#[cfg(all(feature = "preload", not(loom)))]
mod preload;
#[cfg(all(feature = "preload", not(loom)))]
mod process;
#[cfg(not(loom))]
pub mod range_attributes;
#[cfg(not(loom))]
mod runtime;
#[cfg(not(loom))]
mod state;
