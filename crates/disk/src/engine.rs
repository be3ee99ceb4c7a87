//! The engine: opens the images of a directory, reads ahead, flushes in time. Both front ends stand on it.

use crate::BLOCK_BYTES;
use crate::cache::Cache;
use crate::config::{Config, FingerprintKey};
use crate::error::Error;
use crate::file::{BlockFile, HostFile, Place, Stamp, open_beneath, stamp_of};
use crate::fingerprints::FingerprintDir;
use crate::image::Image;
use crate::stats::Status;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, OFlags};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Names a file of the host: device and inode number.
pub(crate) type FileKey = (u64, u64);

/// Serves the images below one directory.
pub struct Engine {
    cache: Arc<Cache>,
    directory: File,
    path: PathBuf,
    read_only: bool,
    /// Never held over a call on a file: attributes of every image are found through it.
    registry: Mutex<HashMap<FileKey, Arc<Slot>>>,
    fingerprints: Option<FingerprintDir>,
    ahead: Ahead,
    stop: AtomicBool,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    started: Instant,
}

/// An image the engine knows, and who has it open.
struct Slot {
    image: Arc<Image>,
    handles: AtomicUsize,
    unlinked: AtomicBool,
    /// Held while the image gets its file, and what is known about it.
    opening: Mutex<()>,
}

/// Requests to read ahead: few, because a late one is worth nothing.
#[derive(Default)]
struct Ahead {
    queue: Mutex<VecDeque<(Arc<Image>, Range<u64>)>>,
    signal: Condvar,
}

const AHEAD_QUEUE_MAX: usize = 64;
/// How often the engine looks for changed, closed and unused images.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// An image that could not be written back when the engine stopped.
#[derive(Debug)]
pub struct Unwritten {
    /// Its name.
    pub name: String,
    /// Bytes that are lost.
    pub bytes: u64,
    /// What the disk said.
    pub error: io::Error,
}

