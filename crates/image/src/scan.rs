//! What sharing would save, before anything is built: by whole files, and by 64, 16 and 4 KiB pieces.
//!
//! Every byte is hashed once, in 4 KiB pages; the larger pieces and whole files are
//! hashed from their pages' hashes. Sizes are rounded to pages, as the page cache holds them. Whole files are what
//! `pagefold image` shares on any kernel; the smaller pieces show what ordinary reads cannot share, and `pagefold disk` can.

use crate::error::{At, Result};
use crate::progress::Progress;
use crate::sys::{self, PAGE};
use crate::tree::INLINE_MAX;
use rustix::fs::{AtFlags, CWD};
use sha2::Digest as _;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Metadata};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Duplicates at one piece size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Level {
    /// Bytes that a first equal piece already has.
    pub duplicate_bytes: u64,
    /// The same, per cent of all.
    pub percent: u32,
}

/// What a scan found; bytes are rounded to pages.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Scan {
    /// Regular files (inodes) read.
    pub files: u64,
    /// Their bytes.
    pub total_bytes: u64,
    /// Bytes that are all zero, in whole pages.
    pub zero_bytes: u64,
    /// Whole files: what `pagefold image` shares, of more than 64 bytes.
    pub file: Level,
    /// Pieces of 64 KiB from the start of each file.
    pub chunk_64k: Level,
    /// Pieces of 16 KiB.
    pub chunk_16k: Level,
    /// Pages.
    pub page_4k: Level,
    /// Bytes of the files in the page cache before the scan.
    pub resident_bytes: u64,
    /// Of those, bytes that equal files hold again: saved at once if these trees were mounted from a store.
    pub resident_duplicate_bytes: u64,
    /// Per directory: path, files, bytes.
    pub trees: Vec<Tree>,
    /// Files that could not be read.
    pub unreadable: u64,
    /// Files of which the kernel does not say what is in memory: other users' and those on overlayfs.
    pub resident_unknown: u64,
}

/// One directory of a scan.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Tree {
    /// As given.
    pub path: PathBuf,
    /// Regular files in it.
    pub files: u64,
    /// Their bytes, rounded to pages.
    pub bytes: u64,
}

type Key = [u8; 16];

fn key(bytes: &[u8]) -> Key {
    sha2::Sha256::digest(bytes)[..16].try_into().expect("16 bytes")
}

#[derive(Default)]
struct Sets {
    pages: HashSet<Key>,
    chunks_16k: HashSet<Key>,
    chunks_64k: HashSet<Key>,
    /// A file's key to the largest number of its bytes seen resident.
    files: HashMap<Key, u64>,
    scan: Scan,
}

/// The pages' hashes of one file; `None` for a zero page.
struct Hashed {
    pages: Vec<Option<Key>>,
    size: u64,
    resident: Option<u64>,
}

/// File system type of overlayfs, as statfs(2) tells it.
const OVERLAYFS_MAGIC: rustix::fs::FsWord = 0x794c_7630;

/// Bytes of a file in the page cache, where the kernel says it.
fn resident(file: &File, meta: &Metadata) -> Option<u64> {
    // The cache of a file on overlayfs belongs to another file; asked of this one it is empty.
    if rustix::fs::fstatfs(file).ok()?.f_type == OVERLAYFS_MAGIC {
        return None;
    }
    let pages = match sys::cached_pages(file) {
        // mincore answers that all is there when it is asked about another user's file.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            let user = rustix::process::geteuid();
            if !user.is_root() && user.as_raw() != meta.uid() {
                return None;
            }
            let flags = sys::Map::new(file, meta.len()).and_then(|map| map.resident());
            flags.ok()?.iter().filter(|&&here| here).count() as u64
        }
        other => other.ok()?,
    };
    Some(pages * PAGE)
}

fn hash_file(path: &Path, buffer: &mut [u8], progress: &Progress) -> Result<Hashed> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = File::options().read(true).custom_flags(flags).open(path).at(path)?;
    let meta = file.metadata().at(path)?;
    let size = meta.len();
    // Before the reading makes everything resident.
    let resident = resident(&file, &meta);
    let (mut pages, mut total) = (Vec::with_capacity(size.div_ceil(PAGE) as usize), 0);
    loop {
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read(&mut buffer[filled..]).at(path)? {
                0 => break,
                count => filled += count,
            }
        }
        // The end of the last page is zeros in the cache.
        let end = filled.next_multiple_of(PAGE as usize);
        buffer[filled..end].fill(0);
        for page in buffer[..end].chunks_exact(PAGE as usize) {
            pages.push((!page.iter().all(|&byte| byte == 0)).then(|| key(page)));
        }
        total += filled as u64;
        progress.add(filled as u64, false);
        if filled < buffer.len() {
            break;
        }
    }
    progress.add(0, true);
    Ok(Hashed { pages, size: total, resident })
}

fn key_of(pages: &[Option<Key>]) -> Key {
    let joined: Vec<u8> = pages.iter().flat_map(|page| page.unwrap_or_default()).collect();
    key(&joined)
}

