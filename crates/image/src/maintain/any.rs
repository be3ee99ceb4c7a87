//! What plain directories and mounts of any kind hold in the page cache, and how much of it equal files hold twice.
//!
//! Two names may lead to one memory: hard links, binds, and files of an overlayfs: their pages belong to a file of one of
//! its layers. The kernel does not name that file. It does tell root the frame under each page, and a frame of the page
//! cache belongs to one place of one file. So files of one size are compared by the frame of their first resident page.
//! Frames move; they are looked at until two looks in a row are equal.
//!
//! Only files that are in memory, and have another file of the same size in other memory, are read. What the reading itself
//! brings into memory is evicted again.

use super::plain_files::{Key, Seen, Whole, for_each, open, read_pages, walk};
use super::resident::{self, Look, Runs};
use crate::error::Result;
use crate::progress::Progress;
use crate::sys::PAGE;
use crate::tree::INLINE_MAX;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;

/// What directories hold in memory. Bytes are whole pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Held {
    /// Regular files (inodes).
    pub files: u64,
    /// Their bytes.
    pub total_bytes: u64,
    /// Bytes of them in the page cache, each page once however many names and mounts lead to it.
    pub resident_bytes: u64,
    /// Of those, bytes that equal files hold again: one copy of each would do.
    pub duplicate_bytes: u64,
    /// Per directory.
    pub trees: Vec<HeldTree>,
    /// Files and directories that could not be read.
    pub unreadable: u64,
    /// Files of which the kernel does not say what is in memory: those of other users.
    pub resident_unknown: u64,
    /// Resident files on overlayfs of which this user may not know which memory they show; each was counted as its own.
    pub memory_unknown: u64,
}

/// What one directory holds in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct HeldTree {
    /// As given.
    pub path: PathBuf,
    /// Regular files in it.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of its files in the page cache.
    pub resident_bytes: u64,
    /// Of those, bytes of memory that another of the directories shows too.
    pub shared_bytes: u64,
    /// Of those, bytes that an equal file, in this directory or another, holds in other memory.
    pub duplicate_bytes: u64,
}

/// An inode that some of the directories show.
struct File {
    path: PathBuf,
    size: u64,
    dirs: BTreeSet<usize>,
}

/// Files that show the same memory.
struct Memory {
    /// The file by which it was found first.
    file: usize,
    dirs: BTreeSet<usize>,
    runs: Runs,
}

/// How often frames are looked at. The kernel moves pages to make room (compaction), rarely twice.
const LOOKS: u32 = 8;

/// Looks at all regular files below `dirs`. Links are not followed; a file with several names counts once; other file
/// systems below a directory are left alone.
///
/// # Errors
/// A directory of `dirs` that cannot be read. Single files that cannot be are counted in `unreadable`.
pub fn held(dirs: &[PathBuf], progress: &Progress) -> Result<Held> {
    let tree = |path: &PathBuf| HeldTree { path: path.clone(), ..HeldTree::default() };
    let mut held = Held { trees: dirs.iter().map(tree).collect(), ..Held::default() };
    let files = list(dirs, &mut held)?;
    let groups = by_size(&files, &mut held);
    progress.expect(groups.iter().filter(|group| group.len() > 1).map(|group| bytes_of(&files, group)).sum());
    let held = Mutex::new(held);
    for_each(&groups, |group, buffer| count_group(&files, group, buffer, &held, progress));
    Ok(held.into_inner().expect("no panic while held"))
}

/// The inodes below `dirs`.
fn list(dirs: &[PathBuf], held: &mut Held) -> Result<Vec<File>> {
    let (mut files, mut known) = (Vec::<File>::new(), HashMap::new());
    held.unreadable = walk(dirs, |Seen { dir, path, inode, size }| {
        let number = *known.entry(inode).or_insert_with(|| {
            files.push(File { path, size, dirs: BTreeSet::new() });
            files.len() - 1
        });
        if files[number].dirs.insert(dir) {
            held.trees[dir].files += 1;
            held.trees[dir].bytes += size.next_multiple_of(PAGE);
        }
    })?;
    held.files = files.len() as u64;
    held.total_bytes = files.iter().map(|file| file.size.next_multiple_of(PAGE)).sum();
    Ok(files)
}

