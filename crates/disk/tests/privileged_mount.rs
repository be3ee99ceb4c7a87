//! A mount behaves as a directory: names, attributes, data, locks, mappings; and it ends cleanly.

mod common;

use common::{Mount, Random, Setup};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::time::{Duration, Instant, SystemTime};

#[test]
fn the_process_that_serves() {
    common::serve_if_asked();
}

#[test]
fn names_and_attributes_are_those_of_the_directory() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let (dir, at) = (mount.dir(), mount.at());
    std::fs::write(dir.join("a.raw"), vec![7; 10_000]).unwrap();
    std::fs::create_dir(dir.join("sub")).unwrap();
    std::fs::write(dir.join("sub/b"), b"").unwrap();
    std::os::unix::fs::symlink("a.raw", dir.join("link")).unwrap();
    let old = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_234_567_890_123_456_789);
    File::options().write(true).open(dir.join("a.raw")).unwrap().set_modified(old).unwrap();
    std::fs::set_permissions(dir.join("a.raw"), PermissionsExt::from_mode(0o640)).unwrap();

    let mut names: Vec<_> = std::fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.raw", "link", "sub"]);
    let (shown, real) = (at.join("a.raw").metadata().unwrap(), dir.join("a.raw").metadata().unwrap());
    assert_eq!((shown.len(), shown.mode(), shown.ino()), (10_000, real.mode(), real.ino()));
    assert_eq!(shown.modified().unwrap(), old);
    assert_eq!(std::fs::read_link(at.join("link")).unwrap().to_str(), Some("a.raw"));
    assert_eq!(std::fs::read(at.join("link")).unwrap(), vec![7; 10_000]);
    assert_eq!(std::fs::read(at.join("sub/b")).unwrap(), b"");

    // The other direction: changed through the mount, visible in the directory.
    std::fs::create_dir(at.join("new")).unwrap();
    std::fs::write(at.join("new/c"), b"content").unwrap();
    std::fs::rename(at.join("new/c"), at.join("sub/d")).unwrap();
    std::fs::hard_link(at.join("sub/d"), at.join("e")).unwrap();
    assert_eq!(std::fs::read(at.join("e")).unwrap(), b"content");
    assert_eq!(at.join("e").metadata().unwrap().nlink(), 2);
    std::fs::remove_file(at.join("sub/d")).unwrap();
    std::fs::remove_dir(at.join("new")).unwrap();
    mount.flush();
    assert_eq!(std::fs::read(dir.join("e")).unwrap(), b"content");
    assert!(!dir.join("new").exists() && !dir.join("sub/d").exists());
    // Either of two names may be removed first.
    std::fs::hard_link(at.join("e"), at.join("e2")).unwrap();
    assert_eq!(std::fs::read(at.join("e")).unwrap(), b"content");
    std::fs::remove_file(at.join("e")).unwrap();
    assert_eq!(std::fs::read(at.join("e2")).unwrap(), b"content");
    std::fs::rename(at.join("e2"), at.join("e")).unwrap();
    // A rename over another file replaces its name, not its content.
    std::fs::write(at.join("f"), b"other").unwrap();
    std::fs::rename(at.join("f"), at.join("e")).unwrap();
    assert_eq!(std::fs::read(at.join("e")).unwrap(), b"other");

    // Times that were set stay, even if blocks are still to be written.
    let mut file = File::create(at.join("g")).unwrap();
    file.write_all(&[1; 5000]).unwrap();
    let before = SystemTime::now() - Duration::from_secs(5);
    assert!(file.metadata().unwrap().modified().unwrap() > before, "a write changes the time immediately");
    file.set_modified(old).unwrap();
    drop(file);
    mount.flush();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(at.join("g").metadata().unwrap().modified().unwrap(), old);

    let (here, there) = (rustix::fs::statvfs(&at).unwrap(), rustix::fs::statvfs(&dir).unwrap());
    assert_eq!((here.f_blocks, here.f_bsize), (there.f_blocks, there.f_bsize));
}

