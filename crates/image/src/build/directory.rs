//! Directories into trees: walked by descriptor, read by all cores, unchanged files by what stat says.
//!
//! *The stat cache.* A file whose file system, inode, size, mtime and ctime are those of the last build has the digest
//! of the last build: ctime cannot be set back without setting the clock, except where it is data of a disk image, and
//! there the file system is another one with each mount ([`pagefold_os::volume`]). A file that changed within the last
//! two seconds before its build is not remembered, because a later change could carry the same times. Nor does who
//! writes through a mapping change any time while the page is dirty: pages are written out before they are read.

use crate::digest::Digest;
use crate::erofs;
use crate::error::{At, Error, Result};
use crate::ingest::{Notes, clean_xattrs, is_whiteout};
use crate::progress::Progress;
use crate::store::{Build, Store};
use crate::sys;
use crate::tree::{Data, INLINE_MAX, Id, Inode, Kind, Meta, ROOT, Tree, Xattrs};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags, Stat, StatxFlags};
use rustix::io::Errno;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a file was at the last build.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Seen {
    size: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
}

/// A cache entry: file system and inode, what stat said, the digest.
type Remembered = ((u64, u64), (Seen, Digest));

const CACHE_MAGIC: &[u8; 8] = b"PFSTAT01";
const CACHE_ENTRY: usize = 8 * 5 + 4 * 2 + 32;
/// Times this close before a build may come again: file systems stamp with the tick's time.
const RACY_S: i64 = 2;

#[derive(Default)]
struct StatCache {
    files: HashMap<(u64, u64), (Seen, Digest)>,
}

impl StatCache {
    fn path(store: &Store, root: &Path) -> PathBuf {
        store.path("cache").join(format!("{}.stat", Digest::of(root.as_os_str().as_bytes()).hex()))
    }

    fn load(path: &Path) -> Self {
        let Some(bytes) = fs::read(path).ok() else { return Self::default() };
        let Some(body) = bytes.len().checked_sub(8).and_then(|end| bytes.get(..end)) else { return Self::default() };
        let checked = Digest::of(body).0[..8] == bytes[body.len()..];
        let Some(list) = body.strip_prefix(CACHE_MAGIC).filter(|_| checked) else { return Self::default() };
        let entry = |raw: &[u8]| {
            let u64_at = |at: usize| u64::from_le_bytes(raw[at..at + 8].try_into().expect("8 bytes"));
            let u32_at = |at: usize| u32::from_le_bytes(raw[at..at + 4].try_into().expect("4 bytes"));
            let seen = Seen {
                size: u64_at(16),
                mtime: (u64_at(24) as i64, u32_at(40)),
                ctime: (u64_at(32) as i64, u32_at(44)),
            };
            ((u64_at(0), u64_at(8)), (seen, Digest(raw[48..80].try_into().expect("32 bytes"))))
        };
        Self { files: list.chunks_exact(CACHE_ENTRY).map(entry).collect() }
    }

    fn save(path: &Path, entries: &[Remembered], build: &Build) -> Result<()> {
        let mut out = CACHE_MAGIC.to_vec();
        for ((device, inode), (seen, digest)) in entries {
            for number in [*device, *inode, seen.size, seen.mtime.0 as u64, seen.ctime.0 as u64] {
                out.extend(number.to_le_bytes());
            }
            out.extend(seen.mtime.1.to_le_bytes());
            out.extend(seen.ctime.1.to_le_bytes());
            out.extend(digest.0);
        }
        let check = Digest::of(&out);
        out.extend(&check.0[..8]);
        // Not durable on purpose: a cache that a crash cuts short fails its check and is ignored.
        let staged = build.scratch_path();
        File::create(&staged).and_then(|mut file| file.write_all(&out)).at(&staged)?;
        fs::rename(&staged, path).at(path)
    }
}

