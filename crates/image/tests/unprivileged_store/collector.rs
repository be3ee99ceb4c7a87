//! The collector removes only files that no image, build or reader needs.

use crate::common::build_dir;
use crate::fixture::{Fixture, collect, sample};
use pagefold_image::digest::Digest;
use pagefold_image::progress::Progress;
use pagefold_image::tree::{Data, FileKind, Inode, Meta, Tree};
use pagefold_image::{Result, export, gc, stat};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[test]
fn old_stat_caches_are_collected() {
    let Fixture { dir, store, .. } = Fixture::new();
    for name in ["old", "new"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        build_dir(&store, name, &dir.path().join(name)).unwrap();
    }
    let caches = || -> Vec<PathBuf> {
        let dir = store.root().join("domains/default/cache");
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let (old, days) = (caches()[0].clone(), Duration::from_secs(24 * 60 * 60));
    let set_age = |age: u32| {
        let file = fs::File::options().write(true).open(&old).unwrap();
        file.set_modified(std::time::SystemTime::now() - days * age).unwrap();
    };
    set_age(29);
    gc::collect(&store, false).unwrap();
    assert_eq!(caches().len(), 2);
    set_age(31);
    gc::collect(&store, true).unwrap();
    assert_eq!(caches().len(), 2);
    gc::collect(&store, false).unwrap();
    assert_eq!(caches().len(), 1);
    assert!(!old.exists());
}

#[test]
fn all_disk_usage_is_counted_and_reported_when_freed() {
    use std::os::unix::fs::MetadataExt;
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    export::make_native(&store, &record.digest, &Progress::silent()).unwrap();
    let native = fs::metadata(store.full_path(&record.digest)).unwrap().len();
    assert!(native > 3_000_000);
    // Stand for a metadata directory and for a dead build.
    let domain = store.root().join("domains/default");
    let bytes: Vec<u8> = (0..200_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let places =
        [format!("trees/{}.rootdir/sub", record.digest.hex()), "staging/dead".into()].map(|at| domain.join(at));
    let blocks = places.each_ref().map(|place| {
        fs::create_dir_all(place).unwrap();
        fs::write(place.join("file"), &bytes).unwrap();
        fs::hard_link(place.join("file"), place.join("other")).unwrap();
        let file = fs::File::open(place.join("file")).unwrap();
        file.sync_all().unwrap();
        file.metadata().unwrap().blocks() * 512
    });
    let beside = stat::beside(&store).unwrap();
    assert_eq!(beside.native_bytes, native);
    let list = fs::metadata(domain.join(format!("trees/{}.objects", record.digest.hex()))).unwrap().len();
    let cache: u64 =
        fs::read_dir(domain.join("cache")).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(list > 0 && cache > 0);
    assert_eq!((beside.index_bytes, beside.shelf_bytes), (list + cache, 0));
    for (said, blocks) in [(beside.directory_bytes, blocks[0]), (beside.staged_bytes, blocks[1])] {
        // Directories use some blocks of their own; the second name of a file uses none.
        assert!(said >= blocks && said < blocks + 190_000, "{said} for {blocks}");
    }
    // The name after a collector was killed: a complete directory would stay where not all mounts are visible.
    let whole = places[0].parent().unwrap();
    fs::rename(whole, whole.with_extension("rootdir.0.doomed")).unwrap();
    // The lease of a dead build keeps nothing.
    fs::write(domain.join("leases/dead"), record.digest.0).unwrap();
    store.remove("x").unwrap();
    let (dry, wet) = (collect(&store, true), collect(&store, false));
    assert_eq!((dry.builds_removed, dry.trees_removed, dry.objects_removed), (1, 1, 2));
    assert!(dry.other_bytes_removed > native + record.metadata_bytes + blocks[0] + blocks[1], "{dry:?}");
    assert_eq!(dry, wet);
    let left = stat::beside(&store).unwrap();
    assert_eq!((left.native_bytes, left.directory_bytes, left.staged_bytes), (0, 0, 0));
}

/// A file system without file leases cannot say whether a file is open; a device has no file leases either.
#[test]
fn a_tree_that_may_be_in_use_is_kept_and_counted() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    store.remove("x").unwrap();
    let kept = store.full_path(&record.digest);
    symlink("/dev/null", &kept).unwrap();
    let stats = collect(&store, false);
    assert_eq!((stats.trees_kept, stats.trees_unseen, stats.trees_removed, stats.objects_removed), (1, 1, 0, 0));
    fs::remove_file(&kept).unwrap();
    let stats = collect(&store, false);
    assert_eq!((stats.trees_kept, stats.trees_unseen, stats.trees_removed), (0, 0, 1));
}

#[test]
fn an_image_with_two_names_has_no_bytes_of_its_own() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    build_dir(&store, "one", &tree).unwrap();
    let own = || stat::stat(&store, &[]).unwrap().1.iter().map(|image| image.own_bytes).collect::<Vec<_>>();
    assert_eq!(own(), [3_010_000]);
    build_dir(&store, "two", &tree).unwrap();
    assert_eq!(own(), [0, 0], "either can go without freeing a byte");
}

