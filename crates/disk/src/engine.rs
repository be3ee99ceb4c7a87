//! The engine: the images of one directory, open files on them, and the background threads. Both front ends use it.

use crate::cache::Cache;
use crate::config::Config;
use crate::error::LostData;
use crate::file::{EntryName, FileKey, HostFile, key_of, open_beneath, stamp_of};
use crate::fingerprint::FingerprintKey;
use crate::fingerprint_file::FingerprintDir;
use crate::handle::Handle;
use crate::housekeeping;
use crate::image::Image;
use crate::open_images::{ImageRef, OpenImages};
use crate::read_ahead::ReadAhead;
use crate::stats::Status;
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Serves the images below one directory.
pub struct Engine {
    cache: Arc<Cache>,
    images: Arc<OpenImages>,
    read_ahead: Arc<ReadAhead>,
    directory: File,
    path: PathBuf,
    read_only: bool,
    stop: AtomicBool,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    started: Instant,
}

impl Engine {
    /// Starts an engine for `directory`, with its background threads.
    ///
    /// # Errors
    /// The directory cannot be opened, the fingerprint directory cannot be used, or memory is short.
    pub fn start(
        directory: &Path,
        mut config: Config,
        fingerprints: Option<&Path>,
        read_only: bool,
    ) -> io::Result<Arc<Self>> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let handle = File::from(rustix::fs::open(directory, flags, rustix::fs::Mode::empty())?);
        let open = |path: &Path| {
            let with_option =
                |error: io::Error| io::Error::new(error.kind(), format!("--fingerprints {}: {error}", path.display()));
            FingerprintDir::open(path).map_err(with_option)
        };
        let fingerprints = fingerprints.map(open).transpose()?;
        if let Some(directory) = &fingerprints {
            config.key = FingerprintKey::Strong(directory.key());
        }
        let cache = Arc::new(Cache::new(config)?);
        let engine = Arc::new(Self {
            images: Arc::new(OpenImages::new(cache.clone(), fingerprints)),
            cache,
            read_ahead: Arc::default(),
            directory: handle,
            path: directory.canonicalize().unwrap_or_else(|_| directory.to_owned()),
            read_only,
            stop: AtomicBool::new(false),
            threads: Mutex::default(),
            started: Instant::now(),
        });
        engine.spawn("flusher", |engine| housekeeping::run_flusher(&engine.images, &engine.stop))?;
        for n in 0..engine.cache.config().workers {
            engine.spawn(&format!("ahead-{n}"), |engine| engine.read_ahead.run_worker(&engine.cache))?;
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

    /// The directory's descriptor.
    pub fn directory(&self) -> &File {
        &self.directory
    }

    /// Finds the directory of `path` and the last name in it.
    pub(crate) fn entry_name<'a>(&'a self, path: &'a Path) -> io::Result<EntryName<'a>> {
        EntryName::resolve(&self.directory, path)
    }

    /// Opens the file or link that has the name `path` now, without following it, for calls that act on that very file.
    pub(crate) fn open_path(&self, path: &Path) -> io::Result<OwnedFd> {
        Ok(open_beneath(&self.directory, path, OFlags::PATH | OFlags::NOFOLLOW)?)
    }

    /// Whether every change is refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Opens the image at `path` below the directory.
    ///
    /// # Errors
    /// As `open(2)`; `EBUSY` for writing to a file that another cache writes to.
    pub fn open(&self, path: &Path, writable: bool) -> io::Result<Handle> {
        self.check_writable(writable)?;
        let file = match HostFile::open(&self.directory, path, !self.read_only) {
            // This process may not write to it; a reader can still have it.
            Err(error) if !writable && is_refusal(&error) => HostFile::open(&self.directory, path, false)?,
            other => other?,
        };
        self.open_file(path, file, writable)
    }

    /// Opens the image of `file`, which lies at `path`.
    ///
    /// # Errors
    /// The file's version cannot be read, or another cache writes to it.
    pub(crate) fn open_file(&self, path: &Path, file: HostFile, writable: bool) -> io::Result<Handle> {
        self.handle(self.images.open(path, file)?, writable)
    }

    /// Opens an image that a client has open, whatever happened to its name.
    ///
    /// # Errors
    /// `ESTALE` if no client has it open; else as [`Engine::open`].
    pub(crate) fn open_by_key(&self, key: FileKey, writable: bool) -> io::Result<Handle> {
        self.check_writable(writable)?;
        self.handle(self.images.open_by_key(key)?, writable)
    }

    fn check_writable(&self, writable: bool) -> io::Result<()> {
        if writable && self.read_only { Err(io::Error::from_raw_os_error(libc::EROFS)) } else { Ok(()) }
    }

    fn handle(&self, image: ImageRef, writable: bool) -> io::Result<Handle> {
        Handle::new(image, self.read_ahead.clone(), writable)
    }

    /// As [`OpenImages::open_image`].
    pub(crate) fn open_image(&self, key: FileKey) -> Option<Arc<Image>> {
        self.images.open_image(key)
    }

    /// As [`OpenImages::cached_image`].
    pub(crate) fn cached_image(&self, key: FileKey) -> Option<Arc<Image>> {
        self.images.cached_image(key)
    }

    /// As [`OpenImages::note_unlinked`].
    pub(crate) fn note_unlinked(&self, key: FileKey) {
        self.images.note_unlinked(key);
    }

    /// Runs a change of attributes or names of `file`, and keeps it from looking like another program's change.
    pub(crate) fn change_metadata<R>(&self, file: impl AsFd, change: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        match self.cached_image(key_of(&file)?) {
            Some(image) => image.change_metadata(|| stamp_of(&file), change),
            None => change(),
        }
    }

    /// As [`Engine::change_metadata`], for a change that concerns two files.
    pub(crate) fn change_metadata_of_two<R>(
        &self,
        one: impl AsFd,
        other: impl AsFd,
        change: impl FnOnce() -> io::Result<R>,
    ) -> io::Result<R> {
        let (mut first, mut second) = (one.as_fd(), other.as_fd());
        // Always in the order of the keys: each of the two waits for a thread that changes the image.
        let keys = (key_of(first)?, key_of(second)?);
        if keys.0 == keys.1 {
            return self.change_metadata(first, change);
        }
        if keys.0 > keys.1 {
            std::mem::swap(&mut first, &mut second);
        }
        self.change_metadata(first, || self.change_metadata(second, change))
    }

    /// What the cache holds and saves now.
    pub fn status(&self) -> Status {
        let mut status = self.cache.status();
        status.directory = self.path.display().to_string();
        status.pid = std::process::id();
        status.uptime_s = self.started.elapsed().as_secs();
        let in_use = self.images.names_in_use();
        for image in &mut status.images {
            image.open = in_use.contains(&image.name);
        }
        status
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// The first error of a disk, earlier unreported ones included.
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

    /// Stops the threads, writes everything back and saves the fingerprints. Returns what could not be written.
    pub fn shut_down(&self) -> Vec<LostData> {
        self.stop.store(true, Ordering::Release);
        self.cache.request_flush();
        self.read_ahead.stop();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // A thread that panicked has reported it; the images matter more now.
            let _ = thread.join();
        }
        // A write accepted after the sync below would be lost without a report.
        self.cache.refuse_changes();
        let mut unwritten = Vec::new();
        for image in self.cache.images().into_iter().filter(|image| image.has_file()) {
            let mut seen = image.errors.count();
            if !self.cache.sync(&image, 0..u64::MAX)
                && let Some(error) = image.errors.take(&mut seen)
            {
                let error = error.to_string();
                unwritten.push(LostData { name: image.name(), bytes: image.dirty_bytes(), error });
            } else if let Some(directory) = &self.images.fingerprints {
                // Losing them costs reads, nothing else.
                let _ = self.cache.save_fingerprints(&image, directory);
            }
        }
        if !self.read_only {
            // Covers names and attributes, which no image's sync covers. Nothing was promised for them; it costs little.
            let _ = rustix::fs::syncfs(&self.directory);
        }
        unwritten
    }
}

/// Returns true if an open for writing was refused in a way that may still allow reading.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::open_images::OpenImage;
    use std::time::Duration;

