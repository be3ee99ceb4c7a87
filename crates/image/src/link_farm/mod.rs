//! Link farms: an image's objects once more, as hard links in the order of its tree, and the metadata image that leads to
//! them.
//!
//! ```text
//! trees/DIGEST.shelf/meta.erofs     the image's metadata in the mounted form
//! trees/DIGEST.shelf/objects/3/1f   its objects by number, 256 to a directory
//! ```
//!
//! Objects are found by digest, and digests scatter: a program that starts with cold caches would read one block of a
//! directory for each file, where in a plain tree one block names all its neighbours. By number they are neighbours again.
//! A number also takes an eighth of a digest's space in the metadata image, of which the kernel reads each block singly. A
//! hard link is the object itself: the page cache belongs to its inode, whatever name led there.
//!
//! The first mount of an image makes its link farm, and the farm is removed with the image. It holds nothing that the image
//! and the objects do not hold: where it cannot be made (no hard links, no space), the image is mounted as it is and starts
//! a little later.

mod link_limit;
mod make;
mod repair;
mod verify;

pub(crate) use make::find_or_make;
pub(crate) use repair::repair;
pub(crate) use verify::verify;

use crate::digest::{Digest, hash_reader};
use crate::error::{At, Result};
use crate::format::erofs;
use crate::layout::place;
use crate::store::Store;
use crate::tree::Tree;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The end of a link farm's name.
pub(crate) const SUFFIX: &str = "shelf";

/// Bytes behind the metadata: the SHA-256 of the metadata, of the image's digest and of the file's own inode number. In a
/// copy of the store the file has another inode number, and its links may have become copies of the objects.
const CHECK_BYTES: usize = 32;

/// Where an image's objects are in the order of its tree.
#[derive(Clone, Debug)]
pub(crate) struct LinkFarm {
    path: PathBuf,
}

impl LinkFarm {
    /// The link farm of an image, whether it exists or not.
    pub(crate) fn of(store: &Store, digest: &Digest) -> Self {
        Self { path: store.path("trees").join(format!("{}.{SUFFIX}", digest.hex())) }
    }

    /// The metadata image.
    pub(crate) fn metadata(&self) -> PathBuf {
        self.path.join("meta.erofs")
    }

    /// The objects: a data-only layer of overlayfs.
    pub(crate) fn objects(&self) -> PathBuf {
        self.path.join("objects")
    }

    /// The object at a place that [`place`] returned.
    pub(crate) fn object(&self, place: &str) -> PathBuf {
        self.objects().join(place.trim_start_matches('/'))
    }

    /// Returns true if the link farm seems to be whole by its first object: in a copy of the store the links may have become
    /// files, and a collector that was killed may have left an empty farm.
    pub(crate) fn seems_whole(&self, store: &Store, digest: &Digest) -> bool {
        let Ok(mut directories) = fs::read_dir(self.objects()) else { return false };
        let has_none = || store.tree_objects(digest).is_ok_and(|objects| objects.is_empty());
        let first = || fs::symlink_metadata(self.object(&place(0))).is_ok_and(|first| first.nlink() > 1);
        self.metadata().exists() && if directories.next().is_some() { first() } else { has_none() }
    }

    /// Reads the metadata. Returns true if it has the bytes that were written for this image, and there are objects beside
    /// it.
    fn is_whole(&self, digest: &Digest) -> io::Result<bool> {
        let mut file = File::open(self.metadata())?;
        let meta = file.metadata()?;
        let Some(size) = meta.len().checked_sub(CHECK_BYTES as u64) else { return Ok(false) };
        let identity = identity(digest, meta.ino());
        let (found, bytes) = hash_reader(&mut (&mut file).take(size).chain(&identity[..]))?;
        let mut check = [0; CHECK_BYTES];
        file.read_exact(&mut check)?;
        Ok(bytes == size + identity.len() as u64 && found.0 == check && self.objects().is_dir())
    }
}

/// What a link farm takes on the disk, without the objects' blocks.
pub(crate) fn disk_bytes(path: &Path) -> u64 {
    let blocks = |path: &Path| fs::symlink_metadata(path).map_or(0, |meta| meta.blocks() * 512);
    let objects = path.join("objects");
    let directories = fs::read_dir(&objects).into_iter().flatten().flatten();
    blocks(path)
        + blocks(&path.join("meta.erofs"))
        + blocks(&objects)
        + directories.map(|directory| blocks(&directory.path())).sum::<u64>()
}

