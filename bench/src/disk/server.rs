//! The servers: pagefold's mount and a plain pass-through, each in a process of its own.

use super::{Failure, Scratch, THREADS};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, KernelConfig, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use pagefold_disk::mount;
use pagefold_disk::mount::Options;
use pagefold_disk::{Config, Status, control};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// A mount in another process, gone with this value.
pub(super) struct Server {
    pub(super) child: Child,
    pub(super) at: PathBuf,
    runtime: PathBuf,
}

impl Server {
    pub(super) fn start(
        scratch: &Scratch,
        kind: &str,
        directory: &Path,
        cache_mib: usize,
        fingerprints: Option<&Path>,
    ) -> Result<Self, Failure> {
        Self::start_in(scratch, kind, directory, cache_mib, fingerprints, None)
    }

    /// Another cache beside the first, at a mount point named `name`.
    pub(super) fn start_at(scratch: &Scratch, name: &str, directory: &Path, cache_mib: usize) -> Result<Self, Failure> {
        let inner = Scratch(scratch.dir(name)?);
        let server = Self::start(&inner, "cache", directory, cache_mib, None);
        // Its directory goes with the outer one, after the mount.
        std::mem::forget(inner);
        server
    }

    /// The cache, with a socket for NBD.
    pub(super) fn start_with_nbd(
        scratch: &Scratch,
        directory: &Path,
        cache_mib: usize,
        nbd: &Path,
    ) -> Result<Self, Failure> {
        Self::start_as(scratch, "cache", directory, cache_mib, None, None, Some(nbd), &[])
    }

    /// The cache, run by `under`.
    pub(super) fn start_under(
        scratch: &Scratch,
        directory: &Path,
        cache_mib: usize,
        under: &[String],
    ) -> Result<Self, Failure> {
        Self::start_as(scratch, "cache", directory, cache_mib, None, None, None, under)
    }

    /// The same, charged to a control group.
    pub(super) fn start_in(
        scratch: &Scratch,
        kind: &str,
        directory: &Path,
        cache_mib: usize,
        fingerprints: Option<&Path>,
        group: Option<&Path>,
    ) -> Result<Self, Failure> {
        Self::start_as(scratch, kind, directory, cache_mib, fingerprints, group, None, &[])
    }

    #[allow(clippy::too_many_arguments, reason = "the settings of a mount, spelled out")]
    pub(super) fn start_as(
        scratch: &Scratch,
        kind: &str,
        directory: &Path,
        cache_mib: usize,
        fingerprints: Option<&Path>,
        group: Option<&Path>,
        nbd: Option<&Path>,
        under: &[String],
    ) -> Result<Self, Failure> {
        let at = scratch.dir(&format!("mnt-{kind}"))?;
        let runtime = scratch.dir("run")?;
        let text = |path: Option<&Path>| path.map_or(String::new(), |path| path.display().to_string());
        let (fingerprints, nbd) = (text(fingerprints), text(nbd));
        let own = std::env::current_exe()?;
        let mut command = match under.split_first() {
            None => Command::new(own),
            Some((program, args)) => {
                let mut command = Command::new(program);
                command.args(args).arg(own);
                command
            }
        };
        command.args(["pagecache", "--serve", kind]).args([directory, &at]).args([
            cache_mib.to_string(),
            fingerprints,
            nbd,
        ]);
        if let Some(group) = group {
            crate::vm::join_group(&mut command, group);
        }
        let child = command.env("PAGEFOLD_RUNTIME_DIR", &runtime).stdin(Stdio::null()).spawn()?;
        let mut server = Self { child, at, runtime };
        let device = server.at.parent().ok_or("no parent")?.metadata()?.dev();
        let started = Instant::now();
        while server.at.metadata()?.dev() == device || (kind == "cache" && server.status().is_err()) {
            if server.child.try_wait()?.is_some() || started.elapsed() > Duration::from_secs(20) {
                return Err(format!("the {kind} server does not come up").into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(super) fn status(&self) -> Result<Status, Failure> {
        let name = control::socket_path(&self.at);
        let name = name.file_name().ok_or("no name")?;
        Ok(control::ask_status(&self.runtime.join(name))?)
    }

    /// Memory of the process beyond what an idle one has: resident anonymous bytes.
    pub(super) fn anonymous_bytes(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The signal that asks: fingerprints are kept at a clean end.
        // SAFETY: the child is ours and not reaped yet, so its id is still its own.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let _ = self.child.wait();
        let _ = mount::unmount(&self.at, true);
    }
}

pub(super) fn serve(
    kind: &str,
    directory: &Path,
    at: &Path,
    cache_mib: usize,
    fingerprints: &str,
    nbd: &str,
) -> Result<(), Failure> {
    if kind == "plain" {
        return serve_plain(directory, at);
    }
    let options = Options {
        directory: directory.to_owned(),
        mountpoint: at.to_owned(),
        config: Config {
            cache_bytes: cache_mib << 20,
            // Under `pagefold run`, as the tool's own mount does.
            merge: std::env::var_os("PAGEFOLD_SOCKET").is_some(),
            ..Config::default()
        },
        threads: THREADS,
        fingerprints: (!fingerprints.is_empty()).then(|| PathBuf::from(fingerprints)),
        read_only: false,
        allow_other: false,
        nbd: (!nbd.is_empty()).then(|| PathBuf::from(nbd)),
        grace: Duration::from_secs(1),
    };
    Ok(mount::serve(&options, |_| ())?)
}

/// The plain peer: hands every read on to the file below, with the same threads and flags.
struct Plain {
    files: Vec<(std::ffi::OsString, File)>,
}

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Plain {
    fn attr(&self, number: u64) -> Option<FileAttr> {
        let (size, kind) = match number {
            1 => (0, FileType::Directory),
            n => (self.files.get(n as usize - 2)?.1.metadata().ok()?.len(), FileType::RegularFile),
        };
        Some(FileAttr {
            ino: INodeNo(number),
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Plain {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let _ = config.add_capabilities(fuser::InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let at = self.files.iter().position(|(file, _)| file == name);
        match at.and_then(|at| self.attr(at as u64 + 2)) {
            Some(attr) => reply.entry(&Duration::from_secs(1), &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(number.0) {
            Some(attr) => reply.attr(&Duration::from_secs(1), &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(number.0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<fuser::LockOwner>,
        reply: ReplyData,
    ) {
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            match self.files[handle.0 as usize - 2].1.read_at(&mut buffer[..size as usize], offset) {
                Ok(count) => reply.data(&buffer[..count]),
                Err(_) => reply.error(Errno::EIO),
            }
        });
    }
}

fn serve_plain(directory: &Path, at: &Path) -> Result<(), Failure> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        files.push((entry.file_name(), File::open(entry.path())?));
    }
    let mut config = fuser::Config::default();
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    config.mount_options = vec![fuser::MountOption::FSName("plain".to_owned())];
    Ok(fuser::mount(Plain { files }, at, &config)?)
}