#[test]
fn an_open_file_works_after_its_name_is_removed() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let mut file = OpenOptions::new().create_new(true).read(true).write(true).open(mount.path("x")).unwrap();
    file.write_all(b"before").unwrap();
    std::fs::remove_file(mount.path("x")).unwrap();
    file.write_all(b" and after").unwrap();
    file.sync_all().unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before and after");
    assert_eq!(file.metadata().unwrap().len(), 16);
    // Its attributes are still its own, and it can be opened through its descriptor.
    let old = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_234_567_890_123_456_789);
    file.set_permissions(PermissionsExt::from_mode(0o604)).unwrap();
    std::os::unix::fs::fchown(&file, Some(12), Some(34)).unwrap();
    file.write_all_at(b"B", 0).unwrap();
    file.set_modified(old).unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let again = OpenOptions::new().read(true).write(true).open(&link).unwrap();
    let shown = again.metadata().unwrap();
    assert_eq!((shown.mode() & 0o7777, shown.uid(), shown.gid(), shown.nlink()), (0o604, 12, 34, 0));
    assert_eq!(shown.modified().unwrap(), old);
    let mut byte = [0];
    again.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, *b"B");
    drop(again);
    // A new file with the same name is another file.
    std::fs::write(mount.path("x"), b"new").unwrap();
    assert_eq!(std::fs::read(mount.path("x")).unwrap(), b"new");
    assert_eq!(file.metadata().unwrap().len(), 16);
}

/// A file that was replaced while it was open has no name. Calls on it reach that file, and never the file that has the name
/// now, even if that is a link out of the directory.
#[test]
fn calls_on_a_replaced_open_file_never_reach_its_replacement() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let at = mount.at();
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(outside.path(), PermissionsExt::from_mode(0o600)).unwrap();
    let mode = |path: &std::path::Path| path.metadata().unwrap().mode() & 0o7777;
    for link in [false, true] {
        let open = File::create(at.join("x")).unwrap();
        if link {
            std::os::unix::fs::symlink(outside.path(), at.join("new")).unwrap();
        } else {
            std::fs::write(at.join("new"), "new").unwrap();
            std::fs::set_permissions(at.join("new"), PermissionsExt::from_mode(0o600)).unwrap();
        }
        std::fs::rename(at.join("new"), at.join("x")).unwrap();
        open.set_permissions(PermissionsExt::from_mode(0o666)).unwrap();
        open.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let own = open.metadata().unwrap();
        assert_eq!((own.mode() & 0o7777, own.modified().unwrap()), (0o666, SystemTime::UNIX_EPOCH));
        assert_eq!((mode(&at.join("x")), mode(outside.path())), (0o600, 0o600), "link: {link}");
        assert!(outside.path().metadata().unwrap().modified().unwrap() > SystemTime::UNIX_EPOCH);
        let again = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open))).unwrap();
        assert_eq!(again.metadata().unwrap().ino(), own.ino());
        drop(open);
        std::fs::remove_file(at.join("x")).unwrap();
    }
}

/// Another program may replace a subdirectory by a link at any time: no call through the mount follows it, not even for
/// names that the kernel knows already.
#[test]
fn a_directory_that_became_a_link_is_never_followed() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let outside = tempfile::tempdir_in("/var/tmp").unwrap();
    for (n, dir) in [mount.dir().join("sub"), outside.path().to_owned()].iter().enumerate() {
        std::fs::create_dir_all(dir).unwrap();
        for name in ["a", "b"] {
            std::fs::write(dir.join(name), if n == 0 { "inside" } else { "outside" }).unwrap();
        }
    }
    let sub = File::open(mount.path("sub")).unwrap();
    let file = |name: &str, flags| rustix::fs::openat(&sub, name, flags, rustix::fs::Mode::RWXU);
    drop(file("a", rustix::fs::OFlags::RDONLY).unwrap());
    std::fs::rename(mount.dir().join("sub"), mount.dir().join("gone")).unwrap();
    std::os::unix::fs::symlink(outside.path(), mount.dir().join("sub")).unwrap();
    use rustix::fs::{AtFlags, Mode, OFlags};
    for flags in [OFlags::RDONLY, OFlags::RDWR | OFlags::TRUNC, OFlags::CREATE | OFlags::WRONLY] {
        assert!(file("a", flags).is_err() && file("b", flags).is_err() && file("new", flags).is_err());
    }
    assert!(rustix::fs::unlinkat(&sub, "a", AtFlags::empty()).is_err());
    assert!(rustix::fs::renameat(&sub, "b", &sub, "c").is_err());
    assert!(rustix::fs::mkdirat(&sub, "new", Mode::RWXU).is_err());
    assert!(rustix::fs::symlinkat("a", &sub, "new").is_err());
    // This call may still reach the file that it is meant for, while the mount has it open.
    let _ = rustix::fs::chmodat(&sub, "a", Mode::RWXU, AtFlags::empty());
    assert_ne!(outside.path().join("a").metadata().unwrap().mode() & 0o7777, 0o700);
    let mut names: Vec<_> =
        std::fs::read_dir(outside.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(std::fs::read(outside.path().join("a")).unwrap(), b"outside");
}

