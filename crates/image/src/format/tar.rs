//! A strict tar reader: ustar, PAX and GNU long names, and nothing it does not understand.
//!
//! Readers that differ about where an entry ends let one archive be two archives.
//! This one refuses what is ambiguous instead of choosing: two sizes that differ,
//! data in an entry that can have none, a length that is not a number, an unknown
//! type, a sparse file, a wrong header checksum, an end in the middle.
//! It never writes anything; it returns entries and their bytes.

use crate::config::{Limits, Used};
use crate::error::{Result, input};
use crate::tree::{Xattrs, show, show_start};
use std::io::{self, Read};

const BLOCK: usize = 512;
/// An archive may name directories only by paths, at a cost of two bytes each: this many are allowed,
const IMPLIED_FREE: u64 = 65_536;
/// plus this many for each of its entries.
const IMPLIED_PER_ENTRY: u64 = 4;
/// A path of a few bytes may lead by symbolic links through tens of thousands of names: the paths of an archive may take this
/// many steps,
const STEPS_FREE: u64 = 1 << 20;
/// plus this many for each entry.
const STEPS_PER_ENTRY: u64 = 64;

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file of that many bytes, which [`Reader`] now gives.
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
pub struct Entry {
    /// Its path, as written.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// Extended attributes.
    pub xattrs: Xattrs,
    /// Whether there are more attributes, in a form that is not read: ACLs as text, SELinux labels.
    pub left_out: bool,
}

/// Reads entries from a stream, one after another.
pub struct Reader<R> {
    inner: R,
    limits: Limits,
    entries: u64,
    implied: u64,
    steps: u64,
    names: u64,
    content: u64,
    left: u64,
    padding: u64,
    global: Pax,
    done: bool,
    marked: bool,
    may_be_empty: bool,
}

/// What PAX headers say about the entry after them.
#[derive(Clone, Default)]
struct Pax {
    path: Option<Vec<u8>>,
    linkpath: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    xattrs: Xattrs,
    left_out: bool,
}

impl<R: Read> Reader<R> {
    /// Reads from `inner`, within `limits`.
    pub fn new(inner: R, limits: Limits) -> Self {
        let global = Pax::default();
        Self {
            inner,
            limits,
            entries: 0,
            implied: 0,
            steps: 0,
            names: 0,
            content: 0,
            left: 0,
            padding: 0,
            global,
            done: false,
            marked: false,
            may_be_empty: false,
        }
    }

