//! Archives into trees: one layer applied over what is there, as a container engine would unpack it, but
//! into memory and the store only.

use crate::config::{Limits, Used};
use crate::erofs;
use crate::error::{Error, Result, input};
use crate::progress::Progress;
use crate::store::Build;
use crate::tar::{Entry, EntryKind, Reader};
use crate::tree::{self, Id, Inode, Kind, Meta, ROOT, Tree, Xattrs, show};
use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::path::Path;

/// What was left out of an image, counted by reason.
#[derive(Debug, Default)]
pub struct Notes(BTreeMap<&'static str, (u64, String)>);

impl Notes {
    /// Counts one more thing left out for `reason`, `example` being the first seen.
    pub fn add(&mut self, reason: &'static str, example: &[u8]) {
        self.0.entry(reason).or_insert_with(|| (0, show(example))).0 += 1;
    }

    /// One line per reason.
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().map(|(reason, (count, example))| format!("{reason} ({count}; first: {example})")).collect()
    }
}

/// Takes away the attributes that no image can carry, and notes them.
pub(crate) fn clean_xattrs(xattrs: &mut Xattrs, path: &[u8], notes: &mut Notes) {
    for _ in 0..tree::drop_overlay_xattrs(xattrs) {
        notes.add("attributes that steer overlayfs or EROFS were left out", path);
    }
    let mut total = 0;
    xattrs.retain(|name, value| {
        let room = name.len() + value.len() + 8;
        // Linux reads no longer names. Half the format's room, so that our own attributes always fit.
        let fits = name.len() <= 255 && erofs::xattr_fits(name, value) && total + room < 1 << 17;
        if fits {
            total += room;
        } else {
            notes.add("attributes with a name or size that EROFS cannot hold were left out", path);
        }
        fits
    });
}

/// Whether overlayfs would take the file for its own mark of a deleted name.
pub(crate) fn is_whiteout(kind: &Kind) -> bool {
    matches!(kind, Kind::Char(0, 0))
}

/// What a layer has done so far that its whiteouts go by.
#[derive(Default)]
struct Layer {
    /// Names that it has placed: what whiteouts must not remove.
    fresh: HashSet<(Id, Vec<u8>)>,
    /// Directories that are empty of what lower layers brought, with all below them: nothing of it can come back.
    cleared: HashSet<Id>,
    /// Names that were looked at to clear directories.
    #[cfg(test)]
    looked_at: u64,
}

