//! /proc/PID/maps, parsed without allocating.

use crate::fd::Fd;
use crate::mem::{READ_WRITE, READ_WRITE_EXECUTE};
use crate::raw::{self, Errno};
use crate::{Range, syscall};

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
    /// True for private anonymous memory that can be read and written, [executable](Self::is_executable) or not.
    pub fn is_plain_anonymous(&self) -> bool {
        !self.shared
            && self.inode == 0
            && self.prot & READ_WRITE == READ_WRITE
            && (self.name.is_empty() || self.name == b"[heap]" || self.name.starts_with(b"[anon:"))
    }

    /// True for a private mapping of a file that can be read and written, and not executed: a page that is written there
    /// becomes the process's own. Devices and huge pages are left out, as far as their names tell.
    pub fn is_private_file(&self) -> bool {
        let is_device = self.name.starts_with(b"/dev/") && !self.name.starts_with(b"/dev/shm/");
        let is_special = is_device || self.name.starts_with(b"/anon_hugepage");
        !self.shared && self.inode != 0 && self.prot == READ_WRITE && !is_special
    }

    /// Its part from `start` on, which lies before its end.
    #[must_use]
    pub(crate) fn from(mut self, start: u64) -> Self {
        let left_out = start.saturating_sub(self.range.start);
        self.range.start += left_out;
        if self.inode != 0 {
            self.offset = self.offset.saturating_add(left_out);
        }
        self
    }

    /// True if its bytes can be executed.
    pub fn is_executable(&self) -> bool {
        self.prot & libc::PROT_EXEC != 0
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

/// `PROCMAP_QUERY`, the request of [`file_from`].
pub const REQUEST: u32 = 0xc068_6611;
const COVERING_OR_NEXT: u64 = 0x10;
const FILE_BACKED: u64 = 0x20;
const SHARED: u64 = 8;

/// What the request takes and gives.
#[repr(C)]
#[derive(Default)]
struct Query {
    bytes: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    /// `PROT_*` bits, and [`SHARED`].
    rights: u64,
    page_bytes: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_len: u32,
    build_id_len: u32,
    name: u64,
    build_id: u64,
}

const _: () = assert!(size_of::<Query>() == 104);

/// The first mapping of a file that ends above `addr`, by an open /proc/PID/maps: in the same time however many there are.
/// The file's name goes into `name`, and is left out if it is longer.
///
/// # Errors
/// `ENOTTY` before Linux 6.11.
pub fn file_from<'n>(maps: &Fd, addr: u64, name: &'n mut [u8]) -> raw::Result<Option<Map<'n>>> {
    let mut query = Query {
        bytes: size_of::<Query>() as u64,
        flags: COVERING_OR_NEXT | FILE_BACKED,
        addr,
        name_len: name.len() as u32,
        name: name.as_mut_ptr() as u64,
        ..Query::default()
    };
    // SAFETY: `name` has the length given.
    let mut asked = unsafe { ask(maps, &mut query) };
    if asked == Err(Errno(libc::ENAMETOOLONG)) {
        (query.name_len, query.name) = (0, 0);
        // SAFETY: there is no room for a name.
        asked = unsafe { ask(maps, &mut query) };
    }
    if !asked? {
        return Ok(None);
    }
    // Its length counts the zero behind it.
    let len = (query.name_len as usize).saturating_sub(1).min(name.len());
    Ok(Some(Map {
        range: Range { start: query.start, end: query.end },
        prot: query.rights as i32 & READ_WRITE_EXECUTE,
        shared: query.rights & SHARED != 0,
        offset: query.offset,
        inode: query.inode,
        name: &name[..len],
    }))
}

/// What may be done at `addr` (`PROT_*` bits), by an open /proc/PID/maps; `None` where nothing is mapped.
///
/// # Errors
/// `ENOTTY` before Linux 6.11.
pub fn rights_at(maps: &Fd, addr: u64) -> raw::Result<Option<i32>> {
    let mut query = Query { bytes: size_of::<Query>() as u64, addr, ..Query::default() };
    // SAFETY: there is no room for a name.
    let is_there = unsafe { ask(maps, &mut query) }?;
    Ok(is_there.then_some(query.rights as i32 & READ_WRITE_EXECUTE))
}

/// The first mapping that ends above `addr`, by an open /proc/PID/maps.
///
/// # Errors
/// `ENOTTY` before Linux 6.11.
pub fn mapping_from(maps: &Fd, addr: u64) -> raw::Result<Option<Range>> {
    let mut query = Query { bytes: size_of::<Query>() as u64, flags: COVERING_OR_NEXT, addr, ..Query::default() };
    // SAFETY: there is no room for a name.
    let is_there = unsafe { ask(maps, &mut query) }?;
    Ok(is_there.then_some(Range { start: query.start, end: query.end }))
}

