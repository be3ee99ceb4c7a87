//! Nothing that is mounted anywhere is collected.

use crate::common::build_dir;
use crate::fixture::{Fixture, PlainUser, Scratch, alone, by, noise, rootless_refused, runnable, said, umount};
use pagefold_image::mount::{MountKind, Options};
use pagefold_image::store::Store;
use pagefold_image::{Result, gc, mount, mounts, stat};
use rustix::mount::{MountFlags, MountPropagationFlags};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Starts a process in a mount namespace of its own, which copies all mounts, and unmounts `at` here.
fn move_to_another_namespace(at: &Path) -> Child {
    let mut other = Command::new("unshare")
        .args(["-m", "sh", "-c", "echo ready; read line; cat \"$0/file\" | wc -c"])
        .arg(at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    other.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    umount(at);
    other
}

/// Lets the process count the bytes of `file` in the mount and end.
fn file_bytes(mut other: Child) -> String {
    drop(other.stdin.take());
    let mut count = String::new();
    other.stdout.as_mut().unwrap().read_to_string(&mut count).unwrap();
    assert!(other.wait().unwrap().success());
    count.trim().to_owned()
}

#[test]
fn hidden_mounts_are_not_collected_and_false_mount_names_are_ignored() {
    let _alone = alone();
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    let jail = scratch.dir("jail");
    fs::write(tree.join("file"), noise(10, 200_000)).unwrap();
    runnable(&jail);
    let record = build_dir(&store, "x", &tree).unwrap();

    // A name that is not UTF-8, and names that imitate ours.
    let odd = scratch.path().join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&odd).unwrap();
    let lies = [
        format!("/elsewhere/{}.full.erofs", "a".repeat(64)),
        format!("{}.full.erofs", store.tree_path(&record.digest).with_file_name("b".repeat(64)).display()),
        format!("pagefold:{}:default:{}", store.id(), "c".repeat(64)),
    ];
    for source in lies.iter().map(String::as_str).chain(["odd"]) {
        rustix::mount::mount(source, &odd, "tmpfs", MountFlags::empty(), None).unwrap();
    }
    let overlay = format!("lowerdir={}:{}", tree.display(), jail.display());
    let out = Command::new("mount").args(["-t", "overlay", &lies[2], "-o", &overlay]).arg(&odd).status().unwrap();
    assert!(out.success());
    assert!(mounts::mounts(&store).unwrap().is_empty());
    gc::collect(&store, false).unwrap();
    stat::stat(&store, &[]).unwrap();

    // A metadata directory stays mounted only in a namespace with one process, which has a subdirectory as its root.
    mount::mount(&store, &record, &at, &by(MountKind::Directory)).unwrap();
    assert_eq!(mounts::mounts(&store).unwrap().len(), 1);
    let mut jailed = Command::new("unshare")
        .args(["-m", "chroot"])
        .arg(&jail)
        .args(["/bin/sh", "-c", "echo ready; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    jailed.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    umount(&at);
    store.remove("x").unwrap();
    let stats = gc::collect(&store, false).unwrap();
    drop(jailed.stdin.take());
    jailed.wait().unwrap();
    assert_eq!((stats.objects_removed, stats.trees_removed), (0, 0));
    // Without such a process the image is collected.
    if !mounts::view(&store).unwrap().partial {
        let stats = gc::collect(&store, false).unwrap();
        assert_eq!((stats.objects_removed, stats.trees_removed), (1, 1));
    }
}

#[test]
fn nothing_mounted_is_collected() {
    let _alone = alone();
    let Some(Fixture { scratch: _scratch, tree, at, store }) = Fixture::new() else { return };
    fs::write(tree.join("file"), noise(6, 200_000)).unwrap();
    let rebuilt = || build_dir(&store, "x", &tree).unwrap();
    let whole = |at: &Path| assert_eq!(fs::read(at.join("file")).unwrap(), noise(6, 200_000));
    let collect_keeps = |what: &str| {
        store.remove("x").unwrap();
        let stats = gc::collect(&store, false).unwrap();
        assert_eq!((stats.objects_removed, stats.trees_removed), (0, 0), "{what}");
    };
    for kind in [MountKind::Erofs, MountKind::Directory] {
        mount::mount(&store, &rebuilt(), &at, &by(kind)).unwrap();
        collect_keeps("mounted here");
        whole(&at);
        umount(&at);
    }
    // Mounted only in another mount namespace.
    mount::mount(&store, &rebuilt(), &at, &Options::default()).unwrap();
    let other = move_to_another_namespace(&at);
    collect_keeps("mounted in another namespace");
    assert_eq!(file_bytes(other), "200000");
    // Mounted only in a namespace of one thread, which the process's own mount table does not show.
    let mounted = by(MountKind::Directory);
    mount::mount(&store, &rebuilt(), &at, &mounted).unwrap();
    let (left, has_left) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let at = &at;
        scope.spawn(move || {
            use rustix::thread::UnshareFlags;
            // SAFETY: UnshareFlags::FILES is not set, so descriptors stay valid for all threads.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS) }.unwrap();
            rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            left.send(()).unwrap();
            let _ = goes.recv();
            whole(at);
        });
        has_left.recv().unwrap();
        umount(at);
        collect_keeps("mounted in a thread's namespace");
        drop(go);
    });
    // Detached, held only by an open file: no mount table shows it.
    mount::mount(&store, &rebuilt(), &at, &Options::default()).unwrap();
    let mut held = fs::File::open(at.join("file")).unwrap();
    mount::umount(&at, true).unwrap();
    assert!(mounts::mounts(&store).unwrap().is_empty());
    collect_keeps("held by an open file");
    // Building the same content again must not make the collector forget the open file.
    rebuilt();
    collect_keeps("held by an open file while it was built again");
    let mut bytes = Vec::new();
    held.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, noise(6, 200_000));
    drop(held);
    // A mount by a metadata directory cannot be held open when detached, so it stays in the table while it is used.
    mount::mount(&store, &rebuilt(), &at, &by(MountKind::Directory)).unwrap();
    let held = fs::File::open(at.join("file")).unwrap();
    let error = mount::umount(&at, true).unwrap_err().to_string();
    assert!(error.contains("end what uses it") && !error.contains("--lazy"), "{error}");
    collect_keeps("in use by a metadata directory");
    drop(held);
    umount(&at);
    if mounts::view(&store).unwrap().partial {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    // An image in no use is collected.
    let stats = gc::collect(&store, false).unwrap();
    assert_eq!((stats.objects_removed, stats.trees_removed), (1, 1));
}

