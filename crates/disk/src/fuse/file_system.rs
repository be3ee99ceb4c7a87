//! The file system's state: its nodes, open files and open directories.

use super::nodes::{DirEntry, Node, Nodes, ROOT};
use crate::engine::Engine;
use crate::error::Error;
use crate::file::FileKey;
use crate::handle::Handle;
use fuser::{FileHandle, FopenFlags, INodeNo};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long the kernel may cache names and attributes. It sees changes through the mount immediately, and changes in the
/// directory itself at most this much later.
pub(super) const CACHE_TIME: Duration = Duration::from_secs(1);
/// Largest request: the kernel's default limit for FUSE.
pub(super) const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// How the kernel treats an open image.
pub(super) const OPEN_FLAGS: FopenFlags = FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// The file system.
pub struct DiskFs {
    pub(super) engine: Arc<Engine>,
    pub(super) nodes: RwLock<Nodes>,
    pub(super) handles: RwLock<HashMap<u64, Arc<Handle>>>,
    pub(super) directories: RwLock<HashMap<u64, Arc<Vec<DirEntry>>>>,
    pub(super) next_handle: AtomicU64,
    /// Buffers for read replies, which the kernel takes in one piece. The buffer used last is used next, by any worker,
    /// because it is still in the processor's cache.
    pub(super) buffers: Mutex<Vec<Vec<u8>>>,
    pub(super) is_root: bool,
}

impl DiskFs {
    /// Makes the file system of `engine`'s directory.
    ///
    /// # Errors
    /// The directory's attributes cannot be read.
    pub fn new(engine: Arc<Engine>) -> io::Result<Self> {
        let root = rustix::fs::fstat(engine.directory())?;
        let root = (root.st_dev, root.st_ino);
        let mut nodes = Nodes { by_number: HashMap::new(), by_key: HashMap::new(), next_foreign: 0, root };
        nodes.number(root);
        nodes.by_number.insert(ROOT, Node { names: Vec::new(), key: root, lookups: u64::MAX / 2 });
        Ok(Self {
            engine,
            nodes: RwLock::new(nodes),
            handles: RwLock::default(),
            directories: RwLock::default(),
            next_handle: AtomicU64::new(1),
            buffers: Mutex::default(),
            is_root: rustix::process::geteuid().is_root(),
        })
    }

    pub(super) fn handle(&self, number: FileHandle) -> Result<Arc<Handle>, Error> {
        let handle = self.handles.read().get(&number.0).cloned();
        handle.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF).into())
    }

    pub(super) fn register(&self, handle: Handle) -> FileHandle {
        let number = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.handles.write().insert(number, Arc::new(handle));
        FileHandle(number)
    }

    pub(super) fn open_number(&self, number: INodeNo, writable: bool) -> io::Result<Handle> {
        match (self.path(number), self.key(number)) {
            (Ok(path), _) => self.engine.open(&path, writable),
            // Its last name is gone, but a process can still open it through a descriptor.
            (Err(_), Some(key)) => self.engine.open_by_key(key, writable),
            (Err(error), None) => Err(error),
        }
    }

    pub(super) fn close(&self, number: FileHandle) {
        let closed = self.handles.write().remove(&number.0);
        // Without the lock: the last handle of an image may have work to do.
        drop(closed);
    }

    pub(super) fn check_changeable(&self) -> io::Result<()> {
        if self.engine.read_only() { Err(io::Error::from_raw_os_error(libc::EROFS)) } else { Ok(()) }
    }

    pub(super) fn path(&self, number: INodeNo) -> io::Result<PathBuf> {
        self.nodes.read().path(number.0).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))
    }

    pub(super) fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        // Not `./name` in the root, because images are named by their paths.
        Ok(if parent.0 == ROOT { PathBuf::from(name) } else { self.path(parent)?.join(name) })
    }

    pub(super) fn key(&self, number: INodeNo) -> Option<FileKey> {
        self.nodes.read().by_number.get(&number.0).map(|node| node.key)
    }

    pub(super) fn forget_number(&self, number: u64, count: u64) {
        let mut nodes = self.nodes.write();
        if let Some(node) = nodes.by_number.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(count);
            if node.lookups == 0 {
                let key = node.key;
                nodes.by_number.remove(&number);
                nodes.by_key.remove(&key);
            }
        }
    }
}
