//! The agent's first thread in a program, which shows that an agent is there.

use crate::stop::is_own;
use crate::waits::wait_until;
use pagefold_os::{Range, procfs};

/// True if an agent is in process `pid`.
pub fn has_agent(pid: i32) -> bool {
    own_thread(pid).is_some()
}

/// The agent's first thread, by its name.
pub(crate) fn own_thread(pid: i32) -> Option<i32> {
    procfs::threads(pid).ok()?.into_iter().find(|thread| is_own(pid, *thread))
}

/// Waits until the agent's thread has ended and `image` is unmapped; false if that does not happen in time.
pub(crate) fn wait_for_end(pid: i32, image: Range) -> bool {
    wait_until(|| {
        let is_there = own_thread(pid).is_some();
        let is_mapped = procfs::maps(pid).is_ok_and(|maps| maps.iter().any(|map| map.range.overlaps(&image)));
        (!is_there && !is_mapped).then_some(())
    })
    .is_some()
}
