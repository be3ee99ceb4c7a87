//! The mapping under an arena: one range of address space, reserved once,
//! filled with the largest pages the system has.

use super::{Error, Numa, Pages, alive};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB_2: usize = 2 << 20;
const GIB_1: usize = 1 << 30;
/// What is secured whole although signals come.
const SECURE_AT_ONCE: usize = 256 << 10;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// Of madvise(2), Linux 6.1; the libc crate has it for glibc only.
const MADV_COLLAPSE: i32 = 25;
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// How a tmpfs is mounted that gives huge pages to a mapping that asked for them, and none to fallocate.
const HUGE_BY_TOUCH: &str = "huge=advise";

/// The pages an arena really stands on; `stats` says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Ordinary pages of 4 KiB.
    Small,
    /// Ordinary memory that the kernel backs with 2 MiB pages where it can.
    Transparent,
    /// Explicit huge pages of 2 MiB.
    Huge2M,
    /// Explicit huge pages of 1 GiB.
    Huge1G,
}

impl Backing {
    /// Returns the name used in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Backing::Small => "4 KiB",
            Backing::Transparent => "transparent 2 MiB",
            Backing::Huge2M => "2 MiB",
            Backing::Huge1G => "1 GiB",
        }
    }
}

/// A mapping that lives as long as this value.
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    backing: Backing,
    file: Option<File>,
    /// Whether the file gets huge pages only where it is touched, not where it is allocated.
    huge_by_touch: bool,
    /// Whether the file gets huge pages only where the kernel is told to make them of small ones.
    huge_by_collapse: AtomicBool,
    /// Whether rests of huge pages were ever given back.
    has_rests: AtomicBool,
    /// Device and inode of the file, 0 for none.
    inode: (u64, u64),
}

