//! Upper directories as trees: what overlayfs shows over a tree is what the tree of the changes shows.

use crate::fixture::{Fixture, alone, by, umount, unmount};
use pagefold_image::build::{Omissions, upper};
use pagefold_image::mount::MountKind;
use pagefold_image::mount::layers::{self, Naming, upper_in_use};
use pagefold_image::store::ImageRecord;
use pagefold_image::{Result, mount};
use rustix::fs::XattrFlags;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// An image, and a mount of it as a container engine makes one, with the changes in `changes/fs`.
struct Container {
    fixture: Fixture,
    record: ImageRecord,
    metadata: PathBuf,
    changes: PathBuf,
}

impl Container {
    /// `None` after saying why privileged tests cannot run here.
    fn new() -> Option<Self> {
        let fixture = Fixture::new()?;
        for dir in ["a/deep/er", "b", "c"] {
            fs::create_dir_all(fixture.tree.join(dir)).unwrap();
        }
        for (number, name) in ["a/file", "a/deep/er/file", "b/file", "b/same", "c/file", "top"].iter().enumerate() {
            fs::write(fixture.tree.join(name), vec![number as u8; 20_000]).unwrap();
        }
        fs::hard_link(fixture.tree.join("c/file"), fixture.tree.join("c/link")).unwrap();
        let record = crate::common::build_dir(&fixture.store, "x", &fixture.tree).unwrap();
        let (metadata, changes) = (fixture.scratch.dir("metadata"), fixture.scratch.dir("changes"));
        for part in ["fs", "work"] {
            fs::create_dir(changes.join(part)).unwrap();
        }
        Some(Self { fixture, record, metadata, changes })
    }

    fn upper(&self) -> PathBuf {
        self.changes.join("fs")
    }

    fn mount(&self, naming: Naming, options: &str) {
        let store = &self.fixture.store;
        assert!(layers::mount_metadata(store, &self.record.digest, naming, &self.metadata).unwrap());
        let objects = layers::objects(store, &self.record.digest, naming);
        let show = |path: &Path| path.display().to_string();
        let (upper, work) = (show(&self.upper()), show(&self.changes.join("work")));
        let lower = format!("{}::{}", show(&self.metadata), show(&objects));
        let data = format!("lowerdir={lower},upperdir={upper},workdir={work},{options}");
        let mut mount = Command::new("mount");
        mount.args(["-i", "-t", "overlay", "overlay", "-o", &data]).arg(&self.fixture.at);
        assert!(mount.status().unwrap().success(), "{data}");
    }

    fn umount(&self) {
        for at in [&self.fixture.at, &self.metadata] {
            unmount(at);
        }
    }

    /// Publishes the tree of the changes as image `y`.
    fn commit(&self, options: upper::Options) -> Result<ImageRecord> {
        let store = &self.fixture.store;
        let build = store.build()?;
        let parent = store.tree(&self.record.digest)?;
        let tree = upper::apply(&build, &parent, &self.upper(), options, &mut Omissions::default())?;
        build.publish("y", &tree, "test", Default::default(), Vec::new())
    }
}

/// Names, kinds, modes and bytes of all below `root`.
fn contents(root: &Path) -> Vec<String> {
    let (mut all, mut todo) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let bytes = if meta.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            let name = path.strip_prefix(root).unwrap().display().to_string();
            all.push(format!("{name} {:o} {} {:?}", meta.mode(), bytes.len(), bytes.first()));
            todo.extend(meta.is_dir().then_some(path));
        }
    }
    all.sort();
    all
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn change(at: &Path) {
    // Metadata only, under the old name, a new one and in a directory that moves.
    set_mode(&at.join("a/file"), 0o600);
    set_mode(&at.join("b/file"), 0o640);
    fs::rename(at.join("b/file"), at.join("moved-file")).unwrap();
    set_mode(&at.join("top"), 0o400);
    fs::hard_link(at.join("top"), at.join("top-link")).unwrap();
    // Directories move, into each other's places too.
    fs::rename(at.join("a"), at.join("new")).unwrap();
    fs::rename(at.join("b"), at.join("a")).unwrap();
    fs::rename(at.join("new"), at.join("b")).unwrap();
    fs::rename(at.join("b/deep/er"), at.join("c/inner")).unwrap();
    fs::write(at.join("c/inner/file"), [99; 30_000]).unwrap();
    // A name that comes back hides what was there.
    fs::remove_dir_all(at.join("b/deep")).unwrap();
    fs::create_dir(at.join("b/deep")).unwrap();
    fs::remove_file(at.join("c/link")).unwrap();
    fs::write(at.join("c/link"), "another file").unwrap();
}

