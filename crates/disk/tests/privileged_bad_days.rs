//! Bad input and failures: images that are missing, unreadable, of odd sizes, sparse, growing, shrinking, replaced; full
//! and broken disks; very large directories. None of these may affect another image.

mod common;

use common::{Mount, Random, Setup, run};
use pagefold_disk::sim::{Faults, SimFile};
use pagefold_disk::{Cache, Config};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn the_process_that_serves() {
    common::serve_if_asked();
}

#[test]
fn missing_empty_odd_and_sparse_images_read_as_they_are() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    assert_eq!(File::open(mount.path("missing")).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    for (name, size) in [("empty", 0), ("one", 1), ("odd", 4097), ("odder", (1 << 20) + 123)] {
        let mut data = vec![0; size];
        Random::new(size as u64).fill(&mut data);
        std::fs::write(mount.dir().join(name), &data).unwrap();
        assert!(std::fs::read(mount.path(name)).unwrap() == data, "{name}");
        let file = OpenOptions::new().read(true).write(true).open(mount.path(name)).unwrap();
        assert_eq!(file.read_at(&mut [0; 10], size as u64 + 5).unwrap(), 0, "nothing beyond the end of {name}");
        file.write_all_at(b"end", size as u64).unwrap();
        file.sync_all().unwrap();
        data.extend_from_slice(b"end");
        assert!(std::fs::read(mount.dir().join(name)).unwrap() == data, "{name} on the disk");
    }
    // A sparse terabyte with one page of data.
    File::create(mount.dir().join("sparse")).unwrap().set_len(1 << 40).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(mount.path("sparse")).unwrap();
    file.write_all_at(b"far", 1 << 39).unwrap();
    file.sync_all().unwrap();
    let mut bytes = vec![1; 1 << 20];
    for gib in 0..64u64 {
        file.read_exact_at(&mut bytes, gib << 30).unwrap();
        assert!(bytes.iter().all(|&b| b == 0));
    }
    assert!(mount.status().resident_bytes < 8 << 20, "zeros take no memory");
    assert!(file.write_at(b"x", i64::MAX as u64).is_err(), "an offset beyond the largest file");
}

#[test]
fn file_permissions_apply_through_the_mount() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    std::fs::write(mount.dir().join("locked"), b"secret").unwrap();
    std::fs::set_permissions(mount.dir().join("locked"), PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::write(mount.dir().join("public"), b"public").unwrap();
    run("chmod", &["755", mount.base.path().to_str().unwrap()]);
    let as_nobody = |name: &str| {
        let path = mount.path(name);
        let args = ["--reuid=65534", "--regid=65534", "--clear-groups", "cat"];
        std::process::Command::new("setpriv").args(args).arg(path).output()
    };
    match as_nobody("locked") {
        Ok(output) => assert!(!output.status.success()),
        Err(_) => println!("SKIPPED: the part with another user needs setpriv"),
    }
    // A directory is refused as an image, and the other images work.
    std::fs::create_dir(mount.dir().join("folder")).unwrap();
    assert!(std::fs::read(mount.path("folder")).is_err());
    assert_eq!(std::fs::read(mount.path("public")).unwrap(), b"public");
}