#[test]
fn an_image_is_named_by_its_path() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    std::fs::create_dir(mount.path("sub")).unwrap();
    for (name, later) in [("a", "b"), ("sub/c", "sub/d")] {
        std::fs::write(mount.path(name), [1; 4096]).unwrap();
        assert!(mount.status().images.iter().any(|image| image.name == name), "{:?}", mount.status().images);
        std::fs::rename(mount.path(name), mount.path(later)).unwrap();
        assert!(mount.status().images.iter().any(|image| image.name == later), "{:?}", mount.status().images);
    }
}

/// Changes of names, links and modes through the mount are not external: no image loses its blocks, open or not.
#[test]
fn an_image_that_is_renamed_through_the_mount_stays_cached() {
    use rustix::fs::RenameFlags;
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let dir = rustix::fs::open(mount.at(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let mut random = Random::new(9);
    let mut data = [vec![0; 1 << 20], vec![0; 1 << 20]];
    for (name, data) in ["a", "b"].into_iter().zip(&mut data) {
        random.fill(data);
        std::fs::write(mount.dir().join(name), data).unwrap();
    }
    std::fs::hard_link(mount.dir().join("b"), mount.dir().join("b2")).unwrap();
    let open = |name: &str| File::open(mount.path(name)).unwrap();
    let read = |file: &File, expected: &[u8]| {
        let mut bytes = vec![0; 1 << 20];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == expected);
    };
    let rename = |from: &str, to: &str, how| rustix::fs::renameat_with(&dir, from, &dir, to, how).unwrap();
    let check = |what: &str, images: u64| {
        let status = mount.status();
        assert!(status.images.iter().all(|image| image.changed_behind == 0), "{what}: {:?}", status.images);
        assert_eq!(status.disk_read_bytes, images << 20, "{what}");
    };
    let files = [open("a"), open("b")];
    let read_both = || files.iter().zip(&data).for_each(|(file, data)| read(file, data));
    read_both();
    check("nothing done yet", 2);
    // The mount looks for changes once a second.
    let look = || std::thread::sleep(Duration::from_millis(2500));
    rename("a", "b", RenameFlags::EXCHANGE);
    let names: Vec<String> = mount.status().images.into_iter().map(|image| image.name).collect();
    assert_eq!(names, ["a", "b"]);
    look();
    read_both();
    check("exchanged", 2);
    // b is now called a and b2; a is called b.
    rename("b", "a", RenameFlags::empty());
    look();
    read_both();
    check("one of two names replaced", 2);
    std::fs::remove_file(mount.path("a")).unwrap();
    look();
    read_both();
    check("the last name gone", 2);
    drop(files);

    let held = || {
        let files = std::fs::read_dir(format!("/proc/{}/fd", mount.pid())).unwrap().flatten();
        let mut files = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        files.any(|path| path != mount.dir() && path.starts_with(mount.dir()))
    };
    let started = Instant::now();
    while held() {
        assert!(started.elapsed() < Duration::from_secs(120), "never closed");
        std::thread::sleep(Duration::from_millis(20));
    }
    rename("b2", "c", RenameFlags::empty());
    assert!(mount.status().images.iter().any(|image| image.name == "c"));
    std::fs::hard_link(mount.path("c"), mount.path("d")).unwrap();
    std::fs::set_permissions(mount.path("c"), PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::remove_file(mount.path("c")).unwrap();
    read(&open("d"), &data[1]);
    check("changed while closed", 1);
}

/// Runs a shell line as `user`, in the mount.
#[track_caller]
fn shell(mount: &Mount, user: u32, line: &str) {
    use std::os::unix::process::CommandExt;
    let mut command = std::process::Command::new("sh");
    let output =
        command.args(["-ec", line]).current_dir("/").env("AT", mount.at()).uid(user).gid(user).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_new_file_has_the_requested_mode() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    shell(
        &mount,
        0,
        "umask 0; echo x > $AT/all; mkdir $AT/dir; umask 0333; echo x > $AT/read; umask 0777; echo x > $AT/none",
    );
    shell(&mount, 0, "umask 027; echo x > $AT/some");
    let mode = |name: &str| mount.dir().join(name).metadata().unwrap().mode() & 0o7777;
    assert_eq!(["all", "dir", "read", "none", "some"].map(mode), [0o666, 0o777, 0o444, 0, 0o640]);
}

/// An unprivileged user may create a file with a mode that forbids opening it again, as in any directory.
#[test]
fn an_unprivileged_user_can_write_to_a_new_read_only_file() {
    skip_unless_mountable!();
    const NOBODY: u32 = 65534;
    if !common::has("fusermount3") {
        println!("SKIPPED: needs fusermount3");
        return;
    }
    let mut mount = Mount::new(Setup { user: Some(NOBODY), ..Setup::default() });
    shell(&mount, NOBODY, "umask 0333; echo text > $AT/read; umask 0777; echo text > $AT/none; cat $AT/read");
    assert!(mount.status().images.iter().any(|image| image.name == "none"));
    let (ok, said) = mount.terminate();
    assert!(ok, "{said}");
    for (name, mode) in [("read", 0o444), ("none", 0)] {
        let path = mount.dir().join(name);
        assert_eq!(
            (path.metadata().unwrap().mode() & 0o7777, std::fs::read(path).unwrap()),
            (mode, b"text\n".to_vec())
        );
    }
}

#[test]
fn locks_and_mappings_work() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    std::fs::write(mount.dir().join("x"), vec![3; 20_000]).unwrap();
    let open = || OpenOptions::new().read(true).write(true).open(mount.path("x")).unwrap();
    let (a, b) = (open(), open());
    rustix::fs::flock(&a, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(rustix::fs::flock(&b, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err());
    drop(a);
    rustix::fs::flock(&b, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();

    // A shared mapping in another program: its writes reach the file, and a write call is visible in it.
    if !common::has("python3") {
        println!("SKIPPED: the mapping part needs python3");
        return;
    }
    let script = "import mmap,os,sys\nf=os.open(sys.argv[1],os.O_RDWR)\nm=mmap.mmap(f,20000)\n\
                  assert m[:3]==b'\\x03\\x03\\x03'\nm[5000:5004]=b'map!'\nm.flush()\n\
                  os.pwrite(f,b'pwrite',9000)\nassert m[9000:9006]==b'pwrite',m[9000:9006]\n";
    common::run("python3", &["-c", script, mount.path("x").to_str().unwrap()]);
    let mut bytes = [0; 4];
    b.read_exact_at(&mut bytes, 5000).unwrap();
    assert_eq!(&bytes, b"map!");
}

#[test]
fn holes_and_reserved_space_are_those_of_the_file() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(mount.path("sparse")).unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&[5; 8192], 32 << 20).unwrap();
    let seek = |from| rustix::fs::seek(&file, from);
    assert_eq!(seek(rustix::fs::SeekFrom::Data(0)).unwrap(), 32 << 20, "a dirty block is data");
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(32 << 20)).unwrap(), (32 << 20) + 8192);
    assert!(seek(rustix::fs::SeekFrom::Data(40 << 20)).is_err());
    assert!(mount.dir().join("sparse").metadata().unwrap().blocks() < 100, "the holes stayed holes");
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, (32 << 20) + 100, 8000).unwrap();
    let mut bytes = vec![9; 8192];
    file.read_exact_at(&mut bytes, 32 << 20).unwrap();
    assert!(bytes[..100].iter().all(|&b| b == 5) && bytes[100..8100].iter().all(|&b| b == 0) && bytes[8100] == 5);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 65 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 65 << 20);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::ZERO_RANGE, 33 << 20, 33 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 66 << 20);
}