/// Asks an open /proc/PID/maps for a mapping; false if there is none.
///
/// # Safety
/// The kernel writes a name of up to `query.name_len` bytes to `query.name`.
unsafe fn ask(maps: &Fd, query: &mut Query) -> raw::Result<bool> {
    // SAFETY: the request carries the size of the structure; the caller vouches for the name's place.
    match unsafe { syscall!(libc::SYS_ioctl, maps.raw(), REQUEST, core::ptr::from_mut(query)) } {
        Ok(_) => Ok(true),
        Err(Errno(libc::ENOENT)) => Ok(false),
        Err(errno) => Err(errno),
    }
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

/// What a file of mappings tells.
#[derive(Debug)]
pub enum Line<'a> {
    /// The next mapping.
    Mapping(Map<'a>),
    /// What smaps says of the mapping before.
    Detail(&'a [u8]),
}

/// Calls `f` with each line of /proc/PID/maps or /proc/PID/smaps that `read` delivers, using `buffer`, which must hold the
/// longest line; longer ones are skipped.
///
/// No mapping overlaps one before it. The kernel tells a mapping again, with all of its range, if it grew while the file
/// was read (seen on Linux 6.18, in smaps): here it begins where the one before ends.
///
/// # Errors
/// The first error of `read`.
pub fn for_each<E>(
    buffer: &mut [u8],
    read: impl FnMut(&mut [u8]) -> Result<usize, E>,
    mut f: impl FnMut(Line<'_>),
) -> Result<(), E> {
    let (mut told, mut is_new) = (0, false);
    for_each_line(buffer, read, |line| match parse_line(line) {
        Some(map) => {
            is_new = map.range.end > told;
            if is_new {
                let map = map.from(told);
                told = map.range.end;
                f(Line::Mapping(map));
            }
        }
        None if is_new => f(Line::Detail(line)),
        None => {}
    })
}

/// Calls `f` with each line that `read` delivers.
fn for_each_line<E>(
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
        let with = |rights: &str| format!("00400000-00401000 {rights} 00000000 00:00 0 ");
        for rights in ["rw-p", "rwxp"] {
            let line = with(rights);
            let map = parse_line(line.as_bytes()).unwrap();
            assert!(map.is_plain_anonymous() && map.is_executable() == rights.contains('x'), "{rights}");
        }
        for rights in ["r-xp", "r--p", "-wxp", "---p", "rw-s", "rwxs"] {
            assert!(!parse_line(with(rights).as_bytes()).unwrap().is_plain_anonymous(), "{rights}");
        }
        assert!(parse_line(b"nonsense").is_none());
        assert!(parse_line(b"2-1 rw-p 0 00:00 0").is_none());
        assert!(parse_line(b"fffffffffffffffff-1 rw-p 0 00:00 0").is_none());
    }

    #[cfg(feature = "std")]
    #[test]
    fn asking_by_address_tells_what_the_file_says() {
        let maps = Fd::open(c"/proc/self/maps", libc::O_RDONLY, 0).unwrap();
        // The program's own file: what other tests map meanwhile comes and goes.
        let program = std::fs::read_link("/proc/self/exe").unwrap().into_os_string().into_encoded_bytes();
        let text = std::fs::read("/proc/self/maps").unwrap();
        let said: Vec<_> =
            text.split(|&b| b == b'\n').filter_map(parse_line).filter(|map| map.name == program).collect();
        let mut asked = Vec::new();
        let (mut at, mut name) = (0, vec![0; 4096]);
        loop {
            match file_from(&maps, at, &mut name) {
                Ok(Some(map)) => {
                    at = map.range.end;
                    let same = map.name == program;
                    asked.extend(same.then_some((map.range, map.prot, map.shared, map.offset, map.inode)));
                }
                Ok(None) => break,
                Err(Errno(libc::ENOTTY)) => return eprintln!("SKIPPED: PROCMAP_QUERY is of Linux 6.11"),
                Err(errno) => panic!("{errno}"),
            }
        }
        assert!(said.len() > 2);
        assert!(said.iter().all(|map| rights_at(&maps, map.range.end - 1) == Ok(Some(map.prot))));
        assert_eq!(rights_at(&maps, 0), Ok(None));
        let said: Vec<_> = said.iter().map(|map| (map.range, map.prot, map.shared, map.offset, map.inode)).collect();
        assert_eq!(asked, said);
        let first = file_from(&maps, said[0].0.start, &mut name[..3]).unwrap().unwrap();
        assert_eq!((first.range, first.name), (said[0].0, &b""[..]), "too long a name is left out");
    }

    #[test]
    fn a_mapping_that_is_told_again_begins_where_the_one_before_ended() {
        let text = b"1000-2000 rw-p 0 00:00 0 \nRss: 4 kB\n1000-4000 rw-p 0 00:00 0 \nRss: 12 kB\n\
                     2000-4000 rw-p 0 00:00 0 \nRss: 8 kB\n3000-6000 r--p 1000 fe:01 7 /a\nRss: 0 kB\n";
        let (mut mappings, mut details, mut rest) = (Vec::new(), Vec::new(), &text[..]);
        let read = |out: &mut [u8]| std::io::Read::read(&mut rest, out);
        for_each(&mut [0; 64], read, |line| match line {
            Line::Mapping(map) => mappings.push((map.range.start, map.range.end, map.offset)),
            Line::Detail(line) => details.push(line.to_vec()),
        })
        .unwrap();
        assert_eq!(mappings, [(0x1000, 0x2000, 0), (0x2000, 0x4000, 0), (0x4000, 0x6000, 0x2000)]);
        assert_eq!(details, [&b"Rss: 4 kB"[..], b"Rss: 12 kB", b"Rss: 0 kB"]);
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
