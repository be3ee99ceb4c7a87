//! Mounts of a metadata directory: metadata as a directory of empty files with overlay attributes, for users that cannot
//! mount EROFS. It is made once per image and id mapping, and checked by `verify`.

use super::options::{MountKind, Mounted};
use super::request::Request;
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::format::acl;
use crate::layout::placed_objects;
use crate::remove_tree::remove_tree;
use crate::store::{FARM_SUFFIX, Lease, Store};
use crate::tree::{Data, FileKind, Id, Tree, show, show_start};
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Mounts a metadata directory.
pub(super) fn by_directory(request: &Request) -> Result<(OwnedFd, Mounted)> {
    let Request { store, digest, lease, in_user_namespace, .. } = *request;
    let (mut objects, uses_farm) = (request.objects.clone(), request.farm.is_some());
    let made = metadata_directory(store, digest, lease, in_user_namespace, uses_farm);
    let (meta, notes) = match made {
        // There may be a directory from before there was a link farm.
        Err(error) if uses_farm && error.is_full_or_read_only() => {
            if !objects.contains(&store.objects_dir()) {
                objects.push(store.objects_dir());
            }
            metadata_directory(store, digest, lease, in_user_namespace, false).map_err(|_| error)?
        }
        made => made?,
    };
    let fd = request.overlay(&meta, &objects, in_user_namespace)?;
    Ok((fd, request.mounted(MountKind::Directory, notes)))
}

/// What was left out, one line each.
pub(super) fn note_lines(notes: &BTreeMap<&'static str, u64>) -> Vec<String> {
    notes.iter().map(|(what, count)| format!("{what} ({count})")).collect()
}

/// A name for the id mapping of this process's user namespace: another mapping makes files with other owners.
fn mapping() -> Result<String> {
    let mut maps = Vec::new();
    for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
        maps.extend(fs::read(map).at(map)?);
    }
    let mut name = Digest::of(&maps).hex();
    name.truncate(8);
    Ok(name)
}

/// The image's metadata as a directory of files without data, made once per image and id mapping. With `uses_farm` its files
/// lead to the image's link farm. Returns the directory, and what is not as in the image.
pub(super) fn metadata_directory(
    store: &Store,
    digest: &Digest,
    lease: &Lease,
    user: bool,
    uses_farm: bool,
) -> Result<(PathBuf, Vec<String>)> {
    let mapping = if user { Some(mapping()?) } else { None };
    let target = store.directory_path(digest, mapping.as_deref(), uses_farm);
    let mut notes_path = target.clone().into_os_string();
    notes_path.push(".notes");
    let notes_path = PathBuf::from(notes_path);
    if target.exists() {
        let notes = fs::read_to_string(&notes_path).unwrap_or_default();
        return Ok((target, notes.lines().map(str::to_string).collect()));
    }
    let tree = store.tree(digest)?;
    lease.write_down()?;
    let staged = store.path("staging").join(lease.id());
    fs::create_dir_all(&staged).at(&staged)?;
    let made = make_directory(store, &tree, &staged, user, uses_farm, &target, &notes_path);
    // The directory is empty unless the making failed.
    let _ = remove_tree(&staged);
    Ok((target, made?))
}

/// Writes the metadata directory of `tree` below `staged`, which no other process uses, and gives it the name `target`.
/// Returns what is not as in the image, which is written to `notes_path` too.
fn make_directory(
    store: &Store,
    tree: &Tree,
    staged: &Path,
    user: bool,
    uses_farm: bool,
    target: &Path,
    notes_path: &Path,
) -> Result<Vec<String>> {
    // Opened before the first write: it is to report the loss of any of them.
    let disk = File::open(staged).at(staged)?;
    let place = staged.join("tree");
    fs::create_dir(&place).at(&place)?;
    without_xattrs(&place)?;
    let mut notes = BTreeMap::new();
    write_directory(tree, &place, user, &Redirects::new(tree, uses_farm), &mut notes).map_err(|error| match error {
        Error::Io { path, source } if source.raw_os_error() == Some(libc::ENAMETOOLONG) => {
            too_long(store, &place, &path)
        }
        other => other,
    })?;
    let lines = note_lines(&notes);
    let notes_staged = staged.join("notes");
    fs::write(&notes_staged, lines.join("\n")).at(&notes_staged)?;
    // A directory that has its name is complete, after a power cut too. Two processes that make it concurrently write the
    // same.
    store.sync_disk(&disk, staged)?;
    fs::rename(&notes_staged, notes_path).at(notes_path)?;
    match fs::rename(&place, target) {
        Err(error) if !target.exists() => Err(error).at(target),
        _ => Ok(lines),
    }
}

