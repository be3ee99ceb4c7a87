//! Images that are mounted before they are here.

mod common;
#[path = "../../image/tests/common/unmount.rs"]
mod unmount;

use common::fleet::{Fleet, build, version, web};
use common::{Answer, Host, PROGRAM, Server, answer, failed, noise, wait_until};
use pagefold_image::digest::Digest;
use pagefold_image::fleet::PIECE;
use pagefold_image::profile::Profile;
use pagefold_image::stat;
use pagefold_image::{gc, mount};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use unmount::umount;

/// A mount, and the program that serves it. Both end with the test.
struct Mount {
    at: PathBuf,
    log: PathBuf,
    child: Child,
    told: Value,
}

impl Mount {
    fn new(host: &Host, address: &str, options: &[&str]) -> Self {
        let at = host.dir.path().join("mnt");
        fs::create_dir_all(&at).unwrap();
        let log = host.dir.path().join("log");
        let mut command = host.command("mount", "it", address);
        command.arg("--mountpoint").arg(&at).args(options);
        command.stdout(Stdio::piped()).stderr(File::create(&log).unwrap());
        let mut child = command.spawn().unwrap();
        let mut told = String::new();
        child.stdout.take().unwrap().read_to_string(&mut told).unwrap();
        let said = || fs::read_to_string(&log).unwrap();
        let told = serde_json::from_str(&told).unwrap_or_else(|error| panic!("{error}: {told}{}", said()));
        Self { at, log, child, told }
    }

    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        fs::read(self.at.join(path))
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = mount::umount(&self.at, true);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether mounts can be made here; says why not.
fn can_mount() -> bool {
    let lack = if !rustix::process::geteuid().is_root() {
        Some("mounting needs root")
    } else if !Path::new("/dev/fuse").exists() {
        Some("there is no /dev/fuse")
    } else {
        None
    };
    lack.inspect(|lack| println!("SKIPPED: {lack}")).is_none()
}

/// A fleet's store with version 1 as `app:1`, and the digest of that.
fn pushed() -> (Fleet, String) {
    let (fleet, here) = (Fleet::new(), Host::new());
    let digest = build(&here, "one", &version(1));
    common::ok(&here.command("push", "one", &fleet.address("app:1")).output().unwrap());
    (fleet, digest)
}

/// A web server that shows the fleet's store as long as it `works`.
fn served(fleet: &Fleet) -> (Server, Arc<AtomicBool>) {
    let (root, works) = (fleet.0.path().to_path_buf(), Arc::new(AtomicBool::new(true)));
    let is_up = works.clone();
    let rule = move |request: &common::Request, _| -> Answer {
        if is_up.load(Ordering::Relaxed) { web(request, &root) } else { answer(503, b"busy") }
    };
    (Server::start(rule), works)
}

fn packs_asked_for(server: &Server) -> usize {
    server.asked_for(".pack").len()
}

#[test]
fn files_come_as_they_are_opened_and_the_last_one_makes_the_image() {
    if !can_mount() {
        return;
    }
    let ((fleet, digest), there) = (pushed(), Host::new());
    let (server, _) = served(&fleet);
    let mut mount = Mount::new(&there, &format!("http://{}/static/app:1", server.host), &["--only-opened"]);
    assert_eq!((&mount.told["digest"], &mount.told["name"]), (&json!(digest), &json!("it")));
    assert_eq!((&mount.told["objects"], &mount.told["objects_missing"]), (&json!(203), &json!(203)));
    // Names, sizes and small files are in the metadata.
    assert_eq!(fs::metadata(mount.at.join("lib/large")).unwrap().len(), 2 * PIECE + 1000);
    assert_eq!(mount.read("etc/small").unwrap(), b"inline");
    assert_eq!(packs_asked_for(&server), 0);
    assert!(mount.read("app").unwrap() == noise(11, 100_000));
    assert_eq!(packs_asked_for(&server), 1);
    assert!(there.store().images().unwrap().is_empty(), "it is no image yet");
    // A collection takes nothing that is here, or on its way.
    gc::collect(&there.store(), false).unwrap();
    // What is here is not asked for again, by any process.
    let again = Command::new("cmp").args([mount.at.join("app"), mount.at.join("app")]).status().unwrap();
    assert!(again.success() && packs_asked_for(&server) == 1);
    for (path, bytes) in version(1) {
        assert!(mount.read(path).unwrap() == bytes, "{path}");
    }
    // Neighbours come along: 203 objects took far fewer requests. The large one took one for each piece.
    assert!(packs_asked_for(&server) < 40, "{}", packs_asked_for(&server));
    wait_until("the image is stored", || !there.store().images().unwrap().is_empty());
    let found = stat::verify(&there.store(), &[], true).unwrap();
    assert!(found.damaged.is_empty() && found.objects == 203, "{found:?}");
    // The mount shows the objects' own memory.
    assert!(found.frames_compared > 2000 && found.frames_equal == found.frames_compared, "{found:?}");
    // An image that is forgotten stays as long as it is mounted.
    there.store().remove("it").unwrap();
    gc::collect(&there.store(), false).unwrap();
    for (path, bytes) in version(1) {
        assert!(mount.read(path).unwrap() == bytes, "{path}");
    }
    umount(&mount.at);
    assert!(mount.child.wait().unwrap().success(), "{}", mount.said());
    assert!(gc::collect(&there.store(), false).unwrap().objects_removed == 203);
    for dir in ["staging", "leases"] {
        let left = fs::read_dir(there.store_path().join("domains/default").join(dir)).unwrap().count();
        assert_eq!(left, 0, "{dir}");
    }
    assert_eq!(mount.said().lines().count(), 2, "{}", mount.said());
}

#[test]
fn the_rest_comes_when_no_program_waits() {
    if !can_mount() {
        return;
    }
    let ((fleet, _), there) = (pushed(), Host::new());
    let mount = Mount::new(&there, &fleet.address("app:1"), &[]);
    wait_until("the image is stored", || !there.store().images().unwrap().is_empty());
    for (path, bytes) in version(1) {
        assert!(mount.read(path).unwrap() == bytes, "{path}");
    }
    // A second mount of what is here needs no process.
    let mut second = Mount::new(&there, &fleet.address("app:1"), &[]);
    assert_eq!(second.told["objects_missing"], 0);
    assert!(second.child.wait().unwrap().success());
    assert!(second.read("app").unwrap() == noise(11, 100_000));
    umount(&second.at);
}

#[test]
fn what_a_start_reads_comes_before_it_is_opened() {
    if !can_mount() {
        return;
    }
    let (fleet, here, there, other) = (Fleet::new(), Host::new(), Host::new(), Host::new());
    build(&here, "one", &version(1));
    let store = here.store();
    let entry = |path: &str, bytes: &[u8]| {
        let parts = [(0, bytes.len())];
        json!({ "path": format!("/{path}"), "object": Digest::of(bytes).hex(), "parts": parts })
    };
    let files = version(1);
    let started: Vec<Value> = files.iter().skip(3).take(50).map(|(path, bytes)| entry(path, bytes)).collect();
    let profile = Profile::from_outside(&json!({ "format": 1, "files": started })).unwrap();
    profile.save(&store, &store.image("one").unwrap().digest).unwrap();
    common::ok(&here.command("push", "one", &fleet.address("app:1")).output().unwrap());
    let mount = Mount::new(&there, &fleet.address("app:1"), &["--only-opened"]);
    let staged = || -> u64 {
        let staging = fs::read_dir(there.store_path().join("domains/default/staging")).unwrap().flatten();
        let files = staging.flat_map(|dir| fs::read_dir(dir.path()).into_iter().flatten().flatten());
        files.filter_map(|file| file.metadata().ok()).filter(|meta| meta.is_file()).map(|meta| meta.len()).sum()
    };
    let expected: u64 = files.iter().skip(3).take(50).map(|(_, bytes)| bytes.len() as u64).sum();
    wait_until("what a start reads is here", || staged() == expected);
    assert!(mount.read("app").unwrap() == noise(11, 100_000));
    drop(mount);
    // A pull keeps the profile too.
    common::ok(&other.command("pull", "it", &fleet.address("app:1")).output().unwrap());
    let digest = other.store().image("it").unwrap().digest;
    assert_eq!(Profile::load(&other.store(), &digest), Some(profile));
}

#[test]
fn a_server_that_is_away_is_an_error_of_the_open_and_of_nothing_else() {
    if !can_mount() {
        return;
    }
    let ((fleet, _), there) = (pushed(), Host::new());
    let (server, works) = served(&fleet);
    let mount = Mount::new(&there, &format!("http://{}/static/app:1", server.host), &["--only-opened"]);
    let large = File::open(mount.at.join("lib/large")).unwrap();
    works.store(false, Ordering::Relaxed);
    assert_eq!(mount.read("app").unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(mount.said().contains("503"), "{}", mount.said());
    let mut bytes = vec![0; 2 * PIECE as usize + 1000];
    large.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == noise(1, bytes.len()));
    works.store(true, Ordering::Relaxed);
    assert!(mount.read("app").unwrap() == noise(11, 100_000));
}

#[test]
fn damaged_bytes_are_never_shown() {
    if !can_mount() {
        return;
    }
    let ((fleet, _), there) = (pushed(), Host::new());
    let (large, app) = (noise(1, 2 * PIECE as usize + 1000), noise(11, 100_000));
    fleet.damage(&large);
    fleet.damage(&app);
    let mount = Mount::new(&there, &fleet.address("app:1"), &[]);
    for (path, bytes) in version(1) {
        match mount.read(path) {
            Ok(read) => assert!(read == bytes && bytes != large && bytes != app, "{path}"),
            Err(error) => assert!(["lib/large", "app"].contains(&path), "{path}: {error}"),
        }
    }
    for object in [large, app] {
        assert!(mount.said().contains(&Digest::of(&object).to_string()), "{}", mount.said());
    }
    assert!(there.store().images().unwrap().is_empty(), "an image that is not whole is none");
}

#[test]
fn a_killed_server_loses_no_byte_and_a_second_goes_on() {
    if !can_mount() {
        return;
    }
    let ((fleet, _), there) = (pushed(), Host::new());
    for signal in [rustix::process::Signal::KILL, rustix::process::Signal::TERM] {
        let mut mount = Mount::new(&there, &fleet.address("app:1"), &["--only-opened"]);
        assert_eq!(mount.told["objects_missing"], 203, "a kill before the first names were given leaves nothing");
        let large = File::open(mount.at.join("lib/large")).unwrap();
        mount.signal(signal);
        mount.child.wait().unwrap();
        let mut bytes = vec![0; 2 * PIECE as usize + 1000];
        large.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == noise(1, bytes.len()), "an open file is read without the server");
        assert!(mount.read("app").is_err(), "what is not here cannot be opened");
        assert_eq!(mount.read("etc/small").unwrap(), b"inline");
    }
    let mount = Mount::new(&there, &fleet.address("app:1"), &["--only-opened"]);
    assert_eq!(mount.told["objects_missing"], 202, "what had come when it was asked to end is here");
    for (path, bytes) in version(1) {
        assert!(mount.read(path).unwrap() == bytes, "{path}");
    }
}

