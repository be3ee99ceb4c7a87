//! The handshake: a client lists and describes exports, says which replies it understands, and chooses an export.

use super::export::Disk;
use super::wire::{self, DATA_BYTES_MAX, OPTION_BYTES_MAX, export_flag, option, reply};
use crate::geometry::BLOCK_BYTES;
use std::io::{self, Read, Write};

/// The one kind of metadata that is served: which ranges are holes.
const ALLOCATION: &[u8] = b"base:allocation";

/// What a client and this server agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Terms {
    /// Reads are answered in chunks.
    pub structured: bool,
    /// The client may ask which ranges are holes.
    pub allocation: bool,
}

fn description(disk: &impl Disk, structured: bool) -> (u64, u16) {
    let writing = if disk.read_only() {
        export_flag::READ_ONLY
    } else {
        export_flag::FUA | export_flag::TRIM | export_flag::WRITE_ZEROES
    };
    let chunks = if structured { export_flag::DONT_FRAGMENT } else { 0 };
    let always = export_flag::HAS_FLAGS | export_flag::FLUSH | export_flag::MULTI_CONN | export_flag::CACHE;
    (disk.size(), always | writing | chunks)
}

/// Where the handshake is.
struct Handshake<'a, W> {
    writer: &'a mut W,
    structured: bool,
    /// The export for which the client asked for [`ALLOCATION`].
    allocation: Option<Vec<u8>>,
}

impl<W: Write> Handshake<'_, W> {
    fn reply(&mut self, asked: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        self.writer.write_all(&wire::option_reply(asked, kind, data))
    }

    fn terms(&self, export: &[u8]) -> Terms {
        let allocation = self.structured && self.allocation.as_deref() == Some(export);
        Terms { structured: self.structured, allocation }
    }

    /// Describes an export to a client that chose it by its name alone.
    fn describe_briefly(&mut self, disk: &impl Disk, no_zeroes: bool) -> io::Result<()> {
        let (size, flags) = description(disk, self.structured);
        let mut out = size.to_be_bytes().to_vec();
        out.extend_from_slice(&flags.to_be_bytes());
        out.resize(out.len() + if no_zeroes { 0 } else { 124 }, 0);
        self.writer.write_all(&out)
    }

    fn describe(&mut self, asked: u32, disk: &impl Disk) -> io::Result<()> {
        let (size, flags) = description(disk, self.structured);
        let mut export = 0u16.to_be_bytes().to_vec();
        export.extend_from_slice(&size.to_be_bytes());
        export.extend_from_slice(&flags.to_be_bytes());
        self.reply(asked, reply::INFO, &export)?;
        let mut sizes = 3u16.to_be_bytes().to_vec();
        for size in [1, BLOCK_BYTES as u32, DATA_BYTES_MAX] {
            sizes.extend_from_slice(&size.to_be_bytes());
        }
        self.reply(asked, reply::INFO, &sizes)?;
        self.reply(asked, reply::ACK, b"")
    }

    fn list(&mut self, names: Vec<Vec<u8>>) -> io::Result<()> {
        for name in names {
            let mut data = (name.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(&name);
            self.reply(option::LIST, reply::SERVER, &data)?;
        }
        self.reply(option::LIST, reply::ACK, b"")
    }

    /// Lists or chooses kinds of metadata of an export.
    fn metadata(&mut self, asked: u32, data: &[u8], is_export: impl Fn(&[u8]) -> bool) -> io::Result<()> {
        let sets = asked == option::SET_META_CONTEXT;
        if sets {
            self.allocation = None;
        }
        let Some((export, queries)) = wire::metadata_queries(data).filter(|_| self.structured || !sets) else {
            return self.reply(asked, reply::INVALID, b"");
        };
        if !is_export(export) {
            return self.reply(asked, reply::UNKNOWN, b"no such image, or it cannot be opened");
        }
        // To list, no query means all; a name space alone means all of it.
        let lists_all = !sets && (queries.is_empty() || queries.contains(&&b"base:"[..]));
        if lists_all || queries.contains(&ALLOCATION) {
            let number = if sets { wire::ALLOCATION_ID } else { 0 };
            let found = [&number.to_be_bytes()[..], ALLOCATION].concat();
            self.reply(asked, reply::META_CONTEXT, &found)?;
            self.allocation = sets.then(|| export.to_vec());
        }
        self.reply(asked, reply::ACK, b"")
    }
}

/// The handshake, up to the client's choice of an export. `None` if the client ended it.
pub(super) fn negotiate<D: Disk>(
    reader: &mut impl Read,
    writer: &mut impl Write,
    list: impl Fn() -> Vec<Vec<u8>>,
    open: impl Fn(&[u8]) -> Option<D>,
) -> io::Result<Option<(D, Terms)>> {
    let mut greeting = wire::MAGIC.to_be_bytes().to_vec();
    greeting.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    greeting.extend_from_slice(&(wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
    writer.write_all(&greeting)?;
    let client_flags = wire::number(&read_array::<4>(reader)?);
    if client_flags & !u64::from(wire::FIXED_NEWSTYLE | wire::NO_ZEROES) != 0 {
        return Err(protocol_error("unknown client flags"));
    }
    let no_zeroes = client_flags & u64::from(wire::NO_ZEROES) != 0;
    let mut handshake = Handshake { writer, structured: false, allocation: None };
    loop {
        let head: [u8; 16] = read_array(reader)?;
        if wire::number(&head[..8]) != wire::OPTION_MAGIC {
            return Err(protocol_error("an option was expected"));
        }
        let (asked, length) = (wire::number(&head[8..12]) as u32, wire::number(&head[12..]) as u32);
        if length > OPTION_BYTES_MAX {
            // Skip the data, so that the client can read the reason.
            io::copy(&mut reader.take(length.into()), &mut io::sink())?;
            handshake.reply(asked, reply::TOO_BIG, b"")?;
            continue;
        }
        let mut data = vec![0; length as usize];
        reader.read_exact(&mut data)?;
        match asked {
            option::EXPORT_NAME => {
                let disk = open(&data).ok_or_else(|| protocol_error("no such export"))?;
                handshake.describe_briefly(&disk, no_zeroes)?;
                return Ok(Some((disk, handshake.terms(&data))));
            }
            option::ABORT => {
                handshake.reply(asked, reply::ACK, b"")?;
                return Ok(None);
            }
            option::LIST if length == 0 => handshake.list(list())?,
            option::STRUCTURED_REPLY if length == 0 => {
                handshake.structured = true;
                handshake.reply(asked, reply::ACK, b"")?;
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                handshake.metadata(asked, &data, |name| open(name).is_some())?;
            }
            option::INFO | option::GO => {
                let Some(name) = wire::chosen_name(&data) else {
                    handshake.reply(asked, reply::INVALID, b"")?;
                    continue;
                };
                let Some(disk) = open(name) else {
                    handshake.reply(asked, reply::UNKNOWN, b"no such image, or it cannot be opened")?;
                    continue;
                };
                handshake.describe(asked, &disk)?;
                if asked == option::GO {
                    return Ok(Some((disk, handshake.terms(name))));
                }
            }
            option::LIST | option::STRUCTURED_REPLY => handshake.reply(asked, reply::INVALID, b"")?,
            _ => handshake.reply(asked, reply::UNSUPPORTED, b"")?,
        }
    }
}

pub(super) fn read_array<const COUNT: usize>(reader: &mut impl Read) -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn protocol_error(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}
