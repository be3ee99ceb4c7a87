//! Images in use: mounts, programs that run in them, and the start profiles of those.

pub mod doctor;
pub mod exec;
pub mod mount;
pub mod mounts;
pub mod profile;