#[test]
fn changes_stay_in_the_upper_directory() {
    if !can_mount() {
        return;
    }
    let ((fleet, _), there) = (pushed(), Host::new());
    // Overlayfs keeps changes on a file system with extended attributes.
    let upper = tempfile::tempdir_in("/var/tmp").unwrap();
    let option = format!("--upper={}", upper.path().display());
    let mount = Mount::new(&there, &fleet.address("app:1"), &[&option]);
    let appended = [noise(11, 100_000), b"more".to_vec()].concat();
    let mut file = File::options().append(true).open(mount.at.join("app")).unwrap();
    io::Write::write_all(&mut file, b"more").unwrap();
    drop(file);
    assert!(mount.read("app").unwrap() == appended);
    wait_until("the image is stored", || !there.store().images().unwrap().is_empty());
    drop(mount);
    // The same changes over the image, mounted as any other.
    let store = there.store();
    let options = pagefold_image::mount::Options { upper: Some(upper.path().into()), ..Default::default() };
    let at = there.dir.path().join("mnt");
    pagefold_image::mount::mount(&store, &store.image("it").unwrap(), &at, &options).unwrap();
    assert!(fs::read(at.join("app")).unwrap() == appended);
    assert!(fs::read(at.join("lib/large")).unwrap() == noise(1, 2 * PIECE as usize + 1000));
    umount(&at);
}

