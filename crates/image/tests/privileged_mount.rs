//! Mounts: every kind shows the very tree, equal files are one piece of memory, and nothing mounted is ever collected.
//! Needs root, EROFS and overlayfs; skips loudly without.

use pagefold_image::digest::Digest;
use pagefold_image::ingest::Notes;
use pagefold_image::mount::{self, Kind, Options};
use pagefold_image::mounts;
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use pagefold_image::store::{Record, RunConfig, Store};
use pagefold_image::tree::{Data, Inode, Kind as FileKind, Meta, Tree};
use pagefold_image::{Error, Result, build, exec, export, gc, scan, stat};
use pagefold_os::mountinfo;
use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use rustix::mount::{MountFlags, MountPropagationFlags};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Why privileged tests cannot run here, if so.
fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root");
    }
    let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    (!filesystems.contains("erofs") || !filesystems.contains("overlay")).then_some("needs EROFS and overlayfs")
}

macro_rules! need_root {
    () => {
        if let Some(why) = missing() {
            println!("SKIPPED: {why}");
            return;
        }
    };
}

/// Unmounts what nobody uses. What a test beside this one starts has a copy of each descriptor of ours until it is another
/// program.
fn umount(at: &Path) {
    let began = Instant::now();
    loop {
        match mount::umount(at, false) {
            Err(Error::Refused(why)) if why.contains("in use") && began.elapsed() < Duration::from_secs(60) => {}
            other => return other.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A directory whose mounts end with it.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn dir(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
        let mounted: Vec<_> = mountinfo::parse(&table).filter(|mount| mount.at.starts_with(self.0.path())).collect();
        for mount in mounted.iter().rev() {
            let _ = rustix::mount::unmount(&mount.at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

fn build_dir(store: &Store, name: &str, dir: &Path) -> Result<Record> {
    let (build, mut notes) = (store.build()?, Notes::default());
    let tree = build::from_directory(&build, dir, Default::default(), &mut notes, &Progress::silent())?;
    build.publish(name, &tree, "test", Default::default(), notes.lines())
}

fn noise(seed: u32, size: usize) -> Vec<u8> {
    (0..size as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 23) as u8).collect()
}

/// One of everything, with what only root can make.
fn sample(dir: &Path) {
    fs::create_dir_all(dir.join("usr/bin")).unwrap();
    fs::write(dir.join("usr/bin/tool"), noise(1, 300_000)).unwrap();
    fs::set_permissions(dir.join("usr/bin/tool"), fs::Permissions::from_mode(0o6755)).unwrap();
    fs::hard_link(dir.join("usr/bin/tool"), dir.join("usr/bin/same")).unwrap();
    fs::write(dir.join("inline"), b"a few bytes").unwrap();
    fs::write(dir.join("empty"), b"").unwrap();
    fs::write(dir.join("odd"), noise(2, 65)).unwrap();
    symlink("usr/bin", dir.join("bin")).unwrap();
    symlink(format!("/{}", "far/".repeat(1000)), dir.join("far")).unwrap();
    let node = |name: &str, kind, major, minor| {
        let device = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(CWD, dir.join(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
    };
    node("null", FileType::CharacterDevice, 1, 3);
    node("disk", FileType::BlockDevice, 253, 70_000);
    node("pipe", FileType::Fifo, 0, 0);
    node("socket", FileType::Socket, 0, 0);
    for i in 0..700 {
        fs::write(dir.join(format!("usr/{i:04} {}", "n".repeat(i % 200))), format!("{i}")).unwrap();
    }
    std::os::unix::fs::chown(dir.join("inline"), Some(1234), Some(70_000)).unwrap();
    rustix::fs::setxattr(dir.join("odd"), "user.note", b"\0\xff", XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(dir.join("usr"), "trusted.secret", b"t", XattrFlags::empty()).unwrap();
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    rustix::fs::setxattr(dir.join("odd"), "security.capability", &capability, XattrFlags::empty()).unwrap();
    let acl =
        [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255];
    let _ = rustix::fs::setxattr(dir.join("inline"), "system.posix_acl_access", &acl, XattrFlags::empty());
}

#[test]
fn every_kind_of_mount_shows_the_very_tree() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    sample(&tree);
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "all", &tree).unwrap();
    assert!(record.notes.is_empty(), "{:?}", record.notes);
    for kind in [Kind::Auto, Kind::Erofs, Kind::Loop, Kind::Directory] {
        let options = Options { kind, ..Options::default() };
        match mount::mount(&store, &record, &at, &options) {
            Err(error) if kind == Kind::Loop => {
                println!("SKIPPED: loop: {error}");
                continue;
            }
            other => other.unwrap(),
        };
        // A tree read from the mount is the image again: names, modes, owners, times, attributes, links, bytes.
        let again = Store::open(&scratch.dir("again"), "default").unwrap();
        assert_eq!(build_dir(&again, "x", &at).unwrap().digest, record.digest, "{kind:?}");
        let links = |path: &str| fs::metadata(at.join(path)).map(|meta| (meta.ino(), meta.nlink())).unwrap();
        assert_eq!(links("usr/bin/tool"), links("bin/same"));
        let error = fs::write(at.join("new"), "x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        umount(&at);
        assert!(mount::umount(&at, false).unwrap_err().to_string().contains("nothing is mounted"));
    }
}

#[test]
fn equal_files_of_different_images_are_one_piece_of_memory() {
    need_root!();
    let scratch = Scratch::new();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let shared = noise(3, 5_000_000);
    let mut mounts = Vec::new();
    for (image, path, mode) in [("one", "a/first name", 0o644), ("two", "b/other", 0o400)] {
        let tree = scratch.dir(&format!("tree-{image}"));
        fs::create_dir_all(tree.join(path).parent().unwrap()).unwrap();
        fs::write(tree.join(path), &shared).unwrap();
        fs::set_permissions(tree.join(path), fs::Permissions::from_mode(mode)).unwrap();
        fs::write(tree.join("own"), noise(mode, 1_000_000)).unwrap();
        let record = build_dir(&store, image, &tree).unwrap();
        let at = scratch.dir(&format!("mnt-{image}"));
        mount::mount(&store, &record, &at, &Options::default()).unwrap();
        mounts.push(at.join(path));
    }
    let object = store.object_path(&Digest::of(&shared));
    let drop_cache = |path: &Path| {
        let file = fs::File::open(path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    };
    drop_cache(&object);
    let saved = |store: &Store| stat::stat(store, &[]).unwrap().0.memory_saved_bytes;
    assert_eq!(stat::stat(&store, &[]).unwrap().1[0].mounts, 1);
    assert_eq!(saved(&store), 0, "nothing of the shared file is in memory yet");
    assert_eq!(fs::read(&mounts[0]).unwrap(), shared);
    // Reading one name brought in the other: it is the same memory.
    let pages = 5_000_000u64.div_ceil(4096) * 4096;
    assert_eq!(saved(&store), pages);
    assert_eq!(fs::read(&mounts[1]).unwrap(), shared);
    assert_eq!(saved(&store), pages, "the second reading cost nothing");
    let found = stat::verify(&store, &[], true).unwrap();
    assert!(found.frames_compared >= 2 * pages / 4096);
    assert_eq!(found.frames_equal, found.frames_compared);
    assert!(found.damaged.is_empty());

    // The negative control: two plain copies of one file show different frames, so the comparison can fail.
    let (a, b) = (scratch.dir("plain").join("a"), scratch.dir("plain").join("b"));
    fs::write(&a, &shared).unwrap();
    fs::write(&b, &shared).unwrap();
    assert_eq!(same_frames(&a, &b), 0);
    assert_eq!(same_frames(&mounts[0], &mounts[1]), pages / 4096);

    // What is not mounted has a part in what another shows.
    umount(&scratch.dir("mnt-two"));
    let shared: Vec<u64> = stat::stat(&store, &[]).unwrap().1.iter().map(|image| image.resident_shared_bytes).collect();
    assert_eq!(shared, [0, pages]);
}

/// How many pages of two files of one size lie in the same frames, by this test's own reading of pagemap. The kernel
/// moves pages when it makes room, so what differs is looked at again.
fn same_frames(a: &Path, b: &Path) -> u64 {
    let script = r"
import mmap, sys, struct, ctypes
def mapped(path):
    file = open(path, 'rb')
    m = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return m, ctypes.addressof(ctypes.c_char.from_buffer(m))
def frames(m, address):
    n = (len(m) + 4095) // 4096
    sum(m[i * 4096] for i in range(n))
    pagemap = open('/proc/self/pagemap', 'rb')
    pagemap.seek(address // 4096 * 8)
    return [x & ((1 << 55) - 1) for x in struct.unpack('<%dQ' % n, pagemap.read(8 * n))]
a, b = mapped(sys.argv[1]), mapped(sys.argv[2])
same = set()
for attempt in range(8):
    same |= {i for i, (x, y) in enumerate(zip(frames(*a), frames(*b))) if x == y != 0}
print(len(same))";
    let out = Command::new("python3").args(["-c", script]).args([a, b]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim().parse().unwrap()
}

#[test]
fn a_writable_mount_keeps_its_changes_and_the_objects_theirs() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at, upper) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("upper"));
    fs::write(tree.join("file"), noise(4, 200_000)).unwrap();
    fs::write(tree.join("kept"), noise(5, 200_000)).unwrap();
    std::os::unix::fs::chown(&tree, Some(1000), Some(70_000)).unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o750)).unwrap();
    rustix::fs::setxattr(&tree, "user.note", b"kept", XattrFlags::empty()).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "rw", &tree).unwrap();
    for kind in [Kind::Erofs, Kind::Directory] {
        let options = Options { kind, upper: Some(upper.clone()), ..Options::default() };
        mount::mount(&store, &record, &at, &options).unwrap();
        let root = fs::metadata(&at).unwrap();
        assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o750, 1000, 70_000));
        fs::write(at.join("file"), format!("changed under {kind:?}")).unwrap();
        fs::set_permissions(at.join("kept"), fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(fs::read(at.join("kept")).unwrap(), noise(5, 200_000));
        assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
        umount(&at);
        mount::mount(&store, &record, &at, &options).unwrap();
        assert_eq!(fs::read_to_string(at.join("file")).unwrap(), format!("changed under {kind:?}"));
        // The root's own attributes are changes like others.
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
fn changes_are_shown_over_their_own_image_only() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at, upper) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("upper"));
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let build = |size: usize| {
        fs::write(tree.join("file"), noise(size as u32, size)).unwrap();
        build_dir(&store, "app", &tree).unwrap()
    };
    let first = build(100_000);
    rustix::fs::setxattr(&tree, "trusted.second", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    let second = build(200_000);
    let named = |path: &Path| rustix::fs::getxattr(path, "trusted.second", &mut [0; 8][..]).ok();
    for kind in [Kind::Erofs, Kind::Directory] {
        let options = Options { kind, upper: Some(upper.clone()), ..Options::default() };
        // Nothing was changed yet: the directory is whose changes come, and one mount's at a time.
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
        // The first has lost its name.
        let of = format!("of image {}, not of app; ", first.digest);
        assert!(error.contains(&of) && error.contains("another directory"), "{error}");
        mount::mount(&store, &first, &at, &options).unwrap();
        assert_eq!(fs::read(at.join("file")).unwrap(), noise(100_000, 100_000));
        assert_eq!(fs::metadata(at.join("file")).unwrap().mode() & 0o7777, 0o600);
        // Nor does the name matter by which the directory is known.
        symlink(&upper, scratch.0.path().join("link")).unwrap();
        let linked = Options { upper: Some(scratch.0.path().join("link")), ..options.clone() };
        let error = mount::mount(&store, &first, &scratch.dir("other"), &linked).unwrap_err().to_string();
        assert!(error.contains("in use by another mount"), "{error}");
        fs::remove_file(scratch.0.path().join("link")).unwrap();
        umount(&at);
        fs::remove_dir_all(upper.join("upper")).unwrap();
    }
}

/// In a child process: mounts twice over one directory of changes, and says what came of it.
#[test]
fn child_that_mounts_twice() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_TWICE") else { return };
    let [store, at, upper] = arguments.split('\n').map(Path::new).collect::<Vec<_>>()[..] else { panic!("three") };
    let store = Store::open(store, "default").unwrap();
    let (record, options) = (store.image("user").unwrap(), Options { upper: Some(upper.into()), ..Options::default() });
    mount::mount(&store, &record, at, &options).unwrap();
    println!("SECOND {:?}", mount::mount(&store, &record, at, &options).map_err(|error| error.to_string()));
    umount(at);
    let attributes = || {
        let mut names = vec![0; 4096];
        let count = rustix::fs::listxattr(upper.join("upper"), &mut names[..]).unwrap();
        (names[..count].to_vec(), fs::read_dir(upper.join("upper")).unwrap().count())
    };
    let before = attributes();
    println!("THIRD {:?}", mount::mount(&store, &record, at, &options).map_err(|error| error.to_string()));
    println!("SAME {}", attributes() == before);
}

#[test]
fn a_plain_users_changes_are_one_mounts_at_a_time() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (nobody, upper) = (Nobody::new(&scratch), scratch.dir("nobodys-upper"));
    std::os::unix::fs::chown(&upper, Some(65534), Some(65534)).unwrap();
    let arguments = [&nobody.store, &nobody.at, &upper].map(|path| path.display().to_string()).join("\n");
    let mut command = nobody.runs("child_that_mounts_twice", &["-Urm"]);
    let text = said(&command.env("PAGEFOLD_TEST_TWICE", arguments).output().unwrap());
    if text.contains("unshare failed") || text.contains("userxattr") {
        println!("SKIPPED: rootless overlayfs is not allowed here: {text}");
        return;
    }
    assert!(text.contains("SECOND Err(") && text.contains("in use by another mount"), "{text}");
    assert!(text.contains("THIRD Ok(") && text.contains("SAME true"), "{text}");
}

/// Several mounts, some written to and some hidden, and each of them as it should be.
#[test]
fn frames_are_compared_where_the_image_shows_its_own() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at, upper) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("upper"));
    for (number, name) in ["kept", "shorter", "rewritten", "gone", "dir", "pipe", "link"].iter().enumerate() {
        fs::write(tree.join(name), noise(number as u32, 40_000)).unwrap();
    }
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let first = build_dir(&store, "first", &tree).unwrap();
    let options = Options { upper: Some(upper), ..Options::default() };
    mount::mount(&store, &first, &at, &options).unwrap();
    fs::write(at.join("shorter"), "x").unwrap();
    fs::write(at.join("rewritten"), noise(99, 40_000)).unwrap();
    for name in ["gone", "dir", "pipe", "link"] {
        fs::remove_file(at.join(name)).unwrap();
    }
    fs::create_dir(at.join("dir")).unwrap();
    rustix::fs::mknodat(CWD, at.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    symlink("kept", at.join("link")).unwrap();
    let compare = || {
        let found = stat::verify(&store, &[], true).unwrap();
        assert!(found.damaged.is_empty());
        (found.frames_compared, found.frames_equal)
    };
    assert_eq!(compare(), (10, 10), "the file that was left alone");
    // Another image on top of it, of which one file is covered in turn.
    fs::write(tree.join("kept"), noise(50, 80_000)).unwrap();
    let second = build_dir(&store, "second", &tree).unwrap();
    mount::mount(&store, &second, &at, &Options::default()).unwrap();
    rustix::mount::mount_bind(tree.join("link"), at.join("link")).unwrap();
    assert_eq!(compare(), (20 + 5 * 10, 20 + 5 * 10));
}

