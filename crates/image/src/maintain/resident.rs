//! Which pages of a file are in the page cache.

use crate::sys::{self, MappedFile, PAGE};
use rustix::fs::Advice;
use std::fs::{File, Metadata};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::Duration;

/// File system type of overlayfs, as statfs(2) tells it.
const OVERLAYFS_MAGIC: rustix::fs::FsWord = 0x794c_7630;

/// True if the file's pages belong to another file: one of a layer.
pub(super) fn is_on_overlayfs(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file)?.f_type == OVERLAYFS_MAGIC)
}

/// Bytes of a file in the page cache, if the kernel says so.
pub(super) fn bytes(file: &File, meta: &Metadata) -> Option<u64> {
    let error = if is_on_overlayfs(file).ok()? {
        // cachestat would look at this file's own cache, which is empty.
        libc::ENOSYS
    } else {
        match sys::cached_pages(file) {
            Ok(pages) => return Some(pages * PAGE),
            Err(error) => error.raw_os_error()?,
        }
    };
    // For another user's file mincore answers that everything is resident.
    let user = rustix::process::geteuid();
    if error != libc::ENOSYS || (!user.is_root() && user.as_raw() != meta.uid()) {
        return None;
    }
    if meta.len() == 0 {
        return Some(0);
    }
    Some(MappedFile::new(file, meta.len()).and_then(|map| map.resident_pages()).ok()? * PAGE)
}

/// Ranges of pages, in order and apart from each other.
pub(super) type Runs = Vec<Range<u64>>;

/// A file's pages in memory at one moment.
pub(super) struct Look {
    /// Which they are.
    pub(super) runs: Runs,
    /// The physical frame of the first of them, if this user may know it.
    pub(super) frame: Option<u64>,
    /// Whether the pages belong to another file.
    pub(super) borrowed: bool,
}

/// Looks at a file of `size` bytes, of which the kernel tells this user what is in memory.
pub(super) fn look(file: &File, size: u64) -> io::Result<Look> {
    let map = MappedFile::new(file, size)?;
    let runs = resident_runs(&map)?;
    let frame = match runs.first() {
        Some(run) => map.frame(run.start)?,
        None => 0,
    };
    Ok(Look { runs, frame: (frame > 0).then_some(frame), borrowed: is_on_overlayfs(file)? })
}

/// The pages of the mapped file that are in memory.
fn resident_runs(map: &MappedFile) -> io::Result<Runs> {
    let mut runs = Runs::new();
    map.each_resident(|page| match runs.last_mut() {
        Some(last) if last.end == page => last.end += 1,
        _ => runs.push(page..page + 1),
    })?;
    Ok(runs)
}

/// How many pages there are in `runs`.
pub(super) fn pages(runs: &Runs) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// How often a file's pages are evicted before those that are left stay.
const EVICTIONS: u32 = 8;

/// Evicts the pages of a file of `size` bytes, but for those in `keep`.
///
/// The kernel passes over a page that it moves at this moment (compaction). So what is left is evicted again.
pub(super) fn evict_all_but(file: &File, size: u64, keep: &Runs) {
    // No length stands for all up to the end. This is advice: a file system that takes none keeps the pages.
    let evict = |from, length| {
        let _ = rustix::fs::fadvise(file, from * PAGE, length, Advice::DontNeed);
    };
    for _ in 0..EVICTIONS {
        let mut from = 0;
        for run in keep {
            if let Some(length) = NonZeroU64::new((run.start - from) * PAGE) {
                evict(from, Some(length));
            }
            from = run.end;
        }
        evict(from, None);
        let left = MappedFile::new(file, size)
            .and_then(|map| resident_runs(&map))
            .is_ok_and(|left| common(&left, keep) < pages(&left));
        if !left {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// For each file how many of its pages another one of them has too, and how many different pages there are in all.
pub(super) fn overlap(files: &[&Runs]) -> (Vec<u64>, u64) {
    let mut ends: Vec<(u64, i64)> =
        files.iter().flat_map(|runs| runs.iter().flat_map(|run| [(run.start, 1), (run.end, -1)])).collect();
    ends.sort_unstable();
    let (mut repeated, mut distinct, mut count, mut from) = (Runs::new(), 0, 0, 0);
    for (page, change) in ends {
        if count > 0 {
            distinct += page - from;
        }
        if count > 1 && page > from {
            repeated.push(from..page);
        }
        count += change;
        from = page;
    }
    (files.iter().map(|runs| common(runs, &repeated)).collect(), distinct)
}

/// How many pages are in both.
fn common(a: &Runs, b: &Runs) -> u64 {
    let (mut at, mut count) = (0, 0);
    for run in a {
        at += b[at..].iter().take_while(|other| other.end <= run.start).count();
        let meets = b[at..].iter().take_while(|other| other.start < run.end);
        count += meets.map(|other| run.end.min(other.end) - run.start.max(other.start)).sum::<u64>();
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)]
    fn pages_that_several_files_have_count_once() {
        let (a, b, c): (Runs, Runs, Runs) = (vec![0..4, 6..8], vec![2..7], vec![20..30]);
        assert_eq!(overlap(&[&a]), (vec![0], 6));
        assert_eq!(overlap(&[&a, &b, &c]), (vec![3, 3, 0], 6 + 5 - 3 + 10));
        assert_eq!(overlap(&[&a, &a, &b]), (vec![6, 6, 3], 8));
        assert_eq!(overlap(&[&a, &Runs::new()]), (vec![0, 0], 6));
    }
}
