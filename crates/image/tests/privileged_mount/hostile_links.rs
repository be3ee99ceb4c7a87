//! Links of an image never lead `exec` outside of it.

use crate::common::{build_dir, build_to_run};
use crate::fixture::{Scratch, alone, exec_in, runnable};
use pagefold_image::store::{RunConfig, Store};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

#[test]
fn links_of_an_image_never_lead_exec_to_the_host() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (host, root) = (scratch.dir("host"), scratch.dir("store"));
    let store = Store::open(&root, "default").unwrap();
    let far = format!("{}/deep", host.display());
    for (number, target) in
        ["/proc/self/cwd", "/", "/proc/1/root", "../../../../..", &far, "/etc", "proc", "proc/self"].iter().enumerate()
    {
        // Files that exec would create or truncate if it followed the link.
        fs::create_dir_all(host.join("deep")).unwrap();
        for dir in [&host, &host.join("deep")] {
            fs::write(dir.join("null"), "kept").unwrap();
        }
        let tree = scratch.dir(&format!("tree{number}"));
        runnable(&tree);
        for name in ["dev", "tmp", "sys"] {
            fs::remove_dir(tree.join(name)).unwrap();
            symlink(target, tree.join(name)).unwrap();
        }
        build_dir(&store, "run", &tree).unwrap();
        let mut child = exec_in(&root, "ro", "echo ran");
        let out = child.current_dir(&host).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(said.contains("ran") || said.contains("/dev of the image"), "{target}: {said}");
        for dir in [&host, &host.join("deep")] {
            assert_eq!(fs::read_to_string(dir.join("null")).unwrap(), "kept", "{target}");
            assert!(!dir.join("zero").exists() && !dir.join("shm").exists() && !dir.join("fd").exists(), "{target}");
        }
    }
    assert!(!Path::new("/stdin").exists() && !Path::new("/zero").exists());
}

#[test]
fn a_start_directory_is_never_outside_the_image() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (tree, root, host) = (scratch.dir("tree"), scratch.dir("store"), scratch.dir("host"));
    fs::write(host.join("of the host"), "").unwrap();
    // The kernel's link to the root directory of a process outside of the image.
    let outside = format!("/proc/{}/root{}", std::process::id(), host.display());
    runnable(&tree);
    symlink(&outside, tree.join("out")).unwrap();
    let store = Store::open(&root, "default").unwrap();
    for dir in [&outside, "/out", &format!("{outside}/made"), "/out/made"] {
        build_to_run(&store, "run", &tree, RunConfig { working_dir: dir.into(), ..RunConfig::default() }).unwrap();
        let out = exec_in(&root, "rw", "ls").output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains("--workdir names another"), "{dir}: {text}");
        assert!(!text.contains("of the host") && !host.join("made").exists(), "{dir}: {text}");
    }
}
