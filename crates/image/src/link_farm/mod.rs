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
//! not have: where it cannot be made (no hard links, no room) the image is mounted as it is and starts a little later. Which object
//! had no room for one more name is noted, and no mount tries again before it has (`trees/DIGEST.unshelved`).

use crate::digest::{Digest, hash_reader};
use crate::dirs::remove_tree;
use crate::erofs;
use crate::error::{At, Error, Result};
use crate::mounts::{Held, is_held};
use crate::store::{Lease, Store};
use crate::tree::{Data, Id, Kind, ROOT, Tree};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Objects of one directory: their names fit into one block of it.
const BOARD: u32 = 256;

/// What an object takes in a metadata image, at least: inode and attributes.
const OBJECT_BYTES: u64 = 192;

/// How often a damaged shelf is looked at, whether it is in use.
const LOOKS: u32 = 20;

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

    /// Whether it seems to be whole, by a look at its first object: in a copy of the store the links may have become files, and
    /// what the collector took may have left an empty one.
    pub(crate) fn seems_whole(&self, store: &Store, digest: &Digest) -> bool {
        let Ok(mut boards) = fs::read_dir(self.objects()) else { return false };
        let has_none = || store.tree_objects(digest).is_ok_and(|objects| objects.is_empty());
        let first = || fs::symlink_metadata(self.object(&place(0))).is_ok_and(|first| first.nlink() > 1);
        self.metadata().exists() && if boards.next().is_some() { first() } else { has_none() }
    }

    /// Reads the metadata, and says whether it is what was written for this image, and there are objects beside it.
    fn is_whole(&self, digest: &Digest) -> io::Result<bool> {
        let mut file = File::open(self.metadata())?;
        let meta = file.metadata()?;
        let Some(size) = meta.len().checked_sub(CHECK as u64) else { return Ok(false) };
        let own = own(digest, meta.ino());
        let (found, bytes) = hash_reader(&mut (&mut file).take(size).chain(&own[..]))?;
        let mut check = [0; CHECK];
        file.read_exact(&mut check)?;
        Ok(bytes == size + own.len() as u64 && found.0 == check && self.objects().is_dir())
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
        Ok(false) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(_) => return Ok(None),
    }
    if Unlinkable::is_noted(store, digest) || !has_room(store, digest) {
        return Ok(None);
    }
    let tree = store.tree(digest)?;
    if lease.write_down().is_err() {
        return Ok(None);
    }
    let staged = store.path("staging").join(lease.id());
    let made = fs::create_dir_all(&staged).at(&staged).and_then(|()| {
        if !shelf.path.exists() && make(store, digest, &tree, &staged)? {
            return Ok(());
        }
        replace(store, digest, &tree, &staged)
    });
    let _ = remove_tree(&staged);
    Ok(made.is_ok().then_some(shelf))
}

/// Whether the disk has room for a shelf: it takes less than the image, and a directory for 256 objects. Who tries where there
/// is none makes it but for the end, and the next mount again.
fn has_room(store: &Store, digest: &Digest) -> bool {
    let image = store.tree_path(digest);
    let (Ok(meta), Ok(disk)) = (fs::metadata(&image), rustix::fs::statvfs(&image)) else { return true };
    // Of an image without objects there are three.
    let dirs = meta.len() / (OBJECT_BYTES * u64::from(BOARD)) + 4;
    // Some file systems count nothing.
    let blocks = disk.f_blocks == 0 || disk.f_bavail > meta.len() / disk.f_frsize.max(1) + dirs;
    blocks && (disk.f_files == 0 || disk.f_favail >= dirs)
}

/// What is noted of an object that has as many names as its file system gives a file: while that is so, none of its images gets a
/// new shelf, and to find that out takes a link for each object that stands before it.
struct Unlinkable;

impl Unlinkable {
    /// Where it is noted of an image. The collector takes it with the image.
    fn path(store: &Store, digest: &Digest) -> PathBuf {
        store.path("trees").join(format!("{}.unshelved", digest.hex()))
    }

