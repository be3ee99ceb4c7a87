//! Cold pages held by content, compressed, in memory that outlives its owner.
//!
//! A [`Tier`] takes pages by (region, page) and gives them back. Equal pages
//! are kept once; a page that one word fills is that word; others are
//! compressed by LZ4, or by Zstandard with a dictionary of the domain, or as a
//! patch against a near page; what does not compress is kept as it is. When
//! the limit is reached, the pages stored longest ago go to a file.
//!
//! Everything lies in one sealed memory file (module `layout`). A
//! [`keeper`] holds its descriptor, so that after the death of the owner a
//! successor can [adopt](Tier::adopt) it. Every page that comes back is proven
//! by a keyed fingerprint of its 4096 bytes: an error names the page, and there
//! are never wrong bytes.
//!
//! ```
//! use pagefold_tier::{Config, Effort, Tier};
//!
//! let tier = Tier::create(Config { bytes_max: 64 << 20, ..Config::default() }, None)?;
//! tier.add_region(1, 1024)?;
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
mod clean;
mod codec;
mod config;
mod content;
mod error;
pub mod fd_store;
mod index;
pub mod keeper;
mod layout;
mod lz4;
pub mod policy;
pub mod region;
mod stats;
mod tier;
mod writeback;

pub use adopt::Adopted;
pub use clean::Cleaned;
pub use codec::{Codec, RAW_ABOVE_BYTES};
pub use config::{Config, Effort};
pub use error::{AdoptError, CreateError, LoadError, StoreError};
pub use stats::{LATENCY_BUCKETS, Stats};
pub use tier::{Stored, Tier};
pub use writeback::{BLOCK_BYTES, Backing, BackingFile, SEGMENT_BYTES};
