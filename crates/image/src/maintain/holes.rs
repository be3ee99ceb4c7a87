//! Which parts of an object hold more than zeros: a sparse export has only these.

use crate::format::tar::Part;
use crate::store::HOLE_BYTES;
use pagefold_os::fill::fill;
use pagefold_os::read_once::read_at;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;

/// Smaller objects have no holes: a build writes them at once.
const MIN_BYTES: u64 = 1 << 20;

/// The parts of an object that are not zeros, in whole pieces of [`HOLE_BYTES`]; `None` if the object takes its full size on
/// disk. They depend on its bytes alone: the file system's holes only save reading them.
pub(super) fn parts(file: &File) -> io::Result<Option<Vec<Part>>> {
    let meta = file.metadata()?;
    let size = meta.len();
    if size < MIN_BYTES || meta.blocks() * 512 >= size {
        return Ok(None);
    }
    let (mut parts, mut at, mut piece): (Vec<Part>, u64, _) = (Vec::new(), 0, vec![0; HOLE_BYTES]);
    while at < size {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            // A file system that does not tell.
            Err(Errno::INVAL) => at,
            found => found? / HOLE_BYTES as u64 * HOLE_BYTES as u64,
        };
        let part = &mut piece[..(size - at).min(HOLE_BYTES as u64) as usize];
        if fill(part, |rest, filled| read_at(file, rest, at + filled as u64))? < part.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if part.iter().any(|&byte| byte != 0) {
            match parts.last_mut().filter(|(place, length)| place + length == at) {
                Some((_, length)) => *length += part.len() as u64,
                None => parts.push((at, part.len() as u64)),
            }
        }
        at += part.len() as u64;
    }
    let whole = parts == [(0, size)];
    // The end is a part of no bytes: GNU tar gives the file its size by it.
    if parts.last().is_none_or(|(place, length)| place + length < size) {
        parts.push((size, 0));
    }
    Ok((!whole).then_some(parts))
}

/// Passes on only the parts of what is written.
pub(super) struct PartsOnly<'a, W> {
    pub(super) out: &'a mut W,
    /// The parts that are not written to their end, the next one last.
    pub(super) parts: Vec<Part>,
    pub(super) at: u64,
}

impl<W: Write> Write for PartsOnly<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        while let Some(&(place, length)) = self.parts.last() {
            if self.at >= place + length {
                self.parts.pop();
                continue;
            }
            if self.at < place {
                let passed = (place - self.at).min(bytes.len() as u64);
                self.at += passed;
                return Ok(passed as usize);
            }
            let count = (place + length - self.at).min(bytes.len() as u64) as usize;
            let written = self.out.write(&bytes[..count])?;
            self.at += written as u64;
            return Ok(written);
        }
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