/// The error for a `path` that is too long in the metadata directory `place`. The message shows only its start.
fn too_long(store: &Store, place: &Path, path: &Path) -> Error {
    let inside = path.strip_prefix(place).unwrap_or(path).as_os_str().as_bytes();
    Error::Refused(format!(
        "mount: {} ({} bytes): too long for a metadata directory in {}; give the store a shorter path, or mount as root",
        show_start(inside),
        inside.len(),
        store.root().display()
    ))
}

/// Removes a directory's attributes: access control lists that a new one has inherited, and would hand on to all files made
/// in it, and attributes of another image's root.
pub(super) fn without_xattrs(dir: &Path) -> Result<()> {
    let mut names = vec![0; 1 << 16];
    let count = match rustix::fs::listxattr(dir, &mut names[..]) {
        Err(Errno::NOTSUP) => 0,
        other => other.at(dir)?,
    };
    for name in names[..count].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        match rustix::fs::removexattr(dir, name) {
            // Attributes set by the system's policy stay.
            Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM | Errno::ACCESS) => {}
            other => other.at(dir)?,
        }
    }
    Ok(())
}

/// What is no loss to a program that gets a /dev of its own.
pub(crate) const NO_DEV_NODES: &str = "device nodes are missing in /dev: making them needs root";

/// Where overlayfs finds an object.
enum Redirects {
    /// By its digest, in the directory of all objects.
    Digests,
    /// By its place in the image's link farm. A place fits into ext4's inode; a digest takes each file a block of its own.
    Places(HashMap<Digest, String>),
}

impl Redirects {
    fn new(tree: &Tree, uses_farm: bool) -> Self {
        if uses_farm { Self::Places(placed_objects(tree).collect()) } else { Self::Digests }
    }

    fn of(&self, digest: &Digest) -> String {
        match self {
            Self::Digests => format!("/{}", digest.object_path()),
            Self::Places(places) => places[digest].clone(),
        }
    }
}

/// A metadata directory being written. No other process uses it yet: all names are new, so no link can be followed.
struct Writer<'a> {
    tree: &'a Tree,
    place: &'a Path,
    user: bool,
    redirects: &'a Redirects,
    /// The first name of each file.
    made: HashMap<Id, PathBuf>,
    notes: &'a mut BTreeMap<&'static str, u64>,
}

/// Writes `tree` below `place`.
fn write_directory(
    tree: &Tree,
    place: &Path,
    user: bool,
    redirects: &Redirects,
    notes: &mut BTreeMap<&'static str, u64>,
) -> Result<()> {
    let mut writer = Writer { tree, place, user, redirects, made: HashMap::new(), notes };
    let (mut dirs, mut result) = (Vec::new(), Ok(()));
    tree.walk(|path, id| {
        if result.is_err() {
            return;
        }
        if matches!(tree.inode(id).kind, FileKind::Dir(_)) {
            let full = writer.full(path);
            result = if path.is_empty() { Ok(()) } else { fs::create_dir(&full).at(&full) };
            dirs.push((full, id));
        } else {
            result = writer.write_file(path, id);
        }
    });
    result?;
    // Modes and times of directories last: making files in them changes both.
    for (path, id) in dirs.into_iter().rev() {
        set_meta(tree, &path, id, notes)?;
    }
    Ok(())
}