/// Held by tests that look at what is collected, and by those that make mount namespaces: what is mounted has a copy in a
/// new one, and while some process shows only a part of its namespace, metadata directories stay.
static NAMESPACES: Mutex<()> = Mutex::new(());

#[test]
fn what_hides_in_a_mount_table_is_not_collected_and_what_lies_there_hinders_nobody() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (tree, at, jail) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("jail"));
    fs::write(tree.join("file"), noise(10, 200_000)).unwrap();
    runnable(&jail);
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();

    // A name that is no text, and names that lie.
    let odd = scratch.0.path().join(OsStr::from_bytes(b"caf\xe9"));
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

    // A mount by a metadata directory that is left only in a namespace whose one process has a part of it as its root.
    mount::mount(&store, &record, &at, &Options { kind: Kind::Directory, ..Options::default() }).unwrap();
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
    // Unless somebody else lives so, nothing is kept for ever.
    if !mounts::view(&store).unwrap().partial {
        let stats = gc::collect(&store, false).unwrap();
        assert_eq!((stats.objects_removed, stats.trees_removed), (1, 1));
    }
}

/// Two read-only file systems may be alike in device and inode numbers, sizes and all times, and not in content.
#[test]
fn what_is_built_from_a_mount_is_what_it_shows() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    for round in 0..3u32 {
        fs::write(tree.join("file"), noise(round, 100_000)).unwrap();
        let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000);
        for path in [tree.join("file"), tree.clone()] {
            fs::File::open(path).unwrap().set_modified(old).unwrap();
        }
        let record = build_dir(&store, "x", &tree).unwrap();
        mount::mount(&store, &record, &at, &Options::default()).unwrap();
        let again = build_dir(&store, "y", &at).unwrap();
        let once_more = build_dir(&store, "z", &at).unwrap();
        umount(&at);
        assert_eq!((again.digest, once_more.digest), (record.digest, record.digest), "round {round}");
    }
}

#[test]
fn where_something_is_mounted_there_is_a_directory_and_of_the_kernels_own_files_nothing_else() {
    need_root!();
    let scratch = Scratch::new();
    let tree = scratch.dir("tree");
    for name in ["proc", "sub/tmp", "file"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let mount = |what: &[&str], at: &str| {
        let status = Command::new("mount").args(what).arg(tree.join(at)).status().unwrap();
        assert!(status.success(), "{at}");
    };
    mount(&["--bind", "/proc"], "proc");
    mount(&["-t", "tmpfs", "-o", "mode=1757", "none"], "sub/tmp");
    fs::write(tree.join("sub/tmp/x"), "x").unwrap();
    let build = |one_file_system| {
        let (build, mut notes) = (store.build().unwrap(), Notes::default());
        let options = build::Options { one_file_system, ..Default::default() };
        let built = build::from_directory(&build, &tree, options, &mut notes, &Progress::silent());
        built.map(|tree| (tree, notes.lines()))
    };
    for one_file_system in [false, true] {
        let (mut tree, notes) = build(one_file_system).unwrap();
        let (proc, tmp) = (tree.find(b"proc").unwrap(), tree.find(b"sub/tmp").unwrap());
        let names = [proc, tmp].map(|dir| tree.children(dir).count());
        assert_eq!(names, [0, usize::from(!one_file_system)]);
        assert_eq!(tree.inode(tmp).meta.mode, 0o1757);
        let said = if one_file_system {
            "directories on other file systems are empty in the image (2;"
        } else {
            "directories of the kernel's own"
        };
        assert!(notes.len() == 1 && notes[0].starts_with(said), "{notes:?}");
    }
    // A user's own, of which root may not even know what it is.
    let Ok(fuse) = fs::File::options().read(true).write(true).open("/dev/fuse") else {
        println!("SKIPPED the rest: no /dev/fuse");
        return;
    };
    let users = std::ffi::CString::new(format!("fd={},rootmode=40000,user_id=65534,group_id=65534", fuse.as_raw_fd()));
    rustix::mount::mount("fuse", tree.join("file"), "fuse", MountFlags::empty(), &*users.unwrap()).unwrap();
    assert!(build(false).unwrap_err().to_string().contains("file: Permission denied"));
    let (mut found, notes) = build(true).unwrap();
    assert!(notes.len() == 1 && notes[0].contains("are empty in the image (3;"), "{notes:?}");
    let id = found.find(b"file").unwrap();
    assert!(found.inode(id).kind == FileKind::Dir(Default::default()));
}

#[test]
fn nothing_mounted_is_collected_wherever_it_is_mounted() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    fs::write(tree.join("file"), noise(6, 200_000)).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let rebuilt = || build_dir(&store, "x", &tree).unwrap();
    let whole = |at: &Path| assert_eq!(fs::read(at.join("file")).unwrap(), noise(6, 200_000));
    let collect_keeps = |what: &str| {
        store.remove("x").unwrap();
        let stats = gc::collect(&store, false).unwrap();
        assert_eq!((stats.objects_removed, stats.trees_removed), (0, 0), "{what}");
    };
    for kind in [Kind::Erofs, Kind::Directory] {
        mount::mount(&store, &rebuilt(), &at, &Options { kind, ..Options::default() }).unwrap();
        collect_keeps("mounted here");
        whole(&at);
        umount(&at);
    }
    // Mounted only in another mount namespace.
    mount::mount(&store, &rebuilt(), &at, &Options::default()).unwrap();
    let mut other = Command::new("unshare")
        .args(["-m", "sh", "-c", "echo ready; read line; cat \"$0/file\" | wc -c"])
        .arg(&at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    other.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    umount(&at);
    collect_keeps("mounted in another namespace");
    drop(other.stdin.take());
    let mut count = String::new();
    other.stdout.as_mut().unwrap().read_to_string(&mut count).unwrap();
    assert!(other.wait().unwrap().success());
    assert_eq!(count.trim(), "200000");
    // Mounted only in a namespace that one thread of a process has for itself, and no kernel tells of it.
    let mounted = Options { kind: Kind::Directory, ..Options::default() };
    mount::mount(&store, &rebuilt(), &at, &mounted).unwrap();
    let (left, has_left) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let at = &at;
        scope.spawn(move || {
            use rustix::thread::UnshareFlags;
            // SAFETY: no table of descriptors is left.
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
    // The same content built again must not make the collector forget who holds it.
    rebuilt();
    collect_keeps("held by an open file while it was built again");
    let mut bytes = Vec::new();
    held.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, noise(6, 200_000));
    drop(held);
    // Nothing holds a metadata directory open, so that such a mount stays in the table as long as it is used.
    mount::mount(&store, &rebuilt(), &at, &Options { kind: Kind::Directory, ..Options::default() }).unwrap();
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
    // And when nobody holds it any more, it goes.
    let stats = gc::collect(&store, false).unwrap();
    assert_eq!((stats.objects_removed, stats.trees_removed), (1, 1));
}

/// The files below a directory, with their inode numbers.
fn inodes(dir: &Path) -> Vec<(PathBuf, u64)> {
    let (mut all, mut todo) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let meta = entry.metadata().unwrap();
            if meta.is_dir() { todo.push(entry.path()) } else { all.push((entry.path(), meta.ino())) }
        }
    }
    all.sort();
    all
}

