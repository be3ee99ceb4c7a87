//! Builders that are killed at any instant lose nothing and leave nothing half.

use crate::common::build_dir;
use crate::fixture::{Fixture, collect, sample};
use pagefold_image::store::Store;
use pagefold_image::tree::Tree;
use pagefold_image::{Error, gc, stat};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// In a child process: builds the directories of `PAGEFOLD_TEST_BUILD` until it is killed.
#[test]
fn child_that_builds_until_killed() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_BUILD") else { return };
    let [store, tree, name] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("three arguments") };
    let store = Store::open(Path::new(store), "default").unwrap();
    for round in 0u64.. {
        if std::os::unix::process::parent_id() == 1 {
            // The test that would kill this process has ended.
            return;
        }
        // New content each time, and old content that the collector may remove.
        fs::write(PathBuf::from(tree).join("changing"), format!("{name} {round} ").repeat(3000)).unwrap();
        match build_dir(&store, &format!("{name}-{}", round % 3), Path::new(tree)) {
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn spawn_builder(store: &Path, tree: &Path, name: &str) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed_builders::child_that_builds_until_killed", "--nocapture"])
        .env("PAGEFOLD_TEST_BUILD", format!("{}\n{}\n{name}", store.display(), tree.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Builders are killed at random instants while the collector runs and names are added and removed: every published
/// image is complete, and at the end no file of a dead builder is left.
#[test]
fn builders_killed_at_any_instant_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let store = Store::open(&root, "default").unwrap();
    let keep = dir.path().join("keep");
    sample(&keep);
    let kept = build_dir(&store, "keep", &keep).unwrap();
    let trees: Vec<PathBuf> = (0..2).map(|i| dir.path().join(format!("tree{i}"))).collect();
    for tree in &trees {
        sample(tree);
        for i in 0..40u32 {
            fs::write(tree.join(format!("f{i}")), format!("file {i} of all builders ").repeat(500)).unwrap();
        }
    }
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut numbers = fastrand::Rng::with_seed(seed);
    let mut random = move |below: u64| numbers.u64(..below);
    let end = Instant::now() + Duration::from_secs(12);
    let (mut kills, mut verified) = (0, 0);
    while Instant::now() < end {
        let mut children: Vec<_> =
            trees.iter().enumerate().map(|(i, tree)| spawn_builder(&root, tree, &format!("b{i}"))).collect();
        let until = Instant::now() + Duration::from_millis(30 + random(500));
        while Instant::now() < until {
            match gc::collect(&store, false) {
                // A process of this machine is stuck in the kernel: nothing may be collected meanwhile.
                Err(Error::Refused(why)) if why.contains("do not answer") => println!("{why}"),
                other => drop(other.unwrap()),
            }
            for image in store.images().unwrap() {
                if image.name != "keep" && random(4) == 0 {
                    let _ = store.remove(&image.name);
                }
            }
        }
        for child in &mut children {
            if let Some(status) = child.try_wait().unwrap() {
                let mut text = String::new();
                std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut text).unwrap();
                panic!("a builder ended by itself: {status}: {text}");
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
        }
        let found = stat::verify(&store, &[], false).unwrap();
        assert!(found.damaged.is_empty(), "{:?}", found.damaged);
        verified += found.images;
    }
    println!("{kills} kills, {verified} images verified");
    assert!(kills >= 4 && verified > 0);
    assert_eq!(store.image("keep").unwrap().digest, kept.digest);
    collect(&store, false);
    for part in ["leases", "staging"] {
        let left = fs::read_dir(root.join("domains/default").join(part)).unwrap().count();
        assert_eq!(left, 0, "{part}");
    }
    for image in store.images().unwrap() {
        store.remove(&image.name).unwrap();
    }
    let stats = collect(&store, false);
    assert_eq!((stats.objects_kept, stats.trees_kept), (0, 0));
}

#[test]
fn the_next_build_removes_files_staged_by_a_dead_one() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let domain = store.root().join("domains/default");
    let live = store.build().unwrap();
    live.put_bytes(&[1; 5000]).unwrap();
    fs::write(domain.join("leases/dead"), [7; 32]).unwrap();
    for id in ["dead", "unleased"] {
        fs::create_dir(domain.join("staging").join(id)).unwrap();
        fs::write(domain.join("staging").join(id).join("0"), [2; 5000]).unwrap();
    }
    let count = |part: &str| fs::read_dir(domain.join(part)).unwrap().count();
    assert_eq!((count("leases"), count("staging")), (2, 3));
    let next = store.build().unwrap();
    assert_eq!((count("leases"), count("staging")), (2, 2), "two that live");
    assert!(!domain.join("staging/dead").exists() && !domain.join("staging/unleased").exists());
    drop(next);
    live.publish("x", &Tree::default(), "test", Default::default(), vec![]).unwrap();
    drop(live);
    assert_eq!((count("leases"), count("staging")), (0, 0));
}
