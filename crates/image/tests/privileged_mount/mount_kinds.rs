//! Every kind of mount shows the tree of its image.

use crate::common::build_dir;
use crate::fixture::{Fixture, Scratch, by, noise, sample, umount, unmount};
use pagefold_image::build::Omissions;
use pagefold_image::digest::Digest;
use pagefold_image::mount::{MountKind, Options};
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::{Data, FileKind, Inode, Meta, Tree};
use pagefold_image::{Error, build, export, mount};
use rustix::fs::XattrFlags;
use rustix::mount::MountFlags;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

#[test]
fn every_kind_of_mount_shows_the_same_tree() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    sample(&tree);
    let record = build_dir(&store, "all", &tree).unwrap();
    assert!(record.notes.is_empty(), "{:?}", record.notes);
    for kind in [MountKind::Auto, MountKind::Erofs, MountKind::Loop, MountKind::Directory] {
        let options = by(kind);
        match mount::mount(&store, &record, &at, &options) {
            Err(error) if kind == MountKind::Loop => {
                println!("SKIPPED: loop: {error}");
                continue;
            }
            other => other.unwrap(),
        };
        // An image built from the mount is equal in names, modes, owners, times, attributes, links and bytes.
        let again = Store::open(&scratch.dir("again"), "default").unwrap();
        assert_eq!(build_dir(&again, "x", &at).unwrap().digest, record.digest, "{kind:?}");
        let links = |path: &str| fs::metadata(at.join(path)).map(|meta| (meta.ino(), meta.nlink())).unwrap();
        assert_eq!(links("usr/bin/tool"), links("bin/same"));
        let error = fs::write(at.join("new"), "x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        umount(&at);
        assert!(mount::umount(&at, false).unwrap_err().to_string().contains("nothing is mounted"));
    }
}

/// Two read-only file systems may agree in device and inode numbers, sizes and all times, and differ in content.
#[test]
fn an_image_built_from_a_mount_equals_the_mounted_image() {
    let Some(Fixture { scratch: _scratch, tree, at, store }) = Fixture::new() else { return };
    for round in 0..3u32 {
        fs::write(tree.join("file"), noise(round, 100_000)).unwrap();
        let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000);
        for path in [tree.join("file"), tree.clone()] {
            fs::File::open(path).unwrap().set_modified(old).unwrap();
        }
        let record = build_dir(&store, "x", &tree).unwrap();
        mount::mount(&store, &record, &at, &Options::default()).unwrap();
        let again = build_dir(&store, "y", &at).unwrap();
        let once_more = build_dir(&store, "z", &at).unwrap();
        umount(&at);
        assert_eq!((again.digest, once_more.digest), (record.digest, record.digest), "round {round}");
    }
}

