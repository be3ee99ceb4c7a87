//! The backing file: cold contents, written in large batches.
//!
//! The file has no name, so the kernel frees it when the last process with its
//! descriptor ends; the keeper holds one. It is written and read with O_DIRECT
//! if the file system supports it, so that evicted data does not fill the page
//! cache. Space is allocated in zones of 1 MiB. A zone is written whole,
//! and freed when it holds no live payload.
//!
//! A payload read from the file is verified by its content's fingerprint like
//! any other, so the file needs no checksum.

use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a zone.
pub const ZONE_BYTES: usize = 1 << 20;
/// Unit of offset, length and address in direct I/O.
pub const BLOCK_BYTES: usize = 4096;
/// Most bytes that are read ahead while payloads are read in the order in which they lie.
const AHEAD_BYTES: usize = 128 << 10;

/// The tier's file operations; tests implement it with failures.
pub trait Backing: Send + Sync + std::fmt::Debug {
    /// Writes whole blocks at a block's offset.
    ///
    /// # Errors
    /// As pwrite(2). The tier does not refer to the range then.
    fn write(&self, offset: u64, blocks: &[u8]) -> io::Result<()>;

    /// Reads whole blocks from a block's offset.
    ///
    /// # Errors
    /// As pread(2), and `UnexpectedEof`.
    fn read(&self, offset: u64, blocks: &mut [u8]) -> io::Result<()>;

    /// Frees a range in the file system; may do nothing.
    fn discard(&self, offset: u64, len: u64);

    /// Most bytes of the file that may be used.
    fn bytes_max(&self) -> u64;

    /// Length of the file. A predecessor's limit may have been larger than `bytes_max`.
    fn bytes(&self) -> u64 {
        self.bytes_max()
    }

    /// The descriptor for a successor, if there is one.
    fn fd(&self) -> Option<RawFd>;
}

/// A file without a name.
#[derive(Debug)]
pub struct BackingFile {
    file: File,
    bytes_max: u64,
    direct: bool,
}

impl BackingFile {
    /// Creates a file in `directory`, of which at most `bytes_max` bytes are used.
    ///
    /// # Errors
    /// As open(2) with `O_TMPFILE`.
    pub fn create(directory: &Path, bytes_max: u64) -> io::Result<BackingFile> {
        let open = |flags| {
            let mut options = File::options();
            options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE | libc::O_EXCL | flags);
            options.open(directory)
        };
        match open(libc::O_DIRECT) {
            Ok(file) => Ok(BackingFile { file, bytes_max, direct: true }),
            // A file system without direct I/O: tmpfs of older kernels, some network file systems.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(BackingFile { file: open(0)?, bytes_max, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Adopts the file of a predecessor, by the descriptor that the keeper held.
    pub fn from_fd(fd: Fd, bytes_max: u64) -> BackingFile {
        let raw = fd.raw();
        std::mem::forget(fd);
        // SAFETY: `fd` owned the descriptor and was forgotten, so `file` is the only owner.
        let file = unsafe { File::from_raw_fd(raw) };
        // SAFETY: F_GETFL takes no pointer; the descriptor is `file`'s.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        BackingFile { file, bytes_max, direct: flags & libc::O_DIRECT != 0 }
    }

    /// Returns true if I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl Backing for BackingFile {
    fn write(&self, offset: u64, blocks: &[u8]) -> io::Result<()> {
        self.file.write_all_at(blocks, offset)
    }

    fn read(&self, offset: u64, blocks: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(blocks, offset)
    }

    fn discard(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: fallocate(2) takes no pointer; no live payload lies in the range.
        unsafe { libc::fallocate64(self.file.as_raw_fd(), mode, offset as i64, len as i64) };
    }

    fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    fn bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |file| file.len())
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }
}

/// A buffer aligned to blocks, for direct I/O.
#[derive(Debug)]
pub(crate) struct Blocks {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Blocks {
    pub(crate) fn new(len: usize) -> Blocks {
        let bytes = vec![0; len + BLOCK_BYTES];
        let start = bytes.as_ptr().align_offset(BLOCK_BYTES);
        Blocks { bytes, start, len }
    }

