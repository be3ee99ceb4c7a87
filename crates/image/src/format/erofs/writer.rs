//! The writer: the same tree always gives the same bytes.
//!
//! Three areas follow one another: the superblock and all inodes (so that the
//! 16-bit number of the root fits), the blocks of large directories and long
//! links, and, in self-contained images only, the files' data.
//!
//! The form that is mounted has the same tree in fewer blocks: the kernel reads each block of metadata singly, and a
//! program that starts waits for it.

use super::*;
use crate::digest::Digest;
use crate::error::{Result, input};
use crate::shelf;
use crate::tree::{Data, Id, Kind, ROOT, Tree};
use std::collections::{BTreeMap, HashMap};

/// Which image to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Names and attributes, and each file's object by its digest: the form that names an image.
    Metadata,
    /// The same with each file's object by its place in a shelf, which takes half as many blocks, and what
    /// is looked up together side by side.
    Mount,
    /// Everything, with the fingerprints by which Linux 7.0's `inode_share` finds equal files.
    Full,
}

/// A written image.
pub struct Image {
    /// The image's first bytes: all of it for [`Layout::Metadata`].
    pub head: Vec<u8>,
    /// The objects to append after `head`, in order; each starts on a block.
    pub data: Vec<(Digest, u64)>,
}

/// Room an inode may take for its attributes, bytes: a 16-bit count of words.
pub(crate) const XATTRS_MAX: usize = 4 * (u16::MAX as usize - 1);

/// Refuses a file that is larger than the format can tell; best before it is read.
pub(crate) fn check_size(size: u64, path: impl FnOnce() -> String) -> Result<()> {
    const MOST: u64 = BLOCK << 31;
    if size > MOST {
        return Err(input!("{}: {size} bytes; 8 TiB is the most that a file of an image has", path()));
    }
    Ok(())
}

/// Splits an attribute's name into prefix number and rest.
fn xattr_index(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(index, prefix)| Some((*index, name.strip_prefix(*prefix)?)))
}

/// Whether the format can hold this attribute.
pub(crate) fn xattr_fits(name: &[u8], value: &[u8]) -> bool {
    let exact = |index| matches!(index, 2 | 3);
    matches!(xattr_index(name), Some((index, rest)) if rest.len() < 255 && (exact(index) == rest.is_empty()))
        && value.len() <= usize::from(u16::MAX)
}

