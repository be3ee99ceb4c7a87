//! The dry run: how much equal content a set of images holds, at which granularity, and where alignment prevents
//! sharing.
//!
//! Reads every image once and changes nothing. Compares content by a 64-bit hash with a random key, which is accurate
//! enough for an estimate.

use crate::config::random_u64;
use crate::fingerprint::is_zero;
use crate::geometry::BLOCK_BYTES;
use pagefold_os::fill::fill;
use pagefold_os::read_once;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Granularities that are compared, in bytes.
pub const GRANULARITIES: [usize; 3] = [BLOCK_BYTES, 4 * BLOCK_BYTES, 16 * BLOCK_BYTES];
const READ_BYTES: usize = 1 << 20;
/// Finer than a page: shows what page sharing misses if file systems use smaller blocks.
const FINE_BYTES: usize = 1024;

/// How much is equal when compared in pieces of one size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Equal {
    /// Size of the pieces in bytes; 0 for whole files.
    pub granularity_bytes: u64,
    /// Bytes of all pieces that are not zeros only.
    pub total_bytes: u64,
    /// Bytes of the different ones among them.
    pub unique_bytes: u64,
    /// Bytes that one copy of each would save.
    pub saved_bytes: u64,
}

/// One image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScannedImage {
    /// Its path.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Pages with content.
    pub data_bytes: u64,
    /// Pages of zeros, holes included: they take no memory.
    pub zero_bytes: u64,
    /// Pages with a content that an earlier image, or an earlier page of this one, has too.
    pub repeated_bytes: u64,
}

/// A reason why equal content of an image cannot be shared, and what to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Warning {
    /// The image.
    pub path: PathBuf,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub cure: String,
}

/// What a scan found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Each image, in the order given.
    pub images: Vec<ScannedImage>,
    /// By granularity: 4, 16, 64 KiB, whole files (0), and 1 KiB where a warning says that pages miss equal content.
    pub equal: Vec<Equal>,
    /// Images that could share more.
    pub warnings: Vec<Warning>,
    /// Images that could not be read, and why.
    pub unreadable: Vec<(PathBuf, String)>,
}

/// Pieces of one size, over all images.
struct Pieces {
    bytes: usize,
    seen: HashSet<u64>,
    total: u64,
}

impl Pieces {
    fn new(bytes: usize) -> Self {
        Self { bytes, seen: HashSet::default(), total: 0 }
    }

    /// Notes all pieces of `data`; returns how many bytes were seen before.
    fn note(&mut self, data: &[u8], seed: u64) -> u64 {
        let mut repeated = 0;
        for piece in data.chunks(self.bytes).filter(|piece| !is_zero(piece)) {
            self.total += piece.len() as u64;
            if !self.seen.insert(xxhash_rust::xxh3::xxh3_64_with_seed(piece, seed)) {
                repeated += piece.len() as u64;
            }
        }
        repeated
    }

    fn result(&self, saved_bytes: u64) -> Equal {
        Equal {
            granularity_bytes: self.bytes as u64,
            total_bytes: self.total,
            unique_bytes: self.total - saved_bytes,
            saved_bytes,
        }
    }
}

/// Scans images; a directory stands for the files in it. `progress` gets the bytes scanned so far, and all.
pub fn scan(paths: &[PathBuf], mut progress: impl FnMut(u64, u64)) -> Report {
    let seed = random_u64();
    let mut report = Report::default();
    let mut pieces = GRANULARITIES.map(Pieces::new);
    let mut saved = [0; GRANULARITIES.len()];
    let mut files: HashSet<u64> = HashSet::new();
    let mut whole = Equal::default();
    let paths = expand(paths, &mut report.unreadable);
    let all = paths.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
    let mut before = 0;
    for path in paths {
        let mut image = ScannedImage { path: path.clone(), ..ScannedImage::default() };
        let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(seed);
        let result = for_each_part(&path, |size, at, data| {
            image.size_bytes = size;
            hash.update(&at.to_le_bytes());
            hash.update(data);
            let zeros = data.chunks(BLOCK_BYTES).filter(|page| is_zero(page)).map(<[u8]>::len).sum::<usize>() as u64;
            image.data_bytes += data.len() as u64 - zeros;
            for (pieces, saved) in pieces.iter_mut().zip(&mut saved) {
                let repeated = pieces.note(data, seed);
                *saved += repeated;
                if pieces.bytes == BLOCK_BYTES {
                    image.repeated_bytes += repeated;
                }
            }
            progress(before + at + data.len() as u64, all);
        });
        match result {
            Ok(size) => {
                before += size;
                image.size_bytes = size;
                image.zero_bytes = size - image.data_bytes;
                hash.update(&size.to_le_bytes());
                whole.total_bytes += image.data_bytes;
                if !files.insert(hash.digest()) {
                    whole.saved_bytes += image.data_bytes;
                }
                report.warnings.extend(alignment_warnings(&path));
                report.images.push(image);
            }
            Err(error) => report.unreadable.push((path, error.to_string())),
        }
    }
    whole.unique_bytes = whole.total_bytes - whole.saved_bytes;
    report.equal.extend(pieces.iter().zip(saved).map(|(pieces, saved)| pieces.result(saved)));
    report.equal.push(whole);
    if !report.warnings.is_empty() {
        report.equal.push(scan_fine(&report.images, seed));
    }
    report
}

