//! Archives into trees: one layer applied over what is there, as a container engine would unpack it, but
//! into memory and the store only.

use super::Build;
use super::acls::{Unresolved, set_acls};
use super::omissions::{Omissions, WHITEOUT, clean_xattrs, is_whiteout};
use crate::config::{Limits, Used};
use crate::error::{Error, Result, input};
use crate::format::erofs;
use crate::format::tar::{Acls, ArchiveEntry, EntryKind, Reader};
use crate::progress::Progress;
use crate::tree::{FileKind, Id, Inode, Meta, ROOT, Tree, show, split};
use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::path::Path;

/// What the layer has done so far, by which its whiteouts act.
#[derive(Default)]
struct Layer {
    /// Names that this layer has placed: its whiteouts must not remove them.
    fresh: HashSet<(Id, Vec<u8>)>,
    /// Directories from which everything of lower layers was removed, at any depth: nothing of it can come back.
    cleared: HashSet<Id>,
    /// Names looked at to clear directories.
    #[cfg(test)]
    looked_at: u64,
}

impl Layer {
    /// Removes from `dir`, at any depth, what lower layers brought.
    fn clear(&mut self, tree: &mut Tree, dir: Id) {
        let is_dir = |tree: &Tree, id| matches!(tree.inode(id).kind, FileKind::Dir(_));
        // Each directory is walked once, however often the archive names it.
        let mut is_new = |tree: &Tree, id| is_dir(tree, id) && self.cleared.insert(id);
        if !is_new(tree, dir) {
            return;
        }
        // Parents come first in the list. It is worked off from its end: a directory is emptied before its parent is.
        let (mut dirs, mut next) = (vec![dir], 0);
        while next < dirs.len() {
            dirs.extend(tree.children(dirs[next]).map(|(_, id)| id).filter(|&id| is_new(tree, id)));
            next += 1;
        }
        for dir in dirs.into_iter().rev() {
            let names: Vec<(Vec<u8>, Id)> = tree.children(dir).map(|(name, id)| (name.to_vec(), id)).collect();
            #[cfg(test)]
            {
                self.looked_at += names.len() as u64;
            }
            for (name, id) in names {
                let full = is_dir(tree, id) && tree.children(id).next().is_some();
                if !full && !self.fresh.contains(&(dir, name.clone())) {
                    tree.unlink(dir, &name);
                }
            }
        }
    }

    /// Removes what lower layers have under `name` in `dir`.
    fn remove(&mut self, tree: &mut Tree, dir: Id, name: &[u8]) {
        let Some(id) = tree.child(dir, name) else { return };
        self.clear(tree, id);
        let fresh = self.fresh.contains(&(dir, name.to_vec()));
        if !fresh && tree.children(id).next().is_none() {
            tree.unlink(dir, name);
        }
    }
}

/// An archive being applied.
struct Apply<'a, 'b, R> {
    build: &'a Build<'b>,
    tree: &'a mut Tree,
    reader: Reader<R>,
    /// Whether names that begin with `.wh.` delete, as in OCI layers.
    whiteouts: bool,
    layer: Layer,
    unresolved: Unresolved,
    omissions: &'a mut Omissions,
    progress: &'a Progress,
}

/// Reads an archive over `tree`. Returns what it used of the limits.
///
/// # Errors
/// A bad archive, one without an end mark, a full store.
pub fn apply_archive(
    build: &Build,
    tree: &mut Tree,
    source: impl Read,
    limits: Limits,
    omissions: &mut Omissions,
    progress: &Progress,
) -> Result<Used> {
    apply(build, tree, Reader::new(source, limits), false, omissions, progress)
}

/// Reads a layer of an OCI image over `tree`: names that begin with `.wh.` delete. A layer's digest shows whether it is
/// whole: it may lack its end mark, and one of no bytes changes nothing, as container engines have it.
pub(super) fn apply_layer(
    build: &Build,
    tree: &mut Tree,
    source: impl Read,
    limits: Limits,
    omissions: &mut Omissions,
    progress: &Progress,
) -> Result<Used> {
    let mut reader = Reader::new(source, limits);
    reader.allow_empty();
    apply(build, tree, reader, true, omissions, progress)
}

fn apply<R: Read>(
    build: &Build,
    tree: &mut Tree,
    reader: Reader<R>,
    whiteouts: bool,
    omissions: &mut Omissions,
    progress: &Progress,
) -> Result<Used> {
    let (layer, unresolved) = Default::default();
    let mut apply = Apply { build, tree, reader, whiteouts, layer, unresolved, omissions, progress };
    let mut next = apply.reader.next_entry().map_err(Error::foreign)?;
    while let Some(entry) = next {
        apply.entry(entry)?;
        next = apply.reader.next_entry()?;
    }
    if !whiteouts {
        apply.reader.check_end()?;
    }
    let used = apply.reader.budget().used();
    apply.unresolved.resolve(apply.tree, apply.reader.owners(), apply.omissions);
    check_rest(apply.reader.into_inner())?;
    Ok(used)
}