    /// The note: which object, its inode, and its names. In a copy of the store it is another inode.
    fn of(store: &Store, object: &Digest) -> io::Result<Vec<u8>> {
        let meta = fs::symlink_metadata(store.object_path(object))?;
        Ok([&object.0[..], &meta.ino().to_le_bytes(), &meta.nlink().to_le_bytes()].concat())
    }

    /// Notes it. Without a note the next mount tries again.
    fn note(store: &Store, digest: &Digest, object: &Digest) {
        let _ = Self::of(store, object).and_then(|note| fs::write(Self::path(store, digest), note));
    }

    /// Whether it is noted, and as it was.
    fn is_noted(store: &Store, digest: &Digest) -> bool {
        let Ok(note) = fs::read(Self::path(store, digest)) else { return false };
        let object = note.get(..32).and_then(|raw| Some(Digest(raw.try_into().ok()?)));
        object.is_some_and(|object| Self::of(store, &object).is_ok_and(|now| now == note))
    }
}

/// Writes the metadata of `digest` to `path`.
fn write_metadata(tree: &Tree, digest: &Digest, path: &Path) -> Result<()> {
    let mut file = File::create(path).at(path)?;
    let bytes = metadata(tree, digest, file.metadata().at(path)?.ino())?;
    file.write_all(&bytes).at(path)
}

/// Makes the shelf of `digest` below `staged`, and gives it its name unless there is one of that name: then false.
fn make(store: &Store, digest: &Digest, tree: &Tree, staged: &Path) -> Result<bool> {
    // Who mends shelves waits until this one can be seen.
    let _lock = store.lock_shelves(false)?;
    store.upgrade()?;
    // Before the first write, of whose loss it is to hear.
    let disk = File::open(staged).at(staged)?;
    let (new, shelf) = (Shelf { path: staged.join(END) }, Shelf::of(store, digest));
    fs::create_dir(&new.path).at(&new.path)?;
    fs::create_dir(new.objects()).at(&new.path)?;
    for (number, (object, place)) in placed(tree).enumerate() {
        let at = new.object(&place);
        if number.is_multiple_of(BOARD as usize) {
            let board = at.parent().expect("objects/N");
            fs::create_dir(board).at(board)?;
        }
        let link = || fs::hard_link(store.object_path(&object), &at);
        let linked = match link() {
            // The rest of the image is of use without it. Who brings it looks for the note after it has its name; if it had
            // none before there was the note, it has one now.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                note_incomplete(store, &[object])?;
                link()
            }
            other => other,
        };
        match linked {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(libc::EMLINK) => {
                Unlinkable::note(store, digest, &object);
                return Err(error).at(&at);
            }
            other => other.at(&at)?,
        }
    }
    write_metadata(tree, digest, &new.metadata())?;
    // What has its name is complete, after a power cut too.
    store.settle(&disk, staged)?;
    match fs::rename(&new.path, &shelf.path) {
        // Another mount was first.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::ENOTEMPTY)) => Ok(false),
        other => other.map(|()| true).at(&shelf.path),
    }
}

/// Makes a shelf anew that is there, and whose metadata is no good, as in a copy of a store.
fn replace(store: &Store, digest: &Digest, tree: &Tree, staged: &Path) -> Result<()> {
    let (shelf, path) = (Shelf::of(store, digest), staged.join("meta.erofs"));
    let _lock = store.lock_shelves(true)?;
    // Another mount was first.
    if shelf.is_whole(digest).is_ok_and(|whole| whole) {
        return Ok(());
    }
    // By its hold on this very file the collector knows of a mount that no table shows.
    let mut looks = 0;
    while is_held(&shelf.metadata())? != Held::No && looks < LOOKS {
        // It may only be being looked at.
        looks += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    if looks == LOOKS {
        return Err(Error::Refused(format!("{}: damaged, and in use", shelf.metadata().display())));
    }
    store.upgrade()?;
    let disk = File::open(staged).at(staged)?;
    match fs::create_dir(shelf.objects()) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => made.at(shelf.objects())?,
    }
    let missing = mend_one(store, digest, tree)?.wholly()?.missing;
    if !missing.is_empty() {
        note_incomplete(store, &missing)?;
        // What had its name before there was the note nobody else mends.
        mend_one(store, digest, tree)?.wholly()?;
    }
    write_metadata(tree, digest, &path)?;
    store.settle(&disk, staged)?;
    fs::rename(&path, shelf.metadata()).at(shelf.metadata())
}

