//! Images in use: mounts, programs that run in them, and what a start reads.

pub mod doctor;
pub mod exec;
pub mod mount;
pub mod mounts;
pub mod profile;