/// Before Linux 6.16 overlayfs needs `metacopy` for data-only layers, and then keeps files without bytes and redirects.
#[test]
fn changes_with_metacopy_and_redirects_are_what_the_mount_showed() {
    let _alone = alone();
    for naming in [Naming::Places, Naming::Digests] {
        let Some(container) = Container::new() else { return };
        let at = &container.fixture.at;
        container.mount(naming, "metacopy=on,redirect_dir=on");
        change(at);
        let expected = contents(at);
        assert!(upper_in_use(&container.upper()));
        container.umount();
        assert!(!upper_in_use(&container.upper()));
        let redirect =
            rustix::fs::getxattr(container.upper().join("a"), "trusted.overlay.redirect", &mut [0u8; 256][..]);
        assert!(redirect.is_ok_and(|bytes| bytes > 0), "the kernel has renamed the directory by a redirect");
        let copied =
            rustix::fs::getxattr(container.upper().join("top"), "trusted.overlay.metacopy", &mut [0u8; 256][..]);
        assert!(copied.is_ok(), "the kernel has copied metadata only");
        let options = upper::Options { follow_redirects: true, copy: false };
        let record = container.commit(options).unwrap();
        upper::release(&container.upper()).unwrap();
        mount::mount(&container.fixture.store, &record, at, &by(MountKind::Auto)).unwrap();
        assert_eq!(contents(at), expected);
        assert_eq!(["top", "c/file"].map(|name| fs::metadata(at.join(name)).unwrap().nlink()), [2, 1]);
        umount(at);
    }
}

/// The same attributes in an archive that an engine has unpacked lead nowhere.
#[test]
fn redirects_of_archives_are_not_followed() {
    let Some(container) = Container::new() else { return };
    let (upper, store) = (container.upper(), &container.fixture.store);
    let object = store.tree_objects(&container.record.digest).unwrap()[0].0.object_path();
    fs::create_dir(upper.join("stolen")).unwrap();
    fs::write(upper.join("file"), [7; 5000]).unwrap();
    let set = |name: &str, attribute: &str, value: &str| {
        let attribute = format!("trusted.overlay.{attribute}");
        rustix::fs::setxattr(upper.join(name), attribute, value.as_bytes(), XattrFlags::empty()).unwrap();
    };
    set("stolen", "redirect", "/a");
    set("file", "metacopy", "");
    set("file", "redirect", &format!("/{object}"));
    let record = container.commit(upper::Options::default()).unwrap();
    let mut tree = store.tree(&record.digest).unwrap();
    let [dir, file] = ["stolen", "file"].map(|name| tree.find(name.as_bytes()).unwrap());
    assert_eq!(tree.children(dir).count(), 0);
    let at = &container.fixture.at;
    mount::mount(store, &record, at, &by(MountKind::Auto)).unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), [7; 5000]);
    umount(at);
    assert!(tree.inode(file).meta.xattrs.is_empty() && tree.inode(dir).meta.xattrs.is_empty());

    // Where redirects count, they stay within the parent, and each directory is moved to one place.
    let follow = upper::Options { follow_redirects: true, copy: false };
    set("file", "redirect", "/00/0000");
    assert!(container.commit(follow).unwrap_err().to_string().contains("the parent does not have them"));
    fs::remove_file(upper.join("file")).unwrap();
    for wrong in ["/", "/none", "/top", "none"] {
        set("stolen", "redirect", wrong);
        let text = container.commit(follow).unwrap_err().to_string();
        assert!(text.contains("renamed from") && text.contains("which the parent does not have"), "{text}");
    }
    set("stolen", "redirect", "/a");
    let text = container.commit(follow).unwrap_err().to_string();
    assert!(text.contains("renamed to two places"), "{text}");
}

/// A commit that was given up leaves files that may be written to.
#[test]
fn files_are_objects_without_a_copy_until_they_are_unshared() {
    let Some(container) = Container::new() else { return };
    let (upper, store) = (container.upper(), &container.fixture.store);
    let path = upper.join("new");
    fs::write(&path, [5; 50_000]).unwrap();
    fs::hard_link(&path, upper.join("new-link")).unwrap();
    std::os::unix::fs::chown(&path, Some(5), Some(6)).unwrap();
    set_mode(&path, 0o4711);
    rustix::fs::setxattr(&path, "user.a", b"b", XattrFlags::empty()).unwrap();
    let before = fs::metadata(&path).unwrap();
    let object = store.object_path(&pagefold_image::digest::Digest::of(&[5; 50_000]));
    container.commit(upper::Options::default()).unwrap();
    assert_eq!(fs::metadata(&object).unwrap().ino(), before.ino(), "the file itself");
    upper::unshare(&upper).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert_ne!(after.ino(), before.ino());
    assert_eq!(after.ino(), fs::metadata(upper.join("new-link")).unwrap().ino());
    let all = |meta: &fs::Metadata| (meta.mode(), meta.uid(), meta.gid(), meta.mtime_nsec(), meta.nlink());
    assert_eq!(all(&after), all(&before));
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut [0u8; 8][..]).unwrap(), 1);
    fs::write(&path, "changed").unwrap();
    assert_eq!(fs::read(&object).unwrap(), [5; 50_000]);
    upper::unshare(&upper).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().ino(), after.ino(), "nothing is shared any more");

    // What is released has the owner and mode of an object.
    fs::write(&path, [6; 50_000]).unwrap();
    container.commit(upper::Options::default()).unwrap();
    upper::release(&upper).unwrap();
    let object = fs::metadata(store.object_path(&pagefold_image::digest::Digest::of(&[6; 50_000]))).unwrap();
    assert_eq!((object.mode() & 0o7777, object.uid(), object.gid(), object.nlink()), (0o600, 0, 0, 1));
    upper::release(&upper).unwrap();
}
