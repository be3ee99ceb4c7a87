//! How tests unmount, of this crate and of others.

// Each test program uses a part of this.
#![allow(dead_code)]

use pagefold_image::{Error, mount};
use rustix::io::Errno;
use std::path::Path;
use std::time::{Duration, Instant};

/// Does what needs a mount that nothing uses. A child process of a test that runs at the same time has copies of our
/// descriptors until it executes its program, so the mount may be in use for a moment.
fn out_of_use<E: std::fmt::Debug>(mut unmount: impl FnMut() -> Result<(), E>, in_use: impl Fn(&E) -> bool) {
    let began = Instant::now();
    loop {
        match unmount() {
            Err(error) if in_use(&error) && began.elapsed() < Duration::from_secs(60) => {}
            other => return other.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Unmounts an image as pagefold does.
pub fn umount(at: &Path) {
    out_of_use(|| mount::umount(at, false), |error| matches!(error, Error::Refused(why) if why.contains("in use")));
}

/// Unmounts what pagefold did not mount.
pub fn unmount(at: &Path) {
    let none = rustix::mount::UnmountFlags::empty();
    out_of_use(|| rustix::mount::unmount(at, none), |errno| *errno == Errno::BUSY);
}
