//! Mounts: every kind shows the tree of its image, equal files share page frames, and nothing mounted is ever collected.
//! Needs root, EROFS and overlayfs; says so where they are missing, and skips.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../../tests/common/executable.rs"]
mod executable;
#[path = "../common/scratch.rs"]
mod scratch;

mod changes;
mod children;
mod collector;
mod exec;
mod fixture;
mod full_disks;
mod hostile_links;
mod link_farms;
mod memory;
mod metadata_directories;
mod mount_kinds;
mod profiles;
mod uppers;
mod users;
