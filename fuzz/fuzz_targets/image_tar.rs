//! The tar reader takes any bytes: every entry it hands out is one a tree can hold, and its bytes are as many as it says.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_image::config::Limits;
use pagefold_image::tar::{EntryKind, Reader};
use pagefold_image::tree::{Data, Inode, FileKind, Meta, Tree};
use pagefold_image::{erofs, unpack};
use std::io::Read;

/// Behind a `!`, each bit of the next byte gives one block its checksum: random bytes never have the right one, and what
/// lies behind the check would not be reached.
fn sealed(data: &[u8]) -> Vec<u8> {
    let [b'!', bits, rest @ ..] = data else { return data.to_vec() };
    let mut rest = rest.to_vec();
    for (_, block) in rest.chunks_exact_mut(512).take(8).enumerate().filter(|(index, _)| bits >> index & 1 == 1) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    rest
}

fuzz_target!(|data: &[u8]| {
    let data = &sealed(data)[..];
    let limits = Limits { entries: 2000, bytes: 1 << 22, header_bytes: 1 << 16, ratio_from_bytes: 1 << 20, ..Limits::default() };
    let Ok(plain) = unpack(data, limits) else { return };
    let (mut reader, mut tree) = (Reader::new(plain, limits), Tree::default());
    while let Ok(Some(entry)) = reader.next_entry() {
        let kind = match &entry.kind {
            EntryKind::File(size) => {
                let mut bytes = Vec::new();
                if reader.read_to_end(&mut bytes).is_err() {
                    return;
                }
                assert_eq!(bytes.len() as u64, *size);
                bytes.truncate(64);
                FileKind::File(Data::Inline(bytes.into()))
            }
            EntryKind::HardLink(target) => {
                let _ = tree.put_link(&entry.path, target);
                continue;
            }
            EntryKind::Symlink(target) => FileKind::Symlink(target.clone().into()),
            EntryKind::Dir => FileKind::Dir(Default::default()),
            _ => FileKind::Fifo,
        };
        let meta = Meta { xattrs: Default::default(), ..entry.meta };
        let _ = tree.put(&entry.path, Inode { meta, kind });
    }
    // Whatever came of it fits the image format and comes back from it.
    let image = erofs::write(&tree, erofs::Layout::Metadata).expect("a tree of checked entries");
    let read = erofs::read(&image.head, erofs::Limits::default()).expect("our own image");
    assert_eq!(erofs::write(&read, erofs::Layout::Metadata).expect("again").head, image.head);
});
