//! A pull to a disk that becomes full.

mod common;

use common::{Host, Server, failed, honest, image, layer, noise, ok};
use pagefold_image::stat;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// A file system of its own, unmounted when the test ends.
struct Disk(PathBuf);

impl Disk {
    /// `None` after saying why there is none.
    fn new(at: &Path) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        match mount("none", at, "tmpfs", MountFlags::empty(), Some(&*CString::new("size=1M").unwrap())) {
            Ok(()) => Some(Self(at.into())),
            Err(error) => {
                println!("SKIPPED: needs to mount a file system: {error}");
                None
            }
        }
    }

    fn grow(&self) {
        mount_remount(&self.0, MountFlags::empty(), "size=64M").unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn a_full_disk_stops_a_pull_which_goes_on_when_there_is_room() {
    let host = Host::new();
    let Some(disk) = Disk::new(&host.store_path()) else { return };
    let image = image(&[layer(&[("small", &noise(1, 100_000))]), layer(&[("large", &noise(2, 3_000_000))])]);
    let served = image.clone();
    let server = Server::start(move |request, _| honest(request, &[("v1", &served)]));
    let error = failed(&host.pull(&server, "v1"));
    assert!(error.contains("no space left"), "{error}");
    assert!(host.store().images().unwrap().is_empty());
    let come: u64 = host.downloads().values().sum();
    assert!(come > 200_000, "{come}");

    disk.grow();
    let pulled = ok(&host.pull(&server, "v1"));
    let all: usize = image.blobs.values().map(Vec::len).sum::<usize>() + image.manifest.len();
    assert_eq!(pulled["bytes_fetched"], all as u64 - come, "what has come is not fetched again");
    assert_eq!(host.file("v1", "large").unwrap(), noise(2, 3_000_000));
    assert!(stat::verify(&host.store(), &[], false).unwrap().damaged.is_empty());
    assert!(host.downloads().is_empty());
}
