//! A client waits in the kernel for a server of files that does not answer, and holds the lock of its memory meanwhile. No
//! other program and no operator waits with it.

mod common;

use common::cold::{Compiled, Host, Served, compiled};
use common::{can_merge, comes, is_root, skipped, wait_for};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use pagefold_os::{patience, smaps};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, UNIX_EPOCH};

/// The client, compiled once.
fn program() -> Option<&'static Path> {
    static BUILT: Compiled = OnceLock::new();
    compiled(&BUILT, "stuck", || is_root() && can_merge())
}

/// A file of one page. What is read of it waits in the channel for its answer.
struct Silent(Mutex<Sender<ReplyData>>);

fn attributes(number: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: if number == 1 { 0 } else { 4096 },
        blocks: 8,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if number == 1 { FileType::Directory } else { FileType::RegularFile },
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Silent {
    fn lookup(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEntry) {
        reply.entry(&Duration::from_secs(600), &attributes(2), Generation(0));
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::from_secs(600), &attributes(number.0));
    }

    fn open(&self, _request: &Request, _number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(1), FopenFlags::empty());
    }

    fn read(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        _size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _ = pagefold_os::sync::lock(&self.0).send(reply);
    }
}

/// The server, and what is asked of it.
struct Server {
    asked: Receiver<ReplyData>,
    /// The answer that a client waits for while it holds the lock of its memory. Before the mount, which ends after it.
    owed: Option<ReplyData>,
    path: PathBuf,
    _mount: BackgroundSession,
}

impl Server {
    fn start(host: &Host) -> Server {
        let at = host.dir.path().join("files");
        std::fs::create_dir(&at).expect("a directory");
        let (tell, asked) = channel();
        let mount = fuser::spawn_mount(Silent(Mutex::new(tell)), &at, &Config::default()).expect("a mount");
        Server { asked, owed: None, path: at.join("file"), _mount: mount }
    }

    /// Has the client wait. The kernel reads for a fault without the lock at first; after a failure it reads again with it.
    fn keep_waiting(&mut self, client: &mut Served) {
        client.says(&format!("map {}", self.path.display()));
        let ask = || self.asked.recv_timeout(Duration::from_secs(60)).expect("the client reads");
        ask().error(Errno::EIO);
        self.owed = Some(ask());
        client.says("wait");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The client has the file mapped still, so the mount only loses its name.
        let _ = pagefold_disk::mount::unmount(self.path.parent().expect("the mount"), true);
    }
}

#[test]
fn a_client_that_waits_for_its_files_keeps_no_other_waiting() {
    let Some(program) = program() else { return };
    if !Path::new("/dev/fuse").exists() {
        return skipped("this kernel has no FUSE");
    }
    // Its only worker waits as well, until another one takes its place.
    let host = Host::start(&["--no-keeper", "--workers", "1"]);
    let mut stuck = Served::start_live_of(&host, program);
    // Gone before the client is waited for, also where this test fails.
    let mut server = Server::start(&host);
    let pid = stuck.pid();
    let pages = |pid: i32, name: &str| {
        let status = host.status();
        let client = status["clients"].as_array().expect("a list").iter().find(|client| client["pid"] == pid).cloned();
        client.map_or(0, |client| client["stats"][name].as_u64().unwrap_or_default())
    };
    wait_for("the client to be looked at", 60, || pages(pid, "pages_unshared") >= 4096);
    server.keep_waiting(&mut stuck);
    let is_read = move || patience::within(Duration::from_secs(1), move || smaps::of_process(pid, |_| ()).is_ok());
    if !comes(10, || is_read().is_none()) {
        drop(server);
        return skipped("this kernel lets no reader of such a client wait");
    }
    // Until the daemon looks at its clients again, and a worker has waited for long.
    for _ in 0..6 {
        std::thread::sleep(Duration::from_secs(2));
        host.status();
    }
    let mut others = [(); 2].map(|()| Served::start_live_of(&host, program));
    wait_for("the others to be merged", 60, || others.iter().all(|other| pages(other.pid(), "pages_sharing") >= 4096));
    for other in &mut others {
        other.says("check");
    }
    server.owed.take().expect("the client waits").data(&[7; 4096]);
    stuck.says("join");
    stuck.says("check");
    wait_for("it to be merged as well", 120, || pages(pid, "pages_sharing") >= 4096);
    host.verify();
}