/// The kernel passes no file on that is itself one of several layers: then the program reads it.
#[test]
fn a_store_on_an_overlay_is_served_too() {
    if !can_mount() {
        return;
    }
    struct Overlay(PathBuf);
    impl Drop for Overlay {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
    let (fleet, _) = pushed();
    let base = tempfile::tempdir_in("/var/tmp").unwrap();
    let [lower, upper, work, shown] = ["lower", "upper", "work", "shown"].map(|name| base.path().join(name));
    for dir in [&lower, &upper, &work, &shown] {
        fs::create_dir(dir).unwrap();
    }
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("overlay", &shown, "overlay", rustix::mount::MountFlags::empty(), Some(&*options)).unwrap();
    let _overlay = Overlay(shown.clone());
    let there = Host::in_dir(tempfile::tempdir_in(&shown).unwrap());
    let mount = Mount::new(&there, &fleet.address("app:1"), &["--only-opened"]);
    for _ in 0..2 {
        for (path, bytes) in version(1) {
            assert!(mount.read(path).unwrap() == bytes, "{path}");
        }
    }
    wait_until("the image is stored", || !there.store().images().unwrap().is_empty());
    assert!(stat::verify(&there.store(), &[], false).unwrap().damaged.is_empty());
}

#[test]
fn what_cannot_be_mounted_is_refused_in_one_line() {
    if !can_mount() {
        return;
    }
    let ((fleet, _), there) = (pushed(), Host::new());
    let at = there.dir.path().join("mnt");
    fs::create_dir(&at).unwrap();
    let none = there.dir.path().join("none");
    let cases: [(&str, &Path, &str); 3] = [
        ("registry.example/app:1", &at, "only images of a fleet's store"),
        (&fleet.address("app:2"), &at, "no such image"),
        (&fleet.address("app:1"), &none, "make it first"),
    ];
    for (address, at, why) in cases {
        let output = there.command("mount", "it", address).arg("--mountpoint").arg(at).output().unwrap();
        let error = failed(&output);
        assert!(error.contains(why) && error.lines().count() == 1, "{error}");
    }
    assert!(fs::read_dir(&at).unwrap().next().is_none(), "{PROGRAM} left nothing there");
}
