//! The reader: bytes that may be anything, to a tree or one clear refusal.
//!
//! Images come from the store and are hashed before they are read, but the
//! reader trusts nothing: every offset is checked and every inode read once.

use super::on_disk::*;
use crate::digest::Digest;
use crate::error::{Result, input};
use crate::tree::{Data, FileKind, Id, Inode, Meta, ROOT, Tree, Xattrs, show};
use std::collections::{BTreeMap, HashMap};

/// What an image may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most inodes.
    pub inodes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { inodes: 1 << 26 }
    }
}

struct Source<'a> {
    bytes: &'a [u8],
    meta: u64,
    prefixes: Vec<Vec<u8>>,
}

/// One inode as it stands in the image.
struct Raw {
    layout: u16,
    words: u16,
    mode: u16,
    size: u64,
    union: u32,
    at: u64,
    length: u64,
    meta: Meta,
}

impl<'a> Source<'a> {
    fn get(&self, at: u64, length: u64) -> Result<&'a [u8]> {
        let end = at.checked_add(length).filter(|&end| end <= self.bytes.len() as u64);
        let end = end.ok_or_else(|| input!("image: {length} bytes at {at} lie outside its {}", self.bytes.len()))?;
        Ok(&self.bytes[at as usize..end as usize])
    }

    fn u16(&self, at: u64) -> Result<u16> {
        Ok(u16::from_le_bytes(self.get(at, 2)?.try_into().expect("2 bytes")))
    }

    fn u32(&self, at: u64) -> Result<u32> {
        Ok(u32::from_le_bytes(self.get(at, 4)?.try_into().expect("4 bytes")))
    }

    fn u64(&self, at: u64) -> Result<u64> {
        Ok(u64::from_le_bytes(self.get(at, 8)?.try_into().expect("8 bytes")))
    }

    fn inode(&self, nid: u64) -> Result<Raw> {
        let at = nid.checked_mul(SLOT as u64).and_then(|offset| offset.checked_add(self.meta));
        let at = at.ok_or_else(|| input!("image: inode {nid} lies outside"))?;
        let format = self.u16(at)?;
        if format & 1 == 0 || format >> 4 != 0 {
            return Err(input!("image: inode {nid} has format {format:#x}, which pagefold does not write"));
        }
        let mtime_ns = self.u32(at + 40)?;
        if mtime_ns >= 1_000_000_000 {
            return Err(input!("image: inode {nid} has {mtime_ns} nanoseconds in a second"));
        }
        let mode = self.u16(at + 4)?;
        let meta = Meta {
            mode: mode & 0o7777,
            uid: self.u32(at + 24)?,
            gid: self.u32(at + 28)?,
            mtime_s: self.u64(at + 32)? as i64,
            mtime_ns,
            xattrs: Xattrs::new(),
        };
        let words = self.u16(at + 2)?;
        let xattrs = if words == 0 { 0 } else { XATTR_HEADER as u64 + 4 * (u64::from(words) - 1) };
        Ok(Raw {
            layout: (format >> 1) & 7,
            words,
            mode,
            size: self.u64(at + 8)?,
            union: self.u32(at + 16)?,
            at,
            length: INODE_SIZE as u64 + xattrs,
            meta,
        })
    }

    fn xattrs(&self, raw: &Raw) -> Result<Xattrs> {
        let mut all = Xattrs::new();
        if raw.words == 0 {
            return Ok(all);
        }
        let mut at = raw.at + INODE_SIZE as u64;
        let end = raw.at + raw.length;
        if self.get(at, XATTR_HEADER as u64)?[4] != 0 {
            return Err(input!("image: shared attributes, which pagefold does not write"));
        }
        at += XATTR_HEADER as u64;
        while at < end {
            let header = self.get(at, 4)?;
            let (name_size, index) = (u64::from(header[0]), header[1]);
            let value_size = u64::from(u16::from_le_bytes([header[2], header[3]]));
            let size = (4 + name_size + value_size).next_multiple_of(4);
            if at + size > end {
                return Err(input!("image: an attribute runs over its inode"));
            }
            let prefix: &[u8] = match index & 0x80 {
                0 => PREFIXES.iter().find(|(known, _)| *known == index).map(|(_, prefix)| *prefix),
                _ => self.prefixes.get(usize::from(index & 0x7f)).map(Vec::as_slice),
            }
            .ok_or_else(|| input!("image: attribute prefix {index} is unknown"))?;
            let name = [prefix, self.get(at + 4, name_size)?].concat();
            all.insert(name.into(), self.get(at + 4 + name_size, value_size)?.into());
            at += size;
        }
        Ok(all)
    }

    fn content(&self, raw: &Raw) -> Result<&'a [u8]> {
        match raw.layout {
            LAYOUT_PLAIN => self.get(u64::from(raw.union) * BLOCK, raw.size),
            LAYOUT_INLINE if raw.size <= BLOCK => self.get(raw.at + raw.length, raw.size),
            other => Err(input!("image: layout {other} for {} bytes, which pagefold does not write", raw.size)),
        }
    }

    fn entries(&self, data: &'a [u8]) -> Result<Vec<(&'a [u8], u64)>> {
        let mut all = Vec::new();
        for block in data.chunks(BLOCK as usize) {
            let u16_at = |at: usize| block.get(at..at + 2).map(|b| usize::from(u16::from_le_bytes([b[0], b[1]])));
            let first = u16_at(8).unwrap_or(0);
            if first == 0 || first % 12 != 0 || first > block.len() {
                return Err(input!("image: a directory block starts its names at {first}"));
            }
            let count = first / 12;
            for slot in 0..count {
                let from = u16_at(slot * 12 + 8).unwrap_or(usize::MAX);
                let to = if slot + 1 < count { u16_at(slot * 12 + 20).unwrap_or(0) } else { block.len() };
                let name = block.get(from..to).ok_or_else(|| input!("image: a name from {from} to {to} of a block"))?;
                let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
                let nid = u64::from_le_bytes(block[slot * 12..slot * 12 + 8].try_into().expect("8 bytes"));
                all.push((name, nid));
            }
        }
        Ok(all)
    }
}

