//! Plain files of directories: which there are, and what is in them, hashed by pages.

use crate::buffer::with_buffer;
use crate::error::{At, Result};
use crate::parallel;
use crate::sys::PAGE;
use pagefold_os::fill::fill;
use pagefold_os::read_once;
use rustix::fs::{Advice, AtFlags, CWD, OFlags, SeekFrom};
use rustix::io::Errno;
use sha2::Digest as _;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The first half of the SHA-256 of some content.
pub(super) type Key = [u8; 16];

pub(super) fn key(bytes: &[u8]) -> Key {
    sha2::Sha256::digest(bytes)[..16].try_into().expect("16 bytes")
}

/// Pages of the largest piece that a scan compares; pieces of a file come in multiples of it.
pub(super) const CHUNK_PAGES: u64 = 16;

/// Bytes of a buffer for [`read_pages`].
const BUFFER: usize = 1 << 20;

/// A regular file, seen in the directory with the number `dir`.
pub(super) struct Seen {
    pub(super) dir: usize,
    pub(super) path: PathBuf,
    pub(super) inode: (u64, u64),
    pub(super) size: u64,
}

/// Passes each regular file below `dirs` to `found`, once for each of its names. Links are not followed; other file systems
/// below a directory are left alone. Returns how many files and directories could not be looked at.
///
/// # Errors
/// A directory of `dirs` that cannot be read.
pub(super) fn walk(dirs: &[PathBuf], mut found: impl FnMut(Seen)) -> Result<u64> {
    let mut unreadable = 0;
    for (dir, top_path) in dirs.iter().enumerate() {
        let top = fs::metadata(top_path).at(top_path)?;
        fs::read_dir(top_path).at(top_path)?;
        let mut todo = vec![top_path.clone()];
        while let Some(path) = todo.pop() {
            let Ok(entries) = fs::read_dir(&path) else {
                unreadable += 1;
                continue;
            };
            for entry in entries.flatten() {
                let path = entry.path();
                let Ok(stat) = rustix::fs::statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW) else {
                    unreadable += 1;
                    continue;
                };
                match stat.st_mode & libc::S_IFMT {
                    libc::S_IFDIR if stat.st_dev == top.dev() => todo.push(path),
                    libc::S_IFREG => {
                        found(Seen { dir, path, inode: (stat.st_dev, stat.st_ino), size: stat.st_size as u64 });
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(unreadable)
}

/// Opens a regular file to look at it: what is read does not count as used, and the access time stays where the kernel
/// allows that.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    // Refused for files of other users.
    let _ = rustix::fs::fcntl_setfl(&file, OFlags::NOATIME | OFlags::NONBLOCK);
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::NoReuse);
    Ok(file)
}

/// Passes each of `items` to `look` with a buffer for [`read_pages`], on all processors.
pub(super) fn for_each<T: Sync>(items: &[T], look: impl Fn(&T, &mut [u8]) + Sync) {
    let work = |item| {
        with_buffer(BUFFER, |buffer| look(item, buffer));
        Ok(())
    };
    parallel::map(items, work).expect("this work does not fail");
}

/// The next part of a file.
pub(super) enum Part<'a> {
    /// So many pages of a hole.
    Hole(u64),
    /// Pages that were read, each with its key, `None` for a page of zeros.
    Pages(&'a [Option<Key>]),
}

/// Reads `file` in pages and passes holes over. Each part begins where a largest piece does. Returns the bytes to the end.
pub(super) fn read_pages(
    file: &File,
    size: u64,
    buffer: &mut [u8],
    mut part: impl FnMut(Part, u64),
) -> io::Result<u64> {
    let (mut at, mut pages) = (0, Vec::new());
    loop {
        // A file of size 0 may have something to read, as in /proc.
        if at < size {
            let data = next_data(file, at, size);
            let start = if data < size { data - data % (CHUNK_PAGES * PAGE) } else { size };
            if start > at {
                part(Part::Hole((start - at).div_ceil(PAGE)), start - at);
                at = start;
            }
        }
        let filled = fill(buffer, |rest, filled| read_once::read_at(file, rest, at + filled as u64))?;
        // The end of the last page is zeros in the cache.
        let end = filled.next_multiple_of(PAGE as usize);
        buffer[filled..end].fill(0);
        pages.clear();
        for page in buffer[..end].chunks_exact(PAGE as usize) {
            pages.push((!page.iter().all(|&byte| byte == 0)).then(|| key(page)));
        }
        part(Part::Pages(&pages), filled as u64);
        at += filled as u64;
        if filled < buffer.len() {
            return Ok(at);
        }
    }
}

/// Where the next data of a file of `size` bytes is, from `at` on: `size` if there is none.
fn next_data(file: &File, at: u64, size: u64) -> u64 {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => data,
        Err(Errno::NXIO) => size,
        // File systems that do not report holes.
        Err(_) => at,
    }
}

/// The key of a whole file, made from its pages: each after the number of zero pages before it, so that a hole costs
/// nothing and equals the zeros of another file.
#[derive(Default)]
pub(super) struct Whole {
    hasher: sha2::Sha256,
    zeros: u64,
    /// Pages so far.
    pub(super) pages: u64,
}

impl Whole {
    /// Adds the next part of the file.
    pub(super) fn add(&mut self, part: &Part) {
        match part {
            Part::Hole(pages) => self.add_zeros(*pages),
            Part::Pages(pages) => pages.iter().for_each(|page| match page {
                Some(key) => self.add_page(*key),
                None => self.add_zeros(1),
            }),
        }
    }

    fn add_page(&mut self, page: Key) {
        self.hasher.update(std::mem::take(&mut self.zeros).to_le_bytes());
        self.hasher.update(page);
        self.pages += 1;
    }

    fn add_zeros(&mut self, pages: u64) {
        self.zeros += pages;
        self.pages += pages;
    }

    /// The key of the file of `size` bytes.
    pub(super) fn finish(mut self, size: u64) -> Key {
        self.hasher.update(self.zeros.to_le_bytes());
        self.hasher.update(size.to_le_bytes());
        self.hasher.finalize()[..16].try_into().expect("16 bytes")
    }
}
