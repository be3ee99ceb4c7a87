//! The reader: entries from a stream, one after another.

use super::entry::{Acls, ArchiveEntry, BLOCK, EntryKind};
use super::fields::{check_sum, mtime, number, text};
use super::pax::{Pax, parse_pax};
use super::sparse::{Map, Part, SparseRecords, block_parts, check_parts, header_parts, map_before_data};
use crate::config::Limits;
use crate::error::{Result, input};
use crate::format::acl::Names;
use crate::format::budget::Budget;
use crate::tree::{Meta, show};
use pagefold_os::fill::fill;
use std::io::{self, Read};

/// Reads entries from a stream, one after another.
pub struct Reader<R> {
    inner: R,
    budget: Budget,
    left: u64,
    padding: u64,
    sparse: Option<Sparse>,
    global: Pax,
    done: bool,
    marked: bool,
    may_be_empty: bool,
    owners: Names,
}

/// How far a sparse file has been read.
struct Sparse {
    /// The parts that are not read to their end, the next one last.
    parts: Vec<Part>,
    at: u64,
    size: u64,
}

impl<R: Read> Reader<R> {
    /// Reads from `inner`, within `limits`.
    pub fn new(inner: R, limits: Limits) -> Self {
        let global = Pax::default();
        Self {
            inner,
            budget: Budget::new("tar", limits),
            left: 0,
            padding: 0,
            sparse: None,
            global,
            done: false,
            marked: false,
            may_be_empty: false,
            owners: Names::default(),
        }
    }

    /// What the archive may use, and has used so far.
    pub(crate) fn budget(&mut self) -> &mut Budget {
        &mut self.budget
    }

    /// The users and groups that the entries so far have both names and numbers for.
    pub(crate) fn owners(&self) -> &Names {
        &self.owners
    }

    /// Takes a stream of no bytes for an archive of no entries, as container engines do with layers.
    pub fn allow_empty(&mut self) {
        self.may_be_empty = true;
    }

    /// Refuses an archive without an end mark, after it was read to the end: it may have been cut off between two entries.
    ///
    /// # Errors
    /// There is no mark.
    pub fn check_end(&self) -> Result<()> {
        if self.marked {
            return Ok(());
        }
        Err(input!(
            "tar: no end mark after {} entries: it may be cut off; get or pack it again (or add a mark: 1,024 zero bytes)",
            self.budget.entries()
        ))
    }

