//! A snapshotter for containerd: its layers and containers on an image store, so that equal files of any two containers
//! share page cache.
//!
//! containerd calls [`service`] over a Unix socket. [`snapshots`] does what it asks: an active snapshot is an upper
//! directory of overlayfs, a committed one is a tree in the store, and [`mounts`] shows a tree as layers of overlayfs.
//! [`database`] has one small file a snapshot. Mounts are the kernel's, so containers go on while this process is away.

pub mod api;
pub mod database;
pub mod error;
pub mod filter;
pub mod mounts;
pub mod notify;
pub mod service;
pub mod snapshots;
pub mod usage;
