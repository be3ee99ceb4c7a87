//! Where frozen pages wait.
//!
//! The kernel moves pages only between mappings with the same rights: a refused move is also the proof that a span has others than the
//! agent assumed. So memory that can be executed has a staging area of its own, made when such memory is listed first.

use crate::limits::NOTHING;
use crate::owned_ranges::{self, Owned, hide};
use core::ffi::c_int;
use pagefold_os::raw::Result;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem};
use pagefold_protocol::message::FREEZE_PAGES_MAX;

/// Rights of memory that the program reads and writes.
pub(super) const USUAL: c_int = libc::PROT_READ | libc::PROT_WRITE;
/// Rights of memory that it also executes.
pub(super) const EXECUTABLE: c_int = USUAL | libc::PROT_EXEC;

/// The staging areas for spans of small pages.
#[derive(Debug)]
pub(super) struct Staging {
    usual: mem::Mapping,
    executable: Option<mem::Mapping>,
}

impl Staging {
    /// Makes the area for usual memory; `watch` moves the pages.
    ///
    /// # Errors
    /// The kernel's: no room, or `watch` cannot register the area.
    pub(super) fn new(watch: &Uffd) -> Result<Staging> {
        let usual = make(USUAL)?;
        register(watch, &usual)?;
        Ok(Staging { usual, executable: None })
    }

    /// Has the agent leave its areas alone, and none that an agent before had, which is unmapped.
    pub(super) fn own(&self) {
        owned_ranges::register(Owned::Staging, range_of(&self.usual));
        owned_ranges::register(Owned::ExecutableStaging, self.executable.as_ref().map_or(NOTHING, range_of));
    }

    /// Where the area for memory with `rights` begins; `None` if there is none.
    pub(super) fn start(&self, rights: c_int) -> Option<u64> {
        match rights {
            USUAL => Some(self.usual.addr()),
            EXECUTABLE => self.executable.as_ref().map(mem::Mapping::addr),
            _ => None,
        }
    }

    /// Makes the area for memory that can be executed, if there is none. Where the kernel allows the program no such memory any more
    /// (`PR_SET_MDWE`, SELinux), there stays none.
    pub(super) fn add_executable(&mut self, watch: &Uffd) {
        if self.executable.is_none()
            && let Ok(map) = make(EXECUTABLE)
            && register(watch, &map).is_ok()
        {
            owned_ranges::register(Owned::ExecutableStaging, range_of(&map));
            self.executable = Some(map);
        }
    }

    /// Another descriptor moves the pages from now on. The area for memory that can be executed is made again when it is needed.
    ///
    /// # Errors
    /// As the kernel says.
    pub(super) fn register_again(&mut self, watch: &Uffd) -> Result<()> {
        owned_ranges::register(Owned::ExecutableStaging, NOTHING);
        self.executable = None;
        register(watch, &self.usual)
    }
}

fn range_of(map: &mem::Mapping) -> Range {
    Range { start: map.addr(), end: map.addr() + map.len() as u64 }
}

fn make(rights: c_int) -> Result<mem::Mapping> {
    let map = mem::Mapping::anonymous(FREEZE_PAGES_MAX * PAGE_SIZE)?;
    if rights != USUAL {
        // SAFETY: the mapping is ours; its rights only grow.
        unsafe { mem::protect(map.addr(), map.len() as u64, rights) }?;
    }
    // What a child shares cannot be moved back.
    hide(&map);
    Ok(map)
}

/// The target of a move must be registered. Not in missing mode: a thread that touches all memory (mlockall(2), a debugger) would wait
/// there for ever.
fn register(watch: &Uffd, map: &mem::Mapping) -> Result<()> {
    watch.register(range_of(map), uffd::MODE_WP)
}