fn bytes_of(files: &[File], group: &[usize]) -> u64 {
    group.iter().map(|&file| files[file].size).sum()
}

/// The files with resident pages, those of one size together.
fn by_size(files: &[File], held: &mut Held) -> Vec<Vec<usize>> {
    let mut groups = HashMap::<u64, Vec<usize>>::new();
    for (number, file) in files.iter().enumerate() {
        match open(&file.path).and_then(|file| Ok(resident::bytes(&file, &file.metadata()?))) {
            Ok(Some(0)) => {}
            Ok(Some(_)) => groups.entry(file.size).or_default().push(number),
            Ok(None) => held.resident_unknown += 1,
            Err(_) => held.unreadable += 1,
        }
    }
    groups.into_values().collect()
}

/// Counts the files of `group`, which all have the same size.
fn count_group(files: &[File], group: &[usize], buffer: &mut [u8], held: &Mutex<Held>, progress: &Progress) {
    let (memories, mut unreadable, unknown) = memories(files, group);
    let (mut alone, mut equal) = (Vec::new(), HashMap::<Key, Vec<Memory>>::new());
    // Each image keeps the smallest files itself.
    if memories.len() == 1 || files[group[0]].size <= INLINE_MAX {
        alone = memories;
    } else {
        for memory in memories {
            match read_restoring(&files[memory.file], &memory.runs, buffer) {
                Ok(key) => equal.entry(key).or_default().push(memory),
                Err(_) => {
                    unreadable += 1;
                    alone.push(memory);
                }
            }
        }
    }
    group.iter().for_each(|&file| progress.add(files[file].size, true));
    let mut held = held.lock().expect("no panic while held");
    held.unreadable += unreadable;
    held.memory_unknown += unknown;
    alone.chunks(1).chain(equal.values().map(Vec::as_slice)).for_each(|memories| count_equal(memories, &mut held));
}

/// The different memories that the files of `group` show, how many files could not be looked at, and of how many this user
/// may not know which memory they show.
fn memories(files: &[File], group: &[usize]) -> (Vec<Memory>, u64, u64) {
    let look =
        |&number: &usize| open(&files[number].path).and_then(|file| resident::look(&file, files[number].size)).ok();
    let mut looks: Vec<Option<Look>> = group.iter().map(look).collect();
    for _ in 1..if group.len() > 1 { LOOKS } else { 1 } {
        let before = std::mem::replace(&mut looks, group.iter().map(look).collect());
        let frames = |looks: &[Option<Look>]| looks.iter().map(|look| look.as_ref()?.frame).collect::<Vec<_>>();
        if frames(&before) == frames(&looks) {
            break;
        }
    }
    let (mut memories, mut of_frame) = (Vec::<Memory>::new(), HashMap::new());
    let (mut unreadable, mut unknown) = (0, 0);
    for (&number, look) in group.iter().zip(looks) {
        let Some(Look { runs, frame, borrowed }) = look else {
            unreadable += 1;
            continue;
        };
        let dirs = &files[number].dirs;
        match frame.and_then(|frame| of_frame.insert(frame, memories.len()).map(|at| (frame, at))) {
            Some((frame, at)) => {
                of_frame.insert(frame, at);
                memories[at].dirs.extend(dirs);
            }
            None => {
                unknown += u64::from(borrowed && frame.is_none() && !runs.is_empty() && group.len() > 1);
                memories.push(Memory { file: number, dirs: dirs.clone(), runs });
            }
        }
    }
    (memories, unreadable, unknown)
}

/// Reads a file, and evicts what was not in `resident` before. A program that reads the same pages at this moment finds them
/// evicted too, and reads them again.
fn read_restoring(file: &File, resident: &Runs, buffer: &mut [u8]) -> io::Result<Key> {
    let opened = open(&file.path)?;
    let mut whole = Whole::default();
    let size = read_pages(&opened, file.size, buffer, |part, _| whole.add(&part));
    resident::evict_all_but(&opened, file.size, resident);
    Ok(whole.finish(size?))
}

