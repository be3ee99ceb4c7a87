//! The same input gives the same image, and changed files are always read.

use crate::common::{build_dir, damaged};
use crate::fixture::{Fixture, import, sample, wait_for_old_times};
use pagefold_image::build::{Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::Tree;
use pagefold_image::{Result, build, erofs, export, stat};
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn the_same_input_gives_the_same_digest() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    sample(&tree);
    let a = Store::open(&dir.path().join("a"), "default").unwrap();
    let b = Store::open(&dir.path().join("b"), "other").unwrap();
    let first = build_dir(&a, "x", &tree).unwrap();
    wait_for_old_times();
    // The second build fills the stat cache, the third one uses it.
    for name in ["x", "y"] {
        assert_eq!(build_dir(&a, name, &tree).unwrap().digest, first.digest);
    }
    assert_eq!(build_dir(&b, "z", &tree).unwrap().digest, first.digest);
    assert_eq!(first.objects, 2, "the hard link, the copy and the tool are one object");
    assert_eq!((first.files, first.entries), (5, 10));

    let bytes = a.tree_bytes(&first.digest).unwrap();
    let read = erofs::read(&bytes, erofs::Limits::default()).unwrap();
    assert_eq!(erofs::write(&read, erofs::Layout::Metadata).unwrap().head, bytes, "reading loses nothing");

    // Out as a tar and in again: the same image.
    let mut tar = Vec::new();
    export::tar(&a, &read, &mut tar, &Progress::silent()).unwrap();
    let (building, mut back, mut notes) = (b.build().unwrap(), Tree::default(), Omissions::default());
    apply_archive(&building, &mut back, &tar[..], Limits::default(), &mut notes, &Progress::silent()).unwrap();
    assert_eq!(building.publish("back", &back, "tar", Default::default(), vec![]).unwrap().digest, first.digest);

    // Out as an OCI layout and in again, too.
    let layout = dir.path().join("oci");
    export::oci(&a, &first, &read, &layout, false, &Progress::silent()).unwrap();
    let tree = import(&building, &layout);
    assert_eq!(building.publish("oci", &tree, "oci", Default::default(), vec![]).unwrap().digest, first.digest);
}

#[test]
fn an_unchanged_file_is_not_read_and_a_changed_one_is() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    wait_for_old_times();
    build_dir(&store, "a", &tree).unwrap();
    let again = |options| {
        let build = store.build().unwrap();
        let tree =
            build::from_directory(&build, &tree, options, &mut Omissions::default(), &Progress::silent()).unwrap();
        let record = build.publish("a", &tree, "t", Default::default(), vec![]).unwrap();
        (record, build.stats().files_unchanged.load(std::sync::atomic::Ordering::Relaxed))
    };
    let (_, unchanged) = again(build::Options::default());
    assert_eq!(unchanged, 3, "tool, copy and big");
    let (_, unchanged) = again(build::Options { rehash: true, ..Default::default() });
    assert_eq!(unchanged, 0);
    // Same size, and even the old mtime put back: the change time tells.
    let meta = fs::metadata(tree.join("copy")).unwrap();
    fs::write(tree.join("copy"), vec![8; 10_000]).unwrap();
    fs::File::options().write(true).open(tree.join("copy")).unwrap().set_modified(meta.modified().unwrap()).unwrap();
    let (record, unchanged) = again(build::Options::default());
    assert_eq!(unchanged, 2);
    assert_eq!(record.objects, 3);
}

/// A dirty page takes further stores through a mapping without a change of the file's times.
#[test]
fn writes_through_a_mapping_are_not_taken_for_unchanged() {
    use rustix::mm::{MapFlags, ProtFlags};
    let Fixture { dir, tree, store } = Fixture::new();
    // tmpfs has no writeback, and overlayfs does not report dirty pages.
    if [0x0102_1994, 0x794c_7630].contains(&rustix::fs::statfs(dir.path()).unwrap().f_type) {
        println!("SKIPPED: the temporary directory is on tmpfs or overlayfs");
        return;
    }
    let path = tree.join("file");
    fs::write(&path, [1; 8192]).unwrap();
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without MapFlags::FIXED the kernel chooses a free address, so no existing mapping is replaced.
    let map = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 8192, protection, MapFlags::SHARED, &file, 0) };
    let page = map.unwrap().cast::<u8>();
    // SAFETY: `page` points to the first page of the mapping, which is never unmapped; no reference to it exists.
    let store_byte = |byte: u8| unsafe { page.write_volatile(byte) };
    store_byte(2);
    let store = store.without_sync();
    wait_for_old_times();
    let build = || {
        let (build, mut notes) = (store.build().unwrap(), Omissions::default());
        let tree = build::from_directory(&build, &tree, Default::default(), &mut notes, &Progress::silent()).unwrap();
        let digest = build.publish("x", &tree, "t", Default::default(), vec![]).unwrap().digest;
        (digest, build.stats().files_unchanged.load(std::sync::atomic::Ordering::Relaxed))
    };
    let (first, _) = build();
    assert_eq!(build(), (first, 1), "an unchanged file is not read again");
    store_byte(3);
    let (second, unchanged) = build();
    assert!(second != first && unchanged == 0);
}

