//! Link farms: the hard links to an image's objects that EROFS mounts read.

use crate::common::{build_dir, damaged};
use crate::fixture::{Fixture, Scratch, alone, by, drop_cache, inodes, noise, umount, use_all_inodes};
use pagefold_image::build::Omissions;
use pagefold_image::digest::Digest;
use pagefold_image::mount::{MountKind, Options};
use pagefold_image::progress::Progress;
use pagefold_image::store::{ImageRecord, Store};
use pagefold_image::{build, gc, mount, mounts, stat};
use pagefold_os::mountinfo;
use rustix::mount::MountFlags;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Fills the tree with some hundred files and mounts its image once; returns the record, and the link farm that the mount
/// made.
pub fn with_link_farm(scratch: &Scratch) -> (PathBuf, Store, ImageRecord, PathBuf) {
    let tree = scratch.dir("tree");
    for number in 0..600u32 {
        let dir = tree.join(format!("{}", number % 7));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(format!("{number}")), noise(number, 500)).unwrap();
    }
    fs::write(tree.join("twin"), noise(0, 500)).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let (at, farm) = (scratch.dir("mnt"), store.tree_path(&record.digest).with_extension("shelf"));
    assert!(!farm.exists());
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    (tree, store, record, farm)
}

/// Whether a new mount of the image shows the same tree.
pub fn shows(scratch: &Scratch, store: &Store, record: &ImageRecord, kind: MountKind) -> bool {
    let at = scratch.dir("mnt-shows");
    mount::mount(store, record, &at, &by(kind)).unwrap();
    let (build, mut notes) = (store.build().unwrap(), Omissions::default());
    let options = build::Options { rehash: true, ..Default::default() };
    let read = build::from_directory(&build, &at, options, &mut notes, &Progress::silent());
    let same = read.is_ok_and(|tree| {
        build.publish("shown", &tree, "test", Default::default(), vec![]).unwrap().digest == record.digest
    });
    umount(&at);
    same
}

#[test]
fn a_link_farm_links_each_object_once_and_is_removed_with_its_image() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (_, store, record, farm) = with_link_farm(&scratch);
    let mut objects: Vec<u64> = inodes(&store.objects_dir()).into_iter().map(|file| file.1).collect();
    let link_inodes = || inodes(&farm.join("objects"));
    let mut links: Vec<u64> = link_inodes().into_iter().map(|file| file.1).collect();
    objects.sort_unstable();
    links.sort_unstable();
    assert_eq!((links.len(), links), (600, objects), "each once, whatever number of files it has");
    let boards: Vec<_> = fs::read_dir(farm.join("objects")).unwrap().map(|dir| dir.unwrap().path()).collect();
    assert!(boards.len() == 3 && boards.iter().all(|dir| fs::read_dir(dir).unwrap().count() <= 256));
    // Later mounts use the same link farm.
    let before = (link_inodes(), fs::metadata(farm.join("meta.erofs")).unwrap().ino());
    for kind in [MountKind::Auto, MountKind::Directory] {
        assert!(shows(&scratch, &store, &record, kind));
    }
    assert_eq!((link_inodes(), fs::metadata(farm.join("meta.erofs")).unwrap().ino()), before);
    let beside = stat::beside(&store).unwrap();
    let blocks = |path: &Path| fs::metadata(path).unwrap().blocks() * 512;
    let own: u64 = boards.iter().map(|dir| blocks(dir)).sum();
    let rest = [farm.clone(), farm.join("meta.erofs"), farm.join("objects")];
    assert_eq!(beside.shelf_bytes, own + rest.iter().map(|path| blocks(path)).sum::<u64>());
    // The format number keeps versions out that know no link farms: they cannot collect them.
    let format = fs::read_to_string(store.root().join("pagefold-image-store")).unwrap();
    assert!(format.contains("\"format\":2") && format.contains(store.id()), "{format}");
    if mounts::view(&store).unwrap().partial {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    for name in ["x", "shown"] {
        store.remove(name).unwrap();
    }
    let would = gc::collect(&store, true).unwrap();
    assert_eq!(gc::collect(&store, false).unwrap(), would);
    assert_eq!((would.objects_removed, would.trees_removed), (600, 1));
    assert!(!farm.exists() && fs::read_dir(farm.parent().unwrap()).unwrap().count() == 0);
}