/// Reads an image that [`super::write`] wrote back into its tree.
///
/// # Errors
/// Anything else: offsets outside, loops, features that pagefold does not write.
pub fn read(bytes: &[u8], limits: Limits) -> Result<Tree> {
    let mut source = Source { bytes, meta: 0, prefixes: Vec::new() };
    let sb = SUPER_OFFSET as u64;
    if source.u32(sb)? != MAGIC {
        return Err(input!("image: not an EROFS image"));
    }
    let mut block = source.get(sb, BLOCK - sb)?.to_vec();
    block[4..8].fill(0);
    if crc32c(&block) != source.u32(sb + 4)? {
        return Err(input!("image: the superblock's checksum is wrong"));
    }
    let incompat = source.u32(sb + 80)?;
    if source.get(sb + 12, 1)? != [12] || incompat & !(INCOMPAT_CHUNKED | INCOMPAT_XATTR_PREFIXES) != 0 {
        return Err(input!("image: features {incompat:#x}, which pagefold does not write"));
    }
    source.meta = u64::from(source.u32(sb + 40)?) * BLOCK;
    if incompat & INCOMPAT_XATTR_PREFIXES != 0 {
        let mut at = u64::from(source.u32(sb + 92)?) * 4;
        for _ in 0..source.get(sb + 91, 1)?[0] {
            let length = u64::from(source.u16(at)?);
            let item = source.get(at + 2, length)?;
            let base = item.first().and_then(|base| PREFIXES.iter().find(|(index, _)| index == base));
            let (_, base) = base.ok_or_else(|| input!("image: a bad attribute prefix"))?;
            source.prefixes.push([*base, &item[1..]].concat());
            at = (at + 2 + length).next_multiple_of(4);
        }
    }

    let mut tree = Tree::default();
    let mut known: HashMap<u64, Id> = HashMap::new();
    let root = u64::from(source.u16(sb + 14)?);
    let (inode, entries) = read_inode(&source, root)?;
    let Some(entries) = entries else { return Err(input!("image: its root is not a directory")) };
    *tree.inode_mut(ROOT) = inode;
    known.insert(root, ROOT);
    let mut todo = vec![(ROOT, entries)];
    // Every name takes 13 bytes at least: more names mean that one block is used many times.
    let mut names_left = bytes.len() / 13;
    while let Some((dir, entries)) = todo.pop() {
        names_left = names_left.checked_sub(entries.len()).ok_or_else(|| input!("image: directories overlap"))?;
        for (name, nid) in entries {
            if name == b"." || name == b".." {
                continue;
            }
            if tree.child(dir, name).is_some() {
                return Err(input!("image: {} is twice in its directory", show(name)));
            }
            let id = match known.get(&nid) {
                Some(&id) if !matches!(tree.inode(id).kind, FileKind::Dir(_)) => id,
                Some(_) => return Err(input!("image: {} is a directory with two names", show(name))),
                None => {
                    if known.len() >= limits.inodes {
                        return Err(input!("image: more than {} inodes", limits.inodes));
                    }
                    let (inode, below) = read_inode(&source, nid)?;
                    let id = tree.add(inode);
                    known.insert(nid, id);
                    todo.extend(below.map(|below| (id, below)));
                    id
                }
            };
            tree.link(dir, name, id)?;
        }
    }
    Ok(tree)
}