impl Engine {
    /// Starts an engine for `directory`, with its background threads.
    ///
    /// # Errors
    /// The directory cannot be opened, the fingerprints cannot be kept where they should be, or memory is short.
    pub fn start(
        directory: &Path,
        mut config: Config,
        fingerprints: Option<&Path>,
        read_only: bool,
    ) -> io::Result<Arc<Self>> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let handle = File::from(rustix::fs::open(directory, flags, rustix::fs::Mode::empty())?);
        let open = |path: &Path| {
            let told =
                |error: io::Error| io::Error::new(error.kind(), format!("--fingerprints {}: {error}", path.display()));
            FingerprintDir::open(path).map_err(told)
        };
        let fingerprints = fingerprints.map(open).transpose()?;
        if let Some(store) = &fingerprints {
            config.key = FingerprintKey::Strong(store.key());
        }
        let engine = Arc::new(Self {
            cache: Arc::new(Cache::new(config)?),
            directory: handle,
            path: directory.canonicalize().unwrap_or_else(|_| directory.to_owned()),
            read_only,
            registry: Mutex::default(),
            fingerprints,
            ahead: Ahead::default(),
            stop: AtomicBool::new(false),
            threads: Mutex::default(),
            started: Instant::now(),
        });
        engine.spawn("flusher", |engine| engine.run_flusher())?;
        for n in 0..engine.cache.config().workers {
            engine.spawn(&format!("ahead-{n}"), |engine| engine.run_ahead())?;
        }
        Ok(engine)
    }

    fn spawn(self: &Arc<Self>, name: &str, run: impl FnOnce(&Self) + Send + 'static) -> io::Result<()> {
        let engine = self.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&engine))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The directory's handle.
    pub fn directory(&self) -> &File {
        &self.directory
    }

    /// Where the last name of `path` lies.
    pub(crate) fn place<'a>(&'a self, path: &'a Path) -> io::Result<Place<'a>> {
        Place::find(&self.directory, path)
    }

    /// The file or link that has the name `path` now, for what acts on the very file.
    pub(crate) fn named(&self, path: &Path) -> io::Result<OwnedFd> {
        Ok(open_beneath(&self.directory, path, OFlags::PATH | OFlags::NOFOLLOW)?)
    }

    /// Whether nothing may be changed.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Opens the image at `path` below the directory.
    ///
    /// # Errors
    /// As `open(2)`; `EBUSY` for writing to a file that another cache writes to.
    pub fn open(self: &Arc<Self>, path: &Path, writable: bool) -> io::Result<Handle> {
        if writable && self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let file = match HostFile::open(&self.directory, path, !self.read_only) {
            // Not ours to write: readers are welcome all the same.
            Err(error) if !writable && is_refusal(&error) => HostFile::open(&self.directory, path, false)?,
            other => other?,
        };
        self.hold(path, file, writable)
    }

    /// Makes the file at `path` an image, or gives it to the image it is already.
    ///
    /// # Errors
    /// The file cannot be looked at, or another cache writes to it.
    pub(crate) fn hold(self: &Arc<Self>, path: &Path, file: HostFile, writable: bool) -> io::Result<Handle> {
        self.take_in(path, file, writable)?.claimed()
    }

    /// Opens an image that somebody has open, whatever became of its name.
    ///
    /// # Errors
    /// `ESTALE` if nobody has; else as [`Engine::open`].
    pub(crate) fn open_again(self: &Arc<Self>, key: FileKey, writable: bool) -> io::Result<Handle> {
        if writable && self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let registry = self.registry.lock();
        let slot = registry.get(&key).filter(|slot| slot.image.has_file()).cloned();
        let slot = slot.ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))?;
        slot.handles.fetch_add(1, Ordering::AcqRel);
        drop(registry);
        let handle = Handle::new(self.clone(), slot, writable);
        // Not before what is known about it is there.
        drop(handle.slot.opening.lock());
        handle.claimed()
    }

    fn take_in(self: &Arc<Self>, path: &Path, file: HostFile, writable: bool) -> io::Result<Handle> {
        let stamp = file.stamp()?;
        let key = (stamp.dev, stamp.ino);
        let mut registry = self.registry.lock();
        if let Some(slot) = registry.get(&key).cloned() {
            // Counted before the registry is let go: housekeeping leaves its file alone from here on.
            slot.handles.fetch_add(1, Ordering::AcqRel);
            drop(registry);
            let handle = Handle::new(self.clone(), slot, writable);
            let opening = handle.slot.opening.lock();
            self.reopen(handle.image(), file, stamp)?;
            drop(opening);
            return Ok(handle);
        }
        let image = self.cache.add_image_at(&path.to_string_lossy(), Arc::new(file), stamp);
        let slot = Arc::new(Slot {
            image,
            handles: AtomicUsize::new(1),
            unlinked: AtomicBool::new(false),
            opening: Mutex::new(()),
        });
        // Whoever comes second waits for what is known about the image, and nobody else does.
        let opening = slot.opening.lock();
        registry.insert(key, slot.clone());
        drop(registry);
        if let Some(store) = &self.fingerprints {
            self.cache.load_fingerprints(&slot.image, store);
        }
        drop(opening);
        Ok(Handle::new(self.clone(), slot, writable))
    }

    /// Gives an image that is in the cache already its file back, and notes whether that changed in between.
    fn reopen(&self, image: &Image, file: HostFile, stamp: Stamp) -> io::Result<()> {
        let better = image.file().map_or(true, |there| file.writable() && !there.writable());
        if better {
            image.set_file(Some(Arc::new(file)));
        }
        if let Some(known) = image.known.try_lock()
            && *known != stamp
        {
            image.changed.store(true, Ordering::Release);
        }
        self.cache.accept_change(image).map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    /// The image behind a file of the host, if it is open.
    pub(crate) fn opened(&self, key: FileKey) -> Option<Arc<Image>> {
        self.cached(key).filter(|image| image.has_file())
    }

    /// The image behind a file of the host, if blocks of it may be in the cache.
    pub(crate) fn cached(&self, key: FileKey) -> Option<Arc<Image>> {
        self.registry.lock().get(&key).map(|slot| slot.image.clone())
    }

    /// Runs an operation that changes attributes or names of `file`, so that it is not taken for somebody else's.
    pub(crate) fn change<R>(&self, file: impl AsFd, change: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        match self.cached(key_of(&file)?) {
            Some(image) => image.change_noted(|| stamp_of(&file), change),
            None => change(),
        }
    }

    /// As [`Engine::change`], of two files.
    pub(crate) fn change_both<R>(
        &self,
        one: impl AsFd,
        other: impl AsFd,
        change: impl FnOnce() -> io::Result<R>,
    ) -> io::Result<R> {
        let (mut first, mut second) = (one.as_fd(), other.as_fd());
        // In one order: each waits for who changes the image.
        let keys = (key_of(first)?, key_of(second)?);
        if keys.0 == keys.1 {
            return self.change(first, change);
        }
        if keys.0 > keys.1 {
            std::mem::swap(&mut first, &mut second);
        }
        self.change(first, || self.change(second, change))
    }

    /// Notes that the last name of a file is gone: its blocks go with the last handle.
    pub(crate) fn unlinked(&self, key: FileKey) {
        let mut registry = self.registry.lock();
        let Some(slot) = registry.get(&key) else { return };
        slot.unlinked.store(true, Ordering::Release);
        if slot.handles.load(Ordering::Acquire) == 0
            && let Some(slot) = registry.remove(&key)
        {
            drop(registry);
            self.cache.discard_image(&slot.image);
        }
    }

    fn closed(&self, slot: &Arc<Slot>) {
        let mut registry = self.registry.lock();
        if slot.handles.fetch_sub(1, Ordering::AcqRel) == 1 && slot.unlinked.load(Ordering::Acquire) {
            registry.retain(|_, other| !Arc::ptr_eq(other, slot));
            drop(registry);
            self.cache.discard_image(&slot.image);
        }
    }

    /// What the cache holds and saves now.
    pub fn status(&self) -> Status {
        let mut status = self.cache.status();
        status.directory = self.path.display().to_string();
        status.pid = std::process::id();
        status.uptime_s = self.started.elapsed().as_secs();
        let open: std::collections::HashSet<String> = {
            let registry = self.registry.lock();
            let open = registry.values().filter(|slot| slot.handles.load(Ordering::Relaxed) > 0);
            open.map(|slot| slot.image.name()).collect()
        };
        for image in &mut status.images {
            image.open = open.contains(&image.name);
        }
        status
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// The first of the disks', those included that nobody was told about yet.
    pub fn sync_all(&self) -> io::Result<()> {
        let mut result = Ok(());
        for image in self.cache.images() {
            let mut seen = image.errors.start();
            if image.has_file() {
                self.cache.sync(&image, 0..u64::MAX);
            }
            if let Some(error) = image.errors.take(&mut seen) {
                result = result.and(Err(error));
            }
        }
        result
    }

    /// Stops the threads, writes everything back and keeps the fingerprints. Returns what could not be written.
    pub fn shut_down(&self) -> Vec<Unwritten> {
        self.stop.store(true, Ordering::Release);
        self.cache.want_flush();
        {
            // Taken so that no worker is between its look at `stop` and its wait.
            let _queue = self.ahead.queue.lock();
            self.ahead.signal.notify_all();
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // A thread that panicked has said so; the images matter more now.
            let _ = thread.join();
        }
        // What were written behind the sync below would be lost without a word.
        self.cache.end();
        let mut unwritten = Vec::new();
        for image in self.cache.images().into_iter().filter(|image| image.has_file()) {
            let mut seen = image.errors.count();
            if !self.cache.sync(&image, 0..u64::MAX)
                && let Some(error) = image.errors.take(&mut seen)
            {
                unwritten.push(Unwritten { name: image.name(), bytes: image.dirty_bytes(), error });
            } else if let Some(store) = &self.fingerprints {
                // Losing them costs reads, nothing else.
                let _ = self.cache.save_fingerprints(&image, store);
            }
        }
        if !self.read_only {
            // Images closed earlier were written back and not synced; nothing was promised, and it costs little now.
            let _ = rustix::fs::syncfs(&self.directory);
        }
        unwritten
    }

    fn run_flusher(&self) {
        let interval = self.cache.config().flush_interval;
        let mut flushed = Instant::now();
        let mut looked = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let wanted = self.cache.wait_for_flush(interval.min(HOUSEKEEPING));
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if wanted || flushed.elapsed() >= interval {
                self.cache.flush_tick();
                flushed = Instant::now();
            }
            if looked.elapsed() >= HOUSEKEEPING {
                self.housekeeping();
                looked = Instant::now();
            }
        }
    }

    /// Looks for images somebody else changed, syncs and closes files nobody uses, forgets images without blocks.
    fn housekeeping(&self) {
        self.cache.cool();
        let slots: Vec<(FileKey, Arc<Slot>)> = self.registry.lock().iter().map(|(k, s)| (*k, s.clone())).collect();
        for (key, slot) in slots {
            let image = &slot.image;
            if image.has_file() && self.cache.look_behind(image) {
                // The next request would do it; an idle image should not keep stale blocks either.
                let _ = self.cache.accept_change(image);
            }
            let zeros_too = image.chunk_count() > self.cache.config().frame_count() / 16;
            image.sweep(zeros_too);
            let unused = || slot.handles.load(Ordering::Acquire) == 0 && image.dirty_bytes() == 0;
            if !unused() {
                continue;
            }
            if image.has_file() {
                // Without its file nobody can sync it any more. What the disk refuses now is tried again.
                if !self.cache.sync(image, 0..u64::MAX) {
                    continue;
                }
                if let Some(store) = &self.fingerprints {
                    let _ = self.cache.save_fingerprints(image, store);
                }
            }
            let mut registry = self.registry.lock();
            // Somebody may have opened it meanwhile, changed it and closed it again: the next turn syncs that.
            if !unused() || image.has_file() && image.unsynced.load(Ordering::Acquire) {
                continue;
            }
            let file = image.set_file(None);
            if let Some(file) = &file {
                // Before somebody opens the image again: the file may take long to close.
                file.release();
            }
            let gone = image.chunk_count() == 0 && registry.remove(&key).is_some();
            drop(registry);
            // Closing may wait for the disk.
            drop(file);
            if gone {
                self.cache.discard_image(image);
            }
        }
    }

    fn run_ahead(&self) {
        loop {
            let task = {
                let mut queue = self.ahead.queue.lock();
                loop {
                    if self.stop.load(Ordering::Acquire) {
                        return;
                    }
                    match queue.pop_front() {
                        Some(task) => break task,
                        None => self.ahead.signal.wait(&mut queue),
                    }
                }
            };
            self.cache.read_ahead(&task.0, task.1);
        }
    }

    fn want_ahead(&self, image: &Arc<Image>, range: Range<u64>) {
        let mut queue = self.ahead.queue.lock();
        if queue.len() < AHEAD_QUEUE_MAX {
            queue.push_back((image.clone(), range));
            self.ahead.signal.notify_one();
        }
    }
}

