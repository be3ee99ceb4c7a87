//! Names: looking up, listing, creating, renaming and removing in the host's directory.
//!
//! Each change is made on the host first, through the engine if it may concern an image; then the nodes follow.

use super::attributes::kind_of;
use super::file_system::DiskFs;
use super::nodes::{DirEntry, Node, ROOT};
use crate::file::{EntryName, FileKey, HostFile, key_of, open_beneath, stat_beneath};
use fuser::{FileAttr, FileHandle, INodeNo, RenameFlags};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The user that a request is made for.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Returns true if a file has no name left. Called after the change that removed one, because the file may have got
/// another name meanwhile.
fn has_no_name(file: impl AsFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink == 0)
}

impl DiskFs {
    /// Looks up a name for the kernel, which refers to the node until it sends a forget.
    pub(super) fn look_up(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let path = self.child(parent, name)?;
        let stat = stat_beneath(self.engine.directory(), &path)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut nodes = self.nodes.write();
        let number = nodes.number(key);
        let node = nodes.by_number.entry(number).or_insert_with(|| Node { names: Vec::new(), key, lookups: 0 });
        node.key = key;
        node.add_name(parent, name);
        node.lookups += 1;
        drop(nodes);
        Ok(self.attributes(number, &stat))
    }

    fn list(&self, number: INodeNo) -> io::Result<Vec<DirEntry>> {
        let path = self.path(number)?;
        let directory = open_beneath(self.engine.directory(), &path, OFlags::DIRECTORY | OFlags::RDONLY)?;
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::new(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            entries.push(DirEntry {
                number: entry.ino().max(ROOT + 1),
                kind: kind_of(entry.file_type()),
                name: std::os::unix::ffi::OsStringExt::from_vec(name.to_vec()),
            });
        }
        Ok(entries)
    }

