//! What a mount saves is told in four places: `disk status`, `status`, the daemon's metrics, and (by the same call) the
//! live view.

mod common;

use common::{Reaped, TOOL, comes, is_root, skipped, wait_for};
use pagefold_os::procfs;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory with one for images and one to mount them on; nothing, after saying so, where nothing can be mounted.
fn place() -> Option<(tempfile::TempDir, PathBuf, PathBuf)> {
    if !is_root() {
        return None;
    }
    if !Path::new("/dev/fuse").exists() {
        skipped("mounting needs /dev/fuse");
        return None;
    }
    let base = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (images, mount) = (base.path().join("images"), base.path().join("mnt"));
    std::fs::create_dir_all(&images).and_then(|()| std::fs::create_dir(&mount)).expect("directories");
    Some((base, images, mount))
}

#[test]
fn a_mount_shows_in_status_metrics_and_doctor_and_ends_cleanly() {
    let Some((base, images, mount)) = place() else { return };
    let data: Vec<u8> = (0..4u32 << 20).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    for name in ["a.raw", "b.raw"] {
        std::fs::write(images.join(name), &data).expect("an image");
    }
    let tool = |args: &[&str]| {
        let mut command = Command::new(TOOL);
        command.args(args).env("PAGEFOLD_RUNTIME_DIR", base.path().join("run")).stdin(Stdio::null());
        command
    };
    let text = |path: &Path| path.display().to_string();
    let (from, at) = (text(&images), text(&mount));
    let mounted = tool(&["disk", "mount", &from, &at, "--cache-size", "64M", "--background"]).output().expect("mount");
    assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
    for name in ["a.raw", "b.raw"] {
        assert!(std::fs::read(mount.join(name)).expect("an image") == data, "{name}");
    }
    let again = tool(&["disk", "mount", &from, &text(base.path()), "--background"]).output().expect("a second mount");
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("mounted already"));

    // Nor may other images have the place, by whatever name, and the log there is the first one's.
    let (other, link) = (base.path().join("other"), base.path().join("link"));
    std::fs::create_dir(&other).and_then(|()| std::os::unix::fs::symlink(&mount, &link)).expect("names");
    for place in [&mount, &link] {
        let again = tool(&["disk", "mount", &text(&other), &text(place), "--background"]).output().expect("a mount");
        let errors = String::from_utf8_lossy(&again.stderr).into_owned();
        assert!(again.status.code() == Some(1) && errors.contains("images are mounted there already"), "{errors}");
        let status = tool(&["disk", "status", &text(place)]).output().expect("status");
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    }
    let run = std::fs::read_dir(base.path().join("run")).expect("the runtime directory");
    let mut logs = run.flatten().map(|entry| entry.path()).filter(|path| text(path).contains(".log"));
    let log = logs.next().expect("a log");
    assert!(std::fs::read_to_string(&log).expect("a log").contains("is shown at") && logs.next().is_none());

    let json = |args: &[&str]| -> Value {
        let output = tool(args).output().expect("the tool runs");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let saved = json(&["disk", "status", &at, "--json"])["memory_saved_bytes"].as_u64().expect("a number");
    // Every block of the second image is one of the first's.
    assert_eq!(saved, data.len() as u64);

    // A command with another runtime directory reports that the mount exists.
    for args in [&["disk", "status"][..], &["disk", "status", &at]] {
        let elsewhere = tool(args).env("PAGEFOLD_RUNTIME_DIR", base.path().join("else")).output().expect("status");
        let said = String::from_utf8_lossy(&elsewhere.stderr).into_owned();
        assert!(said.contains(&format!("{at}: mounted, but no server answers in ")), "{said}");
    }

    // It is told without a daemon. What cannot be asked may be one: that is no answer.
    let alone = tool(&["status"]).output().expect("status");
    let shown = String::from_utf8_lossy(&alone.stdout).into_owned();
    assert!(alone.status.success() && shown.contains("no daemon runs") && shown.contains(&at), "{shown}");
    let other = std::os::unix::net::UnixListener::bind(base.path().join("run/daemon.sock")).expect("a socket");
    let refused = tool(&["status"]).output().expect("status");
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && errors.contains("is another program"), "{errors}");
    drop(other);

    let (socket, metrics) = (text(&base.path().join("d")), base.path().join("m"));
    let address = format!("unix:{}", metrics.display());
    let mut daemon = tool(&["daemon", "--socket", &socket, "--metrics", &address]);
    let _daemon = Reaped(daemon.stdout(Stdio::null()).spawn().expect("the daemon"));
    wait_for("the daemon", 20, || tool(&["status", "--socket", &socket]).output().expect("status").status.success());
    let status = json(&["status", "--socket", &socket, "--json"]);
    assert_eq!(status["disks"][0]["memory_saved_bytes"].as_u64(), Some(saved), "{status}");
    assert_eq!(status["disks"][0]["images"].as_array().map(Vec::len), Some(2));
    assert!(status["totals"].is_object(), "the daemon's own part is there as well");
    let shown = tool(&["status", "--socket", &socket]).output().expect("status");
    assert!(String::from_utf8_lossy(&shown.stdout).contains(&at));

    let mut stream = UnixStream::connect(&metrics).expect("the metrics");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.contains(&format!("pagefold_disk_memory_saved_bytes{{mount=\"{at}\"}} {saved}\n")), "{answer}");
    for image in ["a.raw", "b.raw"] {
        let line = format!("pagefold_disk_image_io_saved_bytes_total{{mount=\"{at}\",image=\"{image}\"}} ");
        assert!(answer.contains(&line), "{answer}");
    }
    assert!(answer.ends_with("# EOF\n") && answer.matches("# EOF").count() == 1);

    // Its exit status is about merging, which this kernel may not do.
    let doctor = tool(&["doctor", "--json"]).output().expect("doctor").stdout;
    let doctor: Value = serde_json::from_slice(&doctor).expect("JSON");
    let findings = doctor["findings"].as_array().expect("findings");
    let ours: Vec<&str> =
        findings.iter().filter(|f| f["part"] == "disks").filter_map(|finding| finding["name"].as_str()).collect();
    assert_eq!(
        ours,
        ["/dev/fuse", "right to mount", "transport", "--allow-other", "NBD tools"].map(|name| format!("disk: {name}"))
    );

    // One that is stopped is told, and not left out.
    let pid = status["disks"][0]["pid"].as_u64().expect("a process") as i32;
    // SAFETY: kill takes no pointers; the process is the server that this test started.
    let signal = |signal| assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    signal(libc::SIGSTOP);
    let [all, one] =
        [&["disk", "status"][..], &["disk", "status", &at]].map(|args| tool(args).output().expect("status"));
    signal(libc::SIGCONT);
    for (output, code) in [(all, 0), (one, 1)] {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(&format!("{at}: the mount does not answer (no word in 10s); ")), "{said}");
        // Others' mounts have lines of their own.
        let lines = said.lines().filter(|line| line.contains(&at)).count();
        assert_eq!((output.status.code(), lines, output.stdout.len()), (Some(code), 1, 0), "{said}");
    }

    let umount = tool(&["disk", "umount", &at]).output().expect("umount");
    assert!(umount.status.success(), "{}", String::from_utf8_lossy(&umount.stderr));
    assert!(!mount.join("a.raw").exists());
    let run = std::fs::read_dir(base.path().join("run")).expect("the runtime directory");
    let logs: Vec<_> =
        run.flatten().map(|entry| entry.file_name()).filter(|name| text(name.as_ref()).ends_with(".log")).collect();
    assert!(logs.is_empty(), "{logs:?}");
}

