//! Disks that are full, read-only, or lose writes.

use crate::common::{build_dir, damaged};
use crate::fixture::{PlainUser, Scratch, alone, by, noise, run_in, runnable, umount, use_all_inodes};
use pagefold_image::digest::Digest;
use pagefold_image::mount::{MountKind, Options};
use pagefold_image::store::{ImageRecord, Store};
use pagefold_image::tree::{FileKind, Inode, Meta, Tree};
use pagefold_image::{Error, gc, mount, stat};
use rustix::mount::MountFlags;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A plain user's store in a small tmpfs.
#[test]
fn verify_ends_on_a_full_disk() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let disk = scratch.dir("users-store");
    rustix::mount::mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), c"size=16m").unwrap();
    let user = PlainUser::new(&scratch);
    let object = disk.join("domains/default/objects").join(Digest::of(&noise(1, 300_000)).object_path());
    // Mode 000 marks the object as damaged.
    fs::set_permissions(&object, fs::Permissions::from_mode(0o000)).unwrap();
    fill(&disk.join("fill"));
    let mut verify = user.runs("children::child_that_verifies", &[]);
    verify.env("PAGEFOLD_TEST_VERIFY", &user.store).stdout(Stdio::piped());
    let (mut child, began) = (verify.spawn().unwrap(), Instant::now());
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("it waits for ever");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut text = String::new();
    child.stdout.unwrap().read_to_string(&mut text).unwrap();
    assert!(text.contains("found damaged before"), "{text}");
}