/// The files among `paths`, those of directories included, sorted within each. A file with several names is listed once,
/// and links in a directory are skipped, because a mount shows one image for the former and none for the latter.
fn expand(paths: &[PathBuf], unreadable: &mut Vec<(PathBuf, String)>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        match std::fs::read_dir(path) {
            Ok(entries) => {
                let entries = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
                let mut inside: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
                inside.sort();
                files.extend(inside);
            }
            Err(error) => unreadable.push((path.clone(), error.to_string())),
        }
    }
    let mut seen = HashSet::new();
    // A file without readable attributes stays in the list: opening it reports the error.
    files.retain(|path| path.metadata().map_or(true, |metadata| seen.insert((metadata.dev(), metadata.ino()))));
    files
}

/// Opens a file for reading. Does not wait for the writer of a pipe.
fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

fn scan_fine(images: &[ScannedImage], seed: u64) -> Equal {
    let mut fine = Pieces::new(FINE_BYTES);
    let mut saved = 0;
    for image in images {
        // The first pass read it without an error; if it no longer exists, the estimate is smaller.
        let _ = for_each_part(&image.path, |_, _, data| saved += fine.note(data, seed));
    }
    fine.result(saved)
}

/// Passes every part of a file that holds data to `visit`, with the file's size and the part's offset.
fn for_each_part(path: &Path, mut visit: impl FnMut(u64, u64, &[u8])) -> io::Result<u64> {
    let file = open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // For kernels from 6.3 on without `RWF_DONTCACHE` (see `read_once::read_at`): these pages are evicted before pages in
    // use.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::NoReuse);
    let size = metadata.len();
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    while at < size {
        match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            // Rounded down to a whole part, so that pieces of every size start where they would in a full read.
            Ok(data) => at = at.max(data / READ_BYTES as u64 * READ_BYTES as u64),
            Err(rustix::io::Errno::NXIO) => break,
            // The file system does not support it: everything counts as data.
            Err(_) => {}
        }
        // Up to the size read above, although the file may have grown since.
        let wanted = size.saturating_sub(at).min(READ_BYTES as u64) as usize;
        let count = fill(&mut buffer[..wanted], |rest, filled| read_once::read_at(&file, rest, at + filled as u64))?;
        if count == 0 {
            break;
        }
        visit(size, at, &buffer[..count]);
        at += count as u64;
    }
    Ok(size)
}

/// Finds reasons why pages of an image cannot equal those of other images.
fn alignment_warnings(path: &Path) -> Vec<Warning> {
    let Ok(file) = open(path) else { return Vec::new() };
    // A few small reads: the kernel need not read ahead.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    let mut head = vec![0; 64 << 10];
    let Ok(count) = read_once::read_at(&file, &mut head, 0) else { return Vec::new() };
    head.truncate(count);
    let read = |offset: u64, length: usize| {
        let mut bytes = vec![0; length];
        let filled = fill(&mut bytes, |rest, filled| read_once::read_at(&file, rest, offset + filled as u64)).ok()?;
        (filled == length).then_some(bytes)
    };
    let problems = problems(&head, read);
    problems.into_iter().map(|(problem, cure)| Warning { path: path.to_owned(), problem, cure }).collect()
}