/// Whether an open for writing was refused in a way that may still allow reading.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY))
}

/// An open image.
pub struct Handle {
    engine: Arc<Engine>,
    slot: Arc<Slot>,
    writable: bool,
    /// How many of the image's writeback errors this handle was told.
    errors_seen: Mutex<u64>,
    sequence: Mutex<Sequence>,
}

/// Whether reads come in sequence, and how far ahead we are.
#[derive(Default)]
struct Sequence {
    next: u64,
    window: u64,
    ahead_until: u64,
}

/// First window of a sequential reader, in bytes; it doubles up to the setting.
const WINDOW_FIRST: u64 = 256 << 10;
/// Requests of one reader may overtake each other by this many bytes and still be in sequence.
const SEQUENCE_SLACK: u64 = 1 << 20;

impl Sequence {
    /// Notes a read and returns what to read ahead.
    fn note(&mut self, offset: u64, length: u64, window_max: u64) -> Option<Range<u64>> {
        let end = offset + length;
        let in_sequence = offset.abs_diff(self.next) <= if self.window > 0 { SEQUENCE_SLACK } else { 0 };
        if !in_sequence {
            *self = Self { next: end, ..Self::default() };
            return None;
        }
        self.next = self.next.max(end);
        if self.window == 0 {
            self.window = WINDOW_FIRST.min(window_max);
        }
        let from = self.ahead_until.max(self.next);
        if self.window == 0 || from > self.next + self.window / 2 {
            return None;
        }
        let until = self.next + self.window;
        self.window = (self.window * 2).min(window_max);
        self.ahead_until = until;
        (from < until).then_some(from..until)
    }
}

