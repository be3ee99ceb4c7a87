//! Commands that run with an image as their root directory.

use crate::common::{build_dir, build_to_run};
use crate::fixture::{Fixture, Scratch, alone, exec_in, run_in, runnable};
use pagefold_image::mount::Options;
use pagefold_image::store::{RunConfig, Store};
use pagefold_image::{mount, mounts};
use std::fs;
use std::process::{Command, Stdio};

#[test]
fn a_command_runs_with_the_image_as_its_root() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let tree = scratch.dir("tree");
    runnable(&tree);
    let root = scratch.dir("store");
    let store = Store::open(&root, "default").unwrap();
    build_dir(&store, "run", &tree).unwrap();
    let text = run_in(
        &root,
        "ro",
        "cat /etc/message; ls /; ls /host; touch /x && echo wrote; echo tmp >/tmp/y && cat /tmp/y </dev/null",
    );
    assert!(text.contains("from the image") && text.contains("passwd") && text.contains("tmp"), "{text}");
    assert!(!text.contains("wrote") && !text.contains("home"), "the host's root is out of sight: {text}");
    let text = run_in(&root, "rw", "touch /x && echo wrote");
    assert!(text.contains("wrote"), "{text}");
    assert!(!run_in(&root, "rw", "ls /").lines().any(|line| line == "x"), "a scratch layer vanishes");
    assert!(mounts::mounts(&store).unwrap().is_empty());
    for part in ["staging", "leases"] {
        assert_eq!(fs::read_dir(root.join("domains/default").join(part)).unwrap().count(), 0, "{part}");
    }
}

#[test]
fn a_command_that_cannot_be_started_leaves_nothing() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let tree = scratch.dir("tree");
    runnable(&tree);
    let root = scratch.dir("store");
    let store = Store::open(&root, "default").unwrap();
    // No directory for the bind, which is found after the mount; no such user, found in the new root; no program.
    for (name, mode, said) in
        [("host", "rw", "--bind /host"), ("", "as nobody", "no user"), ("bin/sh", "ro", "/bin/sh")]
    {
        let (from, aside) = (tree.join(name), tree.join("aside"));
        if !name.is_empty() {
            fs::rename(&from, &aside).unwrap();
        }
        build_dir(&store, "run", &tree).unwrap();
        let out = exec_in(&root, mode, "true").output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains(said), "{text}");
        for part in ["staging", "leases"] {
            assert_eq!(fs::read_dir(root.join("domains/default").join(part)).unwrap().count(), 0, "{name}: {part}");
        }
        if !name.is_empty() {
            fs::rename(&aside, &from).unwrap();
        }
    }
}

#[test]
fn a_command_finds_terminals_and_its_start_directory() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (tree, root) = (scratch.dir("tree"), scratch.dir("store"));
    runnable(&tree);
    let store = Store::open(&root, "default").unwrap();
    build_to_run(&store, "run", &tree, RunConfig { working_dir: "/srv/app".into(), ..RunConfig::default() }).unwrap();
    for (mode, expected) in [("ro", "in / now"), ("rw", "in /srv/app now")] {
        // Opening the file makes a new terminal.
        let text = run_in(&root, mode, "echo in $PWD now; : </dev/ptmx && echo opened");
        assert!(text.contains(expected) && text.contains("opened"), "{mode}: {text}");
    }
}

#[test]
fn a_command_runs_as_the_images_user() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let (tree, root) = (scratch.dir("tree"), scratch.dir("store"));
    runnable(&tree);
    fs::write(tree.join("etc/passwd"), "root:x:0:0::/root:\napp:x:1001:1002::/home/app:\n").unwrap();
    fs::write(tree.join("etc/group"), "app:x:1002:\nextra:x:1003:app\n").unwrap();
    let store = Store::open(&root, "default").unwrap();
    let build = |user: &str| {
        build_to_run(&store, "run", &tree, RunConfig { user: user.into(), ..RunConfig::default() }).unwrap();
    };
    let command =
        "echo $(id -u) $(id -g) $(id -G) $HOME; cat /etc/message; echo out >/dev/stdout; touch /tmp/x && ls /tmp";
    for (user, mode, expected) in [
        ("1000", "ro", "1000 0 0 /\n"),
        ("app", "ro", "1001 1002 1002 1003 /home/app\n"),
        ("app:7", "ro", "1001 7 7 /home/app\n"),
        ("app", "as 5:6", "5 6 6 /\n"),
        ("app", "as root", "0 0 0 /root\n"),
        ("", "ro", "0 0"),
    ] {
        build(user);
        let text = run_in(&root, mode, command);
        assert!(text.contains(expected) && text.contains("from the image"), "{user} {mode}: {text}");
        assert!(text.contains("out\n") && text.contains("x\n"), "{user} {mode}: {text}");
    }
    build("unknown-user");
    let out = exec_in(&root, "ro", command).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && text.contains(r#"no user "unknown-user" in the image"#), "{text}");
}

#[test]
fn an_oci_runtime_takes_the_mounted_tree_as_its_root() {
    let _alone = alone();
    let runtimes: Vec<&str> = ["crun", "runc"]
        .into_iter()
        .filter(|name| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok())
        .collect();
    if runtimes.is_empty() {
        println!("SKIPPED: neither crun nor runc is installed");
        return;
    }
    let Some(Fixture { scratch, tree, store, .. }) = Fixture::new() else { return };
    runnable(&tree);
    let record = build_dir(&store, "run", &tree).unwrap();
    let bundle = scratch.dir("bundle");
    let at = scratch.dir("bundle/rootfs");
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    let config = serde_json::json!({
        "ociVersion": "1.0.0",
        "root": { "path": "rootfs", "readonly": true },
        "process": { "user": { "uid": 0, "gid": 0 }, "cwd": "/", "env": ["PATH=/bin"],
            "args": ["/bin/sh", "-c", "cat /etc/message; id"] },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"] },
        ],
        "linux": { "namespaces": [{ "type": "mount" }, { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }] },
    });
    fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    let mut ran = Vec::new();
    for runtime in runtimes {
        let id = format!("pagefold-test-{}", std::process::id());
        let mut command = Command::new(runtime);
        if runtime == "crun" {
            command.arg("--cgroup-manager=disabled");
        }
        let out = command
            .args(["--root"])
            .arg(scratch.dir("state"))
            .args(["run", "--bundle"])
            .arg(&bundle)
            .arg(&id)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let error = String::from_utf8_lossy(&out.stderr).trim().to_string();
        if !out.status.success() && error.contains("cgroup") {
            // The runtime does not support this machine's cgroups, which has nothing to do with the tree.
            println!("SKIPPED: {runtime}: {error}");
            continue;
        }
        assert!(text.contains("from the image") && text.contains("uid=0"), "{runtime}: {text}{error}");
        ran.push(runtime);
    }
    println!("ran under: {ran:?}");
}