    pub(crate) fn get(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// What one thread has read from the file last. Writeback packs payloads in the order of their pages, so the next one is
/// often close behind: then more is read at a time, twice as much as before.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    blocks: Blocks,
    /// The part of the file that `blocks` holds.
    first: u64,
    len: usize,
    /// The file, and [`Disk::writes`] before it was read: later writes may have replaced it.
    from: (u64, u64),
}

impl ReadAhead {
    pub(crate) fn new() -> ReadAhead {
        ReadAhead { blocks: Blocks::new(AHEAD_BYTES), first: 0, len: 0, from: (0, 0) }
    }

    /// The payload at `offset`, if it was read already.
    fn held(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.first)?).ok()?;
        self.blocks.get()[..self.len].get(start..start.checked_add(len)?)
    }

    /// Bytes to read for a payload in the blocks of `needed` bytes from `first` on: whole blocks, within the zone.
    fn wanted(&self, first: u64, needed: usize) -> usize {
        let gap = first.checked_sub(self.first).map_or(u64::MAX, |distance| distance.saturating_sub(self.len as u64));
        let ahead = if self.len > 0 && gap <= AHEAD_BYTES as u64 / 4 { (2 * self.len).min(AHEAD_BYTES) } else { 0 };
        let zone = ZONE_BYTES as u64;
        ahead.min(((first / zone + 1) * zone - first) as usize).max(needed)
    }
}

#[derive(Debug, Default)]
struct Zones {
    /// Live payload bytes of each zone.
    live: Vec<u64>,
    free: Vec<u32>,
}

/// The file and the use of its zones.
#[derive(Debug)]
pub(crate) struct Disk {
    file: Box<dyn Backing>,
    /// Another number than that of any other file in this process: a thread may serve several.
    number: u64,
    /// The file's length at adoption, or its limit if that is larger.
    end: u64,
    zones: Mutex<Zones>,
    live: AtomicU64,
    /// Zones written. It grows before payloads of a zone can be found, so what was read at the same number is no older than
    /// they.
    writes: AtomicU64,
}

