//! A layer that is put together from ranges of its packed form and contents that the store has.

use super::Build;
use crate::config::Limits;
use crate::error::{At, Result};
use crate::format::chunked::{Part, Plan};
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

    /// Where the byte `at` of the packed layer is in the file. It is in a range of the plan.
    fn place(&self, at: u64) -> u64 {
        let before = self.plan.ranges.iter().take_while(|range| range.end <= at).map(|range| range.end - range.start);
        let range = self.plan.ranges.iter().find(|range| range.contains(&at));
        before.sum::<u64>() + range.map_or(0, |range| at - range.start)
    }

    /// The unpacked layer.
    pub(super) fn reader<'a>(&'a self, build: &'a Build, limits: Limits) -> impl Read + 'a {
        Reader { build, parts: self, limits, rest: self.plan.parts.iter(), now: None }
    }
}

/// Reads part after part.
struct Reader<'a, 'b> {
    build: &'a Build<'b>,
    parts: &'a Parts,
    limits: Limits,
    rest: std::slice::Iter<'a, Part>,
    now: Option<Box<dyn Read + 'a>>,
}

impl<'a> Reader<'a, '_> {
    fn open(&self, part: &'a Part) -> Result<Box<dyn Read + 'a>> {
        match part {
            Part::Bytes(bytes) => Ok(Box::new(&bytes[..])),
            Part::Object(digest) => Ok(Box::new(self.build.open_object(digest)?)),
            Part::Packed(range) => {
                let place = self.parts.place(range.start);
                let left = place..place + (range.end - range.start);
                unpack(Section { file: &self.parts.file, left }, self.limits)
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
            let Some(part) = self.rest.next() else { return Ok(0) };
            self.now = Some(self.open(part).map_err(|error| io::Error::other(error.to_string()))?);
        }
    }
}

/// A range of a file.
struct Section<'a> {
    file: &'a File,
    left: Range<u64>,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = (self.left.end - self.left.start).min(buffer.len() as u64) as usize;
        let count = self.file.read_at(&mut buffer[..most], self.left.start)?;
        self.left.start += count as u64;
        Ok(count)
    }
}