impl Writer<'_> {
    fn full(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() { self.place.to_path_buf() } else { self.place.join(OsStr::from_bytes(path)) }
    }

    fn note(&mut self, what: &'static str) {
        *self.notes.entry(what).or_default() += 1;
    }

    /// Writes a file of any kind but a directory, or one more name of it.
    fn write_file(&mut self, path: &[u8], id: Id) -> Result<()> {
        let full = self.full(path);
        match self.made.get(&id).map(|first| fs::hard_link(first, &full)) {
            // Instead, another file leads to the same object, or has the same bytes.
            Some(Err(error)) if error.raw_os_error() == Some(libc::EMLINK) => {
                self.note("hard links are files of their own: more than the store's file system has");
            }
            Some(linked) => return linked.at(&full),
            None => {}
        }
        let is_made = match &self.tree.inode(id).kind {
            FileKind::Dir(_) => unreachable!("directories are made by the walk"),
            FileKind::File(data) => self.regular(&full, data).map(|()| true)?,
            FileKind::Symlink(target) => {
                rustix::fs::symlink(OsStr::from_bytes(target), &full).map(|()| true).at(&full)?
            }
            FileKind::Char(major, minor) => self.node(path, id, FileType::CharacterDevice, (*major, *minor))?,
            FileKind::Block(major, minor) => self.node(path, id, FileType::BlockDevice, (*major, *minor))?,
            FileKind::Fifo => self.node(path, id, FileType::Fifo, (0, 0))?,
            FileKind::Socket => self.node(path, id, FileType::Socket, (0, 0))?,
        };
        if is_made {
            set_meta(self.tree, &full, id, self.notes)?;
            self.made.insert(id, full);
        } else {
            self.made.remove(&id);
        }
        Ok(())
    }

    /// Writes a regular file: its bytes, or its size and the attributes that lead to its object.
    fn regular(&self, full: &Path, data: &Data) -> Result<()> {
        let mut file = File::options().write(true).create_new(true).open(full).at(full)?;
        let (digest, size) = match data {
            Data::Inline(bytes) => return file.write_all(bytes).at(full),
            Data::Object(digest, size) => (digest, *size),
        };
        file.set_len(size).at(full)?;
        let prefix = if self.user { "user.overlay." } else { "trusted.overlay." };
        let redirect = self.redirects.of(digest);
        for (name, value) in [("metacopy", ""), ("redirect", redirect.as_str())] {
            rustix::fs::fsetxattr(&file, format!("{prefix}{name}"), value.as_bytes(), XattrFlags::empty()).at(full)?;
        }
        Ok(())
    }

    /// Makes a device node, pipe or socket. Returns false if this user may not.
    fn node(&mut self, path: &[u8], id: Id, kind: FileType, (major, minor): (u32, u32)) -> Result<bool> {
        let full = self.full(path);
        let mode = Mode::from_raw_mode(self.tree.inode(id).meta.mode.into());
        match rustix::fs::mknodat(CWD, &full, kind, mode, rustix::fs::makedev(major, minor)) {
            Err(Errno::PERM) => {
                let in_dev = path.starts_with(b"dev/");
                self.note(if in_dev { NO_DEV_NODES } else { "device nodes are missing: making them needs root" });
                Ok(false)
            }
            other => other.map(|()| true).at(&full),
        }
    }
}

/// Returns true if the disk of `path` has less space than an inode may need: an attribute can have 64 KiB, whatever the
/// block size is.
fn is_full(path: &Path) -> Result<bool> {
    let dir = path.parent().unwrap_or(path);
    let room = rustix::fs::statvfs(dir).at(dir)?;
    Ok(room.f_bavail < 32 || room.f_bavail.saturating_mul(room.f_frsize) < 128 << 10)
}

/// The first difference between a metadata directory and the image, if there is one. Owners, modes, times and attributes do
/// not count, since users cannot set all of them; neither do files that this user cannot look at.
pub(crate) fn difference(tree: &Tree, place: &Path) -> Option<String> {
    let uses_farm = place.as_os_str().as_bytes().ends_with(FARM_SUFFIX.as_bytes());
    let (redirects, mut found) = (Redirects::new(tree, uses_farm), None);
    tree.walk(|path, id| {
        if found.is_some() {
            return;
        }
        let full = if path.is_empty() { place.to_path_buf() } else { place.join(OsStr::from_bytes(path)) };
        let what = match differs(&tree.inode(id).kind, &full, &redirects) {
            Ok(what) => what.map(str::to_string),
            // The directory's path is longer than the one under which it was written.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::ENAMETOOLONG)) => None,
            Err(error) => Some(error.to_string()),
        };
        found = what.map(|what| format!("/{}: {what}", show(path)));
    });
    found
}