/// A tree of some hundred files, its store, and the shelf of its image once that was mounted.
fn shelved(scratch: &Scratch) -> (PathBuf, Store, Record, PathBuf) {
    let tree = scratch.dir("tree");
    for number in 0..600u32 {
        let dir = tree.join(format!("{}", number % 7));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(format!("{number}")), noise(number, 500)).unwrap();
    }
    fs::write(tree.join("twin"), noise(0, 500)).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let (at, shelf) = (scratch.dir("mnt"), store.tree_path(&record.digest).with_extension("shelf"));
    assert!(!shelf.exists());
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    (tree, store, record, shelf)
}

/// Whether a new mount of the image shows the very tree.
fn shows(scratch: &Scratch, store: &Store, record: &Record, kind: Kind) -> bool {
    let at = scratch.dir("mnt-shows");
    mount::mount(store, record, &at, &Options { kind, ..Options::default() }).unwrap();
    let (build, mut notes) = (store.build().unwrap(), Notes::default());
    let options = build::Options { rehash: true, ..Default::default() };
    let read = build::from_directory(&build, &at, options, &mut notes, &Progress::silent());
    let same = read.is_ok_and(|tree| {
        build.publish("shown", &tree, "test", Default::default(), vec![]).unwrap().digest == record.digest
    });
    umount(&at);
    same
}

#[test]
fn a_shelf_has_the_objects_themselves_and_goes_with_its_image() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (_, store, record, shelf) = shelved(&scratch);
    let mut objects: Vec<u64> = inodes(&store.objects_dir()).into_iter().map(|file| file.1).collect();
    let shelf_inodes = || inodes(&shelf.join("objects"));
    let mut links: Vec<u64> = shelf_inodes().into_iter().map(|file| file.1).collect();
    objects.sort_unstable();
    links.sort_unstable();
    assert_eq!((links.len(), links), (600, objects), "each once, whatever number of files it has");
    let boards: Vec<_> = fs::read_dir(shelf.join("objects")).unwrap().map(|dir| dir.unwrap().path()).collect();
    assert!(boards.len() == 3 && boards.iter().all(|dir| fs::read_dir(dir).unwrap().count() <= 256));
    // Others mount the same.
    let before = (shelf_inodes(), fs::metadata(shelf.join("meta.erofs")).unwrap().ino());
    for kind in [Kind::Auto, Kind::Directory] {
        assert!(shows(&scratch, &store, &record, kind));
    }
    assert_eq!((shelf_inodes(), fs::metadata(shelf.join("meta.erofs")).unwrap().ino()), before);
    let beside = stat::beside(&store).unwrap();
    let blocks = |path: &Path| fs::metadata(path).unwrap().blocks() * 512;
    let own: u64 = boards.iter().map(|dir| blocks(dir)).sum();
    let rest = [shelf.clone(), shelf.join("meta.erofs"), shelf.join("objects")];
    assert_eq!(beside.shelf_bytes, own + rest.iter().map(|path| blocks(path)).sum::<u64>());
    // What is in the store now, no version before can collect.
    let format = fs::read_to_string(store.root().join("pagefold-image-store")).unwrap();
    assert!(format.contains("\"format\":2") && format.contains(store.id()), "{format}");
    if mounts::view(&store).unwrap().partial {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    for name in ["x", "shown"] {
        store.remove(name).unwrap();
    }
    let would = gc::collect(&store, true).unwrap();
    assert_eq!(gc::collect(&store, false).unwrap(), would);
    assert_eq!((would.objects_removed, would.trees_removed), (600, 1));
    assert!(!shelf.exists() && fs::read_dir(shelf.parent().unwrap()).unwrap().count() == 0);
}

/// What is wrong with a shelf is mended by the next mount, or is not mounted.
#[test]
fn a_damaged_shelf_is_never_given_to_the_kernel_and_a_copied_one_leads_to_the_objects_again() {
    need_root!();
    let scratch = Scratch::new();
    let (_, store, record, shelf) = shelved(&scratch);
    let meta = shelf.join("meta.erofs");
    let whole = fs::read(&meta).unwrap();
    let spoil = || {
        let mut bytes = whole.clone();
        bytes[1024 + 200] ^= 1;
        fs::write(&meta, bytes).unwrap();
        let damaged = stat::verify(&store, &["x".into()], false).unwrap().damaged;
        assert!(damaged.len() == 1 && Path::new(&damaged[0].path) == meta && damaged[0].images.contains(&"x".into()));
    };
    spoil();
    // As it is after a restart: nothing of it is in memory.
    let file = fs::File::open(&meta).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    drop(file);
    assert!(shows(&scratch, &store, &record, Kind::Auto));
    let mended = fs::read(&meta).unwrap();
    assert_eq!(mended[..mended.len() - 32], whole[..whole.len() - 32]);
    assert!(stat::verify(&store, &["x".into()], false).unwrap().damaged.is_empty());
    // Somebody else's mount has it open: it stays, and the image itself is mounted.
    let at = scratch.dir("mnt");
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    spoil();
    assert!(shows(&scratch, &store, &record, Kind::Auto));
    assert_eq!(fs::read(&meta).unwrap()[1024 + 200], whole[1024 + 200] ^ 1);
    umount(&at);
    fs::remove_file(&meta).unwrap();
    assert!(shows(&scratch, &store, &record, Kind::Auto) && meta.exists());

    // Copies by a program that knows of no hard links; the last by a mount of each kind at once.
    for (number, kinds) in
        [&[Kind::Auto][..], &[Kind::Directory], &[Kind::Auto, Kind::Directory, Kind::Auto, Kind::Auto]]
            .iter()
            .enumerate()
    {
        let copy = scratch.0.path().join(format!("copy{number}"));
        let copied = Command::new("cp").args(["-r", "--no-preserve=links"]).args([store.root(), &copy]).status();
        assert!(copied.unwrap().success());
        let store = Store::open(&copy, "default").unwrap();
        let shelf = store.tree_path(&record.digest).with_extension("shelf");
        let own = || {
            let objects: Vec<u64> = inodes(&store.objects_dir()).into_iter().map(|file| file.1).collect();
            inodes(&shelf.join("objects")).into_iter().filter(|link| objects.contains(&link.1)).count()
        };
        assert_eq!(own(), 0);
        std::thread::scope(|scope| {
            for (at, kind) in kinds.iter().enumerate() {
                let (store, record, at) = (&store, &record, scratch.dir(&format!("mnt{at}")));
                scope.spawn(move || {
                    mount::mount(store, record, &at, &Options { kind: *kind, ..Options::default() }).unwrap();
                    assert_eq!(fs::read(at.join("0/7")).unwrap(), noise(7, 500));
                    umount(&at);
                });
            }
        });
        assert!(shows(&scratch, &store, &record, kinds[0]));
        assert_eq!(own(), 600, "one piece of memory again");
        assert!(stat::verify(&store, &["x".into()], false).unwrap().damaged.is_empty());
        // What may be left of a shelf that went while it was mended.
        fs::remove_file(shelf.join("meta.erofs")).unwrap();
        fs::remove_dir_all(shelf.join("objects/0")).unwrap();
        fs::remove_file(shelf.join("objects/1/07")).unwrap();
        assert!(shows(&scratch, &store, &record, kinds[0]));
        assert_eq!(own(), 600);
    }
}

#[test]
fn shelves_of_two_domains_share_nothing() {
    need_root!();
    let scratch = Scratch::new();
    let tree = scratch.dir("tree");
    sample(&tree);
    let of = |domain: &str| {
        let store = Store::open(&scratch.dir("store"), domain).unwrap();
        let record = build_dir(&store, "x", &tree).unwrap();
        let at = scratch.dir(domain);
        mount::mount(&store, &record, &at, &Options::default()).unwrap();
        let shelf = store.tree_path(&record.digest).with_extension("shelf");
        (at, inodes(&shelf).into_iter().map(|file| file.1).collect::<Vec<_>>())
    };
    let ((a, alices), (b, bobs)) = (of("alice"), of("bob"));
    assert!(alices.len() > 1 && alices.len() == bobs.len());
    assert!(!alices.iter().any(|inode| bobs.contains(inode)));
    assert_eq!(same_frames(&a.join("bin/same"), &b.join("bin/same")), 0);
}

/// A store of nobody's in a small tmpfs.
#[test]
fn a_verify_on_a_full_disk_does_not_wait_for_itself() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let disk = scratch.dir("nobodys-store");
    rustix::mount::mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), c"size=16m").unwrap();
    let nobody = Nobody::new(&scratch);
    let object = disk.join("domains/default/objects").join(Digest::of(&noise(1, 300_000)).object_path());
    // Its mark keeps its owner out.
    fs::set_permissions(&object, fs::Permissions::from_mode(0o000)).unwrap();
    fill(&disk.join("fill"));
    let mut verify = nobody.runs("child_that_verifies", &[]);
    verify.env("PAGEFOLD_TEST_VERIFY", &nobody.store).stdout(Stdio::piped());
    let (mut child, began) = (verify.spawn().unwrap(), Instant::now());
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("it waits for ever");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut text = String::new();
    child.stdout.unwrap().read_to_string(&mut text).unwrap();
    assert!(text.contains("found damaged before"), "{text}");
}