impl Layer {
    /// Empties `dir` of what lower layers brought.
    fn clear(&mut self, tree: &mut Tree, dir: Id) {
        let is_dir = |tree: &Tree, id| matches!(tree.inode(id).kind, Kind::Dir(_));
        // However often an archive says it, each directory is walked once.
        let mut is_new = |tree: &Tree, id| is_dir(tree, id) && self.cleared.insert(id);
        if !is_new(tree, dir) {
            return;
        }
        // Parents first; taken from the end, what is in a directory is gone before it is looked at from above.
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

    fn remove(&mut self, tree: &mut Tree, dir: Id, name: &[u8]) {
        let Some(id) = tree.child(dir, name) else { return };
        self.clear(tree, id);
        let fresh = self.fresh.contains(&(dir, name.to_vec()));
        if !fresh && tree.children(id).next().is_none() {
            tree.unlink(dir, name);
        }
    }
}

/// Reads a tar archive over `tree`; with `whiteouts`, names that begin with `.wh.` delete, as in OCI layers.
/// Returns what it has taken of the limits.
///
/// # Errors
/// A bad archive, a full store.
pub fn apply_tar(
    build: &Build,
    tree: &mut Tree,
    source: impl Read,
    whiteouts: bool,
    limits: Limits,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<Used> {
    let mut layer = Layer::default();
    let mut reader = Reader::new(source, limits);
    let mut next = reader.next_entry().map_err(Error::foreign)?;
    while let Some(entry) = next {
        apply_entry(build, tree, &mut reader, entry, whiteouts, &mut layer, notes, progress)?;
        next = reader.next_entry()?;
    }
    // Of a layer a digest says whether it is whole, and some are packed without a mark.
    if !whiteouts {
        reader.check_end()?;
    }
    // What follows the end mark would be a second archive to other readers.
    let used = reader.used();
    let (mut rest, mut buffer) = (reader.into_inner(), vec![0; 1 << 16]);
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => return Ok(used),
            Ok(count) if buffer[..count].iter().all(|&byte| byte == 0) => {}
            Ok(_) => return Err(input!("tar: more data behind the archive's end")),
            Err(error) => return Err(input!("tar: {error}")),
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "the loop body of apply_tar, apart for its length")]
fn apply_entry(
    build: &Build,
    tree: &mut Tree,
    reader: &mut Reader<impl Read>,
    mut entry: Entry,
    whiteouts: bool,
    layer: &mut Layer,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<()> {
    if entry.left_out {
        notes.add("ACLs or SELinux labels in a form that is not read were left out", &entry.path);
    }
    // They are of the policy where the layer was packed. An archive of a tree may be one that was built here, and keeps them.
    if whiteouts && entry.xattrs.remove(&b"security.selinux"[..]).is_some() {
        notes.add("SELinux labels of layers were left out", &entry.path);
    }
    let (inodes, steps) = (tree.inode_count(), tree.step_count());
    // A layer is a tree of its own, laid over the lower ones: its directories hide their files.
    let is_lower = |dir, name: &[u8]| whiteouts && !layer.fresh.contains(&(dir, name.to_vec()));
    let parent = tree.resolve_parent_over(&entry.path, true, is_lower)?;
    reader.count_implied(&entry.path, (tree.inode_count() - inodes) as u64)?;
    reader.count_steps(&entry.path, tree.step_count() - steps)?;
    let Some((dir, name)) = parent else {
        if entry.kind != EntryKind::Dir {
            return Err(input!("{:?}: the root of the tree must be a directory", show(&entry.path)));
        }
        let mut xattrs = entry.xattrs;
        clean_xattrs(&mut xattrs, b"/", notes);
        let Entry { mode, uid, gid, mtime_s, mtime_ns, .. } = entry;
        tree.inode_mut(ROOT).meta = Meta { mode, uid, gid, mtime_s, mtime_ns, xattrs };
        return Ok(());
    };
    if whiteouts && name.starts_with(b".wh.") {
        if name == b".wh..wh..opq" {
            layer.clear(tree, dir);
        } else if !name.starts_with(b".wh..wh.") {
            let deleted = &name[4..];
            if deleted.is_empty() || deleted == b"." || deleted == b".." {
                return Err(input!("tar: {}: a whiteout of no file", show(&entry.path)));
            }
            layer.remove(tree, dir, deleted);
        }
        return Ok(());
    }
    let kind = match entry.kind {
        EntryKind::File(size) => {
            let path = show(&entry.path);
            erofs::check_size(size, || format!("tar: {path}"))?;
            let data = build.put_reader(reader, Path::new(&path), |bytes| progress.add(bytes, false));
            let data = data.map_err(|error| match error {
                // It was the archive that failed, in the middle of this file.
                Error::Io { path: at, source } if at == Path::new(&path) => input!("tar: {path}: {source}"),
                other => other,
            })?;
            if data.size() != size {
                return Err(input!("tar: {path}: {} bytes of {size}", data.size()));
            }
            progress.add(0, true);
            Kind::File(data)
        }
        EntryKind::HardLink(target) => {
            let steps = tree.step_count();
            let id = tree.link_target(&entry.path, &target)?;
            reader.count_steps(&entry.path, tree.step_count() - steps)?;
            tree.link(dir, &name, id)?;
            layer.fresh.insert((dir, name));
            return Ok(());
        }
        EntryKind::Symlink(target) => Kind::Symlink(target.into()),
        EntryKind::Char(major, minor) => Kind::Char(major, minor),
        EntryKind::Block(major, minor) => Kind::Block(major, minor),
        EntryKind::Dir => Kind::Dir(BTreeMap::new()),
        EntryKind::Fifo => Kind::Fifo,
    };
    if let Kind::Char(major, minor) | Kind::Block(major, minor) = kind
        && (major > 0xfff || minor > 0xf_ffff)
    {
        return Err(input!("tar: {}: device {major}:{minor} is out of range", show(&entry.path)));
    }
    if is_whiteout(&kind) {
        notes.add("character devices 0:0, overlayfs's mark of a deleted file, were left out", &entry.path);
        return Ok(());
    }
    let mut xattrs = entry.xattrs;
    clean_xattrs(&mut xattrs, &entry.path, notes);
    let Entry { mode, uid, gid, mtime_s, mtime_ns, .. } = entry;
    tree.put_in(dir, &name, Inode { meta: Meta { mode, uid, gid, mtime_s, mtime_ns, xattrs }, kind })?;
    layer.fresh.insert((dir, name));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_that_does_not_fit_takes_no_room_from_others() {
        let mut xattrs = Xattrs::new();
        let long = |length: usize| [&b"user."[..], &vec![b'n'; length - 5]].concat();
        for (name, size) in [
            (b"user.a".to_vec(), 100_000),
            (b"user.b".to_vec(), 60_000),
            (long(255), 1),
            (long(256), 1),
            (b"user.z".to_vec(), 60_000),
        ] {
            xattrs.insert(name.into(), vec![0; size].into());
        }
        let mut notes = Notes::default();
        clean_xattrs(&mut xattrs, b"file", &mut notes);
        let kept: Vec<&[u8]> = xattrs.keys().map(|name| &**name).collect();
        assert_eq!(kept, [&b"user.b"[..], &long(255), b"user.z"]);
        assert!(notes.lines()[0].contains("cannot hold were left out (2; first: "), "{:?}", notes.lines());
    }

    #[test]
    fn clearing_goes_as_deep_as_any_tree() {
        let mut tree = Tree::default();
        let dir = || Inode { meta: Meta::default(), kind: Kind::Dir(BTreeMap::new()) };
        let (mut here, mut kept) = (ROOT, ROOT);
        for depth in 0..300_000 {
            let id = tree.add(dir());
            tree.link(here, b"d", id).unwrap();
            here = id;
            if depth == 2 {
                kept = id;
            }
        }
        let file = tree.add(Inode { meta: Meta::default(), kind: Kind::Fifo });
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
            || Inode { meta: Meta::default(), kind: Kind::Dir(BTreeMap::new()) },
            || Inode { meta: Meta::default(), kind: Kind::Fifo },
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