fn seen(stat: &Stat) -> Seen {
    Seen {
        size: stat.st_size as u64,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: (stat.st_ctime, stat.st_ctime_nsec as u32),
    }
}

/// A file still to be read.
struct Job {
    id: Id,
    /// Directory and path of each of its names.
    names: Vec<(Id, PathBuf)>,
    device: u64,
    inode: u64,
    seen: Seen,
}

/// How to read a directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Do not go into other file systems: their directories are empty in the image.
    pub one_file_system: bool,
    /// Hash every file, whatever the stat cache says.
    pub rehash: bool,
}

/// Opens `path` under `root` with no symbolic link on the way: nobody can lead us out while we read.
fn open_beneath(root: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), how) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

/// What cannot be made good: whatever is in the place of a file or directory has a tree of its own.
fn replaced(full: &Path) -> Error {
    Error::Refused(format!(
        "{}: replaced by another kind of file while the tree was read; build again, or build from a copy or snapshot",
        full.display()
    ))
}

/// Opens the file at `path` under `top`, which is called `root`; `None` if there is none any more.
fn open_file(top: &OwnedFd, root: &Path, path: &Path) -> Result<Option<(File, PathBuf, Stat)>> {
    let full = root.join(path);
    let file: File = match open_beneath(top, path, OFlags::RDONLY | OFlags::NONBLOCK) {
        Err(Errno::NOENT) => return Ok(None),
        // A link, a socket, or something in the place of a directory.
        Err(Errno::LOOP | Errno::NXIO | Errno::NOTDIR) => return Err(replaced(&full)),
        other => other.at(&full)?.into(),
    };
    let stat = rustix::fs::fstat(&file).at(&full)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(replaced(&full));
    }
    erofs::check_size(stat.st_size as u64, || full.display().to_string())?;
    Ok(Some((file, full, stat)))
}

impl Job {
    /// Opens the file by a name that it still has; `None` if it has none any more. One of several names that has changed
    /// since the walk may have lost names, or be another file by the same number: then each name is asked for itself.
    fn open(&self, top: &OwnedFd, root: &Path) -> Result<Option<(File, PathBuf, Stat)>> {
        let is_it = |stat: &Stat| {
            (stat.st_dev, stat.st_ino) == (self.device, self.inode)
                && (self.names.len() == 1 || seen(stat) == self.seen)
        };
        for (_, path) in &self.names {
            let found = open_file(top, root, path)?;
            if found.as_ref().is_some_and(|(.., stat)| is_it(stat)) {
                return Ok(found);
            }
        }
        Ok(None)
    }
}

/// What a job was found to be.
struct Read {
    data: Data,
    stat: Stat,
    /// Its attributes, if it is not what the walk saw.
    xattrs: Option<Xattrs>,
    /// Whether a later change would have other times.
    is_settled: bool,
}

/// The attributes of `name` in the open directory, without a name those of the open file; never follows a link.
fn read_xattrs(dir: &impl AsRawFd, name: &OsStr) -> rustix::io::Result<Xattrs> {
    let mut path = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    if !name.is_empty() {
        path.push(name);
    }
    let mut names = vec![0u8; 1 << 10];
    // A file's own descriptor link must be followed, a child must not.
    let follow = name.is_empty();
    let list = |names: &mut Vec<u8>| match follow {
        true => rustix::fs::listxattr(&path, &mut names[..]),
        false => rustix::fs::llistxattr(&path, &mut names[..]),
    };
    let count = match list(&mut names) {
        Err(Errno::RANGE) => {
            names = vec![0; 1 << 16];
            list(&mut names)
        }
        other => other,
    };
    let count = match count {
        Err(Errno::NOTSUP) => 0,
        other => other?,
    };
    let mut all = Xattrs::new();
    for xattr in names[..count].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0u8; 1 << 16];
        let got = match follow {
            true => rustix::fs::getxattr(&path, xattr, &mut value[..]),
            false => rustix::fs::lgetxattr(&path, xattr, &mut value[..]),
        };
        match got {
            // Gone meanwhile, or not for our eyes.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => {}
            Err(error) => return Err(error),
            Ok(count) => {
                all.insert(xattr.into(), value[..count].into());
            }
        }
    }
    Ok(all)
}

