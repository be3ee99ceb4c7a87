//! The tree that an upper directory shows over its parent's tree.

use crate::build::Build;
use crate::build::omissions::{Omissions, clean_xattrs, is_whiteout};
use crate::build::source::{SourceDirectory, file_state, meta, names, read_xattrs, stat_and_target};
use crate::build::walk::kind;
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::layout::placed_objects;
use crate::parallel;
use crate::sys;
use crate::tree::{self, Data, FileKind, INLINE_MAX, Id, Inode, ROOT, Tree, Xattrs, show};
use rustix::fs::Stat;
use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;

/// How often a file that changes meanwhile is read.
const READS: u32 = 3;

/// What made the upper directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The directory was mounted with `metacopy` and `redirect_dir`: its files may lack their bytes, and its directories may
    /// be others that were renamed. Without this, such attributes come from an archive and are dropped.
    pub follow_redirects: bool,
    /// Link no file and copy every one: a mount still uses the directory, and may write to it.
    pub copy: bool,
}

/// An upper directory being read.
struct Upper<'a, 'b> {
    build: &'a Build<'b>,
    source: SourceDirectory,
    /// The parent's tree, as it was. The inodes of `tree` that come from it have the same numbers.
    parent: &'a Tree,
    tree: Tree,
    options: Options,
    omissions: &'a mut Omissions,
    /// Files with several names, by file system and inode.
    linked: HashMap<(u64, u64), Id>,
    /// Objects of the parent's tree by the paths at which a data-only layer has them.
    data_paths: OnceCell<HashMap<Vec<u8>, Data>>,
    /// Directories that are still to be read: path, number, and the parent's directory below.
    todo: Vec<(PathBuf, Id, Option<Id>)>,
    /// Files that are still to be read.
    files: Vec<UnreadFile>,
}

/// A file of the upper directory. The tree does not have its bytes yet.
struct UnreadFile {
    path: PathBuf,
    id: Id,
    /// Its state when the walk found it.
    stat: Stat,
}

/// The tree that the upper directory `upper` shows over `parent`. Its files are in the store, staged by `build`.
///
/// # Errors
/// Files that keep changing, redirects that lead nowhere, a full store, the system's.
pub fn apply(build: &Build, parent: &Tree, upper: &Path, options: Options, omissions: &mut Omissions) -> Result<Tree> {
    let source = SourceDirectory::open(upper)?;
    let stat = source.stat_root()?;
    let xattrs = source.root_xattrs()?;
    let mut upper = Upper {
        build,
        source,
        parent,
        tree: parent.clone(),
        options,
        omissions,
        linked: HashMap::new(),
        data_paths: OnceCell::new(),
        todo: vec![(PathBuf::new(), ROOT, Some(ROOT))],
        files: Vec::new(),
    };
    if is_opaque(&xattrs) {
        upper.tree.clear(ROOT);
        upper.todo[0].2 = None;
    }
    upper.tree.inode_mut(ROOT).meta = meta(&stat, upper.clean(xattrs, b"/"));
    while let Some((path, id, below)) = upper.todo.pop() {
        upper.directory(&path, id, below)?;
    }
    upper.check_moves()?;
    upper.read_files()?;
    Ok(upper.tree)
}

fn is_opaque(xattrs: &Xattrs) -> bool {
    overlay(xattrs, "opaque").is_some_and(|value| value == b"y")
}

/// The value of one of overlayfs's attributes.
fn overlay<'a>(xattrs: &'a Xattrs, name: &str) -> Option<&'a [u8]> {
    xattrs.get([b"trusted.overlay.", name.as_bytes()].concat().as_slice()).map(|value| &**value)
}

impl Upper<'_, '_> {
    /// The attributes of a file without those that say how overlayfs or this host keeps it.
    fn clean(&mut self, mut xattrs: Xattrs, name: &[u8]) -> Xattrs {
        tree::drop_overlay_xattrs(&mut xattrs);
        xattrs.remove(&b"security.selinux"[..]);
        clean_xattrs(&mut xattrs, name, self.omissions);
        xattrs
    }

    /// Reads the directory `path`.
    fn directory(&mut self, path: &Path, id: Id, below: Option<Id>) -> Result<()> {
        let full = self.source.full(path);
        let Some(dir) = self.source.open_dir(path)? else { return Err(changed(&full)) };
        names(&dir, &full)?.iter().try_for_each(|name| self.entry(&dir, path, id, below, name))
    }