fn add(sets: &mut Sets, file: &Hashed) {
    let bytes = file.pages.len() as u64 * PAGE;
    sets.scan.files += 1;
    sets.scan.total_bytes += bytes;
    let resident = file.resident.unwrap_or(0);
    sets.scan.resident_bytes += resident;
    sets.scan.resident_unknown += u64::from(file.resident.is_none());
    if file.pages.is_empty() {
        return;
    }
    let whole = key(&[&key_of(&file.pages)[..], &file.size.to_le_bytes()].concat());
    match sets.files.get_mut(&whole) {
        // Files that small are kept in each image.
        _ if file.size <= INLINE_MAX => {}
        None => drop(sets.files.insert(whole, resident)),
        Some(seen) => {
            sets.scan.file.duplicate_bytes += bytes;
            sets.scan.resident_duplicate_bytes += resident.min(*seen);
            *seen = resident.max(*seen);
        }
    }
    for (pages, level, set) in
        [(16, &mut sets.scan.chunk_64k, &mut sets.chunks_64k), (4, &mut sets.scan.chunk_16k, &mut sets.chunks_16k)]
    {
        for chunk in file.pages.chunks(pages) {
            if !set.insert(key_of(chunk)) {
                level.duplicate_bytes += chunk.len() as u64 * PAGE;
            }
        }
    }
    for page in &file.pages {
        if page.is_none() {
            sets.scan.zero_bytes += PAGE;
        }
        if !sets.pages.insert(page.unwrap_or_default()) {
            sets.scan.page_4k.duplicate_bytes += PAGE;
        }
    }
}

/// Reads all regular files below `dirs` and counts what is there more than once. Links are not followed; a file with
/// several names counts once; other file systems below a directory are left alone.
///
/// # Errors
/// A directory of `dirs` that cannot be read. Single files that cannot be are counted in `unreadable`.
pub fn trees(dirs: &[PathBuf], progress: &Progress) -> Result<Scan> {
    let (mut list, mut seen, mut scan) = (Vec::new(), HashSet::new(), Scan::default());
    let mut total = 0;
    for dir in dirs {
        let top = fs::metadata(dir).at(dir)?;
        let mut tree = Tree { path: dir.clone(), ..Tree::default() };
        fs::read_dir(dir).at(dir)?;
        let mut todo = vec![dir.clone()];
        while let Some(path) = todo.pop() {
            let Ok(entries) = fs::read_dir(&path) else {
                scan.unreadable += 1;
                continue;
            };
            for entry in entries.flatten() {
                let path = entry.path();
                let Ok(stat) = rustix::fs::statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW) else {
                    scan.unreadable += 1;
                    continue;
                };
                match stat.st_mode & libc::S_IFMT {
                    libc::S_IFDIR if stat.st_dev == top.dev() => todo.push(path),
                    libc::S_IFREG if seen.insert((stat.st_dev, stat.st_ino)) => {
                        tree.files += 1;
                        tree.bytes += (stat.st_size as u64).next_multiple_of(PAGE);
                        total += stat.st_size as u64;
                        list.push(path);
                    }
                    _ => {}
                }
            }
        }
        scan.trees.push(tree);
    }
    progress.expect(total);
    let sets = Mutex::new(Sets { scan, ..Sets::default() });
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(list.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let mut buffer = vec![0; 1 << 20];
                while let Some(path) = list.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let hashed = hash_file(path, &mut buffer, progress);
                    let mut sets = sets.lock().expect("no panic while held");
                    match hashed {
                        Ok(hashed) => add(&mut sets, &hashed),
                        Err(_) => sets.scan.unreadable += 1,
                    }
                }
            });
        }
    });
    let mut scan = sets.into_inner().expect("no panic while held").scan;
    let total = scan.total_bytes;
    for level in [&mut scan.file, &mut scan.chunk_64k, &mut scan.chunk_16k, &mut scan.page_4k] {
        level.percent = (level.duplicate_bytes * 100 + total / 2).checked_div(total).unwrap_or(0) as u32;
    }
    Ok(scan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_count_what_is_there_twice() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..256 * 1024u32).flat_map(|i| i.wrapping_mul(2654435761).to_le_bytes()).collect();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::create_dir_all(&a).and_then(|()| fs::create_dir_all(&b)).unwrap();
        fs::write(a.join("same"), &bytes[..100_000]).unwrap();
        fs::write(b.join("other name"), &bytes[..100_000]).unwrap();
        // One byte changed: a page less, a 16 KiB chunk less, a 64 KiB chunk less, and no whole file.
        let mut changed = bytes[200_000..200_000 + 131_072].to_vec();
        fs::write(a.join("big"), &changed).unwrap();
        changed[5000] ^= 1;
        fs::write(b.join("big"), &changed).unwrap();
        fs::write(b.join("zeros"), vec![0; 8192]).unwrap();
        fs::hard_link(b.join("zeros"), b.join("zeros again")).unwrap();
        let scan = trees(&[a, b], &Progress::silent()).unwrap();
        assert_eq!((scan.files, scan.total_bytes), (5, 2 * 102_400 + 2 * 131_072 + 8192));
        assert_eq!(scan.file.duplicate_bytes, 102_400);
        assert_eq!(scan.chunk_64k.duplicate_bytes, 102_400 + 65_536);
        assert_eq!(scan.chunk_16k.duplicate_bytes, 102_400 + 131_072 - 16_384);
        assert_eq!(scan.page_4k.duplicate_bytes, 102_400 + 131_072 - 4096 + 4096, "and the second zero page");
        assert_eq!(scan.zero_bytes, 8192);
    }

    #[test]
    fn files_that_each_image_keeps_itself_are_not_shared() {
        let dir = tempfile::tempdir().unwrap();
        for (name, size) in [("a", 64), ("b", 64), ("c", 65), ("d", 65)] {
            fs::write(dir.path().join(name), vec![1; size]).unwrap();
        }
        let scan = trees(&[dir.path().into()], &Progress::silent()).unwrap();
        assert_eq!((scan.files, scan.file.duplicate_bytes, scan.page_4k.duplicate_bytes), (4, 4096, 2 * 4096));
        assert!(scan.resident_duplicate_bytes <= 4096);
    }
}
