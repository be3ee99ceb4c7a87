//! Loads and saves an image's fingerprint file.
//!
//! A file is valid for one version of the image, so the version is compared before and after.

use super::Cache;
use crate::fingerprint_file::FingerprintDir;
use crate::image::Image;
use crate::stats::add;
use std::io;
use std::sync::atomic::Ordering;

impl Cache {
    /// Loads an image's fingerprints. A file that does not fit is counted and learnt again.
    pub fn load_fingerprints(&self, image: &Image, directory: &FingerprintDir) {
        let Ok(file) = image.file() else { return };
        let before = *image.stamp.lock();
        *image.fingerprint_file.lock() = Some(directory.file_path(before.ino));
        let (mut fingerprints, rejected) = directory.load(&file.persistent_stamp(before));
        if rejected.is_some() {
            add(&self.counters.fingerprint_files_rejected, 1);
        }
        let now = image.stamp.lock();
        if *now != before {
            // The image changed while its file was read.
            fingerprints.forget(0..u64::MAX);
        }
        *image.fingerprints.lock() = Some(fingerprints);
    }

    /// Syncs an image and saves its fingerprints, unless the image changes meanwhile.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save_fingerprints(&self, image: &Image, directory: &FingerprintDir) -> io::Result<()> {
        if !self.sync(image, 0..u64::MAX) {
            return Ok(());
        }
        // A later change within the same tick of the file system's clock would carry the same times: wait for the next.
        let tick = std::time::Duration::from_millis(20);
        let stamp = *image.stamp.lock();
        let changed = std::time::UNIX_EPOCH + std::time::Duration::new(stamp.ctime.0.max(0) as u64, stamp.ctime.1);
        if std::time::SystemTime::now().duration_since(changed).is_ok_and(|age| age < tick) {
            std::thread::sleep(tick);
        }
        let file = image.file()?;
        let bytes = match &*image.fingerprints.lock() {
            Some(fingerprints) if fingerprints.block_count() > 0 => {
                fingerprints.encode(&file.persistent_stamp(stamp), &directory.key())
            }
            _ => return Ok(()),
        };
        let new = directory.write_new(stamp.ino, &bytes)?;
        // With both locked, no thread writes back or changes the image until the new file has its name.
        let _flush = image.flush.lock();
        let known = image.stamp.lock();
        let same = *known == stamp && file.stamp()? == stamp && !image.changed_externally.load(Ordering::Acquire);
        if !same || image.unsynced.load(Ordering::Acquire) {
            return std::fs::remove_file(new);
        }
        let path = directory.file_path(stamp.ino);
        let mut saved = image.fingerprint_file.lock();
        std::fs::rename(new, &path)?;
        *saved = Some(path);
        Ok(())
    }
}
