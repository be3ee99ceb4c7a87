//! Shelves: an image's objects once more, as hard links in the order of its tree, and the metadata image that leads there.
//!
//! ```text
//! trees/DIGEST.shelf/meta.erofs     the image's metadata in the form that is mounted
//! trees/DIGEST.shelf/objects/3/1f   its objects by number, 256 to a directory
//! ```
//!
//! Objects are found by digest, and digests scatter: a program that starts from cold caches would read one block of a
//! directory for each file, where in a plain tree one block names all its neighbours. By number they are
//! neighbours again, and a number takes an eighth of a digest's room in the metadata image, of which the kernel reads each block
//! singly. A hard link is the object itself: the page cache is its inode's, whatever name has led there.
//!
//! A shelf is made by the first mount of its image and goes with the image. It has nothing that the image and the objects do
//! not have: where it cannot be made (no hard links, no room) the image is mounted as it is and starts a little later.

use crate::digest::{Digest, hash_reader};
use crate::erofs;
use crate::error::{At, Result};
use crate::mount::remove_tree;
use crate::mounts::{Held, is_held};
use crate::store::{Lease, Store, random_id};
use crate::tree::{Data, Id, Kind, ROOT, Tree};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Objects of one directory: their names fit into one block of it.
const BOARD: u32 = 256;

/// The end of a shelf's name.
pub(crate) const END: &str = "shelf";

/// Bytes behind the metadata: SHA-256 of that, of the image's digest and of the file's own inode number. In a copy of the store
/// that has another, and copies of the objects may be in the links' places.
const CHECK: usize = 32;

/// Where an image's objects are in the order of its tree.
#[derive(Clone, Debug)]
pub(crate) struct Shelf {
    path: PathBuf,
}

impl Shelf {
    /// That of an image, whether there is one or not.
    pub(crate) fn of(store: &Store, digest: &Digest) -> Self {
        Self { path: store.path("trees").join(format!("{}.{END}", digest.hex())) }
    }

    /// The metadata image.
    pub(crate) fn metadata(&self) -> PathBuf {
        self.path.join("meta.erofs")
    }

    /// The objects: a data-only layer of overlayfs.
    pub(crate) fn objects(&self) -> PathBuf {
        self.path.join("objects")
    }

    /// The object with a place that [`place`] gave.
    pub(crate) fn object(&self, place: &str) -> PathBuf {
        self.objects().join(place.trim_start_matches('/'))
    }

    /// Reads the metadata, and says whether it is what was written for this image.
    fn is_whole(&self, digest: &Digest) -> io::Result<bool> {
        let mut file = File::open(self.metadata())?;
        let meta = file.metadata()?;
        let Some(size) = meta.len().checked_sub(CHECK as u64) else { return Ok(false) };
        let own = own(digest, meta.ino());
        let (found, bytes) = hash_reader(&mut (&mut file).take(size).chain(&own[..]))?;
        let mut check = [0; CHECK];
        file.read_exact(&mut check)?;
        Ok(bytes == size + own.len() as u64 && found.0 == check)
    }
}

/// What a shelf takes on the disk. The objects' blocks are theirs.
pub(crate) fn disk_bytes(path: &Path) -> u64 {
    let blocks = |path: &Path| fs::symlink_metadata(path).map_or(0, |meta| meta.blocks() * 512);
    let objects = path.join("objects");
    let boards = fs::read_dir(&objects).into_iter().flatten().flatten();
    blocks(path)
        + blocks(&path.join("meta.erofs"))
        + blocks(&objects)
        + boards.map(|board| blocks(&board.path())).sum::<u64>()
}

/// The inodes of the form that is mounted, in its order. A directory is followed by its files, for who looks one up has looked that
/// up before; and directories of one directory stand together, small ones first, so that the way to a file leads through
/// few blocks.
pub(crate) fn order(tree: &Tree) -> Vec<Id> {
    let (mut order, mut seen) = (Vec::new(), HashSet::new());
    // Puts a directory and its files into the order, and gives its directories.
    let mut put = |dir: Id| {
        order.push(dir);
        let mut below = Vec::new();
        for (_, child) in tree.children(dir) {
            if matches!(tree.inode(child).kind, Kind::Dir(_)) {
                below.push(child);
            } else if seen.insert(child) {
                order.push(child);
            }
        }
        below.sort_by_key(|&dir| tree.children(dir).count());
        below
    };
    let mut todo = vec![put(ROOT)];
    while let Some(dirs) = todo.pop() {
        let below: Vec<_> = dirs.into_iter().map(&mut put).filter(|dirs| !dirs.is_empty()).collect();
        todo.extend(below.into_iter().rev());
    }
    order
}

