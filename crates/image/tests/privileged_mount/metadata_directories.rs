//! Mounts by metadata directories, for kernels and users without EROFS mounts.

use crate::common::{build_dir, damaged};
use crate::fixture::{Fixture, alone, by, noise, sample, umount};
use pagefold_image::digest::Digest;
use pagefold_image::mount::MountKind;
use pagefold_image::{gc, mount, mounts};
use rustix::fs::XattrFlags;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Several first mounts of an image make its metadata directory at the same time, and each shows the whole tree.
#[test]
fn concurrent_first_mounts_show_the_whole_tree() {
    let Some(Fixture { scratch, tree, store, .. }) = Fixture::new() else { return };
    for i in 0..50u32 {
        fs::write(tree.join(format!("{i}")), noise(i, 1000)).unwrap();
    }
    for round in 0..5u32 {
        fs::write(tree.join("round"), noise(round, 1000)).unwrap();
        let record = build_dir(&store, "x", &tree).unwrap();
        let places: Vec<_> = (0..4).map(|i| scratch.dir(&format!("mnt-{i}"))).collect();
        let start = std::sync::Barrier::new(places.len());
        std::thread::scope(|scope| {
            for at in &places {
                let (store, record, start) = (&store, &record, &start);
                scope.spawn(move || {
                    start.wait();
                    let options = by(MountKind::Directory);
                    mount::mount(store, record, at, &options).unwrap();
                    assert_eq!(fs::read(at.join("49")).unwrap(), noise(49, 1000));
                    assert_eq!(fs::read(at.join("round")).unwrap(), noise(round, 1000));
                    assert_eq!(fs::read_dir(at).unwrap().count(), 51);
                    umount(at);
                });
            }
        });
    }
    let left = fs::read_dir(store.root().join("domains/default/staging")).unwrap().count();
    assert_eq!(left, 0, "nothing of the slower ones stays");
}

/// A collector that is killed while it removes a metadata directory leaves nothing that a later mount uses.
#[test]
fn a_metadata_directory_is_removed_in_one_step() {
    let _alone = alone();
    let Some(Fixture { scratch: _scratch, tree, at, store }) = Fixture::new() else { return };
    fs::create_dir(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/file"), noise(9, 5000)).unwrap();
    let options = by(MountKind::Directory);
    let show = || {
        let record = build_dir(&store, "x", &tree).unwrap();
        mount::mount(&store, &record, &at, &options).unwrap();
        assert_eq!(fs::read(at.join("sub/file")).unwrap(), noise(9, 5000));
        umount(&at);
        record
    };
    let record = show();
    let dir = store.tree_path(&record.digest).with_extension("rootdir-shelved");
    let doomed = dir.with_extension("rootdir-shelved.doomed");
    // The state after the collector was killed during the removal.
    fs::rename(&dir, &doomed).unwrap();
    fs::remove_file(doomed.join("sub/file")).unwrap();
    show();
    // Names of directories that earlier versions made.
    let outdated = ["userdir", "rootdir"].map(|kind| dir.with_extension(kind));
    outdated.iter().for_each(|dir| fs::create_dir_all(dir.join("sub")).unwrap());
    if mounts::view(&store).unwrap().partial {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    mount::mount(&store, &record, &at, &options).unwrap();
    gc::collect(&store, false).unwrap();
    assert!(outdated.iter().all(|dir| dir.exists()) && dir.exists() && !doomed.exists(), "mounted");
    umount(&at);
    gc::collect(&store, false).unwrap();
    assert!(!outdated.iter().any(|dir| dir.exists()) && dir.exists(), "not mounted");
    store.remove("x").unwrap();
    gc::collect(&store, false).unwrap();
    assert_eq!(fs::read_dir(dir.parent().unwrap()).unwrap().count(), 0, "{doomed:?} and all else is gone");
}

#[test]
fn damage_of_a_metadata_directory_is_found() {
    let Some(Fixture { scratch: _scratch, tree, at, store }) = Fixture::new() else { return };
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    let dir = store.tree_path(&record.digest).with_extension("rootdir-shelved");
    let remove = |name: &str| fs::remove_file(dir.join(name)).unwrap();
    let spoil: [&dyn Fn(); 6] = [
        &|| remove("odd"),
        &|| fs::write(dir.join("new"), "").unwrap(),
        &|| fs::write(dir.join("inline"), "others").unwrap(),
        &|| {
            let value = format!("/{}", Digest::of(b"other").object_path());
            let name = "trusted.overlay.redirect";
            rustix::fs::setxattr(dir.join("usr/bin/tool"), name, value.as_bytes(), XattrFlags::empty()).unwrap();
        },
        &|| {
            remove("bin");
            symlink("usr", dir.join("bin")).unwrap();
        },
        &|| {
            remove("pipe");
            fs::write(dir.join("pipe"), "").unwrap();
        },
    ];
    for (number, spoil) in spoil.iter().enumerate() {
        mount::mount(&store, &record, &at, &by(MountKind::Directory)).unwrap();
        umount(&at);
        assert!(damaged(&store).is_empty());
        spoil();
        let damaged = damaged(&store);
        assert!(damaged.len() == 1 && damaged[0].images == ["x"], "{number}: {damaged:?}");
        assert_eq!(Path::new(&damaged[0].path), dir);
        fs::remove_dir_all(&dir).unwrap();
    }
}