// SAFETY: the mapping is plain memory; all access to it goes through atomics or is ordered by the arena's protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves `bytes` of private memory.
    ///
    /// # Errors
    /// [`Error::Reserve`] if the address space or, for explicit huge pages without fallback, the pages are not there.
    pub fn private(bytes: usize, pages: Pages, numa: Numa) -> Result<Mapping, Error> {
        let explicit = match pages {
            Pages::Auto => [None, Some((MIB_2, Backing::Huge2M))],
            Pages::Huge1G => [Some((GIB_1, Backing::Huge1G)), Some((MIB_2, Backing::Huge2M))],
            Pages::Huge2M => [None, Some((MIB_2, Backing::Huge2M))],
            Pages::Small | Pages::Transparent => [None, None],
        };
        for (page_bytes, backing) in explicit.into_iter().flatten() {
            if bytes.next_multiple_of(page_bytes) > free_huge_bytes(page_bytes) {
                continue;
            }
            let flags = libc::MAP_HUGETLB | ((page_bytes.ilog2() as i32) << libc::MAP_HUGE_SHIFT);
            if let Ok(mapping) = anonymous(bytes.next_multiple_of(page_bytes), page_bytes, flags, backing) {
                mapping.place(numa);
                return Ok(mapping);
            }
        }
        let mut mapping = anonymous(bytes, MIB_2, libc::MAP_NORESERVE, Backing::Small)
            .map_err(|source| Error::Reserve { bytes: bytes as u64, source })?;
        mapping.place(numa);
        if pages != Pages::Small && thp_allowed() && mapping.advise(0, mapping.bytes, libc::MADV_HUGEPAGE).is_ok() {
            mapping.backing = Backing::Transparent;
        } else if pages == Pages::Small {
            let _ = mapping.advise(0, mapping.bytes, libc::MADV_NOHUGEPAGE);
        }
        Ok(mapping)
    }

    /// Maps the first `bytes` of `file`, shared with whoever else maps it.
    ///
    /// # Errors
    /// [`Error::Reserve`] as the kernel refused, e.g. a hugetlbfs without enough free pages.
    pub fn shared(file: File, bytes: usize, pages: Pages) -> Result<Mapping, Error> {
        let (magic, block_bytes, _) = file_system(&file);
        let huge = magic == HUGETLBFS_MAGIC;
        // Reserve aligned address space first, then put the file over it, so that 2 MiB pages line up.
        let reserve = |source| Error::Reserve { bytes: bytes as u64, source };
        let align = if huge { block_bytes.max(MIB_2) } else { MIB_2 };
        let hold =
            anonymous_prot(bytes, align, libc::MAP_NORESERVE, Backing::Small, libc::PROT_NONE).map_err(reserve)?;
        // SAFETY: the range is exactly the reservation we own; MAP_FIXED replaces it.
        let base = unsafe {
            libc::mmap(
                hold.base.as_ptr().cast(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(reserve(io::Error::last_os_error()));
        }
        let mut mapping = hold;
        mapping.backing = if huge && block_bytes >= GIB_1 {
            Backing::Huge1G
        } else if huge {
            Backing::Huge2M
        } else if pages != Pages::Small
            && magic == TMPFS_MAGIC
            && tmpfs_huge(&file, &["huge=always", "huge=within_size", HUGE_BY_TOUCH])
            && mapping.advise(0, bytes, libc::MADV_HUGEPAGE).is_ok()
        {
            Backing::Transparent
        } else {
            Backing::Small
        };
        mapping.huge_by_touch = mapping.backing == Backing::Transparent && tmpfs_huge(&file, &[HUGE_BY_TOUCH]);
        if mapping.backing == Backing::Small && pages != Pages::Small && magic == TMPFS_MAGIC && collapse_allowed() {
            mapping.backing = Backing::Transparent;
            *mapping.huge_by_collapse.get_mut() = true;
        }
        mapping.inode = alive::inode_of(&file)?;
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// Asks for ordinary pages under the first `bytes`, where the rest stands on transparent huge ones.
    pub fn small_pages(&self, bytes: usize) {
        if self.backing == Backing::Transparent {
            let _ = self.advise(0, bytes, libc::MADV_NOHUGEPAGE);
        }
    }

    /// Returns the first byte of the mapping.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the file under the mapping.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Returns device and inode of the file under the mapping, 0 for none.
    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Returns the pages the mapping stands on.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Makes sure that pages for `offset..offset+bytes` can be had, so that touching them cannot kill the process.
    ///
    /// # Errors
    /// [`Error::NoMemory`] with the kernel's reason, e.g. ENOSPC when the tmpfs is full.
    pub fn secure(&self, offset: usize, bytes: usize) -> Result<(), Error> {
        let Some(file) = &self.file else { return Ok(()) };
        // A program that closes descriptors which are not its own may have put another file here: that must not grow.
        if alive::inode_of(file)? != self.inode {
            let what =
                "the program closed the store's descriptor, and another file has its number; open the store again";
            return Err(Error::Io(io::Error::other(what)));
        }
        if self.huge_by_touch && self.touch(file, offset, bytes) {
            return Ok(());
        }
        loop {
            // SAFETY: fallocate on our own descriptor touches no memory of this process.
            if unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as i64, bytes as i64) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(Error::NoMemory { source: error });
            }
            // For a signal tmpfs undoes what it has done, so between two signals there may be time for less only.
            if bytes > SECURE_AT_ONCE {
                let half = (bytes / 2).next_multiple_of(4096);
                self.secure(offset, half)?;
                return self.secure(offset + half, bytes - half);
            }
        }
    }

    /// Takes pages as if `offset..offset+bytes` were written to. False if that failed, or there may be too few: it would
    /// keep those that it got.
    fn touch(&self, file: &File, offset: usize, bytes: usize) -> bool {
        file_system(file).2 > (bytes + 2 * MIB_2) as u64
            && self.advise(offset, bytes, libc::MADV_POPULATE_WRITE).is_ok()
    }

    /// Makes huge pages of the holes of 2 MiB that `offset..offset+bytes` reaches into, where the file gets them in no other
    /// way and the kernel has some to give.
    pub fn make_huge(&self, offset: usize, bytes: usize) {
        let Some(file) = self.file.as_ref().filter(|_| self.huge_by_collapse.load(Ordering::Relaxed)) else { return };
        for huge in (offset / MIB_2 * MIB_2..offset + bytes).step_by(MIB_2) {
            let is_hole = huge + MIB_2 <= self.bytes && self.is_hole(file, huge);
            if !is_hole || file_system(file).2 <= 2 * MIB_2 as u64 {
                continue;
            }
            // The kernel makes a huge page only where it finds a page: one of the caller's own.
            let own = huge.max(offset);
            let made = self.secure(own, 4096).is_ok()
                && self.advise(own, 4096, libc::MADV_POPULATE_READ).is_ok()
                && self.advise(huge, MIB_2, MADV_COLLAPSE).is_ok();
            if !made {
                // It has none now, or never: this process asks no more.
                self.huge_by_collapse.store(false, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Whether nothing was written to the 2 MiB from `offset` on. Not by mincore(2): filters that let a service do all that
    /// services do, as systemd's `@system-service`, end who calls it.
    fn is_hole(&self, file: &File, offset: usize) -> bool {
        if alive::inode_of(file).ok() != Some(self.inode) {
            return false;
        }
        // SAFETY: moves the position of our own descriptor, by which nobody reads.
        let data = unsafe { libc::lseek(file.as_raw_fd(), offset as libc::off_t, libc::SEEK_DATA) };
        if data < 0 {
            io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO)
        } else {
            data >= (offset + MIB_2) as libc::off_t
        }
    }

    /// Has pages for `offset..offset+bytes`, of `room` bytes that are the caller's and end with a page, of which those before were had ready unless
    /// `is_new`. A file's were made sure of by [`Mapping::secure`].
    pub fn ready(&self, offset: usize, bytes: usize, room: usize, is_new: bool) {
        if self.file.is_some() {
            return;
        }
        let start = offset & !4095;
        let end = (offset + bytes).next_multiple_of(4096);
        if matches!(self.backing, Backing::Small) {
            let _ = self.advise(start, end - start, libc::MADV_POPULATE_WRITE);
        } else if is_new || offset.next_multiple_of(MIB_2) < end {
            // Where the kernel has no huge page to give, the small ones that are in its place.
            let end = end.next_multiple_of(MIB_2).min(offset + room);
            let _ = self.advise(start, end - start, libc::MADV_POPULATE_WRITE);
        }
    }

    /// Gives the pages of `offset..offset+bytes` back to the system; they read as zero afterwards.
    pub fn give_back(&self, offset: usize, bytes: usize) {
        match &self.file {
            // Explicit huge pages that are given back go to the pool, and from there to anybody: touching them again
            // would be a fault if it ran dry. The reservation ends with the page, of a private mapping too. They stay.
            _ if matches!(self.backing, Backing::Huge2M | Backing::Huge1G) => {}
            Some(file) => {
                // By the mapping, which is ours whatever became of the descriptor; but not where memory is locked.
                let given = self.advise(offset, bytes, libc::MADV_REMOVE);
                if given.is_err() && alive::inode_of(file).is_ok_and(|found| found == self.inode) {
                    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    // SAFETY: fallocate on our own descriptor; the arena says that no live block is in the range.
                    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, bytes as i64) };
                }
            }
            None => {
                let _ = self.advise(offset, bytes, libc::MADV_DONTNEED);
                if self.has_rests.load(Ordering::Relaxed) {
                    // Where rests were given back, huge pages are welcome again.
                    let _ = self.advise(offset, bytes, libc::MADV_HUGEPAGE);
                }
            }
        }
    }

    /// Whether this process's own memory lies on huge pages that the kernel makes as it can.
    pub fn is_transparent(&self) -> bool {
        self.file.is_none() && matches!(self.backing, Backing::Transparent)
    }

    /// Gives pages back of huge pages that are otherwise in use, of memory that [is transparent](Self::is_transparent).
    pub fn give_back_rest(&self, offset: usize, bytes: usize) {
        if bytes > 0 {
            self.has_rests.store(true, Ordering::Relaxed);
            // Or the kernel makes it a huge page again, within seconds.
            let _ = self.advise(offset, bytes, libc::MADV_NOHUGEPAGE);
            let _ = self.advise(offset, bytes, libc::MADV_DONTNEED);
        }
    }

    fn advise(&self, offset: usize, bytes: usize, advice: i32) -> io::Result<()> {
        assert!(offset + bytes <= self.bytes);
        // SAFETY: the range lies inside our own mapping (asserted above).
        let done = unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), bytes, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Asks for pages on all nodes in turn, where there is more than one.
    fn place(&self, numa: Numa) {
        let nodes = node_mask();
        if numa != Numa::Interleave || nodes.count_ones() < 2 {
            return;
        }
        const MPOL_INTERLEAVE: i32 = 3;
        // SAFETY: mbind on our own range with a mask that outlives the call; a refusal only costs placement.
        unsafe {
            libc::syscall(libc::SYS_mbind, self.base.as_ptr(), self.bytes, MPOL_INTERLEAVE, &raw const nodes, 64, 0);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and bytes are what mmap gave us; nobody holds the mapping any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        // The program may have closed our descriptor, and its number be that of a file of its own.
        if let Some(file) = self.file.take_if(|file| alive::inode_of(file).ok() != Some(self.inode)) {
            let _ = file.into_raw_fd();
        }
    }
}

fn anonymous(bytes: usize, align: usize, flags: i32, backing: Backing) -> io::Result<Mapping> {
    anonymous_prot(bytes, align, flags, backing, libc::PROT_READ | libc::PROT_WRITE)
}

/// Maps `bytes` anonymously, aligned to `align`.
fn anonymous_prot(bytes: usize, align: usize, flags: i32, backing: Backing, prot: i32) -> io::Result<Mapping> {
    let slack = if flags & libc::MAP_HUGETLB != 0 { 0 } else { align };
    // SAFETY: a fresh anonymous mapping at an address the kernel chooses.
    let raw = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes + slack, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags, -1, 0)
    };
    if raw == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = raw as usize;
    let aligned = start.next_multiple_of(align);
    let head = aligned - start;
    // SAFETY: head and tail lie inside the mapping just made and outside the part we keep.
    unsafe {
        if slack != 0 && head != 0 {
            libc::munmap(raw, head);
        }
        if slack != 0 && slack != head {
            libc::munmap((aligned + bytes) as *mut libc::c_void, slack - head);
        }
        let name = c"llds arena";
        // Names the range in /proc/PID/maps where the kernel can (CONFIG_ANON_VMA_NAME); whoever merges pages skips it.
        libc::prctl(libc::PR_SET_VMA, libc::PR_SET_VMA_ANON_NAME, aligned, bytes, name.as_ptr());
    }
    let base = NonNull::new(aligned as *mut u8).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
    Ok(Mapping {
        base,
        bytes,
        backing,
        file: None,
        huge_by_touch: false,
        huge_by_collapse: AtomicBool::new(false),
        has_rests: AtomicBool::new(false),
        inode: (0, 0),
    })
}