/// The digests of objects that some shelf may lack, or have another file of. The collector leaves it, for it is no image's.
fn mark(store: &Store) -> PathBuf {
    store.path("trees").join("shelves-incomplete")
}

/// The same while shelves are mended: what is noted meanwhile is for the next who mends.
fn mending(store: &Store) -> PathBuf {
    store.path("trees").join("shelves-mending")
}

/// Notes objects that shelves lack, or will have another file of: before it is so, for who notes it may end any time.
pub(crate) fn note_incomplete(store: &Store, objects: &[Digest]) -> Result<()> {
    let mark = mark(store);
    let mut file = File::options().append(true).create(true).mode(0o600).open(&mark).at(&mark)?;
    let bytes: Vec<u8> = objects.iter().flat_map(|object| object.0).collect();
    file.write_all(&bytes).at(&mark)
}

/// Whether some shelf may lack an object that there is, or have another file of it.
pub(crate) fn is_mending_due(store: &Store) -> bool {
    if mending(store).exists() {
        return true;
    }
    let noted = match fs::read(mark(store)) {
        Err(error) => return error.kind() != ErrorKind::NotFound,
        Ok(noted) => noted,
    };
    let (objects, rest) = noted.as_chunks::<32>();
    // Half a note may be of any object.
    objects.is_empty() || !rest.is_empty() || objects.iter().any(|raw| store.object_path(&Digest(*raw)).exists())
}

/// Has all shelves lead to the objects that are under their digests now: one that was damaged or missing has another inode
/// than before.
///
/// # Errors
/// The system's. Then it is due still.
pub(crate) fn mend(store: &Store) -> Result<()> {
    let (trees, mark, mending) = (store.path("trees"), mark(store), mending(store));
    let _lock = store.lock_shelves(true)?;
    // There until all is mended.
    if let Ok(left) = fs::read(&mending) {
        note_incomplete(store, &left.as_chunks().0.iter().map(|raw| Digest(*raw)).collect::<Vec<_>>())?;
    }
    match fs::rename(&mark, &mending) {
        Err(error) if error.kind() == ErrorKind::NotFound => File::create(&mending).map(drop).at(&mending)?,
        other => other.at(&mark)?,
    }
    let noted = fs::read(&mending).at(&mending)?;
    let mut missing = Vec::new();
    for entry in fs::read_dir(&trees).at(&trees)? {
        let entry = entry.at(&trees)?;
        let name = entry.file_name();
        let Some((hex, end)) = name.as_encoded_bytes().split_at_checked(64) else { continue };
        let (Some(digest), Some(b"shelf")) = (Digest::from_hex(hex), end.strip_prefix(b".")) else { continue };
        match store.tree(&digest) {
            Ok(tree) => {
                let found = mend_one(store, &digest, &tree)?;
                match found.failed {
                    Some(error) if !is_unlinkable(&error) => return Err(error),
                    // The shelf is of a copy of a store, and keeps its own file; its next mount does without it.
                    _ => missing.extend(found.missing),
                }
            }
            // A damaged image says nothing of its objects before it is built again.
            Err(_) if entry.path().exists() => missing.extend(noted.as_chunks().0.iter().map(|raw| Digest(*raw))),
            Err(_) => {}
        }
    }
    if !missing.is_empty() {
        missing.sort_unstable();
        missing.dedup();
        note_incomplete(store, &missing)?;
    }
    fs::remove_file(&mending).at(&mending)
}

