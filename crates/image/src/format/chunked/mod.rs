//! Layers as zstd:chunked has them: an ordinary zstd stream, in which each file's content is frames of its own, and behind
//! the archive a table of contents in a frame that readers of zstd skip.
//!
//! Only one thing is taken from the table: which bytes of the packed layer hold which content. Names, owners and modes come
//! from the archive's own headers, which are put together with contents that the store has. So a layer that came in parts is
//! the same archive as the whole one, byte for byte, and the digest of the unpacked layer proves it.
//!
//! The headers are frames between those of the contents. Newer layers have a copy of all headers behind the table
//! ("tar-split"), which needs no request for each of them.

mod headers;
mod location;
mod plan;
mod table;

pub use location::TableLocation;
pub use plan::{Part, Plan};
pub use table::{Content, TableOfContents};