/// The objects of a tree in the order of `order`, each once: its place is its number.
pub(crate) fn places(tree: &Tree, order: &[Id]) -> Vec<Digest> {
    let mut seen = HashSet::new();
    let object = |id: &Id| match tree.inode(*id).kind {
        Kind::File(Data::Object(digest, _)) => Some(digest),
        _ => None,
    };
    order.iter().filter_map(object).filter(|digest| seen.insert(*digest)).collect()
}

/// Where object `number` is, from the shelf's objects on.
pub(crate) fn place(number: u32) -> String {
    format!("/{:x}/{:02x}", number / BOARD, number % BOARD)
}

/// Whether `place` may be one, and leads nowhere else.
pub(crate) fn is_place(place: &str) -> bool {
    place.starts_with('/') && place.bytes().all(|byte| byte == b'/' || byte.is_ascii_hexdigit())
}

/// The places of a tree's objects.
pub(crate) fn placed(tree: &Tree) -> impl Iterator<Item = (Digest, String)> {
    places(tree, &order(tree)).into_iter().zip((0..).map(place))
}

/// What the check covers beside the metadata.
fn own(digest: &Digest, inode: u64) -> [u8; 40] {
    let mut own = [0; 40];
    own[..32].copy_from_slice(&digest.0);
    own[32..].copy_from_slice(&inode.to_le_bytes());
    own
}

/// The metadata of `digest` in the form that is mounted, as the file of number `inode` has it.
fn metadata(tree: &Tree, digest: &Digest, inode: u64) -> Result<Vec<u8>> {
    let mut bytes = erofs::write(tree, erofs::Layout::Mount)?.head;
    let size = bytes.len();
    bytes.extend(own(digest, inode));
    let check = Digest::of(&bytes);
    bytes.truncate(size);
    bytes.extend(check.0);
    Ok(bytes)
}

/// The shelf of an image that `lease` has claimed, made if there is none, and its metadata checked. `None` where it cannot be
/// had: then the image itself is to be mounted.
///
/// # Errors
/// A damaged metadata image, of which none can be made.
pub(crate) fn find(store: &Store, digest: &Digest, lease: &Lease) -> Result<Option<Shelf>> {
    let shelf = Shelf::of(store, digest);
    match shelf.is_whole(digest) {
        Ok(true) => return Ok(Some(shelf)),
        // Of a mount that reads it nobody may take it away.
        Ok(false) if is_held(&shelf.metadata())? != Held::No => return Ok(None),
        Ok(false) => drop(fs::remove_file(shelf.metadata())),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(_) => return Ok(None),
    }
    let tree = store.tree(digest)?;
    let staged = store.path("staging").join(lease.id());
    let made = fs::create_dir_all(&staged).at(&staged).and_then(|()| make(store, digest, &tree, &staged.join(END)));
    let _ = remove_tree(&staged);
    Ok(made.is_ok().then_some(shelf))
}