    /// The stream, to read what follows the archive's end.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The stream, to look at.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    fn fill(&mut self, buffer: &mut [u8], what: &str) -> Result<()> {
        self.inner.read_exact(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => input!("tar: cut off in {what}, after {} entries", self.budget.entries()),
            _ => input!("tar: {error}, after {} entries", self.budget.entries()),
        })
    }

    fn take(&mut self, size: u64, what: &str) -> Result<Vec<u8>> {
        self.budget.check_header(size, what)?;
        let mut bytes = vec![0; size as usize];
        self.fill(&mut bytes, what)?;
        let padding = (BLOCK - size as usize % BLOCK) % BLOCK;
        let mut rest = [0; BLOCK];
        self.fill(&mut rest[..padding], what)?;
        Ok(bytes)
    }

    /// Skips the bytes of the entry last returned: `pass` moves the stream forward by that many bytes without reading them.
    pub(crate) fn pass_over(&mut self, pass: impl FnOnce(&mut R, u64) -> io::Result<()>) -> Result<()> {
        let rest = std::mem::take(&mut self.left) + std::mem::take(&mut self.padding);
        pass(&mut self.inner, rest).map_err(|error| input!("tar: {error}, after {} entries", self.budget.entries()))
    }

    /// The next entry. Unread bytes of the last one are skipped.
    ///
    /// # Errors
    /// Anything that is not plainly one archive.
    pub fn next_entry(&mut self) -> Result<Option<ArchiveEntry>> {
        self.skip_rest()?;
        let mut extended = Extended::default();
        while let Some(header) = self.next_header()? {
            check_sum(&header)?;
            let size = number(&header[124..136], "size")?;
            match header[156] {
                b'x' => {
                    let records = self.take(size, "a PAX header")?;
                    let mut pax = self.global.clone();
                    parse_pax(&records, &mut pax)?;
                    if extended.pax.replace(pax).is_some() {
                        return Err(input!("tar: two PAX headers before one entry"));
                    }
                }
                b'g' => {
                    let records = self.take(size, "a PAX header")?;
                    self.global_header(&records)?;
                }
                b'L' | b'K' => {
                    let mut name = self.take(size, "a GNU long name")?;
                    while name.last() == Some(&0) {
                        name.pop();
                    }
                    let of_kind = if header[156] == b'L' { &mut extended.path } else { &mut extended.link };
                    if of_kind.replace(name).is_some() {
                        return Err(input!("tar: two GNU long names before one entry"));
                    }
                }
                // The label of the volume: no file.
                b'V' if size == 0 => extended = Extended::default(),
                kind => return self.entry(&header, kind, size, extended).map(Some),
            }
        }
        if extended.pax.is_some() || extended.path.is_some() || extended.link.is_some() {
            return Err(input!("tar: ends after an extended header that belongs to no entry"));
        }
        Ok(None)
    }

    /// Reads to the end of the entry last returned.
    fn skip_rest(&mut self) -> Result<()> {
        self.sparse = None;
        let mut skip = [0u8; 1 << 14];
        while self.left > 0 {
            let count = self.left.min(skip.len() as u64) as usize;
            self.fill(&mut skip[..count], "a file")?;
            self.left -= count as u64;
        }
        let padding = std::mem::take(&mut self.padding) as usize;
        self.fill(&mut skip[..padding], "a file's padding")
    }

    /// The next header, counted as an entry; `None` at the end of the archive.
    fn next_header(&mut self) -> Result<Option<[u8; BLOCK]>> {
        if self.done {
            return Ok(None);
        }
        let mut header = [0u8; BLOCK];
        let filled = fill(&mut header, |rest, _| self.inner.read(rest))
            .map_err(|error| input!("tar: {error}, after {} entries", self.budget.entries()))?;
        if filled == 0 && self.budget.entries() == 0 && !self.may_be_empty {
            return Err(input!("tar: empty, not even an end mark"));
        }
        if filled == 0 || header == [0; BLOCK] {
            (self.done, self.marked) = (true, filled > 0);
            return Ok(None);
        }
        if filled < BLOCK {
            return Err(input!("tar: cut off in a header, after {} entries", self.budget.entries()));
        }
        self.budget.count_entry()?;
        Ok(Some(header))
    }

    /// Reads a PAX header for all entries after it.
    fn global_header(&mut self, records: &[u8]) -> Result<()> {
        let mut pax = std::mem::take(&mut self.global);
        parse_pax(records, &mut pax)?;
        if pax.path.is_some() || pax.linkpath.is_some() || pax.size.is_some() || !pax.sparse.is_empty() {
            return Err(input!("tar: a global header that names one file"));
        }
        // Every entry would have a copy of the attributes.
        if !pax.xattrs.is_empty() || pax.acls != Acls::default() {
            return Err(input!("tar: a global header with attributes; give them to the files they are for"));
        }
        self.global = pax;
        Ok(())
    }

    /// The entry of a header, with what the extended headers before it say.
    fn entry(&mut self, header: &[u8; BLOCK], kind: u8, header_size: u64, extended: Extended) -> Result<ArchiveEntry> {
        let mut path = text(&header[..100]).to_vec();
        if &header[257..263] == b"ustar\0" && header[345] != 0 {
            path = [text(&header[345..500]), b"/", &path].concat();
        }
        let mut pax = extended.pax.unwrap_or_else(|| self.global.clone());
        if (extended.path.is_some() && pax.path.is_some()) || (extended.link.is_some() && pax.linkpath.is_some()) {
            return Err(input!("tar: {} has a GNU and a PAX name", show(&path)));
        }
        let path = pax.sparse.name.take().or(pax.path.take()).or(extended.path).unwrap_or(path);
        let link = pax.linkpath.take().or(extended.link).unwrap_or_else(|| text(&header[157..257]).to_vec());
        // POSIX: the extended size replaces the header's. Other readers differ about a header with another size, neither the
        // same nor 0: it is refused.
        let size = match pax.size {
            Some(size) if header_size != size && header_size != 0 && header_size != 0o77777777777 => {
                return Err(input!("tar: {}: size {header_size} in its header, {size} in its PAX header", show(&path)));
            }
            Some(size) => size,
            None => header_size,
        };
        let sparse = self.sparse(header, kind, &path, std::mem::take(&mut pax.sparse), size)?;
        let stored = sparse.as_ref().map_or(size, |(_, stored)| *stored);
        let size = sparse.as_ref().map_or(size, |(sparse, _)| sparse.size);
        let kind = entry_kind(header, kind, &path, link, size)?;
        self.count_content(&path, &kind, stored)?;
        let is_sparse = sparse.is_some();
        self.sparse = sparse.map(|(sparse, _)| sparse);
        let id = |value: Option<u64>, field: &[u8], what| {
            let value = value.map_or_else(|| number(field, what), Ok)?;
            // The last one means "no owner" to the kernel.
            let id = u32::try_from(value).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| input!("tar: {}: {what} {value}", show(&path)))
        };
        let (uid, gid) = (id(pax.uid, &header[108..116], "uid")?, id(pax.gid, &header[116..124], "gid")?);
        self.note_owner(header, &pax, uid, gid);
        let attributes = pax.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        let target =
            if let EntryKind::Symlink(target) | EntryKind::HardLink(target) = &kind { target } else { &[][..] };
        self.budget.count_names(&path, target, attributes + pax.acls.memory_bytes())?;
        if let EntryKind::Symlink(target) = &kind {
            self.budget.check_link_target(&path, target)?;
        }
        let (mtime_s, mtime_ns) = match pax.mtime {
            Some(time) => time,
            None => (mtime(&header[136..148])?, 0),
        };
        let mode = (number(&header[100..108], "mode")? & 0o7777) as u16;
        let meta = Meta { mode, uid, gid, mtime_s, mtime_ns, xattrs: pax.xattrs };
        Ok(ArchiveEntry { path, kind, meta, acls: pax.acls, has_foreign_acl: pax.has_foreign_acl, is_sparse })
    }

    /// Notes the names of an entry's owner and group: access control lists may have names alone.
    fn note_owner(&mut self, header: &[u8; BLOCK], pax: &Pax, uid: u32, gid: u32) {
        let has_names = &header[257..262] == b"ustar";
        let name = |of_pax: &Option<Vec<u8>>, field: &[u8]| match of_pax {
            Some(name) => name.clone(),
            None if has_names => text(field).to_vec(),
            None => Vec::new(),
        };
        let (user, group) = (name(&pax.uname, &header[265..297]), name(&pax.gname, &header[297..329]));
        let mut bytes = 0;
        if !user.is_empty() {
            bytes += self.owners.add_user(&user, uid);
        }
        if !group.is_empty() {
            bytes += self.owners.add_group(&group, gid);
        }
        self.budget.count_owners(bytes);
    }

    /// The parts of the entry at `path`, if it is a sparse file, of which the archive has `size` bytes; reads the map, where
    /// it is not in the headers. Returns how many bytes are left.
    fn sparse(
        &mut self,
        header: &[u8; BLOCK],
        kind: u8,
        path: &[u8],
        records: SparseRecords,
        mut stored: u64,
    ) -> Result<Option<(Sparse, u64)>> {
        let map = records.map(path)?;
        let (size, mut parts) = match (kind, map) {
            (b'S', None) => {
                let mut parts = Vec::new();
                let (size, mut more) = header_parts(header, &mut parts)?;
                while more {
                    let mut block = [0; BLOCK];
                    self.fill(&mut block, "the map of a sparse file")?;
                    more = block_parts(&block, &mut parts)?;
                }
                (size, parts)
            }
            (_, None) => return Ok(None),
            (b'0' | 0 | b'7', Some(Map::Known(size, parts))) => (size, parts),
            (b'0' | 0 | b'7', Some(Map::BeforeData(size))) => {
                let parts = map_before_data(|| {
                    let left = stored.checked_sub(BLOCK as u64);
                    stored = left.ok_or_else(|| input!("tar: {}: the map is longer than its entry", show(path)))?;
                    let mut block = [0; BLOCK];
                    self.fill(&mut block, "the map of a sparse file")?;
                    Ok(block)
                })?;
                (size, parts)
            }
            (_, Some(_)) => return Err(input!("tar: {}: a sparse file that is no plain file", show(path))),
        };
        check_parts(path, &mut parts, size, stored)?;
        parts.reverse();
        Ok(Some((Sparse { parts, at: 0, size }, stored)))
    }

    /// Counts a file's content against the limit; the reader then returns it, of which `stored` bytes are in the archive.
    fn count_content(&mut self, path: &[u8], kind: &EntryKind, stored: u64) -> Result<()> {
        let size = if let EntryKind::File(size) = kind { *size } else { stored };
        self.budget.count_content(path, size)?;
        self.left = stored;
        self.padding = (BLOCK as u64 - stored % BLOCK as u64) % BLOCK as u64;
        Ok(())
    }
}

