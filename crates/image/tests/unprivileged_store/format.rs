//! Any tree survives the image format, and no bytes make its reader panic.

use pagefold_image::digest::Digest;
use pagefold_image::erofs;
use pagefold_image::tree::{Data, FileKind, Inode, Meta, Tree};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Any tree that a user can make.
fn any_tree() -> impl Strategy<Value = Tree> {
    let name = proptest::collection::vec(any::<u8>().prop_filter("no slash, no NUL", |b| *b != b'/' && *b != 0), 1..40)
        .prop_filter("a name", |name| name != b"." && name != b"..");
    let data = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64).prop_map(|bytes| Data::Inline(bytes.into())),
        (any::<[u8; 32]>(), 65u64..1 << 43).prop_map(|(raw, size)| Data::Object(Digest(raw), size)),
    ];
    let kind = prop_oneof![
        4 => data.prop_map(FileKind::File),
        2 => Just(FileKind::Dir(BTreeMap::new())),
        1 => proptest::collection::vec(1u8.., 1..4090).prop_map(|target| FileKind::Symlink(target.into())),
        1 => (0u32..1 << 12, 1u32..1 << 20).prop_map(|(major, minor)| FileKind::Char(major, minor)),
        1 => (0u32..1 << 12, 0u32..1 << 20).prop_map(|(major, minor)| FileKind::Block(major, minor)),
        1 => Just(FileKind::Fifo),
        1 => Just(FileKind::Socket),
    ];
    let xattrs = proptest::collection::btree_map(
        proptest::collection::vec(1u8.., 1..30).prop_map(|rest| [b"user.", &rest[..]].concat().into_boxed_slice()),
        proptest::collection::vec(any::<u8>(), 0..300).prop_map(Vec::into_boxed_slice),
        0..4,
    );
    let meta = (0u16..0o10000, any::<u32>(), any::<u32>(), any::<i64>(), 0u32..1_000_000_000, xattrs)
        .prop_map(|(mode, uid, gid, mtime_s, mtime_ns, xattrs)| Meta { mode, uid, gid, mtime_s, mtime_ns, xattrs });
    let steps = proptest::collection::vec((any::<u16>(), name, meta, kind, any::<bool>()), 0..120);
    steps.prop_map(|steps| {
        let mut tree = Tree::default();
        let (mut dirs, mut files) = (vec![0], Vec::new());
        for (place, name, meta, kind, link) in steps {
            let dir = dirs[usize::from(place) % dirs.len()];
            if tree.child(dir, &name).is_some() {
                continue;
            }
            if link && !files.is_empty() {
                let id = files[usize::from(place) % files.len()];
                tree.link(dir, &name, id).unwrap();
                continue;
            }
            let is_dir = matches!(kind, FileKind::Dir(_));
            let id = tree.add(Inode { meta, kind });
            tree.link(dir, &name, id).unwrap();
            if is_dir { dirs.push(id) } else { files.push(id) }
        }
        tree
    })
}

fn flatten(tree: &Tree) -> Vec<(Vec<u8>, Option<Inode>, u32)> {
    let (_, names) = tree.reachable();
    let mut all = Vec::new();
    tree.walk(|path, id| {
        let mut inode = tree.inode(id).clone();
        let links = if matches!(inode.kind, FileKind::Dir(_)) { 0 } else { names[id as usize] };
        if let FileKind::Dir(names) = &mut inode.kind {
            names.clear();
        }
        all.push((path.to_vec(), Some(inode), links));
    });
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_survives_the_image_format(tree in any_tree()) {
        for layout in [erofs::Layout::Metadata, erofs::Layout::Full] {
            // Self-contained images have room for 16 TiB in all.
            let objects: u64 = tree.objects().iter().map(|object| object.1).sum();
            if layout == erofs::Layout::Full && objects > 1 << 43 {
                continue;
            }
            let image = erofs::write(&tree, layout).unwrap();
            let read = erofs::read(&image.head, erofs::Limits::default()).unwrap();
            prop_assert_eq!(flatten(&read), flatten(&tree));
            prop_assert_eq!(erofs::write(&read, layout).unwrap().head, image.head);
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(mut bytes in Just(()).prop_flat_map(|()| any_tree()).prop_map(|tree| {
        erofs::write(&tree, erofs::Layout::Metadata).unwrap().head
    }), flips in proptest::collection::vec((any::<u32>(), any::<u8>()), 1..30)) {
        for (at, value) in flips {
            let length = bytes.len();
            bytes[at as usize % length] = value;
        }
        // The checksum covers the first block only, so most flips reach the rest of the reader.
        let _ = erofs::read(&bytes, erofs::Limits { inodes: 10_000 });
    }
}
