//! Names under which descriptors are left with the keeper and the service manager, and their end.
//!
//! A name tells a successor what the descriptors belong to.

use crate::domain_key::DomainKey;
use pagefold_tier::fd_store;
use pagefold_tier::keeper::Keeper;

/// First word of the names of tiers.
pub(crate) const ARENA: &str = "arena";
/// First word of the names of clients.
pub(crate) const CLIENT: &str = "client";
/// Most descriptors under one name: a client's.
const DESCRIPTORS_MAX: usize = 4;

/// The name of the tier of domain `key`, in the group `group_id`.
pub(crate) fn arena_name(group_id: u64, key: &DomainKey) -> String {
    format!("{ARENA}:{group_id:x}:{}:{}", key.0, key.1)
}

/// The name of a client of the group `group_id`.
pub(crate) fn client_name(group_id: u64, client_id: u32, token: u64, pid: i32, uid: u32) -> String {
    format!("{CLIENT}:{group_id:x}:{client_id}:{token:x}:{pid}:{uid}")
}

/// Leaves `fds` with the service manager, which is handed everything that the keeper is. Without it only the handover after
/// the death of daemon and keeper is lost.
pub(crate) fn leave_with_service_manager(name: &str, fds: &[i32]) {
    if let Err(error) = fd_store::store(name, fds) {
        eprintln!("pagefold: the service manager does not take {name}: {error}");
    }
}

/// Drops the descriptors under `name` from the keeper and from the service manager.
pub(crate) fn forget(keeper: &Keeper, name: &str) {
    let _ = keeper.forget(name);
    let _ = fd_store::remove(name, DESCRIPTORS_MAX);
}
