//! Creating and dropping a region: its mappings, its userfaultfd, its registration with the signal handler.
//!
//! It is dropped with its last handle, after the last signal handler that uses it.

use super::super::fault;
use super::super::report::RegionError;
use super::shared_window::SharedWindow;
use super::{BATCH, CHUNK, CLIENT, Counters, EvictState, FREEZE, Shared, map_dontfork};
use crate::tier::Tier;
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, Range as Addresses, memfd};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

/// A handle of a region. In a child of a fork nothing is unmapped: the region's mappings do not exist there, and other
/// mappings may have their addresses.
#[derive(Clone, Debug)]
pub(in crate::region) struct Handle(Arc<Shared>);

impl Handle {
    pub(in crate::region) fn new(tier: Tier, bytes: usize) -> Result<Handle, RegionError> {
        let memory = map_dontfork(bytes)?;
        let pages = memory.len() / PAGE_SIZE;
        tier.add_client(CLIENT, pages as u64)?;
        let index = tier.client(CLIENT).ok_or(RegionError::Memory(Errno(libc::ENOMEM)))?;
        let ours = Mapping::anonymous(PAGE_SIZE).map_err(RegionError::Memory)?;
        // SAFETY: the page is the new mapping, which no other thread uses yet; the advice changes its bytes in a child only.
        unsafe {
            ours.as_ptr().write(1);
            mem::advise(ours.addr(), PAGE_SIZE as u64, libc::MADV_WIPEONFORK).map_err(RegionError::Memory)?;
        }
        let features = uffd::FEATURE_SIGBUS | uffd::FEATURE_MOVE | uffd::FEATURE_WP_ASYNC;
        let uffd =
            Uffd::user_mode_only(features | uffd::FEATURE_PAGEFAULT_FLAG_WP).map_err(RegionError::Userfaultfd)?;
        let freeze_area = map_dontfork(FREEZE * PAGE_SIZE)?;
        for map in [&memory, &freeze_area] {
            // A move requires both ranges to be registered.
            let range = Addresses { start: map.addr(), end: map.addr() + map.len() as u64 };
            uffd.register(range, uffd::MODE_WP).map_err(RegionError::Userfaultfd)?;
        }
        let copies_fd = memfd::create(c"pagefold-copies", (BATCH * PAGE_SIZE) as u64).map_err(RegionError::Memory)?;
        let (prot, len) = (libc::PROT_READ | libc::PROT_WRITE, BATCH * PAGE_SIZE);
        let copies = Mapping::file(copies_fd.raw(), 0, len, prot, libc::MAP_SHARED).map_err(RegionError::Memory)?;
        let evict_state = EvictState {
            freeze_area,
            copies_fd,
            copies,
            pagemap: Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).map_err(RegionError::Memory)?,
            missing: vec![false; pages.div_ceil(CHUNK)],
            ages: None,
        };
        let range = Addresses { start: memory.addr(), end: memory.addr() + memory.len() as u64 };
        let shared = Arc::new(Shared {
            states: map_dontfork(pages)?,
            memory,
            ours,
            uffd,
            tier,
            index,
            counters: Counters::default(),
            window_end: AtomicU64::new(u64::MAX),
            window_pages: AtomicU64::new(1),
            window: SharedWindow::default(),
            stuck: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            evict_state: Mutex::new(evict_state),
            pins: Mutex::default(),
        });
        fault::register(Arc::as_ptr(&shared), range.start, range.end)?;
        Ok(Handle(shared))
    }
}

impl std::ops::Deref for Handle {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.is_ours() {
            std::mem::forget(self.0.clone());
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        fault::unregister(self);
    }
}
