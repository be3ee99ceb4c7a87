//! The flusher thread: periodic flushes, and once a second a look at every image.

use crate::open_images::OpenImages;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the flusher looks for changed, closed and unused images.
const INTERVAL: Duration = Duration::from_secs(1);

/// Flushes and keeps house until `stop` is set. This is the flusher's whole life.
pub(crate) fn run_flusher(images: &OpenImages, stop: &AtomicBool) {
    let cache = &images.cache;
    let flush_interval = cache.config().flush_interval;
    let mut last_flush = Instant::now();
    let mut last_look = Instant::now();
    while !stop.load(Ordering::Acquire) {
        let is_requested = cache.wait_for_flush(flush_interval.min(INTERVAL));
        if stop.load(Ordering::Acquire) {
            return;
        }
        if is_requested || last_flush.elapsed() >= flush_interval {
            cache.flush_tick();
            last_flush = Instant::now();
        }
        if last_look.elapsed() >= INTERVAL {
            keep_house(images);
            last_look = Instant::now();
        }
    }
}

/// Notices external changes, syncs and closes the files of unused images, and forgets images without blocks.
fn keep_house(images: &OpenImages) {
    let cache = &images.cache;
    cache.trim_free_frames();
    for (key, open) in images.all() {
        let image = &open.image;
        if image.has_file() && cache.detect_change(image) {
            // The next request would accept it; an idle image should not keep stale blocks either.
            let _ = cache.accept_change(image);
        }
        let zeros_too = image.chunk_count() > cache.config().frame_count() / 16;
        image.sweep(zeros_too);
        if !open.is_unused() {
            continue;
        }
        if image.has_file() {
            // Without its file the image can no longer be synced. A sync that the disk refuses is retried next time.
            if !cache.sync(image, 0..u64::MAX) {
                continue;
            }
            if let Some(directory) = &images.fingerprints {
                let _ = cache.save_fingerprints(image, directory);
            }
        }
        images.close_unused(key, &open);
    }
}