impl Disk {
    pub(crate) fn new(file: Box<dyn Backing>) -> Disk {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let end = file.bytes_max().max(file.bytes());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Disk { file, number, end, zones: Mutex::default(), live: AtomicU64::new(0), writes: AtomicU64::new(0) }
    }

    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.file.fd()
    }

    /// All payloads lie below this offset.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Live payload bytes.
    pub(crate) fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// Bytes of the file in use.
    pub(crate) fn held(&self) -> u64 {
        let zones = lock(&self.zones);
        ((zones.live.len() - zones.free.len()) * ZONE_BYTES) as u64
    }

    /// Writes one batch of packed payloads, padded to whole blocks. Returns its offset in the file.
    ///
    /// One byte of it counts as live, so that the zone is not freed before the caller has added its payloads with
    /// [`Disk::add_live`]. Then the caller removes that byte with [`Disk::remove_live`].
    pub(crate) fn write(&self, batch: &[u8]) -> io::Result<u64> {
        let zone = {
            let mut zones = lock(&self.zones);
            // The number of used zones counts, not their offsets: a predecessor with a larger limit may have left holes.
            let used = zones.live.len() - zones.free.len();
            if (used as u64 + 1) * ZONE_BYTES as u64 > self.file.bytes_max() {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            zones.free.pop().unwrap_or_else(|| {
                zones.live.push(0);
                zones.live.len() as u32 - 1
            })
        };
        let offset = u64::from(zone) * ZONE_BYTES as u64;
        match self.file.write(offset, batch) {
            Ok(()) => {
                self.writes.fetch_add(1, Ordering::Release);
                self.add_live(offset, 1);
                Ok(offset)
            }
            Err(error) => {
                lock(&self.zones).free.push(zone);
                Err(error)
            }
        }
    }

    /// Counts a payload as live.
    pub(crate) fn add_live(&self, offset: u64, len: usize) {
        let zone = (offset / ZONE_BYTES as u64) as usize;
        let mut zones = lock(&self.zones);
        if zones.live.len() <= zone {
            zones.live.resize(zone + 1, 0);
        }
        zones.live[zone] += len as u64;
        self.live.fetch_add(len as u64, Ordering::Relaxed);
    }

    /// Counts a payload as no longer live; the last one of a zone frees the zone.
    pub(crate) fn remove_live(&self, offset: u64, len: usize) {
        let zone = (offset / ZONE_BYTES as u64) as usize;
        let mut zones = lock(&self.zones);
        let Some(live) = zones.live.get_mut(zone) else { return };
        *live = live.saturating_sub(len as u64);
        self.live.fetch_sub(len as u64, Ordering::Relaxed);
        if *live == 0 {
            // Before the zone can be allocated again.
            self.file.discard(zone as u64 * ZONE_BYTES as u64, ZONE_BYTES as u64);
            zones.free.push(zone as u32);
        }
    }

    /// Adoption: frees the zones without a live payload.
    pub(crate) fn finish_adoption(&self) {
        let mut zones = lock(&self.zones);
        zones.free = (0..zones.live.len() as u32).filter(|zone| zones.live[*zone as usize] == 0).collect();
    }

    /// Reads the bytes at `offset` into `payload`, and what follows them into `ahead`. The caller holds a reference to the
    /// content, so nothing overwrites its zone meanwhile.
    pub(crate) fn read(&self, offset: u64, payload: &mut [u8], ahead: &mut ReadAhead) -> io::Result<()> {
        let from = (self.number, self.writes.load(Ordering::Acquire));
        if let Some(held) = ahead.held(offset, payload.len()).filter(|_| ahead.from == from) {
            payload.copy_from_slice(held);
            return Ok(());
        }
        let block = BLOCK_BYTES as u64;
        let first = offset / block * block;
        let last = offset.checked_add(payload.len() as u64).and_then(|end| end.checked_next_multiple_of(block));
        let needed = last.map(|last| (last - first) as usize).filter(|needed| *needed <= AHEAD_BYTES);
        let Some(needed) = needed else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
        let mut len = ahead.wanted(first, needed);
        ahead.len = 0;
        let blocks = ahead.blocks.get_mut();
        let mut read = self.file.read(first, &mut blocks[..len]);
        // The file may end behind the payload, in a zone that is not whole; what is read ahead may be damaged. And a device
        // may fail once, for example during a path failover or for a weak sector: one retry.
        if matches!(&read, Err(error) if len > needed || error.raw_os_error() == Some(libc::EIO)) {
            len = needed;
            read = self.file.read(first, &mut blocks[..len]);
        }
        read?;
        let start = (offset - first) as usize;
        payload.copy_from_slice(&blocks[start..start + payload.len()]);
        (ahead.first, ahead.len, ahead.from) = (first, len, from);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that fails its first reads.
    #[derive(Debug)]
    struct Failing(AtomicU64, i32);

    impl Backing for Failing {
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn read(&self, _: u64, blocks: &mut [u8]) -> io::Result<()> {
            if self.0.load(Ordering::Relaxed) > 0 {
                self.0.fetch_sub(1, Ordering::Relaxed);
                return Err(io::Error::from_raw_os_error(self.1));
            }
            blocks.fill(7);
            Ok(())
        }

        fn discard(&self, _: u64, _: u64) {}

        fn bytes_max(&self) -> u64 {
            2 << 20
        }

        fn fd(&self) -> Option<RawFd> {
            None
        }
    }

    #[test]
    fn a_failed_read_is_retried_once() {
        let read = |times, errno| {
            let disk = Disk::new(Box::new(Failing(AtomicU64::new(times), errno)));
            let mut payload = [0; 3];
            let read = disk.read(5000, &mut payload, &mut ReadAhead::new());
            read.map(|()| payload).map_err(|error| error.raw_os_error())
        };
        assert_eq!(read(1, libc::EIO), Ok([7; 3]));
        assert_eq!(read(2, libc::EIO), Err(Some(libc::EIO)));
        // Only EIO is retried.
        assert_eq!(read(1, libc::ENOMEM), Err(Some(libc::ENOMEM)));
    }

    #[test]
    fn a_zone_is_freed_with_its_last_live_payload() {
        let disk = Disk::new(Box::new(BackingFile::create(&std::env::temp_dir(), 2 << 20).unwrap()));
        let mut batch = Blocks::new(ZONE_BYTES);
        batch.get_mut()[5000..5003].copy_from_slice(b"abc");
        let one = disk.write(batch.get()).unwrap();
        disk.add_live(one + 5000, 3);
        disk.remove_live(one, 1);
        let two = disk.write(&batch.get()[..8192]).unwrap();
        disk.add_live(two + 5000, 3);
        disk.remove_live(two, 1);
        assert_eq!(disk.write(batch.get()).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        let mut payload = [0; 3];
        disk.read(two + 5000, &mut payload, &mut ReadAhead::new()).unwrap();
        assert_eq!(&payload, b"abc");
        disk.remove_live(one + 5000, 3);
        assert_eq!(disk.held(), ZONE_BYTES as u64);
        assert_eq!(disk.write(batch.get()).unwrap(), one);
    }

    /// A file of two zones in memory that counts reads.
    #[derive(Debug)]
    struct Counting(Mutex<Vec<u8>>, AtomicU64);

    impl Backing for &'static Counting {
        fn write(&self, offset: u64, blocks: &[u8]) -> io::Result<()> {
            let mut bytes = lock(&self.0);
            let end = offset as usize + blocks.len();
            let len = bytes.len().max(end);
            bytes.resize(len, 0);
            bytes[offset as usize..end].copy_from_slice(blocks);
            Ok(())
        }

        fn read(&self, offset: u64, blocks: &mut [u8]) -> io::Result<()> {
            self.1.fetch_add(1, Ordering::Relaxed);
            let (bytes, start) = (lock(&self.0), offset as usize);
            let held = bytes.get(start..start + blocks.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            blocks.copy_from_slice(held);
            Ok(())
        }

        fn discard(&self, _: u64, _: u64) {}

        fn bytes_max(&self) -> u64 {
            2 << 20
        }

        fn fd(&self) -> Option<RawFd> {
            None
        }
    }

    fn counting() -> (Disk, &'static Counting) {
        let file: &Counting = Box::leak(Box::new(Counting(Mutex::default(), AtomicU64::new(0))));
        (Disk::new(Box::new(file)), file)
    }

    #[test]
    fn payloads_in_order_are_read_ahead_and_scattered_ones_are_not() {
        let (disk, file) = counting();
        let mut batch = Blocks::new(ZONE_BYTES);
        batch.get_mut().chunks_mut(8).enumerate().for_each(|(at, word)| word.copy_from_slice(&at.to_le_bytes()));
        // The second zone is half full, and the file ends there.
        disk.write(batch.get()).unwrap();
        disk.write(&batch.get()[..ZONE_BYTES / 2]).unwrap();
        let mut ahead = ReadAhead::new();
        let mut read = |offset: u64| {
            let mut payload = [0; 1000];
            disk.read(offset, &mut payload, &mut ahead).unwrap();
            let expected = (offset % ZONE_BYTES as u64 / 8).to_le_bytes();
            assert_eq!(payload[..8], expected, "{offset}");
        };
        (0..1500).for_each(|at| read(at * 1000));
        let in_order = file.1.swap(0, Ordering::Relaxed);
        assert!(in_order < 30, "{in_order} reads of 1,500 payloads in order");
        (1..100).for_each(|at| read((at * 600_000) % (1 << 20) / 8 * 8));
        let scattered = file.1.load(Ordering::Relaxed);
        assert!((90..=99).contains(&scattered), "{scattered} reads of 99 scattered payloads");
    }

    #[test]
    fn what_was_read_ahead_is_forgotten_when_a_zone_is_written() {
        let (disk, _) = counting();
        let (mut ahead, mut payload) = (ReadAhead::new(), [0; 8]);
        let mut batch = Blocks::new(ZONE_BYTES);
        for round in 1..=3 {
            batch.get_mut().fill(round);
            let zone = disk.write(batch.get()).unwrap();
            for at in [0, 5000, 9000] {
                disk.read(zone + at, &mut payload, &mut ahead).unwrap();
                assert_eq!(payload, [round; 8]);
            }
            disk.remove_live(zone, 1);
        }
        // Another file, by the same thread.
        let (other, _) = counting();
        batch.get_mut().fill(9);
        (0..3).for_each(|_| drop(other.write(batch.get())));
        other.read(0, &mut payload, &mut ahead).unwrap();
        assert_eq!(payload, [9; 8]);
    }
}