/// Writes a file until the disk is full.
fn fill(path: &Path) {
    let mut zeros = fs::File::open("/dev/zero").unwrap();
    let error = std::io::copy(&mut zeros, &mut fs::File::create(path).unwrap()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
}

#[test]
fn images_are_mounted_and_run_where_nothing_can_be_written() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (disk, tree, other, at) = (scratch.dir("disk"), scratch.dir("tree"), scratch.dir("other"), scratch.dir("mnt"));
    rustix::mount::mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), c"size=32m,nr_inodes=600").unwrap();
    runnable(&tree);
    for number in 0..4u32 {
        fs::write(other.join(format!("{number}")), noise(number, 5000)).unwrap();
    }
    let root = disk.join("store");
    let (store, domain) = (Store::open(&root, "default").unwrap(), root.join("domains/default"));
    let run = build_dir(&store, "run", &tree).unwrap();
    for name in ["new", "old"] {
        fs::write(other.join("name"), name).unwrap();
        build_dir(&store, name, &other).unwrap();
    }
    // One image has a shelf, one has none, and one a metadata directory from before there were any.
    mount::mount(&store, &run, &at, &Options::default()).unwrap();
    umount(&at);
    let (old, new) = (store.image("old").unwrap(), store.image("new").unwrap());
    let by_directory = Options { kind: Kind::Directory, ..Options::default() };
    fs::remove_file(domain.join("shelf.lock")).unwrap();
    fs::create_dir(domain.join("shelf.lock")).unwrap();
    mount::mount(&store, &old, &at, &by_directory).unwrap();
    umount(&at);
    fs::remove_dir(domain.join("shelf.lock")).unwrap();
    assert!(store.tree_path(&old.digest).with_extension("rootdir").exists());
    mount::mount(&store, &old, &at, &Options::default()).unwrap();
    umount(&at);
    let shelf = |record: &Record| store.tree_path(&record.digest).with_extension("shelf");
    assert!(shelf(&old).exists() && shelf(&run).exists() && !shelf(&new).exists());

    let is_free = || {
        let lock = fs::File::open(domain.join("lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
    };
    for state in ["no room", "no inodes", "read-only"] {
        let more = disk.join("more");
        match state {
            "no room" => fill(&disk.join("fill")),
            "no inodes" => {
                fs::create_dir(&more).unwrap();
                let full = (0..).map(|number| fs::File::create(more.join(format!("{number}")))).find_map(Result::err);
                assert_eq!(full.unwrap().raw_os_error(), Some(libc::ENOSPC));
            }
            _ => {
                // A store of a version before.
                fs::remove_dir(domain.join("mnt")).unwrap();
                let flags = MountFlags::RDONLY;
                rustix::mount::mount_remount(&disk, flags, c"").unwrap();
            }
        }
        let store = Store::open(&root, "default").unwrap();
        for (record, options) in [
            (&run, &Options::default()),
            (&new, &Options::default()),
            (&old, &Options::default()),
            (&old, &by_directory),
        ] {
            let staged = || fs::metadata(domain.join("staging")).unwrap().modified().unwrap();
            let before = staged();
            mount::mount(&store, record, &at, options).unwrap_or_else(|error| panic!("{state}: {error}"));
            assert!(options.kind == Kind::Directory || staged() == before, "{state}: a shelf there is no room for");
            let (file, bytes) = if record.digest == run.digest {
                ("etc/message", "from the image\n".repeat(20).into_bytes())
            } else {
                ("3", noise(3, 5000))
            };
            assert_eq!(fs::read(at.join(file)).unwrap(), bytes, "{state}");
            umount(&at);
            assert!(is_free(), "{state}");
        }
        for mode in ["ro", "rw"] {
            assert!(run_in(&root, mode, "cat /etc/message").contains("from the image"), "{state}");
        }
        assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty(), "{state}");
        stat::stat(&store, &[]).unwrap();
        assert!(is_free() && !shelf(&new).exists(), "{state}");
        if state == "no inodes" || state == "read-only" {
            assert!(build_dir(&store, "built", &other).is_err());
        }
        // The collector is kept out as long as somebody is about to mount.
        let (_, lease) = store.hold("new").unwrap();
        assert!(!is_free(), "{state}");
        let collector = std::thread::spawn({
            let store = Store::open(&root, "default").unwrap();
            move || gc::collect(&store, false)
        });
        assert!(!is_free(), "{state}");
        drop(lease);
        let collected = collector.join().unwrap();
        if state == "read-only" {
            let error = collected.unwrap_err().to_string();
            assert!(error.contains("Read-only"), "{error}");
        } else {
            assert_eq!(collected.unwrap().objects_removed, 0, "{state}");
        }
        assert!(is_free(), "{state}");
        let _ = (fs::remove_file(disk.join("fill")), fs::remove_dir_all(&more));
    }
}

#[test]
fn a_shelf_has_what_a_build_puts_in_the_place_of_a_damaged_or_missing_object() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, store, record, shelf) = shelved(&scratch);
    let object = |number: u32| store.object_path(&Digest::of(&noise(number, 500)));
    let of = |number: u32| {
        inodes(&shelf.join("objects")).into_iter().find(|link| link.1 == fs::metadata(object(number)).unwrap().ino())
    };
    let (damaged, missing) = (of(5).unwrap().0, of(6).unwrap().0);
    fs::write(object(5), noise(99, 500)).unwrap();
    fs::remove_file(object(6)).unwrap();
    let found = stat::verify(&store, &[], false).unwrap().damaged;
    assert_eq!(found.len(), 2, "{found:?}");
    // A shelf that is made meanwhile lacks the one; the rest of the image can be read.
    fs::remove_dir_all(&shelf).unwrap();
    let at = scratch.dir("mnt");
    let mounted = mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert!(mounted.notes.iter().any(|note| note.starts_with("2 of the image's objects")), "{:?}", mounted.notes);
    assert!(fs::read(at.join("6/6")).is_err());
    assert_eq!(fs::read(at.join("0/7")).unwrap(), noise(7, 500));
    umount(&at);
    let (build, mut notes) = (store.build().unwrap(), Notes::default());
    let options = build::Options { rehash: true, ..Default::default() };
    let built = build::from_directory(&build, &tree, options, &mut notes, &Progress::silent()).unwrap();
    build.publish("again", &built, "test", Default::default(), vec![]).unwrap();
    assert_eq!((of(5).unwrap().0, of(6).unwrap().0), (damaged, missing));
    let mounted = mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    assert_eq!(mounted.notes, [""; 0]);
    assert!(shows(&scratch, &store, &record, Kind::Auto));
    assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
    assert!(!store.objects_dir().with_file_name("damaged").exists());
    // A name on the shelf that is another file.
    let link = of(7).unwrap().0;
    fs::remove_file(&link).unwrap();
    fs::write(&link, noise(98, 500)).unwrap();
    let found = stat::verify(&store, &[], false).unwrap().damaged;
    assert!(found.len() == 1 && found[0].what.starts_with("1 file is another"), "{found:?}");
    assert_eq!(of(7).unwrap().0, link);
    assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
}

/// What cannot be mended is told, changes nothing, and is mended as soon as it can be.
#[test]
fn verify_tells_of_a_shelf_that_cannot_be_mended() {
    need_root!();
    let scratch = Scratch::new();
    let (disk, tree, at) = (scratch.dir("disk"), scratch.dir("tree"), scratch.dir("mnt"));
    rustix::mount::mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), c"size=32m,nr_inodes=600").unwrap();
    for number in 0..9u32 {
        fs::write(tree.join(format!("{number}")), noise(number, 5000)).unwrap();
    }
    let store = Store::open(&disk.join("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    let shelf = store.tree_path(&record.digest).with_extension("shelf");
    let (links, more) = (shelf.join("objects/0"), disk.join("more"));
    for state in ["no inodes", "read-only"] {
        for name in ["03", "05"] {
            fs::remove_file(links.join(name)).unwrap();
            fs::write(links.join(name), "another").unwrap();
        }
        let said = match state {
            "no inodes" => {
                fs::create_dir(&more).unwrap();
                let full = (0..).map(|number| fs::File::create(more.join(format!("{number}")))).find_map(Result::err);
                assert_eq!(full.unwrap().raw_os_error(), Some(libc::ENOSPC));
                "no space left"
            }
            _ => {
                rustix::mount::mount_remount(&disk, MountFlags::RDONLY, c"").unwrap();
                "Read-only"
            }
        };
        let before = inodes(&shelf);
        for _ in 0..2 {
            let found = stat::verify(&store, &[], false).unwrap().damaged;
            assert_eq!(found.len(), 1, "{state}: {found:?}");
            let (path, what, images) = (Path::new(&found[0].path), &found[0].what, &found[0].images);
            assert!(path == shelf.join("objects") && images == &["x"], "{state}: {found:?}");
            assert!(what.contains("cannot be mended") && what.contains(said), "{state}: {what}");
            assert!(!what.contains("; mended"), "{state}: {what}");
        }
        assert_eq!(inodes(&shelf), before, "{state}");
        match state {
            "no inodes" => fs::remove_dir_all(&more).unwrap(),
            _ => rustix::mount::mount_remount(&disk, MountFlags::empty(), c"").unwrap(),
        }
        let found = stat::verify(&store, &[], false).unwrap().damaged;
        assert!(found.len() == 1 && found[0].what == "2 files are others than their objects; mended", "{found:?}");
        assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty(), "{state}");
        assert!(shows(&scratch, &store, &record, Kind::Auto), "{state}");
        store.remove("shown").unwrap();
    }
}

/// Changes of a file's mode lead to where its content was when they were made.
#[test]
fn changes_over_a_shelf_are_not_mounted_without_one() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (tree, store, record, shelf) = shelved(&scratch);
    let (at, lock) = (scratch.dir("mnt"), store.root().join("domains/default/shelf.lock"));
    let changed = Options { upper: Some(scratch.dir("upper")), ..Options::default() };
    mount::mount(&store, &record, &at, &changed).unwrap();
    fs::set_permissions(at.join("0/7"), fs::Permissions::from_mode(0o600)).unwrap();
    umount(&at);
    // The image goes and comes again, and has no shelf for some reason.
    store.remove("x").unwrap();
    gc::collect(&store, false).unwrap();
    if shelf.exists() {
        println!("SKIPPED: not all processes are seen here");
        return;
    }
    let record = build_dir(&store, "x", &tree).unwrap();
    let _ = fs::remove_file(&lock);
    fs::create_dir(&lock).unwrap();
    let error = mount::mount(&store, &record, &at, &changed).unwrap_err().to_string();
    assert!(error.contains("shelf") && error.contains("--upper"), "{error}");
    assert!(shows(&scratch, &store, &record, Kind::Auto));
    let empty = Options { upper: Some(scratch.dir("empty")), ..Options::default() };
    mount::mount(&store, &record, &at, &empty).unwrap();
    umount(&at);
    fs::remove_dir(&lock).unwrap();
    for options in [&changed, &empty] {
        mount::mount(&store, &record, &at, options).unwrap();
        assert_eq!(fs::read(at.join("0/7")).unwrap(), noise(7, 500));
        umount(&at);
    }
}

/// A copy that was interrupted may have a shelf's metadata and no more of it.
#[test]
fn a_shelf_without_objects_gets_them_again() {
    need_root!();
    let scratch = Scratch::new();
    let (_, store, record, shelf) = shelved(&scratch);
    let (meta, objects) = (shelf.join("meta.erofs"), shelf.join("objects"));
    for (kind, empty) in [(Kind::Auto, false), (Kind::Directory, false), (Kind::Directory, true)] {
        fs::remove_dir_all(&objects).unwrap();
        if empty {
            fs::create_dir(&objects).unwrap();
        }
        // As in a copy: another inode.
        fs::copy(&meta, shelf.join("copy")).unwrap();
        fs::rename(shelf.join("copy"), &meta).unwrap();
        assert!(shows(&scratch, &store, &record, kind), "{kind:?} {empty}");
        assert_eq!(inodes(&objects).len(), 600, "{kind:?} {empty}");
    }
}

/// A store in a container's own file system, whose files are another's, and may be copied when they are linked.
#[test]
fn a_store_on_overlayfs_has_shelves() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (lower, upper, work) = (scratch.dir("lower"), scratch.dir("layer"), scratch.dir("work"));
    let (tree, disk, at) = (scratch.dir("tree"), scratch.dir("disk"), scratch.dir("mnt"));
    for number in 0..300u32 {
        fs::write(tree.join(format!("{number}")), noise(number, 500)).unwrap();
    }
    // One image comes with the lower layer, so that its objects are linked there and copied up.
    let below = Store::open(&lower.join("store"), "default").unwrap();
    let record = build_dir(&below, "x", &tree).unwrap();
    let data = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let data = std::ffi::CString::new(data).unwrap();
    rustix::mount::mount("overlay", &disk, "overlay", MountFlags::empty(), data.as_c_str()).unwrap();
    let store = Store::open(&disk.join("store"), "default").unwrap();
    let shelf = store.tree_path(&record.digest).with_extension("shelf");
    for kind in [Kind::Auto, Kind::Directory] {
        assert!(shows(&scratch, &store, &record, kind), "{kind:?}");
        assert!(shelf.exists() && stat::verify(&store, &[], false).unwrap().damaged.is_empty(), "{kind:?}");
    }
    // As in a copy of the store.
    let meta = shelf.join("meta.erofs");
    fs::copy(&meta, shelf.join("copy")).unwrap();
    fs::rename(shelf.join("copy"), &meta).unwrap();
    assert!(shows(&scratch, &store, &record, Kind::Auto));
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert_eq!(fs::read(at.join("7")).unwrap(), noise(7, 500));
    store.remove("x").unwrap();
    store.remove("shown").unwrap();
    assert_eq!(gc::collect(&store, false).unwrap().trees_removed, 0, "it is mounted");
    umount(&at);
}