/// Counts memories with equal content.
fn count_equal(memories: &[Memory], held: &mut Held) {
    let runs: Vec<&Runs> = memories.iter().map(|memory| &memory.runs).collect();
    let (twice, distinct) = resident::overlap(&runs);
    let all: u64 = runs.iter().copied().map(resident::pages).sum();
    held.resident_bytes += all * PAGE;
    held.duplicate_bytes += (all - distinct) * PAGE;
    for (memory, twice) in memories.iter().zip(twice) {
        let bytes = resident::pages(&memory.runs) * PAGE;
        for &dir in &memory.dirs {
            let tree = &mut held.trees[dir];
            tree.resident_bytes += bytes;
            tree.shared_bytes += if memory.dirs.len() > 1 { bytes } else { 0 };
            tree.duplicate_bytes += twice * PAGE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::MappedFile;
    use rustix::fs::Advice;
    use std::fs;
    use std::path::Path;

    const SIZE: u64 = 4_000_000;

    /// Which pages of a file are in memory.
    fn flags(path: &Path) -> Vec<bool> {
        let file = fs::File::open(path).unwrap();
        MappedFile::new(&file, SIZE).unwrap().resident().unwrap()
    }

    /// Evicts a file but for these pages.
    fn keep(path: &Path, pages: std::ops::Range<u64>) {
        let file = fs::File::open(path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
        let mut buffer = vec![0; ((pages.end - pages.start) * PAGE) as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut buffer, pages.start * PAGE).unwrap();
    }

    #[test]
    fn what_equal_files_hold_twice_is_counted_and_the_cache_stays_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
        for dir in [&one, &two] {
            fs::create_dir(dir).unwrap();
        }
        let bytes: Vec<u8> = (0..SIZE as u32 / 4).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        let (a, b, other) = (one.join("a"), two.join("b"), two.join("other"));
        fs::write(&a, &bytes).unwrap();
        fs::write(&b, &bytes).unwrap();
        fs::write(&other, vec![7; SIZE as usize]).unwrap();
        fs::hard_link(&a, one.join("again")).unwrap();
        fs::hard_link(&other, one.join("also")).unwrap();
        // Smaller ones are kept in each image.
        fs::write(one.join("tiny"), [1; 64]).unwrap();
        fs::write(two.join("tiny"), [1; 64]).unwrap();
        let files = [&a, &b, &other];
        let mut tries = 0;
        let (before, held) = loop {
            keep(&a, 0..500);
            keep(&b, 300..700);
            keep(&other, 0..100);
            let before = files.map(|file| flags(file));
            if before[0].iter().all(|resident| *resident) {
                println!("SKIPPED: this file system keeps all files in memory");
                return;
            }
            let held = held(&[one.clone(), two.clone()], &Progress::silent()).unwrap();
            let after = files.map(|file| flags(file));
            let changed = |was: bool| -> Vec<(usize, usize)> {
                let pages = (0..files.len()).flat_map(|file| (0..before[file].len()).map(move |page| (file, page)));
                pages.filter(|&(file, page)| before[file][page] == was && after[file][page] != was).collect()
            };
            assert_eq!(changed(false), [], "files and their pages that were brought into memory");
            // The kernel evicts pages when it likes (DAMON, memory pressure), but not each time.
            if changed(true).is_empty() {
                break (before, held);
            }
            tries += 1;
            assert!(tries < 5, "files and their pages that were evicted: {:?}", changed(true));
        };
        let count = |flags: &[bool]| flags.iter().filter(|resident| **resident).count() as u64 * PAGE;
        let both: Vec<bool> = before[0].iter().zip(&before[1]).map(|(a, b)| *a && *b).collect();
        assert!(count(&both) >= 200 * PAGE);
        assert_eq!((held.files, held.total_bytes), (5, 3 * SIZE.next_multiple_of(PAGE) + 2 * PAGE));
        let tiny = 2 * PAGE;
        assert_eq!(held.resident_bytes, before.iter().map(|flags| count(flags)).sum::<u64>() + tiny);
        assert_eq!(held.duplicate_bytes, count(&both));
        let of = |tree: usize| {
            let tree = &held.trees[tree];
            (tree.files, tree.resident_bytes, tree.shared_bytes, tree.duplicate_bytes)
        };
        let [a, b, other] = before.each_ref().map(|flags| count(flags));
        assert_eq!(of(0), (3, a + other + PAGE, other, count(&both)));
        assert_eq!(of(1), (3, b + other + PAGE, other, count(&both)));
        assert_eq!((held.unreadable, held.resident_unknown, held.memory_unknown), (0, 0, 0));
    }
}