    /// What the entries so far have used of the limits.
    pub fn used(&self) -> Used {
        Used { entries: self.entries + self.implied, names_bytes: self.names, bytes: self.content }
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
            self.entries
        ))
    }

    /// Counts the directories that `path` has made without entries of their own: in memory they are as large.
    ///
    /// # Errors
    /// More than the limit of entries, or than an honest archive has.
    pub fn count_implied(&mut self, path: &[u8], made: u64) -> Result<()> {
        self.implied += made;
        if self.entries + self.implied > self.limits.entries {
            return Err(input!(
                "tar: more than {} entries, counting the directories on their paths",
                self.limits.entries
            ));
        }
        if self.implied > IMPLIED_FREE + IMPLIED_PER_ENTRY * self.entries {
            return Err(input!(
                "tar: {}: {} entries bring {} directories that have no entry; pack the directories, too",
                show_start(path),
                self.entries,
                self.implied
            ));
        }
        Ok(())
    }

    /// Counts the steps that resolving `path` has taken.
    ///
    /// # Errors
    /// More than an honest archive has.
    pub fn count_steps(&mut self, path: &[u8], taken: u64) -> Result<()> {
        self.steps += taken;
        if self.steps > STEPS_FREE + STEPS_PER_ENTRY * self.entries {
            return Err(input!(
                "tar: {}: the paths of {} entries take {} steps, links followed, which no honest archive's do",
                show_start(path),
                self.entries,
                self.steps
            ));
        }
        Ok(())
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
            io::ErrorKind::UnexpectedEof => input!("tar: cut off in {what}, after {} entries", self.entries),
            _ => input!("tar: {error}, after {} entries", self.entries),
        })
    }

    fn take(&mut self, size: u64, what: &str) -> Result<Vec<u8>> {
        if size > self.limits.header_bytes {
            return Err(input!("tar: {what} of {size} bytes; {} are allowed", self.limits.header_bytes));
        }
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
        pass(&mut self.inner, rest).map_err(|error| input!("tar: {error}, after {} entries", self.entries))
    }

    /// The next entry. Unread bytes of the last one are skipped.
    ///
    /// # Errors
    /// Anything that is not plainly one archive.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
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
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut header[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(input!("tar: {error}, after {} entries", self.entries)),
            }
        }
        if filled == 0 && self.entries == 0 && !self.may_be_empty {
            return Err(input!("tar: empty, not even an end mark"));
        }
        if filled == 0 || header == [0; BLOCK] {
            (self.done, self.marked) = (true, filled > 0);
            return Ok(None);
        }
        if filled < BLOCK {
            return Err(input!("tar: cut off in a header, after {} entries", self.entries));
        }
        self.entries += 1;
        if self.entries + self.implied > self.limits.entries {
            return Err(input!("tar: more than {} entries, all that the limit leaves room for", self.limits.entries));
        }
        Ok(Some(header))
    }

    /// Reads a PAX header for all entries after it.
    fn global_header(&mut self, records: &[u8]) -> Result<()> {
        let mut pax = std::mem::take(&mut self.global);
        parse_pax(records, &mut pax)?;
        if pax.path.is_some() || pax.linkpath.is_some() || pax.size.is_some() {
            return Err(input!("tar: a global header that names one file"));
        }
        // Every entry would have a copy of the attributes.
        if !pax.xattrs.is_empty() {
            return Err(input!("tar: a global header with attributes; give them to the files they are for"));
        }
        self.global = pax;
        Ok(())
    }

    /// The entry of a header, with what the extended headers before it say.
    fn entry(&mut self, header: &[u8; BLOCK], kind: u8, header_size: u64, extended: Extended) -> Result<Entry> {
        let mut path = text(&header[..100]).to_vec();
        if &header[257..263] == b"ustar\0" && header[345] != 0 {
            path = [text(&header[345..500]), b"/", &path].concat();
        }
        let mut pax = extended.pax.unwrap_or_else(|| self.global.clone());
        if (extended.path.is_some() && pax.path.is_some()) || (extended.link.is_some() && pax.linkpath.is_some()) {
            return Err(input!("tar: {} has a GNU and a PAX name", show(&path)));
        }
        let path = pax.path.take().or(extended.path).unwrap_or(path);
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
        let kind = entry_kind(header, kind, &path, link, size)?;
        self.count_content(&path, &kind)?;
        self.count_names(&path, &kind, &pax.xattrs)?;
        let id = |value: Option<u64>, field: &[u8], what| {
            let value = value.map_or_else(|| number(field, what), Ok)?;
            // The last one means "no owner" to the kernel.
            let id = u32::try_from(value).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| input!("tar: {}: {what} {value}", show(&path)))
        };
        let (mtime_s, mtime_ns) = match pax.mtime {
            Some(time) => time,
            None => (mtime(&header[136..148])?, 0),
        };
        Ok(Entry {
            mode: (number(&header[100..108], "mode")? & 0o7777) as u16,
            uid: id(pax.uid, &header[108..116], "uid")?,
            gid: id(pax.gid, &header[116..124], "gid")?,
            mtime_s,
            mtime_ns,
            xattrs: pax.xattrs,
            left_out: pax.left_out,
            kind,
            path,
        })
    }

    /// Counts a file's content against the limit; the reader then returns it.
    fn count_content(&mut self, path: &[u8], kind: &EntryKind) -> Result<()> {
        let &EntryKind::File(size) = kind else { return Ok(()) };
        let left = self.limits.bytes - self.content;
        if size > left {
            return Err(input!("tar: {}: {size} bytes of content, the limit leaves room for {left}", show(path)));
        }
        self.content += size;
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        Ok(())
    }

    /// Counts name, link target and attributes, which stay in memory, against the limit.
    fn count_names(&mut self, path: &[u8], kind: &EntryKind, xattrs: &Xattrs) -> Result<()> {
        let target = if let EntryKind::Symlink(target) | EntryKind::HardLink(target) = kind { target } else { &[][..] };
        let name = path.rsplit(|&byte| byte == b'/').find(|part| !part.is_empty()).unwrap_or_default();
        let attributes = xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        self.names += (name.len() + target.len() + attributes) as u64;
        if self.names > self.limits.names_bytes {
            return Err(input!(
                "tar: {}: with its name, link target and attributes there are more than the limit's {} bytes of them",
                show_start(path),
                self.limits.names_bytes
            ));
        }
        if matches!(kind, EntryKind::Symlink(_)) && (target.is_empty() || target.len() > 4095 || target.contains(&0)) {
            return Err(input!("tar: {}: a link target of {} bytes", show(path), target.len()));
        }
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
        b'0' | 0 | b'7' => EntryKind::File(size),
        b'1' => EntryKind::HardLink(link),
        b'2' => EntryKind::Symlink(link),
        b'3' => EntryKind::Char(device(&header[329..337], "major")?, device(&header[337..345], "minor")?),
        b'4' => EntryKind::Block(device(&header[329..337], "major")?, device(&header[337..345], "minor")?),
        b'5' => EntryKind::Dir,
        b'6' => EntryKind::Fifo,
        b'S' => {
            return Err(input!("tar: {}: a GNU sparse file; pack it with tar --hole-detection off", show(path)));
        }
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
        let want = self.left.min(buffer.len() as u64) as usize;
        let count = self.inner.read(&mut buffer[..want])?;
        if count == 0 && want > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is cut off"));
        }
        self.left -= count as u64;
        Ok(count)
    }
}

