//! One process of the demonstration: memory filled with files, and what it does when told so on standard input.

use crate::error::Error;
use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PAGE: usize = pagefold_os::PAGE_SIZE;

/// One process of the demonstration: fills memory, then obeys lines on standard input
#[derive(clap::Args)]
pub struct Args {
    /// Bytes of memory
    size: u64,
    /// Order of the files
    seed: u64,
}

/// Runs one process of the demonstration.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let mut memory = Memory::fill(args.size as usize, args.seed)?;
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["merge"] => {
                memory.mergeable()?;
                println!("merging");
            }
            ["check"] => match memory.check()? {
                None => println!("intact"),
                Some(at) => println!("WRONG at page {at}"),
            },
            ["write", pages] => {
                let took = memory.write(pages.parse()?);
                println!("written {}", took.as_nanos());
            }
            _ => return Err(format!("{line:?} is nothing this process does").into()),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Memory filled with files, and what was written to it since.
struct Memory {
    bytes: &'static mut [u8],
    /// (file, first page, pages)
    files: Vec<(PathBuf, usize, usize)>,
    written: BTreeMap<usize, u64>,
    random: u64,
}

impl Memory {
    fn fill(size: usize, seed: u64) -> Result<Memory, Error> {
        let size = size / PAGE * PAGE;
        let mut files = files(size)?;
        // Fisher-Yates with an xorshift generator; the seed gives the order.
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for index in (1..files.len()).rev() {
            files.swap(index, (next(&mut random) % (index as u64 + 1)) as usize);
        }
        // SAFETY: a fresh private mapping, used as bytes until the process ends.
        let bytes = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            if at == libc::MAP_FAILED {
                return Err(std::io::Error::last_os_error().into());
            }
            libc::madvise(at, size, libc::MADV_NOHUGEPAGE);
            std::slice::from_raw_parts_mut(at.cast::<u8>(), size)
        };
        let mut placed = Vec::new();
        let mut page = 0;
        for (path, len) in files {
            let pages = len.div_ceil(PAGE).min(size / PAGE - page);
            if pages == 0 {
                break;
            }
            let content = std::fs::read(&path).unwrap_or_default();
            let taken = content.len().min(pages * PAGE);
            bytes[page * PAGE..page * PAGE + taken].copy_from_slice(&content[..taken]);
            placed.push((path, page, pages));
            page += pages;
        }
        Ok(Memory { bytes, files: placed, written: BTreeMap::new(), random })
    }

    fn mergeable(&mut self) -> Result<(), Error> {
        // SAFETY: the range is ours; merging keeps its content.
        let done = unsafe { libc::madvise(self.bytes.as_mut_ptr().cast(), self.bytes.len(), libc::MADV_MERGEABLE) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
    }

    /// The first page that differs from the files and from what was written, if any.
    fn check(&self) -> Result<Option<usize>, Error> {
        for (path, first, pages) in &self.files {
            let mut expected = std::fs::read(path).unwrap_or_default();
            expected.resize(pages * PAGE, 0);
            for (page, value) in self.written.range(first..&(first + pages)) {
                expected[(page - first) * PAGE..][..8].copy_from_slice(&value.to_le_bytes());
            }
            let actual = &self.bytes[first * PAGE..][..pages * PAGE];
            if actual != expected {
                let wrong = actual.chunks(PAGE).zip(expected.chunks(PAGE)).position(|(a, e)| a != e).unwrap_or(0);
                return Ok(Some(first + wrong));
            }
        }
        Ok(None)
    }

    /// Writes to `pages` pages anywhere, as fast as it can, and returns how long that took.
    fn write(&mut self, pages: usize) -> Duration {
        let used = self.files.last().map_or(0, |(_, first, pages)| first + pages).max(1) as u64;
        let random = &mut self.random;
        let writes: Vec<(usize, u64)> = (0..pages).map(|_| ((next(random) % used) as usize, next(random))).collect();
        let began = Instant::now();
        for (page, value) in &writes {
            self.bytes[page * PAGE..][..8].copy_from_slice(&value.to_le_bytes());
        }
        let took = began.elapsed();
        self.written.extend(writes);
        took
    }
}

fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Files of this machine, `size` bytes of them, the same for every caller.
fn files(size: usize) -> Result<Vec<(PathBuf, usize)>, Error> {
    let mut found = Vec::new();
    let mut total = 0;
    let mut dirs: Vec<PathBuf> =
        ["/usr/lib", "/usr/bin", "/usr/share", "/usr/libexec", "/lib", "/opt"].map(PathBuf::from).into();
    dirs.reverse();
    while let Some(dir) = dirs.pop() {
        let mut entries: Vec<_> = std::fs::read_dir(&dir).into_iter().flatten().flatten().collect();
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                dirs.push(entry.path());
            } else if kind.is_file() {
                let len = entry.metadata().map(|meta| meta.len() as usize).unwrap_or(0);
                if len >= PAGE && std::fs::File::open(entry.path()).is_ok() {
                    found.push((entry.path(), len));
                    total += len.next_multiple_of(PAGE);
                }
            }
            if total >= size {
                return Ok(found);
            }
        }
    }
    if found.is_empty() { Err("this machine has no files to show it with".into()) } else { Ok(found) }
}