/// Writes a file until the disk is full.
fn fill(path: &Path) {
    let mut zeros = fs::File::open("/dev/zero").unwrap();
    let error = std::io::copy(&mut zeros, &mut fs::File::create(path).unwrap()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
}

#[test]
fn images_are_mounted_and_run_on_full_and_read_only_disks() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (disk, tree, other, at) = (scratch.dir("disk"), scratch.dir("tree"), scratch.dir("other"), scratch.dir("mnt"));
    rustix::mount::mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), c"size=32m,nr_inodes=600").unwrap();
    runnable(&tree);
    for number in 0..4u32 {
        fs::write(other.join(format!("{number}")), noise(number, 5000)).unwrap();
    }
    let root = disk.join("store");
    let (store, domain) = (Store::open(&root, "default").unwrap(), root.join("domains/default"));
    let run = build_dir(&store, "run", &tree).unwrap();
    for name in ["new", "old"] {
        fs::write(other.join("name"), name).unwrap();
        build_dir(&store, name, &other).unwrap();
    }
    // One image has a link farm, one has none, and one has a metadata directory made without a link farm.
    mount::mount(&store, &run, &at, &Options::default()).unwrap();
    umount(&at);
    let (old, new) = (store.image("old").unwrap(), store.image("new").unwrap());
    let by_directory = by(MountKind::Directory);
    fs::remove_file(domain.join("shelf.lock")).unwrap();
    fs::create_dir(domain.join("shelf.lock")).unwrap();
    mount::mount(&store, &old, &at, &by_directory).unwrap();
    umount(&at);
    fs::remove_dir(domain.join("shelf.lock")).unwrap();
    assert!(store.tree_path(&old.digest).with_extension("rootdir").exists());
    mount::mount(&store, &old, &at, &Options::default()).unwrap();
    umount(&at);
    let farm = |record: &ImageRecord| store.tree_path(&record.digest).with_extension("shelf");
    assert!(farm(&old).exists() && farm(&run).exists() && !farm(&new).exists());

    let is_free = || {
        let lock = fs::File::open(domain.join("lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
    };
    for state in ["no room", "no inodes", "read-only"] {
        let more = disk.join("more");
        match state {
            "no room" => fill(&disk.join("fill")),
            "no inodes" => use_all_inodes(&more),
            _ => {
                // Earlier versions made no such directory.
                fs::remove_dir(domain.join("mnt")).unwrap();
                let flags = MountFlags::RDONLY;
                rustix::mount::mount_remount(&disk, flags, c"").unwrap();
            }
        }
        let store = Store::open(&root, "default").unwrap();
        for (record, options) in [
            (&run, &Options::default()),
            (&new, &Options::default()),
            (&old, &Options::default()),
            (&old, &by_directory),
        ] {
            let staged = || fs::metadata(domain.join("staging")).unwrap().modified().unwrap();
            let before = staged();
            mount::mount(&store, record, &at, options).unwrap_or_else(|error| panic!("{state}: {error}"));
            assert!(
                options.kind == MountKind::Directory || staged() == before,
                "{state}: a link farm there is no room for"
            );
            let (file, bytes) = if record.digest == run.digest {
                ("etc/message", "from the image\n".repeat(20).into_bytes())
            } else {
                ("3", noise(3, 5000))
            };
            assert_eq!(fs::read(at.join(file)).unwrap(), bytes, "{state}");
            umount(&at);
            assert!(is_free(), "{state}");
        }
        for mode in ["ro", "rw"] {
            assert!(run_in(&root, mode, "cat /etc/message").contains("from the image"), "{state}");
        }
        assert!(damaged(&store).is_empty(), "{state}");
        stat::stat(&store, &[]).unwrap();
        assert!(is_free() && !farm(&new).exists(), "{state}");
        if state == "no inodes" || state == "read-only" {
            assert!(build_dir(&store, "built", &other).is_err());
        }
        // A lease keeps the collector out until the mount is made.
        let (_, lease) = store.hold("new").unwrap();
        assert!(!is_free(), "{state}");
        let collector = std::thread::spawn({
            let store = Store::open(&root, "default").unwrap();
            move || gc::collect(&store, false)
        });
        assert!(!is_free(), "{state}");
        drop(lease);
        let collected = collector.join().unwrap();
        if state == "read-only" {
            let error = collected.unwrap_err().to_string();
            assert!(error.contains("Read-only"), "{error}");
        } else {
            assert_eq!(collected.unwrap().objects_removed, 0, "{state}");
        }
        assert!(is_free(), "{state}");
        let _ = (fs::remove_file(disk.join("fill")), fs::remove_dir_all(&more));
    }
}

#[test]
fn a_full_disk_fails_the_build_and_nothing_else() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let small = scratch.dir("small");
    rustix::mount::mount("tmpfs", &small, "tmpfs", rustix::mount::MountFlags::empty(), c"size=8m").unwrap();
    let store = Store::open(&small.join("store"), "default").unwrap();
    let (good, big, at) = (scratch.dir("good"), scratch.dir("big"), scratch.dir("mnt"));
    fs::write(good.join("file"), noise(7, 2_000_000)).unwrap();
    for i in 0..9u32 {
        fs::write(big.join(format!("{i}")), noise(100 + i, 900_000)).unwrap();
    }
    let record = build_dir(&store, "good", &good).unwrap();
    let error = build_dir(&store, "big", &big).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(error.to_string().contains("no space left"), "{error}");
    // A build that would replace a name fails too.
    assert!(build_dir(&store, "good", &big).is_err());
    assert_eq!(store.image("good").unwrap().digest, record.digest);
    assert!(damaged(&store).is_empty());
    gc::collect(&store, false).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), noise(7, 2_000_000));
    umount(&at);
    // With enough room the build succeeds.
    fs::remove_file(big.join("8")).unwrap();
    for i in 3..8 {
        fs::remove_file(big.join(format!("{i}"))).unwrap();
    }
    build_dir(&store, "big", &big).unwrap();
}