/// A link farm with faults is mended by the next mount, or is not mounted.
#[test]
fn a_damaged_link_farm_is_never_mounted_and_a_copied_one_is_linked_again() {
    let Some(scratch) = Scratch::new() else { return };
    let (_, store, record, farm) = with_link_farm(&scratch);
    let meta = farm.join("meta.erofs");
    let whole = fs::read(&meta).unwrap();
    let spoil = || {
        let mut bytes = whole.clone();
        bytes[1024 + 200] ^= 1;
        fs::write(&meta, bytes).unwrap();
        let damaged = stat::verify(&store, &["x".into()], false).unwrap().damaged;
        assert!(damaged.len() == 1 && Path::new(&damaged[0].path) == meta && damaged[0].images.contains(&"x".into()));
    };
    spoil();
    drop_cache(&meta);
    assert!(shows(&scratch, &store, &record, MountKind::Auto));
    let mended = fs::read(&meta).unwrap();
    assert_eq!(mended[..mended.len() - 32], whole[..whole.len() - 32]);
    assert!(stat::verify(&store, &["x".into()], false).unwrap().damaged.is_empty());
    // Another mount has the file open: the link farm stays as it is, and the image is mounted without it.
    let at = scratch.dir("mnt");
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    spoil();
    assert!(shows(&scratch, &store, &record, MountKind::Auto));
    assert_eq!(fs::read(&meta).unwrap()[1024 + 200], whole[1024 + 200] ^ 1);
    umount(&at);
    fs::remove_file(&meta).unwrap();
    assert!(shows(&scratch, &store, &record, MountKind::Auto) && meta.exists());

    // Copies without hard links; the last is mounted by several threads and kinds at the same time.
    for (number, kinds) in [
        &[MountKind::Auto][..],
        &[MountKind::Directory],
        &[MountKind::Auto, MountKind::Directory, MountKind::Auto, MountKind::Auto],
    ]
    .iter()
    .enumerate()
    {
        let copy = scratch.path().join(format!("copy{number}"));
        let copied = Command::new("cp").args(["-r", "--no-preserve=links"]).args([store.root(), &copy]).status();
        assert!(copied.unwrap().success());
        let store = Store::open(&copy, "default").unwrap();
        let farm = store.tree_path(&record.digest).with_extension("shelf");
        let own = || {
            let objects: Vec<u64> = inodes(&store.objects_dir()).into_iter().map(|file| file.1).collect();
            inodes(&farm.join("objects")).into_iter().filter(|link| objects.contains(&link.1)).count()
        };
        assert_eq!(own(), 0);
        std::thread::scope(|scope| {
            for (at, kind) in kinds.iter().enumerate() {
                let (store, record, at) = (&store, &record, scratch.dir(&format!("mnt{at}")));
                scope.spawn(move || {
                    mount::mount(store, record, &at, &by(*kind)).unwrap();
                    assert_eq!(fs::read(at.join("0/7")).unwrap(), noise(7, 500));
                    umount(&at);
                });
            }
        });
        assert!(shows(&scratch, &store, &record, kinds[0]));
        assert_eq!(own(), 600, "one piece of memory again");
        assert!(stat::verify(&store, &["x".into()], false).unwrap().damaged.is_empty());
        // The remains of a link farm after an interrupted mending.
        fs::remove_file(farm.join("meta.erofs")).unwrap();
        fs::remove_dir_all(farm.join("objects/0")).unwrap();
        fs::remove_file(farm.join("objects/1/07")).unwrap();
        assert!(shows(&scratch, &store, &record, kinds[0]));
        assert_eq!(own(), 600);
    }
}