/// Makes the shelf of `digest` at `staged`, and gives it its name.
fn make(store: &Store, digest: &Digest, tree: &Tree, staged: &Path) -> Result<()> {
    store.upgrade()?;
    let (new, shelf) = (Shelf { path: staged.into() }, Shelf::of(store, digest));
    fs::create_dir(&new.path).at(&new.path)?;
    fs::create_dir(new.objects()).at(&new.path)?;
    let mut missing = false;
    for (number, (object, place)) in placed(tree).enumerate() {
        let at = new.object(&place);
        if number.is_multiple_of(BOARD as usize) {
            let board = at.parent().expect("objects/N");
            fs::create_dir(board).at(board)?;
        }
        match fs::hard_link(store.object_path(&object), &at) {
            // The rest of the image is of use without it.
            Err(error) if error.kind() == ErrorKind::NotFound => missing = true,
            other => other.at(&at)?,
        }
    }
    if missing {
        let mark = mark(store);
        File::create(&mark).at(&mark)?;
    }
    let path = new.metadata();
    let mut file = File::create(&path).at(&path)?;
    let bytes = metadata(tree, digest, file.metadata().at(&path)?.ino())?;
    file.write_all(&bytes).at(&path)?;
    match fs::rename(&new.path, &shelf.path) {
        // Another mount was first; or there is one whose metadata was no good, as in a copy of a store.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::ENOTEMPTY)) => {
            if !shelf.metadata().exists() {
                mend_one(store, digest, tree)?;
                fs::rename(&path, shelf.metadata()).at(shelf.metadata())?;
            }
            Ok(())
        }
        other => other.at(&shelf.path),
    }
}

/// There while some shelf may lack an object.
fn mark(store: &Store) -> PathBuf {
    store.path("cache").join("shelves-incomplete")
}

/// Whether some shelf may lack an object.
pub(crate) fn is_any_incomplete(store: &Store) -> bool {
    mark(store).exists()
}

/// Has all shelves lead to the objects that are under their digests now: one that was damaged or missing has another inode
/// than before.
///
/// # Errors
/// The system's.
pub(crate) fn mend(store: &Store) -> Result<()> {
    let (trees, mut all) = (store.path("trees"), true);
    for entry in fs::read_dir(&trees).at(&trees)? {
        let name = entry.at(&trees)?.file_name();
        let Some((hex, end)) = name.as_encoded_bytes().split_at_checked(64) else { continue };
        let (Some(digest), Some(b"shelf")) = (Digest::from_hex(hex), end.strip_prefix(b".")) else { continue };
        // A damaged image says nothing of its objects.
        if let Ok(tree) = store.tree(&digest) {
            all &= mend_one(store, &digest, &tree)?.missing == 0;
        }
    }
    if all {
        let _ = fs::remove_file(mark(store));
    }
    Ok(())
}

/// What was found on a shelf.
#[derive(Default)]
struct Mended {
    /// Names of other files than the objects, which are the objects' now.
    wrong: u64,
    /// Objects that there are none of.
    missing: u64,
}

/// Mends one shelf, if it is there.
fn mend_one(store: &Store, digest: &Digest, tree: &Tree) -> Result<Mended> {
    let (shelf, mut found) = (Shelf::of(store, digest), Mended::default());
    if !shelf.objects().is_dir() {
        return Ok(found);
    }
    let inode = |path: &Path| fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    for (object, place) in placed(tree) {
        let (object, link) = (store.object_path(&object), shelf.object(&place));
        let Some(there) = inode(&object) else {
            found.missing += 1;
            continue;
        };
        if inode(&link) == Some(there) {
            continue;
        }
        let staged = shelf.path.join(random_id()?);
        let board = link.parent().expect("objects/N");
        let linked = fs::create_dir_all(board)
            .and_then(|()| fs::hard_link(&object, &staged))
            .and_then(|()| fs::rename(&staged, &link));
        match linked {
            Ok(()) => found.wrong += 1,
            Err(error) => {
                let _ = fs::remove_file(&staged);
                // The collector may have taken the shelf, or the object.
                if shelf.objects().is_dir() && inode(&object) == Some(there) {
                    return Err(error).at(&link);
                }
            }
        }
    }
    Ok(found)
}

