//! Guests and the commands that they run.

use crate::disk::args::GuestSize;
use crate::disk::server::Server;
use crate::process::Failure;
use crate::scratch::Scratch;
use crate::vm::{Boot, Guest, Setup};
use pagefold_os::procfs;
use std::path::{Path, PathBuf};

/// What the parts measure on: a folder for what they make, a guest that boots, images of one tree that were installed apart
/// in a directory.
#[derive(Clone, Copy)]
pub(super) struct Stage<'a> {
    pub(super) scratch: &'a Scratch,
    pub(super) boot: &'a Boot,
    pub(super) directory: &'a Path,
    pub(super) images: &'a [PathBuf],
    pub(super) size: &'a GuestSize,
}

pub(super) const MOUNT: &str = "mount -t ext4 -o ro /dev/vda /mnt && ls /mnt | wc -l";
pub(super) const READ_TREE: &str = "find /mnt -type f -exec cat {} + | wc -c";
/// What guests do with the tree while their processor time counts: name and command. The guest's own cache is emptied
/// first, so every byte comes from the host; a build goes through its sources once, with more work per byte than these.
pub(super) const WORK: &[(&str, &str)] = &[
    (
        "read and digest",
        "echo 3 > /proc/sys/vm/drop_caches; find /mnt -type f | sort | head -n 2500 | xargs md5sum | md5sum",
    ),
    (
        "read and compress",
        "echo 3 > /proc/sys/vm/drop_caches; find /mnt -type f | sort | head -n 600 | xargs cat | gzip | md5sum",
    ),
];
/// A compiler run over a real program, as a step of a build: every image has it.
pub(super) const BUILD: (&str, &str) = ("compile", "echo 3 > /proc/sys/vm/drop_caches; sh /mnt/build/run");
pub(super) const GUEST_MIB: usize = 192;

pub(super) fn raw_drive(path: &Path, cache: &str) -> String {
    format!("file={},format=raw,cache={cache}", path.display())
}

pub(super) fn boot_all(
    boot: &Boot,
    drives: impl Iterator<Item = String>,
    setup: &Setup,
) -> Result<Vec<Guest>, Failure> {
    let start = |drive| Guest::start(boot, &Setup { drive, ..setup.clone() });
    let mut guests: Vec<Guest> = drives.map(start).collect::<Result<_, _>>()?;
    guests.iter_mut().try_for_each(Guest::ready)?;
    Ok(guests)
}

pub(super) fn plain_setup() -> Setup {
    Setup { memory_mib: GUEST_MIB, ..Setup::default() }
}

/// Drives of images shown by a server; `cache=none`, so that the host's kernel keeps no copy of its own.
pub(super) fn through<'a>(server: &'a Server, images: &'a [PathBuf]) -> impl Iterator<Item = String> + 'a {
    images.iter().map(|image| raw_drive(&server.at.join(image.file_name().unwrap_or_default()), "none"))
}

pub(super) fn cpu_s(pids: impl IntoIterator<Item = i32>) -> f64 {
    // The process's own line counts threads that have ended, too.
    pids.into_iter().filter_map(procfs::cpu_ns).sum::<u64>() as f64 / 1e9
}