#[test]
fn umount_loses_nothing_that_the_disk_refuses_unless_it_is_given_up() {
    let Some((base, images, mount)) = place() else { return };
    let run = |program: &str, args: &[&str]| {
        let output = Command::new(program)
            .args(args)
            .env("PAGEFOLD_RUNTIME_DIR", base.path().join("run"))
            .stdin(Stdio::null())
            .output()
            .expect("a program");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (from, at) = (images.display().to_string(), mount.display().to_string());
    let server = |at: &str| {
        let mut status = Command::new(TOOL);
        status.args(["disk", "status", at, "--json"]).env("PAGEFOLD_RUNTIME_DIR", base.path().join("run"));
        let status: Value = serde_json::from_slice(&status.output().expect("status").stdout).expect("JSON");
        status["pid"].as_i64().expect("a number") as i32
    };
    assert!(run("mount", &["-t", "tmpfs", "-o", "size=1m", "none", &from]).0, "a disk of one MiB");
    for (size, give_up) in [(512 << 10, false), (4 << 20, true), (4 << 20, false)] {
        let (ok, said) =
            run(TOOL, &["disk", "mount", &from, &at, "--cache-size", "64M", "--flush-interval", "10m", "--background"]);
        assert!(ok, "{said}");
        std::fs::write(mount.join("image"), vec![7; size]).expect("room in the cache");
        let server = server(&at);
        let (ok, said) = run(TOOL, &["disk", "umount", &at]);
        assert_eq!(ok, size < 1 << 20, "{said}");
        // So nothing keeps the disk below from being unmounted.
        assert_eq!(procfs::has_ended(server), ok);
        if !ok {
            assert!(said.contains(" of image not written back: No space") && said.lines().count() == 1, "{said}");
            assert_eq!(std::fs::read(mount.join("image")).expect("still mounted"), vec![7; size]);
            if give_up {
                let (ok, said) = run(TOOL, &["disk", "umount", "--force", &at]);
                assert!(!ok && said.contains("bytes of image could not be written and are lost: No space"), "{said}");
            } else {
                assert!(run("mount", &["-o", "remount,size=8m", &from]).0, "room");
                let (ok, said) = run(TOOL, &["disk", "umount", &at]);
                assert!(ok, "{said}");
                assert_eq!(std::fs::read(images.join("image")).expect("all of it"), vec![7; size]);
            }
        }
        assert!(!mount.join("image").exists(), "unmounted");
    }
    // A child of another test has our descriptors for a moment.
    wait_for("the disk to be unmounted", 60, || run("umount", &[&from]).0);
}

/// Not that it is there, and then that it is not.
#[test]
fn a_mount_with_too_few_descriptors_for_its_threads_is_refused() {
    let Some((base, images, mount)) = place() else { return };
    let (from, at) = (images.display().to_string(), mount.display().to_string());
    let refused = Command::new("sh")
        .args(["-c", "ulimit -n 60; exec \"$0\" disk mount \"$1\" \"$2\" --workers 100", TOOL, &from, &at])
        .env("PAGEFOLD_RUNTIME_DIR", base.path().join("run"))
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.starts_with("pagefold: cannot serve the mount: Too many open files"), "{said}");
    assert!(said.lines().count() == 1 && said.contains("--workers"), "{said}");
    assert!(!pagefold_disk::mount::is_mounted(&mount));
}

