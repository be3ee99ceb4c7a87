//! Directories into trees: walked by descriptor, read on all processors, unchanged files taken from the stat cache.
//!
//! *The stat cache.* A file with the file system, inode, size, mtime and ctime of the last build has the digest
//! of the last build: ctime cannot be set back without setting the clock. The exception is a ctime stored in a disk image,
//! and there the file system's identity changes with each mount ([`pagefold_os::filesystem`]). A file that changed within
//! the last two seconds before its build is not remembered, because a later change could carry the same times. A write
//! through a mapping changes no time while the page is dirty: dirty pages are written out before they are read.

use super::Build;
use super::omissions::{Omissions, clean_xattrs};
use super::read_files::{ReadFile, read_files, read_replaced};
use super::source::{SourceDirectory, file_state, meta};
use super::walk::{FoundFile, Options, Walked, walk};
use crate::digest::Digest;
use crate::error::{At, Result};
use crate::progress::Progress;
use crate::store::{StatCache, StatEntry};
use crate::tree::{Data, FileKind, INLINE_MAX, Inode, Tree};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;

/// Reads directory `root` into a tree and its files into the store. Files that go away meanwhile are left out, and noted if
/// their names were seen; a file that is replaced by another one is read as the new one.
///
/// # Errors
/// Files that cannot be read or keep changing, a full store.
pub fn from_directory(
    build: &Build,
    root: &Path,
    options: Options,
    omissions: &mut Omissions,
    progress: &Progress,
) -> Result<Tree> {
    let source = SourceDirectory::open(root)?;
    let Walked { mut tree, files, bytes } = walk(&source, build.store().root(), options, omissions)?;
    #[cfg(test)]
    AFTER_WALK.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
    progress.expect(bytes);
    let cache_path = StatCache::path(build.store(), source.root());
    let cache = if options.rehash { StatCache::default() } else { StatCache::load(&cache_path) };
    let Volumes { present, gone, ids } = identify_volumes(&source, files)?;
    let key = |file: &FoundFile| (ids[&file.device], file.inode);
    let mut remembered = Vec::new();
    let changed = take_unchanged(build, present, &cache, key, &mut tree, &mut remembered, progress)?;
    for (file, read) in read_files(build, &source, &changed, progress)? {
        let Some(read) = read else {
            read_replaced(build, &source, file, &mut tree, omissions, progress)?;
            continue;
        };
        if let (Data::Object(digest, _), true) = (&read.data, read.is_settled) {
            remembered.push((key(file), (file_state(&read.stat), *digest)));
        }
        fill_in(&mut tree, file, read, omissions);
    }
    for file in &gone {
        read_replaced(build, &source, file, &mut tree, omissions, progress)?;
    }
    remembered.sort_unstable_by_key(|entry| entry.0);
    StatCache::save(&cache_path, &remembered, build.staging())?;
    Ok(tree)
}

/// Found files, and the identities of their file systems.
struct Volumes {
    present: Vec<FoundFile>,
    /// Files on a file system that cannot be identified, because they are gone.
    gone: Vec<FoundFile>,
    /// Identities by device number.
    ids: HashMap<u64, u64>,
}

/// Identifies the file system of each file, by the first file of it that is still there.
fn identify_volumes(source: &SourceDirectory, files: Vec<FoundFile>) -> Result<Volumes> {
    let mut volumes = Volumes { present: Vec::with_capacity(files.len()), gone: Vec::new(), ids: HashMap::new() };
    for file in files {
        if let Entry::Vacant(new) = volumes.ids.entry(file.device) {
            let Some(open) = file.open(source)? else {
                volumes.gone.push(file);
                continue;
            };
            new.insert(pagefold_os::filesystem::identity(&open.file).at(open.path)?);
        }
        volumes.present.push(file);
    }
    Ok(volumes)
}

/// Fills in the files that the cache knows, if the store has their objects. Returns the files that must be read.
fn take_unchanged(
    build: &Build,
    mut files: Vec<FoundFile>,
    cache: &StatCache,
    key: impl Fn(&FoundFile) -> (u64, u64),
    tree: &mut Tree,
    remembered: &mut Vec<StatEntry>,
    progress: &Progress,
) -> Result<Vec<FoundFile>> {
    let known = |file: &FoundFile| -> Option<(Digest, u64)> {
        let digest = cache.digest(key(file), file.state)?;
        (file.state.size > INLINE_MAX).then_some((digest, file.state.size))
    };
    let in_store = build.has_all(&files.iter().filter_map(known).collect::<Vec<_>>())?;
    let mut in_store = in_store.into_iter();
    files.retain(|file| {
        let Some((digest, size)) = known(file).filter(|_| in_store.next() == Some(true)) else { return true };
        build.stats().files_unchanged.fetch_add(1, Ordering::Relaxed);
        progress.add(size, true);
        remembered.push((key(file), (file.state, digest)));
        tree.inode_mut(file.id).kind = FileKind::File(Data::Object(digest, size));
        false
    });
    Ok(files)
}

/// Fills in a file that was read.
fn fill_in(tree: &mut Tree, file: &FoundFile, read: ReadFile, omissions: &mut Omissions) {
    let inode = tree.inode_mut(file.id);
    let xattrs = match read.xattrs {
        Some(mut xattrs) => {
            clean_xattrs(&mut xattrs, file.names[0].1.as_os_str().as_bytes(), omissions);
            xattrs
        }
        None => std::mem::take(&mut inode.meta.xattrs),
    };
    *inode = Inode { meta: meta(&read.stat, xattrs), kind: FileKind::File(read.data) };
}

