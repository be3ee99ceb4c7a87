//! The first two areas of an image: inodes with their tails, and the blocks of large directories and long links.

use super::on_disk::{
    BLOCK, INODE_SIZE, LAYOUT_CHUNKS, LAYOUT_INLINE, LAYOUT_PLAIN, NULL_ADDR, XATTR_HEADER, file_type,
};
use super::plan::{Body, Plan, PlannedInode, pack_dir};
use crate::tree::{Data, FileKind, Id};

/// Writes all inodes of the plan, and the blocks of the second area, into `head`.
pub(super) fn write_inodes(plan: &Plan, head: &mut [u8]) {
    for (index, planned) in plan.inodes.iter().enumerate() {
        let (data_layout, address) = write_body(plan, planned, head);
        write_inode(plan, planned, index as u32 + 1, data_layout, address, head);
    }
}

/// Writes an inode's content where the plan has it. Returns the data layout, and the number that says where the content
/// is.
fn write_body(plan: &Plan, planned: &PlannedInode, head: &mut [u8]) -> (u16, u32) {
    let tail = planned.position + INODE_SIZE + planned.xattrs.len();
    match &planned.body {
        Body::None => (LAYOUT_PLAIN, 0),
        Body::Tail(bytes) => {
            head[tail..tail + bytes.len()].copy_from_slice(bytes);
            (LAYOUT_INLINE, 0)
        }
        Body::TailDir(size) => {
            pack_dir(&plan.entries(planned.id), |list| write_dir_block(&mut head[tail..tail + size], list, plan));
            (LAYOUT_INLINE, 0)
        }
        Body::Blocks { size, first } => {
            let start = plan.second_area + first * BLOCK;
            write_blocks(plan, planned, &mut head[start as usize..], *size as usize);
            (LAYOUT_PLAIN, (start / BLOCK) as u32)
        }
        Body::Hole(shift) => {
            head[tail..tail + 4].copy_from_slice(&NULL_ADDR.to_le_bytes());
            (LAYOUT_CHUNKS, u32::from(*shift))
        }
        Body::Object(digest) => (LAYOUT_PLAIN, plan.object_blocks[digest] as u32),
    }
}

/// Writes content of `size` bytes into its blocks, which begin at `out`.
fn write_blocks(plan: &Plan, planned: &PlannedInode, out: &mut [u8], size: usize) {
    match &plan.tree.inode(planned.id).kind {
        FileKind::Dir(_) => {
            let mut blocks = out.chunks_mut(BLOCK as usize);
            pack_dir(&plan.entries(planned.id), |list| {
                write_dir_block(blocks.next().expect("the plan counted the blocks"), list, plan);
            });
        }
        FileKind::Symlink(bytes) | FileKind::File(Data::Inline(bytes)) => out[..size].copy_from_slice(bytes),
        _ => unreachable!("the plan gives blocks to directories, links and inline files only"),
    }
}

/// Writes one block of a directory: the fixed entries, then their names.
fn write_dir_block(out: &mut [u8], entries: &[(&[u8], Id)], plan: &Plan) {
    let mut name_at = entries.len() * 12;
    for (slot, (name, id)) in entries.iter().enumerate() {
        let entry = &mut out[slot * 12..slot * 12 + 12];
        entry[..8].copy_from_slice(&plan.number(*id).to_le_bytes());
        entry[8..10].copy_from_slice(&(name_at as u16).to_le_bytes());
        entry[10] = file_type(plan.tree.inode(*id).kind.type_bits());
        out[name_at..name_at + name.len()].copy_from_slice(name);
        name_at += name.len();
    }
}

/// How many links stat(2) shall report: of a directory its name, its `.` and the `..` of each subdirectory.
fn link_count(plan: &Plan, id: Id) -> u32 {
    if !matches!(plan.tree.inode(id).kind, FileKind::Dir(_)) {
        return plan.names[id as usize];
    }
    let is_dir = |(_, child): &(&[u8], Id)| matches!(plan.tree.inode(*child).kind, FileKind::Dir(_));
    2 + plan.tree.children(id).filter(is_dir).count() as u32
}

/// Writes an extended inode and its attributes. `serial` is the number that stat(2) shows.
fn write_inode(plan: &Plan, planned: &PlannedInode, serial: u32, data_layout: u16, address: u32, head: &mut [u8]) {
    let inode = plan.tree.inode(planned.id);
    let address = match inode.kind {
        FileKind::Char(major, minor) | FileKind::Block(major, minor) => {
            (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12)
        }
        _ => address,
    };
    let words = if planned.xattrs.is_empty() { 0 } else { (planned.xattrs.len() - XATTR_HEADER) / 4 + 1 };
    let out = &mut head[planned.position..];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(1 | data_layout << 1).to_le_bytes());
    put(2, &(words as u16).to_le_bytes());
    put(4, &(inode.kind.type_bits() | inode.meta.mode).to_le_bytes());
    put(8, &planned.size.to_le_bytes());
    put(16, &address.to_le_bytes());
    put(20, &serial.to_le_bytes());
    put(24, &inode.meta.uid.to_le_bytes());
    put(28, &inode.meta.gid.to_le_bytes());
    put(32, &inode.meta.mtime_s.to_le_bytes());
    put(40, &inode.meta.mtime_ns.to_le_bytes());
    put(44, &link_count(plan, planned.id).to_le_bytes());
    put(INODE_SIZE, &planned.xattrs);
}