impl Handle {
    fn new(engine: Arc<Engine>, slot: Arc<Slot>, writable: bool) -> Self {
        let errors_seen = Mutex::new(slot.image.errors.start());
        Self { engine, slot, writable, errors_seen, sequence: Mutex::default() }
    }

    /// Takes the file for writing, if this handle writes.
    fn claimed(self) -> io::Result<Self> {
        if self.writable {
            let file = self.image().file()?;
            if !file.writable() {
                return Err(io::Error::from_raw_os_error(libc::EACCES));
            }
            file.claim()?;
        }
        Ok(self)
    }

    /// The image.
    pub fn image(&self) -> &Arc<Image> {
        &self.slot.image
    }

    /// Whether writing is allowed.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// As [`Cache::read`], with read-ahead for readers in sequence.
    ///
    /// # Errors
    /// As [`Cache::read`].
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.note_read(offset, buffer.len());
        self.engine.cache.read(self.image(), offset, buffer)
    }

    /// Reads `length` bytes and gives them to `give`: as they lie in the cache where they are one piece, else through
    /// `buffer`. `give` must not wait for other requests.
    ///
    /// # Errors
    /// As [`Cache::read`]; `give` was not called then.
    pub(crate) fn read_with<R>(
        &self,
        offset: u64,
        length: usize,
        buffer: &mut Vec<u8>,
        give: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        self.note_read(offset, length);
        let give = match self.engine.cache.read_in_place(self.image(), offset, length, give) {
            Ok(done) => return Ok(done),
            Err(give) => give,
        };
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let count = self.engine.cache.read(self.image(), offset, &mut buffer[..length])?;
        Ok(give(&buffer[..count]))
    }

    /// Notes a read and sends workers ahead of a reader in sequence.
    fn note_read(&self, offset: u64, length: usize) {
        let cache = &self.engine.cache;
        let window_max = cache.config().read_ahead_bytes as u64;
        let ahead = self.sequence.lock().note(offset, length as u64, window_max);
        if let Some(range) = ahead
            && range.start < self.image().size()
            // What is in memory already needs no worker woken for it.
            && cache.has_absent(self.image(), range.clone())
        {
            self.engine.want_ahead(self.image(), range);
        }
    }

    /// As [`Cache::write`].
    ///
    /// # Errors
    /// As [`Cache::write`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.check_writable()?;
        self.engine.cache.write(self.image(), offset, data)
    }

    /// As [`Cache::set_size`].
    ///
    /// # Errors
    /// As [`Cache::set_size`].
    pub fn set_size(&self, size: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.engine.cache.set_size(self.image(), size)
    }

    /// As [`Cache::punch`].
    ///
    /// # Errors
    /// As [`Cache::punch`].
    pub fn punch(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.engine.cache.punch(self.image(), offset, length)
    }

    /// As [`Cache::zero`].
    ///
    /// # Errors
    /// As [`Cache::zero`].
    pub fn zero(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.engine.cache.zero(self.image(), offset, length)
    }

    /// As [`Cache::reserve`].
    ///
    /// # Errors
    /// As [`Cache::reserve`].
    pub fn reserve(&self, offset: u64, length: u64, keep_size: bool) -> Result<(), Error> {
        self.check_writable()?;
        self.engine.cache.reserve(self.image(), offset, length, keep_size)
    }

    /// As [`Cache::seek`].
    ///
    /// # Errors
    /// As [`Cache::seek`].
    pub fn seek(&self, offset: u64, data: bool) -> Result<u64, Error> {
        self.engine.cache.seek(self.image(), offset, data)
    }

    fn check_writable(&self) -> Result<(), Error> {
        if self.writable { Ok(()) } else { Err(Error::ReadOnly) }
    }

    /// Makes everything written to the image durable.
    ///
    /// # Errors
    /// What the disk refused since this handle last asked, once, and what it refuses now.
    pub fn sync(&self) -> io::Result<()> {
        self.sync_range(0..u64::MAX, false)
    }

    /// As [`Handle::sync`] for the bytes of `range`; with `attributes`, mode, owner and times too.
    ///
    /// # Errors
    /// As [`Handle::sync`].
    pub fn sync_range(&self, range: Range<u64>, attributes: bool) -> io::Result<()> {
        let block = BLOCK_BYTES as u64;
        let blocks = range.start / block..range.end.div_ceil(block);
        let synced = self.engine.cache.sync_with(self.image(), blocks, attributes);
        let errors = &self.image().errors;
        match errors.take(&mut self.errors_seen.lock()) {
            // Another request of this handle was told meanwhile, and this one is not durable either.
            None if !synced => Err(errors.last()),
            told => told.map_or(Ok(()), Err),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.engine.closed(&self.slot);
    }
}