#[test]
fn zeroed_ranges_have_disk_space_and_punched_ones_have_none() {
    use rustix::fs::{FallocateFlags as How, fallocate};
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let probe = File::create(mount.dir().join("probe")).unwrap();
    if fallocate(&probe, How::ZERO_RANGE, 0, 4096).is_err() {
        println!("SKIPPED: the file system cannot zero ranges");
        return;
    }
    let kib = || mount.dir().join("x").metadata().unwrap().blocks() / 2;
    std::fs::write(mount.dir().join("x"), vec![7; 4 << 20]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(mount.path("x")).unwrap();
    fallocate(&file, How::ZERO_RANGE | How::KEEP_SIZE, 100, (4 << 20) - 200).unwrap();
    file.sync_all().unwrap();
    assert!(kib() >= 4096, "{} KiB", kib());
    let bytes = std::fs::read(mount.dir().join("x")).unwrap();
    assert!(bytes[..100] == [7; 100] && bytes[100..(4 << 20) - 100].iter().all(|&byte| byte == 0));
    assert!(bytes[(4 << 20) - 100..] == [7; 100]);
    // Beyond the end, without a change of size.
    fallocate(&file, How::ZERO_RANGE | How::KEEP_SIZE, 0, 8 << 20).unwrap();
    assert!(kib() >= 8192 && file.metadata().unwrap().len() == 4 << 20, "{} KiB", kib());
    fallocate(&file, How::PUNCH_HOLE | How::KEEP_SIZE, 0, 8 << 20).unwrap();
    // The cache clears the part inside the size.
    assert!(kib() <= 4096 + 64, "{} KiB", kib());
    // Also for a hole.
    fallocate(&file, How::ZERO_RANGE, 0, 4 << 20).unwrap();
    assert!(kib() >= 8192, "{} KiB", kib());
}

#[test]
fn equal_images_are_in_memory_once_and_the_status_says_so() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let mut data = vec![0; 8 << 20];
    Random::new(4).fill(&mut data);
    for name in ["a", "b", "c"] {
        std::fs::write(mount.dir().join(name), &data).unwrap();
    }
    for name in ["a", "b", "c"] {
        assert!(std::fs::read(mount.path(name)).unwrap() == data);
    }
    let status = mount.status();
    assert_eq!(status.memory_saved_bytes, 16 << 20);
    assert_eq!(status.resident_bytes, 8 << 20);
    assert_eq!(status.images.len(), 3);
    assert_eq!(status.images[1].shared_bytes, 8 << 20);
    assert!(status.images[0].direct_io || !status.images[0].open);
    // The process's resident memory agrees.
    let process = std::fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let anonymous = process.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kib: u64 = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 22 << 10, "8 MiB of blocks, the tables and one request buffer per thread: {kib} KiB");
}