    /// Applies `name` of the directory `dir`.
    fn entry(&mut self, dir: &OwnedFd, dir_path: &Path, id: Id, below: Option<Id>, name: &[u8]) -> Result<()> {
        let os_name = OsStr::from_bytes(name);
        let path = dir_path.join(os_name);
        let full = self.source.full(&path);
        let (stat, target) = stat_and_target(dir, os_name).at(&full)?;
        let file_kind = kind(&stat, target, &full)?;
        if is_whiteout(&file_kind) {
            self.tree.unlink(id, name);
            return Ok(());
        }
        let is_dir = matches!(file_kind, FileKind::Dir(_));
        if !is_dir
            && stat.st_nlink > 1
            && let Some(&linked) = self.linked.get(&(stat.st_dev, stat.st_ino))
        {
            return self.tree.link(id, name, linked);
        }
        let xattrs = read_xattrs(dir, os_name).at(&full)?;
        if is_dir {
            return self.subdirectory(path, id, below, name, &stat, xattrs);
        }
        let has_metadata_only = self.options.follow_redirects && overlay(&xattrs, "metacopy").is_some();
        let is_unread = matches!(file_kind, FileKind::File(_)) && !has_metadata_only;
        let kind = match file_kind {
            FileKind::File(_) if has_metadata_only => {
                FileKind::File(self.data_below(&path, below, name, overlay(&xattrs, "redirect"))?)
            }
            other => other,
        };
        let meta = meta(&stat, self.clean(xattrs, name));
        let new = self.tree.add(Inode { meta, kind });
        if is_unread {
            self.files.push(UnreadFile { path, id: new, stat });
        }
        self.tree.link(id, name, new)?;
        if stat.st_nlink > 1 {
            self.linked.insert((stat.st_dev, stat.st_ino), new);
        }
        Ok(())
    }

    /// Applies a directory: over the parent's of that name, over another one of the parent's if it was renamed, or alone.
    fn subdirectory(
        &mut self,
        path: PathBuf,
        id: Id,
        below: Option<Id>,
        name: &[u8],
        stat: &Stat,
        xattrs: Xattrs,
    ) -> Result<()> {
        let is_dir = |id: &Id| matches!(self.parent.inode(*id).kind, FileKind::Dir(_));
        let below = match overlay(&xattrs, "redirect").filter(|_| self.options.follow_redirects) {
            Some(redirect) => Some(self.redirected(&path, below, redirect)?),
            None if is_opaque(&xattrs) => None,
            None => below.and_then(|below| self.parent.child(below, name)).filter(is_dir),
        };
        let meta = meta(stat, self.clean(xattrs, name));
        let new = match below {
            Some(below) => {
                self.tree.inode_mut(below).meta = meta;
                below
            }
            None => self.tree.add(Inode { meta, kind: FileKind::Dir(Default::default()) }),
        };
        self.tree.link(id, name, new)?;
        self.todo.push((path, new, below));
        Ok(())
    }

    /// The parent's directory that a renamed directory was.
    fn redirected(&self, path: &Path, below: Option<Id>, redirect: &[u8]) -> Result<Id> {
        let found = match redirect.strip_prefix(b"/") {
            Some(_) => self.find(redirect),
            // A name alone stands in the directory below.
            None => below.and_then(|below| self.parent.child(below, redirect)),
        };
        found.filter(|id| *id != ROOT && matches!(self.parent.inode(*id).kind, FileKind::Dir(_))).ok_or_else(|| {
            let (full, redirect) = (self.source.full(path), show(redirect));
            Error::Refused(format!("{}: renamed from {redirect}, which the parent does not have", full.display()))
        })
    }

    /// What the parent has at `path`. Overlayfs follows no symbolic links in a redirect.
    fn find(&self, path: &[u8]) -> Option<Id> {
        let names = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
        names.into_iter().try_fold(ROOT, |dir, name| self.parent.child(dir, name))
    }

    /// Takes the bytes of the files into the store, on all processors, while the disk writes what is to be linked.
    fn read_files(&mut self) -> Result<()> {
        let (build, source, links) = (self.build, &self.source, !self.options.copy);
        let files = std::mem::take(&mut self.files);
        let sync = || match links && files.iter().any(|file| file.stat.st_size as u64 > INLINE_MAX) {
            true => build.sync_before_links(),
            false => Ok(()),
        };
        let read = || parallel::map(&files, |file| read_file(build, source, file, links));
        let contents = thread::scope(|scope| match thread::Builder::new().spawn_scoped(scope, read) {
            Ok(reading) => {
                let synced = sync();
                let contents = reading.join().expect("no panic");
                synced.and(contents)
            }
            // No thread can be made.
            Err(_) => sync().and_then(|()| read()),
        })?;
        for (file, (data, changed)) in files.iter().zip(contents) {
            let inode = self.tree.inode_mut(file.id);
            inode.kind = FileKind::File(data);
            if let Some(stat) = changed {
                inode.meta = meta(&stat, std::mem::take(&mut inode.meta.xattrs));
            }
        }
        Ok(())
    }

