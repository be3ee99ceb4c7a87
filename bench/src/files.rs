//! Files as the benches handle them: made, copied from this machine, read, counted in the page cache and evicted from it.

use crate::process::{self, Failure};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where cargo builds.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()).into()
}

/// The programs that hold data.
pub const HOLDERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/holders");

/// Where `bench/fetch-images.sh` puts its images.
pub fn fetched_images() -> PathBuf {
    target().join("bench-images")
}

/// Makes a file of `mib` MiB of noise.
pub fn random_file(path: &Path, mib: usize, seed: u64) -> Result<(), Failure> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut file = File::create(path)?;
    let mut buffer = vec![0; 1 << 20];
    for _ in 0..mib {
        random.fill(&mut buffer);
        file.write_all(&buffer)?;
    }
    Ok(file.sync_all()?)
}

/// Copies regular files below these directories of this machine, in the order of their names and each directory before those
/// inside it, until there are `mib` MiB of them. They keep their paths below `to`, or get numbers if `flat`.
pub fn copy_files(from: &[PathBuf], to: &Path, mib: u64, flat: bool) -> Result<Vec<PathBuf>, Failure> {
    let (mut copied, mut bytes) = (Vec::new(), 0);
    let mut pending: Vec<(PathBuf, PathBuf)> = from.iter().rev().map(|dir| (dir.clone(), to.to_owned())).collect();
    fs::create_dir_all(to)?;
    while let Some((dir, at)) = pending.pop() {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            if bytes >= mib << 20 {
                return Ok(copied);
            }
            let Ok(metadata) = path.symlink_metadata() else { continue };
            let own = at.join(path.file_name().ok_or("no name")?);
            if metadata.is_dir() {
                pending.push((path, if flat { at.clone() } else { own }));
            } else if metadata.is_file() && (1..32 << 20).contains(&metadata.len()) {
                let target = if flat { to.join(format!("f{:05}", copied.len())) } else { own };
                fs::create_dir_all(target.parent().ok_or("no parent")?)?;
                if fs::copy(&path, &target).is_ok() {
                    bytes += metadata.len().next_multiple_of(4096);
                    copied.push(target);
                }
            }
        }
    }
    Ok(copied)
}

/// Makes an ext4 image of `mib` MiB with these files.
pub fn ext4(tree: &Path, image: &Path, mib: u64) -> std::io::Result<()> {
    let [tree, image] = [tree, image].map(|path| path.display().to_string());
    process::run("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &tree, &image, &format!("{mib}M")])
}

/// Evicts a file from the kernel's page cache.
pub fn drop_cached(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    file.sync_all()?;
    evict(&file);
    Ok(())
}

/// Evicts the clean pages of a file from the kernel's page cache.
pub fn evict(file: &File) {
    // SAFETY: the descriptor is open for the call; the advice changes no content and touches no memory of ours.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Bytes of a file in the kernel's page cache now.
pub fn cached_bytes(path: &Path) -> Result<u64, Failure> {
    Ok(pagefold_image::stat::resident_bytes(path, false)?)
}

/// The ranges of a file that hold data.
pub fn data_ranges(file: &File) -> Vec<std::ops::Range<u64>> {
    // SAFETY: the descriptor is open for the call; seeking touches no memory.
    let seek = |from: u64, whence| u64::try_from(unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) }).ok();
    let next = |from: u64| {
        let data = seek(from, libc::SEEK_DATA)?;
        Some(data..seek(data, libc::SEEK_HOLE)?)
    };
    std::iter::successors(next(0), |range| next(range.end)).collect()
}

/// A checksum of data that is read in pieces.
#[derive(Default, PartialEq, Eq, Clone, Copy)]
pub struct Checksum(u64);

impl Checksum {
    fn add(&mut self, bytes: &[u8]) {
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
        self.0 = words.fold(self.0, |sum, word| sum.rotate_left(5) ^ word);
    }
}

/// Reads a file without its holes, in 1 MiB pieces. A guest does not read its free space either, and the kernel would keep
/// pages of zeros for it.
pub fn read_data(path: &Path) -> Result<Checksum, Failure> {
    let file = File::open(path)?;
    let (mut sum, mut buffer) = (Checksum::default(), vec![0; 1 << 20]);
    for range in data_ranges(&file) {
        for at in range.clone().step_by(1 << 20) {
            let part = &mut buffer[..(range.end - at).min(1 << 20) as usize];
            file.read_exact_at(part, at)?;
            sum.add(part);
        }
    }
    Ok(sum)
}

/// Reads a whole file in 1 MiB pieces.
pub fn read_through(path: &Path) -> Result<Checksum, Failure> {
    let mut file = File::open(path)?;
    let (mut sum, mut buffer) = (Checksum::default(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            count => sum.add(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_not_read_and_do_not_count_as_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        let file = File::create(&path).unwrap();
        file.write_all_at(&[7; 4096], 1 << 20).unwrap();
        file.set_len(3 << 20).unwrap();
        assert!(
            data_ranges(&File::open(&path).unwrap()).iter().map(|range| range.end - range.start).sum::<u64>() < 1 << 20
        );
        let dense = dir.path().join("dense");
        fs::write(&dense, [7; 4096]).unwrap();
        assert!(read_data(&path).unwrap() == read_through(&dense).unwrap());
    }
}