    /// The owner to set on a new file; `None` to leave it as created.
    fn owner_of_new(&self, caller: Caller) -> Option<(rustix::fs::Uid, rustix::fs::Gid)> {
        let Caller { uid, gid } = caller;
        let wanted = self.is_root && (uid, gid) != (0, 0);
        wanted.then(|| (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid)))
    }

    fn set_owner(&self, caller: Caller, entry: &EntryName<'_>) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner_of_new(caller) {
            rustix::fs::chownat(entry.parent(), entry.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    pub(super) fn rename_node(
        &self,
        (parent, name): (INodeNo, &OsStr),
        (new_parent, new_name): (INodeNo, &OsStr),
        flags: RenameFlags,
    ) -> io::Result<()> {
        self.check_changeable()?;
        let from = self.child(parent, name)?;
        let to = self.child(new_parent, new_name)?;
        let source = self.engine.open_path(&from)?;
        let target = self.engine.open_path(&to).ok();
        let source_key = key_of(&source)?;
        let target_stat = target.as_ref().map(rustix::fs::fstat).transpose()?;
        let host_flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let (old, new) = (self.engine.entry_name(&from)?, self.engine.entry_name(&to)?);
        let rename = || Ok(rustix::fs::renameat_with(old.parent(), old.name, new.parent(), new.name, host_flags)?);
        match &target {
            // The target loses its name, or exchanges it.
            Some(target) => self.engine.change_metadata_of_two(&source, target, rename)?,
            None => self.engine.change_metadata(&source, rename)?,
        }
        let mut nodes = self.nodes.write();
        let mut moved = |key: FileKey, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)| {
            let number = nodes.by_key.get(&key).copied();
            if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
                node.remove_name(from.0, from.1);
                node.add_name(to.0, to.1);
            }
        };
        let exchanged = flags.contains(RenameFlags::RENAME_EXCHANGE);
        let target_key = target_stat.map(|target| (target.st_dev, target.st_ino));
        // If both names belong to one file, rename changes nothing.
        if target_key != Some(source_key) {
            moved(source_key, (parent, name), (new_parent, new_name));
            if let (true, Some(key)) = (exchanged, target_key) {
                moved(key, (new_parent, new_name), (parent, name));
            }
            // A replaced file loses the name, although it may still be open.
            let number = target_key.filter(|_| !exchanged).and_then(|key| nodes.by_key.get(&key).copied());
            if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
                node.remove_name(new_parent, new_name);
            }
        }
        drop(nodes);
        if let Some(image) = self.engine.cached_image(source_key) {
            image.set_name(&to.to_string_lossy());
        }
        match target_key.filter(|key| *key != source_key) {
            Some(key) if exchanged => {
                if let Some(image) = self.engine.cached_image(key) {
                    image.set_name(&from.to_string_lossy());
                }
            }
            Some(key) if target.is_some_and(has_no_name) => self.engine.note_unlinked(key),
            _ => {}
        }
        Ok(())
    }

    pub(super) fn remove(&self, parent: INodeNo, name: &OsStr) -> io::Result<()> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let file = self.engine.open_path(&path)?;
        let key = key_of(&file)?;
        let entry = self.engine.entry_name(&path)?;
        self.engine
            .change_metadata(&file, || Ok(rustix::fs::unlinkat(entry.parent(), entry.name, AtFlags::empty())?))?;
        if has_no_name(&file) {
            self.engine.note_unlinked(key);
        }
        let mut nodes = self.nodes.write();
        let number = nodes.by_key.get(&key).copied();
        if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
            node.remove_name(parent, name);
        }
        Ok(())
    }

    /// Creates a file and opens it; `None` if it exists already and need not be new.
    fn create_file(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> io::Result<Option<HostFile>> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let entry = self.engine.entry_name(&path)?;
        let open = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // The creating process may write through its descriptor whatever the mode, so this one must be able to. It opens
        // the file a second time, for which the mode counts.
        let file = match rustix::fs::openat(entry.parent(), entry.name, open, Mode::from_raw_mode(mode | 0o600)) {
            Err(rustix::io::Errno::EXIST) if flags & libc::O_EXCL == 0 => return Ok(None),
            other => HostFile::new(other?.into(), true)?,
        };
        if let Some((uid, gid)) = self.owner_of_new(caller) {
            rustix::fs::fchown(file.file(), Some(uid), Some(gid))?;
        }
        // A change of owner clears the set-user bit.
        if mode & 0o6600 != 0o600 {
            rustix::fs::fchmod(file.file(), Mode::from_raw_mode(mode))?;
        }
        Ok(Some(file))
    }

    /// Makes an empty file: the kernel's mknod.
    pub(super) fn make_file(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> io::Result<FileAttr> {
        if mode & libc::S_IFMT != libc::S_IFREG && mode & libc::S_IFMT != 0 {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        self.create_file(caller, parent, name, mode & 0o7777 & !umask, libc::O_EXCL)?;
        self.look_up(parent, name)
    }

    pub(super) fn make_directory(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
    ) -> io::Result<FileAttr> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let entry = self.engine.entry_name(&path)?;
        rustix::fs::mkdirat(entry.parent(), entry.name, Mode::from_raw_mode(mode & 0o7777))?;
        self.set_owner(caller, &entry)?;
        self.look_up(parent, name)
    }

    pub(super) fn remove_directory(&self, parent: INodeNo, name: &OsStr) -> io::Result<()> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let entry = self.engine.entry_name(&path)?;
        Ok(rustix::fs::unlinkat(entry.parent(), entry.name, AtFlags::REMOVEDIR)?)
    }

    /// Makes a symbolic link.
    pub(super) fn make_link(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
    ) -> io::Result<FileAttr> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let entry = self.engine.entry_name(&path)?;
        rustix::fs::symlinkat(target, entry.parent(), entry.name)?;
        self.set_owner(caller, &entry)?;
        self.look_up(parent, name)
    }

    /// The target of a symbolic link.
    pub(super) fn link_target(&self, number: INodeNo) -> io::Result<CString> {
        let path = self.path(number)?;
        let entry = self.engine.entry_name(&path)?;
        Ok(rustix::fs::readlinkat(entry.parent(), entry.name, Vec::new())?)
    }

    /// Gives a file one more name: a hard link.
    pub(super) fn add_name(&self, number: INodeNo, new_parent: INodeNo, new_name: &OsStr) -> io::Result<FileAttr> {
        self.check_changeable()?;
        let (from, to) = (self.path(number)?, self.child(new_parent, new_name)?);
        let (old, new) = (self.engine.entry_name(&from)?, self.engine.entry_name(&to)?);
        self.engine.change_metadata(self.engine.open_path(&from)?, || {
            Ok(rustix::fs::linkat(old.parent(), old.name, new.parent(), new.name, AtFlags::empty())?)
        })?;
        self.look_up(new_parent, new_name)
    }

    /// Creates a file, unless it exists and `flags` allow that, and opens it.
    pub(super) fn create_and_open(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> io::Result<(FileAttr, FileHandle)> {
        let made = self.create_file(caller, parent, name, mode & 0o7777, flags)?;
        let (path, writable) = (self.child(parent, name)?, flags & libc::O_ACCMODE != libc::O_RDONLY);
        let handle = match made {
            Some(file) => self.engine.open_file(&path, file, writable)?,
            None => self.engine.open(&path, writable)?,
        };
        Ok((self.look_up(parent, name)?, self.register(handle)))
    }

    /// Reads a directory and keeps its entries until [`DiskFs::close_directory`].
    pub(super) fn open_directory(&self, number: INodeNo) -> io::Result<FileHandle> {
        let entries = Arc::new(self.list(number)?);
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.directories.write().insert(handle, entries);
        Ok(FileHandle(handle))
    }

    pub(super) fn entries(&self, handle: FileHandle) -> Option<Arc<Vec<DirEntry>>> {
        self.directories.read().get(&handle.0).cloned()
    }

    pub(super) fn close_directory(&self, handle: FileHandle) {
        self.directories.write().remove(&handle.0);
    }

    pub(super) fn sync_directory(&self, number: INodeNo) -> io::Result<()> {
        let directory = open_beneath(self.engine.directory(), &self.path(number)?, OFlags::DIRECTORY | OFlags::RDONLY)?;
        Ok(rustix::fs::fsync(directory)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::Engine;

    #[test]
    fn written_data_survives_if_a_file_gets_a_name_while_another_is_removed() {
        let root = INodeNo(ROOT);
        let (a, new) = (OsStr::new("a"), OsStr::new("new"));
        for replace in [false, true] {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            std::fs::write(dir.path().join("a"), [1; 4096]).unwrap();
            std::fs::write(dir.path().join("new"), b"").unwrap();
            let engine = Engine::start(dir.path(), Config::default(), None, false).unwrap();
            let fs = DiskFs::new(engine.clone()).unwrap();
            let handle = engine.open(Path::new("a"), true).unwrap();
            handle.write(0, &[2; 4096]).unwrap();
            let image = handle.image().clone();
            std::thread::scope(|scope| {
                // As during writeback: the thread that removes the name waits.
                let changing = image.stamp.lock();
                let taken = scope.spawn(|| match replace {
                    true => fs.rename_node((root, new), (root, a), RenameFlags::empty()),
                    false => fs.remove(root, a),
                });
                std::thread::sleep(std::time::Duration::from_millis(200));
                std::fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
                drop(changing);
                taken.join().unwrap().unwrap();
            });
            drop(handle);
            assert!(engine.shut_down().is_empty());
            assert!(std::fs::read(dir.path().join("b")).unwrap() == [2; 4096], "the written data is lost");
        }
    }
}