    /// The bytes of a file of which the upper directory has only the metadata.
    fn data_below(&self, path: &Path, below: Option<Id>, name: &[u8], redirect: Option<&[u8]>) -> Result<Data> {
        let file = |id: Id| match &self.parent.inode(id).kind {
            FileKind::File(data) => Some(data.clone()),
            _ => None,
        };
        let found = match redirect {
            None => below.and_then(|below| self.parent.child(below, name)).and_then(file),
            Some(absolute) if absolute.starts_with(b"/") => {
                let in_parent = self.find(absolute).and_then(file);
                in_parent.or_else(|| self.data_paths().get(absolute).cloned())
            }
            Some(relative) => below.and_then(|below| self.parent.child(below, relative)).and_then(file),
        };
        found.ok_or_else(|| {
            let full = self.source.full(path);
            Error::Refused(format!("{}: its bytes are not here, and the parent does not have them", full.display()))
        })
    }

    /// The parent's objects by their paths in a data-only layer, by digest and by place.
    fn data_paths(&self) -> &HashMap<Vec<u8>, Data> {
        self.data_paths.get_or_init(|| {
            let sizes: HashMap<Digest, u64> =
                self.parent.objects().into_iter().map(|(digest, size, _)| (digest, size)).collect();
            let places = placed_objects(self.parent).map(|(digest, place)| (place.into_bytes(), digest));
            let digests = sizes.keys().map(|digest| (format!("/{}", digest.object_path()).into_bytes(), *digest));
            places.chain(digests).map(|(path, digest)| (path, Data::Object(digest, sizes[&digest]))).collect()
        })
    }

    /// Refuses a tree in which a directory has two names: a redirect was copied by hand.
    fn check_moves(&self) -> Result<()> {
        let mut seen = HashSet::from([ROOT]);
        let mut todo = vec![ROOT];
        while let Some(dir) = todo.pop() {
            for (name, id) in self.tree.children(dir) {
                if !matches!(self.tree.inode(id).kind, FileKind::Dir(_)) {
                    continue;
                }
                if !seen.insert(id) {
                    let (root, name) = (self.source.root().display(), show(name));
                    return Err(Error::Refused(format!("{root}: directory {name} is renamed to two places")));
                }
                todo.push(id);
            }
        }
        Ok(())
    }
}

/// Takes the bytes of a file into the store, by a link if it may and the file is as the walk found it. Returns its state
/// too, if it is not.
fn read_file(
    build: &Build,
    source: &SourceDirectory,
    file: &UnreadFile,
    may_link: bool,
) -> Result<(Data, Option<Stat>)> {
    let UnreadFile { path, stat: found, .. } = file;
    for _ in 0..READS {
        let Some(mut open) = source.open_file(path)? else { return Err(changed(&source.full(path))) };
        // Another name's link changes the time of the inode, and nothing else does.
        let has_same_time = found.st_nlink > 1 || file_state(found) == file_state(&open.stat);
        let is_as_found = has_same_time && found.st_ino == open.stat.st_ino && sys::is_unwritten(found, &open.stat);
        let data = build.take(&mut open.file, &open.path, &open.stat, may_link && is_as_found)?;
        let after = rustix::fs::fstat(&open.file).at(&open.path)?;
        if sys::is_unwritten(&open.stat, &after) && data.size() == after.st_size as u64 {
            return Ok((data, (!is_as_found).then_some(after)));
        }
    }
    Err(changed(&source.full(path)))
}

fn changed(full: &Path) -> Error {
    Error::Refused(format!("{}: changes while it is committed; end what writes to it", full.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_config::RunConfig;
    use crate::store::{ON_SYNC, Store};
    use std::cell::RefCell;
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::rc::Rc;

    #[test]
    fn a_linked_file_is_durable_before_it_is_an_object_and_an_object_before_its_image() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap();
        let upper = dir.path().join("upper");
        fs::create_dir(&upper).unwrap();
        (0..3).for_each(|number| fs::write(upper.join(number.to_string()), vec![number; 5000]).unwrap());
        let names = Rc::new(RefCell::new(Vec::new()));
        let (seen, objects, images) = (names.clone(), store.objects_dir(), store.path("images"));
        ON_SYNC.set(Some(Box::new(move || {
            let places = fs::read_dir(&objects).unwrap().map(|place| fs::read_dir(place.unwrap().path()).unwrap());
            seen.borrow_mut()
                .push((places.map(Iterator::count).sum::<usize>(), fs::read_dir(&images).unwrap().count()));
        })));
        let build = store.build().unwrap();
        let tree = apply(&build, &Tree::default(), &upper, Options::default(), &mut Omissions::default()).unwrap();
        build.publish("x", &tree, "t", RunConfig::default(), vec![]).unwrap();
        ON_SYNC.set(None);
        assert_eq!(*names.borrow(), [(0, 0), (3, 0)], "objects and images at each sync");
        assert!(store.image("x").is_ok() && fs::metadata(upper.join("1")).unwrap().nlink() == 2);
    }
}
