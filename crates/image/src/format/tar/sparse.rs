//! Sparse files: the four ways in which GNU tar says which parts of a file an archive has. All else is zeros.
//!
//! The map comes in the header and in blocks after it (the oldest form), in PAX records (0.0 and 0.1), or before the data
//! (1.0). A map that other readers would take for another file is refused: parts that overlap, go back, or pass the end, and
//! parts that are no whole blocks. GNU tar begins each part with a new block, other readers do not.

use super::entry::BLOCK;
use super::fields::{number, text};
use crate::error::{Result, input};
use crate::tree::show;

/// Most parts of a file: their map takes 16 MiB of memory.
pub(super) const PARTS_MAX: usize = 1 << 20;

/// Bytes of the place and the length of a part in a header.
const PART_BYTES: usize = 24;

/// A part of a file that the archive has: where it begins, and its length in bytes.
pub(crate) type Part = (u64, u64);

/// What PAX records say about a sparse file.
#[derive(Clone, Default)]
pub(super) struct SparseRecords {
    /// The version of the form; without it, 0.0 or 0.1.
    major: Option<u64>,
    minor: Option<u64>,
    /// The file's path: that of the header is one for readers that know no sparse files.
    pub(super) name: Option<Vec<u8>>,
    /// The whole file's size.
    size: Option<u64>,
    parts: Vec<Part>,
    /// The place of a part of which the length is still to come.
    place: Option<u64>,
    count: Option<u64>,
}

/// Where the map of an entry is.
pub(super) enum Map {
    /// Here: the size of the whole file, and its parts.
    Known(u64, Vec<Part>),
    /// Before the data, for a file of this size.
    BeforeData(u64),
}

impl SparseRecords {
    /// Returns true if a key may come more than once in a header.
    pub(super) fn is_repeated(key: &[u8]) -> bool {
        matches!(key, b"GNU.sparse.offset" | b"GNU.sparse.numbytes")
    }

    /// Takes the record `GNU.sparse.KEY`.
    pub(super) fn record(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let bad =
            || input!("tar: GNU.sparse.{} {:?} is not understood", show(key), show(&value[..value.len().min(100)]));
        let whole = || decimal(value).ok_or_else(bad);
        match key {
            b"major" => self.major = Some(whole()?),
            b"minor" => self.minor = Some(whole()?),
            b"name" if !value.is_empty() && value.len() <= 4096 && !value.contains(&0) => {
                self.name = Some(value.into())
            }
            b"size" | b"realsize" => self.size = Some(whole()?),
            b"numblocks" => self.count = Some(whole()?),
            b"offset" if self.place.is_none() => self.place = Some(whole()?),
            b"numbytes" => {
                let place = self.place.take().ok_or_else(bad)?;
                self.push((place, whole()?))?;
            }
            b"map" => {
                let mut numbers = value.split(|&byte| byte == b',');
                while let Some(place) = numbers.next().filter(|place| !place.is_empty()) {
                    let length = numbers.next().and_then(decimal).ok_or_else(bad)?;
                    self.push((decimal(place).ok_or_else(bad)?, length))?;
                }
            }
            _ => return Err(bad()),
        }
        Ok(())
    }

    fn push(&mut self, part: Part) -> Result<()> {
        if self.parts.len() == PARTS_MAX {
            return Err(too_many());
        }
        self.parts.push(part);
        Ok(())
    }

    /// Returns true if there is no record.
    pub(super) fn is_empty(&self) -> bool {
        let Self { major, minor, name, size, parts, place, count } = self;
        let numbers = [major, minor, size, place, count];
        numbers.iter().all(|number| number.is_none()) && name.is_none() && parts.is_empty()
    }

    /// Where the map of the file at `path` is; `None` for a file that is not sparse.
    pub(super) fn map(self, path: &[u8]) -> Result<Option<Map>> {
        if self.is_empty() {
            return Ok(None);
        }
        let incomplete = || input!("tar: {}: a sparse file without a size or map", show(path));
        let size = self.size.ok_or_else(incomplete)?;
        match (self.major.unwrap_or(0), self.minor.unwrap_or(0)) {
            (1, 0) if self.parts.is_empty() && self.count.is_none() => Ok(Some(Map::BeforeData(size))),
            (0, 0 | 1) => {
                if self.place.is_some() || self.count.is_none_or(|count| count != self.parts.len() as u64) {
                    return Err(incomplete());
                }
                Ok(Some(Map::Known(size, self.parts)))
            }
            (major, minor) => Err(input!("tar: {}: a sparse file of version {major}.{minor}", show(path))),
        }
    }
}