#[test]
fn fingerprints_save_reads_after_a_restart_and_are_dropped_if_an_image_changed() {
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup::default());
    mount.terminate();
    mount.setup.fingerprints = Some(mount.base.path().join("fp"));
    let mut data = vec![0; 4 << 20];
    Random::new(4).fill(&mut data);
    for name in ["a", "b"] {
        std::fs::write(mount.dir().join(name), &data).unwrap();
    }
    mount.start();
    for name in ["a", "b"] {
        assert!(std::fs::read(mount.path(name)).unwrap() == data);
    }
    assert_eq!(mount.status().io_saved_bytes, 0, "nothing was known");
    assert!(mount.terminate().0);
    mount.start();
    for name in ["a", "b"] {
        assert!(std::fs::read(mount.path(name)).unwrap() == data);
    }
    let status = mount.status();
    assert_eq!((status.io_saved_bytes, status.disk_read_bytes), (4 << 20, 4 << 20));
    assert!(mount.terminate().0);

    // b is changed while it is not mounted: its file is stale, and the new bytes are read.
    data[1 << 20] ^= 1;
    std::fs::write(mount.dir().join("b"), &data).unwrap();
    // The fingerprint file of a is damaged.
    for entry in std::fs::read_dir(mount.base.path().join("fp")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "fp") {
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.len() / 2;
            bytes[at] ^= 0x80;
            std::fs::write(path, bytes).unwrap();
        }
    }
    mount.start();
    assert!(std::fs::read(mount.path("b")).unwrap() == data);
    std::fs::read(mount.path("a")).unwrap();
    let status = mount.status();
    assert_eq!((status.io_saved_bytes, status.fingerprint_files_rejected), (0, 2));
    let outcomes: Vec<String> = status.images.iter().map(|i| i.fingerprints.clone().unwrap()).collect();
    assert!(outcomes[0].contains("damaged") && outcomes[1].contains("damaged") | outcomes[1].contains("changed"));
}

