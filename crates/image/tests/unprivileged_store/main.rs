//! The store's promises: the same input gives the same image, nothing incomplete is ever visible, and nothing complete is
//! lost when builders, readers and collectors run or are killed at the same time.

#[path = "../common/mod.rs"]
mod common;

#[path = "../common/archive.rs"]
mod archive_bytes;

mod acls;
mod archives;
mod builds;
mod collector;
mod damage;
mod fixture;
mod format;
mod killed_builders;
mod many;
mod sparse;
mod stores;
