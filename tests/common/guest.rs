//! Guests of QEMU.

use super::boot::{self, Kernel};
use super::{installed, skipped};
use std::path::{Path, PathBuf};

/// A kernel with modules for `drivers` and the path of busybox; `None` after saying what is missing for guests.
pub fn needs(drivers: &[&str]) -> Option<(Kernel, PathBuf)> {
    installed("qemu-system-x86_64").and(installed("cpio"))?;
    let busybox = installed("busybox")?;
    let kernel = boot::kernel(drivers);
    if kernel.is_none() {
        skipped("no kernel to boot in /boot (linux-image-cloud-amd64)");
    }
    Some((kernel?, busybox))
}

/// An initial file system in `dir` with the shell script `init` as its first program.
pub fn initramfs(
    dir: &Path,
    (kernel, busybox): &(Kernel, PathBuf),
    init: &str,
    files: &[(String, Vec<u8>)],
) -> PathBuf {
    boot::initramfs(dir, busybox, &kernel.modules, init, files).expect("an initial file system")
}

/// `len` bytes that look random; only the bits of `mask` are set in each word.
pub fn noise(len: usize, mask: u64) -> Vec<u8> {
    let mut seed = 0x9E37_79B9_7F4A_7C15u64;
    let words = (0..len / 8).flat_map(|_| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed & mask).to_ne_bytes()
    });
    words.collect()
}