#[test]
fn a_build_that_replaces_an_object_links_it_into_link_farms() {
    let Some(scratch) = Scratch::new() else { return };
    let (tree, store, record, farm) = with_link_farm(&scratch);
    let object = |number: u32| store.object_path(&Digest::of(&noise(number, 500)));
    let of = |number: u32| {
        inodes(&farm.join("objects")).into_iter().find(|link| link.1 == fs::metadata(object(number)).unwrap().ino())
    };
    let (first, second) = (of(5).unwrap().0, of(6).unwrap().0);
    fs::write(object(5), noise(99, 500)).unwrap();
    fs::remove_file(object(6)).unwrap();
    let found = damaged(&store);
    assert_eq!(found.len(), 2, "{found:?}");
    // A link farm that is made now lacks the missing object; other files can be read.
    fs::remove_dir_all(&farm).unwrap();
    let at = scratch.dir("mnt");
    let mounted = mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert!(mounted.notes.iter().any(|note| note.starts_with("2 of the image's objects")), "{:?}", mounted.notes);
    assert!(fs::read(at.join("6/6")).is_err());
    assert_eq!(fs::read(at.join("0/7")).unwrap(), noise(7, 500));
    umount(&at);
    let (build, mut notes) = (store.build().unwrap(), Omissions::default());
    let options = build::Options { rehash: true, ..Default::default() };
    let built = build::from_directory(&build, &tree, options, &mut notes, &Progress::silent()).unwrap();
    build.publish("again", &built, "test", Default::default(), vec![]).unwrap();
    assert_eq!((of(5).unwrap().0, of(6).unwrap().0), (first, second));
    let mounted = mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    assert_eq!(mounted.notes, [""; 0]);
    assert!(shows(&scratch, &store, &record, MountKind::Auto));
    assert!(damaged(&store).is_empty());
    assert!(!store.objects_dir().with_file_name("damaged").exists());
    // A link of the link farm is replaced by another file.
    let link = of(7).unwrap().0;
    fs::remove_file(&link).unwrap();
    fs::write(&link, noise(98, 500)).unwrap();
    let found = damaged(&store);
    assert!(found.len() == 1 && found[0].what.starts_with("1 file is another"), "{found:?}");
    assert_eq!(of(7).unwrap().0, link);
    assert!(damaged(&store).is_empty());
}

/// A link farm that cannot be mended is reported, stays as it is, and is mended as soon as the disk allows it.
#[test]
fn verify_reports_a_link_farm_that_cannot_be_mended() {
    let Some(scratch) = Scratch::new() else { return };
    let (disk, tree, at) = (scratch.dir("disk"), scratch.dir("tree"), scratch.dir("mnt"));
    rustix::mount::mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), c"size=32m,nr_inodes=600").unwrap();
    for number in 0..9u32 {
        fs::write(tree.join(format!("{number}")), noise(number, 5000)).unwrap();
    }
    let store = Store::open(&disk.join("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    let farm = store.tree_path(&record.digest).with_extension("shelf");
    let (links, more) = (farm.join("objects/0"), disk.join("more"));
    for state in ["no inodes", "read-only"] {
        for name in ["03", "05"] {
            fs::remove_file(links.join(name)).unwrap();
            fs::write(links.join(name), "another").unwrap();
        }
        let said = match state {
            "no inodes" => {
                use_all_inodes(&more);
                "no space left"
            }
            _ => {
                rustix::mount::mount_remount(&disk, MountFlags::RDONLY, c"").unwrap();
                "Read-only"
            }
        };
        let before = inodes(&farm);
        for _ in 0..2 {
            let found = damaged(&store);
            assert_eq!(found.len(), 1, "{state}: {found:?}");
            let (path, what, images) = (Path::new(&found[0].path), &found[0].what, &found[0].images);
            assert!(path == farm.join("objects") && images == &["x"], "{state}: {found:?}");
            assert!(what.contains("cannot be mended") && what.contains(said), "{state}: {what}");
            assert!(!what.contains("; mended"), "{state}: {what}");
        }
        assert_eq!(inodes(&farm), before, "{state}");
        match state {
            "no inodes" => fs::remove_dir_all(&more).unwrap(),
            _ => rustix::mount::mount_remount(&disk, MountFlags::empty(), c"").unwrap(),
        }
        let found = damaged(&store);
        assert!(found.len() == 1 && found[0].what == "2 files are others than their objects; mended", "{found:?}");
        assert!(damaged(&store).is_empty(), "{state}");
        assert!(shows(&scratch, &store, &record, MountKind::Auto), "{state}");
        store.remove("shown").unwrap();
    }
}

/// A changed mode is stored with the path of the content at the time of the change.
#[test]
fn changes_over_a_link_farm_are_not_mounted_without_one() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (tree, store, record, farm) = with_link_farm(&scratch);
    let (at, lock) = (scratch.dir("mnt"), store.root().join("domains/default/shelf.lock"));
    let changed = Options { upper: Some(scratch.dir("upper")), ..Options::default() };
    mount::mount(&store, &record, &at, &changed).unwrap();
    fs::set_permissions(at.join("0/7"), fs::Permissions::from_mode(0o600)).unwrap();
    umount(&at);
    // The image is collected and built again, and its link farm cannot be made.
    store.remove("x").unwrap();
    gc::collect(&store, false).unwrap();
    if farm.exists() {
        println!("SKIPPED: not all processes are seen here");
        return;
    }
    let record = build_dir(&store, "x", &tree).unwrap();
    let _ = fs::remove_file(&lock);
    fs::create_dir(&lock).unwrap();
    let error = mount::mount(&store, &record, &at, &changed).unwrap_err().to_string();
    assert!(error.contains("shelf") && error.contains("--upper"), "{error}");
    assert!(shows(&scratch, &store, &record, MountKind::Auto));
    let empty = Options { upper: Some(scratch.dir("empty")), ..Options::default() };
    mount::mount(&store, &record, &at, &empty).unwrap();
    umount(&at);
    fs::remove_dir(&lock).unwrap();
    for options in [&changed, &empty] {
        mount::mount(&store, &record, &at, options).unwrap();
        assert_eq!(fs::read(at.join("0/7")).unwrap(), noise(7, 500));
        umount(&at);
    }
}