/// Whether a file has as many names as its file system gives one, which may be a single one.
fn is_unlinkable(error: &Error) -> bool {
    let code = if let Error::Io { source, .. } = error { source.raw_os_error() } else { None };
    matches!(code, Some(libc::EMLINK | libc::EPERM | libc::EOPNOTSUPP))
}

/// What was found on a shelf.
#[derive(Default)]
struct Mended {
    /// Names of other files than the objects, which are the objects' now.
    wrong: u64,
    /// Objects that there are none of.
    missing: Vec<Digest>,
    /// Why it ended before all was mended, if it did.
    failed: Option<Error>,
}

impl Mended {
    /// An error if it was not all mended.
    fn wholly(self) -> Result<Self> {
        if let Some(error) = self.failed { Err(error) } else { Ok(self) }
    }
}

/// Mends one shelf, if it is there. The shelves are locked, unless that cannot be: then nothing can be written either.
fn mend_one(store: &Store, digest: &Digest, tree: &Tree) -> Result<Mended> {
    let (shelf, mut found) = (Shelf::of(store, digest), Mended::default());
    if !shelf.objects().is_dir() {
        return Ok(found);
    }
    let inode = |path: &Path| fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    // What one that was killed has left: a name of some object, which would keep its blocks.
    let staged = shelf.path.join("staged");
    let _ = fs::remove_file(&staged);
    for (digest_of, place) in placed(tree) {
        let (object, link) = (store.object_path(&digest_of), shelf.object(&place));
        let mut is_wrong = false;
        loop {
            let Some(there) = inode(&object) else {
                found.missing.push(digest_of);
                break;
            };
            if inode(&link) == Some(there) {
                break;
            }
            let board = link.parent().expect("objects/N");
            // Only below what is there: a shelf that the collector takes meanwhile does not come again.
            let linked = fs::create_dir(board)
                .or_else(|error| if error.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })
                .and_then(|()| fs::hard_link(&object, &staged))
                .and_then(|()| fs::rename(&staged, &link));
            // It is there still if another has mended this beside us, too: a rename over the same file does nothing.
            let _ = fs::remove_file(&staged);
            let Err(error) = linked else {
                // Once more: a build may have replaced the object, and mended this before us.
                is_wrong = true;
                continue;
            };
            if error.raw_os_error() == Some(libc::EMLINK) {
                Unlinkable::note(store, digest, &digest_of);
            }
            // The collector may have taken the shelf, or the object.
            if shelf.objects().is_dir() && inode(&object) == Some(there) {
                is_wrong = true;
                found.failed = Some(Err::<(), _>(error).at(&link).expect_err("just made"));
            }
            break;
        }
        found.wrong += u64::from(is_wrong);
        if found.failed.as_ref().is_some_and(|error| !is_unlinkable(error)) {
            break;
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
    let lock = store.lock_shelves(true);
    let found = mend_one(store, digest, tree)?;
    drop(lock);
    if !found.missing.is_empty() {
        // What is built in its place is another file than the shelf has.
        let _ = note_incomplete(store, &found.missing);
    }
    if found.wrong > 0 {
        let what = match &found.failed {
            None if found.wrong == 1 => "1 file is another than its object; mended".to_owned(),
            None => format!("{} files are others than their objects; mended", found.wrong),
            Some(error) => format!("files are others than the objects, and it cannot be mended: {error}"),
        };
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

    /// Upper layers and metadata directories of other versions lead to places: another order is another form, with another name.
    #[test]
    fn the_places_and_what_is_mounted_are_what_they_were() {
        let tree = tree();
        let all: String = placed(&tree).map(|(digest, place)| format!("{digest} {place}\n")).collect();
        let mounted = erofs::write(&tree, erofs::Layout::Mount).unwrap().head;
        assert_eq!(
            [Digest::of(all.as_bytes()).hex(), Digest::of(&mounted).hex()],
            [
                "24927f03102283e1584ac3397f6dd1761a6e3ea73435ef68b3df54f5bff116a5",
                "11bb5d953e8eba5a59a30991f9a730c56cadc4f7ab9f074f945fe90559093448"
            ]
        );
    }

    /// A build puts an object in its place while a shelf without it is being made.
    #[test]
    fn what_comes_while_a_shelf_is_made_is_on_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        let store = Store::open(&root, "default").unwrap();
        let (build, mut tree) = (store.build().unwrap(), Tree::default());
        for number in 0..3u8 {
            let data = build.put_bytes(&[number; 5000]).unwrap();
            let kind = Kind::File(data);
            tree.put(format!("{number}").as_bytes(), Inode { meta: Meta::default(), kind }).unwrap();
        }
        let digest = build.publish("x", &tree, "t", Default::default(), vec![]).unwrap().digest;
        drop(build);
        let [lost, damaged] = [1, 2].map(|number| store.object_path(&Digest::of(&[number; 5000])));
        fs::remove_file(&lost).unwrap();
        store.condemn(&damaged).unwrap();
        let builder = std::rc::Rc::new(std::cell::Cell::new(None));
        let (started, staged) = (builder.clone(), std::rc::Rc::new(std::cell::Cell::new(0)));
        let looks = staged.clone();
        crate::store::AT_SETTLE.set(Some(Box::new(move || {
            looks.set(looks.get() + 1);
            let root = root.clone();
            let thread = std::thread::spawn(move || {
                let store = Store::open(&root, "default").unwrap();
                let (build, mut tree) = (store.build().unwrap(), Tree::default());
                for number in 1..3u8 {
                    let kind = Kind::File(build.put_bytes(&[number; 5000]).unwrap());
                    tree.put(format!("{number}").as_bytes(), Inode { meta: Meta::default(), kind }).unwrap();
                }
                build.publish("y", &tree, "t", Default::default(), vec![]).unwrap();
            });
            // It is to wait for us; if it does not it is done before.
            let patience = std::time::Instant::now();
            while !thread.is_finished() && patience.elapsed() < Duration::from_millis(500) {
                std::thread::sleep(Duration::from_millis(5));
            }
            started.set(Some(thread));
        })));
        let lease = Lease::new(&store).unwrap();
        assert!(lease.claim_tree(&digest).unwrap());
        let shelf = find(&store, &digest, &lease).unwrap().expect("one was made");
        crate::store::AT_SETTLE.set(None);
        assert_eq!(staged.get(), 1, "durable before it has its name");
        builder.take().unwrap().join().unwrap();
        for (object, place) in placed(&tree) {
            let inode = |path: &Path| fs::metadata(path).unwrap().ino();
            assert_eq!(inode(&shelf.object(&place)), inode(&store.object_path(&object)));
        }
        assert!(!is_mending_due(&store) && !mark(&store).exists());
    }

    /// A store with one image of some objects of 5000 equal bytes each.
    fn built(root: &Path, name: &str, objects: std::ops::Range<u32>) -> (Store, Tree, Digest) {
        let store = Store::open(root, "default").unwrap().without_sync();
        let (tree, digest) = build(&store, name, objects).unwrap();
        (store, tree, digest)
    }

    fn build(store: &Store, name: &str, objects: std::ops::Range<u32>) -> Result<(Tree, Digest)> {
        let (build, mut tree) = (store.build()?, Tree::default());
        for number in objects {
            let kind = Kind::File(build.put_bytes(&content(number))?);
            tree.put(format!("{number:04}").as_bytes(), Inode { meta: Meta::default(), kind })?;
        }
        let digest = build.publish(name, &tree, "t", Default::default(), vec![])?.digest;
        Ok((tree, digest))
    }

    fn content(number: u32) -> Vec<u8> {
        number.to_le_bytes().repeat(1250)
    }

    fn object(store: &Store, number: u32) -> PathBuf {
        store.object_path(&Digest::of(&content(number)))
    }

    fn found(store: &Store, digest: &Digest) -> Option<Shelf> {
        let lease = Lease::new(store).unwrap();
        assert!(lease.claim_tree(digest).unwrap());
        find(store, digest, &lease).unwrap()
    }

    /// The objects that are not on the shelf, or another file there.
    fn not_shelved(store: &Store, tree: &Tree, digest: &Digest) -> Vec<String> {
        let inode = |path: &Path| fs::metadata(path).map(|meta| meta.ino()).ok();
        let (shelf, all) = (Shelf::of(store, digest), placed(tree));
        all.filter(|(object, place)| inode(&shelf.object(place)) != inode(&store.object_path(object)))
            .map(|(_, place)| place)
            .collect()
    }

    /// Makes the mending of shelves fail, as a full disk would or a kill, or makes it work again.
    fn break_mending(store: &Store, broken: bool) {
        let lock = store.path("shelf.lock");
        if broken {
            fs::remove_file(&lock).unwrap();
            fs::create_dir(&lock).unwrap();
        } else {
            fs::remove_dir(&lock).unwrap();
        }
    }

    /// All that a shelf without an object has to tell of it is the note.
    #[test]
    fn a_missing_object_is_noted_until_it_is_on_all_shelves() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..300);
        for number in [7, 270] {
            fs::remove_file(object(&store, number)).unwrap();
        }
        found(&store, &digest).unwrap();
        assert_eq!(fs::read(mark(&store)).unwrap(), [7, 270].map(|number| Digest::of(&content(number)).0).concat());
        // Nobody looks at all shelves for objects that nobody has brought.
        assert!(!is_mending_due(&store));
        build(&store, "y", 300..301).unwrap();
        crate::gc::collect(&store, false).unwrap();
        assert_eq!(fs::read(mark(&store)).unwrap().len(), 64);
        build(&store, "z", 270..271).unwrap();
        assert_eq!(fs::read(mark(&store)).unwrap(), Digest::of(&content(7)).0);
        let at = Shelf::of(&store, &digest);
        assert!(!at.object("/0/07").exists() && at.object("/1/0e").exists());
        build(&store, "z", 7..8).unwrap();
        assert!(!mark(&store).exists() && not_shelved(&store, &tree, &digest).is_empty());
    }

    /// What a build that was killed, or could not mend shelves, has left to do the next does, whatever that builds.
    #[test]
    fn shelves_are_mended_by_the_next_build_if_one_could_not() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..9);
        fs::remove_file(object(&store, 4)).unwrap();
        found(&store, &digest).unwrap();
        for damage in ["missing", "damaged"] {
            if damage == "damaged" {
                store.condemn(&object(&store, 5)).unwrap();
            }
            break_mending(&store, true);
            assert!(build(&store, "x", 0..9).is_err(), "{damage}");
            break_mending(&store, false);
            assert_eq!(not_shelved(&store, &tree, &digest).len(), 1, "{damage}");
            // It has no new object.
            build(&store, "y", 0..1).unwrap();
            assert!(not_shelved(&store, &tree, &digest).is_empty(), "{damage}");
            assert!(!is_mending_due(&store), "{damage}");
        }
    }

    /// An image that cannot be read says nothing of its shelf, and others must not forget for it.
    #[test]
    fn what_a_damaged_image_lacks_is_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..9);
        fs::remove_file(object(&store, 4)).unwrap();
        found(&store, &digest).unwrap();
        fs::write(store.tree_path(&digest), "damaged").unwrap();
        // Others bring this one's object, and one that has to be replaced.
        store.condemn(&object(&store, 5)).unwrap();
        build(&store, "y", 5..6).unwrap();
        build(&store, "z", 4..5).unwrap();
        assert_eq!(not_shelved(&store, &tree, &digest).len(), 2);
        build(&store, "x", 0..9).unwrap();
        assert!(not_shelved(&store, &tree, &digest).is_empty() && !mark(&store).exists());
    }

    /// An object that was removed by hand, for it was damaged, is another file when it comes again.
    #[test]
    fn what_verify_misses_is_on_shelves_when_it_is_built_again() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..9);
        found(&store, &digest).unwrap();
        fs::write(object(&store, 4), "damaged").unwrap();
        fs::remove_file(object(&store, 4)).unwrap();
        assert_eq!(crate::stat::verify(&store, &[], false).unwrap().damaged.len(), 1);
        build(&store, "x", 0..9).unwrap();
        assert!(not_shelved(&store, &tree, &digest).is_empty());
        assert!(crate::stat::verify(&store, &[], false).unwrap().damaged.is_empty() && !mark(&store).exists());
    }

    /// A build that brings an object looks for the note before or after a mount that lacks it has written that.
    #[test]
    fn an_object_that_comes_at_any_moment_of_a_shelf_is_on_it() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..2000);
        for round in 0..10 {
            let _ = remove_tree(&Shelf::of(&store, &digest).path);
            fs::remove_file(object(&store, 0)).unwrap();
            std::thread::scope(|scope| {
                let store = &store;
                scope.spawn(move || {
                    let build = store.build().unwrap();
                    let mut tree = Tree::default();
                    let kind = Kind::File(build.put_bytes(&content(0)).unwrap());
                    tree.put(b"it", Inode { meta: Meta::default(), kind }).unwrap();
                    // The mount has looked for it, or is about to.
                    let begins = || {
                        let staged = fs::read_dir(store.path("staging")).unwrap().flatten();
                        staged.into_iter().any(|dir| dir.path().join(END).join("objects/0/01").exists())
                    };
                    let start = std::time::Instant::now();
                    while !begins() && start.elapsed() < Duration::from_secs(20) {}
                    build.publish("it", &tree, "t", Default::default(), vec![]).unwrap();
                });
                std::thread::sleep(Duration::from_millis(10));
                found(store, &digest).unwrap();
            });
            assert_eq!(not_shelved(&store, &tree, &digest), [""; 0], "round {round}");
        }
    }

    /// The collector comes at any moment of a mount whose image has lost its name.
    #[test]
    fn nobody_collects_what_a_shelf_is_made_of() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            let collector = scope.spawn(|| {
                while !ended.load(relaxed) {
                    crate::gc::collect(&store, false).unwrap();
                }
            });
            for round in 0..60 {
                let (tree, digest) = build(&store, "x", round * 300..round * 300 + 290).unwrap();
                let lease = Lease::new(&store).unwrap();
                lease.claim_image("x").unwrap();
                store.remove("x").unwrap();
                let shelf = find(&store, &digest, &lease).unwrap().expect("one was made");
                for (object, place) in placed(&tree) {
                    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
                    assert_eq!(inode(&shelf.object(&place)), inode(&store.object_path(&object)), "round {round}");
                }
                assert!(shelf.is_whole(&digest).unwrap() && !mark(&store).exists(), "round {round}");
                assert!(!collector.is_finished());
            }
            ended.store(true, relaxed);
        });
        crate::gc::collect(&store, false).unwrap();
        for part in ["trees", "staging", "leases"] {
            assert_eq!(fs::read_dir(store.path(part)).unwrap().count(), 0, "{part}");
        }
    }

    /// In a child process: mends a shelf as a mount does, or as a build.
    #[test]
    fn child_that_mends() {
        let Some(root) = std::env::var_os("PAGEFOLD_TEST_MENDS") else { return };
        let store = Store::open(Path::new(&root), "default").unwrap();
        if std::env::var_os("PAGEFOLD_TEST_BUILDS").is_some() {
            build(&store, "x", 0..300).unwrap();
        } else {
            found(&store, &store.image("x").unwrap().digest).unwrap();
        }
    }

    #[test]
    fn who_mends_may_be_killed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        let (store, tree, digest) = built(&root, "x", 0..300);
        let shelf = found(&store, &digest).unwrap();
        let copy = |path: &Path| {
            fs::copy(path, dir.path().join("copy")).unwrap();
            fs::rename(dir.path().join("copy"), path).unwrap();
        };
        let (mut half, mut wrong) = (0, 0);
        for round in 0..24u64 {
            let builds = round % 2 == 1;
            if builds {
                (0..300).step_by(7).for_each(|number| store.condemn(&object(&store, number)).unwrap());
            } else {
                // As in a copy of the store.
                placed(&tree).for_each(|(_, place)| copy(&shelf.object(&place)));
                copy(&shelf.metadata());
                wrong = not_shelved(&store, &tree, &digest).len();
            }
            // As who ended between two calls leaves it, which hardly any does here.
            fs::hard_link(object(&store, 1), shelf.path.join("staged")).unwrap();
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "link_farm::tests::child_that_mends"]).env("PAGEFOLD_TEST_MENDS", &root);
            if builds {
                child.env("PAGEFOLD_TEST_BUILDS", "");
            }
            let null = std::process::Stdio::null;
            let mut child = child.stdout(null()).stderr(null()).spawn().unwrap();
            std::thread::sleep(Duration::from_micros(4000 + round * 1500));
            child.kill().unwrap();
            child.wait().unwrap();
            half += u32::from(!builds && (1..wrong).contains(&not_shelved(&store, &tree, &digest).len()));
            if builds {
                // What it has put in place of the damaged ones, the next build mends on the shelf.
                build(&store, "x", 0..300).unwrap();
            } else {
                found(&store, &digest).unwrap();
            }
            assert_eq!(not_shelved(&store, &tree, &digest), [""; 0], "round {round}");
            assert!(shelf.is_whole(&digest).unwrap() && !is_mending_due(&store), "round {round}");
            assert_eq!(fs::read_dir(&shelf.path).unwrap().count(), 2, "round {round}: objects and metadata");
        }
        println!("{half} were half mended");
        drop(store.build().unwrap());
        assert_eq!(fs::read_dir(store.path("staging")).unwrap().count(), 0);
    }

    /// A copy of a store, made by a program that knows of no links, may have more shelves than there can be links.
    #[test]
    fn an_object_without_room_for_names_keeps_no_build_from_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..4);
        let shelf = found(&store, &digest).unwrap();
        for path in placed(&tree).map(|(_, place)| shelf.object(&place)).chain([shelf.metadata()]) {
            fs::copy(&path, dir.path().join("copy")).unwrap();
            fs::rename(dir.path().join("copy"), path).unwrap();
        }
        let others = dir.path().join("others");
        fs::create_dir(&others).unwrap();
        let link = |number: &u32| fs::hard_link(object(&store, 1), others.join(number.to_string())).is_ok();
        if (0..70_000).take_while(link).count() == 70_000 {
            println!("SKIPPED: the temporary directory's file system has more links than that");
            return;
        }
        store.condemn(&object(&store, 2)).unwrap();
        build(&store, "y", 2..3).unwrap();
        assert_eq!(not_shelved(&store, &tree, &digest), ["/0/01"]);
        assert_eq!(fs::read(shelf.object("/0/01")).unwrap(), content(1));
        assert!(!is_mending_due(&store));
        // That one is no shelf for a mount.
        assert!(found(&store, &digest).is_none());
    }

    #[test]
    fn verify_and_builds_mend_the_same_shelf() {
        let dir = tempfile::tempdir().unwrap();
        let (store, tree, digest) = built(&dir.path().join("s"), "x", 0..4);
        found(&store, &digest).unwrap();
        let ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                        verify(&store, &digest, &tree).unwrap();
                    }
                });
            }
            for round in 0..300 {
                store.condemn(&object(&store, round % 4)).unwrap();
                build(&store, "x", 0..4).unwrap();
            }
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(not_shelved(&store, &tree, &digest), [""; 0]);
        assert_eq!(fs::read_dir(&Shelf::of(&store, &digest).path).unwrap().count(), 2, "objects and metadata");
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
