//! Damage is found, named with every image that has it, and repaired by the next build.

use crate::common::{build_dir, damaged};
use crate::fixture::{Fixture, collect, sample};
use pagefold_image::digest::Digest;
use pagefold_image::progress::Progress;
use pagefold_image::{export, gc, stat};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};

/// A store may be larger than memory, and programs use what is cached of it.
#[test]
fn a_check_leaves_the_page_cache_as_it_was() {
    let Fixture { dir, tree, store } = Fixture::new();
    let contents = [vec![1; 2 << 20], vec![2; 2 << 20]];
    for (name, content) in ["used", "at rest"].iter().zip(&contents) {
        fs::write(tree.join(name), content).unwrap();
    }
    build_dir(&store, "one", &tree).unwrap();
    let paths = contents.map(|content| store.object_path(&Digest::of(&content)));
    for path in &paths {
        let file = fs::File::open(path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if !pagefold_os::read_once::is_supported(&file) {
            println!("SKIPPED: the kernel or {}'s file system does not know RWF_DONTCACHE", dir.path().display());
            return;
        }
    }
    // True if a page in the middle is cached. To ask by reading would have the kernel read ahead.
    let is_cached = |path: &std::path::Path| {
        let (file, mut state) = (fs::File::open(path).unwrap(), 0);
        // SAFETY: one page of a file of many is mapped, asked for, and unmapped again.
        unsafe {
            let at =
                libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 1 << 20);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mincore(at, 4096, &raw mut state), 0);
            libc::munmap(at, 4096);
        }
        state & 1 == 1
    };
    let verify = || assert_eq!(stat::verify(&store, &[], false).unwrap().objects, 2);
    let read = store.tree(&store.image("one").unwrap().digest).unwrap();
    let export = || export::tar(&store, &read, &mut std::io::sink(), &Progress::silent()).unwrap();
    for (name, check) in [("verify", &verify as &dyn Fn()), ("export", &export)] {
        // The kernel evicts pages when it likes (DAMON, memory pressure), but not each time.
        let stays = (0..5).any(|_| {
            fs::read(&paths[0]).unwrap();
            check();
            assert!(!is_cached(&paths[1]), "{name} leaves what it has read");
            is_cached(&paths[0])
        });
        assert!(stays, "{name} evicts what was there");
    }
}

#[test]
fn damage_is_named_with_every_image_that_has_it() {
    let Fixture { dir, store, .. } = Fixture::new();
    for (name, extra) in [("one", "1"), ("two", "2"), ("three", "3")] {
        let tree = dir.path().join(name);
        fs::create_dir(&tree).unwrap();
        if name != "three" {
            fs::write(tree.join("shared"), vec![5; 9000]).unwrap();
        }
        fs::write(tree.join("own"), extra.repeat(5000)).unwrap();
        build_dir(&store, name, &tree).unwrap();
    }
    assert!(damaged(&store).is_empty());
    let object = store.object_path(&Digest::of(&vec![5; 9000]));
    let mut bytes = fs::read(&object).unwrap();
    bytes[4096] ^= 1;
    fs::write(&object, &bytes).unwrap();
    let found = stat::verify(&store, &[], false).unwrap();
    assert_eq!(found.damaged.len(), 1);
    assert_eq!(found.damaged[0].images, ["one", "two"]);
    assert_eq!(stat::verify(&store, &["two".into()], false).unwrap().damaged[0].images, ["one", "two"]);
    assert!(stat::verify(&store, &["three".into()], false).unwrap().damaged.is_empty());
    // An export of damaged content fails rather than passing it on.
    let tree = store.tree(&store.image("one").unwrap().digest).unwrap();
    assert!(export::tar(&store, &tree, &mut Vec::new(), &Progress::silent()).is_err());
    // A build of the content replaces the damaged object, whatever the stat cache has; and once more after new damage.
    for _ in 0..2 {
        build_dir(&store, "one", &dir.path().join("one")).unwrap();
        assert!(damaged(&store).is_empty());
        assert_eq!(fs::read(&object).unwrap(), vec![5; 9000]);
        fs::write(&object, &bytes).unwrap();
        assert_eq!(damaged(&store).len(), 1);
        assert_eq!(damaged(&store).len(), 1, "nothing else does");
    }
    // Missing, and a damaged metadata image.
    fs::remove_file(&object).unwrap();
    assert_eq!(damaged(&store)[0].images, ["one", "two"]);
    let meta = store.tree_path(&store.image("three").unwrap().digest);
    fs::write(&meta, vec![0; 4096]).unwrap();
    let found = stat::verify(&store, &[], false).unwrap();
    assert!(
        found.damaged.iter().any(|damage| damage.images == ["three"] && damage.what.starts_with("damaged;")),
        "{found:?}"
    );
    let found = stat::verify(&store, &["one".into()], false).unwrap();
    assert_eq!(found.damaged.len(), 1, "what is not asked for is not read: {found:?}");
    // A build of the content restores both.
    build_dir(&store, "one", &dir.path().join("one")).unwrap();
    build_dir(&store, "three", &dir.path().join("three")).unwrap();
    assert!(damaged(&store).is_empty());
}

