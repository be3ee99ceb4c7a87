//! Clients by code: a program that opts in, without the preloaded library.
//!
//! ```no_run
//! use pagefold_agent::client::{Client, Region};
//!
//! let client = Client::connect("/run/pagefold/daemon.sock".as_ref(), "default")?;
//! let mut region = Region::new(&client, 64 << 20)?;
//! region[..5].copy_from_slice(b"hello");
//! // Pages of the region that equal pages of other clients are merged soon.
//! # Ok::<(), pagefold_agent::client::ConnectError>(())
//! ```
//!
//! A [`Region`] owns its memory, so no other code unmaps or discards it, and the agent needs to follow no calls. The process
//! must not call fork(2) without exec(2) while regions exist: only the preloaded library keeps pages from being frozen at
//! that moment. [`Region::discard`] replaces `MADV_DONTNEED`.

use crate::address_space::anonymous::replace_merged;
use crate::address_space::maps::Maps;
use crate::cold;
use crate::live::start;
use crate::state::SHARED;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering;
use pagefold_os::{Errno, PAGE_SIZE, Range, mem};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Why a program cannot become a client.
#[derive(Debug)]
pub enum ConnectError {
    /// The path is longer than a socket's may be, or the domain's name longer than 64 bytes.
    TooLong,
    /// The process is a client already, of this or another daemon.
    Already,
    /// The thread could not be started, or memory could not be mapped.
    System(Errno),
}

impl core::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            ConnectError::TooLong => f.write_str("the socket's path or the domain's name is too long"),
            ConnectError::Already => f.write_str("this process is a client already"),
            ConnectError::System(errno) => write!(f, "{errno}"),
        }
    }
}

impl core::error::Error for ConnectError {}

/// This process as a client of a daemon.
#[derive(Debug)]
pub struct Client(());

/// Tells threads apart for the mapping lock: the address of a thread's own variable.
fn me() -> usize {
    std::thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| core::ptr::from_ref(here) as usize)
}

impl Client {
    /// Makes this process a client of the daemon at `socket`, in `domain`, for as long as it runs.
    ///
    /// The connection is made, and made again if the daemon is replaced, in the background: without a daemon the
    /// program works as ever, unmerged.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(socket: &Path, domain: &str) -> Result<Client, ConnectError> {
        Client::start(socket, domain)
    }

    /// As [`connect`](Self::connect), but the pages of regions go to the cold tier when they stay silent, and come back
    /// when they are touched, instead of being merged with others'.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect_cold(socket: &Path, domain: &str, options: ColdOptions) -> Result<Client, ConnectError> {
        if SHARED.is_configured() {
            return Err(ConnectError::Already);
        }
        cold::TOLERANCE_PPM.store(options.tolerance_ppm, Ordering::Relaxed);
        cold::TIER_MAX.store(options.tier_max_bytes, Ordering::Relaxed);
        cold::COLD.store(true, Ordering::Relaxed);
        Client::start(socket, domain)
    }

    fn start(socket: &Path, domain: &str) -> Result<Client, ConnectError> {
        let socket = socket.as_os_str().as_bytes();
        if socket.len() >= 108 || domain.len() > 64 {
            return Err(ConnectError::TooLong);
        }
        if !SHARED.configure(socket, domain.as_bytes(), false) {
            return Err(ConnectError::Already);
        }
        if start() { Ok(Client(())) } else { Err(ConnectError::System(Errno(libc::EAGAIN))) }
    }
}

/// What a client of the cold tier asks for; zeros stand for the daemon's defaults.
#[derive(Clone, Copy, Debug, Default)]
pub struct ColdOptions {
    /// Share of run time that may be lost to pages coming back, in millionths.
    pub tolerance_ppm: u64,
    /// Limit of the domain's tier in bytes, if this client is its first; the daemon's is the most.
    pub tier_max_bytes: u64,
}

/// Memory that is merged with equal pages of other clients: private, zeroed at first, writable like any.
#[derive(Debug)]
pub struct Region {
    map: mem::Mapping,
}

impl Region {
    /// Maps `len` bytes, rounded up to pages.
    ///
    /// # Errors
    /// If the kernel refuses the mapping.
    pub fn new(_client: &Client, len: usize) -> Result<Region, ConnectError> {
        let map = mem::Mapping::anonymous(len.max(1)).map_err(ConnectError::System)?;
        let region = Region { map };
        let held = SHARED.mapping_lock.lock(me());
        SHARED.tables(&held).table.change(region.range(), |note| note.mergeable = true);
        drop(held);
        SHARED.changed();
        Ok(region)
    }

    fn range(&self) -> Range {
        Range::pages_from(self.map.addr(), (self.map.len() / PAGE_SIZE) as u64)
    }

    /// Gives `pages` pages from page `first` back to the system; they read as zero afterwards.
    ///
    /// # Panics
    /// If the pages are not all in the region.
    pub fn discard(&mut self, first: usize, pages: usize) {
        assert!(first.checked_add(pages).is_some_and(|end| end <= self.map.len() / PAGE_SIZE), "outside the region");
        let range = Range::pages_from(self.map.addr() + (first * PAGE_SIZE) as u64, pages as u64);
        if range.is_empty() {
            return;
        }
        let held = SHARED.mapping_lock.lock(me());
        let replaced = Maps::open().and_then(|maps| {
            replace_merged(&maps, range, None, Some(SHARED.tables(&held).table), |_, _, _| {})?;
            // SAFETY: the range is the region's, and `&mut self` excludes other references.
            unsafe { mem::advise(range.start, range.len(), libc::MADV_DONTNEED) }
        });
        drop(held);
        if replaced.is_err() {
            // No descriptor is left, or no mapping. Zeros cost memory, and are what was asked for.
            self[first * PAGE_SIZE..(first + pages) * PAGE_SIZE].fill(0);
        }
        SHARED.changed();
    }
}

impl Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`; merging never changes what it reads.
        unsafe { core::slice::from_raw_parts(self.map.as_ptr(), self.map.len()) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping lives as long as `self`, and `&mut self` is the only way to write.
        unsafe { core::slice::from_raw_parts_mut(self.map.as_ptr(), self.map.len()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let held = SHARED.mapping_lock.lock(me());
        SHARED.tables(&held).table.forget(self.range());
        // The mapping is unmapped while the mapping lock is held, so that no page of it is frozen.
        // SAFETY: no reference to the region is left. `Mapping::drop` will unmap the same addresses again, which is harmless
        // only while they stay unused. So this replaces the range by an empty mapping instead of unmapping it.
        let _ = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            mem::map(self.map.addr(), self.map.len() as u64, libc::PROT_NONE, flags, -1, 0)
        };
        drop(held);
        SHARED.changed();
    }
}
