//! A layer that is put together from ranges of its packed form and contents that the store has.

use super::Build;
use crate::config::Limits;
use crate::error::{At, Result};
use crate::format::chunked::{Piece, Plan};
use crate::format::decompress::unpack;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The parts of a layer: a plan, and a file without a name that takes the ranges of the plan, one after another.
#[derive(Debug)]
pub struct Parts {
    plan: Plan,
    file: File,
}

impl Parts {
    /// No range is here yet. The objects of the plan must stay while the build lives: [`Build::has_all`] has found them.
    ///
    /// # Errors
    /// The system's.
    pub fn new(build: &Build, plan: Plan) -> Result<Self> {
        Ok(Self { plan, file: build.spool()? })
    }

    /// What the parts are put together by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Writes `bytes` to the place `at` in all ranges, one after another.
    ///
    /// # Errors
    /// The system's; [`Error::Full`](crate::Error::Full).
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, at).at("a layer's parts")
    }

    /// The unpacked layer.
    pub(super) fn reader<'a>(&'a self, build: &'a Build, limits: Limits) -> impl Read + 'a {
        Reader { build, file: &self.file, limits, pieces: self.plan.pieces.iter(), at: 0, now: None }
    }
}

/// Reads piece after piece.
struct Reader<'a, 'b> {
    build: &'a Build<'b>,
    file: &'a File,
    limits: Limits,
    pieces: std::slice::Iter<'a, Piece>,
    /// Where the next range is in the file.
    at: u64,
    now: Option<Box<dyn Read + 'a>>,
}

impl Reader<'_, '_> {
    fn open(&mut self, piece: &Piece) -> Result<Box<dyn Read>> {
        match piece {
            Piece::Object(digest) => Ok(Box::new(self.build.open_object(digest)?)),
            Piece::Packed(range) => {
                let from = self.at;
                self.at += range.end - range.start;
                let file = self.file.try_clone().at("a layer's parts")?;
                unpack(Section { file, left: from..self.at }, self.limits)
            }
        }
    }
}

impl Read for Reader<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(now) = &mut self.now {
                let count = now.read(buffer)?;
                if count > 0 || buffer.is_empty() {
                    return Ok(count);
                }
            }
            let Some(piece) = self.pieces.next() else { return Ok(0) };
            self.now = Some(self.open(piece).map_err(|error| io::Error::other(error.to_string()))?);
        }
    }
}

/// A range of a file.
struct Section {
    file: File,
    left: Range<u64>,
}

impl Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = (self.left.end - self.left.start).min(buffer.len() as u64) as usize;
        let count = self.file.read_at(&mut buffer[..most], self.left.start)?;
        self.left.start += count as u64;
        Ok(count)
    }
}
