//! Start profiles: files that a program of an image opened when it started, and the parts of them that it read.
//!
//! A program that starts with cold caches waits for the disk a hundred times, for one name or page after the other.
//! `exec` can record once what it waits for ([`crate::runtime::exec::ExecOptions::learn`]). Later mounts ask for all of that
//! up front, with several requests in flight, while the program takes its first steps. The kernel reports opened files
//! (fanotify(7), root only), and mincore(2) which parts of them came into memory.
//!
//! A profile is a hint beside the metadata image (`trees/DIGEST.start`): one that is missing, damaged or of another
//! version costs the time it would have saved, and nothing else.

use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::layout::{is_place, placed_objects};
use crate::link_farm::LinkFarm;
use crate::progress::note;
use crate::store::{Lease, Store};
use crate::sys::{self, MappedFile, Opens, PAGE};
use crate::tree::{Data, FileKind, Id, ROOT, Tree};
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use rustix::fs::{Advice, Mode, OFlags, ResolveFlags};
use serde::Deserialize;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The one format there is.
const FORMAT: u32 = 1;

/// Most files and directories of a profile: each is held open while a program is watched.
const FILES_MAX: usize = 16_384;

/// Most bytes of a profile that are read.
const PROFILE_BYTES_MAX: u64 = 16 << 20;

/// Requests to the disk in flight at the same time.
const WORKERS: usize = 4;

/// Files that `exec` asks for itself, before the background process can.
const FIRST: usize = 24;

/// Bytes of a profile up to which `exec` asks for everything itself, if it has no more than [`FIRST`] files.
const FIRST_BYTES: u64 = 24 << 20;

/// Bytes asked for of every part before more is asked for of any: a program that waits for a small file must not wait for
/// large ones.
const HEAD: u64 = 128 << 10;

/// Bytes of a piece beyond that. The next piece is asked for when the last one has arrived, so that requests of the program
/// itself queue behind few of them.
const PIECE: u64 = 1 << 20;

/// Parts closer than this are asked for as one: reading the gap costs less than a second request.
const NEAR: u64 = 64 << 10;

/// File system type of EROFS, as statfs(2) tells it.
const EROFS_MAGIC: rustix::fs::FsWord = 0xE0F5_E1E2;

/// What a program needs at its start, in the order of its requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, Deserialize)]
pub struct Profile {
    format: u32,
    files: Vec<Entry>,
}

/// A file or directory that the program opened.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, Deserialize)]
struct Entry {
    /// Path in the tree, each byte as the character with that number: JSON strings cannot hold other bytes.
    path: String,
    /// The file's object, in hexadecimal digits; none for a directory, or for a file inside the metadata image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    /// The object's place in the image's link farm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    place: Option<String>,
    /// Parts that were read: offset and length in bytes.
    parts: Vec<(u64, u64)>,
}

impl Profile {
    /// The image's profile, if there is one that can be read.
    pub fn load(store: &Store, digest: &Digest) -> Option<Self> {
        let path = store.profile_path(digest);
        if fs::metadata(&path).ok()?.len() > PROFILE_BYTES_MAX {
            return None;
        }
        let profile: Self = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        (profile.format == FORMAT && profile.files.len() <= FILES_MAX).then_some(profile)
    }

    /// When the image's profile was recorded, or came with the image, seconds since 1970; 0 if there is none.
    pub fn recorded_s(store: &Store, digest: &Digest) -> u64 {
        let changed = fs::metadata(store.profile_path(digest)).and_then(|meta| meta.modified());
        let since = changed.ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        since.map_or(0, |since| since.as_secs())
    }