/// What `name` in the open directory is, and where it leads if it is a link.
fn look(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<(Stat, Box<[u8]>)> {
    let mut looks = 0;
    loop {
        looks += 1;
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFLNK {
            return Ok((stat, Box::default()));
        }
        match rustix::fs::readlinkat(dir, name, Vec::new()) {
            // Replaced meanwhile by what is no link.
            Err(Errno::INVAL) if looks < 16 => {}
            other => return Ok((stat, other?.to_bytes().into())),
        }
    }
}

/// Whether `name` is on another file system than `device`. A user's own FUSE mount tells others, root too, nothing but this, and
/// that only to who asks for nothing else.
fn is_mounted(dir: &OwnedFd, name: &OsStr, device: u64) -> bool {
    rustix::fs::statx(dir, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
        .is_ok_and(|found| rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor) != device)
}

/// What is no failure: a file that went away between two looks at it was not to be had.
const GONE: &str = "files or directories that went away while the tree was read were left out";

/// What `one_file_system` leaves out.
const ELSEWHERE: &str = "directories on other file systems are empty in the image";

fn meta(stat: &Stat, xattrs: Xattrs) -> Meta {
    Meta {
        mode: (stat.st_mode & 0o7777) as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_s: stat.st_mtime,
        mtime_ns: stat.st_mtime_nsec as u32,
        xattrs,
    }
}

/// Reads directory `root` into a tree and its files into the store. What goes away meanwhile is left out, and noted where
/// its name was seen; a file that is replaced by another is that one.
///
/// # Errors
/// Files that cannot be read or keep changing, a full store.
pub fn from_directory(
    build: &Build,
    root: &Path,
    options: Options,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<Tree> {
    let root = &root.canonicalize().at(root)?;
    let store_root = build.store().root();
    let top = rustix::fs::open(root, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).at(root)?;
    let top_stat = rustix::fs::fstat(&top).at(root)?;
    let mut tree = Tree::default();
    let mut xattrs = read_xattrs(&top, OsStr::new("")).at(root)?;
    clean_xattrs(&mut xattrs, b"/", notes);
    tree.inode_mut(ROOT).meta = meta(&top_stat, xattrs);

    // A file with several names: its number, and its place among the jobs if it is one.
    let (mut jobs, mut linked) = (Vec::<Job>::new(), HashMap::new());
    // Each with the directory it is in.
    let mut todo = vec![(ROOT, ROOT, PathBuf::new())];
    let mut total = 0;
    while let Some((parent, dir_id, dir_path)) = todo.pop() {
        let dir = match open_beneath(&top, &dir_path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Err(Errno::NOENT) => {
                notes.add(GONE, dir_path.as_os_str().as_bytes());
                tree.unlink(parent, last_name(&dir_path));
                continue;
            }
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(replaced(&root.join(&dir_path))),
            other => other.at(root.join(&dir_path))?,
        };
        if !dir_path.as_os_str().is_empty() && pagefold_os::volume::is_pseudo(&dir) {
            notes.add(
                "directories of the kernel's own files (proc, sysfs) are empty in the image",
                dir_path.as_os_str().as_bytes(),
            );
            continue;
        }
        let mut names = Vec::new();
        for entry in Dir::read_from(&dir).at(root.join(&dir_path))? {
            let name = entry.at(root.join(&dir_path))?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        // Inode numbers of the tree, and with them nothing else, depend on the order.
        names.sort_unstable();
        for name in names {
            let os_name = OsStr::from_bytes(&name);
            let path = dir_path.join(os_name);
            let full = || root.join(&path);
            let (stat, target) = match look(&dir, os_name) {
                Err(Errno::NOENT) => continue,
                Err(Errno::ACCESS) if options.one_file_system && is_mounted(&dir, os_name, top_stat.st_dev) => {
                    notes.add(ELSEWHERE, path.as_os_str().as_bytes());
                    let meta = Meta { mode: 0o755, ..Meta::default() };
                    let id = tree.add(Inode { meta, kind: Kind::Dir(BTreeMap::new()) });
                    tree.link(dir_id, &name, id)?;
                    continue;
                }
                other => other.at(full())?,
            };
            let key = (stat.st_dev, stat.st_ino);
            let is_dir = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory;
            // Where something is mounted there is a directory, and programs look for it.
            let is_elsewhere = options.one_file_system && stat.st_dev != top_stat.st_dev;
            if is_elsewhere && is_dir {
                notes.add(ELSEWHERE, path.as_os_str().as_bytes());
            } else if is_elsewhere {
                notes.add("files on other file systems were left out", path.as_os_str().as_bytes());
                continue;
            }
            if !is_dir
                && stat.st_nlink > 1
                && let Some(&(id, place)) = linked.get(&key)
            {
                tree.link(dir_id, &name, id)?;
                if let Some(place) = place {
                    let job: &mut Job = &mut jobs[place];
                    job.names.push((dir_id, path));
                }
                continue;
            }
            let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            let mut job = None;
            let kind = match stat.st_mode & libc::S_IFMT {
                libc::S_IFDIR => {
                    if full() == store_root {
                        notes.add("the store itself was left out", full().as_os_str().as_bytes());
                        continue;
                    }
                    Kind::Dir(BTreeMap::new())
                }
                libc::S_IFLNK => Kind::Symlink(target),
                libc::S_IFCHR => Kind::Char(major, minor),
                libc::S_IFBLK => Kind::Block(major, minor),
                libc::S_IFIFO => Kind::Fifo,
                libc::S_IFSOCK => Kind::Socket,
                _ => {
                    erofs::check_size(stat.st_size as u64, || full().display().to_string())?;
                    job = Some((stat.st_dev, stat.st_ino, seen(&stat)));
                    Kind::File(Data::Inline(Box::default()))
                }
            };
            if is_whiteout(&kind) {
                notes.add("character devices 0:0, overlayfs's mark of a deleted file, were left out", &name);
                continue;
            }
            let mut xattrs = match read_xattrs(&dir, os_name) {
                Err(Errno::NOENT) => continue,
                // As a user's own FUSE mount says to root.
                Err(_) if is_elsewhere => Xattrs::new(),
                other => other.at(full())?,
            };
            clean_xattrs(&mut xattrs, &name, notes);
            let id = tree.add(Inode { meta: meta(&stat, xattrs), kind });
            tree.link(dir_id, &name, id)?;
            if !is_dir && stat.st_nlink > 1 {
                linked.insert(key, (id, job.is_some().then_some(jobs.len())));
            }
            if let Some((device, inode, seen)) = job {
                total += seen.size;
                jobs.push(Job { id, names: vec![(dir_id, path)], device, inode, seen });
            } else if is_dir && !is_elsewhere {
                todo.push((dir_id, id, path));
            }
        }
    }

    #[cfg(test)]
    AFTER_WALK.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
    progress.expect(total);
    let cache_path = StatCache::path(build.store(), root);
    let cache = if options.rehash { StatCache::default() } else { StatCache::load(&cache_path) };
    let mut remember = Vec::new();
    let (mut volumes, mut lost) = (HashMap::new(), Vec::new());
    let mut here = Vec::with_capacity(jobs.len());
    for job in jobs {
        if let Entry::Vacant(new) = volumes.entry(job.device) {
            let Some((file, path, _)) = job.open(&top, root)? else {
                lost.push(job);
                continue;
            };
            new.insert(pagefold_os::volume::identity(&file).at(path)?);
        }
        here.push(job);
    }
    let mut jobs = here;
    let key = |job: &Job| (volumes[&job.device], job.inode);
    // What the cache knows and the store has is not read again.
    let known = |job: &Job| {
        let (then, digest) = cache.files.get(&key(job))?;
        (job.seen.size > INLINE_MAX && *then == job.seen).then_some((*digest, job.seen.size))
    };
    let there = build.has_all(&jobs.iter().filter_map(known).collect::<Vec<_>>())?;
    let mut there = there.into_iter();
    jobs.retain(|job| {
        let Some((digest, size)) = known(job).filter(|_| there.next() == Some(true)) else { return true };
        build.stats.files_unchanged.fetch_add(1, Ordering::Relaxed);
        progress.add(size, true);
        remember.push((key(job), (job.seen, digest)));
        tree.inode_mut(job.id).kind = Kind::File(Data::Object(digest, size));
        false
    });
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = Mutex::new(Vec::with_capacity(jobs.len()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len().max(1));
    let worker = || -> Result<()> {
        let mut mine = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            match read_job(build, &top, root, job, progress) {
                Ok(read) => mine.push((job, read)),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        results.lock().expect("no panic while held").append(&mut mine);
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (1..workers).map(|_| scope.spawn(worker)).collect();
        let first = worker();
        let rest: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("workers do not panic")).collect();
        rest.into_iter().fold(first, |sum, result| sum.and(result))
    })?;
    for (job, read) in results.into_inner().expect("no panic while held") {
        let Some(Read { data, stat, xattrs, is_settled }) = read else {
            read_others(build, &top, root, job, &mut tree, notes, progress)?;
            continue;
        };
        if let (Data::Object(digest, _), true) = (&data, is_settled) {
            remember.push((key(job), (seen(&stat), *digest)));
        }
        let inode = tree.inode_mut(job.id);
        let xattrs = match xattrs {
            Some(mut xattrs) => {
                clean_xattrs(&mut xattrs, job.names[0].1.as_os_str().as_bytes(), notes);
                xattrs
            }
            None => std::mem::take(&mut inode.meta.xattrs),
        };
        *inode = Inode { meta: meta(&stat, xattrs), kind: Kind::File(data) };
    }
    for job in &lost {
        read_others(build, &top, root, job, &mut tree, notes, progress)?;
    }
    remember.sort_unstable_by_key(|entry| entry.0);
    StatCache::save(&cache_path, &remember, build)?;
    Ok(tree)
}

fn last_name(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_bytes()
}

/// Reads what is under the names of a file that is not the one of the walk any more: a file replaced by rename(2) is the
/// new one, names that lead to one file still do, and what went away is left out.
fn read_others(
    build: &Build,
    top: &OwnedFd,
    root: &Path,
    job: &Job,
    tree: &mut Tree,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<()> {
    let mut found = HashMap::new();
    for (dir, path) in &job.names {
        let name = last_name(path);
        let key = |stat: &Stat| (stat.st_dev, stat.st_ino, seen(stat));
        if let Some((.., stat)) = open_file(top, root, path)?
            && let Some(&id) = found.get(&key(&stat))
        {
            tree.link(*dir, name, id)?;
            continue;
        }
        let Some((file, data, stat)) = read_file(build, progress, || open_file(top, root, path))? else {
            notes.add(GONE, path.as_os_str().as_bytes());
            tree.unlink(*dir, name);
            continue;
        };
        let mut xattrs = read_xattrs(&file, OsStr::new("")).at(root.join(path))?;
        clean_xattrs(&mut xattrs, name, notes);
        let id = tree.add(Inode { meta: meta(&stat, xattrs), kind: Kind::File(data) });
        tree.link(*dir, name, id)?;
        found.insert(key(&stat), id);
    }
    Ok(())
}

/// Reads the file of a job, if it is still there.
fn read_job(build: &Build, top: &OwnedFd, root: &Path, job: &Job, progress: &Progress) -> Result<Option<Read>> {
    let Some((file, data, stat)) = read_file(build, progress, || job.open(top, root))? else { return Ok(None) };
    let changed = seen(&stat) != job.seen;
    let xattrs = changed.then(|| read_xattrs(&file, OsStr::new("")).at(root.join(&job.names[0].1))).transpose()?;
    let is_settled = is_settled(&stat) && !sys::is_dirty(&file).unwrap_or(false);
    Ok(Some(Read { data, stat, xattrs, is_settled }))
}

/// Whether a later change would have other times, but for one through a mapping into a page that is dirty already.
fn is_settled(stat: &Stat) -> bool {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    stat.st_ctime.max(stat.st_mtime) < now - RACY_S
}

/// Reads what `open` opens, again when it changes meanwhile; returns it with what stat says of it.
fn read_file(
    build: &Build,
    progress: &Progress,
    open: impl Fn() -> Result<Option<(File, PathBuf, Stat)>>,
) -> Result<Option<(File, Data, Stat)>> {
    let mut why = None;
    for _ in 0..3 {
        let Some((mut file, full, before)) = open()? else { return Ok(None) };
        if is_settled(&before) && sys::is_dirty(&file).unwrap_or(true) {
            sys::write_out(&file);
        }
        let data = match build.put_reader(&mut file, &full, |bytes| progress.add(bytes, false)) {
            // What a server says of a file that it has removed.
            Err(error @ Error::Io { .. }) if is_stale(&error) => {
                why = Some(error);
                continue;
            }
            other => other?,
        };
        let after = rustix::fs::fstat(file.as_fd()).at(&full)?;
        if seen(&before) == seen(&after) && data.size() == after.st_size as u64 {
            progress.add(0, true);
            return Ok(Some((file, data, after)));
        }
        why = Some(Error::Refused(format!(
            "{}: keeps changing while it is read; build from a copy or snapshot",
            full.display()
        )));
    }
    Err(why.expect("read at least once"))
}

fn is_stale(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::ESTALE))
}

#[cfg(test)]
thread_local! {
    /// What this thread's tests do when all names are known and nothing is read yet.
    static AFTER_WALK: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType};
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// Builds `tree`, in which `change` happens between the walk and the reading.
    fn build_while(store: &Store, tree: &Path, change: impl Fn() + 'static) -> Result<(Tree, Vec<String>)> {
        let (build, mut notes) = (store.build()?, Notes::default());
        AFTER_WALK.set(Some(Box::new(change)));
        let built = from_directory(&build, tree, Options::default(), &mut notes, &Progress::silent());
        AFTER_WALK.set(None);
        Ok((built?, notes.lines()))
    }

    #[test]
    fn what_is_replaced_while_the_tree_is_read_is_the_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let (top, aside) = (dir.path().join("tree"), dir.path().join("aside"));
        fs::create_dir(&top).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        for name in ["a", "b", "both1", "gone", "half1", "one1", "z"] {
            fs::write(top.join(name), [1; 1000]).unwrap();
        }
        for (first, second) in [("both1", "both2"), ("half1", "half2"), ("one1", "one2")] {
            fs::hard_link(top.join(first), top.join(second)).unwrap();
        }
        let change = {
            let top = top.clone();
            move || {
                // The first file of all, one of several names, all of them, and one with the other gone.
                for (name, byte, mode) in [
                    ("a", 2, 0o600),
                    ("z", 3, 0o751),
                    ("both1", 4, 0o644),
                    ("both2", 5, 0o644),
                    ("half1", 6, 0o644),
                    ("one1", 7, 0o644),
                ] {
                    fs::write(&aside, vec![byte; 2000]).unwrap();
                    fs::set_permissions(&aside, fs::Permissions::from_mode(mode)).unwrap();
                    fs::rename(&aside, top.join(name)).unwrap();
                }
                fs::remove_file(top.join("gone")).unwrap();
                fs::remove_file(top.join("one2")).unwrap();
            }
        };
        let (mut tree, notes) = build_while(&store, &top, change).unwrap();
        let (old, new) = (|| Digest::of(&[1; 1000]), |byte| Digest::of(&[byte; 2000]));
        for (name, digest) in [
            ("a", new(2)),
            ("b", old()),
            ("both1", new(4)),
            ("both2", new(5)),
            ("half1", new(6)),
            ("half2", old()),
            ("one1", new(7)),
            ("z", new(3)),
        ] {
            let id = tree.find(name.as_bytes()).unwrap();
            let Kind::File(Data::Object(found, _)) = tree.inode(id).kind else { panic!("{name}") };
            assert_eq!(found, digest, "{name}");
        }
        for (name, mode) in [("a", 0o600), ("z", 0o751)] {
            let id = tree.find(name.as_bytes()).unwrap();
            assert_eq!(tree.inode(id).meta.mode, mode, "{name}");
        }
        assert!(tree.find(b"gone").is_none() && tree.find(b"one2").is_none());
        assert!(notes.len() == 1 && notes[0].contains("went away") && notes[0].contains("(2; first: "), "{notes:?}");
    }

    /// What has the number of a file that went away is as another content in its place.
    #[test]
    fn what_is_recorded_of_a_file_is_what_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("tree");
        fs::create_dir(&top).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        for name in ["a", "link1", "z"] {
            fs::write(top.join(name), [1; 1000]).unwrap();
        }
        fs::hard_link(top.join("link1"), top.join("link2")).unwrap();
        let change = {
            let top = top.clone();
            move || {
                for name in ["a", "link1"] {
                    let path = top.join(name);
                    fs::write(&path, [2; 3000]).unwrap();
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o4711)).unwrap();
                    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
                    File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
                    let _ = rustix::fs::setxattr(&path, "user.new", b"1", rustix::fs::XattrFlags::empty());
                }
            }
        };
        let has = || read_xattrs(&File::open(top.join("a")).unwrap(), OsStr::new("")).unwrap();
        let (mut tree, _) = build_while(&store, &top, change).unwrap();
        for (name, mode, byte) in [("a", 0o4711, 2), ("link1", 0o4711, 2), ("link2", 0o4711, 2), ("z", 0o644, 1)] {
            let id = tree.find(name.as_bytes()).unwrap();
            let inode = tree.inode(id);
            let digest = Digest::of(&vec![byte; if byte == 2 { 3000 } else { 1000 }]);
            assert!(matches!(inode.kind, Kind::File(Data::Object(found, _)) if found == digest), "{name}");
            if byte == 2 {
                assert_eq!((inode.meta.mode, inode.meta.mtime_s), (mode, 1_000_000), "{name}");
                assert_eq!(inode.meta.xattrs, has(), "{name}");
            }
        }
        assert_eq!(tree.find(b"link1"), tree.find(b"link2"));
    }

    #[test]
    fn what_is_replaced_by_another_kind_of_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("tree");
        fs::create_dir(&top).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        let file = top.canonicalize().unwrap().join("file");
        let makes: [fn(&Path); 3] = [
            |path| symlink("x", path).unwrap(),
            |path| fs::create_dir(path).unwrap(),
            |path| rustix::fs::mknodat(CWD, path, FileType::Socket, Mode::RUSR, 0).unwrap(),
        ];
        for make in makes {
            fs::write(&file, [1; 1000]).unwrap();
            let at = file.clone();
            let change = move || {
                fs::remove_file(&at).unwrap();
                make(&at);
            };
            let error = build_while(&store, &top, change).unwrap_err().to_string();
            assert!(error.starts_with(file.to_str().unwrap()) && error.contains("build again"), "{error}");
            fs::remove_file(&file).or_else(|_| fs::remove_dir(&file)).unwrap();
        }
    }
}