/// The problems of an image that starts with `head`, each with its cure. `read` reads further bytes.
pub fn problems(head: &[u8], read: impl Fn(u64, usize) -> Option<Vec<u8>>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    if head.starts_with(b"QFI\xfb") {
        let bits = head.get(20..24).map_or(16, |bytes| crate::nbd::wire::number(bytes) as u32);
        if bits < 12 {
            let problem = format!("qcow2 with clusters of {} bytes: data is not aligned to pages", 1u64 << bits);
            found.push((problem, "qemu-img convert -O qcow2 -o cluster_size=64k OLD NEW".to_owned()));
        }
        // Partitions inside a qcow2 cannot be found without its tables; its clusters are aligned.
        return found;
    }
    for start in partition_starts(head, &read) {
        if start % BLOCK_BYTES as u64 != 0 {
            let problem = format!("a partition starts at byte {start}, inside a page: none of its pages match others");
            found.push((problem, "make partitions start at multiples of 1 MiB, as parted -a optimal does".to_owned()));
        }
        let Some(superblock) = start.checked_add(1024).and_then(|at| read(at, 64)) else { continue };
        let little = |at: usize, length: usize| {
            superblock[at..at + length].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte))
        };
        let block_bits = 10u32.saturating_add(little(24, 4).min(20) as u32);
        if little(56, 2) == 0xef53 && block_bits < 12 {
            let problem = format!(
                "ext4 with blocks of {} bytes: equal files start at different offsets within pages, and most equal \
                 content cannot be shared",
                1u64 << block_bits
            );
            found.push((
                problem,
                "make it with 4 KiB blocks: mke2fs -b 4096 (the default is 1 KiB below 512 MiB)".to_owned(),
            ));
        }
    }
    found
}

/// The partitions' offsets in bytes; 0 for an image that is one file system.
fn partition_starts(head: &[u8], read: &impl Fn(u64, usize) -> Option<Vec<u8>>) -> Vec<u64> {
    let little = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    let mut starts = vec![0];
    if head.get(510..512) != Some(&[0x55, 0xaa]) {
        return starts;
    }
    for entry in head[446..510].chunks_exact(16) {
        match entry[4] {
            0 => {}
            0xee => starts.extend(gpt_starts(head, read)),
            _ => starts.push(little(&entry[8..12]) * 512),
        }
    }
    starts
}

