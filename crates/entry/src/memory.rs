//! Another program's memory: reading and writing it through /proc/PID/mem, a free range, and room for a few instructions.

use pagefold_os::procfs::OwnedMap;
use pagefold_os::{PAGE_SIZE, Range};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Between the range that an entry takes and its neighbours, so that the kernel joins it with none of them.
const GAP: u64 = 64 << 10;
/// The highest address that is taken: above it lie stack and kernel pages.
const HIGHEST: u64 = 0x7000_0000_0000;

/// Instructions begin at a multiple of this.
const ALIGN: u64 = 16;

/// The memory of a process.
#[derive(Debug)]
pub struct Memory {
    file: File,
}

impl Memory {
    /// Opens the memory of process `pid`.
    ///
    /// # Errors
    /// As open(2): no such process, or no right to trace it.
    pub fn open(pid: i32) -> io::Result<Memory> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        Ok(Memory { file })
    }

    /// Fills `bytes` from address `at`.
    ///
    /// # Errors
    /// If part of it is not mapped.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }

    /// Writes `bytes` at address `at`, where the program may write, too.
    ///
    /// # Errors
    /// If part of it is not mapped, or may not be written.
    pub fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// The word at `at`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn word(&self, at: u64) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes)?;
        Ok(u32::from_ne_bytes(bytes))
    }
}

/// A free range of `len` bytes among `maps`, the highest that has room around it.
pub fn free_range(maps: &[OwnedMap], len: u64) -> Option<Range> {
    let mut end = HIGHEST;
    for map in maps.iter().rev().filter(|map| map.range.start < HIGHEST) {
        let start = map.range.end + GAP;
        if end >= start + len + GAP {
            let start = (end - GAP - len) & !(PAGE_SIZE as u64 - 1);
            return Some(Range { start, end: start + len });
        }
        end = end.min(map.range.start);
    }
    None
}

/// Mappings with code that the program executes: the kernel's own page, and those of files.
fn code_mappings(maps: &[OwnedMap]) -> impl Iterator<Item = &OwnedMap> {
    let kernels = maps.iter().filter(|map| map.name == "[vdso]");
    let is_code = |map: &&OwnedMap| map.inode != 0 && !map.shared && map.prot == libc::PROT_READ | libc::PROT_EXEC;
    kernels.chain(maps.iter().filter(is_code))
}

/// What an entry that was not finished left in the code of the program: from `mark` to the end of the mapping.
pub fn unfinished(memory: &Memory, maps: &[OwnedMap], mark: &[u8]) -> Option<Range> {
    code_mappings(maps).find_map(|map| {
        let start = map.range.start.max(map.range.end - PAGE_SIZE as u64);
        let mut bytes = vec![0; (map.range.end - start) as usize];
        memory.read(start, &mut bytes).ok()?;
        let at = bytes.chunks(ALIGN as usize).position(|chunk| chunk.starts_with(mark))?;
        Some(Range { start: start + at as u64 * ALIGN, end: map.range.end })
    })
}

/// Where `len` bytes of zeros lie that the program may execute and never does: behind the end of the kernel's own page of
/// code, or of the code of a file.
pub fn unused_code(memory: &Memory, maps: &[OwnedMap], len: usize) -> Option<u64> {
    code_mappings(maps).find_map(|map| {
        // A margin of zeros stays before it: the last instruction may have zeros as its operand.
        let start = (map.range.end - len as u64) & !(ALIGN - 1);
        let margin = 16;
        let mut bytes = vec![0; (map.range.end - start) as usize + margin];
        memory.read(start - margin as u64, &mut bytes).ok()?;
        bytes.iter().all(|byte| *byte == 0).then_some(start)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(start: u64, end: u64) -> OwnedMap {
        OwnedMap { range: Range { start, end }, prot: 0, shared: false, offset: 0, inode: 0, name: String::new() }
    }

    #[test]
    fn a_free_range_touches_no_mapping() {
        let maps = [map(0x1000, 0x2000), map(0x7000_0000, 0x6fff_ffff_0000), map(0x7fff_0000_0000, 0x7fff_0001_0000)];
        let found = free_range(&maps, 1 << 20).unwrap();
        assert!(maps.iter().all(|map| map.range.end + GAP <= found.start || found.end + GAP <= map.range.start));
        assert_eq!(found.len(), 1 << 20);
        assert_eq!(free_range(&maps, HIGHEST), None);
    }

    #[test]
    fn unused_code_is_zeros_in_code() {
        let me = std::process::id() as i32;
        let (memory, maps) = (Memory::open(me).unwrap(), pagefold_os::procfs::maps(me).unwrap());
        let Some(at) = unused_code(&memory, &maps, 512) else { return eprintln!("SKIPPED: no room in this process") };
        assert!(
            maps.iter().any(|map| map.prot & libc::PROT_EXEC != 0 && map.range.start < at && at + 512 <= map.range.end)
        );
        let mut bytes = [1; 512];
        memory.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 512]);
    }
}