    /// How many files and directories the profile names.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// How many bytes the profile asks for.
    pub fn bytes(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.parts).fold(0, |sum, part| sum.saturating_add(part.1))
    }

    /// The profile that came with an image from outside; `None` if it is none.
    pub fn from_outside(value: &serde_json::Value) -> Option<Self> {
        let profile = Self::deserialize(value).ok()?;
        (profile.format == FORMAT && profile.files.len() <= FILES_MAX).then_some(profile)
    }

    /// The profile as it goes with an image; `None` if it is larger than any that is read.
    pub fn for_outside(&self) -> Option<serde_json::Value> {
        let value = serde_json::to_value(self).ok()?;
        (value.to_string().len() as u64 <= PROFILE_BYTES_MAX).then_some(value)
    }

    /// The objects that the profile names, in the order in which a start opens them.
    pub fn objects(&self) -> impl Iterator<Item = Digest> {
        self.files.iter().filter_map(|file| Digest::from_hex(file.object.as_ref()?.as_bytes()))
    }

    /// Replaces the image's profile.
    ///
    /// # Errors
    /// The image is gone; the system's.
    pub fn save(&self, store: &Store, digest: &Digest) -> Result<()> {
        let lease = Lease::new(store)?;
        if !lease.claim_tree(digest)? {
            return Err(Error::Refused("start profile: the image was removed meanwhile".into()));
        }
        let staged = store.path("staging").join(lease.id());
        fs::create_dir(&staged).at(&staged)?;
        let (from, to) = (staged.join("start"), store.profile_path(digest));
        let written = serde_json::to_vec(self)
            .map_err(|error| Error::Refused(format!("start profile: {error}")))
            .and_then(|bytes| fs::write(&from, bytes).at(&from))
            .and_then(|()| fs::rename(&from, &to).at(&to));
        if written.is_err() {
            let _ = fs::remove_file(&from);
        }
        let _ = fs::remove_dir(&staged);
        written
    }

    /// Makes the kernel read the objects' parts. Returns when all were asked for; or `in_pieces`, so that requests of a
    /// starting program are served between them, when they have arrived.
    pub(crate) fn read_objects(&self, store: &Store, digest: &Digest, in_pieces: bool) {
        let farm = LinkFarm::of(store, digest);
        let open = |entry: &Entry| entry.open(store, &farm);
        self.each(|entry| {
            if let Some(file) = open(entry) {
                ask_heads(&file, &entry.parts);
            }
        });
        self.each(|entry| {
            if let (Some(_), Some(file)) = (rests(&entry.parts).next(), open(entry)) {
                let ask = if in_pieces { ask_in_pieces } else { ask };
                rests(&entry.parts).for_each(|(offset, bytes)| ask(&file, offset, bytes));
            }
        });
    }

    /// Reads ahead for a command that this process, which must have one thread, becomes. Files that are needed first, or a
    /// profile that is small, are asked for here; the rest, and the names, by a detached process.
    pub(crate) fn read_ahead(&self, store: &Store, digest: &Digest) -> Option<ReadAhead> {
        let is_small = self.files.len() <= FIRST && self.bytes() <= FIRST_BYTES;
        // Starting the process takes time in which the disk would rest: it is started first.
        let read_ahead = if is_small { None } else { self.in_background(store, digest).ok() };
        let farm = LinkFarm::of(store, digest);
        let open = |entry| Some((Entry::open(entry, store, &farm)?, &entry.parts));
        let first: Vec<_> = self.files.iter().take(FIRST).filter_map(open).collect();
        for (file, parts) in &first {
            ask_heads(file, parts);
        }
        for (file, parts) in first.iter().filter(|_| is_small) {
            rests(parts).for_each(|(offset, bytes)| ask(file, offset, bytes));
        }
        read_ahead
    }

    /// Starts a process that reads the objects immediately, and looks up the names when it receives the mount.
    fn in_background(&self, store: &Store, digest: &Digest) -> std::io::Result<ReadAhead> {
        let (socket, theirs) = sock::pair()?;
        let work = || {
            std::thread::scope(|scope| {
                let objects =
                    std::thread::Builder::new().spawn_scoped(scope, || self.read_objects(store, digest, true));
                // Without a mount the command does not start.
                let tree = sock::receive(&theirs, &mut [0], 0).ok().and_then(|(_, mut fds)| fds.take(0));
                if let (Ok(_), Some(tree)) = (objects, tree) {
                    self.look_up(&tree.into());
                }
            });
        };
        let detaching = sys::in_background(&[theirs.as_raw_fd()], false, work)?;
        Ok(ReadAhead { socket, detaching })
    }

    /// Looks up each name in the mount with the root `tree`, so that names and inodes are in memory. Where the mount's files
    /// are not the objects, the kernel is asked to read their parts too.
    pub(crate) fn look_up(&self, tree: &OwnedFd) {
        let own_files = rustix::fs::fstatfs(tree).is_ok_and(|found| found.f_type == EROFS_MAGIC);
        self.each(|entry| {
            let Ok(path) = entry.path.chars().map(u8::try_from).collect::<std::result::Result<Vec<u8>, _>>() else {
                return;
            };
            let path = path.strip_prefix(b"/").unwrap_or(&path);
            // Opening a device or a pipe could wait or act on it: only files and directories are opened.
            let at = |flags: OFlags| {
                let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                rustix::fs::openat2(tree, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)
            };
            let Ok(kind) = at(OFlags::PATH).and_then(|found| rustix::fs::fstat(&found)) else { return };
            match rustix::fs::FileType::from_raw_mode(kind.st_mode) {
                rustix::fs::FileType::RegularFile => {
                    if let Ok(file) = at(OFlags::RDONLY).map(File::from)
                        && own_files
                    {
                        entry.parts.iter().for_each(|&(offset, bytes)| ask(&file, offset, bytes));
                    }
                }
                rustix::fs::FileType::Directory => {
                    if let Ok(mut names) = at(OFlags::RDONLY | OFlags::DIRECTORY).and_then(rustix::fs::Dir::new) {
                        while let Some(Ok(_)) = names.read() {}
                    }
                }
                _ => {}
            }
        });
    }

    /// Calls `work` for all files, a few at a time.
    fn each(&self, work: impl Fn(&Entry) + Sync) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..WORKERS.min(self.files.len()) {
                // If a thread cannot be started, the others do its part.
                let _ = std::thread::Builder::new().spawn_scoped(scope, || {
                    while let Some(entry) = self.files.get(next.fetch_add(1, Ordering::Relaxed)) {
                        work(entry);
                    }
                });
            }
        });
    }
}