/// If the command is interrupted while it waits for the mount, no mount appears later.
#[test]
fn an_interrupted_mount_in_the_background_does_not_come() {
    let Some((base, images, mount)) = place() else { return };
    // SAFETY: kill takes no pointers; the processes are children that live or were not waited for.
    let signal = |pid: i32, signal| unsafe { libc::kill(pid, signal) };
    for turn in 0.. {
        let mut command = Command::new(TOOL);
        command.args(["disk", "mount", "--background"]).args([&images, &mount]);
        command.env("PAGEFOLD_RUNTIME_DIR", base.path().join("run")).stdin(Stdio::null()).stdout(Stdio::null());
        let mut caller = command.spawn().expect("the tool runs");
        let children = format!("/proc/{0}/task/{0}/children", caller.id());
        // Wait until the child has executed its program: before that its caller is stopped too (vfork).
        let runs = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains("mount") && !line.contains("--background"))
        };
        let child = loop {
            let found = std::fs::read_to_string(&children).ok().and_then(|text| text.trim().parse::<i32>().ok());
            let found = found.filter(runs);
            if found.is_some() || caller.try_wait().expect("ours").is_some() {
                break found;
            }
        };
        // It stands still, and it is not known where.
        child.inspect(|child| assert_eq!(signal(*child, libc::SIGSTOP), 0));
        signal(caller.id() as i32, libc::SIGTERM);
        let interrupted = caller.wait().expect("ours").code().is_none();
        // On a busy machine it may be there, and its caller not have seen it.
        let logs = std::fs::read_dir(base.path().join("run")).expect("the runtime directory").flatten();
        let mut logs = logs.filter(|entry| entry.file_name().to_string_lossy().contains(".log"));
        let is_there =
            logs.any(|log| std::fs::read_to_string(log.path()).is_ok_and(|said| said.contains("is shown at")));
        child.inspect(|child| assert_eq!(signal(*child, libc::SIGCONT), 0));
        let Some(child) = child.filter(|_| interrupted && !is_there) else {
            assert!(turn < 100, "it is always there before it can be stopped");
            let at = mount.display().to_string();
            let ended = Command::new(TOOL)
                .args(["disk", "umount", &at])
                .env("PAGEFOLD_RUNTIME_DIR", base.path().join("run"))
                .status();
            assert!(ended.expect("umount").success());
            continue;
        };
        let ends = || {
            let is_gone = || std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default().is_empty();
            comes(120, is_gone)
        };
        let ended = ends();
        if !ended {
            signal(child, libc::SIGTERM);
            ends();
        }
        assert!(ended, "the mount's process goes on");
        assert!(!pagefold_disk::mount::is_mounted(&mount));
        return;
    }
}