    #[test]
    fn a_slow_open_of_one_image_does_not_delay_other_images() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (images, kept) = (dir.path().join("images"), dir.path().join("fp"));
        std::fs::create_dir(&images).unwrap();
        std::fs::write(images.join("a"), [1; 4096]).unwrap();
        std::fs::write(images.join("b"), [1; 4096]).unwrap();
        let engine = Engine::start(&images, Config::default(), Some(&kept), false).unwrap();
        // A pipe in place of a's fingerprint file keeps its reader waiting for a writer.
        let metadata = images.join("a").metadata().unwrap();
        let pipe = FingerprintDir::open(&kept).unwrap().file_path(metadata.ino());
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
        let open = |name: &'static str| {
            let engine = engine.clone();
            std::thread::spawn(move || engine.open(Path::new(name), true).unwrap())
        };
        let (done, result) = std::sync::mpsc::channel();
        let (first, others) = (open("a"), engine.clone());
        std::thread::spawn(move || {
            while others.open_image((metadata.dev(), metadata.ino())).is_none() {
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

    /// Two engines with overlapping directories, so that both see the same file.
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
        // The file stays claimed while the image has unwritten blocks.
        let began = Instant::now();
        while let Some(errno) = refused(&inner, short) {
            assert_eq!(errno, libc::EBUSY);
            assert!(began.elapsed() < Duration::from_secs(120), "the claim of a closed image is never released");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(std::fs::read(sub.join("x")).unwrap()[..513], [[2; 512].as_slice(), &[1]].concat());
        let writer = inner.open(short, true).unwrap();
        assert_eq!(refused(&outer, long), Some(libc::EBUSY));
        drop((reader, writer));
        assert!(outer.shut_down().is_empty() && inner.shut_down().is_empty());
    }

    #[test]
    fn a_change_during_the_close_of_an_image_is_synced_before_its_file_is_closed() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (images, kept) = (dir.path().join("images"), dir.path().join("fp"));
        std::fs::create_dir(&images).unwrap();
        std::fs::write(images.join("a"), [1; 4096]).unwrap();
        // A pipe in place of the new fingerprint file keeps the closing thread waiting for a reader.
        let number = images.join("a").metadata().unwrap().ino();
        let pipe = FingerprintDir::open(&kept).unwrap().file_path(number).with_extension("new");
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
        // Long enough for the flusher to pass its check for something to sync.
        std::thread::sleep(Duration::from_millis(200));
        engine.open(Path::new("a"), true).unwrap().set_size(8192).unwrap();
        let mut reader = File::open(&pipe).unwrap();
        std::fs::remove_file(&pipe).unwrap();
        io::copy(&mut reader, &mut io::sink()).unwrap();
        wait(&|| !image.has_file());
        assert!(!image.unsynced.load(Ordering::Acquire), "the file is closed before its change is synced");
        assert!(engine.shut_down().is_empty());
    }

    #[test]
    fn writes_during_shut_down_are_either_written_or_refused() {
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
                    assert!(began.elapsed() < Duration::from_secs(60), "writes are accepted for ever");
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

    /// Both syncs share one handle, as the requests of one NBD connection do: only one of them gets the noted error.
    #[test]
    fn a_failed_sync_fails_even_if_another_sync_reported_the_error() {
        use crate::sim::{Faults, SimFile};
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let engine = Engine::start(dir.path(), Config::default(), None, false).unwrap();
        let file = Arc::new(SimFile::new(vec![0; 1 << 20]));
        let image = engine.cache.add_image("x", file.clone()).unwrap();
        let image = ImageRef { images: engine.images.clone(), open: Arc::new(OpenImage::new(image)) };
        let handle = engine.handle(image, true).unwrap();
        file.set_faults(Faults { write: Some(libc::EIO), ..Faults::default() });
        std::thread::scope(|scope| {
            // Both syncs have been refused before either reports it.
            let reporting = handle.errors_seen.lock();
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
            drop(reporting);
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
}
