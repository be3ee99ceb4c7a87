//! The agent's file as it lies in a program's memory: segments in their places, relocations applied.
//!
//! The file needs no other library, so that every relocation is a base address plus a number.

use pagefold_os::PAGE_SIZE;
use std::io;

const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const EXECUTABLE: u32 = 1;
const RELA: u64 = 7;
const RELA_LEN: u64 = 8;
#[cfg(target_arch = "x86_64")]
const RELATIVE: u64 = 8;
#[cfg(target_arch = "aarch64")]
const RELATIVE: u64 = 1027;

/// The agent's file, understood.
#[derive(Debug)]
pub struct AgentImage {
    /// Everything up to the end of the initialized data, at base 0.
    bytes: Vec<u8>,
    /// Addresses, less the base, of words to which the base is added, and what else is added.
    relocations: Vec<(u64, u64)>,
    /// Length of the part that is executed or only read.
    pub code_len: u64,
    /// Length in memory, in whole pages.
    pub len: u64,
    /// Where it begins to run, less the base.
    pub begin: u64,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the agent's file is broken: {what}"))
}

fn number(file: &[u8], at: u64, len: usize) -> io::Result<u64> {
    let at = usize::try_from(at).map_err(|_| broken("an offset"))?;
    let bytes = at.checked_add(len).and_then(|end| file.get(at..end)).ok_or_else(|| broken("it is too short"))?;
    Ok(bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
}

impl AgentImage {
    /// Reads `file`, a shared object in the ELF format.
    ///
    /// # Errors
    /// `InvalidData` if it is not what the build makes.
    pub fn parse(file: &[u8]) -> io::Result<AgentImage> {
        if file.get(..5) != Some(b"\x7fELF\x02") {
            return Err(broken("not a 64-bit ELF file"));
        }
        let (begin, headers, count) = (number(file, 24, 8)?, number(file, 32, 8)?, number(file, 56, 2)?);
        let (mut bytes, mut len, mut code_len, mut dynamic) = (Vec::new(), 0u64, 0u64, None);
        for index in 0..count {
            let at = headers + index * number(file, 54, 2)?;
            let (kind, flags) = (number(file, at, 4)? as u32, number(file, at + 4, 4)? as u32);
            let (offset, start) = (number(file, at + 8, 8)?, number(file, at + 16, 8)?);
            let (file_len, memory_len) = (number(file, at + 32, 8)?, number(file, at + 40, 8)?);
            if kind == DYNAMIC {
                dynamic = Some((offset, file_len));
            }
            if kind != LOAD {
                continue;
            }
            let end = start.checked_add(memory_len).filter(|end| *end < 1 << 30).ok_or_else(|| broken("a segment"))?;
            let from = file.get(offset as usize..(offset + file_len) as usize).ok_or_else(|| broken("a segment"))?;
            let to = start as usize;
            bytes.resize(bytes.len().max(to + from.len()), 0);
            bytes[to..to + from.len()].copy_from_slice(from);
            len = len.max(end.next_multiple_of(PAGE_SIZE as u64));
            if flags & EXECUTABLE != 0 {
                code_len = end.next_multiple_of(PAGE_SIZE as u64);
            }
        }
        let relocations = relocations(file, &bytes, dynamic.ok_or_else(|| broken("it has no dynamic section"))?)?;
        let is_data = |&(at, _): &(u64, u64)| at >= code_len && at + 8 <= bytes.len() as u64;
        if code_len == 0 || begin >= code_len || !relocations.iter().all(is_data) {
            return Err(broken("code and data overlap"));
        }
        Ok(AgentImage { bytes, relocations, code_len, len, begin })
    }

    /// What is executed or only read. It is the same wherever it lies.
    pub fn code(&self) -> &[u8] {
        &self.bytes[..self.bytes.len().min(self.code_len as usize)]
    }

    /// What lies in memory from `base` on; behind it come zeros.
    pub fn at(&self, base: u64) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for (at, addend) in &self.relocations {
            bytes[*at as usize..*at as usize + 8].copy_from_slice(&base.wrapping_add(*addend).to_ne_bytes());
        }
        bytes
    }
}

fn relocations(file: &[u8], bytes: &[u8], (offset, len): (u64, u64)) -> io::Result<Vec<(u64, u64)>> {
    let entry = |at: u64| Ok::<_, io::Error>((number(file, at, 8)?, number(file, at + 8, 8)?));
    let (mut table, mut table_len) = (0, 0);
    for at in (offset..offset + len).step_by(16) {
        match entry(at)? {
            (RELA, value) => table = value,
            (RELA_LEN, value) => table_len = value,
            _ => {}
        }
    }
    let one = |at: u64| {
        if number(bytes, at + 8, 8)? != RELATIVE {
            return Err(broken("it needs a symbol of another library"));
        }
        Ok((number(bytes, at, 8)?, number(bytes, at + 16, 8)?))
    };
    (table..table + table_len).step_by(24).map(one).collect()
}