/// A metadata directory is complete, or does not exist, however much room the disk has.
#[test]
fn a_full_disk_leaves_no_incomplete_metadata_directory() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (disk, at) = (scratch.dir("disk"), scratch.dir("mnt"));
    let file = scratch.path().join("image");
    fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let run = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    if !run(Command::new("mkfs.ext4")
        .args(["-qF", "-m", "0", "-b", "4096", "-I", "256", "-O", "^has_journal,ea_inode"])
        .arg(&file))
        || !run(Command::new("mount").args(["-o", "loop"]).args([&file, &disk]))
    {
        println!("SKIPPED: needs mkfs.ext4 and a loop mount");
        return;
    }
    let store = Store::open(&disk.join("store"), "default").unwrap();
    // An attribute of ten blocks: where it does not fit, later and smaller writes may.
    let mut tree = Tree::default();
    let mut meta = Meta { mode: 0o755, ..Meta::default() };
    meta.xattrs.insert((*b"user.large").into(), vec![7; 40_000].into());
    tree.put(b"d", Inode { meta, kind: FileKind::Dir(Default::default()) }).unwrap();
    let record = store.build().unwrap().publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    let dir = store.tree_path(&record.digest).with_extension("rootdir-shelved");
    // The first mount makes the link farm.
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    let (mut made, mut failed) = (0, 0);
    for blocks in 0..40 {
        let fill = disk.join("fill");
        let mut full = fs::File::create(&fill).unwrap();
        let mut zeros = fs::File::open("/dev/zero").unwrap();
        let error = std::io::copy(&mut zeros, &mut full).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        full.sync_all().unwrap();
        full.set_len(full.metadata().unwrap().len().next_multiple_of(4096) - blocks * 4096).unwrap();
        full.sync_all().unwrap();
        let mounted = mount::mount(&store, &record, &at, &by(MountKind::Directory));
        fs::remove_file(&fill).unwrap();
        match mounted {
            Ok(mounted) => {
                assert!(mounted.notes.is_empty(), "{blocks}: {:?}", mounted.notes);
                assert_eq!(rustix::fs::getxattr(at.join("d"), "user.large", &mut vec![0; 65_536][..]).unwrap(), 40_000);
                umount(&at);
                fs::remove_dir_all(&dir).unwrap();
                made += 1;
            }
            Err(error) => {
                assert!(matches!(error, Error::Full { .. }), "{blocks}: {error}");
                assert!(!dir.exists());
                failed += 1;
            }
        }
        gc::collect(&store, false).unwrap();
    }
    assert!(made > 0 && failed > 0, "{made} {failed}");
}

/// The disk loses a write, reports it to another process's sync, and works again.
#[test]
fn a_build_with_lost_writes_publishes_nothing() {
    let Some(scratch) = Scratch::new() else { return };
    let (small, disk) = (scratch.dir("small"), scratch.dir("disk"));
    rustix::mount::mount("tmpfs", &small, "tmpfs", MountFlags::empty(), c"size=6m").unwrap();
    let file = small.join("disk");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let run = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    // Without a journal and with few inodes, so that only contents can be lost.
    if !run(Command::new("mkfs.ext4").args(["-qF", "-O", "^has_journal", "-N", "4096"]).arg(&file))
        || !run(Command::new("mount").args(["-o", "loop"]).args([&file, &disk]))
    {
        println!("SKIPPED: needs mkfs.ext4 and a loop mount");
        return;
    }
    let store = Store::open(&disk.join("store"), "default").unwrap();
    for round in 0..2u32 {
        let build = store.build().unwrap();
        // The first round's bytes exceed the disk and are lost.
        let data = build.put_bytes(&noise(round, if round == 0 { 16 << 20 } else { 100_000 })).unwrap();
        let mut tree = Tree::default();
        tree.put(b"file", Inode { meta: Meta::default(), kind: FileKind::File(data) }).unwrap();
        let elsewhere = run(Command::new("sync").arg("-f").arg(&disk));
        assert_eq!(elsewhere, round > 0, "the disk has room in the second round only");
        assert!(run(Command::new("mount").args(["-o", "remount,size=96m"]).arg(&small)));
        let object = store.object_path(&tree.objects()[0].0);
        // The kernel reports the error once; a second request, as another thread of the build makes, gets none.
        for attempt in 0..2 {
            let published = build.publish("x", &tree, "test", Default::default(), vec![]);
            assert_eq!(published.is_ok(), round > 0, "{round} {attempt}: {published:?}");
            assert_eq!(object.exists(), round > 0, "{round} {attempt}");
        }
    }
    assert_eq!(store.images().unwrap().len(), 1);
}