/// How one file of a metadata directory differs from the image's, if it does.
fn differs(kind: &FileKind, path: &Path, redirects: &Redirects) -> io::Result<Option<&'static str>> {
    let meta = match fs::symlink_metadata(path) {
        // Making them needs root.
        Err(error)
            if error.kind() == io::ErrorKind::NotFound && matches!(kind, FileKind::Char(..) | FileKind::Block(..)) =>
        {
            return Ok(None);
        }
        other => other?,
    };
    if meta.mode() & libc::S_IFMT != u32::from(kind.type_bits()) {
        return Ok(Some("another kind of file"));
    }
    let same = match kind {
        FileKind::Dir(names) => {
            for entry in fs::read_dir(path)? {
                if !names.contains_key(entry?.file_name().as_bytes()) {
                    return Ok(Some("a name too many"));
                }
            }
            true
        }
        FileKind::File(Data::Inline(bytes)) => fs::read(path)? == **bytes,
        FileKind::File(Data::Object(digest, size)) => {
            let redirect = redirects.of(digest);
            let mut value = [0; 128];
            let mut leads_to = |prefix: &str| {
                let count = rustix::fs::lgetxattr(path, format!("{prefix}redirect"), &mut value[..]);
                count.map(|count| value[..count] == *redirect.as_bytes())
            };
            let leads = match leads_to("user.overlay.") {
                Err(Errno::NODATA | Errno::NOTSUP) => leads_to("trusted.overlay."),
                other => other,
            };
            meta.len() == *size && leads?
        }
        FileKind::Symlink(target) => fs::read_link(path)?.as_os_str().as_bytes() == &**target,
        FileKind::Char(major, minor) | FileKind::Block(major, minor) => {
            meta.rdev() == rustix::fs::makedev(*major, *minor)
        }
        FileKind::Fifo | FileKind::Socket => true,
    };
    Ok((!same).then_some("not what the image has"))
}

/// Gives a file the owner, attributes, mode and times of inode `id`. What this user or file system cannot set is noted.
pub(super) fn set_meta(tree: &Tree, path: &Path, id: Id, notes: &mut BTreeMap<&'static str, u64>) -> Result<()> {
    let inode = tree.inode(id);
    let meta = &inode.meta;
    let owner = (Some(rustix::fs::Uid::from_raw(meta.uid)), Some(rustix::fs::Gid::from_raw(meta.gid)));
    match rustix::fs::chownat(CWD, path, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::PERM | Errno::INVAL) => {
            *notes.entry("files show your own user as owner: others need root").or_default() += 1;
        }
        other => other.at(path)?,
    }
    let mut mode = meta.mode;
    for (name, value) in &meta.xattrs {
        match rustix::fs::lsetxattr(path, &**name, value, XattrFlags::empty()) {
            Err(Errno::PERM | Errno::NOTSUP | Errno::ACCESS | Errno::INVAL) => {
                *notes.entry("attributes are missing: setting them needs root").or_default() += 1;
                mode = acl::mode_without(name, value, mode);
            }
            // A disk does not stay full, but the attribute would be missing for good.
            Err(errno @ Errno::NOSPC) if is_full(path)? => return Err(errno).at(path),
            // ext4 keeps all of an inode's attributes in one block.
            Err(Errno::NOSPC | Errno::TOOBIG | Errno::RANGE) => {
                *notes.entry("attributes are missing: too large for the store's file system").or_default() += 1;
                mode = acl::mode_without(name, value, mode);
            }
            other => other.at(path)?,
        }
    }
    if !matches!(inode.kind, FileKind::Symlink(_)) {
        rustix::fs::chmod(path, Mode::from_raw_mode(mode.into())).at(path)?;
    }
    let time = Timespec { tv_sec: meta.mtime_s, tv_nsec: meta.mtime_ns.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Inode, Meta};

    #[test]
    fn a_path_too_long_for_a_directory_is_one_short_line() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        let (mut tree, mut path) = (Tree::default(), Vec::new());
        for _ in 0..20 {
            path.extend([b'x'; 250]);
            tree.put(
                &path,
                Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: FileKind::Dir(BTreeMap::new()) },
            )
            .unwrap();
            path.push(b'/');
        }
        let record = store.build().unwrap().publish("deep", &tree, "t", Default::default(), vec![]).unwrap();
        let error = metadata_directory(&store, &record.digest, &Lease::new(&store).unwrap(), true, true)
            .unwrap_err()
            .to_string();
        let short = error.len() < 500 + store.root().as_os_str().len();
        assert!(error.starts_with("mount: xxx") && error.contains("shorter path") && short, "{error}");
        let staged = fs::read_dir(store.path("staging")).unwrap().count();
        assert_eq!(staged, 0, "what was written so far is gone");
    }
}