#[test]
fn an_unreadable_object_is_not_used() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    fs::write(tree.join("file"), vec![3; 5000]).unwrap();
    build_dir(&store, "x", &tree).unwrap();
    // A directory opens but cannot be read, like a file with a bad sector.
    let object = store.object_path(&Digest::of(&vec![3; 5000]));
    fs::remove_file(&object).unwrap();
    fs::create_dir(&object).unwrap();
    let found = stat::verify(&store, &[], false).unwrap();
    assert_eq!(found.damaged.len(), 1);
    assert!(found.damaged[0].what.contains("build an image that has it again"), "{}", found.damaged[0].what);
    assert_eq!(fs::metadata(&object).unwrap().permissions().mode() & 0o777, 0);
    fs::remove_dir(&object).unwrap();
    let found = stat::verify(&store, &[], false).unwrap();
    assert!(found.damaged[0].what.contains("build an image that has it again"), "{}", found.damaged[0].what);
}

#[test]
fn a_marked_file_that_is_whole_is_used_again() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    fs::write(tree.join("file"), vec![3; 5000]).unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    export::make_native(&store, &record.digest, &Progress::silent()).unwrap();
    let digest = Digest::of(&[3; 5000]);
    let paths = [store.object_path(&digest), store.full_path(&record.digest)];
    let relied_on = || store.build().unwrap().has(&digest, 5000).unwrap();
    for path in &paths {
        fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
    }
    assert!(!relied_on());
    let found = stat::verify(&store, &[], false).unwrap();
    assert!(found.damaged.is_empty() && found.restored == 2, "{found:?}");
    assert!(relied_on());
    for path in &paths {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(stat::verify(&store, &[], false).unwrap().restored, 0);
    // A temporary error marks nothing: a link to itself stands for an unreachable server.
    fs::remove_file(&paths[0]).unwrap();
    symlink(&paths[0], &paths[0]).unwrap();
    let found = stat::verify(&store, &[], false).unwrap();
    assert!(found.damaged.len() == 1 && !found.damaged[0].what.contains("build"), "{found:?}");
}

#[test]
fn damage_of_a_self_contained_image_is_found() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    let make = || export::make_native(&store, &record.digest, &Progress::silent()).unwrap();
    make();
    let (full, damaged) = (store.full_path(&record.digest), || damaged(&store));
    let bytes = fs::read(&full).unwrap();
    assert!(damaged().is_empty());
    // In the metadata, in the data, in the padding after it, and cut off.
    for (at, cut) in [(1100, false), (bytes.len() / 2, false), (bytes.len() - 1, false), (bytes.len() - 1, true)] {
        let mut bad = bytes.clone();
        bad[at] ^= 1;
        bad.truncate(if cut { at } else { bytes.len() });
        fs::write(&full, &bad).unwrap();
        let found = damaged();
        assert_eq!(found.len(), 1, "{at}");
        assert!(found[0].path.ends_with(".full.erofs") && found[0].images == ["x"], "{found:?}");
        assert!(found[0].what.ends_with("build the image with --native again"), "{found:?}");
        assert_eq!(damaged().len(), 1, "found again");
        make();
        assert_eq!(fs::read(&full).unwrap(), bytes);
        assert!(damaged().is_empty());
    }
}

