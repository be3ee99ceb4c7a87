//! A strict tar reader: ustar, PAX, GNU long names and sparse files, and nothing it does not understand.
//!
//! Readers that differ about where an entry ends let one archive be two archives.
//! This one refuses what is ambiguous instead of choosing: two sizes that differ,
//! data in an entry that can have none, a length that is not a number, an unknown
//! type, a sparse file's parts that overlap, a wrong header checksum, an end in the middle.
//! It never writes anything; it returns entries and their bytes.

mod entry;
mod fields;
mod pax;
mod reader;
mod sparse;
mod write;

pub use entry::{Acls, ArchiveEntry, EntryKind};
pub use reader::Reader;
pub(crate) use sparse::Part;
pub(crate) use write::{pad, write_header, write_sparse_header};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::tree::{Meta, Xattrs};
    use std::io::Read;

    fn entry(path: &[u8], kind: EntryKind) -> ArchiveEntry {
        let meta = Meta { mode: 0o644, uid: 7, gid: 3_000_000, mtime_s: -5, mtime_ns: 12, xattrs: Xattrs::new() };
        ArchiveEntry { path: path.into(), kind, meta, acls: Acls::default(), has_foreign_acl: false, is_sparse: false }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut file = entry(&[b'x'; 300], EntryKind::File(5));
        for name in [&b"user.a"[..], b"user.a=b", b"user.a%3Db", b"user.%", b"=%="] {
            file.meta.xattrs.insert(name.into(), (*b"\0\n=").into());
        }
        let mut bytes = Vec::new();
        write_header(&mut bytes, &file);
        // As GNU tar writes it.
        assert!(bytes.windows(29).any(|part| part == b" SCHILY.xattr.user.a%253Db=\0\n"));
        bytes.extend(b"hello");
        pad(&mut bytes, 5);
        write_header(&mut bytes, &entry(b"l", EntryKind::Symlink(vec![b'y'; 200])));
        write_header(&mut bytes, &entry(b"c", EntryKind::Char(1, 3)));
        bytes.extend([0; 1024]);
        let mut reader = Reader::new(&bytes[..], Limits::default());
        let found = reader.next_entry().unwrap().unwrap();
        assert_eq!((&found.path, &found.kind, &found.meta), (&file.path, &file.kind, &file.meta));
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert_eq!(reader.next_entry().unwrap().unwrap().kind, EntryKind::Symlink(vec![b'y'; 200]));
        assert_eq!(reader.next_entry().unwrap().unwrap().kind, EntryKind::Char(1, 3));
        assert!(reader.next_entry().unwrap().is_none());
    }
}