#[test]
fn a_second_mount_of_the_directory_is_refused_and_so_is_one_inside_it() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let other = mount.base.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let (ok, said) = mount.try_another(&mount.dir(), &other);
    assert!(!ok && said.contains("is mounted already"), "{said}");
    let inside = other.join("inside");
    std::fs::create_dir(&inside).unwrap();
    let (ok, said) = mount.try_another(&other, &inside);
    assert!(!ok && said.contains("must not lie inside"), "{said}");
}

#[test]
fn sigterm_writes_everything_and_unmounts() {
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup { flush_ms: 600_000, ..Setup::default() });
    let mut data = vec![0; 3 << 20];
    Random::new(8).fill(&mut data);
    std::fs::write(mount.path("x"), &data).unwrap();
    assert_eq!(mount.status().dirty_bytes, 3 << 20, "nothing flushed it yet");
    let (ok, said) = mount.terminate();
    assert!(ok, "{said}");
    assert!(!pagefold_disk::mount::is_mounted(&mount.at()));
    assert!(std::fs::read(mount.dir().join("x")).unwrap() == data);

    // With an open file the mount point is freed immediately, the process ends after the grace time, and the data is written
    // in any case.
    mount.start();
    let open = OpenOptions::new().write(true).open(mount.path("x")).unwrap();
    open.write_all_at(b"late", 0).unwrap();
    let (ok, said) = mount.terminate();
    assert!(ok, "{said}");
    assert_eq!(std::fs::read(mount.dir().join("x")).unwrap()[..4], *b"late");
    // With rings the kernel closes the connection a moment after the process has ended: such a call is one under way.
    let code = open.write_all_at(b"later", 0).unwrap_err().raw_os_error();
    assert!(matches!(code, Some(libc::ENOTCONN | libc::ECONNABORTED)), "{code:?}");
}

/// The kernel keeps data written to a mapping until a sync, or until the last user closes the file.
#[test]
fn sigterm_writes_the_data_of_a_mapping_that_stays() {
    use std::process::{Command, Stdio};
    skip_unless_mountable!();
    if !common::has("python3") {
        println!("SKIPPED: needs python3");
        return;
    }
    let mut mount = Mount::new(Setup::default());
    std::fs::write(mount.dir().join("x"), vec![3; 20_000]).unwrap();
    let script = "import mmap,os,sys\nm=mmap.mmap(os.open(sys.argv[1],os.O_RDWR),20000)\nm[5000:5004]=b'map!'\n\
                  print('ready',flush=True)\nsys.stdin.read()\n";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(mount.path("x")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = command.spawn().unwrap();
    program.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    let (ok, said) = mount.terminate();
    let bytes = std::fs::read(mount.dir().join("x")).unwrap();
    drop(program.stdin.take());
    program.wait().unwrap();
    assert!(ok, "{said}");
    assert_eq!(bytes[5000..5004], *b"map!");
}

#[test]
fn a_read_only_mount_changes_nothing() {
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup::default());
    mount.terminate();
    std::fs::write(mount.dir().join("x"), b"there").unwrap();
    mount.setup.read_only = true;
    mount.start();
    assert_eq!(std::fs::read(mount.path("x")).unwrap(), b"there");
    for result in [
        std::fs::write(mount.path("x"), b"not"),
        std::fs::write(mount.path("y"), b"not"),
        std::fs::remove_file(mount.path("x")),
        std::fs::rename(mount.path("x"), mount.path("z")),
    ] {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EROFS));
    }
}