#[test]
fn nothing_is_put_into_a_runtime_directory_that_others_may_write() {
    if !is_root() {
        return;
    }
    let base = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (images, mount, run) = (base.path().join("images"), base.path().join("mnt"), base.path().join("run"));
    for path in [&images, &mount, &run] {
        std::fs::create_dir(path).expect("a directory");
    }
    for (owner, mode) in [(65534, 0o700), (0, 0o770), (0, 0o703)] {
        std::os::unix::fs::chown(&run, Some(owner), Some(owner)).expect("another owner");
        std::fs::set_permissions(&run, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("its mode");
        let output = Command::new(TOOL)
            .args(["disk", "mount", "--background"])
            .args([&images, &mount])
            .env("PAGEFOLD_RUNTIME_DIR", &run)
            .output()
            .expect("the tool runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.lines().count() == 1, "{said}");
        assert!(
            said.contains(&format!("and is of user {owner} with mode {mode:04o}; set PAGEFOLD_RUNTIME_DIR")),
            "{said}"
        );
        assert_eq!(std::fs::read_dir(&run).expect("the directory").count(), 0);
    }
}

/// The first line on its output tells the waiting command that the mount exists; without it the command would wait for ever.
#[test]
fn a_mount_in_the_background_needs_room_for_its_messages() {
    let Some((base, images, mount)) = place() else { return };
    let run = base.path().join("run");
    std::fs::create_dir(&run).expect("a directory");
    std::fs::write(images.join("a"), vec![1; 4096]).expect("an image");
    // In a namespace of its own: what is mounted goes with it.
    let script = format!(
        "mount -t tmpfs -o size=64k,mode=700 none {run} && head -c 64k /dev/zero > {run}/fill &&
         exec timeout 60 {TOOL} disk mount --background {images} {mount}",
        run = run.display(),
        images = images.display(),
        mount = mount.display()
    );
    let mut shell = Command::new("unshare");
    shell.args(["-m", "sh", "-c", &script]).env("PAGEFOLD_RUNTIME_DIR", &run);
    let output = shell.output().expect("unshare");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("for messages: No space left") && said.lines().count() == 1, "{said}");
}