fn gpt_starts(head: &[u8], read: &impl Fn(u64, usize) -> Option<Vec<u8>>) -> Vec<u64> {
    let little = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    let Some(table) = head.get(512..1024).filter(|table| table.starts_with(b"EFI PART")) else { return Vec::new() };
    let (at, count, size) = (little(&table[72..80]), little(&table[80..84]), little(&table[84..88]));
    if !(128..=4096).contains(&size) || count > 1024 {
        return Vec::new();
    }
    let Some(entries) = at.checked_mul(512).and_then(|at| read(at, (count * size) as usize)) else { return Vec::new() };
    let used = entries.chunks_exact(size as usize).filter(|entry| entry[..16] != [0; 16]);
    used.filter_map(|entry| little(&entry[32..40]).checked_mul(512)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(n: u32) -> Vec<u8> {
        n.to_le_bytes().repeat(BLOCK_BYTES / 4)
    }

    #[test]
    fn equal_content_is_found_at_each_granularity() {
        let dir = tempfile::tempdir().unwrap();
        let a: Vec<u8> = (1..=32).flat_map(page).collect();
        // b: the first 16 pages as in a, the rest shifted by one page; then zeros. c: as a.
        let b: Vec<u8> = (1..=16).chain([99]).chain(17..=31).flat_map(page).chain([0; BLOCK_BYTES]).collect();
        std::fs::write(dir.path().join("a"), &a).unwrap();
        std::fs::write(dir.path().join("b"), &b).unwrap();
        std::fs::write(dir.path().join("c"), &a).unwrap();
        let mut read = (0, 0);
        let report = scan(&[dir.path().to_owned()], |done, all| read = (done, all));
        let bytes = (a.len() * 2 + b.len()) as u64;
        assert_eq!(read, (bytes, bytes));
        let pages: Vec<u64> = report.equal.iter().map(|e| e.saved_bytes / BLOCK_BYTES as u64).collect();
        assert_eq!(pages, [31 + 32, 16 + 32, 16 + 32, 32], "4, 16, 64 KiB, files");
        assert_eq!(report.images[1].repeated_bytes, 31 * BLOCK_BYTES as u64);
        assert_eq!(report.images[1].zero_bytes, BLOCK_BYTES as u64);
        assert_eq!((report.warnings.len(), report.unreadable.len()), (0, 0));
    }

    #[test]
    fn a_file_that_grows_is_read_up_to_the_size_it_had() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, vec![1; READ_BYTES + 100]).unwrap();
        let mut read = 0;
        let size = for_each_part(&path, |_, _, data| {
            read += data.len();
            std::fs::write(&path, vec![1; 3 * READ_BYTES]).unwrap();
        });
        assert_eq!((size.unwrap(), read), ((READ_BYTES + 100) as u64, READ_BYTES + 100));
    }

    #[test]
    fn small_file_system_blocks_and_unaligned_partitions_are_reported_with_their_cure() {
        let mut image = vec![0; 1 << 20];
        image[510..512].copy_from_slice(&[0x55, 0xaa]);
        image[446 + 4] = 0x83;
        image[446 + 8] = 63;
        let superblock = 63 * 512 + 1024;
        image[superblock + 56..superblock + 58].copy_from_slice(&[0x53, 0xef]);
        let read =
            |offset: u64, length: usize| image.get(offset as usize..offset as usize + length).map(<[u8]>::to_vec);
        let found = problems(&image[..65536], read);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].0.contains("32256") && found[1].0.contains("1024 bytes") && found[1].1.contains("-b 4096"));
        let qcow2 = [b"QFI\xfb".to_vec(), vec![0; 16], vec![0, 0, 0, 9]].concat();
        assert!(problems(&qcow2, |_, _| None)[0].0.contains("512 bytes"));
        assert!(problems(b"", |_, _| None).is_empty());
    }

    #[test]
    fn an_unreadable_file_is_reported_and_the_scan_continues() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), page(1)).unwrap();
        std::fs::write(dir.path().join("empty"), b"").unwrap();
        let paths = [dir.path().join("missing"), dir.path().join("a"), dir.path().join("empty"), "/dev/null".into()];
        let report = scan(&paths, |_, _| ());
        assert_eq!((report.images.len(), report.unreadable.len()), (2, 2));
        assert_eq!(report.images[1], ScannedImage { path: dir.path().join("empty"), ..ScannedImage::default() });
    }

    #[test]
    fn a_file_with_many_names_is_one_image_and_a_pipe_does_not_block_the_scan() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a"), page(1)).unwrap();
        std::fs::hard_link(at("a"), at("b")).unwrap();
        std::os::unix::fs::symlink("a", at("c")).unwrap();
        let outside = tempfile::NamedTempFile::new().unwrap();
        std::os::unix::fs::symlink(outside.path(), at("d")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::RUSR).unwrap();
        let (done, result) = std::sync::mpsc::channel();
        let paths = [dir.path().to_owned(), at("b"), at("pipe")];
        std::thread::spawn(move || done.send(scan(&paths, |_, _| ())));
        let report =
            result.recv_timeout(std::time::Duration::from_secs(120)).expect("the scan waits for a pipe's writer");
        assert_eq!(report.images.iter().map(|image| image.path.clone()).collect::<Vec<_>>(), [at("a")]);
        assert!(report.equal.iter().all(|equal| equal.saved_bytes == 0), "{:?}", report.equal);
        assert_eq!(report.unreadable, [(at("pipe"), "not a regular file".to_owned())]);
    }

    #[test]
    fn pages_that_the_kernel_had_cached_stay_cached() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("a");
        let file = File::create(&path).unwrap();
        // In small parts, or the kernel caches it in folios too large to be dropped in parts.
        (0..128).for_each(|n| file.write_all_at(&page(1).repeat(16), n << 16).unwrap());
        file.sync_all().unwrap();
        // How many bytes can be read without the disk.
        let cached = || {
            let (file, mut buffer, mut count) = (File::open(&path).unwrap(), vec![0; 64 << 10], 0);
            for at in (0..8 << 20).step_by(64 << 10) {
                let into = &mut [io::IoSliceMut::new(&mut buffer)];
                match rustix::io::preadv2(&file, into, at, rustix::io::ReadWriteFlags::NOWAIT) {
                    Ok(read) => count += read,
                    Err(rustix::io::Errno::AGAIN) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(count)
        };
        match cached() {
            Ok(before) => {
                scan(std::slice::from_ref(&path), |_, _| ());
                assert_eq!(cached(), Ok(before));
                assert!(before > 0);
            }
            Err(error) => println!("SKIPPED: the file system does not support RWF_NOWAIT: {error}"),
        }
    }
}