/// Bytes of free explicit huge pages of one size.
fn free_huge_bytes(page_bytes: usize) -> usize {
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", page_bytes >> 10);
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.trim().parse::<usize>().map_or(0, |count| count.saturating_mul(page_bytes))
}

/// Bytes of free explicit huge pages behind `file`'s hugetlbfs, or none for another file system.
pub fn hugetlbfs_free_bytes(file: &File) -> Option<(usize, usize)> {
    let (magic, block_bytes, _) = file_system(file);
    (magic == HUGETLBFS_MAGIC).then(|| (block_bytes, free_huge_bytes(block_bytes)))
}

fn thp_allowed() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| text.contains("[madvise]") || text.contains("[always]"))
}

/// Whether the kernel makes huge pages of small ones in a tmpfs for whoever asks, whatever the tmpfs is mounted with (6.1).
fn collapse_allowed() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .is_ok_and(|text| !text.contains("[deny]"))
}

/// Magic number, block size and free bytes of the file system that `file` lives on.
fn file_system(file: &File) -> (i64, usize, u64) {
    // SAFETY: statfs is plain data, for which all zeros is a value.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the buffer is ours.
    let done = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) };
    if done != 0 {
        return (0, 4096, 0);
    }
    // A tmpfs without a limit has no blocks at all.
    let free = if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail.saturating_mul(stat.f_bsize as u64) };
    (stat.f_type as i64, stat.f_bsize as usize, free)
}

