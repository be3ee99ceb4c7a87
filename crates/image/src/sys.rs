//! The few Linux calls of this crate that no safe wrapper has; the only unsafe code in it.
#![allow(unsafe_code)]

use pagefold_os::pagemap::{ENTRY_BYTES, PageEntry};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use rustix::fs::Stat;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Size of a page, bytes.
pub const PAGE: u64 = 4096;

#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    nr_cache: u64,
    nr_dirty: u64,
    nr_writeback: u64,
    nr_evicted: u64,
    nr_recently_evicted: u64,
}

fn cachestat(file: impl AsFd) -> io::Result<Cachestat> {
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = CachestatRange { off: 0, len: 0 };
    let mut stat = Cachestat::default();
    // SAFETY: both structs live across the call and have the layout of the kernel's `cachestat_range` and
    // `cachestat`; the descriptor is borrowed for the call.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_fd().as_raw_fd(), &range, &mut stat, 0) };
    if result == 0 { Ok(stat) } else { Err(io::Error::last_os_error()) }
}

/// Counts the pages of `file` that are in the page cache: cachestat(2), Linux 6.5.
///
/// # Errors
/// ENOSYS on older kernels; EPERM for another user's file.
pub fn cached_pages(file: impl AsFd) -> io::Result<u64> {
    Ok(cachestat(file)?.nr_cache)
}

/// Returns true if pages of `file` wait to be written to the disk.
///
/// # Errors
/// As [`cached_pages`].
pub fn is_dirty(file: impl AsFd) -> io::Result<bool> {
    Ok(cachestat(file)?.nr_dirty > 0)
}

/// Starts the writeback of dirty pages of `file`: a later write through a mapping then faults and changes the file's times.
pub fn write_out(file: impl AsFd) {
    let how = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE;
    // SAFETY: sync_file_range takes integers and no pointer; the descriptor is borrowed for the call.
    unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, how) };
}

/// True if nothing shows that the bytes of a file changed between two looks at it. Its links may have.
pub fn is_unwritten(before: &Stat, after: &Stat) -> bool {
    let state = |stat: &Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
    state(before) == state(after)
}

/// Returns true if `file` is open elsewhere, in a kernel mount too: a write lease would conflict.
///
/// # Errors
/// EACCES if the file belongs to another user and this process has no privilege.
pub fn is_open_elsewhere(file: &File) -> io::Result<bool> {
    const F_SETSIG: libc::c_int = 10;
    // An open of the file while this process has the lease sends it a signal; SIGIO, the default one, would end it.
    // SAFETY: F_SETSIG takes an integer and no pointer.
    if unsafe { libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: F_SETLEASE takes an integer and no pointer.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    if result == 0 {
        // SAFETY: F_SETLEASE takes an integer and no pointer.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
        return Ok(false);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN) => Ok(true),
        _ => Err(error),
    }
}

/// Moves this process into new namespaces (CLONE_NEW* flags).
///
/// # Errors
/// EPERM without privilege; EINVAL for a user namespace in a process with several threads.
pub fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: unshare with namespace flags only changes kernel state of this process; CLONE_FILES and CLONE_VM are
    // never passed, so no memory or descriptor is shared anew.
    if unsafe { libc::unshare(flags) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A background process that is being detached from this one: its parent is an intermediate child that ends immediately.
#[must_use]
pub struct Detaching {
    /// The intermediate child.
    child: libc::pid_t,
}

impl Detaching {
    /// Waits until the process is detached.
    ///
    /// # Errors
    /// The process could not be made.
    pub fn wait(self) -> io::Result<()> {
        let mut status = 0;
        // SAFETY: `status` lives across the call, which writes nothing else.
        while unsafe { libc::waitpid(self.child, &mut status, 0) } < 0 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The child has ended and was reaped by the kernel: this process was started with SIGCHLD ignored.
                Some(libc::ECHILD) => break,
                _ => return Err(error),
            }
        }
        if status == 0 { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}

/// Does `work` in a detached process of its own, with only the descriptors `keep` open, and standard error if it `reports`
/// something. This process must have one thread, and must not exec before [`Detaching::wait`]. What `work` owns is not
/// dropped.
///
/// # Errors
/// The process cannot be made.
pub fn in_background(keep: &[RawFd], reports: bool, work: impl FnOnce()) -> io::Result<Detaching> {
    // SAFETY: this process has one thread, so the child may do whatever the parent may.
    match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {}
        child => return Ok(Detaching { child }),
    }
    // The child's child is detached: a program that this process becomes gets no child that it did not start.
    // SAFETY: the child is a copy of a process with one thread, so no lock is held by a thread that it lacks. _exit ends it
    // without running the parent's destructors, and the descriptors that are closed are not used again.
    unsafe {
        match libc::fork() {
            -1 => libc::_exit(1),
            0 => {}
            _ => libc::_exit(0),
        }
        // A terminal's signals are for the command only.
        libc::setsid();
        let mut keep: Vec<RawFd> = keep.to_vec();
        keep.sort_unstable();
        let mut from = 3;
        for fd in keep {
            if fd > from {
                libc::syscall(libc::SYS_close_range, from, fd - 1, 0);
            }
            from = from.max(fd + 1);
        }
        libc::syscall(libc::SYS_close_range, from, RawFd::MAX, 0);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        libc::dup2(null, 0);
        libc::dup2(null, 1);
        if !reports {
            // A reader of the command's output must not wait for this process to close it.
            libc::dup2(null, 2);
        }
    }
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    // SAFETY: _exit ends the process without running the parent's destructors.
    unsafe { libc::_exit(i32::from(done.is_err())) }
}

