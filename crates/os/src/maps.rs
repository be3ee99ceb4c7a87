//! /proc/PID/maps, parsed without allocating.

use crate::Range;

/// One mapping of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map<'a> {
    /// Its addresses.
    pub range: Range,
    /// `PROT_*` bits.
    pub prot: i32,
    /// True if writes are visible to others.
    pub shared: bool,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Inode of the file, 0 for anonymous memory.
    pub inode: u64,
    /// File name, or the kernel's word such as `[heap]`; empty for plain anonymous memory.
    pub name: &'a [u8],
}

impl Map<'_> {
    /// True for private anonymous memory that can be read and written, and nothing else.
    pub fn is_plain_anonymous(&self) -> bool {
        !self.shared
            && self.inode == 0
            && self.prot == libc::PROT_READ | libc::PROT_WRITE
            && (self.name.is_empty() || self.name == b"[heap]" || self.name.starts_with(b"[anon:"))
    }
}

/// Parses one line of /proc/PID/maps (without its newline); `None` if it is none.
pub fn parse_line(line: &[u8]) -> Option<Map<'_>> {
    let (start, rest) = hex(line)?;
    let (end, rest) = hex(rest.strip_prefix(b"-")?)?;
    let rest = rest.strip_prefix(b" ")?;
    let (flags, rest) = rest.split_at_checked(4)?;
    let (offset, rest) = hex(rest.strip_prefix(b" ")?)?;
    let rest = rest.strip_prefix(b" ")?;
    let device_end = rest.iter().position(|&b| b == b' ')?;
    let (inode, rest) = decimal(&rest[device_end + 1..])?;
    let name_at = rest.iter().position(|&b| b != b' ').unwrap_or(rest.len());
    let mut prot = 0;
    if flags[0] == b'r' {
        prot |= libc::PROT_READ;
    }
    if flags[1] == b'w' {
        prot |= libc::PROT_WRITE;
    }
    if flags[2] == b'x' {
        prot |= libc::PROT_EXEC;
    }
    if start > end {
        return None;
    }
    Some(Map { range: Range { start, end }, prot, shared: flags[3] == b's', offset, inode, name: &rest[name_at..] })
}

fn hex(text: &[u8]) -> Option<(u64, &[u8])> {
    number(text, 16)
}

fn decimal(text: &[u8]) -> Option<(u64, &[u8])> {
    number(text, 10)
}

fn number(text: &[u8], base: u32) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    let mut used = 0;
    while let Some(digit) = text.get(used).and_then(|&b| (b as char).to_digit(base)) {
        value = value.checked_mul(u64::from(base))?.checked_add(u64::from(digit))?;
        used += 1;
    }
    if used == 0 { None } else { Some((value, &text[used..])) }
}

/// Calls `f` with each line that `read` delivers, using `buffer`, which must hold the longest line; longer ones are skipped.
///
/// # Errors
/// The first error of `read`.
pub fn for_each_line<E>(
    buffer: &mut [u8],
    mut read: impl FnMut(&mut [u8]) -> Result<usize, E>,
    mut f: impl FnMut(&[u8]),
) -> Result<(), E> {
    let mut held = 0;
    let mut skipping = false;
    loop {
        let got = read(&mut buffer[held..])?;
        if got == 0 {
            if held > 0 && !skipping {
                f(&buffer[..held]);
            }
            return Ok(());
        }
        let end = held + got;
        let mut at = 0;
        while let Some(newline) = buffer[at..end].iter().position(|&b| b == b'\n') {
            if skipping {
                skipping = false;
            } else {
                f(&buffer[at..at + newline]);
            }
            at += newline + 1;
        }
        buffer.copy_within(at..end, 0);
        held = end - at;
        if held == buffer.len() {
            skipping = true;
            held = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_parsed_whole() {
        let map = parse_line(b"7f0000000000-7f0000002000 rw-p 00001000 fe:01 42                  /a b/c").unwrap();
        assert_eq!(map.range, Range { start: 0x7f00_0000_0000, end: 0x7f00_0000_2000 });
        assert_eq!((map.prot, map.shared, map.offset, map.inode), (3, false, 0x1000, 42));
        assert_eq!(map.name, b"/a b/c");
        assert!(!map.is_plain_anonymous());
        assert!(parse_line(b"00400000-00401000 rw-p 00000000 00:00 0 ").unwrap().is_plain_anonymous());
        assert!(parse_line(b"nonsense").is_none());
        assert!(parse_line(b"2-1 rw-p 0 00:00 0").is_none());
        assert!(parse_line(b"fffffffffffffffff-1 rw-p 0 00:00 0").is_none());
    }

    #[test]
    fn lines_cross_reads_and_long_ones_are_skipped() {
        let text = b"one\ntwo\na very long line that does not fit\nthree";
        for piece in 1..text.len() {
            let mut at = 0;
            let mut lines = Vec::new();
            for_each_line::<()>(
                &mut [0; 8],
                |out| {
                    let n = piece.min(out.len()).min(text.len() - at);
                    out[..n].copy_from_slice(&text[at..at + n]);
                    at += n;
                    Ok(n)
                },
                |line| lines.push(line.to_vec()),
            )
            .unwrap();
            assert_eq!(lines, [b"one".to_vec(), b"two".to_vec(), b"three".to_vec()], "pieces of {piece}");
        }
    }
}
