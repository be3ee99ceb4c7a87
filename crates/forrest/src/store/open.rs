//! Opening and making stores, and which files are trusted.

use super::Store;
use super::root::{KIND, ROOT_BYTES, init_root};
use crate::config::Options;
use crate::error::Error;
use crate::hash::{Hash, Hasher};
use crate::order::Order;
use crate::table::OFFSETS_END;
use llds::arena::{self, Arena, Pages};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where named stores live.
const DIRECTORY: &str = "/dev/shm";

/// Limit of a private store that sets none: address space, not memory.
const PRIVATE_LIMIT: u64 = 256 << 30;
/// Limit of a shared store that sets none.
const SHARED_LIMIT: u64 = 64 << 30;
/// Highest limit: what the directory can name, less ample room for the fixed part in front.
const LIMIT_MAX: u64 = OFFSETS_END - (1 << 30);

impl Options {
    /// Makes a store that is private to this process.
    ///
    /// # Errors
    /// [`Error::Arena`] if the address space is not there.
    pub fn private(&self) -> Result<Store, Error> {
        let arena = Arena::private(&self.arena(PRIVATE_LIMIT))?;
        init_root(&arena, self.hash.unwrap_or_default())?;
        let order = if self.ordered { Some(Order::new(self.pages != Pages::Small)?.into()) } else { None };
        Ok(Store { order, ..Store::over(arena)? })
    }

    /// Opens the shared store `name`, or makes it, for processes of this user.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::Untrusted`] if the file of that name belongs to another user, or other users may write it;
    /// or the reason why the store there cannot be used.
    pub fn open(&self, name: &str) -> Result<Store, Error> {
        self.open_or_create(&path_of(name)?, Source::Name)
    }

    /// Makes the shared store `name`.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is one.
    pub fn create(&self, name: &str) -> Result<Store, Error> {
        self.create_path(&path_of(name)?)
    }

    /// Opens the shared store `name`, which must be there.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; otherwise as [`Options::open`].
    pub fn open_existing(&self, name: &str) -> Result<Store, Error> {
        self.open_file(&path_of(name)?, Source::Name)
    }

    /// Opens the shared store in the file `path`, or makes it. The file may lie on a tmpfs or a hugetlbfs.
    ///
    /// A new file gets mode 0600. Unlike a store opened by name, a file that is writable for a group is accepted, and so is
    /// a symbolic link. Any user that may write the file, or replace it, can end this process or change its memory. So give
    /// a path in a directory that only trusted users may write.
    ///
    /// # Errors
    /// The file system's; [`Error::Untrusted`] if it is not a regular file; or why the store there cannot be used.
    pub fn open_path(&self, path: &Path) -> Result<Store, Error> {
        self.open_or_create(path, Source::Path)
    }