/// In a child process: makes the image's shelf, and ends mounted.
#[test]
fn child_that_mounts_first() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_FIRST") else { return };
    let [store, at] = arguments.split('\n').map(Path::new).collect::<Vec<_>>()[..] else { panic!("two") };
    let store = Store::open(store, "default").unwrap();
    mount::mount(&store, &store.image("x").unwrap(), at, &Options::default()).unwrap();
}

#[test]
fn a_mount_that_is_killed_leaves_a_whole_shelf_or_none() {
    need_root!();
    let scratch = Scratch::new();
    let (_, store, record, shelf) = shelved(&scratch);
    let at = scratch.dir("mnt");
    let (mut whole, mut none) = (0, 0);
    for round in 0..60u64 {
        fs::remove_dir_all(&shelf).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_mounts_first"])
            .env("PAGEFOLD_TEST_FIRST", format!("{}\n{}", store.root().display(), at.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 900));
        child.kill().unwrap();
        child.wait().unwrap();
        if mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap()).any(|mount| mount.at == at) {
            umount(&at);
        }
        if shelf.exists() {
            assert!(inodes(&shelf).len() == 601 && stat::verify(&store, &[], false).unwrap().damaged.is_empty());
            whole += 1;
        } else {
            none += 1;
        }
        if round % 10 == 0 {
            assert!(shows(&scratch, &store, &record, Kind::Auto));
        } else {
            mount::mount(&store, &record, &at, &Options::default()).unwrap();
            umount(&at);
        }
        assert_eq!(inodes(&shelf).len(), 601);
    }
    println!("{whole} whole, {none} none");
    drop(store.build().unwrap());
    assert_eq!(fs::read_dir(store.root().join("domains/default/staging")).unwrap().count(), 0);
}

/// An object has as many names as a file may have, so that no shelf can be made.
#[test]
fn an_image_without_a_shelf_is_mounted_all_the_same() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, other, upper) = (scratch.dir("tree"), scratch.dir("other"), scratch.dir("upper"));
    fs::write(tree.join("before"), noise(3, 5000)).unwrap();
    fs::write(tree.join("file"), noise(1, 5000)).unwrap();
    fs::write(tree.join("more"), noise(2, 5000)).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let object = store.object_path(&Digest::of(&noise(1, 5000)));
    let before = store.object_path(&Digest::of(&noise(3, 5000)));
    let names = (0..70_000).take_while(|i| fs::hard_link(&object, other.join(format!("{i}"))).is_ok()).count();
    if names == 70_000 {
        println!("SKIPPED: the temporary directory's file system has more links than that");
        return;
    }
    let (at, shelf) = (scratch.dir("mnt"), store.tree_path(&record.digest).with_extension("shelf"));
    let changed = Options { upper: Some(upper), ..Options::default() };
    let read = |at: &Path| [fs::read(at.join("file")).unwrap(), fs::read(at.join("more")).unwrap()];
    for kind in [Kind::Auto, Kind::Directory] {
        assert!(shows(&scratch, &store, &record, kind));
        assert!(!shelf.exists());
    }
    // Who tries links the object before it, and a link is a change of it.
    let changed_at = || fs::metadata(&before).map(|meta| (meta.ctime(), meta.ctime_nsec())).unwrap();
    let tried_at = changed_at();
    std::thread::sleep(Duration::from_millis(20));
    for kind in [Kind::Auto, Kind::Directory] {
        assert!(shows(&scratch, &store, &record, kind));
    }
    assert_eq!(changed_at(), tried_at, "no mount tries what it knows to fail");
    assert_eq!(fs::read_dir(store.root().join("domains/default/staging")).unwrap().count(), 0);
    mount::mount(&store, &record, &at, &changed).unwrap();
    fs::set_permissions(at.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    umount(&at);
    // Now there may be one. Changes of metadata that were made without it still find their content, and the other way round.
    fs::remove_dir_all(&other).unwrap();
    for round in 0..2 {
        mount::mount(&store, &record, &at, &changed).unwrap();
        assert_eq!(read(&at), [noise(1, 5000), noise(2, 5000)], "round {round}");
        fs::set_permissions(at.join("more"), fs::Permissions::from_mode(0o640)).unwrap();
        umount(&at);
        assert!(shelf.exists());
        fs::write(shelf.join("meta.erofs"), "").unwrap();
    }
}

/// Several first mounts of an image make its metadata directory at once, and each shows the whole tree.
#[test]
fn many_first_mounts_at_once_all_show_the_tree() {
    need_root!();
    let scratch = Scratch::new();
    let tree = scratch.dir("tree");
    for i in 0..50u32 {
        fs::write(tree.join(format!("{i}")), noise(i, 1000)).unwrap();
    }
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    for round in 0..5u32 {
        fs::write(tree.join("round"), noise(round, 1000)).unwrap();
        let record = build_dir(&store, "x", &tree).unwrap();
        let places: Vec<_> = (0..4).map(|i| scratch.dir(&format!("mnt-{i}"))).collect();
        let start = std::sync::Barrier::new(places.len());
        std::thread::scope(|scope| {
            for at in &places {
                let (store, record, start) = (&store, &record, &start);
                scope.spawn(move || {
                    start.wait();
                    let options = Options { kind: Kind::Directory, ..Options::default() };
                    mount::mount(store, record, at, &options).unwrap();
                    assert_eq!(fs::read(at.join("49")).unwrap(), noise(49, 1000));
                    assert_eq!(fs::read(at.join("round")).unwrap(), noise(round, 1000));
                    assert_eq!(fs::read_dir(at).unwrap().count(), 51);
                    umount(at);
                });
            }
        });
    }
    let left = fs::read_dir(store.root().join("domains/default/staging")).unwrap().count();
    assert_eq!(left, 0, "nothing of the slower ones stays");
}

/// A collector that dies while it removes a metadata directory leaves nothing that a later mount takes for whole.
#[test]
fn a_metadata_directory_is_removed_in_one_step() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    fs::create_dir(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/file"), noise(9, 5000)).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let options = Options { kind: Kind::Directory, ..Options::default() };
    let show = || {
        let record = build_dir(&store, "x", &tree).unwrap();
        mount::mount(&store, &record, &at, &options).unwrap();
        assert_eq!(fs::read(at.join("sub/file")).unwrap(), noise(9, 5000));
        umount(&at);
        record
    };
    let record = show();
    let dir = store.tree_path(&record.digest).with_extension("rootdir-shelved");
    let doomed = dir.with_extension("rootdir-shelved.doomed");
    // As the collector leaves it when it is killed in the middle.
    fs::rename(&dir, &doomed).unwrap();
    fs::remove_file(doomed.join("sub/file")).unwrap();
    show();
    // Directories of versions before: for all users' mappings, and from before there were shelves.
    let outdated = ["userdir", "rootdir"].map(|kind| dir.with_extension(kind));
    outdated.iter().for_each(|dir| fs::create_dir_all(dir.join("sub")).unwrap());
    if mounts::view(&store).unwrap().partial {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    mount::mount(&store, &record, &at, &options).unwrap();
    gc::collect(&store, false).unwrap();
    assert!(outdated.iter().all(|dir| dir.exists()) && dir.exists() && !doomed.exists(), "mounted");
    umount(&at);
    gc::collect(&store, false).unwrap();
    assert!(!outdated.iter().any(|dir| dir.exists()) && dir.exists(), "not mounted");
    store.remove("x").unwrap();
    gc::collect(&store, false).unwrap();
    assert_eq!(fs::read_dir(dir.parent().unwrap()).unwrap().count(), 0, "{doomed:?} and all else is gone");
}

#[test]
fn a_million_names_in_one_directory_are_listed_and_found() {
    need_root!();
    let scratch = Scratch::new();
    let (store, at) = (Store::open(&scratch.dir("store"), "default").unwrap().without_sync(), scratch.dir("mnt"));
    let mut tree = Tree::default();
    let dir = Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: FileKind::Dir(Default::default()) };
    let dir = tree.put(b"d", dir).unwrap();
    let meta = Meta { mode: 0o644, ..Meta::default() };
    for number in 0..1_000_000u32 {
        let data = Data::Inline(number.to_le_bytes().into());
        let id = tree.add(Inode { meta: meta.clone(), kind: FileKind::File(data) });
        tree.link(dir, format!("{number:07}").as_bytes(), id).unwrap();
    }
    let record = store.build().unwrap().publish("million", &tree, "test", Default::default(), vec![]).unwrap();
    drop(tree);
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert_eq!(fs::read_dir(at.join("d")).unwrap().count(), 1_000_000);
    for number in [0u32, 1, 499_999, 999_999] {
        assert_eq!(fs::read(at.join(format!("d/{number:07}"))).unwrap(), number.to_le_bytes());
    }
    assert!(!at.join("d/1000000").exists());
}

#[test]
fn a_full_disk_fails_the_build_and_nothing_else() {
    need_root!();
    let scratch = Scratch::new();
    let small = scratch.dir("small");
    rustix::mount::mount("tmpfs", &small, "tmpfs", rustix::mount::MountFlags::empty(), c"size=8m").unwrap();
    let store = Store::open(&small.join("store"), "default").unwrap();
    let (good, big, at) = (scratch.dir("good"), scratch.dir("big"), scratch.dir("mnt"));
    fs::write(good.join("file"), noise(7, 2_000_000)).unwrap();
    for i in 0..9u32 {
        fs::write(big.join(format!("{i}")), noise(100 + i, 900_000)).unwrap();
    }
    let record = build_dir(&store, "good", &good).unwrap();
    let error = build_dir(&store, "big", &big).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(error.to_string().contains("no space left"), "{error}");
    // Also while the name is being replaced.
    assert!(build_dir(&store, "good", &big).is_err());
    assert_eq!(store.image("good").unwrap().digest, record.digest);
    assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
    gc::collect(&store, false).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), noise(7, 2_000_000));
    umount(&at);
    // Room again: the same build goes through.
    fs::remove_file(big.join("8")).unwrap();
    for i in 3..8 {
        fs::remove_file(big.join(format!("{i}"))).unwrap();
    }
    build_dir(&store, "big", &big).unwrap();
}

