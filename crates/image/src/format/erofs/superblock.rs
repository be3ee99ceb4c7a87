//! The superblock, which is written last: its checksum and UUID cover the rest.

use super::on_disk::{
    BLOCK, COMPAT_CHECKSUM, COMPAT_ISHARE_XATTRS, COMPAT_MTIME, INCOMPAT_CHUNKED, INCOMPAT_XATTR_PREFIXES, MAGIC,
    SUPER_OFFSET, crc32c,
};
use super::plan::{Layout, PREFIX_TABLE_OFFSET, Plan};
use crate::digest::Digest;
use crate::tree::ROOT;

/// Writes the prefix table's place, the features, the UUID and the checksum into `head`, which has all else.
pub(super) fn write_superblock(plan: &Plan, head: &mut [u8]) {
    // Overlayfs keeps inode numbers across a copy-up only for layers with a UUID.
    let uuid = Digest::of(&head[PREFIX_TABLE_OFFSET..]);
    let sharing = if plan.layout == Layout::Full { COMPAT_ISHARE_XATTRS } else { 0 };
    let incompat = match plan.layout {
        Layout::Metadata => INCOMPAT_CHUNKED,
        Layout::Mount => INCOMPAT_CHUNKED | INCOMPAT_XATTR_PREFIXES,
        Layout::Full => INCOMPAT_XATTR_PREFIXES,
    };
    let mut put = |at: usize, bytes: &[u8]| head[SUPER_OFFSET + at..][..bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_le_bytes());
    put(8, &(COMPAT_CHECKSUM | COMPAT_MTIME | sharing).to_le_bytes());
    put(12, &[BLOCK.trailing_zeros() as u8]);
    put(14, &(plan.number(ROOT) as u16).to_le_bytes());
    put(16, &(plan.inodes.len() as u64).to_le_bytes());
    put(36, &plan.blocks.to_le_bytes());
    put(48, &uuid.0[..16]);
    put(80, &incompat.to_le_bytes());
    if plan.prefix_count > 0 {
        put(91, &[plan.prefix_count]);
        put(92, &(PREFIX_TABLE_OFFSET as u32 / 4).to_le_bytes());
    }
    let checksum = crc32c(&head[SUPER_OFFSET..BLOCK as usize]);
    head[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
}
