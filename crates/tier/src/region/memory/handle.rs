//! A region comes and goes: its mappings, its userfaultfd, its place in the handler.
//!
//! It goes with its last handle, when no handler looks at it any more.

use super::super::{RegionError, fault};
use super::hand::Offer;
use super::{BATCH, CHUNK, Counters, FREEZE, Parking, REGION, Shared, own};
use crate::tier::Tier;
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, Range as Addresses, memfd};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

/// A handle of a region. In a child the region's mappings are not there, and their addresses may be another's: nothing
/// is unmapped.
#[derive(Clone, Debug)]
pub(in crate::region) struct Handle(Arc<Shared>);

impl Handle {
    pub(in crate::region) fn new(tier: Tier, bytes: usize) -> Result<Handle, RegionError> {
        let memory = own(bytes)?;
        let pages = memory.len() / PAGE_SIZE;
        tier.add_region(REGION, pages as u64)?;
        let index = tier.region(REGION).ok_or(RegionError::Memory(Errno(libc::ENOMEM)))?;
        let ours = Mapping::anonymous(PAGE_SIZE).map_err(RegionError::Memory)?;
        // SAFETY: the page is ours, nobody else knows it; the advice changes no bytes here.
        unsafe {
            ours.as_ptr().write(1);
            mem::advise(ours.addr(), PAGE_SIZE as u64, libc::MADV_WIPEONFORK).map_err(RegionError::Memory)?;
        }
        let features = uffd::FEATURE_SIGBUS | uffd::FEATURE_MOVE | uffd::FEATURE_WP_ASYNC;
        let uffd =
            Uffd::user_mode_only(features | uffd::FEATURE_PAGEFAULT_FLAG_WP).map_err(RegionError::Userfaultfd)?;
        let staging = own(FREEZE * PAGE_SIZE)?;
        for map in [&memory, &staging] {
            // A move wants both ends to be ours.
            let range = Addresses { start: map.addr(), end: map.addr() + map.len() as u64 };
            uffd.register(range, uffd::MODE_WP).map_err(RegionError::Userfaultfd)?;
        }
        let copies_fd = memfd::create(c"pagefold-copies", (BATCH * PAGE_SIZE) as u64).map_err(RegionError::Memory)?;
        let (prot, len) = (libc::PROT_READ | libc::PROT_WRITE, BATCH * PAGE_SIZE);
        let copies = Mapping::file(copies_fd.raw(), 0, len, prot, libc::MAP_SHARED).map_err(RegionError::Memory)?;
        let parking = Parking {
            staging,
            copies_fd,
            copies,
            pagemap: Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).map_err(RegionError::Memory)?,
            missing: vec![false; pages.div_ceil(CHUNK)],
            ages: None,
        };
        let range = Addresses { start: memory.addr(), end: memory.addr() + memory.len() as u64 };
        let shared = Arc::new(Shared {
            states: own(pages)?,
            memory,
            ours,
            uffd,
            tier,
            index,
            counters: Counters::default(),
            window_end: AtomicU64::new(u64::MAX),
            window_pages: AtomicU64::new(1),
            offer: Offer::default(),
            stuck: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            parking: Mutex::new(parking),
            pins: Mutex::default(),
        });
        fault::enter(Arc::as_ptr(&shared), range.start, range.end)?;
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
        fault::leave(self);
    }
}