impl Entry {
    /// Opens the object.
    fn open(&self, store: &Store, farm: &LinkFarm) -> Option<File> {
        let object = self.object.as_ref().and_then(|hex| Digest::from_hex(hex.as_bytes()))?;
        // By the path that the program's mount will use, so that its names are in memory too.
        let place = self.place.as_ref().filter(|place| is_place(place));
        let in_farm = place.and_then(|place| File::open(farm.object(place)).ok());
        in_farm.or_else(|| File::open(store.object_path(&object)).ok())
    }
}

/// Asks the kernel to read a part of a file; does not wait.
fn ask(file: &File, offset: u64, bytes: u64) {
    if let Some(bytes) = NonZeroU64::new(bytes) {
        let _ = rustix::fs::fadvise(file, offset, Some(bytes), Advice::WillNeed);
    }
}

/// Asks the kernel to read the start of each part of a file.
fn ask_heads(file: &File, parts: &[(u64, u64)]) {
    parts.iter().for_each(|&(offset, bytes)| ask(file, offset, bytes.min(HEAD)));
}

/// The parts without their starts.
fn rests(parts: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64)> {
    let large = parts.iter().filter(|part| part.1 > HEAD);
    large.map(|&(offset, bytes)| (offset.saturating_add(HEAD), bytes - HEAD))
}

/// Makes the kernel read a part of a file, two pieces at a time; returns when it has arrived.
fn ask_in_pieces(file: &File, offset: u64, bytes: u64) {
    let size = file.metadata().map_or(0, |meta| meta.len());
    let end = offset.saturating_add(bytes).min(size);
    let (mut from, mut asked) = (offset, None);
    while from < end {
        let to = from.saturating_add(PIECE).min(end);
        ask(file, from, to - from);
        if let Some(before) = asked.replace(to - 1) {
            let _ = file.read_at(&mut [0], before);
        }
        from = to;
    }
    if let Some(last) = asked {
        let _ = file.read_at(&mut [0], last);
    }
}

/// The background process that reads ahead.
pub(crate) struct ReadAhead {
    socket: Fd,
    detaching: sys::Detaching,
}

impl ReadAhead {
    /// Sends the process the mount with the root `tree`, in which it looks up the names; the process is detached from here
    /// on.
    pub(crate) fn look_up(self, tree: &OwnedFd) {
        let _ = sock::send(&self.socket, &[0], &[tree.as_raw_fd()]);
        let _ = self.detaching.wait();
    }
}

/// The parts of a file that are in memory; parts near each other count as one.
fn parts(file: &File) -> Result<Vec<(u64, u64)>> {
    let size = file.metadata().at("a file of the image")?.len();
    if size == 0 {
        return Ok(Vec::new());
    }
    let here = MappedFile::new(file, size).and_then(|map| map.resident()).at("a file of the image")?;
    let mut parts: Vec<(u64, u64)> = Vec::new();
    for page in here.iter().enumerate().filter(|(_, here)| **here).map(|(page, _)| page as u64 * PAGE) {
        match parts.last_mut() {
            Some((offset, bytes)) if page - (*offset + *bytes) <= NEAR => *bytes = page + PAGE - *offset,
            _ => parts.push((page, PAGE)),
        }
    }
    Ok(parts)
}

