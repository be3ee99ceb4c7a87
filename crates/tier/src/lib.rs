//! Cold pages held by content, compressed, in memory that outlives its owner.
//!
//! A [`Tier`] stores and loads pages by (client, page). Equal pages are kept
//! once. A page that one word fills is kept as that word. Other pages are
//! compressed with LZ4, or with Zstandard and a dictionary of the domain, or as
//! a patch against a near page; incompressible pages are kept as they are. At
//! the limit, the pages stored longest ago are written to a file.
//!
//! Everything lies in one sealed memory file (module `layout`). A
//! [`keeper`] holds its descriptor, so that after the death of the owner a
//! successor can [adopt](Tier::adopt) it. Every loaded page is verified with a
//! keyed fingerprint of its 4096 bytes: a load returns the stored bytes or an
//! error that names the page, never wrong bytes.
//!
//! ```
//! use pagefold_tier::{Config, Effort, Tier};
//!
//! let tier = Tier::create(Config { bytes_max: 64 << 20, ..Config::default() }, None)?;
//! tier.add_client(1, 1024)?;
//! let page = [42; 4096];
//! tier.store(1, 7, &page, Effort::Fast)?;
//! let mut back = [0; 4096];
//! tier.load(1, 7, &mut back)?;
//! assert_eq!(back, page);
//! tier.discard(1, 7..8);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adopt;
mod arena;
mod backing_file;
mod clean;
mod cleaner_state;
mod codec;
mod config;
mod content_index;
mod error;
pub mod fd_store;
pub mod keeper;
mod layout;
mod lz4;
mod page_directory;
pub mod policy;
pub mod region;
mod stats;
mod tier;

pub use adopt::Adopted;
pub use backing_file::{BLOCK_BYTES, Backing, BackingFile, ZONE_BYTES};
pub use clean::Cleaned;
pub use codec::{Codec, RAW_ABOVE_BYTES};
pub use config::{Config, Effort};
pub use error::{AdoptError, CreateError, LoadError, StoreError};
pub use stats::{LATENCY_BUCKETS, Stats, quantile_bucket};
pub use tier::{Stored, Tier};
