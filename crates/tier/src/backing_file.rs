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
    /// The file's length at adoption, or its limit if that is larger.
    end: u64,
    zones: Mutex<Zones>,
    live: AtomicU64,
}

impl Disk {
    pub(crate) fn new(file: Box<dyn Backing>) -> Disk {
        let end = file.bytes_max().max(file.bytes());
        Disk { file, end, zones: Mutex::default(), live: AtomicU64::new(0) }
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

    /// Reads the bytes at `offset` into `payload`, through `blocks`, which must hold all blocks that the payload lies in.
    pub(crate) fn read(&self, offset: u64, payload: &mut [u8], blocks: &mut Blocks) -> io::Result<()> {
        let block = BLOCK_BYTES as u64;
        let first = offset / block * block;
        let last = offset.checked_add(payload.len() as u64).and_then(|end| end.checked_next_multiple_of(block));
        let blocks = last.and_then(|last| blocks.get_mut().get_mut(..(last - first) as usize));
        let Some(blocks) = blocks else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
        // A device may fail once, for example during a path failover or for a weak sector: one retry.
        if let Err(error) = self.file.read(first, blocks) {
            match error.raw_os_error() {
                Some(libc::EIO) => self.file.read(first, blocks)?,
                _ => return Err(error),
            }
        }
        let start = (offset - first) as usize;
        payload.copy_from_slice(&blocks[start..start + payload.len()]);
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
            let read = disk.read(5000, &mut payload, &mut Blocks::new(2 * BLOCK_BYTES));
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
        disk.read(two + 5000, &mut payload, &mut batch).unwrap();
        assert_eq!(&payload, b"abc");
        disk.remove_live(one + 5000, 3);
        assert_eq!(disk.held(), ZONE_BYTES as u64);
        assert_eq!(disk.write(batch.get()).unwrap(), one);
    }
}