/// Whether a disk had too little room for a metadata directory, or enough: nothing between them.
#[test]
fn a_full_disk_makes_no_metadata_directory_that_lacks_something() {
    need_root!();
    let scratch = Scratch::new();
    let (disk, at) = (scratch.dir("disk"), scratch.dir("mnt"));
    let file = scratch.0.path().join("image");
    fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let run = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    if !run(Command::new("mkfs.ext4")
        .args(["-qF", "-m", "0", "-b", "4096", "-I", "256", "-O", "^has_journal,ea_inode"])
        .arg(&file))
        || !run(Command::new("mount").args(["-o", "loop"]).args([&file, &disk]))
    {
        println!("SKIPPED: needs mkfs.ext4 and a loop mount");
        return;
    }
    let store = Store::open(&disk.join("store"), "default").unwrap();
    // An attribute of ten blocks: without room for it there still is some for what comes after it.
    let mut tree = Tree::default();
    let mut meta = Meta { mode: 0o755, ..Meta::default() };
    meta.xattrs.insert((*b"user.large").into(), vec![7; 40_000].into());
    tree.put(b"d", Inode { meta, kind: FileKind::Dir(Default::default()) }).unwrap();
    let record = store.build().unwrap().publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    let dir = store.tree_path(&record.digest).with_extension("rootdir-shelved");
    // Its shelf is there already.
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    umount(&at);
    let (mut made, mut failed) = (0, 0);
    for blocks in 0..40 {
        let fill = disk.join("fill");
        let mut full = fs::File::create(&fill).unwrap();
        let mut zeros = fs::File::open("/dev/zero").unwrap();
        let error = std::io::copy(&mut zeros, &mut full).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        full.sync_all().unwrap();
        full.set_len(full.metadata().unwrap().len().next_multiple_of(4096) - blocks * 4096).unwrap();
        full.sync_all().unwrap();
        let mounted = mount::mount(&store, &record, &at, &Options { kind: Kind::Directory, ..Options::default() });
        fs::remove_file(&fill).unwrap();
        match mounted {
            Ok(mounted) => {
                assert!(mounted.notes.is_empty(), "{blocks}: {:?}", mounted.notes);
                assert_eq!(rustix::fs::getxattr(at.join("d"), "user.large", &mut vec![0; 65_536][..]).unwrap(), 40_000);
                umount(&at);
                fs::remove_dir_all(&dir).unwrap();
                made += 1;
            }
            Err(error) => {
                assert!(matches!(error, Error::Full { .. }), "{blocks}: {error}");
                assert!(!dir.exists());
                failed += 1;
            }
        }
        gc::collect(&store, false).unwrap();
    }
    assert!(made > 0 && failed > 0, "{made} {failed}");
}

/// The disk loses a write, somebody else's sync hears of it, and the disk is well again.
#[test]
fn a_build_whose_bytes_were_lost_gives_them_no_name() {
    need_root!();
    let scratch = Scratch::new();
    let (small, disk) = (scratch.dir("small"), scratch.dir("disk"));
    rustix::mount::mount("tmpfs", &small, "tmpfs", MountFlags::empty(), c"size=6m").unwrap();
    let file = small.join("disk");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let run = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    // Without a journal and with its tables written, so that only contents can be lost.
    if !run(Command::new("mkfs.ext4").args(["-qF", "-O", "^has_journal", "-N", "4096"]).arg(&file))
        || !run(Command::new("mount").args(["-o", "loop"]).args([&file, &disk]))
    {
        println!("SKIPPED: needs mkfs.ext4 and a loop mount");
        return;
    }
    let store = Store::open(&disk.join("store"), "default").unwrap();
    for round in 0..2u32 {
        let build = store.build().unwrap();
        // The first round's is lost.
        let data = build.put_bytes(&noise(round, if round == 0 { 16 << 20 } else { 100_000 })).unwrap();
        let mut tree = Tree::default();
        tree.put(b"file", Inode { meta: Meta::default(), kind: FileKind::File(data) }).unwrap();
        let elsewhere = run(Command::new("sync").arg("-f").arg(&disk));
        assert_eq!(elsewhere, round > 0, "the disk has room in the second round only");
        assert!(run(Command::new("mount").args(["-o", "remount,size=96m"]).arg(&small)));
        let object = store.object_path(&tree.objects()[0].0);
        // The disk tells of it once; what asks again, as another of a build's threads does, is told nothing.
        for attempt in 0..2 {
            let published = build.publish("x", &tree, "test", Default::default(), vec![]);
            assert_eq!(published.is_ok(), round > 0, "{round} {attempt}: {published:?}");
            assert_eq!(object.exists(), round > 0, "{round} {attempt}");
        }
    }
    assert_eq!(store.images().unwrap().len(), 1);
}

#[test]
fn a_damaged_metadata_image_is_never_given_to_the_kernel() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    fs::write(tree.join("file"), noise(8, 200_000)).unwrap();
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let path = store.tree_path(&record.digest);
    let mut bytes = fs::read(&path).unwrap();
    bytes[1300] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = mount::mount(&store, &record, &at, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)), "{error}");
}

#[test]
fn a_self_contained_image_carries_data_and_fingerprints() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    sample(&tree);
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    export::make_native(&store, &record.digest, &Progress::silent()).unwrap();
    let full = store.full_path(&record.digest);
    rustix::mount::mount(&full, &at, "erofs", rustix::mount::MountFlags::RDONLY, None).unwrap();
    let mut value = [0; 64];
    let count = rustix::fs::getxattr(at.join("usr/bin/tool"), "trusted.erofs.fingerprint", &mut value).unwrap();
    assert_eq!(value[..count], [&b"sha256:"[..], &Digest::of(&noise(1, 300_000)).0].concat());
    assert_eq!(fs::read(at.join("bin/same")).unwrap(), noise(1, 300_000));
    // Fingerprints are EROFS's own marks and no part of the tree.
    let again = Store::open(&scratch.dir("again"), "default").unwrap();
    let (build, mut notes) = (again.build().unwrap(), Notes::default());
    let read = build::from_directory(&build, &at, Default::default(), &mut notes, &Progress::silent()).unwrap();
    assert_eq!(build.publish("x", &read, "t", Default::default(), vec![]).unwrap().digest, record.digest);
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    match mount::mount(&store, &record, &at, &Options { kind: Kind::Native, ..Options::default() }) {
        Ok(_) => assert_eq!(fs::read(at.join("bin/same")).unwrap(), noise(1, 300_000)),
        Err(error) => println!("SKIPPED: native mount: {error}"),
    }
}

/// A tree in which sh, cat and id run.
fn runnable(dir: &Path) {
    for part in ["bin", "proc", "sys", "dev", "tmp", "etc", "host"] {
        fs::create_dir_all(dir.join(part)).unwrap();
    }
    for program in ["sh", "cat", "id", "ls", "touch"] {
        let from =
            ["/bin", "/usr/bin"].iter().map(|at| Path::new(at).join(program)).find(|path| path.exists()).unwrap();
        fs::copy(&from, dir.join("bin").join(program)).unwrap();
        let libraries = Command::new("ldd").arg(&from).output().unwrap();
        for word in String::from_utf8_lossy(&libraries.stdout).split_whitespace().filter(|word| word.starts_with('/')) {
            let target = dir.join(word.trim_start_matches('/'));
            fs::create_dir_all(target.parent().unwrap()).unwrap();
            fs::copy(word, target).unwrap();
        }
    }
    fs::write(dir.join("etc/message"), "from the image\n".repeat(20)).unwrap();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
}

/// In a child process: becomes the command of `PAGEFOLD_TEST_EXEC`.
#[test]
fn child_that_execs() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_EXEC") else { return };
    let [store, name, mode, command] = arguments.splitn(4, '\n').collect::<Vec<_>>()[..] else { panic!("four") };
    let store = Store::open(Path::new(store), "default").unwrap();
    let (record, lease) = store.hold(name).unwrap();
    let run = exec::Run {
        command: ["/bin/sh", "-c", command].map(Into::into).to_vec(),
        binds: vec![("/etc".into(), "/host".into())],
        user: mode.strip_prefix("as ").unwrap_or_default().into(),
        scratch: mode == "rw",
        learn: (mode == "learn").then_some(Duration::from_secs(60)),
        ..exec::Run::default()
    };
    panic!("{}", exec::exec(&store, &record, &lease, &run, |mut command| command.exec()));
}

/// A process that becomes `command` in the image.
fn exec_in(store: &Path, mode: &str, command: &str) -> Command {
    let arguments = format!("{}\nrun\n{mode}\n{command}", store.display());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_that_execs", "--nocapture"]).env("PAGEFOLD_TEST_EXEC", arguments);
    child
}

#[test]
fn links_of_an_image_never_lead_exec_to_the_host() {
    need_root!();
    let scratch = Scratch::new();
    let (host, root) = (scratch.dir("host"), scratch.dir("store"));
    let store = Store::open(&root, "default").unwrap();
    let far = format!("{}/deep", host.display());
    for (number, target) in
        ["/proc/self/cwd", "/", "/proc/1/root", "../../../../..", &far, "/etc", "proc", "proc/self"].iter().enumerate()
    {
        // What exec would make or empty, had the link led it here.
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

/// Runs `command` in the image, `ro`, `rw` or to `learn`; returns its output. The test harness's threads stay behind at
/// the exec.
fn run_in(store: &Path, mode: &str, command: &str) -> String {
    let out = exec_in(store, mode, command).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    text
}

#[test]
fn a_command_runs_with_the_image_as_its_root() {
    need_root!();
    let scratch = Scratch::new();
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
    need_root!();
    let scratch = Scratch::new();
    let tree = scratch.dir("tree");
    runnable(&tree);
    let root = scratch.dir("store");
    let store = Store::open(&root, "default").unwrap();
    // No place for the bind, which needs the mount; no such user, which is known in the new root; no program.
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
    need_root!();
    let scratch = Scratch::new();
    let (tree, root) = (scratch.dir("tree"), scratch.dir("store"));
    runnable(&tree);
    let store = Store::open(&root, "default").unwrap();
    let (build, mut notes) = (store.build().unwrap(), Notes::default());
    let read = build::from_directory(&build, &tree, Default::default(), &mut notes, &Progress::silent()).unwrap();
    let config = RunConfig { working_dir: "/srv/app".into(), ..RunConfig::default() };
    build.publish("run", &read, "test", config, vec![]).unwrap();
    for (mode, expected) in [("ro", "in / now"), ("rw", "in /srv/app now")] {
        // Who opens it has a new terminal.
        let text = run_in(&root, mode, "echo in $PWD now; : </dev/ptmx && echo opened");
        assert!(text.contains(expected) && text.contains("opened"), "{mode}: {text}");
    }
}

#[test]
fn a_start_directory_never_lies_outside_the_image() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, root, host) = (scratch.dir("tree"), scratch.dir("store"), scratch.dir("host"));
    fs::write(host.join("of the host"), "").unwrap();
    // The kernel's own link to the root of a process that is none of the image's.
    let outside = format!("/proc/{}/root{}", std::process::id(), host.display());
    runnable(&tree);
    symlink(&outside, tree.join("out")).unwrap();
    let store = Store::open(&root, "default").unwrap();
    for dir in [&outside, "/out", &format!("{outside}/made"), "/out/made"] {
        let (build, mut notes) = (store.build().unwrap(), Notes::default());
        let read = build::from_directory(&build, &tree, Default::default(), &mut notes, &Progress::silent()).unwrap();
        let config = RunConfig { working_dir: dir.into(), ..RunConfig::default() };
        build.publish("run", &read, "test", config, vec![]).unwrap();
        let out = exec_in(&root, "rw", "ls").output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains("--workdir names another"), "{dir}: {text}");
        assert!(!text.contains("of the host") && !host.join("made").exists(), "{dir}: {text}");
    }
}

