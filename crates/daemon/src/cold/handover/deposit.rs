//! Leaves the descriptors of tiers and clients with the keeper and the service manager.

use super::records::leave_with_service_manager as leave;
use crate::cold::client::Client;
use crate::cold::group::Group;
use pagefold_os::fd::Fd;
use pagefold_tier::keeper::Keeper;
use std::io;

/// Leaves the tier of `group` with the keeper.
pub(crate) fn deposit_arena(group: &Group, keeper: &Keeper) {
    // A group that is over is forgotten after this check at the latest: `retire` marks it before it forgets.
    if group.is_over() {
        return;
    }
    let (arena, file) = group.tier.fds();
    let fds: Vec<i32> = std::iter::once(arena).chain(file).collect();
    let name = group.arena_name();
    if let Err(error) = keeper.put(&name, &fds) {
        eprintln!("pagefold: the keeper does not take the tier of {}: {error}", group.key.1);
    }
    leave(&name, &fds);
}

/// Leaves a client with the keeper.
///
/// # Errors
/// The keeper holds as much as it can, and a new client's pages would die with us. One that is gone is no error: it is
/// replaced with the next greeting.
pub(crate) fn deposit_client(group: &Group, keeper: &Keeper, client: &Client) -> io::Result<()> {
    let descriptors = [client.uffd.fd(), &client.table_fd, &client.pagemap, &client.journal_fd];
    let fds = descriptors.map(Fd::raw);
    if let Err(error) = keeper.put(&group.name_of(client), &fds) {
        eprintln!("pagefold: the keeper does not take {} ({}): {error}", client.name, client.pid);
        if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EMFILE)) {
            return Err(error);
        }
    }
    leave(&group.name_of(client), &fds);
    Ok(())
}