#[cfg(test)]
thread_local! {
    /// What this thread's tests do after the walk, before any file is read.
    static AFTER_WALK: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
mod tests {
    use super::super::source::read_xattrs;
    use super::*;
    use crate::store::Store;
    use rustix::fs::{CWD, FileType, Mode};
    use std::ffi::OsStr;
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// Builds `tree`, in which `change` happens between the walk and the reading.
    fn build_while(store: &Store, tree: &Path, change: impl Fn() + 'static) -> Result<(Tree, Vec<String>)> {
        let (build, mut omissions) = (store.build()?, Omissions::default());
        AFTER_WALK.set(Some(Box::new(change)));
        let built = from_directory(&build, tree, Options::default(), &mut omissions, &Progress::silent());
        AFTER_WALK.set(None);
        Ok((built?, omissions.lines()))
    }

    #[test]
    fn a_file_replaced_while_the_tree_is_read_is_the_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let (top, aside) = (dir.path().join("tree"), dir.path().join("aside"));
        fs::create_dir(&top).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        for name in ["a", "b", "both1", "gone", "half1", "one1", "z"] {
            fs::write(top.join(name), [1; 1000]).unwrap();
        }
        for (first, second) in [("both1", "both2"), ("half1", "half2"), ("one1", "one2")] {
            fs::hard_link(top.join(first), top.join(second)).unwrap();
        }
        let change = {
            let top = top.clone();
            move || {
                // The first file of all, one of several names, all of them, and one with the other gone.
                for (name, byte, mode) in [
                    ("a", 2, 0o600),
                    ("z", 3, 0o751),
                    ("both1", 4, 0o644),
                    ("both2", 5, 0o644),
                    ("half1", 6, 0o644),
                    ("one1", 7, 0o644),
                ] {
                    fs::write(&aside, vec![byte; 2000]).unwrap();
                    fs::set_permissions(&aside, fs::Permissions::from_mode(mode)).unwrap();
                    fs::rename(&aside, top.join(name)).unwrap();
                }
                fs::remove_file(top.join("gone")).unwrap();
                fs::remove_file(top.join("one2")).unwrap();
            }
        };
        let (mut tree, notes) = build_while(&store, &top, change).unwrap();
        let (old, new) = (|| Digest::of(&[1; 1000]), |byte| Digest::of(&[byte; 2000]));
        for (name, digest) in [
            ("a", new(2)),
            ("b", old()),
            ("both1", new(4)),
            ("both2", new(5)),
            ("half1", new(6)),
            ("half2", old()),
            ("one1", new(7)),
            ("z", new(3)),
        ] {
            let id = tree.find(name.as_bytes()).unwrap();
            let FileKind::File(Data::Object(found, _)) = tree.inode(id).kind else { panic!("{name}") };
            assert_eq!(found, digest, "{name}");
        }
        for (name, mode) in [("a", 0o600), ("z", 0o751)] {
            let id = tree.find(name.as_bytes()).unwrap();
            assert_eq!(tree.inode(id).meta.mode, mode, "{name}");
        }
        assert!(tree.find(b"gone").is_none() && tree.find(b"one2").is_none());
        assert!(notes.len() == 1 && notes[0].contains("went away") && notes[0].contains("(2; first: "), "{notes:?}");
    }

    /// A file with the inode number of one that went away counts as the same file with other content.
    #[test]
    fn content_and_metadata_are_those_of_the_opened_file() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("tree");
        fs::create_dir(&top).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        for name in ["a", "link1", "z"] {
            fs::write(top.join(name), [1; 1000]).unwrap();
        }
        fs::hard_link(top.join("link1"), top.join("link2")).unwrap();
        let change = {
            let top = top.clone();
            move || {
                for name in ["a", "link1"] {
                    let path = top.join(name);
                    fs::write(&path, [2; 3000]).unwrap();
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o4711)).unwrap();
                    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
                    File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
                    let _ = rustix::fs::setxattr(&path, "user.new", b"1", rustix::fs::XattrFlags::empty());
                }
            }
        };
        let has = || read_xattrs(&File::open(top.join("a")).unwrap(), OsStr::new("")).unwrap();
        let (mut tree, _) = build_while(&store, &top, change).unwrap();
        for (name, mode, byte) in [("a", 0o4711, 2), ("link1", 0o4711, 2), ("link2", 0o4711, 2), ("z", 0o644, 1)] {
            let id = tree.find(name.as_bytes()).unwrap();
            let inode = tree.inode(id);
            let digest = Digest::of(&vec![byte; if byte == 2 { 3000 } else { 1000 }]);
            assert!(matches!(inode.kind, FileKind::File(Data::Object(found, _)) if found == digest), "{name}");
            if byte == 2 {
                assert_eq!((inode.meta.mode, inode.meta.mtime_s), (mode, 1_000_000), "{name}");
                assert_eq!(inode.meta.xattrs, has(), "{name}");
            }
        }
        assert_eq!(tree.find(b"link1"), tree.find(b"link2"));
    }

    #[test]
    fn a_file_replaced_by_another_kind_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("tree");
        fs::create_dir(&top).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        let file = top.canonicalize().unwrap().join("file");
        let makes: [fn(&Path); 3] = [
            |path| symlink("x", path).unwrap(),
            |path| fs::create_dir(path).unwrap(),
            |path| rustix::fs::mknodat(CWD, path, FileType::Socket, Mode::RUSR, 0).unwrap(),
        ];
        for make in makes {
            fs::write(&file, [1; 1000]).unwrap();
            let at = file.clone();
            let change = move || {
                fs::remove_file(&at).unwrap();
                make(&at);
            };
            let error = build_while(&store, &top, change).unwrap_err().to_string();
            assert!(error.starts_with(file.to_str().unwrap()) && error.contains("build again"), "{error}");
            fs::remove_file(&file).or_else(|_| fs::remove_dir(&file)).unwrap();
        }
    }
}