/// The inode at a path without links in it.
fn find(tree: &Tree, path: &[u8]) -> Option<Id> {
    let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    names.try_fold(ROOT, |dir, name| matches!(tree.inode(dir).kind, FileKind::Dir(_)).then(|| tree.child(dir, name))?)
}

/// The watch over the files that the command, which this process becomes, will open.
pub(crate) struct OpenWatch {
    opens: Opens,
}

/// Drops the image's objects from the page cache, so that pages that come in are those of the command, and starts a detached
/// process that watches until this one ends, or for `patience`, and then writes the profile. This process must have one
/// thread.
///
/// # Errors
/// Without CAP_SYS_ADMIN; the system's.
pub(crate) fn watch(store: &Store, digest: &Digest, patience: Duration) -> Result<OpenWatch> {
    let refused = |source: std::io::Error| {
        Error::Refused(format!("exec: --record-profile: {source}; watching what a program opens (fanotify) needs root"))
    };
    let opens = Opens::new().map_err(refused)?;
    for (object, ..) in store.tree_objects(digest)? {
        if let Ok(file) = File::open(store.object_path(&object)) {
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        }
    }
    let command = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())
        .map_err(|errno| refused(errno.into()))?;
    let keep = [opens.as_fd().as_raw_fd(), command.as_raw_fd()];
    sys::in_background(&keep, true, || match learn(store, digest, &opens, &command, patience) {
        Ok(profile) => {
            let mib = profile.bytes() as f64 / f64::from(1 << 20);
            note(&format!("learned {} files, {mib:.1} MiB; mounts read them ahead", profile.files()));
        }
        Err(error) => note(&format!("nothing learned: {error}")),
    })
    .and_then(sys::Detaching::wait)
    .map_err(refused)?;
    Ok(OpenWatch { opens })
}

impl OpenWatch {
    /// Records files opened in the mount at `place` from here on.
    pub(crate) fn begin(&self, place: &Path) -> Result<()> {
        self.opens.mark(place).at(place)
    }
}

/// Records opened files until `command` ends or `patience` is over, and writes the profile.
fn learn(store: &Store, digest: &Digest, opens: &Opens, command: &OwnedFd, patience: Duration) -> Result<Profile> {
    let tree = store.tree(digest)?;
    let places: HashMap<Digest, String> = placed_objects(&tree).collect();
    // Held open until the end: the mount may be gone with the command.
    let most = pagefold_os::fd::raise_limit().unwrap_or(256).saturating_sub(64).min(FILES_MAX as u64) as usize;
    let (start, mut seen, mut found) = (Instant::now(), HashSet::<Vec<u8>>::new(), Vec::<(Vec<u8>, File)>::new());
    loop {
        let left = patience.saturating_sub(start.elapsed());
        let ended = opens.wait(command, left).at("fanotify")? || left.is_zero();
        loop {
            let events = opens.read().at("fanotify")?;
            if events.is_empty() {
                break;
            }
            for file in events {
                let Ok(path) = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) else { continue };
                let path = path.into_os_string().into_vec();
                if found.len() < most && seen.insert(path.clone()) {
                    found.push((path, file));
                }
            }
        }
        if ended {
            break;
        }
    }
    let mut profile = Profile { format: FORMAT, files: Vec::new() };
    for (path, file) in found {
        // A file that the command made itself, or that is mounted over the tree, is not the image's.
        let Some(id) = find(&tree, &path) else { continue };
        let (object, parts) = match &tree.inode(id).kind {
            FileKind::File(Data::Object(object, _)) => (Some(object), parts(&file)?),
            FileKind::File(Data::Inline(_)) | FileKind::Dir(_) => (None, Vec::new()),
            _ => continue,
        };
        profile.files.push(Entry {
            path: path.iter().copied().map(char::from).collect(),
            object: object.map(Digest::hex),
            place: object.and_then(|object| places.get(object).cloned()),
            parts,
        });
    }
    if profile.files.is_empty() {
        return Err(Error::Refused("exec: --record-profile: the command opened nothing of the image".into()));
    }
    profile.save(store, digest)?;
    Ok(profile)
}
