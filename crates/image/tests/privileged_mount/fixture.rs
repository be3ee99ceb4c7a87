//! What the tests share: a store, a tree and a mount point in a temporary directory.

use crate::common::build_dir;
use crate::executable;
pub use crate::scratch::{Scratch, umount, unmount};
use pagefold_image::mount::{MountKind, Options};
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::{Result, export, stat};
use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A store, and in the same directory a tree to build images from and a place to mount them.
pub struct Fixture {
    pub scratch: Scratch,
    pub tree: PathBuf,
    pub at: PathBuf,
    pub store: Store,
}

impl Fixture {
    /// `None` after saying why privileged tests cannot run here.
    pub fn new() -> Option<Self> {
        let scratch = Scratch::new()?;
        let (tree, at) = (scratch.dir("tree"), scratch.dir("mnt"));
        let store = Store::open(&scratch.dir("store"), "default").unwrap();
        Some(Self { scratch, tree, at, store })
    }
}

/// The options of a mount of that kind.
pub fn by(kind: MountKind) -> Options {
    Options { kind, ..Options::default() }
}

/// Drops the file's pages from the page cache, as after a restart. The kernel passes over a page that it moves at this
/// moment, so this tries several times. Some file systems keep all.
pub fn drop_cache(path: &Path) {
    let file = fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    for _ in 0..8 {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if stat::resident_bytes(path, false).unwrap() == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Locks the pages of a file in the page cache: until it is dropped the kernel evicts none of them.
pub struct InMemory(*mut std::ffi::c_void, usize);

impl InMemory {
    /// Brings all of a file in.
    pub fn new(path: &Path) -> InMemory {
        let file = fs::File::open(path).unwrap();
        let size = file.metadata().unwrap().len() as usize;
        // SAFETY: a new mapping at an address of the kernel's choice, of which no byte is used.
        unsafe {
            let map =
                rustix::mm::mmap(std::ptr::null_mut(), size, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap();
            rustix::mm::mlock(map, size).unwrap();
            InMemory(map, size)
        }
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and there is no reference to its bytes.
        unsafe { rustix::mm::munmap(self.0, self.1).unwrap() };
    }
}

/// Makes files in the new directory `dir` until the file system has no inode left.
pub fn use_all_inodes(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let full = (0..).map(|number| fs::File::create(dir.join(format!("{number}")))).find_map(Result::err);
    assert_eq!(full.unwrap().raw_os_error(), Some(libc::ENOSPC));
}

/// Whether `text`, which a process in a user namespace has printed, says that this machine does not allow rootless
/// overlayfs; reports that the test is skipped.
pub fn rootless_refused(text: &str) -> bool {
    let refused = text.contains("unshare failed") || text.contains("userxattr");
    if refused {
        println!("SKIPPED: rootless overlayfs is not allowed here: {text}");
    }
    refused
}

pub fn noise(seed: u32, size: usize) -> Vec<u8> {
    (0..size as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 23) as u8).collect()
}

/// One of every kind of file, with those that only root can make.
pub fn sample(dir: &Path) {
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
    // Owner, a user, owning group, mask, others.
    let acl: Vec<u8> = [(1, 6, u32::MAX), (2, 7, 1234), (4, 4, u32::MAX), (16, 7, u32::MAX), (32, 4, u32::MAX)]
        .into_iter()
        .flat_map(|(tag, bits, id): (u32, u32, u32)| [(tag | bits << 16).to_le_bytes(), id.to_le_bytes()].concat())
        .collect();
    let acl = [&2u32.to_le_bytes()[..], &acl].concat();
    for (name, kind) in [("inline", "access"), ("odd", "access"), ("usr", "access"), ("usr", "default")] {
        let _ = rustix::fs::setxattr(dir.join(name), format!("system.posix_acl_{kind}"), &acl, XattrFlags::empty());
    }
}

/// For each test that makes a mount namespace, runs a command in an image, or checks what is collected or no longer in use:
/// one at a time. A new namespace copies all mounts, so what another test has unmounted here is still mounted there; and
/// metadata directories stay while some process sees only a part of its namespace.
pub fn alone() -> MutexGuard<'static, ()> {
    static NAMESPACES: Mutex<()> = Mutex::new(());
    NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The files below a directory, with their inode numbers.
pub fn inodes(dir: &Path) -> Vec<(PathBuf, u64)> {
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

/// A tree in which sh, cat, id, ls and touch run.
pub fn runnable(dir: &Path) {
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

/// A command that executes `command` in the image.
pub fn exec_in(store: &Path, mode: &str, command: &str) -> Command {
    let arguments = format!("{}\nrun\n{mode}\n{command}", store.display());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "children::child_that_execs", "--nocapture"]).env("PAGEFOLD_TEST_EXEC", arguments);
    child
}

/// Runs `command` in the image, `ro`, `rw` or to `learn`; returns its output. The exec ends the threads of the test harness.
pub fn run_in(store: &Path, mode: &str, command: &str) -> String {
    let out = exec_in(store, mode, command).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    text
}

/// A plain user's store with the sample as image `user`, a place to mount it, and a copy of this program that the user may
/// run.
pub struct PlainUser {
    pub program: PathBuf,
    pub store: PathBuf,
    pub at: PathBuf,
}

impl PlainUser {
    pub fn new(scratch: &Scratch) -> Self {
        Self::with(scratch, |_| {})
    }

    /// With what `more` adds to the sample.
    pub fn with(scratch: &Scratch, more: impl FnOnce(&Path)) -> Self {
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (tree, at, store) = (scratch.dir("tree"), scratch.dir("users-mnt"), scratch.dir("users-store"));
        sample(&tree);
        more(&tree);
        for dir in [&store, &at] {
            std::os::unix::fs::chown(dir, Some(65534), Some(65534)).unwrap();
        }
        let program = scratch.path().join("test-program");
        executable::copy(&std::env::current_exe().unwrap(), &program);
        // The image comes from a tar archive, which has devices and owners that the user may not make.
        let tar = scratch.path().join("tree.tar");
        let own = Store::open(&scratch.dir("root-store"), "default").unwrap();
        let record = build_dir(&own, "x", &tree).unwrap();
        let mut out = fs::File::create(&tar).unwrap();
        export::tar(&own, &own.tree(&record.digest).unwrap(), &mut out, &Progress::silent()).unwrap();
        let user = Self { program, store, at };
        let out = user
            .runs("children::child_that_imports", &[])
            .env("PAGEFOLD_TEST_IMPORT", format!("{}\n{}", user.store.display(), tar.display()))
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", said(&out));
        user
    }

    /// Runs a test of this program as the user, by `unshare` if that has arguments.
    pub fn runs(&self, test: &str, unshare: &[&str]) -> Command {
        let mut command = Command::new(if unshare.is_empty() { self.program.as_path() } else { Path::new("unshare") });
        if !unshare.is_empty() {
            command.args(unshare).arg("--").arg(&self.program);
        }
        command.uid(65534).gid(65534).current_dir("/").args(["--exact", test, "--nocapture"]);
        command
    }

    /// Mounts in a user namespace.
    pub fn mounts(&self) -> Command {
        let mut command = self.runs("children::child_that_mounts_rootless", &["-Urm"]);
        command.env("PAGEFOLD_TEST_ROOTLESS", format!("{}\n{}", self.store.display(), self.at.display()));
        command
    }
}

/// Both outputs of a process.
pub fn said(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}