/// Which file a descriptor stands for.
pub(crate) fn key_of(file: impl AsFd) -> io::Result<FileKey> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// What `path` below `directory` is now.
pub(crate) fn stat(directory: &File, path: &Path) -> io::Result<rustix::fs::Stat> {
    let place = Place::find(directory, path)?;
    Ok(rustix::fs::statat(place.parent(), place.name, AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_takes_long_to_open_holds_up_nobody_but_its_own_openers() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (images, kept) = (dir.path().join("images"), dir.path().join("fp"));
        std::fs::create_dir(&images).unwrap();
        std::fs::write(images.join("a"), [1; 4096]).unwrap();
        std::fs::write(images.join("b"), [1; 4096]).unwrap();
        let engine = Engine::start(&images, Config::default(), Some(&kept), false).unwrap();
        // A pipe in the place of a's fingerprints keeps its reader waiting for a writer.
        let metadata = images.join("a").metadata().unwrap();
        let pipe = FingerprintDir::open(&kept).unwrap().file_of(metadata.ino());
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
        let open = |name: &'static str| {
            let engine = engine.clone();
            std::thread::spawn(move || engine.open(Path::new(name), true).unwrap())
        };
        let (done, result) = std::sync::mpsc::channel();
        let (first, others) = (open("a"), engine.clone());
        std::thread::spawn(move || {
            while others.opened((metadata.dev(), metadata.ino())).is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = others.open(Path::new("b"), true).unwrap();
            let _ = others.status();
            done.send(()).unwrap();
        });
        result.recv_timeout(Duration::from_secs(120)).expect("others wait for a's fingerprints");
        let second = open("a");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished(), "a is not used before what is known about it is there");
        drop(File::options().write(true).open(pipe).unwrap());
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        assert!(Arc::ptr_eq(first.image(), second.image()));
        assert!(first.image().fingerprints.lock().is_some());
        drop((first, second));
        assert!(engine.shut_down().is_empty());
    }

    /// Whose directories overlap, or have names of the same files.
    #[test]
    fn an_image_has_the_writers_of_one_cache_and_readers_of_any() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let sub = dir.path().join("sub");
        std::fs::create_dir(&sub).unwrap();
        std::fs::write(sub.join("x"), [1; 4096]).unwrap();
        let start = |directory: &Path| Engine::start(directory, Config::default(), None, false).unwrap();
        let (outer, inner) = (start(dir.path()), start(&sub));
        let (long, short) = (Path::new("sub/x"), Path::new("x"));
        let reader = inner.open(short, false).unwrap();
        let writers = [outer.open(long, true).unwrap(), outer.open(long, true).unwrap()];
        let refused = |engine: &Arc<Engine>, path| engine.open(path, true).err().and_then(|error| error.raw_os_error());
        assert_eq!(refused(&inner, short), Some(libc::EBUSY));
        assert_eq!(reader.read(0, &mut [0; 4096]).unwrap(), 4096);
        writers[0].write(0, &[2; 512]).unwrap();
        drop(writers);
        // With unwritten blocks the file is not let go.
        let began = Instant::now();
        while let Some(errno) = refused(&inner, short) {
            assert_eq!(errno, libc::EBUSY);
            assert!(began.elapsed() < Duration::from_secs(120), "a closed image is never let go");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(std::fs::read(sub.join("x")).unwrap()[..513], [[2; 512].as_slice(), &[1]].concat());
        let writer = inner.open(short, true).unwrap();
        assert_eq!(refused(&outer, long), Some(libc::EBUSY));
        drop((reader, writer));
        assert!(outer.shut_down().is_empty() && inner.shut_down().is_empty());
    }

    #[test]
    fn a_change_while_an_image_is_being_closed_is_synced_first() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (images, kept) = (dir.path().join("images"), dir.path().join("fp"));
        std::fs::create_dir(&images).unwrap();
        std::fs::write(images.join("a"), [1; 4096]).unwrap();
        // A pipe in the place of the new fingerprints keeps who closes the image waiting for a reader.
        let number = images.join("a").metadata().unwrap().ino();
        let pipe = FingerprintDir::open(&kept).unwrap().file_of(number).with_extension("new");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
        let engine = Engine::start(&images, Config::default(), Some(&kept), false).unwrap();
        let handle = engine.open(Path::new("a"), true).unwrap();
        let image = handle.image().clone();
        handle.read(0, &mut [0; 4096]).unwrap();
        drop(handle);
        let began = Instant::now();
        let wait = |done: &dyn Fn() -> bool| {
            while !done() {
                assert!(began.elapsed() < Duration::from_secs(120), "the image is never closed");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait(&|| !image.unsynced.load(Ordering::Acquire));
        // Past the look whether there is something to sync.
        std::thread::sleep(Duration::from_millis(200));
        engine.open(Path::new("a"), true).unwrap().set_size(8192).unwrap();
        let mut reader = File::open(&pipe).unwrap();
        std::fs::remove_file(&pipe).unwrap();
        io::copy(&mut reader, &mut io::sink()).unwrap();
        wait(&|| !image.has_file());
        assert!(!image.unsynced.load(Ordering::Acquire), "closed, and nobody will sync it");
        assert!(engine.shut_down().is_empty());
    }

    #[test]
    fn what_a_mount_takes_while_it_ends_is_written_and_the_rest_is_refused() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(dir.path().join("a"), [0; 64 << 10]).unwrap();
        let engine = Engine::start(dir.path(), Config::default(), None, false).unwrap();
        let writer = |n: u64| {
            let handle = engine.open(Path::new("a"), true).unwrap();
            std::thread::spawn(move || {
                let refused = |what: Result<(), Error>| matches!(what, Err(Error::Ended));
                let (began, mut taken) = (Instant::now(), 0u64);
                while handle.write(n * 4096, &(taken + 1).to_le_bytes()).is_ok() {
                    taken += 1;
                    assert!(began.elapsed() < Duration::from_secs(60), "writes are taken for ever");
                }
                assert!(refused(handle.write(n * 4096, &[1; 8])));
                assert!(refused(handle.write(1 << 20, &[1; 8])), "one that grows");
                assert!(refused(handle.set_size(7)));
                assert!(refused(handle.punch(0, 8192)));
                assert!(refused(handle.reserve(0, 1 << 20, false)));
                taken
            })
        };
        let writers: Vec<_> = (0..2).map(writer).collect();
        std::thread::sleep(Duration::from_millis(50));
        assert!(engine.shut_down().is_empty());
        let taken: Vec<u64> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        let bytes = std::fs::read(dir.path().join("a")).unwrap();
        let written = |n: usize| u64::from_le_bytes(bytes[n * 4096..][..8].try_into().unwrap());
        assert_eq!([written(0), written(1)], [taken[0], taken[1]]);
        assert_eq!(bytes.len(), 64 << 10);
    }

    /// As the requests of one NBD connection, or of one open file: an error is told to one of them only.
    #[test]
    fn no_sync_that_failed_succeeds_because_another_one_was_told() {
        use crate::sim::{Faults, SimFile};
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let engine = Engine::start(dir.path(), Config::default(), None, false).unwrap();
        let file = Arc::new(SimFile::new(vec![0; 1 << 20]));
        let image = engine.cache.add_image("x", file.clone()).unwrap();
        let slot =
            Slot { image, handles: AtomicUsize::new(1), unlinked: AtomicBool::new(false), opening: Mutex::new(()) };
        let handle = Handle::new(engine.clone(), Arc::new(slot), true);
        file.set_faults(Faults { write: Some(libc::EIO), ..Faults::default() });
        std::thread::scope(|scope| {
            // Both have been refused before either is told.
            let telling = handle.errors_seen.lock();
            let sync = |n: u64| {
                let handle = &handle;
                handle.write(n * 4096, &[1; 4096]).unwrap();
                scope.spawn(move || handle.sync_range(n * 4096..(n + 1) * 4096, false))
            };
            let syncs = [sync(0), sync(7)];
            let began = Instant::now();
            while handle.image().errors.count() < 2 {
                assert!(began.elapsed() < Duration::from_secs(120), "the disk refuses nothing");
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(telling);
            for sync in syncs {
                let said = sync.join().unwrap();
                assert_eq!(said.err().and_then(|error| error.raw_os_error()), Some(libc::EIO));
            }
        });
        file.set_faults(Faults::default());
        handle.sync().unwrap();
        drop(handle);
        assert!(engine.shut_down().is_empty());
    }

    #[test]
    fn a_reader_in_sequence_is_kept_ahead_of_and_a_random_one_is_not() {
        let mut sequence = Sequence::default();
        let mut covered = 0;
        for n in 0..200 {
            if let Some(range) = sequence.note(n * 4096, 4096, 2 << 20) {
                assert_eq!(range.start, covered.max((n + 1) * 4096), "no gap, nothing twice");
                covered = range.end;
            }
            assert!(covered >= (n + 2) * 4096, "the next read is covered");
        }
        assert!(covered <= 200 * 4096 + (2 << 20));
        let mut random = Sequence::default();
        for n in [5u64, 900, 3, 77, 12345] {
            assert_eq!(random.note(n * 4096, 4096, 2 << 20), None);
        }
        assert_eq!(Sequence::default().note(0, 4096, 0), None, "off");
    }
}
