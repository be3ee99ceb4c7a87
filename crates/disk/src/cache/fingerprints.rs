//! What is known of an image's content, taken up from beside the image and kept there.
//!
//! It counts only while the image is the very version that it was made from, which is looked at before and after.

use super::Cache;
use crate::fingerprints::FingerprintDir;
use crate::image::Image;
use crate::stats::add;
use std::io;
use std::sync::atomic::Ordering;

impl Cache {
    /// Takes up what is known about an image's content; a file that does not fit is counted and learnt anew.
    pub fn load_fingerprints(&self, image: &Image, store: &FingerprintDir) {
        let Ok(file) = image.file() else { return };
        let before = *image.known.lock();
        *image.kept.lock() = Some(store.file_of(before.ino));
        let (mut known, rejected) = store.load(&file.lasting(before));
        if rejected.is_some() {
            add(&self.counters.fingerprint_files_rejected, 1);
        }
        let now = image.known.lock();
        if *now != before {
            // It was changed while we read.
            known.forget(0..u64::MAX);
        }
        *image.fingerprints.lock() = Some(known);
    }

    /// Keeps what is known about an image's content, once that is durable, unless the image changes meanwhile.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save_fingerprints(&self, image: &Image, store: &FingerprintDir) -> io::Result<()> {
        if !self.sync(image, 0..u64::MAX) {
            return Ok(());
        }
        // A change within one tick of the file system's clock would carry the same times: let the tick pass first.
        let tick = std::time::Duration::from_millis(20);
        let stamp = *image.known.lock();
        let changed = std::time::UNIX_EPOCH + std::time::Duration::new(stamp.ctime.0.max(0) as u64, stamp.ctime.1);
        if std::time::SystemTime::now().duration_since(changed).is_ok_and(|age| age < tick) {
            std::thread::sleep(tick);
        }
        let file = image.file()?;
        let bytes = match &*image.fingerprints.lock() {
            Some(known) if known.block_count() > 0 => known.encode(&file.lasting(stamp), &store.key()),
            _ => return Ok(()),
        };
        let new = store.write(stamp.ino, &bytes)?;
        // Nobody writes back, and nobody changes the file, until the new one has its name.
        let _flush = image.flush.lock();
        let known = image.known.lock();
        let same = *known == stamp && file.stamp()? == stamp && !image.changed.load(Ordering::Acquire);
        if !same || image.unsynced.load(Ordering::Acquire) {
            return std::fs::remove_file(new);
        }
        let path = store.file_of(stamp.ino);
        let mut kept = image.kept.lock();
        std::fs::rename(new, &path)?;
        *kept = Some(path);
        Ok(())
    }
}