/// Whether the tmpfs that `file` lives on was mounted with one of these options.
fn tmpfs_huge(file: &File, options: &[&str]) -> bool {
    let Ok(meta) = file.metadata() else { return false };
    let device = format!("{}:{}", libc::major(meta.dev()), libc::minor(meta.dev()));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts
        .lines()
        .filter(|line| line.split(' ').nth(2) == Some(device.as_str()))
        .any(|line| options.iter().any(|option| line.contains(option)))
}

/// Bit mask of the memory nodes that are online (the first 64).
fn node_mask() -> u64 {
    let text = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    let mut mask = 0;
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            for node in first..=last.min(63) {
                mask |= 1 << node;
            }
        }
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explicit_huge_pages_are_kept() {
        let mut mapping = Mapping::private(MIB_2, Pages::Small, Numa::Local).unwrap();
        let first = mapping.base();
        // SAFETY: the byte is the first of our own mapping.
        let after_giving_back = |mapping: &Mapping| unsafe {
            first.write(7);
            mapping.give_back(0, MIB_2);
            first.read()
        };
        assert_eq!(after_giving_back(&mapping), 0);
        // What it stands on is what it says, so that this needs no huge pages.
        for backing in [Backing::Huge2M, Backing::Huge1G] {
            mapping.backing = backing;
            assert_eq!(after_giving_back(&mapping), 7, "{}", backing.name());
        }
    }
}