fn push_xattr(out: &mut Vec<u8>, index: u8, name: &[u8], value: &[u8]) {
    out.push(name.len() as u8);
    out.push(index);
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(name);
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// How an inode's content is laid out.
enum Body {
    /// Nothing: devices, pipes, sockets, empty files.
    None,
    /// These bytes after the inode.
    Tail(Vec<u8>),
    /// A directory whose entries fit after the inode, of that many bytes.
    TailDir(usize),
    /// Blocks of their own in the second area, of that many bytes, from that block on.
    Blocks(u64, u64),
    /// One null chunk of 4096 << shift bytes.
    Hole(u8),
    /// Blocks in the data area.
    Object(Digest),
}

struct Planned {
    id: Id,
    position: usize,
    size: u64,
    xattrs: Vec<u8>,
    body: Body,
}

/// Packs directory entries into blocks; calls `place(block, entries)` for each.
fn pack_dir<'a>(entries: &[(&'a [u8], Id)], mut place: impl FnMut(&[(&'a [u8], Id)])) -> u64 {
    let (mut from, mut used, mut total) = (0, 0usize, 0u64);
    for (index, (name, _)) in entries.iter().enumerate() {
        let need = 12 + name.len();
        if used + need > BLOCK as usize {
            place(&entries[from..index]);
            total += BLOCK;
            (from, used) = (index, 0);
        }
        used += need;
    }
    place(&entries[from..]);
    total + used as u64
}

/// Writes `tree` as an EROFS image.
///
/// # Errors
/// A tree the format cannot hold: more than 2^32 blocks, too many attribute bytes on one file.
pub fn write(tree: &Tree, layout: Layout) -> Result<Image> {
    let (mut order, names) = tree.reachable();
    let mut places = HashMap::new();
    if layout == Layout::Mount {
        order = shelf::order(tree);
        places = shelf::places(tree, &order).into_iter().zip(0..).collect();
    }
    let mut parents: HashMap<Id, Id> = HashMap::new();
    for &id in &order {
        for (_, child) in tree.children(id) {
            if matches!(tree.inode(child).kind, Kind::Dir(_)) && parents.insert(child, id).is_some() {
                return Err(input!("a directory with two names cannot be stored"));
            }
        }
    }
    let entries = |id: Id| -> Vec<(&[u8], Id)> {
        let parent = parents.get(&id).copied().unwrap_or(ROOT);
        let mut list: Vec<_> = tree.children(id).chain([(&b"."[..], id), (&b".."[..], parent)]).collect();
        list.sort_unstable_by(|a, b| a.0.cmp(b.0));
        list
    };

    // Names that many inodes have stand in the table once.
    let prefixes: &[&[u8]] = match layout {
        Layout::Metadata => &[],
        Layout::Mount => &[METACOPY, REDIRECT],
        Layout::Full => &[FINGERPRINT],
    };
    let mut prefix_table = Vec::new();
    for name in prefixes {
        let infix = name.strip_prefix(b"trusted.").expect("a trusted attribute");
        prefix_table.extend((infix.len() as u16 + 1).to_le_bytes());
        prefix_table.push(4);
        prefix_table.extend(infix);
        prefix_table.resize(prefix_table.len().next_multiple_of(4), 0);
    }
    let prefix_start = SUPER_OFFSET + SUPER_SIZE;
    let mut cursor = (prefix_start + prefix_table.len()).next_multiple_of(SLOT);
    let mut blocks_used = 0u64;
    let mut plan = Vec::with_capacity(order.len());
    for &id in &order {
        let inode = tree.inode(id);
        let mut xattrs = Vec::new();
        for (name, value) in &inode.meta.xattrs {
            let (index, rest) = xattr_index(name).filter(|_| xattr_fits(name, value)).ok_or_else(|| {
                input!("{}: attribute {} cannot be stored", tree.path_of(id), crate::tree::show(name))
            })?;
            push_xattr(&mut xattrs, index, rest, value);
        }
        if let Kind::File(Data::Object(digest, _)) = &inode.kind {
            match layout {
                Layout::Metadata => {
                    push_xattr(&mut xattrs, 4, METACOPY.strip_prefix(b"trusted.").expect("trusted"), b"");
                    let path = format!("/{}", digest.object_path());
                    push_xattr(&mut xattrs, 4, REDIRECT.strip_prefix(b"trusted.").expect("trusted"), path.as_bytes());
                }
                Layout::Mount => {
                    push_xattr(&mut xattrs, 0x80, b"", b"");
                    push_xattr(&mut xattrs, 0x81, b"", shelf::place(places[digest]).as_bytes());
                }
                Layout::Full => {
                    let value = [&b"sha256:"[..], &digest.0].concat();
                    push_xattr(&mut xattrs, 0x80, b"", &value);
                }
            }
        }
        if !xattrs.is_empty() {
            xattrs.splice(0..0, [0u8; XATTR_HEADER]);
        }
        if xattrs.len() > XATTRS_MAX {
            let path = tree.path_of(id);
            return Err(input!("{path}: {} bytes of attributes; {XATTRS_MAX} fit", xattrs.len()));
        }
        let fixed = INODE_SIZE + xattrs.len();
        let room = (BLOCK as usize).saturating_sub(fixed);
        let mut own_blocks = |size: u64| {
            let from = blocks_used;
            blocks_used += size.div_ceil(BLOCK);
            Body::Blocks(size, from)
        };
        let (size, body) = match &inode.kind {
            Kind::Dir(_) => {
                let size = pack_dir(&entries(id), |_| ());
                (size, if size as usize <= room { Body::TailDir(size as usize) } else { own_blocks(size) })
            }
            Kind::Symlink(target) => {
                let size = target.len() as u64;
                (size, if target.len() <= room { Body::Tail(target.to_vec()) } else { own_blocks(size) })
            }
            Kind::File(Data::Inline(bytes)) if bytes.is_empty() => (0, Body::None),
            Kind::File(Data::Inline(bytes)) => {
                let size = bytes.len() as u64;
                (size, if bytes.len() <= room { Body::Tail(bytes.to_vec()) } else { own_blocks(size) })
            }
            Kind::File(Data::Object(digest, size)) => match layout {
                Layout::Metadata | Layout::Mount => {
                    check_size(*size, || tree.path_of(id))?;
                    let shift = (size.div_ceil(BLOCK)).next_power_of_two().trailing_zeros();
                    (*size, Body::Hole(shift as u8))
                }
                Layout::Full => (*size, Body::Object(*digest)),
            },
            _ => (0, Body::None),
        };
        let tail = match &body {
            Body::Tail(bytes) => bytes.len(),
            Body::TailDir(size) => *size,
            Body::Hole(_) => 4,
            _ => 0,
        };
        // The kernel wants inode and tail in one block; without a tail, the inode itself.
        let together = if matches!(body, Body::Tail(_) | Body::TailDir(_)) { fixed + tail } else { INODE_SIZE };
        if cursor % BLOCK as usize + together > BLOCK as usize {
            cursor = cursor.next_multiple_of(BLOCK as usize);
        }
        plan.push(Planned { id, position: cursor, size, xattrs, body });
        cursor = (cursor + fixed + tail).next_multiple_of(SLOT);
    }
    let second = (cursor as u64).next_multiple_of(BLOCK);
    let third = second + blocks_used * BLOCK;
    let mut data_at: BTreeMap<Digest, u64> = BTreeMap::new();
    let mut data = Vec::new();
    let mut end = third;
    for planned in &plan {
        if let Body::Object(digest) = planned.body
            && !data_at.contains_key(&digest)
        {
            data_at.insert(digest, end / BLOCK);
            data.push((digest, planned.size));
            end += planned.size.next_multiple_of(BLOCK);
        }
    }
    let blocks = u32::try_from(end / BLOCK).map_err(|_| input!("the image would have more than 2^32 blocks"))?;
    if blocks == NULL_ADDR {
        return Err(input!("the image would have more than 2^32 blocks"));
    }

    let mut head = vec![0u8; third as usize];
    head[prefix_start..prefix_start + prefix_table.len()].copy_from_slice(&prefix_table);
    let mut position_of = vec![0usize; tree.inode_count()];
    for planned in &plan {
        position_of[planned.id as usize] = planned.position;
    }
    let nid = |id: Id| (position_of[id as usize] / SLOT) as u64;
    for (number, planned) in plan.iter().enumerate() {
        let inode = tree.inode(planned.id);
        let mut layout_bits = LAYOUT_PLAIN;
        let mut union = 0u32;
        let tail_at = planned.position + INODE_SIZE + planned.xattrs.len();
        match &planned.body {
            Body::None => {}
            Body::Tail(bytes) => {
                layout_bits = LAYOUT_INLINE;
                head[tail_at..tail_at + bytes.len()].copy_from_slice(bytes);
            }
            Body::TailDir(size) => {
                layout_bits = LAYOUT_INLINE;
                pack_dir(&entries(planned.id), |list| {
                    write_dir_block(&mut head[tail_at..tail_at + size], list, tree, nid);
                });
            }
            Body::Blocks(size, from) => {
                let mut at = (second + from * BLOCK) as usize;
                union = (at as u64 / BLOCK) as u32;
                match &inode.kind {
                    Kind::Dir(_) => {
                        pack_dir(&entries(planned.id), |list| {
                            write_dir_block(&mut head[at..at + BLOCK as usize], list, tree, nid);
                            at += BLOCK as usize;
                        });
                    }
                    Kind::Symlink(bytes) | Kind::File(Data::Inline(bytes)) => {
                        head[at..at + *size as usize].copy_from_slice(bytes);
                    }
                    _ => unreachable!("only these were given blocks"),
                }
            }
            Body::Hole(shift) => {
                layout_bits = LAYOUT_CHUNKS;
                union = u32::from(*shift);
                head[tail_at..tail_at + 4].copy_from_slice(&NULL_ADDR.to_le_bytes());
            }
            Body::Object(digest) => union = data_at[digest] as u32,
        }
        if let Kind::Char(major, minor) | Kind::Block(major, minor) = inode.kind {
            union = (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12);
        }
        let links = match &inode.kind {
            Kind::Dir(_) => {
                let below =
                    tree.children(planned.id).filter(|(_, child)| matches!(tree.inode(*child).kind, Kind::Dir(_)));
                2 + below.count() as u32
            }
            _ => names[planned.id as usize],
        };
        let words = if planned.xattrs.is_empty() { 0 } else { (planned.xattrs.len() - XATTR_HEADER) / 4 + 1 };
        let out = &mut head[planned.position..];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(1 | layout_bits << 1).to_le_bytes());
        put(2, &(words as u16).to_le_bytes());
        put(4, &(inode.kind.type_bits() | inode.meta.mode).to_le_bytes());
        put(8, &planned.size.to_le_bytes());
        put(16, &union.to_le_bytes());
        put(20, &(number as u32 + 1).to_le_bytes());
        put(24, &inode.meta.uid.to_le_bytes());
        put(28, &inode.meta.gid.to_le_bytes());
        put(32, &inode.meta.mtime_s.to_le_bytes());
        put(40, &inode.meta.mtime_ns.to_le_bytes());
        put(44, &links.to_le_bytes());
        put(INODE_SIZE, &planned.xattrs);
    }

    // Overlayfs keeps inode numbers across a copy-up only for layers with a UUID.
    let uuid = Digest::of(&head[prefix_start..]);
    let full = layout == Layout::Full;
    let compat = COMPAT_CHECKSUM | COMPAT_MTIME | if full { COMPAT_ISHARE_XATTRS } else { 0 };
    let incompat = match layout {
        Layout::Metadata => INCOMPAT_CHUNKED,
        Layout::Mount => INCOMPAT_CHUNKED | INCOMPAT_XATTR_PREFIXES,
        Layout::Full => INCOMPAT_XATTR_PREFIXES,
    };
    let mut put = |at: usize, bytes: &[u8]| head[SUPER_OFFSET + at..][..bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_le_bytes());
    put(8, &compat.to_le_bytes());
    put(12, &[BLOCK.trailing_zeros() as u8]);
    put(14, &(nid(ROOT) as u16).to_le_bytes());
    put(16, &(plan.len() as u64).to_le_bytes());
    put(36, &blocks.to_le_bytes());
    put(48, &uuid.0[..16]);
    put(80, &incompat.to_le_bytes());
    if !prefixes.is_empty() {
        put(91, &[prefixes.len() as u8]);
        put(92, &(prefix_start as u32 / 4).to_le_bytes());
    }
    let checksum = crc32c(&head[SUPER_OFFSET..BLOCK as usize]);
    head[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
    Ok(Image { head, data })
}

/// Writes one block of a directory: the fixed entries, then their names.
fn write_dir_block(out: &mut [u8], entries: &[(&[u8], Id)], tree: &Tree, nid: impl Fn(Id) -> u64) {
    let mut name_at = entries.len() * 12;
    for (slot, (name, id)) in entries.iter().enumerate() {
        let entry = &mut out[slot * 12..slot * 12 + 12];
        entry[..8].copy_from_slice(&nid(*id).to_le_bytes());
        entry[8..10].copy_from_slice(&(name_at as u16).to_le_bytes());
        entry[10] = file_type(tree.inode(*id).kind.type_bits());
        out[name_at..name_at + name.len()].copy_from_slice(name);
        name_at += name.len();
    }
}