/// An interrupted copy may have the metadata of a link farm without its objects.
#[test]
fn a_link_farm_without_objects_is_linked_again() {
    let Some(scratch) = Scratch::new() else { return };
    let (_, store, record, farm) = with_link_farm(&scratch);
    let (meta, objects) = (farm.join("meta.erofs"), farm.join("objects"));
    for (kind, empty) in [(MountKind::Auto, false), (MountKind::Directory, false), (MountKind::Directory, true)] {
        fs::remove_dir_all(&objects).unwrap();
        if empty {
            fs::create_dir(&objects).unwrap();
        }
        // A copy has another inode.
        fs::copy(&meta, farm.join("copy")).unwrap();
        fs::rename(farm.join("copy"), &meta).unwrap();
        assert!(shows(&scratch, &store, &record, kind), "{kind:?} {empty}");
        assert_eq!(inodes(&objects).len(), 600, "{kind:?} {empty}");
    }
}

/// A store on a container's overlayfs, which may copy a file of the lower layer when it is linked.
#[test]
fn a_store_on_overlayfs_has_link_farms() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (lower, upper, work) = (scratch.dir("lower"), scratch.dir("layer"), scratch.dir("work"));
    let (tree, disk, at) = (scratch.dir("tree"), scratch.dir("disk"), scratch.dir("mnt"));
    for number in 0..300u32 {
        fs::write(tree.join(format!("{number}")), noise(number, 500)).unwrap();
    }
    // One image comes with the lower layer: linking its objects copies them up.
    let below = Store::open(&lower.join("store"), "default").unwrap();
    let record = build_dir(&below, "x", &tree).unwrap();
    let data = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let data = std::ffi::CString::new(data).unwrap();
    rustix::mount::mount("overlay", &disk, "overlay", MountFlags::empty(), data.as_c_str()).unwrap();
    let store = Store::open(&disk.join("store"), "default").unwrap();
    let farm = store.tree_path(&record.digest).with_extension("shelf");
    for kind in [MountKind::Auto, MountKind::Directory] {
        assert!(shows(&scratch, &store, &record, kind), "{kind:?}");
        assert!(farm.exists() && damaged(&store).is_empty(), "{kind:?}");
    }
    // A copy of the store has another inode.
    let meta = farm.join("meta.erofs");
    fs::copy(&meta, farm.join("copy")).unwrap();
    fs::rename(farm.join("copy"), &meta).unwrap();
    assert!(shows(&scratch, &store, &record, MountKind::Auto));
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert_eq!(fs::read(at.join("7")).unwrap(), noise(7, 500));
    store.remove("x").unwrap();
    store.remove("shown").unwrap();
    assert_eq!(gc::collect(&store, false).unwrap().trees_removed, 0, "it is mounted");
    umount(&at);
}