/// A field up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// The header's checksum must be right: the sum of its bytes, its own field as spaces.
fn check_sum(header: &[u8; BLOCK]) -> Result<()> {
    let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    let expected = sum(&header[..148]) + 8 * u64::from(b' ') + sum(&header[156..]);
    match number(&header[148..156], "checksum") {
        Ok(found) if found == expected => Ok(()),
        _ => Err(input!("tar: a header with a wrong checksum (is this a tar archive?)")),
    }
}

/// A number field: octal digits with spaces or NULs around, or base 256 when the top bit is set.
fn number(field: &[u8], what: &str) -> Result<u64> {
    if field[0] & 0x80 != 0 {
        let (first, rest) = (field[0] & 0x7f, &field[1..]);
        let bytes = rest.iter().try_fold(u64::from(first), |sum, &byte| sum.checked_mul(256)?.checked_add(byte.into()));
        return bytes.ok_or_else(|| input!("tar: {what} is out of range"));
    }
    let digits = field.trim_ascii_start();
    let end = digits.iter().position(|byte| matches!(byte, 0 | b' ')).unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    if rest.iter().any(|byte| !matches!(byte, 0 | b' ')) || digits.iter().any(|digit| !(b'0'..=b'7').contains(digit)) {
        return Err(input!("tar: {what} {} is not a number", show(field)));
    }
    digits
        .iter()
        .try_fold(0u64, |sum, digit| sum.checked_mul(8)?.checked_add(u64::from(digit - b'0')))
        .ok_or_else(|| input!("tar: {what} is out of range"))
}

/// A time field: a number, or two's complement in base 256 before 1970.
fn mtime(field: &[u8]) -> Result<i64> {
    if field[0] & 0xc0 != 0xc0 {
        return Ok(i64::try_from(number(field, "mtime")?).unwrap_or(i64::MAX));
    }
    let (sign, value) = field.split_at(field.len() - 8);
    let value = i64::from_be_bytes(value.try_into().expect("8 bytes"));
    if value >= 0 || sign.iter().any(|&byte| byte != 0xff) {
        return Err(input!("tar: mtime is out of range"));
    }
    Ok(value)
}

