//! The mapping under an arena: one range of address space, reserved once and
//! filled with the largest pages the system has.

use super::{Error, Numa, Pages, liveness};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB_2: usize = 2 << 20;
const GIB_1: usize = 1 << 30;
/// Bytes up to which [`Mapping::secure`] is not split when signals interrupt it.
const SECURE_AT_ONCE: usize = 256 << 10;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// Advice for madvise(2) since Linux 6.1; the libc crate defines it for glibc only.
const MADV_COLLAPSE: i32 = 25;
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Mount option of a tmpfs that gives huge pages on a touch of a mapping with MADV_HUGEPAGE, but not on fallocate.
const HUGE_BY_TOUCH: &str = "huge=advise";

/// The pages an arena got; `stats` reports them.
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
    /// Whether the file gets huge pages only on a touch, not on fallocate.
    huge_by_touch: bool,
    /// Whether the file gets huge pages only by MADV_COLLAPSE of small ones.
    huge_by_collapse: AtomicBool,
    /// Whether parts of huge pages were ever given back.
    has_rests: AtomicBool,
    /// Device and inode of the file, 0 for none.
    inode: (u64, u64),
}

// SAFETY: the mapping is plain memory, not bound to a thread; only Drop unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: threads reach the mapped memory through atomics or under the arena's protocol; `Mapping` itself changes only its
// atomic fields through `&self`.
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

    /// Maps the first `bytes` of `file`, shared with all other processes that map it.
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
        // SAFETY: the range is exactly the reservation `hold`; MAP_FIXED replaces it.
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
        mapping.inode = liveness::inode_of(&file)?;
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

    /// Allocates pages for `offset..offset+bytes`, so that touching them cannot kill the process.
    ///
    /// # Errors
    /// [`Error::NoMemory`] with the kernel's reason, e.g. ENOSPC when the tmpfs is full.
    pub fn secure(&self, offset: usize, bytes: usize) -> Result<(), Error> {
        let Some(file) = &self.file else { return Ok(()) };
        // A program that closes descriptors it does not own may have reused this number: that other file must not grow.
        if liveness::inode_of(file)? != self.inode {
            let what =
                "the program closed the store's descriptor, and another file has its number; open the store again";
            return Err(Error::Io(io::Error::other(what)));
        }
        if self.huge_by_touch && self.touch(file, offset, bytes) {
            return Ok(());
        }
        loop {
            // SAFETY: fallocate takes no pointers; the descriptor refers to the arena's file (inode checked above).
            if unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as i64, bytes as i64) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(Error::NoMemory { source: error });
            }
            // tmpfs rolls an interrupted fallocate back, so frequent signals would never let a large one finish.
            if bytes > SECURE_AT_ONCE {
                let half = (bytes / 2).next_multiple_of(4096);
                self.secure(offset, half)?;
                return self.secure(offset + half, bytes - half);
            }
        }
    }

    /// Allocates pages by a write access to `offset..offset+bytes`. Returns false if that failed or there may be too few
    /// free pages: a partial success would keep the pages it got.
    fn touch(&self, file: &File, offset: usize, bytes: usize) -> bool {
        file_system(file).2 > (bytes + 2 * MIB_2) as u64
            && self.advise(offset, bytes, libc::MADV_POPULATE_WRITE).is_ok()
    }

    /// Collapses the 2 MiB holes that `offset..offset+bytes` reaches into to huge pages, if the file gets them in no other
    /// way and the kernel has some free.
    pub fn make_huge(&self, offset: usize, bytes: usize) {
        let Some(file) = self.file.as_ref().filter(|_| self.huge_by_collapse.load(Ordering::Relaxed)) else { return };
        for huge in (offset / MIB_2 * MIB_2..offset + bytes).step_by(MIB_2) {
            let is_hole = huge + MIB_2 <= self.bytes && self.is_hole(file, huge);
            if !is_hole || file_system(file).2 <= 2 * MIB_2 as u64 {
                continue;
            }
            // The kernel collapses only where it finds a page: allocate one of the caller's own.
            let own = huge.max(offset);
            let made = self.secure(own, 4096).is_ok()
                && self.advise(own, 4096, libc::MADV_POPULATE_READ).is_ok()
                && self.advise(huge, MIB_2, MADV_COLLAPSE).is_ok();
            if !made {
                // The kernel has no huge page now, or never will: this process stops asking.
                self.huge_by_collapse.store(false, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Asks for huge pages in the place of the small ones at `offset..offset+bytes`, where the rest stands on huge pages.
    /// Does nothing where the kernel has none.
    pub fn collapse(&self, offset: usize, bytes: usize) {
        if self.is_transparent() {
            let _ = self.advise(offset, bytes, libc::MADV_HUGEPAGE);
        } else if !self.huge_by_collapse.load(Ordering::Relaxed) {
            return;
        }
        for huge in (offset..offset + bytes).step_by(MIB_2) {
            let _ = self.advise(huge, MIB_2, MADV_COLLAPSE);
        }
    }

    /// Returns true if no page of the 2 MiB from `offset` on exists. Does not use mincore(2): seccomp filters such as
    /// systemd's `@system-service` kill a process that calls it.
    fn is_hole(&self, file: &File, offset: usize) -> bool {
        if liveness::inode_of(file).ok() != Some(self.inode) {
            return false;
        }
        // SAFETY: lseek takes no pointers; it moves the position of our own descriptor, which no code uses.
        let data = unsafe { libc::lseek(file.as_raw_fd(), offset as libc::off_t, libc::SEEK_DATA) };
        if data < 0 {
            io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO)
        } else {
            data >= (offset + MIB_2) as libc::off_t
        }
    }

    /// Faults in the pages of `offset..offset+bytes` of a private mapping. The caller owns `room` bytes from `offset` on,
    /// which end at a page border; unless `is_new`, the pages before `offset` were faulted in already. Pages of a file were
    /// allocated by [`Mapping::secure`].
    pub fn ready(&self, offset: usize, bytes: usize, room: usize, is_new: bool) {
        if self.file.is_some() {
            return;
        }
        let start = offset & !4095;
        let end = (offset + bytes).next_multiple_of(4096);
        if matches!(self.backing, Backing::Small) {
            let _ = self.advise(start, end - start, libc::MADV_POPULATE_WRITE);
        } else if is_new || offset.next_multiple_of(MIB_2) < end {
            // If the kernel has no huge page, this faults in the small ones in its place.
            let end = end.next_multiple_of(MIB_2).min(offset + room);
            let _ = self.advise(start, end - start, libc::MADV_POPULATE_WRITE);
        }
    }

    /// Gives the pages of `offset..offset+bytes` back to the system; they read as zero afterwards.
    pub fn give_back(&self, offset: usize, bytes: usize) {
        match &self.file {
            // Explicit huge pages stay. Given back they would return to the system's pool, and the reservation ends with
            // the page, also of a private mapping: touching the range again would be SIGBUS if the pool ran dry.
            _ if matches!(self.backing, Backing::Huge2M | Backing::Huge1G) => {}
            Some(file) => {
                // Punch the hole through the mapping, which is ours even if the descriptor was closed. This fails on locked
                // memory; then punch it through the descriptor.
                let given = self.advise(offset, bytes, libc::MADV_REMOVE);
                if given.is_err() && liveness::inode_of(file).is_ok_and(|found| found == self.inode) {
                    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    // SAFETY: fallocate takes no pointers; the descriptor refers to the arena's file (inode checked above),
                    // and the arena passes only ranges without a live block.
                    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, bytes as i64) };
                }
            }
            None => {
                let _ = self.advise(offset, bytes, libc::MADV_DONTNEED);
                if self.has_rests.load(Ordering::Relaxed) {
                    // Undo the MADV_NOHUGEPAGE of `give_back_rest`.
                    let _ = self.advise(offset, bytes, libc::MADV_HUGEPAGE);
                }
            }
        }
    }

    /// Returns true for private memory on transparent huge pages.
    pub fn is_transparent(&self) -> bool {
        self.file.is_none() && matches!(self.backing, Backing::Transparent)
    }

    /// Gives back the pages of a part of huge pages that are otherwise in use, in memory that
    /// [is transparent](Self::is_transparent).
    pub fn give_back_rest(&self, offset: usize, bytes: usize) {
        if bytes > 0 {
            self.has_rests.store(true, Ordering::Relaxed);
            // Otherwise khugepaged collapses it to a huge page again, within seconds.
            let _ = self.advise(offset, bytes, libc::MADV_NOHUGEPAGE);
            let _ = self.advise(offset, bytes, libc::MADV_DONTNEED);
        }
    }

    fn advise(&self, offset: usize, bytes: usize, advice: i32) -> io::Result<()> {
        assert!(offset + bytes <= self.bytes);
        // SAFETY: the range lies inside this mapping (asserted above); callers pass no advice that drops live data.
        let done = unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), bytes, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Interleaves pages over all memory nodes, if requested and there is more than one node.
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
        // SAFETY: base and bytes describe the mapping made by `private` or `shared`; `self` is dropped, so no reference into
        // it is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        // The program may have closed our descriptor and reused its number for a file of its own: do not close that one.
        if let Some(file) = self.file.take_if(|file| liveness::inode_of(file).ok() != Some(self.inode)) {
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
    // SAFETY: a fresh anonymous mapping at an address the kernel chooses overlaps no other memory.
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
        // Names the range in /proc/PID/maps where the kernel can (CONFIG_ANON_VMA_NAME); page merging skips it by name.
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

/// Returns the page size of `file`'s hugetlbfs and the bytes of its free huge pages; `None` for another file system.
pub fn hugetlbfs_free_bytes(file: &File) -> Option<(usize, usize)> {
    let (magic, block_bytes, _) = file_system(file);
    (magic == HUGETLBFS_MAGIC).then(|| (block_bytes, free_huge_bytes(block_bytes)))
}

fn thp_allowed() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| text.contains("[madvise]") || text.contains("[always]"))
}

/// Returns true if the kernel (6.1 or later) collapses tmpfs pages to huge ones on request, whatever the mount options.
fn collapse_allowed() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .is_ok_and(|text| !text.contains("[deny]"))
}

/// Magic number, block size and free bytes of the file system that `file` lives on.
fn file_system(file: &File) -> (i64, usize, u64) {
    // SAFETY: statfs consists of integers, so all zeros is a valid value.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` is borrowed; the kernel writes only into `stat`.
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
