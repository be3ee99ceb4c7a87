//! The plan of an image: where each inode, block and object goes. It is complete before the first byte is written.
//!
//! Three areas follow one another: the superblock and all inodes (first, so that the 16-bit number of the root fits),
//! the blocks of large directories and long links, and, in self-contained images only, the files' data.

use super::on_disk::{
    BLOCK, FINGERPRINT, INODE_SIZE, METACOPY, NULL_ADDR, REDIRECT, SLOT, SUPER_OFFSET, SUPER_SIZE, XATTR_HEADER,
};
use super::xattrs::{
    LONG_PREFIX, TRUSTED, XATTRS_MAX, push_redirect, push_xattr, split_prefix, without_trusted, xattr_fits,
};
use crate::digest::Digest;
use crate::error::{Result, input};
use crate::layout;
use crate::tree::{Data, FileKind, Id, ROOT, Tree, show};
use std::collections::{BTreeMap, HashMap};

/// Which image to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Names and attributes, and each file's object by its digest: the form that names an image.
    Metadata,
    /// The same with each file's object by its place in the image's link farm. It takes half as many blocks, and inodes
    /// that are looked up together stand side by side.
    Mount,
    /// Everything, with the fingerprints by which Linux 7.0's `inode_share` finds equal files.
    Full,
}

impl Layout {
    /// The attribute names that many inodes have: they stand once in a table, and inodes name the entry.
    fn long_prefixes(self) -> &'static [&'static [u8]] {
        match self {
            Layout::Metadata => &[],
            Layout::Mount => &[METACOPY, REDIRECT],
            Layout::Full => &[FINGERPRINT],
        }
    }
}

/// How an inode's content is laid out.
pub(super) enum Body {
    /// Nothing: devices, pipes, sockets, empty files.
    None,
    /// These bytes after the inode.
    Tail(Vec<u8>),
    /// A directory with entries that fit after the inode, of that many bytes.
    TailDir(usize),
    /// Blocks of the second area.
    Blocks {
        /// Bytes used of them.
        size: u64,
        /// The first one, counted from the start of the area.
        first: u64,
    },
    /// One null chunk of 4096 << shift bytes.
    Hole(u8),
    /// Blocks in the data area.
    Object(Digest),
}

impl Body {
    /// Bytes that follow the inode and its attributes.
    fn tail_bytes(&self) -> usize {
        match self {
            Body::Tail(bytes) => bytes.len(),
            Body::TailDir(size) => *size,
            Body::Hole(_) => 4,
            _ => 0,
        }
    }
}

/// An inode with its place in the image.
pub(super) struct PlannedInode {
    pub(super) id: Id,
    /// Where the inode starts, bytes.
    pub(super) position: usize,
    /// The file's size, bytes.
    pub(super) size: u64,
    /// The attributes, with their header.
    pub(super) xattrs: Vec<u8>,
    pub(super) body: Body,
}

/// Where everything of an image goes.
pub(super) struct Plan<'a> {
    pub(super) tree: &'a Tree,
    pub(super) layout: Layout,
    /// Each directory's parent.
    parents: HashMap<Id, Id>,
    /// How many names each inode has.
    pub(super) names: Vec<u32>,
    /// The table of attribute prefixes, which follows the superblock, and its number of entries.
    pub(super) prefix_table: Vec<u8>,
    pub(super) prefix_count: u8,
    /// The inodes in the order of the image.
    pub(super) inodes: Vec<PlannedInode>,
    /// Inode positions by tree id, bytes.
    positions: Vec<usize>,
    /// Where the second area starts, bytes.
    pub(super) second_area: u64,
    /// Bytes of the first two areas.
    pub(super) head_bytes: u64,
    /// Objects of the third area in order, and the first block of each.
    pub(super) objects: Vec<(Digest, u64)>,
    pub(super) object_blocks: BTreeMap<Digest, u64>,
    /// Blocks of the whole image.
    pub(super) blocks: u32,
}

/// Where the table of attribute prefixes starts, bytes.
pub(super) const PREFIX_TABLE_OFFSET: usize = SUPER_OFFSET + SUPER_SIZE;

