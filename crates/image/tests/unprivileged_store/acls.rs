//! Access control lists of archives: kept where Linux can have them, and never a wider permission than the archive gave.

use crate::archive_bytes::{archive, file, header, pax, seal};
use crate::fixture::Fixture;
use pagefold_image::build::{Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::export;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::{Meta, Tree};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

fn read(store: &Store, bytes: &[u8]) -> (Tree, Vec<String>) {
    let (build, mut tree, mut notes) = (store.build().unwrap(), Tree::default(), Omissions::default());
    apply_archive(&build, &mut tree, bytes, Limits::default(), &mut notes, &Progress::silent()).unwrap();
    (tree, notes.lines())
}

fn meta(tree: &Tree, path: &str) -> Meta {
    let id = tree.clone().find(path.as_bytes()).unwrap();
    tree.inode(id).meta.clone()
}

/// A header with the owner `user` of number `uid`, and mode 0674.
fn owned(path: &str, kind: u8, user: &str, uid: u32) -> Vec<u8> {
    let mut header = header(path.as_bytes(), kind, 0, b"");
    header[100..108].copy_from_slice(b"0000674\0");
    header[108..116].copy_from_slice(format!("{uid:07o}\0").as_bytes());
    header[265..265 + user.len()].copy_from_slice(user.as_bytes());
    seal(&mut header);
    header
}

/// An attribute's value.
fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = vec![2, 0, 0, 0];
    for (tag, permissions, id) in entries {
        value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

const NO_ID: u32 = u32::MAX;

#[test]
fn lists_become_attributes_and_text_again() {
    let Fixture { dir, store, .. } = Fixture::new();
    let (own, new) =
        (&b"user::rw-\nuser:1234:rwx\ngroup::r--\nmask::rwx\nother::r--\n"[..], b"user::rwx,group::r-x,other::---");
    let bytes = archive(&[
        pax(&[("SCHILY.acl.access", own)]),
        owned("f", b'0', "root", 0),
        pax(&[("SCHILY.acl.access", own), ("SCHILY.acl.default", new)]),
        owned("d", b'5', "root", 0),
        // On a link, and in a file's list for new files, they say nothing.
        pax(&[("SCHILY.acl.access", own)]),
        header(b"l", b'2', 0, b"f"),
        pax(&[("SCHILY.acl.default", new)]),
        owned("g", b'0', "root", 0),
        // One that the mode says in full, and one of no entries.
        pax(&[("SCHILY.acl.access", b"user::rwx,group::r-x,other::---"), ("SCHILY.acl.default", b"")]),
        owned("plain", b'5', "root", 0),
        file(b"none", b"1"),
    ]);
    let (tree, notes) = read(&store, &bytes);
    assert!(notes.is_empty(), "{notes:?}");
    let access = value(&[(1, 6, NO_ID), (2, 7, 1234), (4, 4, NO_ID), (16, 7, NO_ID), (32, 4, NO_ID)]);
    let default = value(&[(1, 7, NO_ID), (4, 5, NO_ID), (32, 0, NO_ID)]);
    for (path, mode, lists) in [
        ("f", 0o674, &[(ACCESS, &access)][..]),
        ("d", 0o674, &[(ACCESS, &access), (DEFAULT, &default)]),
        ("l", 0o777, &[]),
        ("g", 0o674, &[]),
        ("plain", 0o750, &[]),
        ("none", 0o644, &[]),
    ] {
        let found = meta(&tree, path);
        let expected = lists.iter().map(|(name, value)| (name.as_bytes().into(), value.as_slice().into())).collect();
        assert_eq!((found.mode, found.xattrs), (mode, expected), "{path}");
    }

    let mut exported = Vec::new();
    let record = store.build().unwrap().publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    let stored = store.tree(&record.digest).unwrap();
    export::tar(&store, &stored, &mut exported, &Progress::silent()).unwrap();
    let (again, _) = read(&store, &exported);
    for path in ["f", "d", "l", "g", "plain"] {
        assert_eq!(meta(&again, path), meta(&tree, path), "{path}");
    }
    // GNU tar reads the text.
    let (packed, out) = (dir.path().join("out.tar"), dir.path().join("out"));
    fs::write(&packed, &exported).unwrap();
    fs::create_dir(&out).unwrap();
    let told = Command::new("tar").args(["--acls", "-xf"]).arg(&packed).arg("-C").arg(&out).output().unwrap();
    let text = String::from_utf8_lossy(&told.stderr).into_owned();
    if !told.status.success() || text.contains("ACL support") {
        println!("SKIPPED: tar sets no lists here: {text}");
        return;
    }
    let attribute = |path: &str, name: &str| {
        let mut value = [0; 256];
        let count = rustix::fs::getxattr(out.join(path), name, &mut value).unwrap_or(0);
        value[..count].to_vec()
    };
    assert_eq!(
        (attribute("f", ACCESS), attribute("d", DEFAULT), attribute("d", ACCESS)),
        (access.clone(), default, access)
    );
    assert_eq!(fs::metadata(out.join("f")).unwrap().permissions().mode() & 0o7777, 0o674);
}

#[test]
fn names_are_those_of_the_archive() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let list = pax(&[("SCHILY.acl.access", b"user::rw-,user:joe:rwx,group::r--,mask::rwx,other::r--")]);
    let with_number = pax(&[("SCHILY.acl.access", b"user::rw-,user:joe:rwx:77,group::r--,mask::rwx,other::r--")]);
    let joe = |id| value(&[(1, 6, NO_ID), (2, 7, id), (4, 4, NO_ID), (16, 7, NO_ID), (32, 4, NO_ID)]);
    // The entry with the number comes later.
    let parts = [list.clone(), owned("a", b'0', "root", 0), with_number, owned("b", b'0', "root", 0)];
    let bytes = archive(&[&parts[..], &[owned("c", b'0', "joe", 1001)]].concat());
    let (tree, notes) = read(&store, &bytes);
    assert!(notes.is_empty(), "{notes:?}");
    assert_eq!(meta(&tree, "a").xattrs[ACCESS.as_bytes()], joe(1001).into());
    assert_eq!(meta(&tree, "b").xattrs[ACCESS.as_bytes()], joe(77).into());
    assert_eq!(meta(&tree, "a").mode, 0o674);

    // A later member of the name has no list.
    let bytes = archive(&[list.clone(), owned("d", b'5', "", 0), owned("d", b'5', "joe", 1001)]);
    let (tree, notes) = read(&store, &bytes);
    assert!(notes.is_empty() && meta(&tree, "d").xattrs.is_empty());

    // No number, or two: the mode is what the owning group has by the list.
    for more in [&[][..], &[owned("c", b'0', "joe", 1001), owned("e", b'0', "joe", 1002)]] {
        let parts = [list.clone(), owned("a", b'0', "root", 0)];
        let (tree, notes) = read(&store, &archive(&[&parts[..], more].concat()));
        assert_eq!((meta(&tree, "a").mode, meta(&tree, "a").xattrs.len()), (0o644, 0));
        assert!(notes.len() == 1 && notes[0].contains("packs numbers (1; first: a)"), "{notes:?}");
    }
    // New files of the directory get no more than the list gives them, either.
    let default = pax(&[("SCHILY.acl.default", b"user::rwx,user:joe:---,group::rwx,mask::r-x,other::r-x")]);
    let (tree, notes) = read(&store, &archive(&[default, owned("d", b'5', "root", 0)]));
    assert_eq!(
        meta(&tree, "d").xattrs[DEFAULT.as_bytes()],
        value(&[(1, 7, NO_ID), (4, 0, NO_ID), (32, 0, NO_ID)]).into()
    );
    assert_eq!((meta(&tree, "d").mode, notes.len()), (0o674, 1));
}

#[test]
fn attributes_that_are_no_lists_and_lists_of_other_systems() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let good = value(&[(1, 6, NO_ID), (2, 7, 5), (4, 4, NO_ID), (16, 6, NO_ID), (32, 0, NO_ID)]);
    let bytes = archive(&[
        pax(&[("SCHILY.xattr.system.posix_acl_access", &good)]),
        owned("good", b'0', "root", 0),
        pax(&[("SCHILY.xattr.system.posix_acl_access", &good[..7])]),
        owned("bad", b'0', "root", 0),
        pax(&[("SCHILY.acl.ace", b"owner@:rwx:allow")]),
        owned("foreign", b'0', "root", 0),
    ]);
    let (tree, notes) = read(&store, &bytes);
    assert_eq!((meta(&tree, "good").mode, meta(&tree, "good").xattrs.len()), (0o660, 1));
    assert_eq!((meta(&tree, "bad").mode, meta(&tree, "bad").xattrs.len()), (0o604, 0));
    assert!(
        notes.iter().any(|note| note.contains("no access control lists") && note.contains("first: bad")),
        "{notes:?}"
    );
    assert!(notes.iter().any(|note| note.contains("NFSv4") && note.contains("first: foreign")), "{notes:?}");
    // As libarchive writes it.
    let unmasked = pax(&[("SCHILY.acl.access", b"user::rw-,group::r--,other::r--,user:joe:rwx:77")]);
    let (tree, notes) = read(&store, &archive(&[unmasked, owned("f", b'0', "root", 0)]));
    assert_eq!((meta(&tree, "f").mode, meta(&tree, "f").xattrs.len()), (0o644, 0));
    assert!(notes.len() == 1 && notes[0].contains("no mask"), "{notes:?}");
    for bad in [&b"user::rw-"[..], b"rubbish", b"user::rw-,user:5:rwz,group::r--,other::r--"] {
        let bytes = archive(&[pax(&[("SCHILY.acl.access", bad)]), owned("f", b'0', "root", 0)]);
        let (build, mut tree, mut notes) = (store.build().unwrap(), Tree::default(), Omissions::default());
        let silent = Progress::silent();
        let error = apply_archive(&build, &mut tree, &bytes[..], Limits::default(), &mut notes, &silent).unwrap_err();
        assert!(error.to_string().contains("is no access control list"), "{error}");
    }
}

#[test]
fn labels_as_text_are_labels() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let label = pax(&[("RHT.security.selinux", b"system_u:object_r:bin_t:s0")]);
    let (tree, notes) = read(&store, &archive(&[label, owned("f", b'0', "root", 0)]));
    assert_eq!(*meta(&tree, "f").xattrs[&b"security.selinux"[..]], *b"system_u:object_r:bin_t:s0\0");
    assert!(notes.is_empty());
}