/// Reads PAX records, `length key=value\n`, into `pax`.
fn parse_pax(mut records: &[u8], pax: &mut Pax) -> Result<()> {
    let bad = || input!("tar: a PAX record that is not `length key=value`");
    let mut seen = std::collections::HashSet::new();
    let mut of_libarchive = Vec::new();
    while !records.is_empty() {
        let space = records.iter().take(20).position(|&byte| byte == b' ').ok_or_else(bad)?;
        let length = decimal(&records[..space]).ok_or_else(bad)? as usize;
        if length <= space + 1 || length > records.len() || records[length - 1] != b'\n' {
            return Err(bad());
        }
        let record = &records[space + 1..length - 1];
        records = &records[length..];
        let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(bad)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        if !seen.insert(key.to_vec()) {
            return Err(input!("tar: {} is twice in one PAX header", show(key)));
        }
        let whole = || decimal(value).ok_or_else(|| input!("tar: PAX {} {:?} is no number", show(key), show(value)));
        let named = || {
            let fits = !value.is_empty() && value.len() <= 4096 && !value.contains(&0);
            fits.then(|| value.to_vec()).ok_or_else(|| input!("tar: a PAX {} of {} bytes", show(key), value.len()))
        };
        match key {
            // POSIX: an empty value takes back what an earlier header said of it, as if the record were absent.
            b"path" if value.is_empty() => pax.path = None,
            b"linkpath" if value.is_empty() => pax.linkpath = None,
            b"size" if value.is_empty() => pax.size = None,
            b"uid" if value.is_empty() => pax.uid = None,
            b"gid" if value.is_empty() => pax.gid = None,
            b"mtime" if value.is_empty() => pax.mtime = None,
            b"hdrcharset" if value.is_empty() => {}
            b"path" => pax.path = Some(named()?),
            b"linkpath" => pax.linkpath = Some(named()?),
            b"size" => pax.size = Some(whole()?),
            b"uid" => pax.uid = Some(whole()?),
            b"gid" => pax.gid = Some(whole()?),
            b"mtime" => pax.mtime = Some(time(value).ok_or_else(|| input!("tar: PAX mtime {:?}", show(value)))?),
            b"hdrcharset" if value != b"BINARY" && value != b"ISO-IR 10646 2000 UTF-8" => {
                return Err(input!("tar: character set {}", show(value)));
            }
            _ if key.starts_with(b"GNU.sparse.") => {
                return Err(input!("tar: a GNU sparse file; pack it with tar --hole-detection off"));
            }
            // ACLs as text have names of users and groups, which the tree need not know; labels belong to another system's policy.
            _ if key.starts_with(b"SCHILY.acl.") || key == b"RHT.security.selinux" => pax.left_out = true,
            _ => {
                if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                    let read = (percent_decoded(name), base64_decoded(value));
                    let (Some(name), Some(value)) = read else {
                        return Err(input!("tar: {} is not a percent-encoded name with a value in base64", show(key)));
                    };
                    if name.is_empty() || name.contains(&0) {
                        return Err(input!("tar: an attribute without a name"));
                    }
                    of_libarchive.push((name, value));
                } else if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    if name.is_empty() || name.contains(&0) {
                        return Err(input!("tar: an attribute without a name"));
                    }
                    if pax.xattrs.insert(decode_keyword(name).into(), value.into()).is_some() {
                        return Err(input!("tar: attribute {} is twice in one PAX header", show(name)));
                    }
                }
            }
        }
    }
    // libarchive writes each attribute in both forms, unless it is told to write one: the plain one goes first.
    for (name, value) in of_libarchive {
        pax.xattrs.entry(name.into()).or_insert_with(|| value.into());
    }
    Ok(())
}

/// Decodes `%41` and the like; `None` where two hexadecimal digits are missing.
fn percent_decoded(mut text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let mut out = Vec::with_capacity(text.len());
    while let Some((&first, rest)) = text.split_first() {
        if first == b'%' {
            out.push(digit(*rest.first()?)? << 4 | digit(*rest.get(1)?)?);
            text = &rest[2..];
        } else {
            out.push(first);
            text = rest;
        }
    }
    Some(out)
}

/// Decodes base64 of the usual alphabet, with or without `=` at its end; `None` if it is not that.
fn base64_decoded(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|&byte| byte != b'=').map_or(0, |last| last + 1);
    let mut out = Vec::with_capacity(end / 4 * 3 + 2);
    for group in text[..end].chunks(4) {
        let mut bits = 0u32;
        for &byte in group {
            let value = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        let bytes = match group.len() {
            4 => 3,
            3 => 2,
            2 => 1,
            _ => return None,
        };
        bits <<= 6 * (4 - group.len());
        out.extend(&bits.to_be_bytes()[1..=bytes]);
    }
    Some(out)
}

/// An attribute's name as a PAX keyword, which ends at its first `=`; escaped as GNU tar does.
fn encode_keyword(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    for &byte in name {
        match byte {
            b'%' => out.extend(b"%25"),
            b'=' => out.extend(b"%3D"),
            _ => out.push(byte),
        }
    }
    out
}

