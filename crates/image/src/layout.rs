//! The order of a tree's inodes in the mounted metadata image, and the place of each object in the image's link farm.
//!
//! Both follow from the tree alone: the writer of the metadata image and the maker of the link farm compute them
//! independently and must agree. Upper layers and metadata directories of earlier versions hold places, so another order
//! would be another store format.

use crate::digest::Digest;
use crate::tree::{Data, FileKind, Id, ROOT, Tree};
use std::collections::HashSet;

/// Objects of one directory of a link farm: their names fit into one block of it.
pub(crate) const OBJECTS_PER_DIRECTORY: u32 = 256;

/// The inodes of a tree in the order of the mounted metadata image.
///
/// A directory is followed by its files: a lookup of a file has looked up the directory just before. The
/// subdirectories of one directory stand together, small ones first, so the path to a file leads through few blocks.
pub(crate) fn order(tree: &Tree) -> Vec<Id> {
    let (mut order, mut seen) = (Vec::new(), HashSet::new());
    // Appends a directory and its files to the order, and returns its subdirectories.
    let mut append = |dir: Id| {
        order.push(dir);
        let mut below = Vec::new();
        for (_, child) in tree.children(dir) {
            if matches!(tree.inode(child).kind, FileKind::Dir(_)) {
                below.push(child);
            } else if seen.insert(child) {
                order.push(child);
            }
        }
        below.sort_by_key(|&dir| tree.children(dir).count());
        below
    };
    let mut todo = vec![append(ROOT)];
    while let Some(dirs) = todo.pop() {
        let below: Vec<_> = dirs.into_iter().map(&mut append).filter(|dirs| !dirs.is_empty()).collect();
        todo.extend(below.into_iter().rev());
    }
    order
}

/// The objects of the inodes `order`, each once: an object's index is its number.
pub(crate) fn numbered_objects(tree: &Tree, order: &[Id]) -> Vec<Digest> {
    let mut seen = HashSet::new();
    let object = |id: &Id| match tree.inode(*id).kind {
        FileKind::File(Data::Object(digest, _)) => Some(digest),
        _ => None,
    };
    order.iter().filter_map(object).filter(|digest| seen.insert(*digest)).collect()
}

/// The path of object `number`, relative to the link farm's objects.
pub(crate) fn place(number: u32) -> String {
    format!("/{:x}/{:02x}", number / OBJECTS_PER_DIRECTORY, number % OBJECTS_PER_DIRECTORY)
}

/// Returns true if `place` has only the characters of a place, so that it cannot lead out of the link farm.
pub(crate) fn is_place(place: &str) -> bool {
    place.starts_with('/') && place.bytes().all(|byte| byte == b'/' || byte.is_ascii_hexdigit())
}

/// The objects of a tree with their places, by number.
pub(crate) fn placed_objects(tree: &Tree) -> impl Iterator<Item = (Digest, String)> {
    numbered_objects(tree, &order(tree)).into_iter().zip((0..).map(place))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tree::{Inode, Meta};

    /// Seven hundred files in nested directories, with equal files and a hard link among them.
    pub(crate) fn tree() -> Tree {
        let mut tree = Tree::default();
        let dir = || Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: FileKind::Dir(Default::default()) };
        for path in ["usr", "usr/lib", "usr/lib/deep", "usr/bin", "etc"] {
            tree.put(path.as_bytes(), dir()).unwrap();
        }
        for number in 0..700u32 {
            // Every third file equals another one.
            let data = Data::Object(Digest::of(&(number - number % 3 / 2).to_le_bytes()), 100);
            let file = Inode { meta: Meta::default(), kind: FileKind::File(data) };
            let dir = ["usr/lib", "usr/lib/deep", "usr/bin", "etc", "."][number as usize % 5];
            tree.put(format!("{dir}/{number:03}").as_bytes(), file).unwrap();
        }
        let (etc, file) = (tree.find(b"etc").unwrap(), tree.find(b"usr/bin/002").unwrap());
        tree.link(etc, b"linked", file).unwrap();
        tree
    }

    #[test]
    fn the_order_has_all_inodes_and_each_directory_with_its_files() {
        let tree = tree();
        let (order, (mut reachable, _)) = (order(&tree), tree.reachable());
        let mut sorted = order.clone();
        sorted.sort_unstable();
        reachable.sort_unstable();
        assert_eq!((order[0], sorted), (ROOT, reachable));
        let at = |id: Id| order.iter().position(|other| *other == id).unwrap();
        let mut seen = HashSet::new();
        for dir in order.iter().filter(|id| matches!(tree.inode(**id).kind, FileKind::Dir(_))) {
            let is_file = |id: &Id| !matches!(tree.inode(*id).kind, FileKind::Dir(_));
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
        // `usr` has two names in it, and therefore stands before `etc`.
        assert_eq!(by_order, [found[0], found[2], found[1], found[3], found[4], found[5]]);
    }

    #[test]
    fn each_object_has_one_place() {
        let tree = tree();
        let (objects, all): (HashSet<_>, Vec<_>) =
            (tree.objects().iter().map(|object| object.0).collect(), placed_objects(&tree).collect());
        assert_eq!(all.len(), objects.len());
        assert_eq!(all.iter().map(|(digest, _)| *digest).collect::<HashSet<_>>(), objects);
        assert_eq!(all.iter().map(|(_, place)| place).collect::<HashSet<_>>().len(), objects.len());
        assert_eq!([0, 255, 256, 1 << 20].map(place), ["/0/00", "/0/ff", "/1/00", "/1000/00"]);
        assert!(all.iter().all(|(_, place)| is_place(place)));
        assert!(["/../../x", "0/00", "/0/00\0"].iter().all(|place| !is_place(place)));
    }

    /// Upper layers and metadata directories of earlier versions hold places, so they must never change.
    #[test]
    fn the_places_are_those_of_earlier_versions() {
        let all: String = placed_objects(&tree()).map(|(digest, place)| format!("{digest} {place}\n")).collect();
        let expected = "24927f03102283e1584ac3397f6dd1761a6e3ea73435ef68b3df54f5bff116a5";
        assert_eq!(Digest::of(all.as_bytes()).hex(), expected);
    }
}
