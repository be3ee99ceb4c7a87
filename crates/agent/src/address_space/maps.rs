//! The process's mappings, and where pool files lie among them.
//!
//! Everything is asked of a file in /proc. Our threads keep it open; those of the program open it anew, which may fail: what
//! they cannot see is never taken for absent.

use core::cell::Cell;
use core::ffi::CStr;
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, maps};
use pagefold_protocol::message::DOMAIN_NAME_MAX;

pub(crate) use pagefold_protocol::POOL_NAME;

/// Room for the name of any pool segment: the kernel leaves out a name that does not fit, and the mapping would be taken for
/// another file's. The domain's name, the longest that a greeting carries, follows a colon. The kernel adds " (deleted)" and
/// a zero.
const POOL_NAME_MAX: usize = POOL_NAME.len() + 1 + DOMAIN_NAME_MAX + b" (deleted)\0".len();

/// The process's mappings. By the calling thread, here and elsewhere: the process's own directory has no memory any more
/// once its first thread has ended.
const MAPS: &CStr = c"/proc/thread-self/maps";

/// The process's mappings, in a file that stays good whatever root directory the program moves to.
#[derive(Debug)]
pub struct Maps(Fd);

impl Maps {
    /// Opens the file.
    ///
    /// # Errors
    /// As open(2), where the program's root directory has no /proc or it may have no more descriptors.
    pub fn open() -> Result<Maps> {
        Fd::open(MAPS, libc::O_RDONLY, 0).map(Maps)
    }

    /// Calls `f` with each mapping; a line that is longer than `buffer` is left out.
    ///
    /// # Errors
    /// As read(2).
    pub(crate) fn for_each(&self, buffer: &mut [u8], mut f: impl FnMut(&maps::Map<'_>)) -> Result<()> {
        self.for_each_while(buffer, |map| {
            f(map);
            true
        })
    }

    /// As [`for_each`](Self::for_each), until `f` returns false.
    ///
    /// # Errors
    /// As read(2).
    pub(crate) fn for_each_while(&self, buffer: &mut [u8], mut f: impl FnMut(&maps::Map<'_>) -> bool) -> Result<()> {
        let (mut at, goes_on) = (0, Cell::new(true));
        maps::for_each(
            buffer,
            |out| {
                let got = if goes_on.get() { self.0.read_at(out, at)? } else { 0 };
                at += got as u64;
                Ok(got)
            },
            |line| {
                if goes_on.get()
                    && let maps::Line::Mapping(map) = line
                {
                    goes_on.set(f(&map));
                }
            },
        )
    }

    /// The part of the first pool mapping in `range`, for a caller that visits them one by one because its work reads the
    /// same file. `None` also if the file cannot be read.
    pub(crate) fn first_pool(&self, range: Range) -> Option<Range> {
        let mut first = None;
        let _ = self.pools(range, |part, _| {
            first = Some(part);
            true
        });
        first
    }

    /// Calls `f` with the part of each pool mapping that lies in `range`, and what the program may do there, until it says
    /// true; returns whether it did.
    ///
    /// # Errors
    /// As [`for_each`](Self::for_each).
    pub(crate) fn pools(&self, range: Range, mut f: impl FnMut(Range, i32) -> bool) -> Result<bool> {
        self.any_pool(range, |map| f(map.range.intersection(&range), map.prot))
    }

    /// Calls `f` with the inode of each pool mapping.
    ///
    /// # Errors
    /// As [`for_each`](Self::for_each).
    pub(crate) fn pool_inodes(&self, mut f: impl FnMut(u64)) -> Result<()> {
        let visit = |map: &maps::Map<'_>| {
            f(map.inode);
            false
        };
        self.any_pool(Range { start: 0, end: u64::MAX }, visit).map(drop)
    }

    /// True if `f` says so of a pool mapping that overlaps `range`; those behind are left out.
    fn any_pool(&self, range: Range, mut f: impl FnMut(&maps::Map<'_>) -> bool) -> Result<bool> {
        let mut name = [0u8; POOL_NAME_MAX];
        let mut visit = |map: &maps::Map<'_>| {
            let part = map.range.intersection(&range);
            part.start < part.end && !map.shared && map.name.starts_with(POOL_NAME) && f(map)
        };
        // One by one, where the kernel can: there may be a hundred thousand of them, and few in the range.
        let mut from = range.start;
        while from < range.end {
            match maps::file_from(&self.0, from, &mut name) {
                Ok(Some(map)) => {
                    from = map.range.end;
                    if visit(&map) {
                        return Ok(true);
                    }
                }
                Ok(None) => return Ok(false),
                Err(Errno(libc::ENOTTY)) => break,
                Err(errno) => return Err(errno),
            }
        }
        if from >= range.end {
            return Ok(false);
        }
        self.any(visit)
    }

    /// The part of the first mapping in `range`.
    ///
    /// # Errors
    /// `ENOTTY` before Linux 6.11; as open(2).
    #[cfg_attr(not(feature = "preload"), allow(dead_code))]
    pub(crate) fn first_mapped(&self, range: Range) -> Result<Option<Range>> {
        let mapping = maps::mapping_from(&self.0, range.start)?;
        Ok(mapping.map(|mapping| mapping.intersection(&range)).filter(|part| !part.is_empty()))
    }

    /// What may be done at `addr` (`PROT_*` bits); `None` where nothing is mapped, or if the file cannot be read.
    pub(crate) fn rights_at(&self, addr: u64) -> Option<i32> {
        match maps::rights_at(&self.0, addr) {
            Err(Errno(libc::ENOTTY)) => {}
            asked => return asked.ok().flatten(),
        }
        let mut rights = None;
        let visit = |map: &maps::Map<'_>| {
            rights = (map.range.start..map.range.end).contains(&addr).then_some(map.prot);
            rights.is_some()
        };
        self.any(visit).ok().and(rights)
    }

    /// True if `visit` says so of a mapping; those behind are left out.
    #[inline(never)]
    fn any(&self, mut visit: impl FnMut(&maps::Map<'_>) -> bool) -> Result<bool> {
        // The stack may be a small one, and names of ours are short.
        let mut buffer = [0u8; 2 << 10];
        let mut any = false;
        // The file shows the mappings of the moment each piece is read; changing what was already read is harmless.
        self.for_each_while(&mut buffer, |map| {
            any = visit(map);
            !any
        })?;
        Ok(any)
    }
}

/// [`Maps::pools`] for a thread that has no such file open.
pub(crate) fn pool_mappings(range: Range, f: impl FnMut(Range, i32) -> bool) -> Result<bool> {
    Maps::open()?.pools(range, f)
}
