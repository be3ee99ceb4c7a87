//! The servers: pagefold's mount and a plain pass-through, each in a process of its own.

use crate::process::{self, Failure, wait_for};
use crate::scratch::Scratch;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, KernelConfig, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use pagefold_disk::mount;
use pagefold_disk::{Status, control};
use pagefold_os::procfs;
use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

const THREADS: usize = 8;

/// What a server mounts, and how.
#[derive(Clone, Default)]
pub(super) struct Mount {
    /// `cache`, `ring` for the same by rings, or `plain` for the pass-through.
    pub(super) kind: String,
    /// The directory that it serves.
    pub(super) directory: PathBuf,
    pub(super) cache_mib: usize,
    /// The mount's transport; empty for the default.
    pub(super) transport: &'static str,
    /// Where fingerprints are kept, if anywhere.
    pub(super) fingerprints: Option<PathBuf>,
    /// A socket for NBD.
    pub(super) nbd: Option<PathBuf>,
    /// The control group that the server is charged to.
    pub(super) group: Option<PathBuf>,
    /// Words of a program that runs the server.
    pub(super) under: Vec<String>,
}

impl Mount {
    /// The deduplicated cache over this directory.
    pub(super) fn cache(directory: &Path) -> Mount {
        Mount { kind: "cache".into(), directory: directory.to_owned(), ..Mount::default() }
    }
}

/// A mount in another process, unmounted with this value.
pub(super) struct Server {
    pub(super) child: Child,
    pub(super) at: PathBuf,
    runtime: PathBuf,
}

impl Server {
    pub(super) fn start(scratch: &Scratch, mount: Mount) -> Result<Self, Failure> {
        let at = scratch.sub(&format!("mnt-{}", mount.kind))?;
        let runtime = scratch.sub("run")?;
        let mut command = match &*mount.kind {
            "plain" => {
                let mut command = process::own("pagecache")?;
                command.arg("--serve");
                command
            }
            _ => {
                let words = [&mount.under[..], &[process::tool()?.display().to_string()]].concat();
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]).args(["disk", "mount", "--shutdown-grace=1s"]);
                command.arg(format!("--cache-size={}M", mount.cache_mib)).arg(format!("--workers={THREADS}"));
                command.args((!mount.transport.is_empty()).then(|| format!("--transport={}", mount.transport)));
                for (option, path) in [("--fingerprints", &mount.fingerprints), ("--nbd", &mount.nbd)] {
                    command.args(path.iter().flat_map(|path| [option.as_ref(), path.as_os_str()]));
                }
                command
            }
        };
        command.arg(&mount.directory).arg(&at);
        if let Some(group) = &mount.group {
            crate::group::join(&mut command, group);
        }
        let child = command.env("PAGEFOLD_RUNTIME_DIR", &runtime).stdin(Stdio::null()).spawn()?;
        let mut server = Self { child, at, runtime };
        let device = server.at.parent().ok_or("no parent")?.metadata()?.dev();
        wait_for(&format!("the {} server", mount.kind), Duration::from_secs(20), || {
            let ended = server.child.try_wait().is_ok_and(|status| status.is_some());
            let is_mounted = server.at.metadata().is_ok_and(|at| at.dev() != device);
            (ended || is_mounted && (mount.kind == "plain" || server.status().is_ok())).then_some(())
        })?;
        match server.child.try_wait()? {
            Some(status) => Err(format!("the {} server ended: {status}", mount.kind).into()),
            None => Ok(server),
        }
    }

    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(super) fn status(&self) -> Result<Status, Failure> {
        let name = control::socket_path(&self.at);
        let name = name.file_name().ok_or("no name")?;
        Ok(control::ask_status(&self.runtime.join(name))?)
    }

    /// Resident anonymous bytes of the process.
    pub(super) fn anonymous_bytes(&self) -> Result<u64, Failure> {
        Ok(procfs::field(&procfs::status(self.pid()), "RssAnon").ok_or("no RssAnon")? << 10)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // By a signal that asks: fingerprints are kept at a clean end.
        // SAFETY: kill(2) takes no pointer; the child is not reaped yet, so the id is still its own.
        unsafe { libc::kill(self.pid(), libc::SIGTERM) };
        let _ = self.child.wait();
        let _ = mount::unmount(&self.at, true);
    }
}

/// The plain peer: passes every read on to the file below, with the same threads and flags.
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

/// The plain server's process.
pub(super) fn serve_plain(directory: &Path, at: &Path) -> Result<(), Failure> {
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