/// The parts in a header of the oldest form, and the size of the whole file. Returns true if a block with more follows.
pub(super) fn header_parts(header: &[u8; BLOCK], parts: &mut Vec<Part>) -> Result<(u64, bool)> {
    push_parts(&header[386..482], parts)?;
    Ok((number(&header[483..495], "size of a sparse file")?, header[482] != 0))
}

/// The parts in a block after such a header. Returns true if another one follows.
pub(super) fn block_parts(block: &[u8; BLOCK], parts: &mut Vec<Part>) -> Result<bool> {
    push_parts(&block[..504], parts)?;
    Ok(block[504] != 0)
}

fn push_parts(fields: &[u8], parts: &mut Vec<Part>) -> Result<()> {
    for field in fields.chunks_exact(PART_BYTES) {
        let (place, length) = field.split_at(PART_BYTES / 2);
        // The list ends at the first field without a length.
        if text(length).is_empty() {
            break;
        }
        if parts.len() == PARTS_MAX {
            return Err(too_many());
        }
        parts.push((number(place, "place in a sparse file")?, number(length, "length in a sparse file")?));
    }
    Ok(())
}

/// Reads a map that comes before the data: decimal numbers, each on a line, first the number of parts. `next` gives the next
/// block of it.
pub(super) fn map_before_data(mut next: impl FnMut() -> Result<[u8; BLOCK]>) -> Result<Vec<Part>> {
    let (mut block, mut at) = (next()?, 0);
    let mut line = || -> Result<u64> {
        let mut digits = Vec::new();
        loop {
            if at == BLOCK {
                (block, at) = (next()?, 0);
            }
            at += 1;
            match block[at - 1] {
                b'\n' => break,
                digit => digits.push(digit),
            }
            if digits.len() > 20 {
                break;
            }
        }
        decimal(&digits).ok_or_else(|| input!("tar: the map of a sparse file has {:?} for a number", show(&digits)))
    };
    let count = line()?;
    if count > PARTS_MAX as u64 {
        return Err(too_many());
    }
    (0..count).map(|_| Ok((line()?, line()?))).collect()
}

fn too_many() -> crate::error::Error {
    input!("tar: a sparse file of more than {PARTS_MAX} parts; pack it without --sparse")
}

/// Checks that the parts of the file at `path` lie behind each other in `size` bytes, and are the `stored` bytes of the
/// archive. Those without bytes fall away.
pub(super) fn check_parts(path: &[u8], parts: &mut Vec<Part>, size: u64, stored: u64) -> Result<()> {
    let (mut end, mut sum) = (0, 0u64);
    for &(place, length) in &*parts {
        let next = place.checked_add(length).filter(|next| place >= end && *next <= size);
        end = next.ok_or_else(|| {
            input!(
                "tar: {}: the part of {length} bytes at {place} overlaps another, or passes the end of {size}",
                show(path)
            )
        })?;
        sum += length;
    }
    if sum != stored {
        return Err(input!("tar: {}: {stored} bytes, and a map of {sum}", show(path)));
    }
    parts.retain(|(_, length)| *length > 0);
    let block = BLOCK as u64;
    if let Some((place, length)) = parts.iter().rev().skip(1).find(|(_, length)| length % block != 0) {
        return Err(input!(
            "tar: {}: the part of {length} bytes at {place} ends in a block, which readers of sparse files read \
             differently; pack it again",
            show(path)
        ));
    }
    Ok(())
}

/// The map that goes before the data, in whole blocks.
pub(super) fn write_map(parts: &[Part]) -> Vec<u8> {
    let mut map = format!("{}\n", parts.len()).into_bytes();
    for (place, length) in parts {
        map.extend(format!("{place}\n{length}\n").bytes());
    }
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

fn decimal(digits: &[u8]) -> Option<u64> {
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| all_digits)?.parse().ok()
}
