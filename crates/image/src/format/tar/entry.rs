//! What an archive holds: one entry after another.

use crate::format::acl::Acl;
use crate::tree::Meta;

/// Headers and data are whole blocks of this many bytes.
pub(super) const BLOCK: usize = 512;

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file of that many bytes, which [`Reader`](super::Reader) now gives.
    File(u64),
    /// Another name of the file at this path.
    HardLink(Vec<u8>),
    /// A symbolic link.
    Symlink(Vec<u8>),
    /// A character device.
    Char(u32, u32),
    /// A block device.
    Block(u32, u32),
    /// A directory.
    Dir,
    /// A named pipe.
    Fifo,
}

/// One entry of an archive.
#[derive(Clone, Debug)]
pub struct ArchiveEntry {
    /// Its path, as written.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// What every kind of file has.
    pub meta: Meta,
    /// Access control lists, given as text.
    pub acls: Acls,
    /// Whether there is a list of another system (NFSv4, Solaris, macOS), which Linux does not have.
    pub has_foreign_acl: bool,
    /// Whether the archive has only parts of the file; [`Reader`](super::Reader) gives zeros between them.
    pub is_sparse: bool,
}

/// The access control lists of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acls {
    /// The file's own.
    pub access: Option<Acl>,
    /// The one that new files in a directory get.
    pub default: Option<Acl>,
}

impl Acls {
    /// About how many bytes of memory they take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.access.iter().chain(&self.default).map(Acl::memory_bytes).sum()
    }
}
