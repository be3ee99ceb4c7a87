//! Stores of other versions, several domains, and first users.

use crate::common::build_dir;
use crate::fixture::{Fixture, sample};
use pagefold_image::Error;
use pagefold_image::store::Store;
use pagefold_image::tree::Tree;
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[test]
fn a_newer_store_and_a_directory_that_is_no_store_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    Store::open(&root, "default").unwrap();
    fs::write(root.join("pagefold-image-store"), br#"{"format":9,"shape":["unknown"]}"#).unwrap();
    let error = Store::open(&root, "default").unwrap_err();
    assert!(matches!(error, Error::Newer { found: 9, .. }), "{error}");
    fs::write(dir.path().join("file"), "x").unwrap();
    let error = Store::open(dir.path(), "default").unwrap_err().to_string();
    assert!(error.contains("neither empty nor an image store"), "{error}");
    // A new file system has lost+found, and counts as empty.
    fs::create_dir_all(dir.path().join("own/lost+found")).unwrap();
    Store::open(&dir.path().join("own"), "default").unwrap();
    for domain in ["", "..", "a/b", ".hidden", "a\nb"] {
        assert!(Store::open(&root, domain).is_err(), "{domain:?}");
    }
}

#[test]
fn domains_share_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    sample(&tree);
    let root = dir.path().join("s");
    let (a, b) = (Store::open(&root, "alice").unwrap(), Store::open(&root, "bob").unwrap());
    let record = build_dir(&a, "x", &tree).unwrap();
    assert!(matches!(b.image("x"), Err(Error::NoImage { .. })));
    build_dir(&b, "x", &tree).unwrap();
    for (digest, ..) in a.tree_objects(&record.digest).unwrap() {
        use std::os::unix::fs::MetadataExt;
        let inode = |store: &Store| fs::metadata(store.object_path(&digest)).unwrap().ino();
        assert_ne!(inode(&a), inode(&b), "one inode would be one page cache");
    }
    assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(Store::domains(&root).unwrap(), ["alice", "bob"]);
}

/// Threads that open a new store at the same time make it or find it made, at any interleaving.
#[test]
fn concurrent_first_users_open_the_same_store() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..200 {
        let root = dir.path().join(format!("s{round}"));
        let start = std::sync::Barrier::new(4);
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = || {
                start.wait();
                Store::open(&root, "default").map(drop)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for outcome in opened {
            outcome.unwrap();
        }
    }
}

#[test]
fn an_impossible_image_name_is_refused_before_the_build() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let record = |name: &str| store.build()?.publish(name, &Tree::default(), "t", Default::default(), vec![]);
    for (name, fits) in [
        ("a".repeat(200), true),
        ("a".repeat(201), false),
        ("日".repeat(28), true),
        ("日".repeat(29), false),
        ("/".repeat(85), true),
        ("/".repeat(86), false),
        ("\n".into(), false),
        (String::new(), false),
    ] {
        match (pagefold_image::store::check_name(&name), record(&name), fits) {
            (Ok(()), Ok(record), true) => assert_eq!(store.image(&name).unwrap().digest, record.digest),
            (Err(early), Err(late), false) => assert_eq!(early.to_string(), late.to_string()),
            other => panic!("{name:?}: {other:?}"),
        }
    }
}