/// What extended headers say about the entry after them.
#[derive(Default)]
struct Extended {
    pax: Option<Pax>,
    /// The GNU long path.
    path: Option<Vec<u8>>,
    /// The GNU long link target.
    link: Option<Vec<u8>>,
}

/// The kind of the entry at `path`, of type `kind` in its header, with `size` bytes of data.
fn entry_kind(header: &[u8; BLOCK], kind: u8, path: &[u8], link: Vec<u8>, size: u64) -> Result<EntryKind> {
    let device = |field: &[u8], what| {
        let value = number(field, what)?;
        u32::try_from(value).map_err(|_| input!("tar: {}: {what} {value}", show(path)))
    };
    let kind = match kind {
        // Before ustar, a slash at the end of the name marked a directory, and some programs still write archives this way.
        // GNU tar and bsdtar read them as directories in every format.
        b'0' | 0 | b'7' if path.last() == Some(&b'/') => EntryKind::Dir,
        b'0' | 0 | b'7' | b'S' => EntryKind::File(size),
        b'1' => EntryKind::HardLink(link),
        b'2' => EntryKind::Symlink(link),
        b'3' => EntryKind::Char(device(&header[329..337], "major")?, device(&header[337..345], "minor")?),
        b'4' => EntryKind::Block(device(&header[329..337], "major")?, device(&header[337..345], "minor")?),
        b'5' => EntryKind::Dir,
        // As an incremental archive has it: its data are the names in it, for the removal of others.
        b'D' => return Ok(EntryKind::Dir),
        b'6' => EntryKind::Fifo,
        other => return Err(input!("tar: {}: entry type {:?} is not known", show(path), other as char)),
    };
    if size != 0 && !matches!(kind, EntryKind::File(_)) {
        return Err(input!("tar: {}: {size} bytes of data in an entry that can have none", show(path)));
    }
    Ok(kind)
}

/// Reads the bytes of the entry last returned.
impl<R: Read> Read for Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = buffer.len() as u64;
        let want = match &self.sparse {
            None => self.left.min(room),
            Some(sparse) => match sparse.parts.last() {
                Some(&(place, length)) if place == sparse.at => length.min(room),
                next => {
                    let hole = next.map_or(sparse.size, |(place, _)| *place) - sparse.at;
                    let zeros = hole.min(room) as usize;
                    buffer[..zeros].fill(0);
                    self.advance(zeros as u64);
                    return Ok(zeros);
                }
            },
        };
        let count = self.inner.read(&mut buffer[..want as usize])?;
        if count == 0 && want > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is cut off"));
        }
        self.left -= count as u64;
        self.advance(count as u64);
        Ok(count)
    }
}

impl<R> Reader<R> {
    /// Moves on in a sparse file.
    fn advance(&mut self, count: u64) {
        let Some(sparse) = &mut self.sparse else { return };
        if let Some((place, length)) = sparse.parts.last_mut().filter(|(place, _)| *place == sparse.at) {
            *place += count;
            *length -= count;
            if *length == 0 {
                sparse.parts.pop();
            }
        }
        sparse.at += count;
    }
}