    /// Makes a shared store in the new file `path`.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is a file.
    pub fn create_path(&self, path: &Path) -> Result<Store, Error> {
        self.check_shared()?;
        if path.symlink_metadata().is_ok() {
            return Err(Error::Exists(path.display().to_string()));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The file has no name until it is complete, so no process can open half a store.
        let file = File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(folder)?;
        lock_file(&file, libc::LOCK_SH)?;
        let arena = Arena::create(above_stdio(&file)?, &self.arena(SHARED_LIMIT))?;
        init_root(&arena, self.hash.unwrap_or_default())?;
        let store = Store::over(arena)?;
        match link(&file, path) {
            Ok(()) => Ok(store),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Exists(path.display().to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the shared store in the file `path`, which must be there. It trusts the same users as [`Options::open_path`].
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; otherwise as [`Options::open_path`].
    pub fn open_existing_path(&self, path: &Path) -> Result<Store, Error> {
        self.open_file(path, Source::Path)
    }

    fn open_or_create(&self, path: &Path, source: Source) -> Result<Store, Error> {
        loop {
            match self.open_file(path, source) {
                Err(Error::NotFound(_)) => {}
                other => return other,
            }
            match self.create_path(path) {
                // Another process made it just now: open that one. A dangling link is neither opened nor replaced.
                Err(Error::Exists(_)) if !path.is_symlink() => {}
                other => return other,
            }
        }
    }

    fn open_file(&self, path: &Path, source: Source) -> Result<Store, Error> {
        self.check_shared()?;
        let follow = if source == Source::Name { libc::O_NOFOLLOW } else { 0 };
        let file = match File::options().read(true).write(true).custom_flags(libc::O_CLOEXEC | follow).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NotFound(path.display().to_string()));
            }
            Err(error) if source == Source::Name && error.raw_os_error() == Some(libc::ELOOP) => {
                return Err(untrusted(path, "it is a symbolic link; remove it, or choose another name"));
            }
            Err(error) => return Err(error.into()),
        };
        check_trust(&file, path, source)?;
        // Every open store holds a shared lock on its file, so an exclusive lock proves that no other process has it open.
        if lock_file(&file, libc::LOCK_EX | libc::LOCK_NB).is_ok() {
            let store = Store::over(Arena::open_alone(file.try_clone()?, KIND, self.pages)?)?;
            store.table.recover_all();
            if !store.table.are_locks_sound() {
                return Err(arena::Error::Damaged("a shard is locked, though no process uses the store").into());
            }
            if !store.table.arena.is_audited() {
                store.table.free_lost()?;
            }
            // The handle is closed here: while the lock is converted to a shared one, another process may get the exclusive
            // lock for a moment, and would treat the owners of all thread records as dead.
        }
        lock_file(&file, libc::LOCK_SH)?;
        let store = Store::over(Arena::open(above_stdio(&file)?, KIND, self.pages)?)?;
        let same = match (&self.hash, &store.table.hasher) {
            (None, _) | (Some(Hash::Keyed), Hasher::Keyed { .. }) => true,
            (Some(Hash::Murmur { seed }), Hasher::Murmur { seed: theirs, .. }) => seed == theirs,
            _ => false,
        };
        if !same {
            return Err(Error::Settings("hash"));
        }
        store.table.recover_all();
        Ok(store)
    }

    fn check_shared(&self) -> Result<(), Error> {
        if self.ordered { Err(Error::OrderedShared) } else { Ok(()) }
    }

    pub(super) fn arena(&self, limit: u64) -> arena::Options {
        arena::Options {
            capacity_bytes: self.limit_bytes.unwrap_or(limit).min(LIMIT_MAX),
            root_bytes: ROOT_BYTES,
            kind: KIND,
            pages: self.pages,
            numa: self.numa,
        }
    }
}

/// The file of the store that is called `name`.
pub(super) fn path_of(name: &str) -> Result<PathBuf, Error> {
    if name.is_empty() || name.len() > 200 || name.starts_with('.') || name.contains(['/', '\0']) {
        return Err(Error::Name(name.to_owned()));
    }
    Ok(Path::new(DIRECTORY).join(format!("forrest.{name}")))
}

/// How the caller named the store's file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// By a name, in a directory where any user may make files.
    Name,
    /// By a path; the caller chose its directories and permissions.
    Path,
}

/// Refuses a file that other users may have made or may change: the words of a store are trusted.
fn check_trust(file: &File, path: &Path, source: Source) -> Result<(), Error> {
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(untrusted(path, "it is not a regular file; remove it, or choose another name"));
    }
    if source == Source::Path {
        return Ok(());
    }
    // SAFETY: geteuid takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    if meta.uid() != user && meta.uid() != 0 {
        let why = format!(
            "it belongs to user {}, this process runs as {user}; choose another name, or have it removed",
            meta.uid()
        );
        return Err(untrusted(path, &why));
    }
    if meta.mode() & 0o022 != 0 {
        let mode = meta.mode() & 0o7777;
        let why =
            format!("group or others may write it (mode {mode:04o}); remove it, or open it by its path to share it");
        return Err(untrusted(path, &why));
    }
    Ok(())
}

fn untrusted(path: &Path, why: &str) -> Error {
    Error::Untrusted { path: path.display().to_string(), why: why.to_owned() }
}

/// Gives a nameless file its name; fails if the name is taken.
fn link(file: &File, path: &Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let from = std::ffi::CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let to = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both paths are NUL-terminated and outlive the call.
    let done =
        unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns another descriptor of a file, above the first three: a program that closed those would print into its store.
fn above_stdio(file: &File) -> io::Result<File> {
    file.try_clone()
}

fn lock_file(file: &File, how: i32) -> io::Result<()> {
    loop {
        // SAFETY: flock takes no pointers; the descriptor is open while `file` is borrowed.
        if unsafe { libc::flock(file.as_raw_fd(), how) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