#[test]
fn a_file_with_holes_becomes_an_object_with_holes() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    let size = 40 << 20;
    let sparse = |name: &str, page: Option<u64>| {
        let file = fs::File::create(tree.join(name)).unwrap();
        file.set_len(size).unwrap();
        if let Some(page) = page {
            file.write_all_at(&[7; 4096], page * 4096).unwrap();
        }
    };
    sparse("first", Some(0));
    sparse("middle", Some(5_000));
    sparse("last", Some(size / 4096 - 1));
    sparse("none", None);
    fs::write(tree.join("odd"), [&vec![0; 3_000_000][..], b"x", &vec![0; 200_000]].concat()).unwrap();
    let store = store.without_sync();
    let record = build_dir(&store, "x", &tree).unwrap();
    assert_eq!(record.objects, 5);
    for (digest, size, _) in store.tree_objects(&record.digest).unwrap() {
        let meta = fs::metadata(store.object_path(&digest)).unwrap();
        assert_eq!(meta.len(), size);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
    }
    assert!(damaged(&store).is_empty());
}

#[test]
fn a_directory_is_built_while_its_files_vanish() {
    let Fixture { dir, tree, store } = Fixture::new();
    let outside = dir.path().join("outside");
    sample(&tree);
    fs::create_dir(&outside).unwrap();
    for number in 0..200 {
        fs::write(tree.join(format!("{number}")), [3; 1000]).unwrap();
    }
    let store = store.without_sync();
    let done = AtomicBool::new(false);
    let left_out = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Files, links, a directory, and a file with one name that stays.
            for number in 0.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                let (new, passing) = (outside.join("new"), tree.join(format!("passing{number}")));
                fs::write(&new, vec![5; 100_000]).unwrap();
                fs::rename(&new, &passing).unwrap();
                let link = tree.join(format!("link{number}"));
                symlink("x", &link).unwrap();
                let sub = tree.join(format!("sub{number}"));
                fs::create_dir(&sub).unwrap();
                fs::write(sub.join("file"), [6; 1000]).unwrap();
                let (first, stays) = (tree.join(format!("a{number}")), tree.join("stays"));
                fs::write(&first, vec![8; 50_000]).unwrap();
                let _ = fs::remove_file(&stays);
                fs::hard_link(&first, &stays).unwrap();
                for gone in [&passing, &link, &first] {
                    fs::remove_file(gone).unwrap();
                }
                fs::remove_dir_all(&sub).unwrap();
            }
        });
        let build = || -> Result<u64> {
            let mut noted = 0;
            for round in 0..100 {
                match build_dir(&store, "x", &tree) {
                    // Written, linked and unlinked in three readings.
                    Err(error) if error.to_string().contains("build from a copy or snapshot") => {}
                    other => {
                        let record = other?;
                        noted += u64::from(record.notes.iter().any(|note| note.contains("went away")));
                        let mut read = store.tree(&record.digest)?;
                        assert!(read.find(b"bin/tool").is_some() && read.find(b"199").is_some(), "round {round}");
                    }
                }
            }
            Ok(noted)
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(build));
        done.store(true, Ordering::Relaxed);
        result.unwrap().unwrap()
    });
    // Whether a file vanishes between two readings is chance; tests of `build` show that it is then left out.
    println!("files went away in {left_out} of 100 builds");
}

#[test]
fn threads_that_build_the_same_content_store_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    sample(&tree);
    let root = dir.path().join("s");
    let digests: Vec<_> = std::thread::scope(|scope| {
        let build = |i: u32| {
            let (root, tree) = (&root, &tree);
            scope.spawn(move || {
                let store = Store::open(root, "default").unwrap();
                build_dir(&store, &format!("n{i}"), tree).unwrap().digest
            })
        };
        let threads: Vec<_> = (0..6).map(build).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(digests.iter().all(|digest| *digest == digests[0]));
    let store = Store::open(&root, "default").unwrap();
    let (total, _) = stat::stat(&store, &[]).unwrap();
    assert_eq!((total.images, total.objects), (6, 2));
    assert!(damaged(&store).is_empty());
}