/// A reader reads the whole image, although its name is built again and the collector runs.
#[test]
fn readers_lose_nothing_to_the_collector() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let store = store.without_sync();
    let build = |round: u32| {
        let (build, mut tree) = (store.build().unwrap(), Tree::default());
        for file in 0..20u32 {
            let bytes: Vec<u8> =
                (0..20_000u32).flat_map(|i| (i ^ (round << 20) ^ (file << 16)).to_le_bytes()).collect();
            let kind = FileKind::File(build.put_bytes(&bytes).unwrap());
            tree.put(format!("{file}").as_bytes(), Inode { meta: Meta::default(), kind }).unwrap();
        }
        build.publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    };
    build(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                build(round % 1000);
                gc::collect(&store, false).unwrap();
            }
        });
        let read = || -> Result<()> {
            for _ in 0..60 {
                let found = stat::verify(&store, &[], false)?;
                assert_eq!((found.images, found.objects, found.damaged.len()), (1, 20, 0), "{:?}", found.damaged);
                stat::stat(&store, &[])?;
                let (record, _lease) = store.hold("x")?;
                let tree = store.tree(&record.digest)?;
                export::tar(&store, &tree, &mut std::io::sink(), &Progress::silent())?;
            }
            Ok(())
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read));
        done.store(true, Ordering::Relaxed);
        result.unwrap().unwrap();
    });
}

#[test]
fn the_collector_removes_only_unused_files() {
    let Fixture { dir, store, .. } = Fixture::new();
    for (name, byte) in [("one", 1), ("two", 2)] {
        let tree = dir.path().join(name);
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("shared"), vec![5; 9000]).unwrap();
        fs::write(tree.join("own"), vec![byte; 9000]).unwrap();
        build_dir(&store, name, &tree).unwrap();
    }
    assert_eq!(collect(&store, false).objects_removed, 0);
    store.remove("two").unwrap();
    let dry = collect(&store, true);
    assert_eq!((dry.objects_removed, dry.bytes_removed, dry.trees_removed), (1, 9000, 1));
    let wet = collect(&store, false);
    assert_eq!((wet.objects_removed, wet.bytes_removed, wet.trees_removed), (1, 9000, 1));
    assert!(stat::verify(&store, &["one".into()], false).unwrap().damaged.is_empty());
    // Objects that a running build uses stay, although no image has them.
    let build = store.build().unwrap();
    let kept = build.put_bytes(&[9; 5000]).unwrap();
    let tree_one = store.tree(&store.image("one").unwrap().digest).unwrap();
    let Data::Object(own, size) = Data::Object(Digest::of(&[1; 9000]), 9000) else { unreachable!() };
    assert!(build.has(&own, size).unwrap());
    store.remove("one").unwrap();
    let stats = collect(&store, false);
    assert_eq!((stats.objects_kept, stats.objects_removed), (1, 1), "own is leased, shared is not");
    drop(tree_one);
    let mut tree = Tree::default();
    for (name, data) in [(&b"a"[..], kept), (b"b", Data::Object(own, size))] {
        tree.put(name, Inode { meta: Meta::default(), kind: FileKind::File(data) }).unwrap();
    }
    build.publish("three", &tree, "t", Default::default(), vec![]).unwrap();
    drop(build);
    collect(&store, false);
    assert!(stat::verify(&store, &["three".into()], false).unwrap().damaged.is_empty());
}