#[test]
fn a_command_runs_as_the_images_user() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, root) = (scratch.dir("tree"), scratch.dir("store"));
    runnable(&tree);
    fs::write(tree.join("etc/passwd"), "root:x:0:0::/root:\napp:x:1001:1002::/home/app:\n").unwrap();
    fs::write(tree.join("etc/group"), "app:x:1002:\nextra:x:1003:app\n").unwrap();
    let store = Store::open(&root, "default").unwrap();
    let build = |user: &str| {
        let (build, mut notes) = (store.build().unwrap(), Notes::default());
        let tree = build::from_directory(&build, &tree, Default::default(), &mut notes, &Progress::silent()).unwrap();
        let config = RunConfig { user: user.into(), ..RunConfig::default() };
        build.publish("run", &tree, "test", config, vec![]).unwrap();
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
    build("nobody-here");
    let out = exec_in(&root, "ro", command).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && text.contains(r#"no user "nobody-here" in the image"#), "{text}");
}

/// In a child process: scans a directory as whoever it is.
#[test]
fn child_that_scans() {
    let Ok(dir) = std::env::var("PAGEFOLD_TEST_SCAN") else { return };
    let found = scan::trees(&[dir.into()], &Progress::silent()).unwrap();
    println!("SCANNED {} of {} resident, {} unknown", found.resident_bytes, found.total_bytes, found.resident_unknown);
}

#[test]
fn a_scan_does_not_guess_what_is_in_memory() {
    need_root!();
    let scratch = Scratch::new();
    fs::set_permissions(scratch.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    for (name, owner) in [("others", 0), ("own", 65534)] {
        fs::write(tree.join(name), noise(owner, 40_960)).unwrap();
        std::os::unix::fs::chown(tree.join(name), Some(owner), Some(owner)).unwrap();
    }
    let (others, own) = (fs::File::open(tree.join("others")).unwrap(), tree.join("own"));
    others.sync_all().unwrap();
    rustix::fs::fadvise(&others, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    fs::read(&own).unwrap();
    let program = scratch.0.path().join("test-program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let out = Command::new(&program)
        .uid(65534)
        .gid(65534)
        .current_dir("/")
        .args(["--exact", "child_that_scans", "--nocapture"])
        .env("PAGEFOLD_TEST_SCAN", &tree)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        text.contains("SCANNED 40960 of 81920 resident, 1 unknown"),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );

    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    fs::read(at.join("own")).unwrap();
    let found = scan::trees(&[at], &Progress::silent()).unwrap();
    assert_eq!((found.files, found.resident_bytes, found.resident_unknown), (2, 0, 2));
}

#[test]
fn a_store_may_lie_as_deep_as_it_likes() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    fs::write(tree.join("file"), noise(1, 5000)).unwrap();
    let deep = "d".repeat(240);
    let store = Store::open(&scratch.dir(&deep).join("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    for kind in [Kind::Auto, Kind::Erofs, Kind::Loop, Kind::Directory] {
        for upper in [None, Some(scratch.dir(&format!("{deep}/{kind:?}/{deep}")))] {
            let written = upper.is_some();
            match mount::mount(&store, &record, &at, &Options { kind, upper, ..Options::default() }) {
                Err(error) if kind == Kind::Loop && error.to_string().contains("loop device") => {
                    println!("SKIPPED: loop: {error}");
                    continue;
                }
                other => other.unwrap(),
            };
            assert_eq!(fs::read(at.join("file")).unwrap(), noise(1, 5000));
            assert_eq!(fs::write(at.join("new"), "x").is_ok(), written);
            umount(&at);
        }
    }
    let error = mount::mount(&store, &record, &at, &Options { kind: Kind::Native, ..Options::default() }).unwrap_err();
    assert!(error.to_string().contains("too long for a native mount"), "{error}");
}

#[test]
fn what_a_start_reads_is_learned_once_and_read_ahead_by_later_mounts() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
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
            let file = fs::File::open(store.object_path(&Digest::of(content))).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
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
    // The shell, cat and ls with their libraries, the file and the directory; not what the command made itself.
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
    // Asked for, not waited for.
    until("what was learned is read", &|| resident(&read) >= read.len() as u64);
    assert_eq!(resident(&other), 0, "and nothing else");
    assert_eq!(fs::read(at.join("etc/read")).unwrap(), read);
    umount(&at);
    assert_eq!(mount_and_look(&Options { no_prefetch: true, ..Options::default() }), 0);
    assert_eq!(resident(&read), 0, "unless that is not wanted");
    umount(&at);

    // A profile is a hint: whatever stands in it, the tree is mounted.
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

/// In a child process: builds and mounts as a plain user in a user namespace, and says what it saw; with
/// `PAGEFOLD_TEST_WAIT` it looks again when it is told to.
#[test]
fn child_that_mounts_rootless() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_ROOTLESS") else { return };
    let [store, at] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("two arguments") };
    let store = Store::open(Path::new(store), "default").unwrap();
    let record = store.image("user").unwrap();
    let mounted = mount::mount(&store, &record, Path::new(at), &Options::default()).unwrap();
    let text = || fs::read(Path::new(at).join("odd")).unwrap();
    println!("MOUNTED {:?} {} {}", mounted.kind, text() == noise(2, 65), mounted.notes.join("; "));
    println!("DAMAGED {:?}", stat::verify(&store, &[], false).unwrap().damaged);
    println!("TOOL {}", fs::read(Path::new(at).join("bin/same")).unwrap() == noise(1, 300_000));
    if std::env::var_os("PAGEFOLD_TEST_WAIT").is_some() {
        std::io::stdin().read_line(&mut String::new()).unwrap();
        println!("STILL {} {}", text() == noise(2, 65), fs::read_dir(Path::new(at).join("usr")).unwrap().count());
    }
}

/// A plain user's store with the sample as image `user`, a place to mount it, and this program where he may run it.
struct Nobody {
    program: PathBuf,
    store: PathBuf,
    at: PathBuf,
}

impl Nobody {
    fn new(scratch: &Scratch) -> Self {
        Self::with(scratch, |_| {})
    }

    /// With what `more` adds to the sample.
    fn with(scratch: &Scratch, more: impl FnOnce(&Path)) -> Self {
        fs::set_permissions(scratch.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (tree, at, store) = (scratch.dir("tree"), scratch.dir("nobodys-mnt"), scratch.dir("nobodys-store"));
        sample(&tree);
        more(&tree);
        for dir in [&store, &at] {
            std::os::unix::fs::chown(dir, Some(65534), Some(65534)).unwrap();
        }
        let program = scratch.0.path().join("test-program");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        // The image comes as a tar archive, so that devices and owners are in it although nobody may not make them.
        let tar = scratch.0.path().join("tree.tar");
        let own = Store::open(&scratch.dir("root-store"), "default").unwrap();
        let record = build_dir(&own, "x", &tree).unwrap();
        let mut out = fs::File::create(&tar).unwrap();
        export::tar(&own, &own.tree(&record.digest).unwrap(), &mut out, &Progress::silent()).unwrap();
        let nobody = Self { program, store, at };
        let out = nobody
            .runs("child_that_imports", &[])
            .env("PAGEFOLD_TEST_IMPORT", format!("{}\n{}", nobody.store.display(), tar.display()))
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", said(&out));
        nobody
    }

    /// Runs a test of this program as nobody, behind `unshare` if it has arguments.
    fn runs(&self, test: &str, unshare: &[&str]) -> Command {
        let mut command = Command::new(if unshare.is_empty() { self.program.as_path() } else { Path::new("unshare") });
        if !unshare.is_empty() {
            command.args(unshare).arg("--").arg(&self.program);
        }
        command.uid(65534).gid(65534).current_dir("/").args(["--exact", test, "--nocapture"]);
        command
    }

    /// Mounts in a user namespace.
    fn mounts(&self) -> Command {
        let mut command = self.runs("child_that_mounts_rootless", &["-Urm"]);
        command.env("PAGEFOLD_TEST_ROOTLESS", format!("{}\n{}", self.store.display(), self.at.display()));
        command
    }
}

/// All that a process has said.
fn said(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

#[test]
fn a_plain_user_mounts_in_a_user_namespace() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let nobody = Nobody::with(&scratch, |tree| {
        fs::write(tree.join("shadow"), noise(21, 5000)).unwrap();
        fs::set_permissions(tree.join("shadow"), fs::Permissions::from_mode(0o000)).unwrap();
    });
    let out = nobody.mounts().output().unwrap();
    let text = said(&out);
    if !out.status.success() && (text.contains("unshare failed") || text.contains("userxattr")) {
        println!("SKIPPED: rootless overlayfs is not allowed here: {text}");
        return;
    }
    assert!(text.contains("MOUNTED Directory true") && text.contains("TOOL true"), "{text}");
    assert!(text.contains("DAMAGED []"), "{text}");
    // What a plain user cannot have is said, once each.
    for note in ["device nodes are missing", "files show your own user", "attributes are missing"] {
        assert!(text.contains(note), "{note}: {text}");
    }
    // Outside of the namespace he may not read what its mode keeps even from its owner.
    let out = nobody.runs("child_that_verifies", &[]).env("PAGEFOLD_TEST_VERIFY", &nobody.store).output().unwrap();
    assert!(said(&out).contains("DAMAGED []"), "{}", said(&out));
}

#[test]
fn devices_that_a_command_has_of_its_own_are_not_missed() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    // The sample has two elsewhere.
    let nobody = Nobody::with(&scratch, |tree| {
        runnable(tree);
        let (kind, device) = (FileType::CharacterDevice, rustix::fs::makedev(1, 3));
        rustix::fs::mknodat(CWD, tree.join("dev/null"), kind, Mode::RUSR, device).unwrap();
    });
    let mut exec = nobody.runs("child_that_execs", &["-Urm"]);
    exec.env("PAGEFOLD_TEST_EXEC", format!("{}\nuser\nro\n: </dev/null && echo ran", nobody.store.display()));
    let out = exec.output().unwrap();
    let text = said(&out);
    if !out.status.success() && (text.contains("unshare failed") || text.contains("userxattr")) {
        println!("SKIPPED: rootless overlayfs is not allowed here: {text}");
        return;
    }
    assert!(
        text.contains("ran") && text.contains("note: device nodes are missing: making them needs root (2)"),
        "{text}"
    );
    assert!(!text.contains("missing in /dev"), "{text}");
}

/// In a child process: verifies a store as whoever it is.
#[test]
fn child_that_verifies() {
    let Ok(store) = std::env::var("PAGEFOLD_TEST_VERIFY") else { return };
    let store = Store::open(Path::new(&store), "default").unwrap();
    println!("DAMAGED {:?}", stat::verify(&store, &[], false).unwrap().damaged);
}

#[test]
fn damage_of_a_metadata_directory_is_found() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
    sample(&tree);
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let dir = store.tree_path(&record.digest).with_extension("rootdir-shelved");
    let remove = |name: &str| fs::remove_file(dir.join(name)).unwrap();
    let spoil: [&dyn Fn(); 6] = [
        &|| remove("odd"),
        &|| fs::write(dir.join("new"), "").unwrap(),
        &|| fs::write(dir.join("inline"), "others").unwrap(),
        &|| {
            let value = format!("/{}", Digest::of(b"other").object_path());
            let name = "trusted.overlay.redirect";
            rustix::fs::setxattr(dir.join("usr/bin/tool"), name, value.as_bytes(), XattrFlags::empty()).unwrap();
        },
        &|| {
            remove("bin");
            symlink("usr", dir.join("bin")).unwrap();
        },
        &|| {
            remove("pipe");
            fs::write(dir.join("pipe"), "").unwrap();
        },
    ];
    for (number, spoil) in spoil.iter().enumerate() {
        mount::mount(&store, &record, &at, &Options { kind: Kind::Directory, ..Options::default() }).unwrap();
        umount(&at);
        assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
        spoil();
        let damaged = stat::verify(&store, &[], false).unwrap().damaged;
        assert!(damaged.len() == 1 && damaged[0].images == ["x"], "{number}: {damaged:?}");
        assert_eq!(Path::new(&damaged[0].path), dir);
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_default_acl_of_the_stores_place_is_not_the_images() {
    need_root!();
    let scratch = Scratch::new();
    let (tree, at, root, upper) = (scratch.dir("tree"), scratch.dir("mnt"), scratch.dir("store"), scratch.dir("upper"));
    // Version 2; owner, user 1000, group, mask, others.
    let mut acl = vec![2, 0, 0, 0];
    for (tag, permissions, id) in
        [(1u16, 7u16, u32::MAX), (2, 7, 1000), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)]
    {
        acl.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    for dir in [&root, &upper] {
        if rustix::fs::setxattr(dir, "system.posix_acl_default", &acl, XattrFlags::empty()).is_err() {
            println!("SKIPPED: the temporary directory's file system has no ACLs");
            return;
        }
    }
    sample(&tree);
    let store = Store::open(&root, "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    for upper in [None, Some(upper)] {
        let options = Options { kind: Kind::Directory, upper, ..Options::default() };
        mount::mount(&store, &record, &at, &options).unwrap();
        let again = Store::open(&scratch.dir("again"), "default").unwrap();
        assert_eq!(build_dir(&again, "x", &at).unwrap().digest, record.digest);
        umount(&at);
    }
}

#[test]
fn more_hard_links_than_a_file_system_has_are_mounted_as_files() {
    need_root!();
    let scratch = Scratch::new();
    let at = scratch.dir("mnt");
    let store = Store::open(&scratch.dir("store"), "default").unwrap().without_sync();
    let build = store.build().unwrap();
    let mut tree = Tree::default();
    let meta = Meta { mode: 0o644, ..Meta::default() };
    let kind = FileKind::File(build.put_bytes(&noise(1, 5000)).unwrap());
    let file = tree.add(Inode { meta, kind });
    // ext4 has 65,000.
    for number in 0..65_100 {
        tree.link(0, format!("{number}").as_bytes(), file).unwrap();
    }
    let record = build.publish("x", &tree, "test", Default::default(), vec![]).unwrap();
    let options = Options { kind: Kind::Directory, ..Options::default() };
    let mounted = mount::mount(&store, &record, &at, &options).unwrap();
    assert_eq!(fs::read_dir(&at).unwrap().count(), 65_100);
    for number in [0, 64_999, 65_000, 65_099] {
        assert_eq!(fs::read(at.join(format!("{number}"))).unwrap(), noise(1, 5000), "{number}: {:?}", mounted.notes);
    }
    umount(&at);
}

#[test]
fn the_store_of_another_user_is_left_alone() {
    need_root!();
    let scratch = Scratch::new();
    let root = scratch.dir("store");
    let give = |path: &Path, user| std::os::unix::fs::lchown(path, Some(user), Some(user)).unwrap();
    // A directory of somebody else's does not make the store his.
    give(&root, 65534);
    Store::open(&root, "default").unwrap();
    let format = root.join("pagefold-image-store");
    for top in [65534, 0] {
        give(&root, top);
        Store::open(&root, "default").unwrap();
        give(&format, 65534);
        for domain in ["default", "new"] {
            let error = Store::open(&root, domain).unwrap_err().to_string();
            assert!(error.contains("store of user 65534"), "{error}");
        }
        assert_eq!(fs::read_dir(&root).unwrap().count(), 2, "the format and the domains");
        assert!(!root.join("domains/new").exists());
        give(&format, 0);
    }
    // Nor does a link to a file of root's make his store root's.
    let own = scratch.dir("own").join("format");
    fs::rename(&format, &own).unwrap();
    symlink(&own, &format).unwrap();
    give(&format, 65534);
    Store::open(&root, "default").unwrap_err();
}

#[test]
fn a_lease_that_its_user_may_not_read_is_named() {
    need_root!();
    let scratch = Scratch::new();
    let nobody = Nobody::new(&scratch);
    let lease = nobody.store.join("domains/default/leases/0123456789abcdef");
    fs::write(&lease, [0; 32]).unwrap();
    fs::set_permissions(&lease, fs::Permissions::from_mode(0o600)).unwrap();
    let collects =
        || nobody.runs("child_that_collects", &[]).env("PAGEFOLD_TEST_COLLECT", &nobody.store).output().unwrap();
    let text = said(&collects());
    let named = format!("{}: a build or mount of user 0 has left it", lease.display());
    assert!(text.contains(&named) && !text.contains("COLLECTED"), "{text}");
    fs::remove_file(&lease).unwrap();
    assert!(said(&collects()).contains("COLLECTED"));
}

/// In a child process: mounts in the user namespace it is in, and says who has the private file and whether it opens.
#[test]
fn child_that_looks_at_owners() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_OWNERS") else { return };
    let [store, at] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("two arguments") };
    let store = Store::open(Path::new(store), "default").unwrap();
    mount::mount(&store, &store.image("user").unwrap(), Path::new(at), &Options::default()).unwrap();
    let file = Path::new(at).join("private");
    println!(
        "OWNER {} {:?}",
        fs::metadata(&file).unwrap().uid(),
        fs::read(&file).map(|bytes| bytes == noise(20, 5000))
    );
}