/// Refuses data after the end mark: other readers would take it for a second archive.
fn check_rest(mut rest: impl Read) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) if buffer[..count].iter().all(|&byte| byte == 0) => {}
            Ok(_) => return Err(input!("tar: more data behind the archive's end")),
            Err(error) => return Err(input!("tar: {error}")),
        }
    }
}

impl<R: Read> Apply<'_, '_, R> {
    /// Applies one entry.
    fn entry(&mut self, mut entry: ArchiveEntry) -> Result<()> {
        if entry.has_foreign_acl {
            self.omissions.add("NFSv4 access control lists, which Linux does not have, were left out", &entry.path);
        }
        // A layer's labels belong to the policy of the system where it was packed. An archive of a tree may have been built
        // on this system, and keeps them.
        if self.whiteouts && entry.meta.xattrs.remove(&b"security.selinux"[..]).is_some() {
            self.omissions.add("SELinux labels of layers were left out", &entry.path);
        }
        if self.is_mark_behind_link(&entry.path)? {
            self.omissions.add("marks of deleted files behind symbolic links were left out", &entry.path);
            return Ok(());
        }
        let Some((dir, name)) = self.resolve_parent(&entry.path)? else { return self.root(entry) };
        if self.whiteouts && name.starts_with(b".wh.") {
            return self.whiteout(&entry.path, dir, &name);
        }
        if let EntryKind::HardLink(target) = &entry.kind {
            return self.hard_link(&entry.path, target, dir, name);
        }
        let kind = self.kind(&entry)?;
        if is_whiteout(&kind) {
            self.omissions.add(WHITEOUT, &entry.path);
            return Ok(());
        }
        let path = entry.path.clone();
        let (meta, waiting) = self.meta(entry);
        let id = self.tree.put_in(dir, &name, Inode { meta, kind })?;
        self.unresolved.set(id, &path, waiting);
        self.layer.fresh.insert((dir, name));
        Ok(())
    }

    /// The directory and last name of `path`, `None` for the root. Missing directories are made, and count.
    fn resolve_parent(&mut self, path: &[u8]) -> Result<Option<(Id, Vec<u8>)>> {
        let (inodes, steps) = (self.tree.inode_count(), self.tree.step_count());
        // A layer is a tree of its own, laid over the lower ones: its directories hide their files and links.
        let is_lower = |dir, name: &[u8]| self.whiteouts && !self.layer.fresh.contains(&(dir, name.to_vec()));
        let parent = self.tree.resolve_parent_over(path, true, is_lower)?;
        self.reader.budget().count_implied(path, (self.tree.inode_count() - inodes) as u64)?;
        self.reader.budget().count_steps(path, self.tree.step_count() - steps)?;
        Ok(parent)
    }

    /// Returns true for the mark of a deleted file with a link of this layer on its path: what is elsewhere stays.
    fn is_mark_behind_link(&self, path: &[u8]) -> Result<bool> {
        let mut parts = split(path)?;
        if !self.whiteouts || !parts.pop().is_some_and(|name| name.starts_with(b".wh.")) {
            return Ok(false);
        }
        let mut dir = ROOT;
        for part in parts {
            let Some(id) = self.tree.child(dir, part) else { return Ok(false) };
            if matches!(self.tree.inode(id).kind, FileKind::Symlink(_)) {
                return Ok(self.layer.fresh.contains(&(dir, part.to_vec())));
            }
            dir = id;
        }
        Ok(false)
    }

    /// Gives the root the entry's metadata.
    fn root(&mut self, entry: ArchiveEntry) -> Result<()> {
        if entry.kind != EntryKind::Dir {
            return Err(input!("{:?}: the root of the tree must be a directory", show(&entry.path)));
        }
        let (meta, waiting) = self.meta(ArchiveEntry { path: b"/".to_vec(), ..entry });
        self.tree.inode_mut(ROOT).meta = meta;
        self.unresolved.set(ROOT, b"/", waiting);
        Ok(())
    }

    /// Deletes what the whiteout `name` in `dir` marks as deleted.
    fn whiteout(&mut self, path: &[u8], dir: Id, name: &[u8]) -> Result<()> {
        if name == b".wh..wh..opq" {
            self.layer.clear(self.tree, dir);
        } else if !name.starts_with(b".wh..wh.") {
            let deleted = &name[4..];
            if deleted.is_empty() || deleted == b"." || deleted == b".." {
                return Err(input!("tar: {}: a whiteout of no file", show(path)));
            }
            self.layer.remove(self.tree, dir, deleted);
        }
        Ok(())
    }

    /// Makes `name` in `dir` another name of the file at `target`.
    fn hard_link(&mut self, path: &[u8], target: &[u8], dir: Id, name: Vec<u8>) -> Result<()> {
        let steps = self.tree.step_count();
        let id = self.tree.link_target(path, target)?;
        self.reader.budget().count_steps(target, self.tree.step_count() - steps)?;
        self.tree.link(dir, &name, id)?;
        self.layer.fresh.insert((dir, name));
        Ok(())
    }