#[test]
fn the_collector_stops_at_files_it_cannot_read() {
    let Fixture { dir, tree, store } = Fixture::new();
    fs::write(tree.join("file"), vec![3; 5000]).unwrap();
    build_dir(&store, "x", &tree).unwrap();
    let (object, domain) = (Digest::of(&[3; 5000]), store.root().join("domains/default"));
    let build = store.build().unwrap();
    assert!(build.has(&object, 5000).unwrap());
    store.remove("x").unwrap();
    // A link to itself stands for a file that even root cannot read.
    let lease = fs::read_dir(domain.join("leases")).unwrap().next().unwrap().unwrap().path();
    let aside = dir.path().join("aside");
    fs::rename(&lease, &aside).unwrap();
    symlink(&lease, &lease).unwrap();
    for dry in [false, true] {
        let error = gc::collect(&store, dry).unwrap_err().to_string();
        assert!(error.contains(lease.to_str().unwrap()), "{error}");
    }
    fs::rename(&aside, &lease).unwrap();
    assert_eq!(collect(&store, false).objects_kept, 1);
    assert!(store.object_path(&object).exists());
    drop(build);
    // The same holds for a metadata image that may be mounted.
    build_dir(&store, "y", &tree).unwrap();
    let image = store.tree_path(&store.image("y").unwrap().digest);
    store.remove("y").unwrap();
    fs::rename(&image, &aside).unwrap();
    symlink(&image, &image).unwrap();
    assert!(gc::collect(&store, false).is_err());
    fs::rename(&aside, &image).unwrap();
    assert_eq!(collect(&store, false).objects_removed, 1);
}

#[test]
fn one_failed_removal_does_not_stop_the_others() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    for byte in 1..4 {
        fs::write(tree.join(format!("{byte}")), vec![byte; 5000]).unwrap();
    }
    build_dir(&store, "x", &tree).unwrap();
    store.remove("x").unwrap();
    // A directory stands for a file that cannot be removed.
    let object = store.object_path(&Digest::of(&[2; 5000]));
    fs::remove_file(&object).unwrap();
    fs::create_dir(&object).unwrap();
    for removed in [2, 0] {
        let stats = collect(&store, false);
        assert_eq!((stats.objects_removed, stats.failures, stats.failed.len()), (removed, 1, 1), "{stats:?}");
        assert!(stats.failed[0].starts_with(object.to_str().unwrap()), "{stats:?}");
    }
}

/// Half a link farm of a killed mount: the blocks of its links belong to the objects.
#[test]
fn a_staged_link_farm_is_counted_without_the_blocks_of_its_objects() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let (build, mut tree) = (store.build().unwrap(), Tree::default());
    let bytes = vec![9; 4 << 20];
    let data = build.put_bytes(&bytes).unwrap();
    tree.put(b"file", Inode { meta: Meta::default(), kind: FileKind::File(data) }).unwrap();
    build.publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    drop(build);
    let board = store.root().join("domains/default/staging/dead/shelf/objects/0");
    fs::create_dir_all(&board).unwrap();
    fs::hard_link(store.object_path(&Digest::of(&bytes)), board.join("00")).unwrap();
    assert!(stat::beside(&store).unwrap().staged_bytes < 1 << 20);
    let would = collect(&store, true);
    assert!(would.other_bytes_removed < 1 << 20, "{would:?}");
    assert_eq!(collect(&store, false), would);
    assert!(!board.exists());
}