/// The name that [`encode_keyword`] has written; any other `%` stands for itself.
fn decode_keyword(mut name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    while let Some((&first, rest)) = name.split_first() {
        let (byte, rest) = match rest {
            [b'2', b'5', rest @ ..] if first == b'%' => (b'%', rest),
            [b'3', b'D', rest @ ..] if first == b'%' => (b'=', rest),
            _ => (first, rest),
        };
        out.push(byte);
        name = rest;
    }
    out
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 20 {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, digit| match digit {
        b'0'..=b'9' => sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// Seconds and nanoseconds of a PAX time, which may be negative and may have any number of decimals.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut halves = text.splitn(2, |&byte| byte == b'.');
    let seconds = decimal(halves.next()?)?;
    let mut ns = 0u32;
    let decimals = halves.next().unwrap_or_default();
    for place in 0..9 {
        ns = ns * 10
            + match decimals.get(place) {
                None => 0,
                Some(digit @ b'0'..=b'9') => u32::from(digit - b'0'),
                Some(_) => return None,
            };
    }
    if decimals.iter().any(|digit| !digit.is_ascii_digit()) {
        return None;
    }
    let before = 0i64.checked_sub_unsigned(seconds);
    Some(match (negative, ns) {
        (false, _) => (i64::try_from(seconds).ok()?, ns),
        (true, 0) => (before?, 0),
        (true, _) => (before?.checked_sub(1)?, 1_000_000_000 - ns),
    })
}

/// Writes one entry's headers, PAX where ustar's fields are too small; the caller appends the data and [`pad`]s it.
pub(crate) fn write_header(out: &mut Vec<u8>, entry: &Entry) {
    let mut records = Vec::new();
    let mut record = |key: &[u8], value: &[u8]| {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length.to_string().len() + rest > length {
            length += 1;
        }
        records.extend(length.to_string().bytes());
        records.push(b' ');
        records.extend(key);
        records.push(b'=');
        records.extend(value);
        records.push(b'\n');
    };
    let (kind, size, link, device): (u8, u64, &[u8], (u32, u32)) = match &entry.kind {
        EntryKind::File(size) => (b'0', *size, b"", (0, 0)),
        EntryKind::HardLink(target) => (b'1', 0, target, (0, 0)),
        EntryKind::Symlink(target) => (b'2', 0, target, (0, 0)),
        EntryKind::Char(major, minor) => (b'3', 0, b"", (*major, *minor)),
        EntryKind::Block(major, minor) => (b'4', 0, b"", (*major, *minor)),
        EntryKind::Dir => (b'5', 0, b"", (0, 0)),
        EntryKind::Fifo => (b'6', 0, b"", (0, 0)),
    };
    if entry.path.len() > 100 {
        record(b"path", &entry.path);
    }
    if link.len() > 100 {
        record(b"linkpath", link);
    }
    if size > 0o77_777_777_777 {
        record(b"size", size.to_string().as_bytes());
    }
    if entry.uid > 0o7_777_777 {
        record(b"uid", entry.uid.to_string().as_bytes());
    }
    if entry.gid > 0o7_777_777 {
        record(b"gid", entry.gid.to_string().as_bytes());
    }
    if entry.mtime_s < 0 || entry.mtime_ns != 0 || entry.mtime_s > 0o77_777_777_777 {
        let value = match (entry.mtime_s, entry.mtime_ns) {
            (seconds, 0) => seconds.to_string(),
            (seconds, ns) if seconds >= 0 => format!("{seconds}.{ns:09}"),
            (seconds, ns) => format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - ns),
        };
        record(b"mtime", value.as_bytes());
    }
    for (name, value) in &entry.xattrs {
        record(&[b"SCHILY.xattr.", &encode_keyword(name)[..]].concat(), value);
    }
    if !records.is_empty() {
        out.extend(header_block(entry, b"pax", b'x', records.len() as u64, b"", device));
        out.extend(&records);
        pad(out, records.len() as u64);
    }
    out.extend(header_block(entry, &entry.path, kind, size, link, device));
}

/// One header block, with the mode, owner and time of `entry`.
fn header_block(entry: &Entry, path: &[u8], kind: u8, size: u64, link: &[u8], device: (u32, u32)) -> [u8; BLOCK] {
    let mut block = [0u8; BLOCK];
    let octal = |block: &mut [u8; BLOCK], at: usize, width: usize, value: u64| {
        let most = (1u64 << (3 * (width - 1))) - 1;
        let digits = format!("{:0width$o}", if value > most { 0 } else { value }, width = width - 1);
        block[at..at + digits.len()].copy_from_slice(digits.as_bytes());
    };
    let count = path.len().min(100);
    block[..count].copy_from_slice(&path[..count]);
    octal(&mut block, 100, 8, entry.mode.into());
    octal(&mut block, 108, 8, entry.uid.into());
    octal(&mut block, 116, 8, entry.gid.into());
    octal(&mut block, 124, 12, size);
    octal(&mut block, 136, 12, entry.mtime_s.max(0) as u64);
    block[156] = kind;
    let count = link.len().min(100);
    block[157..157 + count].copy_from_slice(&link[..count]);
    block[257..265].copy_from_slice(b"ustar\x0000");
    octal(&mut block, 329, 8, device.0.into());
    octal(&mut block, 337, 8, device.1.into());
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    let digits = format!("{sum:06o}\0 ");
    block[148..156].copy_from_slice(digits.as_bytes());
    block
}

/// Fills up to a whole block after `size` bytes of data.
pub(crate) fn pad(out: &mut Vec<u8>, size: u64) {
    out.resize(out.len() + (BLOCK - size as usize % BLOCK) % BLOCK, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &[u8], kind: EntryKind) -> Entry {
        let mtime_s = -5;
        Entry {
            path: path.into(),
            kind,
            mode: 0o644,
            uid: 7,
            gid: 3_000_000,
            mtime_s,
            mtime_ns: 12,
            left_out: false,
            xattrs: Xattrs::new(),
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut file = entry(&[b'x'; 300], EntryKind::File(5));
        for name in [&b"user.a"[..], b"user.a=b", b"user.a%3Db", b"user.%", b"=%="] {
            file.xattrs.insert(name.into(), (*b"\0\n=").into());
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
        assert_eq!((&found.path, &found.kind, found.mtime_s, found.mtime_ns), (&file.path, &file.kind, -5, 12));
        assert_eq!((found.uid, found.gid, &found.xattrs), (7, 3_000_000, &file.xattrs));
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert_eq!(reader.next_entry().unwrap().unwrap().kind, EntryKind::Symlink(vec![b'y'; 200]));
        assert_eq!(reader.next_entry().unwrap().unwrap().kind, EntryKind::Char(1, 3));
        assert!(reader.next_entry().unwrap().is_none());
    }

    #[test]
    fn records_of_libarchive_are_read_where_no_plain_ones_are() {
        let record = |key: &str, value: &str| {
            let body = format!(" {key}={value}\n");
            let length = (1..).find(|length: &usize| length.to_string().len() + body.len() == *length).unwrap();
            format!("{length}{body}").into_bytes()
        };
        let mut pax = Pax { uid: Some(5), ..Pax::default() };
        let mut records = record("LIBARCHIVE.xattr.user.both", "Zmlyc3Q");
        records.extend(record("SCHILY.xattr.user.both", "second"));
        records.extend(record("LIBARCHIVE.xattr.user.%41b", "AP8="));
        records.extend(record("uid", ""));
        parse_pax(&records, &mut pax).unwrap();
        let expected = [(&b"user.Ab"[..], &b"\0\xff"[..]), (b"user.both", b"second")];
        assert_eq!(pax.xattrs, expected.into_iter().map(|(name, value)| (name.into(), value.into())).collect());
        assert_eq!(pax.uid, None, "an empty value takes back an earlier one");
        for bad in ["A", "A*==", "AAAAA"] {
            assert!(parse_pax(&record("LIBARCHIVE.xattr.user.a", bad), &mut Pax::default()).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_before_1970() {
        assert_eq!(time(b"-1.5"), Some((-2, 500_000_000)));
        assert_eq!(time(b"3.0000000019"), Some((3, 1)));
        assert_eq!(time(b"1e5"), None);
        assert_eq!(time(b"-9223372036854775808"), Some((i64::MIN, 0)));
        assert_eq!((time(b"9223372036854775808"), time(b"-9223372036854775808.1")), (None, None));
        // 1969-06-01, as GNU tar writes it.
        assert_eq!(mtime(b"\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xe5\xdf\x00").unwrap(), -18_489_600);
        assert_eq!(mtime(b"\xff\xff\xff\xff\x80\0\0\0\0\0\0\0").unwrap(), i64::MIN);
        assert_eq!(mtime(b"\x80\0\0\0\0\0\0\0\0\0\0\x05").unwrap(), 5);
        for outside in
            [b"\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff", b"\xff\xff\xff\xfe\xff\xff\xff\xff\xff\xff\xff\xff"]
        {
            assert!(mtime(outside).unwrap_err().to_string().contains("out of range"));
        }
    }
}
