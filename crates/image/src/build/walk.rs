//! The walk over a source directory: names and metadata go into the tree, and regular files are listed to be read.

use super::omissions::{Omissions, WHITEOUT, clean_xattrs, is_whiteout};
use super::source::{
    GONE, OpenFile, SourceDirectory, file_state, is_mounted, last_name, meta, names, read_xattrs, stat_and_target,
};
use crate::error::{At, Result};
use crate::format::erofs;
use crate::store::FileState;
use crate::tree::{Data, FileKind, Id, Inode, Meta, ROOT, Tree, Xattrs};
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How to read a directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Do not go into other file systems: their directories are empty in the image.
    pub one_file_system: bool,
    /// Hash every file, whatever the stat cache says.
    pub rehash: bool,
}

/// A regular file that is still to be read.
pub(super) struct FoundFile {
    pub(super) id: Id,
    /// Directory and path of each of its names.
    pub(super) names: Vec<(Id, PathBuf)>,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) state: FileState,
}

impl FoundFile {
    /// Opens the file by a name that it still has; `None` if it has none any more. If one of several names changed since
    /// the walk, names may be gone, or lead to another file with the same inode number: then each name is read by itself.
    pub(super) fn open(&self, source: &SourceDirectory) -> Result<Option<OpenFile>> {
        let is_same = |stat: &Stat| {
            (stat.st_dev, stat.st_ino) == (self.device, self.inode)
                && (self.names.len() == 1 || file_state(stat) == self.state)
        };
        for (_, path) in &self.names {
            let found = source.open_file(path)?;
            if found.as_ref().is_some_and(|found| is_same(&found.stat)) {
                return Ok(found);
            }
        }
        Ok(None)
    }
}

/// What the walk found.
pub(super) struct Walked {
    /// The tree; its regular files are empty.
    pub(super) tree: Tree,
    /// The regular files.
    pub(super) files: Vec<FoundFile>,
    /// Their bytes.
    pub(super) bytes: u64,
}

/// Why directories are empty with `one_file_system`.
const ELSEWHERE: &str = "directories on other file systems are empty in the image";

struct Walk<'a> {
    source: &'a SourceDirectory,
    store_root: &'a Path,
    options: Options,
    omissions: &'a mut Omissions,
    /// The file system of the source.
    device: u64,
    walked: Walked,
    /// Files with several names, by file system and inode: the tree's number, and the index among the files to read.
    linked: HashMap<(u64, u64), (Id, Option<usize>)>,
    /// Directories that are still to be read: parent, number and path.
    todo: Vec<(Id, Id, PathBuf)>,
}

/// Walks over `source`. The store at `store_root` is left out.
pub(super) fn walk(
    source: &SourceDirectory,
    store_root: &Path,
    options: Options,
    omissions: &mut Omissions,
) -> Result<Walked> {
    let stat = source.stat_root()?;
    let mut xattrs = source.root_xattrs()?;
    clean_xattrs(&mut xattrs, b"/", omissions);
    let mut tree = Tree::default();
    tree.inode_mut(ROOT).meta = meta(&stat, xattrs);
    let mut walk = Walk {
        source,
        store_root,
        options,
        omissions,
        device: stat.st_dev,
        walked: Walked { tree, files: Vec::new(), bytes: 0 },
        linked: HashMap::new(),
        todo: vec![(ROOT, ROOT, PathBuf::new())],
    };
    while let Some((parent, id, path)) = walk.todo.pop() {
        walk.directory(parent, id, &path)?;
    }
    Ok(walk.walked)
}

