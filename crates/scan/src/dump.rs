//! A memory dump, a guest's backing file, or any other file, as pages of 4 KiB.

use crate::error::Lost;
use crate::record::PageKind;
use crate::source::{Identity, Pages, ScanPlan, Source, WorkUnit};
use pagefold_os::PAGE_SIZE;
use pagefold_os::fill::fill;
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const UNIT_PAGES: u64 = (32 << 20) / PAGE_SIZE as u64;
/// Units of one file at most.
const UNITS_MAX: u64 = 1 << 20;

/// A file. A last page that is not whole counts as if zeros followed, as in memory.
#[derive(Debug)]
pub struct Dump {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Where the first page begins.
    start: u64,
}

impl Dump {
    /// Opens `path`.
    ///
    /// # Errors
    /// Why it cannot be scanned: absent, refused, or nothing that has pages.
    pub fn open(path: &Path) -> Result<Dump, Lost> {
        let kind = std::fs::metadata(path)?.file_type();
        if kind.is_dir() {
            return Err(Lost::Unfit("is a directory; `--tree DIR` scans one"));
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Lost::Unfit("is neither a file nor a block device"));
        }
        // Without O_NONBLOCK the open would wait if a pipe took the file's place just now.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
        let bytes = if kind.is_block_device() {
            seek(&file, SeekFrom::End(0)).map_err(std::io::Error::from)?
        } else {
            file.metadata()?.len()
        };
        let start = start_of_pages(&file).min(bytes);
        Ok(Dump { path: path.to_owned(), file, bytes, start })
    }

    /// Device and inode: two paths with the same are the same file.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn device_and_inode(&self) -> Result<(u64, u64), Lost> {
        let meta = self.file.metadata()?;
        Ok((meta.dev(), meta.ino()))
    }

    /// The next range of bytes in `at..end` that is no hole.
    fn data(&self, at: u64, end: u64) -> (u64, u64) {
        let start = match seek(&self.file, SeekFrom::Data(at)) {
            Ok(start) => start.min(end),
            Err(rustix::io::Errno::NXIO) => end,
            // A file system without holes.
            Err(_) => return (at, end),
        };
        let stop = seek(&self.file, SeekFrom::Hole(start)).map_or(end, |stop| stop.clamp(start, end));
        (start, stop)
    }
}

impl Source for Dump {
    fn identity(&self) -> Identity {
        Identity { pid: None, name: self.path.display().to_string(), domain: 0 }
    }

    fn plan(&self) -> Result<ScanPlan, Lost> {
        let pages = (self.bytes - self.start).div_ceil(PAGE_SIZE as u64);
        // A file may say that it has exabytes, of holes.
        let step = pages.div_ceil(UNITS_MAX).max(UNIT_PAGES);
        let unit = |first_page| WorkUnit {
            first_page,
            page_count: step.min(pages - first_page),
            kind: PageKind::Own,
            reason: None,
            continues: first_page > 0,
        };
        let units = (0..pages).step_by(step as usize).map(unit).collect();
        Ok(ScanPlan { units, bytes: self.bytes, ..ScanPlan::default() })
    }

    fn read(&self, unit: &WorkUnit, buffer: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
        const PAGE: u64 = PAGE_SIZE as u64;
        let end_page = unit.first_page + unit.page_count;
        let mut page = unit.first_page;
        while page < end_page {
            let (start, stop) = self.data(self.start + page * PAGE, self.start + end_page * PAGE);
            let first_page = (start - self.start) / PAGE;
            pages.take_holes(first_page - page);
            page = first_page;
            let stop_page = (stop - self.start).div_ceil(PAGE).min(end_page);
            while page < stop_page {
                let want = buffer.len().min((stop_page - page) as usize * PAGE_SIZE);
                let got = read_full(&self.file, &mut buffer[..want], self.start + page * PAGE)?;
                if got == 0 {
                    // Cut short since it was planned: what is gone is no page.
                    return Ok(());
                }
                let whole = got.next_multiple_of(PAGE_SIZE);
                buffer[got..whole].fill(0);
                pages.take(page, false, false, &buffer[..whole]);
                page += (whole / PAGE_SIZE) as u64;
            }
        }
        Ok(())
    }
}

/// Returns where the pages of memory in `file` begin: at its start, except in an ELF core with headers that are no whole
/// pages, as QEMU writes them. Its segments follow each other, so the start of the first one is enough.
fn start_of_pages(file: &File) -> u64 {
    const CORE: &[u8] = &[4, 0];
    const LOAD: &[u8] = &[1, 0, 0, 0];
    let mut head = [0; 64];
    let is_core = read_full(file, &mut head, 0) == Ok(head.len())
        && head.starts_with(b"\x7fELF\x02\x01")
        && &head[16..18] == CORE;
    if !is_core {
        return 0;
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let (table, entry_bytes, count) = (number(&head[32..40]), number(&head[54..56]), number(&head[56..58]));
    let mut entry = [0; 56];
    for at in (0..count).map(|n| table.saturating_add(n * entry_bytes)) {
        if read_full(file, &mut entry, at) != Ok(entry.len()) {
            break;
        }
        // With bytes in the file.
        if &entry[..4] == LOAD && number(&entry[32..40]) > 0 {
            return number(&entry[8..16]) % PAGE_SIZE as u64;
        }
    }
    0
}

/// Reads until `buffer` is full or the file ends.
fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> Result<usize, Lost> {
    Ok(fill(buffer, |rest, filled| file.read_at(rest, offset + filled as u64))?)
}