impl<'a> Plan<'a> {
    /// Plans the image of `tree`.
    ///
    /// # Errors
    /// A tree that the format cannot hold.
    pub(super) fn new(tree: &'a Tree, layout: Layout) -> Result<Self> {
        let (mut order, names) = tree.reachable();
        let mut object_numbers = HashMap::new();
        if layout == Layout::Mount {
            order = layout::order(tree);
            object_numbers = layout::numbered_objects(tree, &order).into_iter().zip(0..).collect();
        }
        let prefixes = layout.long_prefixes();
        let mut plan = Self {
            tree,
            layout,
            parents: parents(tree, &order)?,
            names,
            prefix_table: prefix_table(prefixes),
            prefix_count: prefixes.len() as u8,
            inodes: Vec::with_capacity(order.len()),
            positions: vec![0; tree.inode_count()],
            second_area: 0,
            head_bytes: 0,
            objects: Vec::new(),
            object_blocks: BTreeMap::new(),
            blocks: 0,
        };
        let second_area_blocks = plan.place_inodes(&order, &object_numbers)?;
        plan.head_bytes = plan.second_area + second_area_blocks * BLOCK;
        plan.place_objects()?;
        Ok(plan)
    }

    /// The number by which the image knows inode `id`: its position in slots.
    pub(super) fn number(&self, id: Id) -> u64 {
        (self.positions[id as usize] / SLOT) as u64
    }

    /// The entries of directory `id` in the order of the image, `.` and `..` among them.
    pub(super) fn entries(&self, id: Id) -> Vec<(&'a [u8], Id)> {
        let parent = self.parents.get(&id).copied().unwrap_or(ROOT);
        let mut list: Vec<_> = self.tree.children(id).chain([(&b"."[..], id), (&b".."[..], parent)]).collect();
        list.sort_unstable_by(|a, b| a.0.cmp(b.0));
        list
    }

    /// Gives each inode of `order` its place in the first area. Returns the number of blocks in the second area.
    fn place_inodes(&mut self, order: &[Id], object_numbers: &HashMap<Digest, u32>) -> Result<u64> {
        let mut cursor = (PREFIX_TABLE_OFFSET + self.prefix_table.len()).next_multiple_of(SLOT);
        let mut blocks_used = 0u64;
        for &id in order {
            let xattrs = inode_xattrs(self.tree, id, self.layout, object_numbers)?;
            let fixed = INODE_SIZE + xattrs.len();
            let (size, body) = self.body(id, fixed, &mut blocks_used)?;
            let tail = body.tail_bytes();
            // The kernel wants inode and tail in one block; without a tail, the inode itself.
            let together = if matches!(body, Body::Tail(_) | Body::TailDir(_)) { fixed + tail } else { INODE_SIZE };
            if cursor % BLOCK as usize + together > BLOCK as usize {
                cursor = cursor.next_multiple_of(BLOCK as usize);
            }
            self.positions[id as usize] = cursor;
            self.inodes.push(PlannedInode { id, position: cursor, size, xattrs, body });
            cursor = (cursor + fixed + tail).next_multiple_of(SLOT);
        }
        self.second_area = (cursor as u64).next_multiple_of(BLOCK);
        Ok(blocks_used)
    }

    /// The size and layout of inode `id`, of which `fixed` bytes come before a tail. What does not fit after the inode
    /// takes blocks of the second area.
    fn body(&self, id: Id, fixed: usize, blocks_used: &mut u64) -> Result<(u64, Body)> {
        let room = (BLOCK as usize).saturating_sub(fixed);
        let mut blocks = |size: u64| {
            let first = *blocks_used;
            *blocks_used += size.div_ceil(BLOCK);
            Body::Blocks { size, first }
        };
        let mut tail_or_blocks = |bytes: &[u8]| {
            let size = bytes.len() as u64;
            (size, if bytes.len() <= room { Body::Tail(bytes.to_vec()) } else { blocks(size) })
        };
        Ok(match &self.tree.inode(id).kind {
            FileKind::Dir(_) => {
                let size = pack_dir(&self.entries(id), |_| ());
                (size, if size as usize <= room { Body::TailDir(size as usize) } else { blocks(size) })
            }
            FileKind::Symlink(target) => tail_or_blocks(target),
            FileKind::File(Data::Inline(bytes)) if bytes.is_empty() => (0, Body::None),
            FileKind::File(Data::Inline(bytes)) => tail_or_blocks(bytes),
            FileKind::File(Data::Object(digest, size)) if self.layout == Layout::Full => (*size, Body::Object(*digest)),
            FileKind::File(Data::Object(_, size)) => {
                check_size(*size, || self.tree.path_of(id))?;
                let shift = (size.div_ceil(BLOCK)).next_power_of_two().trailing_zeros();
                (*size, Body::Hole(shift as u8))
            }
            _ => (0, Body::None),
        })
    }

