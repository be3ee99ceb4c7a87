//! A fleet's store: images of several hosts in a bucket, each object once, packed.

mod bucket;
mod gc;
mod image;
mod images;
mod lazy;
mod lease;
mod objects;
mod packs;
mod pieces;
mod pull;
mod push;

pub use gc::{Wanted, collect};
pub use images::{list, take_away};
pub use lazy::{Wish, mount};
pub use pull::pull;
pub use push::push;
