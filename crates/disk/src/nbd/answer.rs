//! Answers to requests: plain replies, or chunks, as was agreed.
//!
//! A read is one chunk, holes and all: to look for holes, blocks that wait to be written would have to be written first. A
//! client that wants to leave holes out asks for them.

use super::export::Disk;
use super::handshake::Terms;
use super::wire::{self, Command, DATA_BYTES_MAX, Request, chunk};

/// Most bytes of a cache hint that are loaded.
pub(super) const HINT_BYTES_MAX: u32 = 1 << 20;
/// Most ranges of one answer; a client asks on behind them.
const EXTENTS_MAX: usize = 1024;

/// Performs a request, and returns all bytes of its answer.
pub(super) fn answer(disk: &impl Disk, terms: Terms, request: &Request, data: &[u8]) -> Vec<u8> {
    let is_chunked = terms.structured && matches!(request.command, Command::Read | Command::BlockStatus);
    match perform(disk, terms, request, data) {
        Ok(out) if out.is_empty() => wire::reply_head(request.cookie, 0).to_vec(),
        Ok(out) => out,
        Err(errno) if is_chunked => {
            // An error and a message of no length.
            let payload = [&wire::error_code(errno).to_be_bytes()[..], &[0; 2]].concat();
            wire::chunk(request.cookie, true, chunk::ERROR, &[&payload])
        }
        Err(errno) => wire::reply_head(request.cookie, wire::error_code(errno)).to_vec(),
    }
}

/// Performs a request; returns the whole of an answer that is more than "done".
fn perform(disk: &impl Disk, terms: Terms, request: &Request, data: &[u8]) -> Result<Vec<u8>, i32> {
    let (offset, length) = (request.offset, u64::from(request.length));
    let changes = matches!(request.command, Command::Write | Command::Trim | Command::WriteZeroes);
    if changes && disk.read_only() {
        return Err(libc::EPERM);
    }
    let inside = offset.checked_add(length).is_some_and(|end| end <= disk.size());
    if !inside && request.command != Command::Flush {
        return Err(if changes { libc::ENOSPC } else { libc::EINVAL });
    }
    let mut out = Vec::new();
    match request.command {
        Command::Read if request.length > DATA_BYTES_MAX => return Err(libc::EINVAL),
        Command::Read => {
            if terms.structured {
                let size = size_of_val(&offset) as u32 + request.length;
                out.extend_from_slice(&wire::chunk_head(request.cookie, true, chunk::DATA, size));
                out.extend_from_slice(&offset.to_be_bytes());
            } else {
                out.extend_from_slice(&wire::reply_head(request.cookie, 0));
            }
            // Behind its head, so that megabytes are not copied again.
            let begin = out.len();
            out.resize(begin + length as usize, 0);
            disk.read(offset, &mut out[begin..])?;
        }
        Command::BlockStatus if !terms.allocation || length == 0 => return Err(libc::EINVAL),
        Command::BlockStatus => out = holes(disk, request)?,
        Command::Write => disk.write(offset, data)?,
        Command::Trim => disk.zero(offset, length, true)?,
        Command::WriteZeroes => disk.zero(offset, length, !request.no_hole)?,
        Command::Flush => disk.flush()?,
        Command::Cache => {
            // This is a hint, so a part of bounded size is enough.
            let mut buffer = vec![0; request.length.min(HINT_BYTES_MAX) as usize];
            disk.read(offset, &mut buffer)?;
        }
        Command::Disconnect | Command::Unknown => return Err(libc::EINVAL),
    }
    if changes && request.fua {
        disk.flush()?;
    }
    Ok(out)
}

/// Which ranges are holes, from the request's offset on. They may end before the request does.
fn holes(disk: &impl Disk, request: &Request) -> Result<Vec<u8>, i32> {
    let most = if request.one { 1 } else { EXTENTS_MAX };
    let (mut at, end) = (request.offset, request.offset + u64::from(request.length));
    let mut found: Vec<(u64, bool)> = Vec::new();
    while at < end {
        let (until, is_hole) = disk.extent(at)?;
        let until = until.clamp(at + 1, end);
        let count = found.len();
        match found.last_mut() {
            Some(last) if last.1 == is_hole => last.0 += until - at,
            _ if count == most => break,
            _ => found.push((until - at, is_hole)),
        }
        at = until;
    }
    let mut payload = wire::ALLOCATION_ID.to_be_bytes().to_vec();
    for (length, is_hole) in found {
        payload.extend_from_slice(&(length as u32).to_be_bytes());
        payload.extend_from_slice(&(if is_hole { wire::HOLE | wire::ZERO } else { 0 }).to_be_bytes());
    }
    Ok(wire::chunk(request.cookie, true, chunk::BLOCK_STATUS, &[&payload]))
}