    /// Gives each object its blocks in the third area, and counts the blocks of the image.
    fn place_objects(&mut self) -> Result<()> {
        let mut end = self.head_bytes;
        for planned in &self.inodes {
            if let Body::Object(digest) = planned.body
                && !self.object_blocks.contains_key(&digest)
            {
                self.object_blocks.insert(digest, end / BLOCK);
                self.objects.push((digest, planned.size));
                end += planned.size.next_multiple_of(BLOCK);
            }
        }
        let blocks = u32::try_from(end / BLOCK).ok().filter(|&blocks| blocks != NULL_ADDR);
        self.blocks = blocks.ok_or_else(|| input!("the image would have more than 2^32 blocks"))?;
        Ok(())
    }
}

/// Each directory's parent. A directory has one name.
fn parents(tree: &Tree, order: &[Id]) -> Result<HashMap<Id, Id>> {
    let mut parents: HashMap<Id, Id> = HashMap::new();
    for &id in order {
        for (_, child) in tree.children(id) {
            if matches!(tree.inode(child).kind, FileKind::Dir(_)) && parents.insert(child, id).is_some() {
                return Err(input!("a directory with two names cannot be stored"));
            }
        }
    }
    Ok(parents)
}

/// The table of attribute prefixes as it stands in the image.
fn prefix_table(prefixes: &[&'static [u8]]) -> Vec<u8> {
    let mut table = Vec::new();
    for name in prefixes {
        let infix = without_trusted(name);
        table.extend((infix.len() as u16 + 1).to_le_bytes());
        table.push(TRUSTED);
        table.extend(infix);
        table.resize(table.len().next_multiple_of(4), 0);
    }
    table
}

/// The attributes of inode `id` with their header, empty if there are none: the tree's, and those that lead to the
/// file's object.
fn inode_xattrs(tree: &Tree, id: Id, layout: Layout, object_numbers: &HashMap<Digest, u32>) -> Result<Vec<u8>> {
    let inode = tree.inode(id);
    let mut xattrs = Vec::new();
    for (name, value) in &inode.meta.xattrs {
        let (index, rest) = split_prefix(name)
            .filter(|_| xattr_fits(name, value))
            .ok_or_else(|| input!("{}: attribute {} cannot be stored", tree.path_of(id), show(name)))?;
        push_xattr(&mut xattrs, index, rest, value);
    }
    if let FileKind::File(Data::Object(digest, _)) = &inode.kind {
        match layout {
            Layout::Metadata => push_redirect(&mut xattrs, &format!("/{}", digest.object_path())),
            // The entries of the prefix table in its order.
            Layout::Mount => {
                push_xattr(&mut xattrs, LONG_PREFIX, b"", b"");
                let place = layout::place(object_numbers[digest]);
                push_xattr(&mut xattrs, LONG_PREFIX + 1, b"", place.as_bytes());
            }
            Layout::Full => {
                let value = [&b"sha256:"[..], &digest.0].concat();
                push_xattr(&mut xattrs, LONG_PREFIX, b"", &value);
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
    Ok(xattrs)
}

/// Refuses a file that is larger than the format can hold. Callers check before they read the file.
pub(crate) fn check_size(size: u64, path: impl FnOnce() -> String) -> Result<()> {
    const SIZE_MAX: u64 = BLOCK << 31;
    if size > SIZE_MAX {
        return Err(input!("{}: {size} bytes; 8 TiB is the most that a file of an image has", path()));
    }
    Ok(())
}

/// Packs directory entries into blocks; calls `block` with the entries of each. Returns the directory's size in bytes.
pub(super) fn pack_dir<'a>(entries: &[(&'a [u8], Id)], mut block: impl FnMut(&[(&'a [u8], Id)])) -> u64 {
    let (mut from, mut used, mut total) = (0, 0usize, 0u64);
    for (index, (name, _)) in entries.iter().enumerate() {
        let need = 12 + name.len();
        if used + need > BLOCK as usize {
            block(&entries[from..index]);
            total += BLOCK;
            (from, used) = (index, 0);
        }
        used += need;
    }
    block(&entries[from..]);
    total + used as u64
}
