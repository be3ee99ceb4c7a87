//! What sharing would save, before anything is built: by whole files, and by 64, 16 and 4 KiB pieces.
//!
//! Every byte is hashed once, in 4 KiB pages, and holes are passed over; the larger pieces and whole files are
//! hashed from their pages' hashes. Sizes are rounded to pages, as the page cache holds them. Whole files are what
//! `pagefold image` shares on any kernel; the smaller pieces show what ordinary reads cannot share, and `pagefold disk` can.

use super::plain_files::{CHUNK_PAGES, Key, Part, Whole, for_each, key, open, read_pages, walk};
use super::resident::{self, is_on_overlayfs};
use crate::error::{At, Result};
use crate::progress::Progress;
use crate::sys::PAGE;
use crate::tree::INLINE_MAX;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

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
    /// Of those, bytes that equal files hold again: saved immediately if these trees were mounted from a store.
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

/// Most keys of one set, 56 GiB of different pages: with one more its table would be twice as large.
const MOST_KEYS: usize = 14 << 20;

/// Pieces seen at one level. Beyond a number of them only every second key is kept, then every fourth, chosen by the key
/// itself; each kept key counts for as many pieces.
#[derive(Default)]
struct Keys {
    seen: HashSet<Key>,
    shift: u32,
    /// Whether a whole piece of zeros was seen: a file can have billions of this piece, and it is counted exactly.
    zeros: bool,
}

impl Keys {
    /// Adds a piece; returns how many earlier pieces it repeats. At most `most` keys are kept.
    fn add(&mut self, key: Key, most: usize) -> u64 {
        let kept =
            |key: &Key, shift| u64::from_le_bytes(key[..8].try_into().expect("8 bytes")).trailing_zeros() >= shift;
        if !kept(&key, self.shift) {
            return 0;
        }
        if self.seen.contains(&key) {
            return 1 << self.shift;
        }
        // Before the insertion that would double the table.
        while self.seen.len() >= most {
            self.shift += 1;
            self.seen.retain(|key| kept(key, self.shift));
        }
        if kept(&key, self.shift) {
            self.seen.insert(key);
        }
        0
    }

    /// Adds `count` pieces of zeros; returns how many of them were there before.
    fn add_zeros(&mut self, count: u64) -> u64 {
        let first = count > 0 && !self.zeros;
        self.zeros |= first;
        count - u64::from(first)
    }
}

#[derive(Default)]
struct Sets {
    pages: Keys,
    chunks_16k: Keys,
    chunks_64k: Keys,
    /// A file's key to the largest number of its bytes seen resident.
    files: HashMap<Key, u64>,
    scan: Scan,
}

impl Sets {
    /// Each level's pages to a piece, its keys and its sum.
    fn levels(&mut self) -> [(u64, &mut Keys, &mut Level); 3] {
        let Self { pages, chunks_16k, chunks_64k, scan, .. } = self;
        [
            (1, pages, &mut scan.page_4k),
            (4, chunks_16k, &mut scan.chunk_16k),
            (CHUNK_PAGES, chunks_64k, &mut scan.chunk_64k),
        ]
    }

    /// Counts the next pages of a file, `None` for a page of zeros; they begin where a largest piece does.
    fn add_pages(&mut self, pages: &[Option<Key>]) {
        let zeros = pages.iter().filter(|page| page.is_none()).count() as u64;
        self.count(pages.len() as u64, zeros);
        for (size, keys, level) in self.levels() {
            for piece in pages.chunks(size as usize) {
                let before = if piece.len() as u64 == size && piece.iter().all(Option::is_none) {
                    keys.add_zeros(1)
                } else {
                    keys.add(key_of(piece), MOST_KEYS)
                };
                level.duplicate_bytes = level.duplicate_bytes.saturating_add(before * piece.len() as u64 * PAGE);
            }
        }
    }

    /// Counts the next pages of a file, all of them zeros.
    fn add_zeros(&mut self, pages: u64) {
        let rest = pages % CHUNK_PAGES;
        let whole = pages - rest;
        self.count(whole, whole);
        for (size, keys, level) in self.levels() {
            let before = keys.add_zeros(whole / size);
            level.duplicate_bytes = level.duplicate_bytes.saturating_add(before * size * PAGE);
        }
        self.add_pages(&vec![None; rest as usize]);
    }

    fn count(&mut self, pages: u64, zeros: u64) {
        self.scan.total_bytes = self.scan.total_bytes.saturating_add(pages * PAGE);
        self.scan.zero_bytes = self.scan.zero_bytes.saturating_add(zeros * PAGE);
    }

    /// Counts a file that was read to its end.
    fn add_file(&mut self, file: Whole, size: u64, resident: Option<u64>) {
        self.scan.files += 1;
        self.scan.resident_unknown += u64::from(resident.is_none());
        let resident = resident.unwrap_or(0);
        self.scan.resident_bytes += resident;
        // Files that small are kept in each image.
        if size <= INLINE_MAX {
            return;
        }
        let bytes = file.pages * PAGE;
        match self.files.entry(file.finish(size)) {
            Entry::Vacant(new) => drop(new.insert(resident)),
            Entry::Occupied(mut seen) => {
                self.scan.file.duplicate_bytes = self.scan.file.duplicate_bytes.saturating_add(bytes);
                self.scan.resident_duplicate_bytes += resident.min(*seen.get());
                let most = resident.max(*seen.get());
                seen.insert(most);
            }
        }
    }
}

