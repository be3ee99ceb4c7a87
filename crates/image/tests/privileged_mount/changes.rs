//! Writable mounts: changes stay with their image and never reach its objects.

use crate::common::{build_dir, damaged};
use crate::fixture::{Fixture, PlainUser, Scratch, alone, noise, rootless_refused, said, umount};
use pagefold_image::mount;
use pagefold_image::mount::{MountKind, Options};
use rustix::fs::XattrFlags;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

#[test]
fn a_writable_mount_keeps_its_changes_and_never_changes_objects() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    let upper = scratch.dir("upper");
    fs::write(tree.join("file"), noise(4, 200_000)).unwrap();
    fs::write(tree.join("kept"), noise(5, 200_000)).unwrap();
    std::os::unix::fs::chown(&tree, Some(1000), Some(70_000)).unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o750)).unwrap();
    rustix::fs::setxattr(&tree, "user.note", b"kept", XattrFlags::empty()).unwrap();
    let record = build_dir(&store, "rw", &tree).unwrap();
    for kind in [MountKind::Erofs, MountKind::Directory] {
        let options = Options { kind, upper: Some(upper.clone()), ..Options::default() };
        mount::mount(&store, &record, &at, &options).unwrap();
        let root = fs::metadata(&at).unwrap();
        assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o750, 1000, 70_000));
        fs::write(at.join("file"), format!("changed under {kind:?}")).unwrap();
        fs::set_permissions(at.join("kept"), fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(fs::read(at.join("kept")).unwrap(), noise(5, 200_000));
        assert!(damaged(&store).is_empty());
        umount(&at);
        mount::mount(&store, &record, &at, &options).unwrap();
        assert_eq!(fs::read_to_string(at.join("file")).unwrap(), format!("changed under {kind:?}"));
        // Attributes of the root directory are changes like others.
        assert_eq!(rustix::fs::getxattr(&at, "user.note", &mut [0; 8]).unwrap(), 4);
        fs::set_permissions(&at, fs::Permissions::from_mode(0o711)).unwrap();
        std::os::unix::fs::chown(&at, Some(1), Some(2)).unwrap();
        umount(&at);
        mount::mount(&store, &record, &at, &options).unwrap();
        let root = fs::metadata(&at).unwrap();
        assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o711, 1, 2), "{kind:?}");
        fs::set_permissions(&at, fs::Permissions::from_mode(0o750)).unwrap();
        std::os::unix::fs::chown(&at, Some(1000), Some(70_000)).unwrap();
        umount(&at);
    }
    // chmod copies the name, not the bytes: the file still shows the object.
    assert!(fs::metadata(upper.join("upper/kept")).unwrap().blocks() * 512 < 100_000);
}

#[test]
fn changes_are_mounted_over_their_own_image_only() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    let upper = scratch.dir("upper");
    let build = |size: usize| {
        fs::write(tree.join("file"), noise(size as u32, size)).unwrap();
        build_dir(&store, "app", &tree).unwrap()
    };
    let first = build(100_000);
    rustix::fs::setxattr(&tree, "trusted.second", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    let second = build(200_000);
    let named = |path: &Path| rustix::fs::getxattr(path, "trusted.second", &mut [0; 8][..]).ok();
    for kind in [MountKind::Erofs, MountKind::Directory] {
        let options = Options { kind, upper: Some(upper.clone()), ..Options::default() };
        // Without changes the directory belongs to no image yet; one mount at a time uses it.
        mount::mount(&store, &second, &at, &options).unwrap();
        assert_eq!(named(&at), Some(1));
        for record in [&first, &second] {
            let error = mount::mount(&store, record, &scratch.dir("other"), &options).unwrap_err().to_string();
            assert!(error.contains("in use by another mount"), "{error}");
        }
        umount(&at);
        mount::mount(&store, &first, &at, &options).unwrap();
        assert_eq!(named(&at), None, "the other image's");
        fs::set_permissions(at.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
        umount(&at);
        let error = mount::mount(&store, &second, &at, &options).unwrap_err().to_string();
        // The first image has lost its name.
        let of = format!("of image {}, not of app; ", first.digest);
        assert!(error.contains(&of) && error.contains("another directory"), "{error}");
        mount::mount(&store, &first, &at, &options).unwrap();
        assert_eq!(fs::read(at.join("file")).unwrap(), noise(100_000, 100_000));
        assert_eq!(fs::metadata(at.join("file")).unwrap().mode() & 0o7777, 0o600);
        // A link to the directory is recognized.
        symlink(&upper, scratch.path().join("link")).unwrap();
        let linked = Options { upper: Some(scratch.path().join("link")), ..options.clone() };
        let error = mount::mount(&store, &first, &scratch.dir("other"), &linked).unwrap_err().to_string();
        assert!(error.contains("in use by another mount"), "{error}");
        fs::remove_file(scratch.path().join("link")).unwrap();
        umount(&at);
        fs::remove_dir_all(upper.join("upper")).unwrap();
    }
}

#[test]
fn a_plain_users_changes_are_in_one_mount_at_a_time() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (user, upper) = (PlainUser::new(&scratch), scratch.dir("users-upper"));
    std::os::unix::fs::chown(&upper, Some(65534), Some(65534)).unwrap();
    let arguments = [&user.store, &user.at, &upper].map(|path| path.display().to_string()).join("\n");
    let mut command = user.runs("children::child_that_mounts_twice", &["-Urm"]);
    let text = said(&command.env("PAGEFOLD_TEST_TWICE", arguments).output().unwrap());
    if rootless_refused(&text) {
        return;
    }
    assert!(text.contains("SECOND Err(") && text.contains("in use by another mount"), "{text}");
    assert!(text.contains("THIRD Ok(") && text.contains("SAME true"), "{text}");
}
