//! Names: looked up, listed, made, moved and removed in the host's directory.
//!
//! Each is done on the host first, by the engine where an image may be concerned; then the kernel's names follow.

use super::DiskFs;
use super::attributes::kind_of;
use super::nodes::{Node, ROOT};
use crate::engine::{FileKey, key_of, stat};
use crate::file::{HostFile, Place, open_beneath};
use fuser::{FileAttr, FileType, INodeNo, RenameFlags, Request};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd;

/// Whether the last name of a file is gone. Asked behind the change that took one: it may have got another meanwhile.
fn has_no_name(file: impl AsFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink == 0)
}

/// One entry of a directory, as read when it was opened.
pub(super) struct DirEntry {
    pub(super) number: u64,
    pub(super) kind: FileType,
    pub(super) name: OsString,
}

impl DiskFs {
    /// Enters a name the kernel asked for; it keeps it until it says forget.
    pub(super) fn enter(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let path = self.child(parent, name)?;
        let stat = stat(self.engine.directory(), &path)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut nodes = self.nodes.write();
        let number = nodes.number(key);
        let node = nodes.by_number.entry(number).or_insert_with(|| Node { names: Vec::new(), key, lookups: 0 });
        node.key = key;
        node.gain(parent, name);
        node.lookups += 1;
        drop(nodes);
        Ok(self.attributes(number, &stat))
    }

    pub(super) fn list(&self, number: INodeNo) -> io::Result<Vec<DirEntry>> {
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

    /// Who a new file is given to, where we may.
    fn maker(&self, request: &Request) -> Option<(rustix::fs::Uid, rustix::fs::Gid)> {
        let (uid, gid) = (request.uid(), request.gid());
        let wanted = self.is_root && (uid, gid) != (0, 0);
        wanted.then(|| (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid)))
    }

    pub(super) fn give_to(&self, request: &Request, place: &Place<'_>) -> io::Result<()> {
        if let Some((uid, gid)) = self.maker(request) {
            rustix::fs::chownat(place.parent(), place.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
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
        let source = self.engine.named(&from)?;
        let target = self.engine.named(&to).ok();
        let source_key = key_of(&source)?;
        let target_stat = target.as_ref().map(rustix::fs::fstat).transpose()?;
        let host_flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let (old, new) = (self.engine.place(&from)?, self.engine.place(&to)?);
        let rename = || Ok(rustix::fs::renameat_with(old.parent(), old.name, new.parent(), new.name, host_flags)?);
        match &target {
            // It loses a name, or gets another.
            Some(target) => self.engine.change_both(&source, target, rename)?,
            None => self.engine.change(&source, rename)?,
        }
        let mut nodes = self.nodes.write();
        let mut moved = |key: FileKey, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)| {
            let number = nodes.by_key.get(&key).copied();
            if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
                node.lose(from.0, from.1);
                node.gain(to.0, to.1);
            }
        };
        let exchanged = flags.contains(RenameFlags::RENAME_EXCHANGE);
        let target_key = target_stat.map(|target| (target.st_dev, target.st_ino));
        // Two names of one file stay as they are.
        if target_key != Some(source_key) {
            moved(source_key, (parent, name), (new_parent, new_name));
            if let (true, Some(key)) = (exchanged, target_key) {
                moved(key, (new_parent, new_name), (parent, name));
            }
            // What was replaced has that name no more, though it may be open still.
            let number = target_key.filter(|_| !exchanged).and_then(|key| nodes.by_key.get(&key).copied());
            if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
                node.lose(new_parent, new_name);
            }
        }
        drop(nodes);
        if let Some(image) = self.engine.cached(source_key) {
            image.set_name(&to.to_string_lossy());
        }
        match target_key.filter(|key| *key != source_key) {
            Some(key) if exchanged => {
                if let Some(image) = self.engine.cached(key) {
                    image.set_name(&from.to_string_lossy());
                }
            }
            Some(key) if target.is_some_and(has_no_name) => self.engine.unlinked(key),
            _ => {}
        }
        Ok(())
    }

    pub(super) fn remove(&self, parent: INodeNo, name: &OsStr) -> io::Result<()> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let file = self.engine.named(&path)?;
        let stat = rustix::fs::fstat(&file).map_err(io::Error::from)?;
        let key = (stat.st_dev, stat.st_ino);
        let place = self.engine.place(&path)?;
        self.engine.change(&file, || Ok(rustix::fs::unlinkat(place.parent(), place.name, AtFlags::empty())?))?;
        if has_no_name(&file) {
            self.engine.unlinked(key);
        }
        let mut nodes = self.nodes.write();
        let number = nodes.by_key.get(&key).copied();
        if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
            node.lose(parent, name);
        }
        Ok(())
    }

    /// Makes a file and opens it; `None` where it is there already and need not be new.
    pub(super) fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> io::Result<Option<HostFile>> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let place = self.engine.place(&path)?;
        let open = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // Its maker may write through the open file whatever the mode, and so must we: it is opened twice.
        let file = match rustix::fs::openat(place.parent(), place.name, open, Mode::from_raw_mode(mode | 0o600)) {
            Err(rustix::io::Errno::EXIST) if flags & libc::O_EXCL == 0 => return Ok(None),
            other => HostFile::new(other?.into(), true)?,
        };
        if let Some((uid, gid)) = self.maker(request) {
            rustix::fs::fchown(file.file(), Some(uid), Some(gid))?;
        }
        // Another owner costs the set-user bit.
        if mode & 0o6600 != 0o600 {
            rustix::fs::fchmod(file.file(), Mode::from_raw_mode(mode))?;
        }
        Ok(Some(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::Engine;
    use std::path::Path;

    #[test]
    fn what_was_written_stays_when_a_file_gets_another_name_while_one_is_taken_from_it() {
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
                // As while blocks are written back: who takes the name away waits.
                let changing = image.known.lock();
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
            assert!(std::fs::read(dir.path().join("b")).unwrap() == [2; 4096], "what was written is gone");
        }
    }
}