#[test]
fn namespaces_of_different_ids_have_metadata_of_their_own() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let nobody = Nobody::with(&scratch, |tree| {
        fs::write(tree.join("private"), noise(20, 5000)).unwrap();
        fs::set_permissions(tree.join("private"), fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(tree.join("private"), Some(33), Some(33)).unwrap();
    });
    // Both ways round: whose directory was first is not the other's.
    for (maps, owner) in [("0 65534 1\n1 100000 60000", 33), ("0 65534 1", 0), ("0 65534 1\n1 100000 60000", 33)] {
        // Who shall be root there must become it by an exec after the ids are mapped, which root does here.
        let script = "echo ready; read line; exec \"$0\" --exact child_that_looks_at_owners --nocapture";
        let mut child = Command::new("unshare")
            .args(["-Um", "sh", "-c", script])
            .arg(&nobody.program)
            .env("PAGEFOLD_TEST_OWNERS", format!("{}\n{}", nobody.store.display(), nobody.at.display()))
            .uid(65534)
            .gid(65534)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).is_ok();
        for file in ["uid_map", "gid_map"].iter().filter(|_| ready) {
            fs::write(format!("/proc/{}/{file}", child.id()), maps).unwrap();
        }
        drop(child.stdin.take());
        let out = child.wait_with_output().unwrap();
        let text = said(&out);
        if text.contains("unshare failed") || text.contains("userxattr") {
            println!("SKIPPED: rootless overlayfs is not allowed here: {text}");
            return;
        }
        assert!(text.contains(&format!("OWNER {owner} Ok(true)")), "{maps}: {text}");
    }
}

/// In a child process: removes all names and collects.
#[test]
fn child_that_collects() {
    let Ok(store) = std::env::var("PAGEFOLD_TEST_COLLECT") else { return };
    let store = Store::open(Path::new(&store), "default").unwrap();
    for image in store.images().unwrap() {
        store.remove(&image.name).unwrap();
    }
    let stats = gc::collect(&store, false).unwrap();
    println!("COLLECTED {} {} UNSEEN {}", stats.trees_removed, stats.objects_removed, stats.trees_unseen);
}

#[test]
fn a_collector_that_does_not_see_all_processes_leaves_what_they_may_have_mounted() {
    need_root!();
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    // From a PID namespace nobody outside of it is seen, and his mount namespace is not ours.
    let (tree, at, root) = (scratch.dir("own-tree"), scratch.dir("mnt"), scratch.dir("store"));
    fs::write(tree.join("file"), noise(6, 200_000)).unwrap();
    let store = Store::open(&root, "default").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &Options { kind: Kind::Directory, ..Options::default() }).unwrap();
    let mut other = Command::new("unshare")
        .args(["-m", "sh", "-c", "echo ready; read line; cat \"$0/file\" | wc -c"])
        .arg(&at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    other.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    umount(&at);
    let out = Command::new("unshare")
        .args(["-mpf", "--mount-proc", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_collects", "--nocapture"])
        .env("PAGEFOLD_TEST_COLLECT", &root)
        .output()
        .unwrap();
    drop(other.stdin.take());
    let mut count = String::new();
    other.stdout.as_mut().unwrap().read_to_string(&mut count).unwrap();
    other.wait().unwrap();
    assert!(said(&out).contains("COLLECTED 0 0 UNSEEN 1"), "{}", said(&out));
    assert_eq!(count.trim(), "200000");

    // From a user namespace a process outside of it is seen, and what it has mounted by its table only.
    let nobody = Nobody::new(&scratch);
    let mut mounted = nobody
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
        let out = nobody.runs("child_that_collects", unshare).env("PAGEFOLD_TEST_COLLECT", &nobody.store).output();
        said(&out.unwrap())
    };
    let text = if ready { collects(&["-Ur"]) } else { String::new() };
    drop(mounted.stdin.take());
    let still = lines.any(|line| line.contains("STILL true 701"));
    let mut error = String::new();
    mounted.stderr.as_mut().unwrap().read_to_string(&mut error).unwrap();
    mounted.wait().unwrap();
    if error.contains("unshare failed") || error.contains("userxattr") {
        println!("SKIPPED: rootless overlayfs is not allowed here: {error}");
        return;
    }
    assert!(text.contains("COLLECTED 0 0 "), "{text}{error}");
    assert!(still, "{error}");
    // PID_NS_INIT_INO: in a container nobody sees all.
    if fs::metadata("/proc/self/ns/pid").unwrap().ino() != 0xEFFF_FFFC {
        println!("SKIPPED the rest: not all processes are seen here");
        return;
    }
    // Who sees all collects it, whatever of his own will not be looked at beside him.
    let mut shy = nobody
        .runs("child_that_is_not_dumped", &[])
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

/// In a child process: keeps what /proc says of it to itself until it is told to end, as agents and login sessions do.
#[test]
fn child_that_is_not_dumped() {
    if std::env::var_os("PAGEFOLD_TEST_SHY").is_none() {
        return;
    }
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable).unwrap();
    println!("SHY");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// In a child process: reads a tar archive into a store as whoever it is.
#[test]
fn child_that_imports() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_IMPORT") else { return };
    let [root, tar] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("two arguments") };
    let store = Store::open(Path::new(root), "default").unwrap();
    let (build, mut tree, mut notes) = (store.build().unwrap(), Default::default(), Notes::default());
    let limits = Default::default();
    let file = fs::File::open(tar).unwrap();
    pagefold_image::ingest::apply_tar(&build, &mut tree, file, false, limits, &mut notes, &Progress::silent()).unwrap();
    build.publish("user", &tree, "tar", Default::default(), notes.lines()).unwrap();
}

#[test]
fn an_oci_runtime_takes_the_mounted_tree_as_its_root() {
    need_root!();
    let runtimes: Vec<&str> = ["crun", "runc"]
        .into_iter()
        .filter(|name| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok())
        .collect();
    if runtimes.is_empty() {
        println!("SKIPPED: neither crun nor runc is installed");
        return;
    }
    let scratch = Scratch::new();
    let tree = scratch.dir("tree");
    runnable(&tree);
    let store = Store::open(&scratch.dir("store"), "default").unwrap();
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
            // The machine's cgroups are not what this runtime takes; that is not about the tree.
            println!("SKIPPED: {runtime}: {error}");
            continue;
        }
        assert!(text.contains("from the image") && text.contains("uid=0"), "{runtime}: {text}{error}");
        ran.push(runtime);
    }
    println!("ran under: {ran:?}");
}