#[test]
fn an_unreadable_lease_is_named() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let user = PlainUser::new(&scratch);
    let lease = user.store.join("domains/default/leases/0123456789abcdef");
    fs::write(&lease, [0; 32]).unwrap();
    fs::set_permissions(&lease, fs::Permissions::from_mode(0o600)).unwrap();
    let collects =
        || user.runs("children::child_that_collects", &[]).env("PAGEFOLD_TEST_COLLECT", &user.store).output().unwrap();
    let text = said(&collects());
    let named = format!("{}: a build or mount of user 0 has left it", lease.display());
    assert!(text.contains(&named) && !text.contains("COLLECTED"), "{text}");
    fs::remove_file(&lease).unwrap();
    assert!(said(&collects()).contains("COLLECTED"));
}

#[test]
fn a_collector_keeps_what_unseen_processes_may_have_mounted() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    // A collector in a PID namespace sees no process outside of it, so it cannot see their mount namespaces.
    let (tree, at, root) = (scratch.dir("own-tree"), scratch.dir("mnt"), scratch.dir("store"));
    fs::write(tree.join("file"), noise(6, 200_000)).unwrap();
    let store = Store::open(&root, "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &by(MountKind::Directory)).unwrap();
    let other = move_to_another_namespace(&at);
    let out = Command::new("unshare")
        .args(["-mpf", "--mount-proc", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "children::child_that_collects", "--nocapture"])
        .env("PAGEFOLD_TEST_COLLECT", &root)
        .output()
        .unwrap();
    let bytes = file_bytes(other);
    assert!(said(&out).contains("COLLECTED 0 0 UNSEEN 1"), "{}", said(&out));
    assert_eq!(bytes, "200000");

    // A collector in a user namespace sees processes outside of it, but of their mounts only the mount table.
    let user = PlainUser::new(&scratch);
    let mut mounted = user
        .mounts()
        .env("PAGEFOLD_TEST_WAIT", "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(mounted.stdout.take().unwrap()).lines().map(Result::unwrap);
    let ready = lines.any(|line| line.contains("TOOL true"));
    let collects = |unshare: &[&str]| {
        let out =
            user.runs("children::child_that_collects", unshare).env("PAGEFOLD_TEST_COLLECT", &user.store).output();
        said(&out.unwrap())
    };
    let text = if ready { collects(&["-Ur"]) } else { String::new() };
    drop(mounted.stdin.take());
    let still = lines.any(|line| line.contains("STILL true 701"));
    let mut error = String::new();
    mounted.stderr.as_mut().unwrap().read_to_string(&mut error).unwrap();
    mounted.wait().unwrap();
    if rootless_refused(&error) {
        return;
    }
    assert!(text.contains("COLLECTED 0 0 "), "{text}{error}");
    assert!(still, "{error}");
    // PID_NS_INIT_INO: in a container not all processes are visible.
    if fs::metadata("/proc/self/ns/pid").unwrap().ino() != 0xEFFF_FFFC {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    // A collector that sees all processes collects the image, although one of the same user is not dumpable.
    let mut shy = user
        .runs("children::child_that_is_not_dumped", &[])
        .env("PAGEFOLD_TEST_SHY", "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(shy.stdout.take().unwrap()).lines().map(Result::unwrap);
    let ready = lines.any(|line| line.contains("SHY"));
    let text = collects(&[]);
    drop(shy.stdin.take());
    shy.wait().unwrap();
    assert!(ready && text.contains("COLLECTED 1 "), "{text}");
}
