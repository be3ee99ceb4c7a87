//! Files as all parts handle them: made, read, counted in the kernel's cache and taken out of it.

use super::Failure;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

pub(super) fn random_file(path: &Path, mib: usize, seed: u64) -> Result<(), Failure> {
    use std::io::Write;
    let mut state = seed | 1;
    let mut file = File::create(path)?;
    let mut buffer = vec![0; 1 << 20];
    for _ in 0..mib {
        buffer.chunks_mut(8).for_each(|word| word.copy_from_slice(&xorshift(&mut state).to_le_bytes()));
        file.write_all(&buffer)?;
    }
    Ok(file.sync_all()?)
}

/// Takes a file out of the kernel's page cache.
pub(super) fn drop_cached(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    file.sync_all()?;
    // SAFETY: the descriptor is open for the call; the advice changes no content.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    Ok(())
}

/// Bytes of a file in the kernel's page cache now.
pub(super) fn cached_bytes(path: &Path) -> Result<u64, Failure> {
    let file = File::open(path)?;
    let length = file.metadata()?.len() as usize;
    if length == 0 {
        return Ok(0);
    }
    // SAFETY: a fresh read-only mapping of a file nobody cuts while we look; never read, only asked about.
    let resident = unsafe {
        let base = libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        let mut pages = vec![0u8; length.div_ceil(4096)];
        let result = libc::mincore(base, length, pages.as_mut_ptr());
        libc::munmap(base, length);
        if result != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        pages.iter().filter(|&&page| page & 1 == 1).count()
    };
    Ok(resident as u64 * 4096)
}

/// Reads what a file holds besides holes, in 1 MiB pieces; returns a checksum of it. A guest does not read its free
/// space either, and the kernel would keep pages of zeros for it.
pub(super) fn read_data(path: &Path) -> Result<u64, Failure> {
    let file = File::open(path)?;
    let end = file.metadata()?.len();
    let mut buffer = vec![0; 1 << 20];
    let (mut sum, mut at) = (0u64, 0);
    // SAFETY: the descriptor is open for both calls; seeking touches no memory.
    let seek = |from: u64, whence| unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) };
    while at < end {
        let data = seek(at, libc::SEEK_DATA);
        if data < 0 {
            break;
        }
        let hole = u64::try_from(seek(data as u64, libc::SEEK_HOLE))?;
        at = data as u64;
        while at < hole {
            let part = (hole - at).min(1 << 20) as usize;
            file.read_exact_at(&mut buffer[..part], at)?;
            let words = buffer[..part].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")));
            sum = words.fold(sum, |sum, word| sum.rotate_left(5) ^ word);
            at += part as u64;
        }
    }
    Ok(sum)
}

/// Reads a whole file in 1 MiB pieces; returns a checksum of it.
pub(super) fn read_through(path: &Path) -> Result<u64, Failure> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut sum = 0u64;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            count => {
                let words = buffer[..count].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")));
                sum = words.fold(sum, |sum, word| sum.rotate_left(5) ^ word);
            }
        }
    }
}

/// Median and spread (half of the range, in percent of the median).
pub(super) fn summary(mut samples: Vec<f64>) -> (f64, f64) {
    samples.sort_by(f64::total_cmp);
    let median = samples[samples.len() / 2];
    (median, 50.0 * (samples[samples.len() - 1] - samples[0]) / median)
}

/// Median and spread of many samples (half of what lies between the quartiles, in percent of the median).
pub(super) fn middle(mut samples: Vec<f64>) -> (f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| samples[samples.len() * part / 4];
    (at(2), 50.0 * (at(3) - at(1)) / at(2))
}

pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