/// What the check covers beside the metadata.
fn identity(digest: &Digest, inode: u64) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..32].copy_from_slice(&digest.0);
    bytes[32..].copy_from_slice(&inode.to_le_bytes());
    bytes
}

/// Writes the metadata of image `digest`, in the mounted form and with its check, to the new file `path`.
fn write_metadata(tree: &Tree, digest: &Digest, path: &Path) -> Result<()> {
    let mut file = File::create(path).at(path)?;
    let mut bytes = erofs::write(tree, erofs::Layout::Mount)?.head;
    let size = bytes.len();
    bytes.extend(identity(digest, file.metadata().at(path)?.ino()));
    let check = Digest::of(&bytes);
    bytes.truncate(size);
    bytes.extend(check.0);
    file.write_all(&bytes).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::placed_objects;
    use crate::maintain::{gc, verify};
    use crate::remove_tree::remove_tree;
    use crate::store::{Lease, ON_SYNC};
    use crate::tree::{FileKind, Inode, Meta};
    use std::time::Duration;

    /// A build brings objects while a link farm without them is being made.
    #[test]
    fn objects_built_while_a_link_farm_is_made_are_linked() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        let store = Store::open(&root, "default").unwrap();
        let (build, mut tree) = (store.build().unwrap(), Tree::default());
        for number in 0..3u8 {
            let data = build.put_bytes(&[number; 5000]).unwrap();
            let kind = FileKind::File(data);
            tree.put(format!("{number}").as_bytes(), Inode { meta: Meta::default(), kind }).unwrap();
        }
        let digest = build.publish("x", &tree, "t", Default::default(), vec![]).unwrap().digest;
        drop(build);
        let [lost, damaged] = [1, 2].map(|number| store.object_path(&Digest::of(&[number; 5000])));
        fs::remove_file(&lost).unwrap();
        store.mark_damaged(&damaged).unwrap();
        let builder = std::rc::Rc::new(std::cell::Cell::new(None));
        let (started, staged) = (builder.clone(), std::rc::Rc::new(std::cell::Cell::new(0)));
        let looks = staged.clone();
        ON_SYNC.set(Some(Box::new(move || {
            looks.set(looks.get() + 1);
            let root = root.clone();
            let thread = std::thread::spawn(move || {
                let store = Store::open(&root, "default").unwrap();
                let (build, mut tree) = (store.build().unwrap(), Tree::default());
                for number in 1..3u8 {
                    let kind = FileKind::File(build.put_bytes(&[number; 5000]).unwrap());
                    tree.put(format!("{number}").as_bytes(), Inode { meta: Meta::default(), kind }).unwrap();
                }
                build.publish("y", &tree, "t", Default::default(), vec![]).unwrap();
            });
            // The build must wait for the farm; if it does not, it ends within this time.
            let patience = std::time::Instant::now();
            while !thread.is_finished() && patience.elapsed() < Duration::from_millis(500) {
                std::thread::sleep(Duration::from_millis(5));
            }
            started.set(Some(thread));
        })));
        let lease = Lease::new(&store).unwrap();
        assert!(lease.claim_tree(&digest).unwrap());
        let farm = find_or_make(&store, &digest, &lease).unwrap().expect("one was made");
        ON_SYNC.set(None);
        assert_eq!(staged.get(), 1, "durable before it has its name");
        builder.take().unwrap().join().unwrap();
        for (object, place) in placed_objects(&tree) {
            let inode = |path: &Path| fs::metadata(path).unwrap().ino();
            assert_eq!(inode(&farm.object(&place)), inode(&store.object_path(&object)));
        }
        assert!(!store.is_repair_due() && !store.repair_note().exists());
    }

    /// A store with one image of some objects of 5000 equal bytes each.
    fn built(root: &Path, name: &str, objects: std::ops::Range<u32>) -> (Store, Tree, Digest) {
        let store = Store::open(root, "default").unwrap().without_sync();
        let (tree, digest) = build(&store, name, objects).unwrap();
        (store, tree, digest)
    }

    fn build(store: &Store, name: &str, objects: std::ops::Range<u32>) -> Result<(Tree, Digest)> {
        let (build, mut tree) = (store.build()?, Tree::default());
        for number in objects {
            let kind = FileKind::File(build.put_bytes(&content(number))?);
            tree.put(format!("{number:04}").as_bytes(), Inode { meta: Meta::default(), kind })?;
        }
        let digest = build.publish(name, &tree, "t", Default::default(), vec![])?.digest;
        Ok((tree, digest))
    }

    fn content(number: u32) -> Vec<u8> {
        number.to_le_bytes().repeat(1250)
    }

    fn object(store: &Store, number: u32) -> PathBuf {
        store.object_path(&Digest::of(&content(number)))
    }

    fn found(store: &Store, digest: &Digest) -> Option<LinkFarm> {
        let lease = Lease::new(store).unwrap();
        assert!(lease.claim_tree(digest).unwrap());
        find_or_make(store, digest, &lease).unwrap()
    }

    /// The places of objects that the link farm lacks, or has another file of.
    fn wrong_links(store: &Store, tree: &Tree, digest: &Digest) -> Vec<String> {
        let inode = |path: &Path| fs::metadata(path).map(|meta| meta.ino()).ok();
        let (farm, all) = (LinkFarm::of(store, digest), placed_objects(tree));
        all.filter(|(object, place)| inode(&farm.object(place)) != inode(&store.object_path(object)))
            .map(|(_, place)| place)
            .collect()
    }

    /// Makes the repair of link farms fail, as a full disk or a kill would, or makes it work again.
    fn break_repair(store: &Store, broken: bool) {
        let lock = store.path("shelf.lock");
        if broken {
            fs::remove_file(&lock).unwrap();
            fs::create_dir(&lock).unwrap();
        } else {
            fs::remove_dir(&lock).unwrap();
        }
    }

    /// Only the note says that a link farm lacks an object.
    #[test]
    fn a_missing_object_is_noted_until_all_link_farms_have_it() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..300);
        for number in [7, 270] {
            fs::remove_file(object(&store, number)).unwrap();
        }
        found(&store, &digest).unwrap();
        assert_eq!(
            fs::read(store.repair_note()).unwrap(),
            [7, 270].map(|number| Digest::of(&content(number)).0).concat()
        );
        // No repair is due for objects that no build has brought.
        assert!(!store.is_repair_due());
        build(&store, "y", 300..301).unwrap();
        gc::collect(&store, false).unwrap();
        assert_eq!(fs::read(store.repair_note()).unwrap().len(), 64);
        build(&store, "z", 270..271).unwrap();
        assert_eq!(fs::read(store.repair_note()).unwrap(), Digest::of(&content(7)).0);
        let at = LinkFarm::of(&store, &digest);
        assert!(!at.object("/0/07").exists() && at.object("/1/0e").exists());
        build(&store, "z", 7..8).unwrap();
        assert!(!store.repair_note().exists() && wrong_links(&store, &tree, &digest).is_empty());
    }

    /// The next build runs the repair that a killed or failed build has left, whatever it builds itself.
    #[test]
    fn the_next_build_runs_a_repair_that_one_could_not() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..9);
        fs::remove_file(object(&store, 4)).unwrap();
        found(&store, &digest).unwrap();
        for damage in ["missing", "damaged"] {
            if damage == "damaged" {
                store.mark_damaged(&object(&store, 5)).unwrap();
            }
            break_repair(&store, true);
            assert!(build(&store, "x", 0..9).is_err(), "{damage}");
            break_repair(&store, false);
            assert_eq!(wrong_links(&store, &tree, &digest).len(), 1, "{damage}");
            // A build without a new object.
            build(&store, "y", 0..1).unwrap();
            assert!(wrong_links(&store, &tree, &digest).is_empty(), "{damage}");
            assert!(!store.is_repair_due(), "{damage}");
        }
    }

    /// An image that cannot be read does not tell the objects of its link farm: the note must outlive repairs for other
    /// images.
    #[test]
    fn the_note_for_a_damaged_image_outlives_other_repairs() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..9);
        fs::remove_file(object(&store, 4)).unwrap();
        found(&store, &digest).unwrap();
        fs::write(store.tree_path(&digest), "damaged").unwrap();
        // Other images bring its missing object, and one that has to be replaced.
        store.mark_damaged(&object(&store, 5)).unwrap();
        build(&store, "y", 5..6).unwrap();
        build(&store, "z", 4..5).unwrap();
        assert_eq!(wrong_links(&store, &tree, &digest).len(), 2);
        build(&store, "x", 0..9).unwrap();
        assert!(wrong_links(&store, &tree, &digest).is_empty() && !store.repair_note().exists());
    }

    /// A damaged object that was removed manually is another file when it is built again.
    #[test]
    fn an_object_that_verify_missed_is_linked_when_it_is_built_again() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..9);
        found(&store, &digest).unwrap();
        fs::write(object(&store, 4), "damaged").unwrap();
        fs::remove_file(object(&store, 4)).unwrap();
        assert_eq!(verify::verify(&store, &[], false).unwrap().damaged.len(), 1);
        build(&store, "x", 0..9).unwrap();
        assert!(wrong_links(&store, &tree, &digest).is_empty());
        assert!(verify::verify(&store, &[], false).unwrap().damaged.is_empty() && !store.repair_note().exists());
    }

    /// A build that brings an object looks for the note before or after the mount that lacks the object has written it.
    #[test]
    fn an_object_built_at_any_moment_of_making_a_link_farm_is_linked() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..2000);
        for round in 0..10 {
            let _ = remove_tree(&LinkFarm::of(&store, &digest).path);
            fs::remove_file(object(&store, 0)).unwrap();
            std::thread::scope(|scope| {
                let store = &store;
                scope.spawn(move || {
                    let build = store.build().unwrap();
                    let mut tree = Tree::default();
                    let kind = FileKind::File(build.put_bytes(&content(0)).unwrap());
                    tree.put(b"it", Inode { meta: Meta::default(), kind }).unwrap();
                    // The mount has looked for the object, or is about to.
                    let begins = || {
                        let staged = fs::read_dir(store.path("staging")).unwrap().flatten();
                        staged.into_iter().any(|dir| dir.path().join(SUFFIX).join("objects/0/01").exists())
                    };
                    let start = std::time::Instant::now();
                    while !begins() && start.elapsed() < Duration::from_secs(20) {}
                    build.publish("it", &tree, "t", Default::default(), vec![]).unwrap();
                });
                std::thread::sleep(Duration::from_millis(10));
                found(store, &digest).unwrap();
            });
            assert_eq!(wrong_links(&store, &tree, &digest), [""; 0], "round {round}");
        }
    }

    /// The collector runs at any moment of a mount of an image that has lost its name.
    #[test]
    fn the_collector_leaves_what_a_link_farm_is_made_of() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            let collector = scope.spawn(|| {
                while !ended.load(relaxed) {
                    gc::collect(&store, false).unwrap();
                }
            });
            for round in 0..60 {
                let (tree, digest) = build(&store, "x", round * 300..round * 300 + 290).unwrap();
                let lease = Lease::new(&store).unwrap();
                lease.claim_image("x").unwrap();
                store.remove("x").unwrap();
                let farm = find_or_make(&store, &digest, &lease).unwrap().expect("one was made");
                for (object, place) in placed_objects(&tree) {
                    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
                    assert_eq!(inode(&farm.object(&place)), inode(&store.object_path(&object)), "round {round}");
                }
                assert!(farm.is_whole(&digest).unwrap() && !store.repair_note().exists(), "round {round}");
                assert!(!collector.is_finished());
            }
            ended.store(true, relaxed);
        });
        gc::collect(&store, false).unwrap();
        for part in ["trees", "staging", "leases"] {
            assert_eq!(fs::read_dir(store.path(part)).unwrap().count(), 0, "{part}");
        }
    }

    /// In a child process: repairs a link farm as a mount does, or as a build does.
    #[test]
    fn child_that_repairs() {
        let Some(root) = std::env::var_os("PAGEFOLD_TEST_REPAIRS") else { return };
        let store = Store::open(Path::new(&root), "default").unwrap();
        if std::env::var_os("PAGEFOLD_TEST_BUILDS").is_some() {
            build(&store, "x", 0..300).unwrap();
        } else {
            found(&store, &store.image("x").unwrap().digest).unwrap();
        }
    }

    #[test]
    fn a_repair_may_be_killed_at_any_moment() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        let (store, tree, digest) = built(&root, "x", 0..300);
        let farm = found(&store, &digest).unwrap();
        let copy = |path: &Path| {
            fs::copy(path, dir.path().join("copy")).unwrap();
            fs::rename(dir.path().join("copy"), path).unwrap();
        };
        let (mut half, mut wrong) = (0, 0);
        for round in 0..24u64 {
            let builds = round % 2 == 1;
            if builds {
                (0..300).step_by(7).for_each(|number| store.mark_damaged(&object(&store, number)).unwrap());
            } else {
                // As in a copy of the store.
                placed_objects(&tree).for_each(|(_, place)| copy(&farm.object(&place)));
                copy(&farm.metadata());
                wrong = wrong_links(&store, &tree, &digest).len();
            }
            // As a repair that was killed between two calls leaves it, which hardly ever happens here.
            fs::hard_link(object(&store, 1), farm.path.join("staged")).unwrap();
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "link_farm::tests::child_that_repairs"]).env("PAGEFOLD_TEST_REPAIRS", &root);
            if builds {
                child.env("PAGEFOLD_TEST_BUILDS", "");
            }
            let null = std::process::Stdio::null;
            let mut child = child.stdout(null()).stderr(null()).spawn().unwrap();
            std::thread::sleep(Duration::from_micros(4000 + round * 1500));
            child.kill().unwrap();
            child.wait().unwrap();
            half += u32::from(!builds && (1..wrong).contains(&wrong_links(&store, &tree, &digest).len()));
            if builds {
                // The next build repairs the links to objects that the killed one replaced.
                build(&store, "x", 0..300).unwrap();
            } else {
                found(&store, &digest).unwrap();
            }
            assert_eq!(wrong_links(&store, &tree, &digest), [""; 0], "round {round}");
            assert!(farm.is_whole(&digest).unwrap() && !store.is_repair_due(), "round {round}");
            assert_eq!(fs::read_dir(&farm.path).unwrap().count(), 2, "round {round}: objects and metadata");
        }
        println!("{half} were repaired by half");
        drop(store.build().unwrap());
        assert_eq!(fs::read_dir(store.path("staging")).unwrap().count(), 0);
    }

    /// A copy of a store, made by a program that does not know links, may have more link farms than an object can have
    /// links.
    #[test]
    fn an_object_at_its_link_limit_keeps_no_build_from_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..4);
        let farm = found(&store, &digest).unwrap();
        for path in placed_objects(&tree).map(|(_, place)| farm.object(&place)).chain([farm.metadata()]) {
            fs::copy(&path, dir.path().join("copy")).unwrap();
            fs::rename(dir.path().join("copy"), path).unwrap();
        }
        let others = dir.path().join("others");
        fs::create_dir(&others).unwrap();
        let link = |number: &u32| fs::hard_link(object(&store, 1), others.join(number.to_string())).is_ok();
        if (0..70_000).take_while(link).count() == 70_000 {
            println!("SKIPPED: the temporary directory's file system has more links than that");
            return;
        }
        store.mark_damaged(&object(&store, 2)).unwrap();
        build(&store, "y", 2..3).unwrap();
        assert_eq!(wrong_links(&store, &tree, &digest), ["/0/01"]);
        assert_eq!(fs::read(farm.object("/0/01")).unwrap(), content(1));
        assert!(!store.is_repair_due());
        // No mount uses that farm.
        assert!(found(&store, &digest).is_none());
    }

    #[test]
    fn verify_and_builds_repair_the_same_link_farm() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..4);
        found(&store, &digest).unwrap();
        let ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                        super::verify(&store, &digest, &tree).unwrap();
                    }
                });
            }
            for round in 0..300 {
                store.mark_damaged(&object(&store, round % 4)).unwrap();
                build(&store, "x", 0..4).unwrap();
            }
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(wrong_links(&store, &tree, &digest), [""; 0]);
        assert_eq!(fs::read_dir(&LinkFarm::of(&store, &digest).path).unwrap().count(), 2, "objects and metadata");
    }
}
