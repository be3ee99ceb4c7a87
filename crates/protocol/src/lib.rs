//! What the agent inside a client and the daemon agree on: messages, shared memory and their meaning.
//!
//! Agent, daemon, merge policy, tests and fuzz targets depend on this crate; it depends only on [`pagefold_os`] and decides
//! nothing. It neither allocates nor panics on what the other side sends.
//!
//! * [`message`]: the packets of the socket and the entries of lists.
//! * [`channel`]: the shared memory file that carries lists and page contents.
//! * [`entry`]: the page by which the agent in a running program begins.
//! * [`forked_memory`]: merged memory of a child that no agent is in.
//! * [`handshake`]: the first packets of a connection, which live merging and the cold tier share.
//! * [`residency_map`]: where each page of a cold client is, with the lock that owns it.
//! * [`seccomp_filter`]: whether a filter of a program's lets an agent work in it.
//! * [`wait_histogram`]: the buckets in which the agent counts how long accesses waited.
//! * [`pinning_devices`]: which open files may pin memory of a process.

#![cfg_attr(not(test), no_std)]

/// How the names of pool segments begin in /proc/PID/maps.
pub const POOL_NAME: &[u8] = b"/memfd:pagefold-pool";

pub mod channel;
pub mod entry;
pub mod forked_memory;
pub mod handshake;
pub mod message;
pub mod pinning_devices;
pub mod residency_map;
pub mod seccomp_filter;
pub mod wait_histogram;