    /// What the entry is; a file's bytes go into the store.
    fn kind(&mut self, entry: &ArchiveEntry) -> Result<FileKind> {
        let kind = match &entry.kind {
            EntryKind::File(size) => self.file(&entry.path, *size)?,
            EntryKind::HardLink(_) => unreachable!("hard links are other names, not inodes"),
            EntryKind::Symlink(target) => FileKind::Symlink(target.as_slice().into()),
            EntryKind::Char(major, minor) => FileKind::Char(*major, *minor),
            EntryKind::Block(major, minor) => FileKind::Block(*major, *minor),
            EntryKind::Dir => FileKind::Dir(BTreeMap::new()),
            EntryKind::Fifo => FileKind::Fifo,
        };
        if let FileKind::Char(major, minor) | FileKind::Block(major, minor) = kind
            && (major > 0xfff || minor > 0xf_ffff)
        {
            return Err(input!("tar: {}: device {major}:{minor} is out of range", show(&entry.path)));
        }
        Ok(kind)
    }

    /// Stores the bytes of the entry last read.
    fn file(&mut self, path: &[u8], size: u64) -> Result<FileKind> {
        let path = show(path);
        erofs::check_size(size, || format!("tar: {path}"))?;
        let progress = self.progress;
        let data = self.build.put_reader(&mut self.reader, Path::new(&path), |bytes| progress.add(bytes, false));
        let data = data.map_err(|error| match error {
            // The archive failed, in the middle of this file.
            Error::Io { path: at, source } if at == Path::new(&path) => input!("tar: {path}: {source}"),
            other => other,
        })?;
        if data.size() != size {
            return Err(input!("tar: {path}: {} bytes of {size}", data.size()));
        }
        progress.add(0, true);
        Ok(FileKind::File(data))
    }

    /// The entry's metadata, with the attributes that an image can carry, and the access control lists that wait for
    /// numbers.
    fn meta(&mut self, entry: ArchiveEntry) -> (Meta, Option<Acls>) {
        let ArchiveEntry { path, mut meta, kind, acls, .. } = entry;
        if matches!(kind, EntryKind::Symlink(_)) {
            // Linux has no other mode for symbolic links; what an archive says of it is lost on unpacking.
            meta.mode = 0o777;
        }
        let waiting = set_acls(&mut meta, &kind, &path, acls, self.reader.owners(), self.omissions);
        clean_xattrs(&mut meta.xattrs, &path, self.omissions);
        (meta, waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clearing_goes_as_deep_as_any_tree() {
        let mut tree = Tree::default();
        let dir = || Inode { meta: Meta::default(), kind: FileKind::Dir(BTreeMap::new()) };
        let (mut here, mut kept) = (ROOT, ROOT);
        for depth in 0..300_000 {
            let id = tree.add(dir());
            tree.link(here, b"d", id).unwrap();
            here = id;
            if depth == 2 {
                kept = id;
            }
        }
        let file = tree.add(Inode { meta: Meta::default(), kind: FileKind::Fifo });
        tree.link(kept, b"new", file).unwrap();
        let mut layer = Layer { fresh: HashSet::from([(kept, b"new".to_vec())]), ..Layer::default() };
        layer.clear(&mut tree, ROOT);
        let mut left = Vec::new();
        tree.walk(|path, _| left.push(show(path)));
        assert_eq!(left, ["", "d", "d/d", "d/d/d", "d/d/d/new"]);
    }

    #[test]
    fn a_directory_is_cleared_once_however_often_its_layer_says_so() {
        let (mut tree, mut layer) = (Tree::default(), Layer::default());
        let (dir, file) = (
            || Inode { meta: Meta::default(), kind: FileKind::Dir(BTreeMap::new()) },
            || Inode { meta: Meta::default(), kind: FileKind::Fifo },
        );
        let mut place = ROOT;
        for _ in 0..10 {
            place = tree.put_in(place, b"d", dir()).unwrap();
            for number in 0..100 {
                tree.put_in(place, format!("old{number}").as_bytes(), file()).unwrap();
                let name = format!("new{number}").into_bytes();
                tree.put_in(place, &name, file()).unwrap();
                layer.fresh.insert((place, name));
            }
        }
        let top = tree.child(ROOT, b"d").unwrap();
        for _ in 0..100 {
            // From below and from above, and by either kind of mark.
            layer.clear(&mut tree, place);
            layer.clear(&mut tree, top);
            layer.remove(&mut tree, ROOT, b"d");
        }
        assert!(layer.looked_at <= 10 * 201, "{}", layer.looked_at);
        let mut names = 0;
        tree.walk(|path, _| {
            assert!(!path.windows(3).any(|part| part == b"old"));
            names += 1;
        });
        assert_eq!(names, 1 + 10 * 101);
    }
}