/// Reports files that are opened in a mount: fanotify(7).
pub struct Opens(OwnedFd);

impl Opens {
    /// Watches no mount yet.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ENOSYS.
    pub fn new() -> io::Result<Self> {
        let how = libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        // The kernel opens each reported file for the reader of the event: a pipe must not make that wait.
        let files = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE | libc::O_NONBLOCK;
        // SAFETY: fanotify_init takes integers; the descriptor it returns is new, so this process owns it.
        unsafe {
            let fd = libc::fanotify_init(how, files as libc::c_uint);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(OwnedFd::from_raw_fd(fd))) }
        }
    }

    /// Watches the mount at `path` from here on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn mark(&self, path: &Path) -> io::Result<()> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_MOUNT;
        let mask = libc::FAN_OPEN | libc::FAN_ONDIR;
        // SAFETY: the path lives across the call, and `self` keeps the descriptor open.
        let result = unsafe { libc::fanotify_mark(self.0.as_raw_fd(), flags, mask, libc::AT_FDCWD, path.as_ptr()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Waits until a file was opened, `process` has ended, or `patience` is over. Returns true if the process has ended.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, process: &OwnedFd, patience: Duration) -> io::Result<bool> {
        let mut list = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(process, PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        match poll(&mut list, Some(&patience)) {
            Err(rustix::io::Errno::INTR) | Ok(_) => Ok(!list[1].revents().is_empty()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Files that were opened since the last call, opened again for this process: at most some hundred, and none if none are
    /// left.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&self) -> io::Result<Vec<File>> {
        const EVENT: usize = size_of::<libc::fanotify_event_metadata>();
        let mut buffer = vec![0u8; EVENT * 256];
        let count = match rustix::io::read(&self.0, &mut buffer) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            other => other?,
        };
        let (mut rest, mut files) = (&buffer[..count], Vec::new());
        while rest.len() >= EVENT {
            // SAFETY: the kernel has written whole events, each of at least this size; the copy needs no alignment.
            let event = unsafe { rest.as_ptr().cast::<libc::fanotify_event_metadata>().read_unaligned() };
            if event.fd >= 0 {
                // SAFETY: the kernel has opened the descriptor for the reader of the event, so this process owns it.
                files.push(unsafe { File::from_raw_fd(event.fd) });
            }
            rest = rest.get((event.event_len as usize).max(EVENT)..).unwrap_or_default();
        }
        Ok(files)
    }
}

impl AsFd for Opens {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[repr(C)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// Binds `file` to a free loop device, read-only. The device frees itself with its last user. Returns its path, and the
/// device held open.
///
/// # Errors
/// Without privilege, or without loop devices.
pub fn loop_device(file: &File) -> io::Result<(PathBuf, File)> {
    const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
    const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
    const READ_ONLY_AUTOCLEAR: u32 = 1 | 4;
    let control = File::options().read(true).write(true).open("/dev/loop-control")?;
    for _ in 0..64 {
        // SAFETY: LOOP_CTL_GET_FREE takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::open(&path)?;
        // SAFETY: LoopConfig is plain integers, for which zero is a value.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.fd = file.as_raw_fd() as u32;
        config.info.flags = READ_ONLY_AUTOCLEAR;
        // SAFETY: `config` lives across the call and has the layout of the kernel's `loop_config`.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &config) } == 0 {
            return Ok((path, device));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

/// A file mapped shared and read-only; only residency and frame numbers are asked of it, its bytes are never read
/// through the mapping except to bring a page in, so a file cut short cannot raise SIGBUS here unless asked to touch.
pub struct MappedFile {
    start: *mut c_void,
    size: usize,
}

impl MappedFile {
    /// Maps the first `size` bytes of `file`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(file: &File, size: u64) -> io::Result<Self> {
        let size = usize::try_from(size).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?.max(1);
        // SAFETY: a new read-only mapping at an address of the kernel's choice: it replaces no other mapping.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        Ok(Self { start, size })
    }

    /// Which pages are in the page cache: mincore(2).
    ///
    /// # Errors
    /// The kernel's.
    pub fn resident(&self) -> io::Result<Vec<bool>> {
        let mut flags = vec![false; self.size.div_ceil(PAGE as usize)];
        self.each_resident(|page| flags[page as usize] = true)?;
        Ok(flags)
    }

    /// How many pages are in the page cache.
    ///
    /// # Errors
    /// The kernel's.
    pub fn resident_pages(&self) -> io::Result<u64> {
        let mut count = 0;
        self.each_resident(|_| count += 1)?;
        Ok(count)
    }

    /// Passes the number of each page that is in the page cache to `found`, in order.
    ///
    /// # Errors
    /// The kernel's.
    pub fn each_resident(&self, mut found: impl FnMut(u64)) -> io::Result<()> {
        // In parts, since the kernel writes a byte for each page: for a file with large holes these would be many.
        let part_pages = self.size.div_ceil(PAGE as usize).min(1 << 18);
        for from in (0..self.size).step_by(part_pages * PAGE as usize) {
            let part = (self.size - from).min(part_pages * PAGE as usize);
            let here = in_any_look(part.div_ceil(PAGE as usize), |flags| {
                // SAFETY: the range is in the mapping that `self` owns, and `flags` has a byte for each page of it.
                if unsafe { libc::mincore(self.start.byte_add(from), part, flags.as_mut_ptr()) } != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            })?;
            here.iter().zip(from as u64 / PAGE..).filter(|(flag, _)| **flag & 1 == 1).for_each(|(_, page)| found(page));
        }
        Ok(())
    }

    /// The physical frame under one page; 0 as in [`Self::frames`]. The page is mapped, its neighbours are not read, and
    /// none counts as used.
    ///
    /// # Errors
    /// The kernel's.
    pub fn frame(&self, page: u64) -> io::Result<u64> {
        let at = usize::try_from(page * PAGE).ok().filter(|at| *at < self.size).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is the mapping that `self` owns; both calls change no byte, and `at` is in it.
        let failed = unsafe {
            libc::madvise(self.start, self.size, libc::MADV_RANDOM) != 0
                || libc::madvise(self.start.byte_add(at), PAGE as usize, libc::MADV_POPULATE_READ) != 0
        };
        if failed {
            return Err(io::Error::last_os_error());
        }
        let (mut raw, place) = ([0u8; ENTRY_BYTES], self.start as u64 / PAGE + page);
        File::open("/proc/self/pagemap")?.read_exact_at(&mut raw, place * ENTRY_BYTES as u64)?;
        Ok(PageEntry::all(&raw).map(PageEntry::frame).next().unwrap_or(0))
    }

    /// The physical frame under each page, 0 where none is mapped or this user may not know it (needs CAP_SYS_ADMIN).
    /// Pages are mapped first by MADV_POPULATE_READ, which answers a short file with an error, not a signal.
    ///
    /// # Errors
    /// The kernel's.
    pub fn frames(&self) -> io::Result<Vec<u64>> {
        // SAFETY: the range is the mapping that `self` owns, and reading it in changes no byte.
        if unsafe { libc::madvise(self.start, self.size, libc::MADV_POPULATE_READ) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut raw = vec![0u8; self.size.div_ceil(PAGE as usize) * ENTRY_BYTES];
        File::open("/proc/self/pagemap")?.read_exact_at(&mut raw, self.start as u64 / PAGE * ENTRY_BYTES as u64)?;
        Ok(PageEntry::all(&raw).map(PageEntry::frame).collect())
    }
}

/// How often mincore(2) is asked about pages, of which the kernel goes on moving some.
const RESIDENT_LOOKS: u32 = 8;

/// For each of `pages` pages 1 if a look found it in memory. A page that the kernel moves (compaction) is not there for a
/// moment, as mincore(2) has it. So a page is absent if it was in two looks, and further ones while a look finds more.
fn in_any_look(pages: usize, mut look: impl FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<Vec<u8>> {
    let (mut here, mut flags) = (vec![0; pages], vec![0; pages]);
    for round in 0..RESIDENT_LOOKS {
        look(&mut flags)?;
        let (mut more, mut absent) = (false, false);
        for (here, flag) in here.iter_mut().zip(&flags) {
            more |= flag & !*here & 1 == 1;
            *here |= flag & 1;
            absent |= *here == 0;
        }
        if !absent || (round > 0 && !more) {
            break;
        }
    }
    Ok(here)
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and no reference to its bytes is ever made.
        let _ = unsafe { rustix::mm::munmap(self.start, self.size) };
    }
}

/// Tries in a child process whether a new user and mount namespace may mount overlayfs with `data` on `target`.
///
/// # Errors
/// The child's: what unshare or mount answered.
pub fn try_mount_in_user_namespace(target: &std::ffi::CStr, data: &std::ffi::CStr) -> io::Result<()> {
    // SAFETY: the child calls only unshare, mount and _exit, which are async-signal-safe, and touches no memory but the
    // strings made before the fork; so it is sound whatever other threads of the parent held.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    if child == 0 {
        // SAFETY: unshare, mount and _exit are async-signal-safe; the strings live until _exit.
        unsafe {
            let overlay = c"overlay".as_ptr();
            let failed = libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) != 0
                || libc::mount(overlay, target.as_ptr(), overlay, 0, data.as_ptr().cast()) != 0;
            libc::_exit(if failed { *libc::__errno_location() } else { 0 });
        }
    }
    let mut status = 0;
    // SAFETY: `status` lives across the call, which writes nothing else.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    match libc::WEXITSTATUS(status) {
        0 if libc::WIFEXITED(status) => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Instant;

    /// In a child process: starts a detached process that ends when the file exists.
    #[test]
    fn child_that_detaches_a_process() {
        let Some(file) = std::env::var_os("PAGEFOLD_TEST_DETACH") else { return };
        if std::env::var_os("PAGEFOLD_TEST_NO_CHILDREN").is_some() {
            // SAFETY: no handler is set, and this process waits for no child that it needs to hear of.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        }
        let (go, start) = (Path::new(&file).join("go"), Instant::now());
        in_background(&[], false, || {
            while !go.exists() && start.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::fs::write(Path::new(&file).join("ended"), "").unwrap();
        })
        .and_then(Detaching::wait)
        .unwrap();
    }

    #[test]
    fn a_page_that_moves_during_one_look_is_in_memory() {
        // What looks one after the other find, and what is true then; the last look goes on.
        type Flags = &'static [u8];
        let cases: [(&[Flags], Flags, usize); 5] = [
            (&[&[1, 1, 1]], &[1, 1, 1], 1),
            (&[&[1, 0, 0]], &[1, 0, 0], 2),
            (&[&[1, 0, 0], &[0, 1, 0]], &[1, 1, 0], 3),
            (&[&[1, 0, 0], &[1, 1, 0], &[1, 1, 1]], &[1, 1, 1], 3),
            // The other bits of a byte mean nothing yet.
            (&[&[3, 2, 0xfe]], &[1, 0, 0], 2),
        ];
        for (looks, here, count) in cases {
            let mut done = 0;
            let found = in_any_look(3, |flags| {
                flags.copy_from_slice(looks[done.min(looks.len() - 1)]);
                done += 1;
                Ok(())
            });
            assert_eq!((found.unwrap().as_slice(), done), (here, count), "{looks:?}");
        }
        let mut done = 0;
        in_any_look(99, |flags| {
            flags[done] = 1;
            done += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(done, RESIDENT_LOOKS as usize, "a file that others read is looked at so often");
        in_any_look(1, |_| Err(io::ErrorKind::PermissionDenied.into())).unwrap_err();
    }

    #[test]
    fn a_detached_process_does_not_hold_its_parents_output_open() {
        for without in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (go, ended) = (dir.path().join("go"), dir.path().join("ended"));
            let mut child = Command::new(std::env::current_exe().unwrap());
            child
                .args(["--exact", "sys::tests::child_that_detaches_a_process"])
                .env("PAGEFOLD_TEST_DETACH", dir.path());
            if without {
                child.env("PAGEFOLD_TEST_NO_CHILDREN", "");
            }
            // Returns when both pipes are closed.
            let out = child.output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
            assert!(!ended.exists());
            std::fs::write(go, "").unwrap();
            let start = Instant::now();
            while !ended.exists() {
                assert!(start.elapsed() < Duration::from_secs(60), "it was there, and saw the file");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}