fn read_file(path: &Path, buffer: &mut [u8], sets: &Mutex<Sets>, progress: &Progress) -> Result<()> {
    let file = open(path).at(path)?;
    let meta = file.metadata().at(path)?;
    // Asked before the reading makes everything resident. Several files on overlayfs may show one memory.
    let resident = if is_on_overlayfs(&file).at(path)? { None } else { resident::bytes(&file, &meta) };
    let mut whole = Whole::default();
    let size = read_pages(&file, meta.len(), buffer, |part, bytes| {
        whole.add(&part);
        let mut sets = sets.lock().expect("no panic while held");
        match part {
            Part::Hole(pages) => sets.add_zeros(pages),
            Part::Pages(pages) => sets.add_pages(pages),
        }
        drop(sets);
        progress.add(bytes, false);
    })
    .at(path)?;
    progress.add(0, true);
    sets.lock().expect("no panic while held").add_file(whole, size, resident);
    Ok(())
}

/// The key of a piece, from its pages' keys.
fn key_of(pages: &[Option<Key>]) -> Key {
    let joined: Vec<u8> = pages.iter().flat_map(|page| page.unwrap_or_default()).collect();
    key(&joined)
}

/// Reads all regular files below `dirs` and counts what is there more than once. Links are not followed; a file with
/// several names counts once; other file systems below a directory are left alone. Memory does not grow with the files:
/// beyond 56 GiB of different pages the figures of the pieces are estimates.
///
/// # Errors
/// A directory of `dirs` that cannot be read. Single files that cannot be are counted in `unreadable`, and their pieces as
/// far as they were read.
pub fn trees(dirs: &[PathBuf], progress: &Progress) -> Result<Scan> {
    let (mut list, mut seen, mut total) = (Vec::new(), HashSet::new(), 0u64);
    let tree = |path: &PathBuf| Tree { path: path.clone(), ..Tree::default() };
    let mut scan = Scan { trees: dirs.iter().map(tree).collect(), ..Scan::default() };
    scan.unreadable = walk(dirs, |file| {
        if seen.insert(file.inode) {
            let tree = &mut scan.trees[file.dir];
            tree.files += 1;
            tree.bytes = tree.bytes.saturating_add(file.size.next_multiple_of(PAGE));
            total = total.saturating_add(file.size);
            list.push(file.path);
        }
    })?;
    progress.expect(total);
    let sets = Mutex::new(Sets { scan, ..Sets::default() });
    for_each(&list, |path, buffer| {
        if read_file(path, buffer, &sets, progress).is_err() {
            sets.lock().expect("no panic while held").scan.unreadable += 1;
        }
    });
    let mut scan = sets.into_inner().expect("no panic while held").scan;
    let total = u128::from(scan.total_bytes);
    for level in [&mut scan.file, &mut scan.chunk_64k, &mut scan.chunk_16k, &mut scan.page_4k] {
        level.percent = (u128::from(level.duplicate_bytes) * 100 + total / 2).checked_div(total).unwrap_or(0) as u32;
    }
    Ok(scan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;

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

    #[test]
    fn a_large_sparse_file_takes_no_memory_and_equals_its_copy() {
        let dir = tempfile::tempdir().unwrap();
        let data: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2654435761) >> 24) as u8).collect();
        let write = |name: &str, size: u64, at: u64| {
            let file = File::create(dir.path().join(name)).unwrap();
            if let Err(error) = file.set_len(size) {
                println!("SKIPPED: no file of {size} bytes here: {error}");
                return false;
            }
            file.write_all_at(&data, at).unwrap();
            true
        };
        // 8 TiB, as lastlog(8) may seem to have.
        let size = 1 << 43;
        if !write("a", size, (1 << 42) + 5) {
            return;
        }
        let scan = trees(&[dir.path().into()], &Progress::silent()).unwrap();
        // From five bytes into a page the data reaches into 25 of them.
        let zeros = size - 25 * PAGE;
        assert_eq!((scan.files, scan.total_bytes, scan.zero_bytes, scan.unreadable), (1, size, zeros, 0));
        assert_eq!(scan.page_4k, Level { duplicate_bytes: zeros - PAGE, percent: 100 });
        assert_eq!(scan.chunk_64k.duplicate_bytes, size - 3 * 65_536, "two pieces with data, and the first of zeros");
        // The same again with the zeros around its data stored; and one byte longer, which is another file.
        write("b", size, (1 << 42) + 5);
        let b = File::options().write(true).open(dir.path().join("b")).unwrap();
        b.write_all_at(&[0; 200_000], (1 << 42) - 200_000).unwrap();
        write("c", size + 1, (1 << 42) + 5);
        let scan = trees(&[dir.path().into()], &Progress::silent()).unwrap();
        assert_eq!((scan.files, scan.file.duplicate_bytes, scan.total_bytes), (3, size, 3 * size + PAGE));
    }

    #[test]
    fn a_sample_of_the_keys_tells_what_all_of_them_would() {
        let (mut keys, mut before) = (Keys::default(), 0);
        for round in 0..3 {
            for number in 0..100_000u32 {
                before += keys.add(key(&number.to_le_bytes()), 10_000);
                assert!(keys.seen.len() <= 10_000);
            }
            let exact = round * 100_000;
            assert!(before.abs_diff(exact) <= exact / 20, "{before} of {exact}");
        }
        assert_eq!((keys.add_zeros(0), keys.add_zeros(3), keys.add_zeros(2)), (0, 2, 2));
    }
}
