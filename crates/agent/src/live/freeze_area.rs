//! Where frozen pages wait.
//!
//! The kernel moves pages only between mappings with the same rights: a refused move is also the proof that a range has
//! others than the agent assumed. So memory that can be executed has a freeze area of its own, made when such memory is
//! listed first.

use crate::owned_ranges::{Owned, OwnedMapping};
use core::ffi::c_int;
use pagefold_os::raw::Result;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem};
use pagefold_protocol::message::FREEZE_PAGES_MAX;

/// The freeze areas for ranges of small pages.
#[derive(Debug)]
pub(super) struct FreezeArea {
    usual: OwnedMapping,
    executable: Option<OwnedMapping>,
}

impl FreezeArea {
    /// Makes the area for usual memory; `watch` moves the pages.
    ///
    /// # Errors
    /// The kernel's: no room, or `watch` cannot register the area.
    pub(super) fn new(watch: &Uffd) -> Result<FreezeArea> {
        let usual = make(Owned::FreezeArea, mem::READ_WRITE)?;
        register(watch, &usual)?;
        Ok(FreezeArea { usual, executable: None })
    }

    /// Has the agent leave its areas alone, in the place of those that an agent before had.
    pub(super) fn own(&self) {
        self.usual.register();
        self.executable.iter().for_each(OwnedMapping::register);
    }

    /// Where the area for memory with `rights` begins; `None` if there is none.
    pub(super) fn start(&self, rights: c_int) -> Option<u64> {
        match rights {
            mem::READ_WRITE => Some(self.usual.range().start),
            mem::READ_WRITE_EXECUTE => self.executable.as_ref().map(|area| area.range().start),
            _ => None,
        }
    }

    /// Makes the area for memory that can be executed, if there is none. Where the kernel allows the program no such memory
    /// any more (`PR_SET_MDWE`, SELinux), there stays none.
    pub(super) fn add_executable(&mut self, watch: &Uffd) {
        if self.executable.is_none()
            && let Ok(area) = make(Owned::ExecutableFreezeArea, mem::READ_WRITE_EXECUTE)
            && register(watch, &area).is_ok()
        {
            area.register();
            self.executable = Some(area);
        }
    }

    /// Another descriptor moves the pages from now on. The area for memory that can be executed is made again when it is
    /// needed.
    ///
    /// # Errors
    /// As the kernel says.
    pub(super) fn register_again(&mut self, watch: &Uffd) -> Result<()> {
        self.executable = None;
        register(watch, &self.usual)
    }
}

fn make(owned: Owned, rights: c_int) -> Result<OwnedMapping> {
    let map = mem::Mapping::anonymous(FREEZE_PAGES_MAX * PAGE_SIZE)?;
    if rights != mem::READ_WRITE {
        // SAFETY: the mapping is ours; its rights only grow.
        unsafe { mem::protect(map.addr(), map.len() as u64, rights) }?;
    }
    let range = Range::pages_from(map.addr(), FREEZE_PAGES_MAX as u64);
    // A child must not have it: what it shared could not be moved back.
    Ok(OwnedMapping::new(owned, map, range))
}

/// The target of a move must be registered. Not in missing mode: a thread that touches all memory (mlockall(2), a debugger)
/// would wait there for ever.
fn register(watch: &Uffd, area: &OwnedMapping) -> Result<()> {
    watch.register(area.range(), uffd::MODE_WP)
}