/// Reads inode `nid`; for a directory also its entries.
#[expect(clippy::type_complexity, reason = "a name for this pair would be used once")]
fn read_inode<'a>(source: &Source<'a>, nid: u64) -> Result<(Inode, Option<Vec<(&'a [u8], u64)>>)> {
    let raw = source.inode(nid)?;
    let mut xattrs = source.xattrs(&raw)?;
    let (major, minor) = ((raw.union >> 8) & 0xfff, (raw.union & 0xff) | ((raw.union >> 12) & !0xff));
    let mut entries = None;
    let kind = match u32::from(raw.mode) & libc::S_IFMT {
        libc::S_IFDIR => {
            entries = Some(source.entries(source.content(&raw)?)?);
            FileKind::Dir(BTreeMap::new())
        }
        libc::S_IFLNK if raw.size < BLOCK => FileKind::Symlink(source.content(&raw)?.into()),
        libc::S_IFLNK => return Err(input!("image: a link target of {} bytes", raw.size)),
        libc::S_IFCHR => FileKind::Char(major, minor),
        libc::S_IFBLK => FileKind::Block(major, minor),
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFREG => FileKind::File(read_data(source, &raw, &mut xattrs)?),
        other => return Err(input!("image: inode {nid} is of no known type ({other:#o})")),
    };
    let meta = Meta { xattrs, ..raw.meta };
    Ok((Inode { meta, kind }, entries))
}

fn read_data(source: &Source, raw: &Raw, xattrs: &mut Xattrs) -> Result<Data> {
    let redirect = xattrs.remove(REDIRECT);
    let fingerprint = xattrs.remove(FINGERPRINT);
    xattrs.remove(METACOPY);
    if let Some(path) = redirect {
        let hex: Vec<u8> = path.iter().copied().filter(|&byte| byte != b'/').collect();
        let digest =
            Digest::from_hex(&hex).filter(|digest| path[..] == *format!("/{}", digest.object_path()).as_bytes());
        let digest = digest.ok_or_else(|| input!("image: {} names no object", show(&path)))?;
        return Ok(Data::Object(digest, raw.size));
    }
    if let Some(value) = fingerprint {
        let digest = value.strip_prefix(b"sha256:").and_then(|raw| <[u8; 32]>::try_from(raw).ok());
        return Ok(Data::Object(Digest(digest.ok_or_else(|| input!("image: a bad fingerprint"))?), raw.size));
    }
    if raw.size > BLOCK {
        return Err(input!("image: {} bytes inline, which pagefold does not write", raw.size));
    }
    Ok(Data::Inline(source.content(raw)?.into()))
}
