//! Fingerprint files: what each block of an image contains, kept across restarts.
//!
//! With them a block is shared without reading the disk if another image has loaded its content. A file is used only
//! while the image is exactly the version it was made from (size, mtime, ctime, file system, inode). Every section
//! carries a checksum keyed with the directory's secret. A file that does not fit is reported, dropped and learnt again.
//!
//! The host commits an image's times later than its data, so after a power cut new data may carry old times. The file
//! is therefore removed, durably, before the cache's first change of the image, and made again from durable data. It is
//! named after the image's inode, because an image may have several names and be renamed.
//!
//! # Format, version 1 (all numbers little endian)
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PFDISKFP` |
//! | 8..12 | version, 1 |
//! | 12..16 | block size, 4096 |
//! | 16..24 | size of the image |
//! | 24..48 | mtime: seconds (8), nanoseconds (4); ctime: the same |
//! | 48..64 | device (8), inode (8) |
//! | 64..72 | number of sections |
//! | 72..88 | checksum of bytes 0..72 |
//! | then per section | chunk number (8), 256 fingerprints of 16 bytes (0 unknown, 1 zeros), checksum (16) |
//!
//! Sections ascend by chunk number. A checksum is keyed BLAKE3 over the bytes before it (in a section: since its
//! start), cut to 16 bytes.

use crate::file::Stamp;
use crate::fingerprint::Fingerprint;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS};
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"PFDISKFP";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 88;
const SUM_BYTES: usize = 16;
const SECTION_BYTES: usize = 8 + CHUNK_BLOCKS * 16 + SUM_BYTES;

/// Why a fingerprint file cannot be used. The cache then learns the fingerprints again.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// Not a fingerprint file, or of a version this program does not know.
    #[error("it is not a fingerprint file of version 1 for 4096-byte blocks")]
    Foreign,
    /// A checksum or a count does not fit.
    #[error("it is damaged at byte {0}")]
    Damaged(usize),
    /// The image is another version than the one the file was made from.
    #[error("the image has changed since it was made")]
    Stale,
}

/// The known fingerprints of an image's blocks.
#[derive(Debug, Default, PartialEq)]
pub struct BlockFingerprints {
    chunks: BTreeMap<u64, Box<[Fingerprint; CHUNK_BLOCKS]>>,
    /// What happened to the file, for the status.
    pub(crate) outcome: String,
}

impl BlockFingerprints {
    /// The fingerprint of `block`.
    pub(crate) fn get(&self, block: u64) -> Fingerprint {
        let chunk = self.chunks.get(&(block / CHUNK_BLOCKS as u64));
        chunk.map_or(Fingerprint::UNKNOWN, |chunk| chunk[block as usize % CHUNK_BLOCKS])
    }

    /// Notes what the blocks from `first` on contain.
    pub(crate) fn learn(&mut self, first: u64, fingerprints: &[Fingerprint]) {
        for (n, &fingerprint) in fingerprints.iter().enumerate() {
            let block = first + n as u64;
            let chunk = self.chunks.entry(block / CHUNK_BLOCKS as u64);
            chunk.or_insert_with(|| Box::new([Fingerprint::UNKNOWN; CHUNK_BLOCKS]))[block as usize % CHUNK_BLOCKS] =
                fingerprint;
        }
    }

    /// Forgets blocks that changed.
    pub(crate) fn forget(&mut self, blocks: Range<u64>) {
        let chunk_blocks = CHUNK_BLOCKS as u64;
        let numbers = blocks.start / chunk_blocks..blocks.end.div_ceil(chunk_blocks);
        if blocks.start == 0 && blocks.end == u64::MAX {
            self.chunks.clear();
        }
        let mut empty = Vec::new();
        for (&number, chunk) in self.chunks.range_mut(numbers) {
            let first = number * chunk_blocks;
            let from = blocks.start.saturating_sub(first).min(chunk_blocks) as usize;
            let to = blocks.end.saturating_sub(first).min(chunk_blocks) as usize;
            chunk[from..to].fill(Fingerprint::UNKNOWN);
            if chunk.iter().all(|&fingerprint| fingerprint == Fingerprint::UNKNOWN) {
                empty.push(number);
            }
        }
        for number in empty {
            self.chunks.remove(&number);
        }
    }

    /// Bytes of memory that they take.
    pub(crate) fn memory_bytes(&self) -> usize {
        // The map's nodes are two thirds full: 32 bytes for number, pointer and the unused part.
        self.chunks.len() * (size_of::<[Fingerprint; CHUNK_BLOCKS]>() + 32)
    }

    /// How many blocks are known.
    pub fn block_count(&self) -> usize {
        self.chunks.values().flat_map(|chunk| chunk.iter()).filter(|&&f| f != Fingerprint::UNKNOWN).count()
    }

    /// Encodes the file for the image version `stamp`.
    pub fn encode(&self, stamp: &Stamp, key: &[u8; 32]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.chunks.len() * SECTION_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
        out.extend_from_slice(&encode_stamp(stamp));
        out.extend_from_slice(&(self.chunks.len() as u64).to_le_bytes());
        out.extend_from_slice(&checksum(&out, key));
        for (number, chunk) in &self.chunks {
            let start = out.len();
            out.extend_from_slice(&number.to_le_bytes());
            for fingerprint in chunk.iter() {
                out.extend_from_slice(&fingerprint.0.to_le_bytes());
            }
            let sum = checksum(&out[start..], key);
            out.extend_from_slice(&sum);
        }
        out
    }

    /// Decodes a file, for an image of version `stamp`.
    ///
    /// # Errors
    /// [`Rejected`]; nothing of such a file is used.
    pub fn decode(bytes: &[u8], stamp: &Stamp, key: &[u8; 32]) -> Result<Self, Rejected> {
        let head = bytes.get(..HEAD_BYTES).ok_or(Rejected::Foreign)?;
        let fixed = [&MAGIC[..], &VERSION.to_le_bytes(), &(BLOCK_BYTES as u32).to_le_bytes()].concat();
        if head[..16] != fixed {
            return Err(Rejected::Foreign);
        }
        if head[72..] != checksum(&head[..72], key) {
            return Err(Rejected::Damaged(72));
        }
        if head[16..64] != encode_stamp(stamp) {
            return Err(Rejected::Stale);
        }
        let count = u64::from_le_bytes(head[64..72].try_into().expect("eight bytes"));
        let sections = &bytes[HEAD_BYTES..];
        let expected = usize::try_from(count).ok().and_then(|count| count.checked_mul(SECTION_BYTES));
        if expected != Some(sections.len()) {
            return Err(Rejected::Damaged(64));
        }
        let mut known = Self::default();
        let mut number_before = None;
        for (n, section) in sections.chunks_exact(SECTION_BYTES).enumerate() {
            let damaged = Rejected::Damaged(HEAD_BYTES + n * SECTION_BYTES);
            let (content, sum) = section.split_at(SECTION_BYTES - SUM_BYTES);
            let number = u64::from_le_bytes(content[..8].try_into().expect("eight bytes"));
            let inside = number < stamp.size.div_ceil((CHUNK_BLOCKS * BLOCK_BYTES) as u64);
            if sum != checksum(content, key) || number_before >= Some(number) || !inside {
                return Err(damaged);
            }
            number_before = Some(number);
            let mut chunk = Box::new([Fingerprint::UNKNOWN; CHUNK_BLOCKS]);
            for (fingerprint, bytes) in chunk.iter_mut().zip(content[8..].chunks_exact(16)) {
                *fingerprint = Fingerprint(u128::from_le_bytes(bytes.try_into().expect("sixteen bytes")));
            }
            known.chunks.insert(number, chunk);
        }
        Ok(known)
    }
}

fn encode_stamp(stamp: &Stamp) -> [u8; 48] {
    let mut out = Vec::with_capacity(48);
    out.extend_from_slice(&stamp.size.to_le_bytes());
    for (seconds, nanoseconds) in [stamp.mtime, stamp.ctime] {
        out.extend_from_slice(&seconds.to_le_bytes());
        out.extend_from_slice(&nanoseconds.to_le_bytes());
    }
    out.extend_from_slice(&stamp.dev.to_le_bytes());
    out.extend_from_slice(&stamp.ino.to_le_bytes());
    out.try_into().expect("six numbers of 48 bytes")
}

fn checksum(bytes: &[u8], key: &[u8; 32]) -> [u8; SUM_BYTES] {
    // A key of its own, because the blocks' fingerprints use the directory's key.
    let key = blake3::derive_key("pagefold disk fingerprint file checksum v1", key);
    blake3::keyed_hash(&key, bytes).as_bytes()[..SUM_BYTES].try_into().expect("a hash has 32 bytes")
}

/// A directory with fingerprint files and their key.
pub struct FingerprintDir {
    path: PathBuf,
    key: [u8; 32],
}

impl FingerprintDir {
    /// Opens `path`. Makes it and its key if they are missing, but no directory above it, so that a typing error makes none.
    ///
    /// # Errors
    /// The directory or the key cannot be made or read.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        pagefold_os::private_dir::make_last(path, 0o700).map_err(|error| {
            std::io::Error::new(error.kind(), format!("{error}; name a directory, or where one can be made"))
        })?;
        let key_path = path.join("key");
        let key = match std::fs::read(&key_path) {
            Ok(bytes) => bytes.try_into().ok(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let key = match key {
            Some(key) => key,
            None => {
                // Missing, or of a wrong length. Files made with the old key are rejected as damaged.
                let key = pagefold_os::random::bytes::<32>()?;
                let new = path.join("key.new");
                let mut file =
                    std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
                file.write_all(&key)?;
                file.sync_all()?;
                std::fs::rename(new, key_path)?;
                key
            }
        };
        Ok(Self { path: path.to_owned(), key })
    }

    /// The key of the blocks' fingerprints.
    pub fn key(&self) -> [u8; 32] {
        self.key
    }

    /// The path of the file for the image with inode number `ino`.
    pub(crate) fn file_path(&self, ino: u64) -> PathBuf {
        self.path.join(format!("{ino:016x}.fp"))
    }

    /// Loads the fingerprints of an image of version `stamp`. The second value says why an existing file
    /// cannot be used.
    pub fn load(&self, stamp: &Stamp) -> (BlockFingerprints, Option<String>) {
        let empty = |outcome: &str| BlockFingerprints { outcome: outcome.to_owned(), ..BlockFingerprints::default() };
        match std::fs::read(self.file_path(stamp.ino)) {
            Ok(bytes) => match BlockFingerprints::decode(&bytes, stamp, &self.key) {
                Ok(mut known) => {
                    known.outcome = format!("{} blocks known", known.block_count());
                    (known, None)
                }
                Err(why) => (empty(&format!("rebuilding: {why}")), Some(why.to_string())),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (empty("learning"), None),
            Err(error) => (empty(&format!("rebuilding: {error}")), Some(error.to_string())),
        }
    }

    /// Writes the bytes of [`BlockFingerprints::encode`] to a new file, and returns its path. The caller renames it to
    /// [`FingerprintDir::file_path`] to make it count.
    ///
    /// # Errors
    /// The directory is full or read-only; an existing file is untouched.
    pub(crate) fn write_new(&self, ino: u64, bytes: &[u8]) -> std::io::Result<PathBuf> {
        use std::os::unix::fs::OpenOptionsExt;
        let new = self.file_path(ino).with_extension("new");
        let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(new)
    }
}

/// Removes an image's file, durably.
pub(crate) fn remove(file: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Synced even if the file was missing, because an earlier removal of it, or of its directory, may not be durable.
    for directory in file.ancestors().skip(1) {
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        match std::fs::File::open(directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            directory => return directory?.sync_all(),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 32] = [7; 32];

    fn sample() -> (BlockFingerprints, Stamp) {
        let mut known = BlockFingerprints::default();
        known.learn(3, &[Fingerprint(99), Fingerprint::ZERO_BLOCK]);
        known.learn(1000, &[Fingerprint(u128::MAX)]);
        let stamp = Stamp { size: 5 << 20, mtime: (5, 6), ctime: (7, 8), dev: 9, ino: 10 };
        (known, stamp)
    }

    #[test]
    fn encoded_fingerprints_decode_to_the_same() {
        let (known, stamp) = sample();
        let back = BlockFingerprints::decode(&known.encode(&stamp, &KEY), &stamp, &KEY).unwrap();
        assert_eq!(back, known);
        assert_eq!(back.get(3), Fingerprint(99));
        assert_eq!(back.get(5), Fingerprint::UNKNOWN);
        assert_eq!(back.block_count(), 3);
    }

    #[test]
    fn another_version_of_the_image_makes_it_stale() {
        let (known, stamp) = sample();
        let bytes = known.encode(&stamp, &KEY);
        let others = [
            Stamp { size: stamp.size + 1, ..stamp },
            Stamp { mtime: (5, 7), ..stamp },
            Stamp { ctime: (6, 8), ..stamp },
            Stamp { dev: 1, ..stamp },
            Stamp { ino: 1, ..stamp },
        ];
        for other in others {
            assert_eq!(BlockFingerprints::decode(&bytes, &other, &KEY), Err(Rejected::Stale), "{other:?}");
        }
    }

    #[test]
    fn every_damaged_byte_and_every_cut_is_found() {
        let (known, stamp) = sample();
        let bytes = known.encode(&stamp, &KEY);
        for at in (0..bytes.len()).step_by(7).chain(0..HEAD_BYTES) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(BlockFingerprints::decode(&damaged, &stamp, &KEY).is_err(), "byte {at} went unnoticed");
            assert!(BlockFingerprints::decode(&bytes[..at], &stamp, &KEY).is_err(), "a cut at {at} went unnoticed");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(BlockFingerprints::decode(&longer, &stamp, &KEY).is_err());
        assert!(BlockFingerprints::decode(&bytes, &stamp, &[8; 32]).is_err(), "another key");
    }

    #[test]
    fn forgetting_is_exact() {
        let (mut known, _) = sample();
        known.forget(4..1000);
        assert_eq!((known.get(3), known.get(4)), (Fingerprint(99), Fingerprint::UNKNOWN));
        assert_eq!(known.get(1000), Fingerprint(u128::MAX));
        known.forget(1000..u64::MAX);
        assert_eq!(known.block_count(), 1);
        known.forget(0..u64::MAX);
        assert_eq!(known.block_count(), 0);
    }

    #[test]
    fn a_typing_error_makes_no_directories() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        for name in ["none/fp", "file", "file/fp"] {
            let error = FingerprintDir::open(&dir.path().join(name)).map(drop).unwrap_err().to_string();
            assert!(error.ends_with("; name a directory, or where one can be made"), "{error}");
        }
        assert!(!dir.path().join("none").exists());
    }

    #[test]
    fn a_directory_keeps_its_key_and_replaces_a_bad_one() {
        let dir = tempfile::tempdir().unwrap();
        let first = FingerprintDir::open(&dir.path().join("fp")).unwrap();
        let (known, stamp) = sample();
        let new = first.write_new(stamp.ino, &known.encode(&stamp, &first.key())).unwrap();
        std::fs::rename(new, first.file_path(stamp.ino)).unwrap();
        let second = FingerprintDir::open(&dir.path().join("fp")).unwrap();
        assert_eq!(first.key(), second.key());
        assert_eq!(second.load(&stamp).0.block_count(), 3);
        std::fs::write(dir.path().join("fp/key"), b"short").unwrap();
        let third = FingerprintDir::open(&dir.path().join("fp")).unwrap();
        assert_ne!(first.key(), third.key());
        assert!(third.load(&stamp).1.is_some(), "a file made with the old key no longer fits");
        let other = Stamp { ino: 11, ..stamp };
        assert_eq!(
            third.load(&other),
            (BlockFingerprints { outcome: "learning".into(), ..BlockFingerprints::default() }, None)
        );
    }
}
