//! Profiles of what a start reads.

use crate::common::build_dir;
use crate::fixture::{Scratch, alone, drop_cache, noise, run_in, runnable, umount};
use pagefold_image::digest::Digest;
use pagefold_image::mount::Options;
use pagefold_image::profile::Profile;
use pagefold_image::store::Store;
use pagefold_image::{gc, mount, stat};
use std::fs;
use std::time::{Duration, Instant};

#[test]
fn a_start_is_recorded_once_and_read_ahead_by_later_mounts() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (tree, at, root) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("store"));
    runnable(&tree);
    let (read, other) = (noise(3, 300_000), noise(4, 300_000));
    fs::write(tree.join("etc/read"), &read).unwrap();
    fs::write(tree.join("etc/other"), &other).unwrap();
    let store = Store::open(&root, "default").unwrap();
    let record = build_dir(&store, "run", &tree).unwrap();
    let resident = |content: &[u8]| stat::resident_bytes(&store.object_path(&Digest::of(content)), false).unwrap();
    let evict = || {
        for content in [&read, &other] {
            drop_cache(&store.object_path(&Digest::of(content)));
        }
    };
    evict();
    if resident(&read) > 0 {
        println!("SKIPPED: the temporary directory's file system keeps its files in memory");
        return;
    }
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };

    let text = run_in(&root, "learn", "cat /etc/read | cat >/dev/null; : >/tmp/own; ls /etc; echo ended");
    assert!(text.contains("ended"), "{text}");
    until("the profile is written when the command has ended", &|| Profile::load(&store, &record.digest).is_some());
    let profile = Profile::load(&store, &record.digest).unwrap();
    // The shell, cat and ls with their libraries, the file and the directory; not the file that the command made.
    assert!(profile.files() >= 5 && profile.bytes() > 300_000, "{profile:?}");
    let file = root.join("domains/default/trees").join(format!("{}.start", record.digest.hex()));
    let written = fs::read_to_string(&file).unwrap();
    assert!(written.contains("/etc/read") && !written.contains("/etc/other") && !written.contains("own"), "{written}");

    let mount_and_look = |options: &Options| {
        evict();
        let mounted = mount::mount(&store, &record, &at, options).unwrap();
        mounted.prefetched_bytes
    };
    assert_eq!(mount_and_look(&Options::default()), profile.bytes());
    // The mount requests the read-ahead and does not wait for it.
    until("what was learned is read", &|| resident(&read) >= read.len() as u64);
    assert_eq!(resident(&other), 0, "and nothing else");
    assert_eq!(fs::read(at.join("etc/read")).unwrap(), read);
    umount(&at);
    assert_eq!(mount_and_look(&Options { no_prefetch: true, ..Options::default() }), 0);
    assert_eq!(resident(&read), 0, "unless that is not wanted");
    umount(&at);

    // A profile is a hint: the tree is mounted whatever it contains.
    let odd = written.replace("/etc/read", "/../../../dev").replace("/bin/sh", "\u{0}\u{101}").replace("[0,", "[77,");
    for bad in ["", "{", &written[..written.len() / 2], &odd, &written.replace("\"format\":1", "\"format\":2")] {
        fs::write(&file, bad).unwrap();
        mount_and_look(&Options::default());
        assert_eq!(fs::read(at.join("etc/read")).unwrap(), read);
        umount(&at);
    }
    assert!(run_in(&root, "ro", "cat /etc/message").contains("from the image"));
    store.remove("run").unwrap();
    gc::collect(&store, false).unwrap();
    assert!(!file.exists(), "a profile goes with its image");
}