/// What is wrong with an image's shelf, if there is one: files and what to say of each. Links are mended.
///
/// # Errors
/// The system's.
pub(crate) fn verify(store: &Store, digest: &Digest, tree: &Tree) -> Result<Vec<(PathBuf, String)>> {
    let path = Shelf::of(store, digest).metadata();
    let mut all = Vec::new();
    match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        other => {
            other.at(&path)?;
            let (there, wanted) = (fs::read(&path).at(&path)?, erofs::write(tree, erofs::Layout::Mount)?.head);
            // What it is checked by may be of the store that this is a copy of: then the next mount makes it again.
            if there.len() != wanted.len() + CHECK || there[..wanted.len()] != wanted {
                let again = "unmount the image and remove this file; the next mount makes it again";
                all.push((path, format!("not what the image makes it; {again}")));
            }
        }
    }
    let wrong = mend_one(store, digest, tree)?.wrong;
    if wrong > 0 {
        let what = format!("{wrong} files are others than the objects; mended");
        all.push((Shelf::of(store, digest).objects(), what));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Inode, Meta};

    fn tree() -> Tree {
        let mut tree = Tree::default();
        let dir = || Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: Kind::Dir(Default::default()) };
        for path in ["usr", "usr/lib", "usr/lib/deep", "usr/bin", "etc"] {
            tree.put(path.as_bytes(), dir()).unwrap();
        }
        for number in 0..700u32 {
            // Every third is some other's twin.
            let data = Data::Object(Digest::of(&(number - number % 3 / 2).to_le_bytes()), 100);
            let file = Inode { meta: Meta::default(), kind: Kind::File(data) };
            let dir = ["usr/lib", "usr/lib/deep", "usr/bin", "etc", "."][number as usize % 5];
            tree.put(format!("{dir}/{number:03}").as_bytes(), file).unwrap();
        }
        let (etc, file) = (tree.find(b"etc").unwrap(), tree.find(b"usr/bin/002").unwrap());
        tree.link(etc, b"linked", file).unwrap();
        tree
    }

    #[test]
    fn the_order_has_all_and_each_directory_with_its_files() {
        let tree = tree();
        let (order, (mut reachable, _)) = (order(&tree), tree.reachable());
        let mut sorted = order.clone();
        sorted.sort_unstable();
        reachable.sort_unstable();
        assert_eq!((order[0], sorted), (ROOT, reachable));
        let at = |id: Id| order.iter().position(|other| *other == id).unwrap();
        let mut seen = HashSet::new();
        for dir in order.iter().filter(|id| matches!(tree.inode(**id).kind, Kind::Dir(_))) {
            let is_file = |id: &Id| !matches!(tree.inode(*id).kind, Kind::Dir(_));
            let files = tree.children(*dir).map(|(_, child)| child).filter(|id| is_file(id) && seen.insert(*id));
            for (number, file) in files.enumerate() {
                assert_eq!(at(file), at(*dir) + 1 + number);
            }
        }
        let dirs = ["", "etc", "usr", "usr/bin", "usr/lib", "usr/lib/deep"];
        let mut tree = tree;
        let found = dirs.map(|path| if path.is_empty() { ROOT } else { tree.find(path.as_bytes()).unwrap() });
        let mut by_order = found;
        by_order.sort_by_key(|dir| at(*dir));
        // `usr` has two names in it, and so stands before `etc`.
        assert_eq!(by_order, [found[0], found[2], found[1], found[3], found[4], found[5]]);
    }

    #[test]
    fn each_object_has_one_place() {
        let tree = tree();
        let (objects, all): (HashSet<_>, Vec<_>) =
            (tree.objects().iter().map(|object| object.0).collect(), placed(&tree).collect());
        assert_eq!(all.len(), objects.len());
        assert_eq!(all.iter().map(|(digest, _)| *digest).collect::<HashSet<_>>(), objects);
        assert_eq!(all.iter().map(|(_, place)| place).collect::<HashSet<_>>().len(), objects.len());
        assert_eq!([0, 255, 256, 1 << 20].map(place), ["/0/00", "/0/ff", "/1/00", "/1000/00"]);
        assert!(all.iter().all(|(_, place)| is_place(place)));
        assert!(["/../../x", "0/00", "/0/00\0"].iter().all(|place| !is_place(place)));
    }

    #[test]
    fn what_is_mounted_takes_half_the_blocks_of_inodes() {
        let tree = tree();
        let size = |layout| erofs::write(&tree, layout).unwrap().head.len();
        let (named, mounted) = (size(erofs::Layout::Metadata), size(erofs::Layout::Mount));
        assert!(700 * 192 < named && mounted < named - 700 * 80, "{named} {mounted}");
        assert_eq!(
            erofs::write(&tree, erofs::Layout::Mount).unwrap().head,
            erofs::write(&tree, erofs::Layout::Mount).unwrap().head
        );
    }
}