impl Walk<'_> {
    /// Reads the directory `path`.
    fn directory(&mut self, parent: Id, id: Id, path: &Path) -> Result<()> {
        let Some(dir) = self.source.open_dir(path)? else {
            self.omissions.add(GONE, path.as_os_str().as_bytes());
            self.walked.tree.unlink(parent, last_name(path));
            return Ok(());
        };
        if !path.as_os_str().is_empty() && pagefold_os::filesystem::is_pseudo(&dir) {
            let reason = "directories of the kernel's own files (proc, sysfs) are empty in the image";
            self.omissions.add(reason, path.as_os_str().as_bytes());
            return Ok(());
        }
        names(&dir, &self.source.full(path))?.iter().try_for_each(|name| self.entry(&dir, id, path, name))
    }

    /// Adds `name` of the directory `dir` to the tree.
    fn entry(&mut self, dir: &OwnedFd, dir_id: Id, dir_path: &Path, name: &[u8]) -> Result<()> {
        let os_name = OsStr::from_bytes(name);
        let path = dir_path.join(os_name);
        let full = self.source.full(&path);
        let (stat, target) = match stat_and_target(dir, os_name) {
            Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ACCESS) if self.options.one_file_system && is_mounted(dir, os_name, self.device) => {
                return self.closed_mount_point(dir_id, name, &path);
            }
            other => other.at(&full)?,
        };
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        // A mount point is a directory that programs expect, even if it is empty.
        let is_elsewhere = self.options.one_file_system && stat.st_dev != self.device;
        if is_elsewhere && is_dir {
            self.omissions.add(ELSEWHERE, path.as_os_str().as_bytes());
        } else if is_elsewhere {
            self.omissions.add("files on other file systems were left out", path.as_os_str().as_bytes());
            return Ok(());
        }
        if !is_dir && stat.st_nlink > 1 && self.add_name(dir_id, name, &path, &stat)? {
            return Ok(());
        }
        if is_dir && full == self.store_root {
            self.omissions.add("the store itself was left out", full.as_os_str().as_bytes());
            return Ok(());
        }
        let kind = kind(&stat, target, &full)?;
        if is_whiteout(&kind) {
            self.omissions.add(WHITEOUT, name);
            return Ok(());
        }
        let mut xattrs = match read_xattrs(dir, os_name) {
            Err(Errno::NOENT) => return Ok(()),
            // A user's own FUSE mount refuses root.
            Err(_) if is_elsewhere => Xattrs::new(),
            other => other.at(&full)?,
        };
        clean_xattrs(&mut xattrs, name, self.omissions);
        let is_file = matches!(kind, FileKind::File(_));
        let id = self.walked.tree.add(Inode { meta: meta(&stat, xattrs), kind });
        self.walked.tree.link(dir_id, name, id)?;
        if !is_dir && stat.st_nlink > 1 {
            let index = is_file.then_some(self.walked.files.len());
            self.linked.insert((stat.st_dev, stat.st_ino), (id, index));
        }
        if is_file {
            self.add_file(id, dir_id, path, &stat);
        } else if is_dir && !is_elsewhere {
            self.todo.push((dir_id, id, path));
        }
        Ok(())
    }

    /// Adds an empty directory in the place of a mount that this user may not look at.
    fn closed_mount_point(&mut self, dir_id: Id, name: &[u8], path: &Path) -> Result<()> {
        self.omissions.add(ELSEWHERE, path.as_os_str().as_bytes());
        let meta = Meta { mode: 0o755, ..Meta::default() };
        let id = self.walked.tree.add(Inode { meta, kind: FileKind::Dir(BTreeMap::new()) });
        self.walked.tree.link(dir_id, name, id)
    }

    /// Adds one more name of a file that the walk has seen; returns false if it has not.
    fn add_name(&mut self, dir_id: Id, name: &[u8], path: &Path, stat: &Stat) -> Result<bool> {
        let Some(&(id, index)) = self.linked.get(&(stat.st_dev, stat.st_ino)) else { return Ok(false) };
        self.walked.tree.link(dir_id, name, id)?;
        if let Some(index) = index {
            self.walked.files[index].names.push((dir_id, path.to_path_buf()));
        }
        Ok(true)
    }

    /// Lists a regular file to be read.
    fn add_file(&mut self, id: Id, dir_id: Id, path: PathBuf, stat: &Stat) {
        let state = file_state(stat);
        self.walked.bytes += state.size;
        let (device, inode) = (stat.st_dev, stat.st_ino);
        self.walked.files.push(FoundFile { id, names: vec![(dir_id, path)], device, inode, state });
    }
}

/// The kind of a file, by what stat said; a regular file is empty.
pub(super) fn kind(stat: &Stat, target: Box<[u8]>, full: &Path) -> Result<FileKind> {
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    Ok(match stat.st_mode & libc::S_IFMT {
        libc::S_IFDIR => FileKind::Dir(BTreeMap::new()),
        libc::S_IFLNK => FileKind::Symlink(target),
        libc::S_IFCHR => FileKind::Char(major, minor),
        libc::S_IFBLK => FileKind::Block(major, minor),
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        _ => {
            erofs::check_size(stat.st_size as u64, || full.display().to_string())?;
            FileKind::File(Data::Inline(Box::default()))
        }
    })
}
