//! Numbers of the format, as the kernel's `fs/erofs/erofs_fs.h` has them.

/// Block size, bytes.
pub const BLOCK: u64 = 4096;
/// Where the superblock starts.
pub(super) const SUPER_OFFSET: usize = 1024;
/// Size of the superblock, bytes.
pub(super) const SUPER_SIZE: usize = 128;
pub(super) const MAGIC: u32 = 0xE0F5_E1E2;

/// The superblock carries a crc32c of the rest of its block.
pub(super) const COMPAT_CHECKSUM: u32 = 0x1;
/// Inodes carry modification times.
pub(super) const COMPAT_MTIME: u32 = 0x2;
/// An attribute of every shareable inode holds its fingerprint (Linux 7.0).
pub(super) const COMPAT_ISHARE_XATTRS: u32 = 0x20;
/// Some inodes are chunk based.
pub(super) const INCOMPAT_CHUNKED: u32 = 0x4;
/// Attribute names may start with an entry of a prefix table.
pub(super) const INCOMPAT_XATTR_PREFIXES: u32 = 0x40;

/// Data in its own blocks.
pub(super) const LAYOUT_PLAIN: u16 = 0;
/// Data after the inode and its attributes.
pub(super) const LAYOUT_INLINE: u16 = 2;
/// Data in chunks, by a table after the inode.
pub(super) const LAYOUT_CHUNKS: u16 = 4;
/// The address of a chunk that is a hole.
pub(super) const NULL_ADDR: u32 = u32::MAX;

/// Size of the extended inode, bytes.
pub(super) const INODE_SIZE: usize = 64;
/// Inode numbers count units of 32 bytes.
pub(super) const SLOT: usize = 32;
/// Header before an inode's attributes, bytes.
pub(super) const XATTR_HEADER: usize = 12;

/// The attribute prefixes that have a number instead of a name.
pub(super) const PREFIXES: [(u8, &[u8]); 5] = [
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (1, b"user."),
    (4, b"trusted."),
    (6, b"security."),
];

/// Tells overlayfs that a file's data is elsewhere.
pub(super) const METACOPY: &[u8] = b"trusted.overlay.metacopy";
/// Tells overlayfs where: a path in the data-only layer.
pub(super) const REDIRECT: &[u8] = b"trusted.overlay.redirect";
/// The fingerprint attribute of self-contained images.
pub(super) const FINGERPRINT: &[u8] = b"trusted.erofs.fingerprint";

/// The directory entry type of an inode's type bits.
pub(super) fn file_type(type_bits: u16) -> u8 {
    match u32::from(type_bits) {
        libc::S_IFREG => 1,
        libc::S_IFDIR => 2,
        libc::S_IFCHR => 3,
        libc::S_IFBLK => 4,
        libc::S_IFIFO => 5,
        libc::S_IFSOCK => 6,
        libc::S_IFLNK => 7,
        _ => 0,
    }
}

/// CRC-32C as the kernel computes it: seed of ones, no final inversion.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg());
        }
    }
    crc
}

#[cfg(test)]
mod tests {
    #[test]
    fn crc_has_the_published_check_value() {
        assert_eq!(!super::crc32c(b"123456789"), 0xE306_9283);
    }
}