#[test]
fn mount_points_become_directories_and_kernel_file_systems_are_left_empty() {
    let Some(Fixture { scratch: _scratch, tree, store, .. }) = Fixture::new() else { return };
    for name in ["proc", "sub/tmp", "file"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    let mount = |what: &[&str], at: &str| {
        let status = Command::new("mount").args(what).arg(tree.join(at)).status().unwrap();
        assert!(status.success(), "{at}");
    };
    mount(&["--bind", "/proc"], "proc");
    mount(&["-t", "tmpfs", "-o", "mode=1757", "none"], "sub/tmp");
    fs::write(tree.join("sub/tmp/x"), "x").unwrap();
    let build = |one_file_system| {
        let (build, mut notes) = (store.build().unwrap(), Omissions::default());
        let options = build::Options { one_file_system, ..Default::default() };
        let built = build::from_directory(&build, &tree, options, &mut notes, &Progress::silent());
        built.map(|tree| (tree, notes.lines()))
    };
    for one_file_system in [false, true] {
        let (mut tree, notes) = build(one_file_system).unwrap();
        let (proc, tmp) = (tree.find(b"proc").unwrap(), tree.find(b"sub/tmp").unwrap());
        let names = [proc, tmp].map(|dir| tree.children(dir).count());
        assert_eq!(names, [0, usize::from(!one_file_system)]);
        assert_eq!(tree.inode(tmp).meta.mode, 0o1757);
        let said = if one_file_system {
            "directories on other file systems are empty in the image (2;"
        } else {
            "directories of the kernel's own"
        };
        assert!(notes.len() == 1 && notes[0].starts_with(said), "{notes:?}");
    }
    // A user's FUSE mount, which root may not even stat.
    let Ok(fuse) = fs::File::options().read(true).write(true).open("/dev/fuse") else {
        println!("SKIPPED the rest: no /dev/fuse");
        return;
    };
    let users = std::ffi::CString::new(format!("fd={},rootmode=40000,user_id=65534,group_id=65534", fuse.as_raw_fd()));
    rustix::mount::mount("fuse", tree.join("file"), "fuse", MountFlags::empty(), &*users.unwrap()).unwrap();
    assert!(build(false).unwrap_err().to_string().contains("file: Permission denied"));
    let (mut found, notes) = build(true).unwrap();
    assert!(notes.len() == 1 && notes[0].contains("are empty in the image (3;"), "{notes:?}");
    let id = found.find(b"file").unwrap();
    assert!(found.inode(id).kind == FileKind::Dir(Default::default()));
}

#[test]
fn a_million_names_in_one_directory_are_listed_and_found() {
    let Some(scratch) = Scratch::new() else { return };
    let (store, at) = (Store::open(&scratch.dir("store"), "default").unwrap().without_sync(), scratch.dir("mnt"));
    let mut tree = Tree::default();
    let dir = Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: FileKind::Dir(Default::default()) };
    let dir = tree.put(b"d", dir).unwrap();
    let meta = Meta { mode: 0o644, ..Meta::default() };
    for number in 0..1_000_000u32 {
        let data = Data::Inline(number.to_le_bytes().into());
        let id = tree.add(Inode { meta: meta.clone(), kind: FileKind::File(data) });
        tree.link(dir, format!("{number:07}").as_bytes(), id).unwrap();
    }
    let record = store.build().unwrap().publish("million", &tree, "test", Default::default(), vec![]).unwrap();
    drop(tree);
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert_eq!(fs::read_dir(at.join("d")).unwrap().count(), 1_000_000);
    for number in [0u32, 1, 499_999, 999_999] {
        assert_eq!(fs::read(at.join(format!("d/{number:07}"))).unwrap(), number.to_le_bytes());
    }
    assert!(!at.join("d/1000000").exists());
}

#[test]
fn a_damaged_metadata_image_is_never_mounted() {
    let Some(Fixture { scratch: _scratch, tree, at, store }) = Fixture::new() else { return };
    fs::write(tree.join("file"), noise(8, 200_000)).unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let path = store.tree_path(&record.digest);
    let mut bytes = fs::read(&path).unwrap();
    bytes[1300] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = mount::mount(&store, &record, &at, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)), "{error}");
}

#[test]
fn a_self_contained_image_carries_data_and_fingerprints() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    export::make_native(&store, &record.digest, &Progress::silent()).unwrap();
    let full = store.full_path(&record.digest);
    rustix::mount::mount(&full, &at, "erofs", rustix::mount::MountFlags::RDONLY, None).unwrap();
    let mut value = [0; 64];
    let count = rustix::fs::getxattr(at.join("usr/bin/tool"), "trusted.erofs.fingerprint", &mut value).unwrap();
    assert_eq!(value[..count], [&b"sha256:"[..], &Digest::of(&noise(1, 300_000)).0].concat());
    assert_eq!(fs::read(at.join("bin/same")).unwrap(), noise(1, 300_000));
    // Fingerprints belong to EROFS and are not part of the tree.
    let again = Store::open(&scratch.dir("again"), "default").unwrap();
    let (build, mut notes) = (again.build().unwrap(), Omissions::default());
    let read = build::from_directory(&build, &at, Default::default(), &mut notes, &Progress::silent()).unwrap();
    assert_eq!(build.publish("x", &read, "t", Default::default(), vec![]).unwrap().digest, record.digest);
    unmount(&at);
    match mount::mount(&store, &record, &at, &by(MountKind::Native)) {
        Ok(_) => assert_eq!(fs::read(at.join("bin/same")).unwrap(), noise(1, 300_000)),
        Err(error) => println!("SKIPPED: native mount: {error}"),
    }
}

