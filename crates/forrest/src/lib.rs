//! forrest: a key-value store in memory, private to a process or shared by several.
//!
//! It does the job of libforrest over llds without a kernel module: very large
//! maps at the speed of the memory, on huge pages, with few dependent misses.
//!
//! ```
//! use forrest::Store;
//! let store = Store::new()?;
//! store.set(b"name", b"pagefold")?;
//! assert_eq!(store.get(b"name").unwrap(), b"pagefold");
//! # Ok::<(), forrest::Error>(())
//! ```
//!
//! # Sharing
//! [`Store::open`] opens a store by name; several processes use it at the same time through shared memory, without a
//! daemon. Any of them may be killed at any instruction: the others continue, readers notice nothing, a writer that meets
//! a lock of the dead process takes it over, and what the process held is released. The store outlives its processes
//! until [`Store::remove`]. A store from another version or machine, a truncated or damaged one, is refused.
//!
//! Processes that share a store trust each other: any process that can write its file can write anything into it. A
//! process that is stopped (not killed) inside an update blocks writers of that one shard, never readers.
//!
//! # Order
//! A private store made with [`Options::ordered`] also has [`Store::scan`]: entries by key, both ways.
//!
//! # Consistency
//! Each operation on a key takes effect at one instant. A read takes no lock: it sees an entry as it was at one
//! instant during the call. Iteration sees each shard at one instant, not the whole store.
//!
//! # Keys that a stranger chooses
//! The default hash is MurmurHash64A with seed 9, as in libforrest, mixed with secret random numbers of the store; keys of 8
//! bytes are only mixed. With the seed, an attacker can choose longer keys of equal hash.
//! The store bounds the cost of that: the ninth key of one hash goes by a second, secret hash. It does not bound everything,
//! because the mix is no cipher: an attacker that learns its numbers can fill one of 4,096 parts of the table with two
//! million keys. Each growth of that part then stops its writers for tens of milliseconds, and a 4,096th of all other keys
//! cannot be set any more ([`Error::Crowded`]) until they are deleted. Use [`Hash::Keyed`] if keys come from strangers.
//!
//! # When not to use it
//! For small maps of one thread `std`'s `HashMap` is faster; data that must
//! survive a reboot belongs in a database.
//!
//! # Limits
//! Keys to [`KEY_BYTES_MAX`], values to [`VALUE_BYTES_MAX`], 1024 threads over all processes, 1 TiB.

/// The example of the book compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/store.md")]
struct Book;

mod bucket;
#[cfg(test)]
mod bucket_tests;
#[allow(non_camel_case_types, non_snake_case)]
pub mod capi;
mod config;
mod error;
mod hash;
mod order;
mod overflow_record;
mod primitive;
mod recover;
mod scan;
mod stats;
mod store;
mod table;
mod value;
mod wide;

pub use config::{Numa, Options, Pages};
pub use error::Error;
pub use hash::{Hash, murmur64a};
pub use llds::arena::Backing;
pub use recover::Report;
pub use scan::Scan;
pub use stats::Stats;
pub use store::Store;
pub use value::{Ref, Value};

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 64 << 10;

/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 30;

/// Makes a process die at a chosen store to shared memory, for crash tests. Does nothing in release builds.
#[doc(hidden)]
pub use llds::arena::fault;