#[test]
fn external_changes_are_detected() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let real = mount.dir().join("x");
    std::fs::write(&real, vec![1; 100_000]).unwrap();
    let file = File::open(mount.path("x")).unwrap();
    let read = |expected: &dyn Fn(&[u8]) -> bool, what: &str| {
        // The promise is one second, and no delay for a new open of the file.
        let started = Instant::now();
        let mut bytes = vec![0; 300_000];
        loop {
            let count = file.read_at(&mut bytes, 0).unwrap();
            if expected(&bytes[..count]) {
                break;
            }
            assert!(started.elapsed() < Duration::from_secs(120), "{what} is never seen");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    read(&|bytes| bytes == [1; 100_000], "the first content");
    OpenOptions::new().write(true).open(&real).unwrap().write_all_at(&[2; 5000], 3000).unwrap();
    read(&|bytes| bytes[3000] == 2 && bytes[7999] == 2 && bytes[8000] == 1, "a write");
    OpenOptions::new()
        .append(true)
        .open(&real)
        .and_then(|mut f| std::io::Write::write_all(&mut f, &[3; 50_000]))
        .unwrap();
    read(&|bytes| bytes.len() == 150_000 && bytes[149_999] == 3, "growth");
    OpenOptions::new().write(true).open(&real).unwrap().set_len(10_000).unwrap();
    read(&|bytes| bytes.len() == 10_000, "shrinking");
    assert!(mount.status().images[0].changed_behind >= 3);
    // Replaced by another file of the same name: the old handle keeps the old file, a new one gets the new file.
    std::fs::write(mount.dir().join("y"), b"another").unwrap();
    std::fs::rename(mount.dir().join("y"), &real).unwrap();
    let started = Instant::now();
    while std::fs::read(mount.path("x")).unwrap() != b"another" {
        assert!(started.elapsed() < Duration::from_secs(120), "the new file is never seen");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(file.read_at(&mut [0; 4], 0).unwrap(), 4);
}

#[test]
fn a_very_large_directory_is_listed_and_served() {
    skip_unless_mountable!();
    // Creating a million files takes minutes on a slow disk, and seconds on a memory file system.
    const FILES: usize = 1_000_000;
    let base = tempfile::tempdir_in("/dev/shm").unwrap();
    let directory = base.path().join("images");
    std::fs::create_dir(&directory).unwrap();
    for n in 0..FILES {
        File::create(directory.join(format!("image-{n:07}"))).unwrap();
    }
    std::fs::write(directory.join("image-0054321"), b"here").unwrap();
    let mount = Mount::over(base, directory, Setup::default());
    let memory = |field: &str| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    let idle = memory("VmRSS:");
    let started = Instant::now();
    assert_eq!(std::fs::read_dir(mount.at()).unwrap().count(), FILES);
    let listed = started.elapsed();
    let most = memory("VmHWM:") - idle;
    println!("{FILES} files: listed in {listed:.1?}, {} MiB while listing", most >> 20);
    assert!(most < 128 * FILES as u64, "{most} bytes for the list of a directory");
    assert_eq!(std::fs::read(mount.path("image-0054321")).unwrap(), b"here");
    for n in (0..FILES).step_by(997) {
        std::fs::read(mount.path(&format!("image-{n:07}"))).unwrap();
    }
    assert!(mount.status().images.len() < FILES);
}

/// A memory file system of `mib`, unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(mib: usize) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let size = format!("size={mib}m");
        run("mount", &["-t", "tmpfs", "-o", &size, "none", dir.path().to_str().unwrap()]);
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_reported_at_sync_and_affects_no_other_image() {
    skip_unless_mountable!();
    let small = Small::new(8);
    let base = tempfile::tempdir_in("/var/tmp").unwrap();
    let mount = Mount::over(base, small.0.path().to_owned(), Setup { flush_ms: 600_000, ..Setup::default() });
    let open =
        |name: &str| OpenOptions::new().create(true).truncate(false).read(true).write(true).open(mount.path(name));
    let (victim, other) = (open("victim").unwrap(), open("other").unwrap());
    let mut data = vec![0; 12 << 20];
    Random::new(1).fill(&mut data);
    other.write_all_at(&data[..1 << 20], 0).unwrap();
    other.sync_all().unwrap();
    victim.write_all_at(&data, 0).unwrap();
    assert_eq!(victim.sync_all().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    other.write_all_at(b"fine", 0).unwrap();
    other.sync_all().unwrap();
    // Nothing is lost: once there is space, the next sync writes everything.
    let mut back = vec![0; data.len()];
    victim.read_exact_at(&mut back, 0).unwrap();
    assert!(back == data);
    run("mount", &["-o", "remount,size=32m", small.0.path().to_str().unwrap()]);
    // A flush for clean frames may have failed on the full disk meanwhile; its error is reported once, like any other.
    if let Err(error) = victim.sync_all() {
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        victim.sync_all().unwrap();
    }
    assert!(std::fs::read(mount.dir().join("victim")).unwrap() == data);
}

#[test]
fn an_error_of_the_background_flush_is_reported_once_to_each_open_file() {
    skip_unless_mountable!();
    let small = Small::new(8);
    let base = tempfile::tempdir_in("/var/tmp").unwrap();
    let mount = Mount::over(base, small.0.path().to_owned(), Setup { flush_ms: 20, ..Setup::default() });
    let open =
        |name: &str| OpenOptions::new().create(true).truncate(false).read(true).write(true).open(mount.path(name));
    let (writer, beside, other) = (open("victim").unwrap(), open("victim").unwrap(), open("other").unwrap());
    let shared = writer.try_clone().unwrap();
    let mut data = vec![0; 12 << 20];
    Random::new(2).fill(&mut data);
    other.write_all_at(&data[..4096], 0).unwrap();
    other.sync_all().unwrap();
    writer.write_all_at(&data, 0).unwrap();
    // Without a sync, the background flush fails on the full disk.
    let started = Instant::now();
    while mount.status().writeback_errors == 0 {
        assert!(started.elapsed() < Duration::from_secs(120), "the background flush never failed");
        std::thread::sleep(Duration::from_millis(20));
    }
    run("mount", &["-o", "remount,size=64m", small.0.path().to_str().unwrap()]);
    while mount.status().dirty_bytes > 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "the refused blocks are never written");
        std::thread::sleep(Duration::from_millis(20));
    }
    // As in Linux: once per open file, whichever wrote; a duplicated descriptor is the same open file.
    let code = |file: &File| file.sync_all().err().and_then(|error| error.raw_os_error());
    assert_eq!(code(&other), None, "another file has no error");
    assert_eq!(code(&writer), Some(libc::ENOSPC));
    assert_eq!((code(&writer), code(&shared)), (None, None), "reported already");
    assert_eq!((code(&beside), code(&beside)), (Some(libc::ENOSPC), None));
    assert_eq!(code(&open("victim").unwrap()), None, "a later open reports no old error");
    assert!(std::fs::read(mount.dir().join("victim")).unwrap() == data);
}

#[test]
fn a_refused_block_stays_dirty_and_reads_fail_only_for_their_reader() {
    let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
    let (file, fine) = (Arc::new(SimFile::new(vec![0; 1 << 20])), Arc::new(SimFile::new(vec![0; 1 << 20])));
    let image = cache.add_image("broken", file.clone()).unwrap();
    let other = cache.add_image("fine", fine.clone()).unwrap();
    cache.write(&image, 0, &[1; 4096]).unwrap();
    cache.write(&other, 0, &[1; 4096]).unwrap();
    file.set_faults(Faults { write: Some(libc::EIO), ..Faults::default() });
    assert!(!cache.sync(&image, 0..u64::MAX));
    assert!(cache.sync(&other, 0..u64::MAX));
    assert_eq!((image.dirty_bytes(), other.dirty_bytes()), (4096, 0));
    cache.verify().unwrap();
    file.set_faults(Faults::default());
    assert!(cache.sync(&image, 0..u64::MAX), "the disk works again");
    assert_eq!(file.data()[..4096], [1; 4096]);
    // A read error is reported to that read only.
    file.set_faults(Faults { read: Some(libc::EIO), ..Faults::default() });
    assert_eq!(cache.read(&image, 1 << 19, &mut [0; 10]).unwrap_err().errno(), libc::EIO);
    assert_eq!(cache.read(&image, 0, &mut [0; 10]).unwrap(), 10, "a block in memory can be read");
    file.set_faults(Faults::default());
    assert_eq!(cache.read(&image, 1 << 19, &mut [0; 10]).unwrap(), 10);
    cache.verify().unwrap();
}

#[test]
fn one_bad_block_keeps_no_other_block_from_the_disk() {
    let cache = Cache::new(Config { cache_bytes: 64 << 20, workers: 4, ..Config::default() }).unwrap();
    let file = Arc::new(SimFile::new(vec![0; 16 << 20]));
    let image = cache.add_image("broken", file.clone()).unwrap();
    let mut data = vec![0; 16 << 20];
    Random::new(6).fill(&mut data);
    // The bad block lies in the first of several batches, in the middle of a run.
    const BAD: usize = 77;
    file.set_faults(Faults { bad_block: Some(BAD as u64), ..Faults::default() });
    for whole in [true, false] {
        if whole {
            cache.write(&image, 0, &data).unwrap();
            assert!(!cache.sync(&image, 0..u64::MAX));
        } else {
            // Scattered blocks, which several threads write.
            data.iter_mut().for_each(|byte| *byte ^= 1);
            for block in (1..4096).step_by(2) {
                cache.write(&image, block * 4096, &data[block as usize * 4096..][..4096]).unwrap();
            }
            cache.flush_tick();
        }
        assert_eq!(image.dirty_bytes(), 4096, "whole: {whole}");
        cache.verify().unwrap();
        let disk = file.data();
        let there = |block: &usize| disk[block * 4096..][..4096] == data[block * 4096..][..4096];
        assert!((1..4096).step_by(2).filter(|block| *block != BAD).all(|block| there(&block)), "whole: {whole}");
        assert!(!there(&BAD));
    }
    assert!(matches!(file.log().last(), Some(pagefold_disk::sim::Event::Write(..))), "the tick does not sync");
    assert!(!cache.sync(&image, 0..u64::MAX));
    assert!(matches!(file.log().last(), Some(pagefold_disk::sim::Event::Sync)), "the rest is durable");
    file.set_faults(Faults::default());
    assert!(cache.sync(&image, 0..u64::MAX), "the disk works again");
    assert!(file.data()[BAD * 4096..][..4096] == data[BAD * 4096..][..4096]);
}

#[test]
fn a_write_to_a_broken_disk_fails_and_other_images_work() {
    // More dirty blocks than the cache may hold: the write must fail, and no thread may wait for ever.
    let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
    let (file, fine) = (Arc::new(SimFile::new(vec![0; 8 << 20])), Arc::new(SimFile::new(vec![7; 8 << 20])));
    let image = cache.add_image("broken", file.clone()).unwrap();
    let other = cache.add_image("fine", fine.clone()).unwrap();
    file.set_faults(Faults { write: Some(libc::ENOSPC), ..Faults::default() });
    let mut random = Random::new(5);
    let mut block = vec![0; 4096];
    let mut error = None;
    for n in 0..2048 {
        random.fill(&mut block);
        if let Err(refused) = cache.write(&image, n * 4096, &block) {
            error = Some(refused.errno());
            break;
        }
    }
    assert_eq!(error, Some(libc::ENOSPC));
    for n in 0..2048 {
        random.fill(&mut block);
        cache.write(&other, n * 4096, &block).unwrap();
        cache.read(&other, n * 4096, &mut block).unwrap();
    }
    assert!(cache.sync(&other, 0..u64::MAX));
    cache.verify().unwrap();
}

/// A file system with a file `bad` (inode 2) that refuses writes while `breaks` is set, and a file `good` (inode 3).
struct Broken {
    files: [std::sync::Mutex<Vec<u8>>; 2],
    breaks: Arc<std::sync::atomic::AtomicBool>,
    /// Syncs of `good`: with and without its attributes.
    synced: Arc<[std::sync::atomic::AtomicU64; 2]>,
}

impl Broken {
    fn attr(number: u64) -> fuser::FileAttr {
        let kind = if number == 1 { fuser::FileType::Directory } else { fuser::FileType::RegularFile };
        let time = std::time::UNIX_EPOCH;
        fuser::FileAttr {
            ino: fuser::INodeNo(number),
            size: if number == 1 { 0 } else { 1 << 20 },
            blocks: 2048,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn file(&self, number: fuser::INodeNo) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.files[number.0 as usize - 2].lock().unwrap()
    }
}

impl fuser::Filesystem for Broken {
    fn lookup(
        &self,
        _request: &fuser::Request,
        _parent: fuser::INodeNo,
        name: &std::ffi::OsStr,
        reply: fuser::ReplyEntry,
    ) {
        match ["bad", "good"].iter().position(|known| name == *known) {
            Some(at) => reply.entry(&Duration::ZERO, &Self::attr(at as u64 + 2), fuser::Generation(0)),
            None => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &fuser::Request,
        number: fuser::INodeNo,
        _handle: Option<fuser::FileHandle>,
        reply: fuser::ReplyAttr,
    ) {
        reply.attr(&Duration::ZERO, &Self::attr(number.0));
    }

    fn open(
        &self,
        _request: &fuser::Request,
        _number: fuser::INodeNo,
        _flags: fuser::OpenFlags,
        reply: fuser::ReplyOpen,
    ) {
        reply.opened(fuser::FileHandle(0), fuser::FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _request: &fuser::Request,
        number: fuser::INodeNo,
        _handle: fuser::FileHandle,
        offset: u64,
        size: u32,
        _flags: fuser::OpenFlags,
        _owner: Option<fuser::LockOwner>,
        reply: fuser::ReplyData,
    ) {
        let file = self.file(number);
        let from = (offset as usize).min(file.len());
        reply.data(&file[from..(from + size as usize).min(file.len())]);
    }

    fn write(
        &self,
        _request: &fuser::Request,
        number: fuser::INodeNo,
        _handle: fuser::FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: fuser::WriteFlags,
        _flags: fuser::OpenFlags,
        _owner: Option<fuser::LockOwner>,
        reply: fuser::ReplyWrite,
    ) {
        if number.0 == 2 && self.breaks.load(std::sync::atomic::Ordering::SeqCst) {
            return reply.error(fuser::Errno::EIO);
        }
        self.file(number)[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        reply.written(data.len() as u32);
    }

    fn fsync(
        &self,
        _request: &fuser::Request,
        number: fuser::INodeNo,
        _handle: fuser::FileHandle,
        data_only: bool,
        reply: fuser::ReplyEmpty,
    ) {
        if number.0 == 3 {
            self.synced[usize::from(data_only)].fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
        reply.ok();
    }
}

/// A mount over a [`Broken`] disk. The fields are dropped in this order: the mount before the disk below it.
struct OverBroken {
    mount: Mount,
    _disk: fuser::BackgroundSession,
    _below: tempfile::TempDir,
    breaks: Arc<std::sync::atomic::AtomicBool>,
    synced: Arc<[std::sync::atomic::AtomicU64; 2]>,
}

impl OverBroken {
    fn new(flush_ms: u64) -> Self {
        let (breaks, synced) = (Arc::new(true.into()), Arc::default());
        let files = [(); 2].map(|()| std::sync::Mutex::new(vec![0; 1 << 20]));
        let broken = Broken { files, breaks: Arc::clone(&breaks), synced: Arc::clone(&synced) };
        let (below, base) = (tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir_in("/var/tmp").unwrap());
        let directory = below.path().to_owned();
        let mut config = fuser::Config::default();
        config.mount_options = vec![fuser::MountOption::FSName("broken".to_owned())];
        let disk = fuser::spawn_mount(broken, &directory, &config).unwrap();
        let mount = Mount::over(base, directory, Setup { flush_ms, ..Setup::default() });
        Self { mount, _disk: disk, _below: below, breaks, synced }
    }

    fn open(&self, name: &str) -> File {
        OpenOptions::new().read(true).write(true).open(self.mount.path(name)).unwrap()
    }
}

#[test]
fn a_sync_covers_the_attributes_unless_only_the_data_is_asked_for() {
    use std::os::unix::fs::OpenOptionsExt;
    use std::sync::atomic::Ordering;
    skip_unless_mountable!();
    let over = OverBroken::new(600_000);
    let file = over.open("good");
    let syncs = || over.synced.each_ref().map(|count| count.swap(0, Ordering::SeqCst));
    file.write_all_at(&[8; 4096], 0).unwrap();
    file.sync_data().unwrap();
    assert_eq!(syncs(), [0, 1]);
    file.sync_all().unwrap();
    assert_eq!(syncs(), [1, 0], "there is no data to sync, but there are attributes");
    for (flag, expected) in [(libc::O_DSYNC, [0, 1]), (libc::O_SYNC, [1, 0])] {
        let path = over.mount.path("good");
        let file = OpenOptions::new().write(true).custom_flags(flag).open(path).unwrap();
        syncs();
        file.write_all_at(&[9; 4096], 0).unwrap();
        assert_eq!(syncs(), expected);
    }
}

#[test]
fn a_flush_of_everything_covers_closed_images_and_reports_unreported_errors() {
    use std::sync::atomic::Ordering;
    skip_unless_mountable!();
    let over = OverBroken::new(100);
    over.open("good").write_all_at(&[8; 4096], 0).unwrap();
    over.open("bad").write_all_at(&[8; 4096], 0).unwrap();
    // Both are closed. The good one is flushed and its file is closed in time; the bad one fails meanwhile.
    let started = Instant::now();
    loop {
        let status = over.mount.status();
        let closed =
            status.images.iter().any(|image| image.name == "good" && image.dirty_bytes == 0 && !image.direct_io);
        if closed && status.writeback_errors > 0 && over.synced[1].load(Ordering::SeqCst) > 0 {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(120), "never closed: {status:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    over.breaks.store(false, Ordering::SeqCst);
    let started = Instant::now();
    while over.mount.status().dirty_bytes > 0 {
        assert!(started.elapsed() < Duration::from_secs(120), "never written");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(over.mount.try_flush().contains("Input/output error"));
    assert!(over.mount.try_flush().contains("flushed"), "reported once");
}

#[test]
fn an_io_error_of_the_disk_is_reported_to_syncs_of_that_image_only() {
    use std::sync::atomic::Ordering;
    skip_unless_mountable!();
    let over = OverBroken::new(600_000);
    let (mount, breaks) = (&over.mount, &over.breaks);
    let open = |name: &str| over.open(name);
    let (writer, beside, other) = (open("bad"), open("bad"), open("good"));
    let code = |file: &File| file.sync_all().err().and_then(|error| error.raw_os_error());
    writer.write_all_at(&[7; 4096], 8192).unwrap();
    other.write_all_at(&[8; 4096], 0).unwrap();
    assert_eq!((code(&writer), code(&other)), (Some(libc::EIO), None));
    let mut bytes = [0; 4096];
    beside.read_exact_at(&mut bytes, 8192).unwrap();
    assert_eq!(bytes, [7; 4096], "the refused data is not lost");
    breaks.store(false, Ordering::SeqCst);
    bytes.fill(0);
    assert_eq!(code(&writer), None, "the error was reported, and now the disk has the data");
    assert_eq!((code(&beside), code(&beside)), (Some(libc::EIO), None), "the other open file reports it once");
    assert_eq!((code(&open("bad")), code(&other)), (None, None));
    File::open(mount.dir().join("bad")).unwrap().read_exact_at(&mut bytes, 8192).unwrap();
    assert_eq!(bytes, [7; 4096], "the bytes on the disk");
}

/// If the system refuses new threads, the mount serves with those it has. The test limits the address space, which
/// thread stacks need.
#[test]
fn a_mount_works_without_new_threads() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup { flush_ms: 600_000, ..Setup::default() });
    mount.terminate();
    let socket = mount.base.path().join("nbd");
    mount.setup.nbd = Some(socket.clone());
    mount.start();
    let file = File::create(mount.path("x")).unwrap();
    file.set_len(8 << 20).unwrap();
    for block in (0..2048).step_by(2) {
        file.write_all_at(&[7; 4096], block * 4096).unwrap();
    }
    let pid = Pid::from_child(mount.child.as_ref().unwrap());
    let limit = |bytes| prlimit(Some(pid), Resource::As, Rlimit { current: bytes, maximum: None }).unwrap();
    let process = std::fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let size = process.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    limit(Some((size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() + 1024) << 10));
    // Stacks of ended threads are reused, so the first connections may succeed.
    let connections: Vec<_> = (0..40).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let refused = connections.into_iter().filter(|mut connection| {
        connection.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        matches!(connection.read(&mut [0; 8]), Ok(0) | Err(_))
    });
    assert!(refused.count() > 0, "the limit refuses nothing, so the test proves nothing");
    file.sync_all().unwrap();
    assert_eq!(std::fs::read(mount.dir().join("x")).unwrap()[4096 * 2046..][..4096], [7; 4096]);
    limit(None);
    let status = mount.status();
    assert_eq!((status.dirty_bytes, status.writeback_errors), (0, 0));
    let mut greeting = [0; 18];
    UnixStream::connect(&socket).unwrap().read_exact(&mut greeting).unwrap();
    assert!(mount.terminate().0);
}

/// The server raises its limit at the start, so the test sets a lower one later. A thread that waits for descriptors must
/// not spin.
#[test]
fn a_mount_out_of_descriptors_waits_for_them_and_does_not_spin() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    use std::os::unix::net::UnixStream;
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup::default());
    mount.terminate();
    let socket = mount.base.path().join("nbd");
    mount.setup.nbd = Some(socket.clone());
    mount.start();
    // Once it answers, the server has opened all descriptors of its start.
    File::create(mount.path("x")).unwrap();
    let pid = Pid::from_child(mount.child.as_ref().unwrap());
    let limit = |most| prlimit(Some(pid), Resource::Nofile, most).unwrap();
    let raised = limit(Rlimit { current: Some(64), maximum: getrlimit(Resource::Nofile).maximum });
    assert_eq!(raised.current, raised.maximum);
    let connect = |path: &std::path::Path| UnixStream::connect(path).unwrap();
    let connections: Vec<_> = (0..100).map(|_| connect(&socket)).chain([connect(&mount.socket())]).collect();
    let started = Instant::now();
    // All but one of the numbers below the limit: a thread that waits in accept(2) has reserved its number, which is not
    // listed. Descriptors above the limit were opened before, some by the process that started the test.
    let all_taken = || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", mount.pid())).unwrap().flatten();
        let numbers = open.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
        numbers.filter(|number| *number < 64).count() >= 63
    };
    while !all_taken() {
        assert!(started.elapsed() < Duration::from_secs(120), "descriptors do not run out");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Processor time of the accepting threads, in hundredths of a second.
    let spent = || -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap().flatten();
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        let stats = stats.filter(|stat| stat.contains("(nbd)") || stat.contains("(control)"));
        let times = |stat: String| -> u64 {
            let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
            fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
        };
        stats.map(times).sum()
    };
    let before = spent();
    std::thread::sleep(Duration::from_secs(3));
    let after = spent();
    assert!(all_taken(), "the limit was not reached, so the test proves nothing");
    assert!(after - before < 60, "{} hundredths of 3 seconds", after - before);
    drop(connections);
    let status = || pagefold_disk::control::ask_status(&mount.socket());
    while status().is_err() {
        assert!(started.elapsed() < Duration::from_secs(120), "no answer although descriptors are free");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(mount.terminate().0);
}