#[test]
fn a_store_works_at_any_depth() {
    let Some(scratch) = Scratch::new() else { return };
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    fs::write(tree.join("file"), noise(1, 5000)).unwrap();
    let deep = "d".repeat(240);
    let store = Store::open(&scratch.dir(&deep).join("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    for kind in [MountKind::Auto, MountKind::Erofs, MountKind::Loop, MountKind::Directory] {
        for upper in [None, Some(scratch.dir(&format!("{deep}/{kind:?}/{deep}")))] {
            let written = upper.is_some();
            match mount::mount(&store, &record, &at, &Options { kind, upper, ..Options::default() }) {
                Err(error) if kind == MountKind::Loop && error.to_string().contains("loop device") => {
                    println!("SKIPPED: loop: {error}");
                    continue;
                }
                other => other.unwrap(),
            };
            assert_eq!(fs::read(at.join("file")).unwrap(), noise(1, 5000));
            assert_eq!(fs::write(at.join("new"), "x").is_ok(), written);
            umount(&at);
        }
    }
    let error = mount::mount(&store, &record, &at, &by(MountKind::Native)).unwrap_err();
    assert!(error.to_string().contains("too long for a native mount"), "{error}");
}

#[test]
fn a_default_acl_of_the_store_directory_does_not_reach_the_image() {
    let Some(scratch) = Scratch::new() else { return };
    let (tree, at, root, upper) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("store"), scratch.dir("upper"));
    // Version 2; owner, user 1000, group, mask, others.
    let mut acl = vec![2, 0, 0, 0];
    for (tag, permissions, id) in
        [(1u16, 7u16, u32::MAX), (2, 7, 1000), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)]
    {
        acl.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    for dir in [&root, &upper] {
        if rustix::fs::setxattr(dir, "system.posix_acl_default", &acl, XattrFlags::empty()).is_err() {
            println!("SKIPPED: the temporary directory's file system has no ACLs");
            return;
        }
    }
    sample(&tree);
    let store = Store::open(&root, "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    for upper in [None, Some(upper)] {
        let options = Options { kind: MountKind::Directory, upper, ..Options::default() };
        mount::mount(&store, &record, &at, &options).unwrap();
        let again = Store::open(&scratch.dir("again"), "default").unwrap();
        assert_eq!(build_dir(&again, "x", &at).unwrap().digest, record.digest);
        umount(&at);
    }
}

#[test]
fn more_hard_links_than_a_file_system_allows_are_mounted_as_files() {
    let Some(scratch) = Scratch::new() else { return };
    let at = scratch.dir("mnt");
    let store = Store::open(&scratch.dir("store"), "default").unwrap().without_sync();
    let build = store.build().unwrap();
    let mut tree = Tree::default();
    let meta = Meta { mode: 0o644, ..Meta::default() };
    let kind = FileKind::File(build.put_bytes(&noise(1, 5000)).unwrap());
    let file = tree.add(Inode { meta, kind });
    // ext4 has 65,000.
    for number in 0..65_100 {
        tree.link(0, format!("{number}").as_bytes(), file).unwrap();
    }
    let record = build.publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    let options = by(MountKind::Directory);
    let mounted = mount::mount(&store, &record, &at, &options).unwrap();
    assert_eq!(fs::read_dir(&at).unwrap().count(), 65_100);
    for number in [0, 64_999, 65_000, 65_099] {
        assert_eq!(fs::read(at.join(format!("{number}"))).unwrap(), noise(1, 5000), "{number}: {:?}", mounted.notes);
    }
    umount(&at);
}
