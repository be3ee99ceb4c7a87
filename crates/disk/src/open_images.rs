//! The images that the engine knows, found by their files, and how many handles each has.
//!
//! An image enters the registry at its first open. While it has no handle, housekeeping may sync it and close its
//! file; the next open gives the file back. It leaves the registry when it has neither a handle nor a block.

use crate::cache::Cache;
use crate::file::{BlockFile, FileKey, HostFile, Stamp};
use crate::fingerprint_file::FingerprintDir;
use crate::image::Image;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// An image of the registry, and its use.
pub(crate) struct OpenImage {
    pub(crate) image: Arc<Image>,
    handles: AtomicUsize,
    unlinked: AtomicBool,
    /// Held while the image gets its file and its fingerprints.
    opening: Mutex<()>,
}

impl OpenImage {
    /// Wraps an image for its first handle, which is counted.
    pub(crate) fn new(image: Arc<Image>) -> Self {
        let (handles, unlinked) = (AtomicUsize::new(1), AtomicBool::new(false));
        Self { image, handles, unlinked, opening: Mutex::new(()) }
    }

    /// Returns true if no handle and no unwritten block needs the image's file.
    pub(crate) fn is_unused(&self) -> bool {
        self.handles.load(Ordering::Acquire) == 0 && self.image.dirty_bytes() == 0
    }
}

/// The registry.
pub(crate) struct OpenImages {
    pub(crate) cache: Arc<Cache>,
    pub(crate) fingerprints: Option<FingerprintDir>,
    /// Never held during a call on a file, because attributes of every image are found through it.
    by_file: Mutex<HashMap<FileKey, Arc<OpenImage>>>,
}

/// One counted handle of an image. Dropping it takes the count back.
pub(crate) struct ImageRef {
    pub(crate) images: Arc<OpenImages>,
    pub(crate) open: Arc<OpenImage>,
}

impl Drop for ImageRef {
    fn drop(&mut self) {
        self.images.release(&self.open);
    }
}

impl OpenImages {
    pub(crate) fn new(cache: Arc<Cache>, fingerprints: Option<FingerprintDir>) -> Self {
        Self { cache, fingerprints, by_file: Mutex::default() }
    }

    /// Makes the file at `path` an image, or gives it to the image that it is already.
    ///
    /// # Errors
    /// The file's version cannot be read.
    pub(crate) fn open(self: &Arc<Self>, path: &Path, file: HostFile) -> io::Result<ImageRef> {
        let stamp = file.stamp()?;
        let key = (stamp.dev, stamp.ino);
        let mut by_file = self.by_file.lock();
        if let Some(open) = by_file.get(&key).cloned() {
            // Counted before the registry is unlocked: housekeeping does not close its file from here on.
            open.handles.fetch_add(1, Ordering::AcqRel);
            drop(by_file);
            let counted = ImageRef { images: self.clone(), open };
            let opening = counted.open.opening.lock();
            self.reopen(&counted.open.image, file, stamp)?;
            drop(opening);
            return Ok(counted);
        }
        let image = self.cache.add_image_at(&path.to_string_lossy(), Arc::new(file), stamp);
        let open = Arc::new(OpenImage::new(image));
        // A second opener of this image waits for its fingerprints. Openers of other images do not wait.
        let opening = open.opening.lock();
        by_file.insert(key, open.clone());
        drop(by_file);
        if let Some(directory) = &self.fingerprints {
            self.cache.load_fingerprints(&open.image, directory);
        }
        drop(opening);
        Ok(ImageRef { images: self.clone(), open })
    }

    /// Opens an image that has its file already, whatever happened to its name.
    ///
    /// # Errors
    /// `ESTALE` if no image has that file open.
    pub(crate) fn open_by_key(self: &Arc<Self>, key: FileKey) -> io::Result<ImageRef> {
        let by_file = self.by_file.lock();
        let open = by_file.get(&key).filter(|open| open.image.has_file()).cloned();
        let open = open.ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))?;
        open.handles.fetch_add(1, Ordering::AcqRel);
        drop(by_file);
        let counted = ImageRef { images: self.clone(), open };
        // Waits until its fingerprints are loaded.
        drop(counted.open.opening.lock());
        Ok(counted)
    }

    /// Gives a cached image its file back, and notes whether the file changed in between.
    fn reopen(&self, image: &Image, file: HostFile, stamp: Stamp) -> io::Result<()> {
        let is_better = image.file().map_or(true, |there| file.writable() && !there.writable());
        if is_better {
            image.set_file(Some(Arc::new(file)));
        }
        if let Some(known) = image.stamp.try_lock()
            && *known != stamp
        {
            image.changed_externally.store(true, Ordering::Release);
        }
        self.cache.accept_change(image).map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    /// Returns the image of a file of the host, if that file is open.
    pub(crate) fn open_image(&self, key: FileKey) -> Option<Arc<Image>> {
        self.cached_image(key).filter(|image| image.has_file())
    }

    /// Returns the image of a file of the host, if blocks of it may be in the cache.
    pub(crate) fn cached_image(&self, key: FileKey) -> Option<Arc<Image>> {
        self.by_file.lock().get(&key).map(|open| open.image.clone())
    }

    /// Notes that the last name of a file is gone: its blocks are discarded with the last handle.
    pub(crate) fn note_unlinked(&self, key: FileKey) {
        let mut by_file = self.by_file.lock();
        let Some(open) = by_file.get(&key) else { return };
        open.unlinked.store(true, Ordering::Release);
        if open.handles.load(Ordering::Acquire) == 0
            && let Some(open) = by_file.remove(&key)
        {
            drop(by_file);
            self.cache.discard_image(&open.image);
        }
    }

    fn release(&self, open: &Arc<OpenImage>) {
        let mut by_file = self.by_file.lock();
        if open.handles.fetch_sub(1, Ordering::AcqRel) == 1 && open.unlinked.load(Ordering::Acquire) {
            by_file.retain(|_, other| !Arc::ptr_eq(other, open));
            drop(by_file);
            self.cache.discard_image(&open.image);
        }
    }

    /// Closes the file of an unused image that is durable, and forgets an image without blocks.
    pub(crate) fn close_unused(&self, key: FileKey, open: &OpenImage) {
        let image = &open.image;
        let mut by_file = self.by_file.lock();
        // A client may have opened, changed and closed it since the caller's sync: the next turn syncs that change.
        if !open.is_unused() || image.has_file() && image.unsynced.load(Ordering::Acquire) {
            return;
        }
        let file = image.set_file(None);
        if let Some(file) = &file {
            // Released before the image can be opened again, because closing the file may take long.
            file.release();
        }
        let is_forgotten = image.chunk_count() == 0 && by_file.remove(&key).is_some();
        drop(by_file);
        // Closing may wait for the disk.
        drop(file);
        if is_forgotten {
            self.cache.discard_image(image);
        }
    }

    /// Returns every image of the registry now.
    pub(crate) fn all(&self) -> Vec<(FileKey, Arc<OpenImage>)> {
        self.by_file.lock().iter().map(|(key, open)| (*key, open.clone())).collect()
    }

    /// Returns the names of the images that have a handle.
    pub(crate) fn names_in_use(&self) -> HashSet<String> {
        let by_file = self.by_file.lock();
        let in_use = by_file.values().filter(|open| open.handles.load(Ordering::Relaxed) > 0);
        in_use.map(|open| open.image.name()).collect()
    }
}