#[test]
fn a_killed_mount_leaves_a_complete_link_farm_or_none() {
    let Some(scratch) = Scratch::new() else { return };
    let (_, store, record, farm) = with_link_farm(&scratch);
    let at = scratch.dir("mnt");
    let (mut whole, mut none) = (0, 0);
    for round in 0..60u64 {
        fs::remove_dir_all(&farm).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "children::child_that_mounts_first"])
            .env("PAGEFOLD_TEST_FIRST", format!("{}\n{}", store.root().display(), at.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 900));
        child.kill().unwrap();
        child.wait().unwrap();
        if mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap()).any(|mount| mount.at == at) {
            umount(&at);
        }
        if farm.exists() {
            assert!(inodes(&farm).len() == 601 && damaged(&store).is_empty());
            whole += 1;
        } else {
            none += 1;
        }
        if round % 10 == 0 {
            assert!(shows(&scratch, &store, &record, MountKind::Auto));
        } else {
            mount::mount(&store, &record, &at, &Options::default()).unwrap();
            umount(&at);
        }
        assert_eq!(inodes(&farm).len(), 601);
    }
    println!("{whole} whole, {none} none");
    drop(store.build().unwrap());
    assert_eq!(fs::read_dir(store.root().join("domains/default/staging")).unwrap().count(), 0);
}

/// An object already has the largest number of links, so that no link farm can be made.
#[test]
fn an_image_without_a_link_farm_is_mounted() {
    let Some(Fixture { scratch, tree, store, .. }) = Fixture::new() else { return };
    let (other, upper) = (scratch.dir("other"), scratch.dir("upper"));
    fs::write(tree.join("before"), noise(3, 5000)).unwrap();
    fs::write(tree.join("file"), noise(1, 5000)).unwrap();
    fs::write(tree.join("more"), noise(2, 5000)).unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let object = store.object_path(&Digest::of(&noise(1, 5000)));
    let before = store.object_path(&Digest::of(&noise(3, 5000)));
    let names = (0..70_000).take_while(|i| fs::hard_link(&object, other.join(format!("{i}"))).is_ok()).count();
    if names == 70_000 {
        println!("SKIPPED: the temporary directory's file system has more links than that");
        return;
    }
    let (at, farm) = (scratch.dir("mnt"), store.tree_path(&record.digest).with_extension("shelf"));
    let changed = Options { upper: Some(upper), ..Options::default() };
    let read = |at: &Path| [fs::read(at.join("file")).unwrap(), fs::read(at.join("more")).unwrap()];
    for kind in [MountKind::Auto, MountKind::Directory] {
        assert!(shows(&scratch, &store, &record, kind));
        assert!(!farm.exists());
    }
    // An attempt links the object before it first, which changes that object's ctime.
    let changed_at = || fs::metadata(&before).map(|meta| (meta.ctime(), meta.ctime_nsec())).unwrap();
    let tried_at = changed_at();
    std::thread::sleep(Duration::from_millis(20));
    for kind in [MountKind::Auto, MountKind::Directory] {
        assert!(shows(&scratch, &store, &record, kind));
    }
    assert_eq!(changed_at(), tried_at, "no mount tries what it knows to fail");
    assert_eq!(fs::read_dir(store.root().join("domains/default/staging")).unwrap().count(), 0);
    mount::mount(&store, &record, &at, &changed).unwrap();
    fs::set_permissions(at.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    umount(&at);
    // A link farm can be made now. Changes made without it find their content with it, and the other way round.
    fs::remove_dir_all(&other).unwrap();
    for round in 0..2 {
        mount::mount(&store, &record, &at, &changed).unwrap();
        assert_eq!(read(&at), [noise(1, 5000), noise(2, 5000)], "round {round}");
        fs::set_permissions(at.join("more"), fs::Permissions::from_mode(0o640)).unwrap();
        umount(&at);
        assert!(farm.exists());
        fs::write(farm.join("meta.erofs"), "").unwrap();
    }
}