#[test]
fn an_unreadable_record_hides_no_other_image_and_loses_nothing() {
    let Fixture { dir, store, .. } = Fixture::new();
    for (name, byte) in [("app:1", 1), ("app:2", 2), ("old", 3)] {
        let tree = dir.path().join(format!("tree{byte}"));
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("own"), vec![byte; 9000]).unwrap();
        build_dir(&store, name, &tree).unwrap();
    }
    store.remove("old").unwrap();
    // An object of a build that was killed before it published a tree.
    let orphan = store.object_path(&Digest::of(&[4; 5000]));
    fs::create_dir_all(orphan.parent().unwrap()).unwrap();
    let path = store.root().join("domains/default/images/app%3a1");
    let whole = fs::read(&path).unwrap();
    // A truncated record, and a directory in its place.
    for cut in [true, false] {
        fs::remove_file(&path).unwrap();
        if cut { fs::write(&path, &whole[..40]) } else { fs::create_dir(&path) }.unwrap();
        let records = store.records().unwrap();
        let names: Vec<&str> = records.images.iter().map(|image| image.name.as_str()).collect();
        assert_eq!(names, ["app:2"]);
        let [damaged] = &records.damaged[..] else { panic!("{records:?}") };
        assert_eq!((damaged.name.as_str(), damaged.path.as_str()), ("app:1", path.to_str().unwrap()));
        assert!(damaged.what.contains("build image \"app:1\" again"), "{damaged}");
        for names in [vec![], vec!["app:2".to_string()], vec!["app:1".into(), "app:2".into()]] {
            let (total, images) = stat::stat(&store, &names).unwrap();
            assert_eq!((total.images, images.len(), &total.damaged), (1, 1, &records.damaged));
        }
        let found = stat::verify(&store, &[], false).unwrap();
        assert_eq!((found.images, found.damaged.len()), (1, 1), "{found:?}");
        assert_eq!(found.damaged[0].images, ["app:1"]);
        assert!(stat::verify(&store, &["app:2".into()], false).unwrap().damaged.is_empty());
        // Either tree without a name may belong to the record; an object in no tree belongs to none.
        for dry in [true, false] {
            fs::write(&orphan, [4; 5000]).unwrap();
            let stats = collect(&store, dry);
            assert_eq!((stats.trees_removed, stats.trees_kept, stats.objects_kept), (0, 3, 3), "{stats:?}");
            assert_eq!((stats.objects_removed, &stats.damaged), (1, &records.damaged));
        }
        if !cut {
            fs::remove_dir(&path).unwrap();
        }
        fs::write(&path, &whole).unwrap();
    }
    let first = store.image("app:1").unwrap();
    assert_eq!(store.tree(&first.digest).unwrap().objects().len(), 1);
    // After `image rm` it keeps nothing.
    fs::write(&path, "").unwrap();
    assert!(store.image("app:1").unwrap_err().to_string().contains("image rm"));
    store.remove("app:1").unwrap();
    let stats = collect(&store, false);
    assert_eq!((stats.trees_removed, stats.objects_removed, stats.damaged.len()), (2, 2, 0), "{stats:?}");
}

#[test]
fn an_image_without_its_metadata_hides_no_other_from_stat() {
    let Fixture { dir, store, .. } = Fixture::new();
    for (name, tree, byte) in [("a", "1", 1), ("b", "1", 1), ("c", "2", 2)] {
        let tree = dir.path().join(tree);
        if name != "b" {
            fs::create_dir(&tree).unwrap();
            fs::write(tree.join("file"), [byte; 9000]).unwrap();
        }
        build_dir(&store, name, &tree).unwrap();
    }
    let all = stat::stat(&store, &[]).unwrap().0;
    assert_eq!((all.images, all.logical_bytes, all.damaged.len()), (3, 27_000, 0));
    let path = store.tree_path(&store.image("a").unwrap().digest);
    fs::remove_file(path.with_extension("objects")).unwrap();
    for gone in [false, true] {
        if gone { fs::remove_file(&path) } else { fs::write(&path, "not itself") }.unwrap();
        let (total, images) = stat::stat(&store, &[]).unwrap();
        assert_eq!((total.images, total.logical_bytes, total.objects), (1, 9000, 2));
        assert!(total.metadata_bytes > 0 && total.metadata_bytes < all.metadata_bytes);
        assert_eq!((images.len(), images[0].record.name.as_str(), images[0].own_bytes), (1, "c", 9000));
        let names: Vec<&str> = total.damaged.iter().map(|image| image.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let what = if gone { "missing" } else { "damaged" };
        let line = format!("{}: {what}; build image \"a\" again, or forget it (`pagefold image rm`)", path.display());
        assert_eq!(total.damaged[0].to_string(), line);
    }
}

#[test]
fn sidecars_are_only_a_shortcut() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    let list = store.tree_objects(&record.digest).unwrap();
    let sidecar = store.tree_path(&record.digest).with_extension("objects");
    let bytes = fs::read(&sidecar).unwrap();
    for spoiled in [Vec::new(), bytes[..bytes.len() - 44].to_vec(), vec![0; bytes.len()]] {
        fs::write(&sidecar, spoiled).unwrap();
        assert_eq!(store.tree_objects(&record.digest).unwrap(), list);
    }
    // Without the metadata image the objects of the image are unknown: the collector must not guess.
    fs::remove_file(store.tree_path(&record.digest)).unwrap();
    let error = gc::collect(&store, false).unwrap_err().to_string();
    assert!(error.contains("removes nothing") && error.contains("(x)"), "{error}");
    assert!(list.iter().all(|(digest, ..)| store.object_path(digest).exists()));
}
