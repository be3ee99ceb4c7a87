//! Mounts: the metadata image under overlayfs, with the objects as its data-only layer.
//!
//! Two files of equal content, in whatever images, lead overlayfs to one object, and the page cache belongs to the
//! object: that is the whole trick, and the kernel does it. What mounts where:
//!
//! | kind | metadata | needs |
//! |---|---|---|
//! | `erofs` | EROFS image, mounted from the plain file | root, Linux 6.12 |
//! | `loop` | the same through a loop device | root, Linux 6.8 |
//! | `directory` | a directory of empty files with overlay attributes | root on 6.8; a user namespace on 6.16 |
//! | `native` | self-contained EROFS with `inode_share` | root, Linux 7.0 with EROFS_FS_PAGE_CACHE_SHARE |
//!
//! A mount names its store, domain and image in the mount table, so that the table alone says what is mounted: there
//! is no record of ours to go stale. While a mount is set up its image is leased.

use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::profile::Profile;
use crate::shelf::{self, Shelf};
use crate::store::{Lease, ROOT_DIRECTORY, Record, SHELVED, Store, USER_DIRECTORY, is_full_or_fixed};
use crate::sys;
use crate::tree::{Data, Id, Kind as FileKind, ROOT, Tree, show, show_start};
use pagefold_os::mountinfo::{self, Mount};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How the metadata is shown; see the module's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The best that this kernel and user have.
    #[default]
    Auto,
    /// Self-contained EROFS with `inode_share`.
    Native,
    /// EROFS from the plain file.
    Erofs,
    /// EROFS through a loop device.
    Loop,
    /// A metadata directory.
    Directory,
}

/// How to mount.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which metadata.
    pub kind: Kind,
    /// Directory for changes (`upper` and `work` are made in it); read-only without.
    pub upper: Option<PathBuf>,
    /// Ignore set-user-id bits.
    pub nosuid: bool,
    /// Refuse device nodes.
    pub nodev: bool,
    /// Refuse to run programs.
    pub noexec: bool,
    /// Do not read ahead what the image's start profile names.
    pub no_prefetch: bool,
}

impl Options {
    /// What is to be read ahead.
    pub(crate) fn profile(&self, store: &Store, digest: &Digest) -> Option<Profile> {
        if self.no_prefetch { None } else { Profile::load(store, digest) }
    }
}

/// What a mount became.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Mounted {
    /// The kind used.
    pub kind: Kind,
    /// What is not as in the image, one line each.
    pub notes: Vec<String>,
    /// Bytes that the image's start profile had the kernel read ahead.
    pub prefetched_bytes: u64,
}

fn failed(what: impl Into<String>) -> impl FnOnce(Errno) -> Error {
    let what = what.into();
    move |errno| Error::Mount { what, source: errno.into() }
}

/// A file system being configured; its errors carry what the kernel said about them.
struct Context {
    fd: OwnedFd,
    name: &'static str,
    /// What paths by descriptor stand for, until the mount is made.
    held: Vec<OwnedFd>,
}

/// The most bytes of an option's value.
const OPTION_MAX: usize = 255;

impl Context {
    fn new(name: &'static str) -> Result<Self> {
        let fd = rustix::mount::fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed(name))?;
        Ok(Self { fd, name, held: Vec::new() })
    }

    fn explain(&self, step: &str, errno: Errno) -> Error {
        let mut said = String::new();
        let mut buffer = [0u8; 1024];
        while let Ok(count @ 1..) = rustix::io::read(&self.fd, &mut buffer) {
            let line = String::from_utf8_lossy(&buffer[..count]).into_owned();
            // Each message starts with its severity: "e ", "w " or "i ".
            said = line.get(2..).unwrap_or_default().trim_end().to_string();
        }
        let what =
            if said.is_empty() { format!("{} {step}", self.name) } else { format!("{} {step} ({said})", self.name) };
        failed(what)(errno)
    }

    fn string(&self, key: &str, value: impl AsRef<OsStr>) -> Result<()> {
        rustix::mount::fsconfig_set_string(self.fd.as_fd(), key, value.as_ref())
            .map_err(|errno| self.explain(key, errno))
    }

    /// A path of any length: one that is too long for an option goes by its directory's descriptor, so that the mount
    /// table still has the name.
    fn path(&mut self, key: &str, path: &Path) -> Result<()> {
        if path.as_os_str().len() <= OPTION_MAX {
            return self.string(key, path);
        }
        let (dir, name) = path.parent().zip(path.file_name()).unwrap_or((path, OsStr::new("")));
        let fd = open_path(dir).at(dir)?;
        self.string(key, by_descriptor(&fd).join(name))?;
        self.held.push(fd);
        Ok(())
    }

    fn flag(&self, key: &str) -> Result<()> {
        rustix::mount::fsconfig_set_flag(self.fd.as_fd(), key).map_err(|errno| self.explain(key, errno))
    }

    fn create(&self, attributes: MountAttrFlags) -> Result<OwnedFd> {
        rustix::mount::fsconfig_create(self.fd.as_fd()).map_err(|errno| self.explain("create", errno))?;
        rustix::mount::fsmount(self.fd.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(|errno| self.explain("mount", errno))
    }
}

/// Whether this process stands in the first user namespace, where EROFS may be mounted and `trusted.*` be set.
pub(crate) fn in_initial_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// Whether the kernel's EROFS knows `inode_share`.
pub(crate) fn has_inode_share() -> bool {
    Context::new("erofs").is_ok_and(|context| context.flag("inode_share").is_ok())
}

/// Mounts the EROFS image `path`, detached. What the kernel reads of large directories it reads past the file's own pages,
/// or it would have them twice, unless they are `cached` there already.
pub(crate) fn erofs_mount(path: &Path, share: Option<&str>, cached: bool) -> Result<OwnedFd> {
    let attempt = |direct: bool| {
        let mut context = Context::new("erofs")?;
        if share.is_none() {
            context.path("source", path)?;
        } else {
            // By this name the mount table tells of the image.
            context.string("source", path)?;
        }
        context.flag("ro")?;
        if direct {
            context.flag("directio")?;
        }
        if let Some(domain) = share {
            context.flag("inode_share")?;
            context.string("domain_id", domain)?;
        }
        context.create(MountAttrFlags::MOUNT_ATTR_RDONLY)
    };
    if cached { attempt(false) } else { attempt(true).or_else(|_| attempt(false)) }
}

/// Overlayfs over one metadata layer and data-only layers, detached.
pub(crate) fn overlay_mount(
    source: &str,
    meta: &Path,
    objects: &[PathBuf],
    user: bool,
    options: &Options,
    attributes: MountAttrFlags,
) -> Result<OwnedFd> {
    // Since 6.16 the layers alone say it; before, data-only layers want metacopy, and with an upper layer metacopy
    // also keeps sharing across a chmod. `userxattr` and metacopy exclude each other.
    let attempt = |metacopy: bool| {
        let mut context = Context::new("overlay")?;
        context.string("source", source)?;
        context.path("lowerdir+", meta)?;
        for objects in objects {
            context.path("datadir+", objects)?;
        }
        if user {
            context.flag("userxattr")?;
        }
        if metacopy {
            context.string("metacopy", "on")?;
            context.string("redirect_dir", if options.upper.is_some() { "on" } else { "follow" })?;
        }
        match &options.upper {
            Some(upper) => {
                context.path("upperdir", &upper.join("upper"))?;
                context.path("workdir", &upper.join("work"))?;
            }
            None => context.flag("ro")?,
        }
        context.create(attributes)
    };
    if user { attempt(false) } else { attempt(true).or_else(|first| attempt(false).map_err(|_| first)) }
}

/// Puts a detached mount at `target`.
pub(crate) fn attach(mount: &OwnedFd, target: &Path) -> Result<()> {
    rustix::mount::move_mount(mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(failed(target.display().to_string()))
}

/// Refuses what is no mountpoint, before anything is done for it.
fn check_mountpoint(target: &Path) -> Result<()> {
    let what = match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => "no such directory; make it first (mkdir)",
        Ok(meta) if !meta.is_dir() => "not a directory; give one to mount on",
        // It would be out of sight below every process's own root, and who unmounts the root makes that read-only.
        Ok(_) if target.canonicalize().is_ok_and(|target| target.parent().is_none()) => {
            "the root cannot be mounted on; give another directory"
        }
        // Whatever else is wrong the mount itself will tell.
        _ => return Ok(()),
    };
    Err(Error::Refused(format!("mount: {}: {what}", target.display())))
}

/// Mounts an image at `target`. It stays while it is mounted; until then it is for the caller to keep it, by [`Store::hold`].
///
/// # Errors
/// A damaged image, a kernel or user that cannot.
pub fn mount(store: &Store, record: &Record, target: &Path, options: &Options) -> Result<Mounted> {
    check_mountpoint(target)?;
    let lease = Lease::new(store)?;
    let profile = options.profile(store, &record.digest);
    std::thread::scope(|scope| {
        if let Some(profile) = &profile {
            // The objects need no mount, and the disk need not rest while there is none.
            scope.spawn(|| profile.read_objects(store, &record.digest, false));
        }
        let (fd, mut mounted) = detached(store, &record.digest, &lease, options, None)?;
        if let Some(profile) = &profile {
            profile.look_up(&fd);
            mounted.prefetched_bytes = profile.bytes();
        }
        attach(&fd, target)?;
        Ok(mounted)
    })
}

/// Mounts an image attached nowhere yet; the mount lives as long as the descriptor or where it is attached. Where a program
/// starts in it at once, `aside` is a place in a namespace of its own where the metadata's mount may stay until the old root
/// goes: to end it by itself takes longer than to make it.
pub(crate) fn detached(
    store: &Store,
    digest: &Digest,
    lease: &Lease,
    options: &Options,
    aside: Option<&Path>,
) -> Result<(OwnedFd, Mounted)> {
    if !lease.claim_tree(digest)? {
        let path = store.tree_path(digest);
        return Err(Error::Damaged(format!("{}: missing; build the image again", path.display())));
    }
    let initial = in_initial_namespace();
    let is_directory = options.kind == Kind::Directory || options.kind == Kind::Auto && !initial;
    let shelf = match options.kind {
        Kind::Native => None,
        _ => checked(store, digest, lease, is_directory, aside.is_some())?,
    };
    let (metadata, mut objects) = match &shelf {
        Some(shelf) => (shelf.metadata(), vec![shelf.objects()]),
        None => (store.tree_path(digest), vec![store.objects_dir()]),
    };
    if options.upper.is_some() {
        // Of a file whose mode was changed the upper layer says where its content is, as the mount had it that changed it.
        let others = [Shelf::of(store, digest).objects(), store.objects_dir()];
        objects
            .extend(others.into_iter().filter(|other| !objects.contains(other) && other.is_dir()).collect::<Vec<_>>());
    }
    let mut attributes = MountAttrFlags::empty();
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, options.nosuid);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, options.nodev);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.noexec);
    if options.upper.is_none() {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    // Locked until the mount is there.
    let (_lock, mut notes) = match &options.upper {
        Some(upper) => {
            prepare_upper(store, digest, upper, !initial, shelf.is_some()).map(|(lock, notes)| (Some(lock), notes))?
        }
        None => (None, Vec::new()),
    };
    let full = store.full_path(digest);
    let domain = format!("{}.{}", store.id(), store.domain());
    let source = store.mount_source(digest);
    let done = |kind, notes| Mounted { kind, notes, prefetched_bytes: 0 };
    let native = || -> Result<(OwnedFd, Mounted)> {
        if full.as_os_str().len() > OPTION_MAX {
            return Err(Error::Refused(format!(
                "mount: {}: more than {OPTION_MAX} bytes, too long for a native mount; use another --kind",
                full.display()
            )));
        }
        if full.exists() && !store.has_full(digest) {
            return Err(Error::Damaged(format!("{}: damaged; build the image with --native again", full.display())));
        }
        let fd = erofs_mount(&full, Some(&domain), false)?;
        if options.upper.is_some() {
            return Err(Error::Refused("mount: a native mount is read-only; use --kind erofs with --upper".into()));
        }
        Ok((fd, done(Kind::Native, Vec::new())))
    };
    let over = |meta: &OwnedFd| -> Result<OwnedFd> {
        let overlay = |meta: &Path| overlay_mount(&source, meta, &objects, false, options, attributes);
        if let Some(aside) = aside {
            attach(meta, aside)?;
            return overlay(&by_descriptor(meta));
        }
        // Since 6.15 a layer may be a mount that is attached nowhere.
        overlay(&by_descriptor(meta)).or_else(|first| {
            let place = store.path("staging").join(lease.id()).join("meta");
            fs::create_dir_all(&place).at(&place)?;
            let result = match attach(meta, &place) {
                Ok(()) => overlay(&place),
                Err(_) => Err(first),
            };
            let _ = rustix::mount::unmount(&place, UnmountFlags::DETACH);
            let _ = fs::remove_dir(&place).and_then(|()| fs::remove_dir(place.parent().expect("staging/ID")));
            result
        })
    };
    let erofs = || -> Result<(OwnedFd, Mounted)> {
        let meta = erofs_mount(&metadata, None, aside.is_some())?;
        Ok((over(&meta)?, done(Kind::Erofs, Vec::new())))
    };
    let through_loop = || -> Result<(OwnedFd, Mounted)> {
        let file = File::open(&metadata).at(&metadata)?;
        let (device, _held) =
            sys::loop_device(&file).map_err(|source| Error::Mount { what: "loop device".into(), source })?;
        let meta = erofs_mount(&device, None, false)?;
        Ok((over(&meta)?, done(Kind::Loop, Vec::new())))
    };
    let directory = || -> Result<(OwnedFd, Mounted)> {
        let mut objects = objects.clone();
        let made = metadata_directory(store, digest, lease, !initial, shelf.is_some());
        let (meta, notes) = match made {
            // There may be one from before there was a shelf.
            Err(error) if shelf.is_some() && is_full_or_fixed(&error) => {
                if !objects.contains(&store.objects_dir()) {
                    objects.push(store.objects_dir());
                }
                metadata_directory(store, digest, lease, !initial, false).map_err(|_| error)?
            }
            made => made?,
        };
        let fd = overlay_mount(&source, &meta, &objects, !initial, options, attributes)?;
        Ok((fd, done(Kind::Directory, notes)))
    };
    let (fd, mut mounted) = match options.kind {
        Kind::Native => native(),
        Kind::Erofs => erofs(),
        Kind::Loop => through_loop(),
        Kind::Directory => directory(),
        Kind::Auto if !initial => directory(),
        Kind::Auto => {
            let named = full.as_os_str().len() <= OPTION_MAX;
            if named && store.has_full(digest) && has_inode_share() && options.upper.is_none() {
                native()
            } else {
                erofs().or_else(|first| through_loop().or_else(|_| directory()).map_err(|_| first))
            }
        }
    }?;
    mounted.notes.append(&mut notes);
    let damaged = store.count_damaged(digest);
    if damaged > 0 {
        mounted.notes.push(format!(
            "{damaged} of the image's objects were found damaged and are shown as they are: pagefold image verify names them, \
             a build that has them again mends them"
        ));
    }
    Ok((fd, mounted))
}

/// The image's shelf, and what is to be mounted checked: the kernel shall parse only what our writer wrote. It will want few of
/// these pages: what the check alone brings into memory goes out again, unless it is wanted at once.
fn checked(store: &Store, digest: &Digest, lease: &Lease, is_directory: bool, at_once: bool) -> Result<Option<Shelf>> {
    let shelf = Shelf::of(store, digest);
    if is_directory {
        return if shelf.seems_whole(store, digest) { Ok(Some(shelf)) } else { shelf::find(store, digest, lease) };
    }
    let is_cold =
        |path: &Path| File::open(path).is_ok_and(|file| sys::cached_pages(&file).is_ok_and(|pages| pages == 0));
    // By name: who wants a damaged one replaced looks whether somebody has it open.
    let mut cold_files: Vec<_> =
        [shelf.metadata(), store.tree_path(digest)].into_iter().filter(|path| is_cold(path)).collect();
    let found = shelf::find(store, digest, lease)?;
    if found.is_none() {
        store.check_tree(digest)?;
    }
    if at_once {
        cold_files.clear();
    }
    for file in cold_files.iter().filter_map(|path| File::open(path).ok()) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
    Ok(found)
}

/// How long a mount that is just ending may still have its upper directory.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Whether some mount, in whatever namespace, has its changes in `upper`: overlayfs knows, and refuses such a layer to who
/// wants an index. It looks at that first, and at a work directory that is the same directory next, which it refuses in
/// any case: before it has written anything, and before it finds that a user namespace has no index. Each refusal
/// is a line in the kernel's log.
fn in_use(upper: &Path, user: bool) -> bool {
    let layer = upper.join("upper");
    let attempt = || -> Result<()> {
        let mut context = Context::new("overlay")?;
        for key in ["lowerdir+", "upperdir", "workdir"] {
            context.path(key, &layer)?;
        }
        if user {
            context.flag("userxattr")?;
        }
        context.string("index", "on")?;
        rustix::mount::fsconfig_create(context.fd.as_fd()).map_err(failed("overlay"))
    };
    // Whatever else is wrong the mount itself will tell.
    let is_busy = |error| matches!(error, Error::Mount { source, .. } if source.raw_os_error() == Some(libc::EBUSY));
    attempt().is_err_and(is_busy)
}

/// Makes the directory `upper`, and none above it.
fn make_upper(upper: &Path) -> Result<()> {
    pagefold_os::own::make_last(upper, 0o777).map_err(|error| {
        let cure = "give a directory, or where one can be made";
        Error::Refused(format!("mount: --upper {}: {error}; {cure}", upper.display()))
    })
}

/// Makes the directories of `upper`, and notes in it whose changes it has: over another image they would be taken for
/// changes of that one's files, and an old size and mode be shown over new bytes. Two mounts at once would not know of
/// each other's changes, so the second is refused. So are changes over the image's shelf where that is not `shelved`: of a
/// file whose mode was changed there is nothing else that says where its content is. Returns the directory, locked, and what
/// the root lacks.
fn prepare_upper(
    store: &Store,
    digest: &Digest,
    upper: &Path,
    user: bool,
    shelved: bool,
) -> Result<(File, Vec<String>)> {
    let (root, note, shelf_note) = (upper.join("upper"), upper.join("image"), upper.join("shelved"));
    make_upper(upper)?;
    let lock = File::open(upper).at(upper)?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).at(upper)?;
    let there = root.exists();
    let (began, mut pause) = (Instant::now(), Duration::from_millis(20));
    while there && in_use(upper, user) {
        if began.elapsed() > END_PATIENCE {
            return Err(Error::Refused(format!(
                "mount: {} is in use by another mount; unmount that one, or give --upper another directory",
                upper.display()
            )));
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    for part in [&root, &upper.join("work")] {
        fs::create_dir_all(part).at_output(part)?;
    }
    let noted = match fs::read_to_string(&note) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        other => Some(other.at(&note)?),
    };
    // Without changes it is anybody's.
    let empty = fs::read_dir(&root).at(&root)?.next().is_none();
    let own = there && noted.as_deref().map(str::trim_end) == Some(&digest.to_string());
    if own && !shelved && !empty && shelf_note.exists() {
        return Err(Error::Refused(format!(
            "mount: {} has changes that lead to the image's shelf, and there is none and none can be made (no room in the \
             store, or nothing may be written); give it room, or give --upper another directory",
            upper.display()
        )));
    }
    if let (Some(noted), false, false) = (&noted, empty, own) {
        let of = Digest::parse(noted.trim_end()).map_or(noted.trim_end().into(), |digest| store.names_of(&digest));
        return Err(Error::Refused(format!(
            "mount: {} has the changes of image {of}, not of {}; mount that one, or give --upper another directory",
            upper.display(),
            store.names_of(digest),
        )));
    }
    let mut notes = BTreeMap::new();
    if empty && !own {
        without_xattrs(&root)?;
        // The root of the mount is the upper directory: it must look as the image's root does.
        set_meta(&store.tree(digest)?, &root, ROOT, user, &mut notes)?;
    }
    // Before the first change, and durable before it.
    let shelf_noted = match (shelved, shelf_note.exists()) {
        (true, false) => File::create(&shelf_note).and_then(|_| lock.sync_all()),
        (false, true) => fs::remove_file(&shelf_note),
        _ => Ok(()),
    };
    match shelf_noted {
        // Changes of a version before, perhaps on a full disk: they can be mounted without a note as well.
        Err(_) if own && shelved => {}
        noted => noted.at_output(&shelf_note)?,
    }
    if own {
        return Ok((lock, Vec::new()));
    }
    let staged = upper.join("image.new");
    let mut file = File::create(&staged).at_output(&staged)?;
    writeln!(file, "{digest}").and_then(|()| file.sync_all()).at_output(&staged)?;
    fs::rename(&staged, &note).at_output(&note)?;
    lock.sync_all().at_output(upper)?;
    // A user's metadata directory has the same, and says it.
    Ok((lock, if user { Vec::new() } else { note_lines(&notes) }))
}

/// Takes away a directory's attributes: access control lists that a new one has inherited, and would hand on to all that is
/// made in it, and what it has of another image.
fn without_xattrs(dir: &Path) -> Result<()> {
    let mut names = vec![0; 1 << 16];
    let count = match rustix::fs::listxattr(dir, &mut names[..]) {
        Err(Errno::NOTSUP) => 0,
        other => other.at(dir)?,
    };
    for name in names[..count].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        match rustix::fs::removexattr(dir, name) {
            // What the system's policy has put there stays.
            Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM | Errno::ACCESS) => {}
            other => other.at(dir)?,
        }
    }
    Ok(())
}

/// What was left out, one line each.
fn note_lines(notes: &BTreeMap<&'static str, u64>) -> Vec<String> {
    notes.iter().map(|(what, count)| format!("{what} ({count})")).collect()
}

/// A name for the ids that this process's user namespace has: who has others makes files of other owners.
fn mapping() -> Result<String> {
    let mut maps = Vec::new();
    for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
        maps.extend(fs::read(map).at(map)?);
    }
    let mut name = Digest::of(&maps).hex();
    name.truncate(8);
    Ok(name)
}

/// The image's metadata as a directory of files without data, made once per image and mapping of ids; `shelved` if they lead
/// to its shelf.
fn metadata_directory(
    store: &Store,
    digest: &Digest,
    lease: &Lease,
    user: bool,
    shelved: bool,
) -> Result<(PathBuf, Vec<String>)> {
    let mapping = if user { Some(mapping()?) } else { None };
    let target = store.directory_path(digest, mapping.as_deref(), shelved);
    let mut notes_path = target.clone().into_os_string();
    notes_path.push(".notes");
    let notes_path = PathBuf::from(notes_path);
    if target.exists() {
        let notes = fs::read_to_string(&notes_path).unwrap_or_default();
        return Ok((target, notes.lines().map(str::to_string).collect()));
    }
    let tree = store.tree(digest)?;
    lease.write_down()?;
    let staged = store.path("staging").join(lease.id());
    fs::create_dir_all(&staged).at(&staged)?;
    let made = make_directory(store, &tree, &staged, user, shelved, &target, &notes_path);
    // Empty if all went well.
    let _ = remove_tree(&staged);
    Ok((target, made?))
}

/// Writes the metadata directory of `tree` below `staged`, which nobody else sees, and gives it the name `target`. Returns
/// what is not as in the image, as it is under `notes_path`.
fn make_directory(
    store: &Store,
    tree: &Tree,
    staged: &Path,
    user: bool,
    shelved: bool,
    target: &Path,
    notes_path: &Path,
) -> Result<Vec<String>> {
    // Before the first write, of whose loss it is to hear.
    let disk = File::open(staged).at(staged)?;
    let place = staged.join("tree");
    fs::create_dir(&place).at(&place)?;
    without_xattrs(&place)?;
    let mut notes = BTreeMap::new();
    write_directory(tree, &place, user, &Redirects::new(tree, shelved), &mut notes).map_err(|error| match error {
        Error::Io { path, source } if source.raw_os_error() == Some(libc::ENAMETOOLONG) => {
            too_long(store, &place, &path)
        }
        other => other,
    })?;
    let lines = note_lines(&notes);
    let notes_staged = staged.join("notes");
    fs::write(&notes_staged, lines.join("\n")).at(&notes_staged)?;
    // What has its name is complete, after a power cut too; and two who make it at once write the same.
    store.settle(&disk, staged)?;
    fs::rename(&notes_staged, notes_path).at(notes_path)?;
    match fs::rename(&place, target) {
        Err(error) if !target.exists() => Err(error).at(target),
        _ => Ok(lines),
    }
}

/// What is wrong with `path` in the metadata directory `place`; whoever has such a path does not want to read it.
fn too_long(store: &Store, place: &Path, path: &Path) -> Error {
    let inside = path.strip_prefix(place).unwrap_or(path).as_os_str().as_bytes();
    Error::Refused(format!(
        "mount: {} ({} bytes): too long for a metadata directory in {}; give the store a shorter path, or mount as root",
        show_start(inside),
        inside.len(),
        store.root().display()
    ))
}

/// Removes a directory whose directories may forbid it, and which may be deeper than a path may be long, or a process may
/// have files open: what lies deeper is moved up, so that two directories are open at a time and names are enough.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    let remove = || -> rustix::io::Result<()> {
        rustix::fs::chmod(path, Mode::RWXU)?;
        let top = open_dir(CWD, path)?;
        let mut number = 0u64;
        drain(&top, |name, is_dir| {
            if !is_dir {
                return rustix::fs::unlinkat(&top, name, AtFlags::empty());
            }
            rustix::fs::chmodat(&top, name, Mode::RWXU, AtFlags::empty())?;
            let dir = open_dir(&top, name)?;
            drain(&dir, |name, is_dir| {
                if !is_dir {
                    return rustix::fs::unlinkat(&dir, name, AtFlags::empty());
                }
                // A directory that goes to another is written to.
                rustix::fs::chmodat(&dir, name, Mode::RWXU, AtFlags::empty())?;
                loop {
                    number += 1;
                    match rustix::fs::renameat(&dir, name, &top, number.to_string()) {
                        // The name is the tree's own.
                        Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                        other => break other,
                    }
                }
            })?;
            rustix::fs::unlinkat(&top, name, AtFlags::REMOVEDIR)
        })?;
        rustix::fs::rmdir(path)
    };
    remove().at(path)
}

/// What a file, or a directory and all below it, takes on the disk, bytes. What is gone, or not for this user to look at, is
/// left out, and so is what is mounted there.
pub(crate) fn disk_bytes(path: &Path) -> u64 {
    let Ok(top) = fs::symlink_metadata(path) else { return 0 };
    let (mut bytes, mut todo, mut linked) = (0, vec![path.to_path_buf()], HashSet::new());
    while let Some(path) = todo.pop() {
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        // All names of a file lead to the same blocks.
        if meta.dev() != top.dev() || !meta.is_dir() && meta.nlink() > 1 && !linked.insert(meta.ino()) {
            continue;
        }
        bytes += meta.blocks() * 512;
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
        }
    }
    bytes
}

/// The same of what a build or mount has staged. On a shelf the objects' blocks are theirs.
pub(crate) fn staged_bytes(path: &Path) -> u64 {
    let shelf = path.join(shelf::END);
    if !shelf.exists() {
        return disk_bytes(path);
    }
    let parts = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    parts.map(|part| if part == shelf { shelf::disk_bytes(&part) } else { disk_bytes(&part) }).sum()
}

fn open_dir(at: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Has `take` take each entry out of a directory, with its name and whether it is a directory, until there is none.
fn drain(dir: &OwnedFd, mut take: impl FnMut(&CStr, bool) -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    loop {
        let mut empty = true;
        for entry in rustix::fs::Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    FileType::from_raw_mode(rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
                }
                known => known,
            };
            take(name, kind == FileType::Directory)?;
            empty = false;
        }
        // What is added while a directory is read may be missing from what was read.
        if empty {
            return Ok(());
        }
    }
}

/// What is no loss to who has a /dev of his own.
pub(crate) const NO_DEV_NODES: &str = "device nodes are missing in /dev: making them needs root";

/// Where overlayfs finds an object.
enum Redirects {
    /// By its digest, in the directory of all objects.
    Digests,
    /// On the image's shelf. What is told so fits into ext4's inodes: a digest takes each a block of its own.
    Places(HashMap<Digest, String>),
}

impl Redirects {
    fn new(tree: &Tree, shelved: bool) -> Self {
        if shelved { Self::Places(shelf::placed(tree).collect()) } else { Self::Digests }
    }

    fn of(&self, digest: &Digest) -> String {
        match self {
            Self::Digests => format!("/{}", digest.object_path()),
            Self::Places(places) => places[digest].clone(),
        }
    }
}

/// Writes `tree` below `place`, which nobody else sees yet: all names are new, so no link can be followed.
fn write_directory(
    tree: &Tree,
    place: &Path,
    user: bool,
    redirects: &Redirects,
    notes: &mut BTreeMap<&'static str, u64>,
) -> Result<()> {
    let prefix = if user { "user.overlay." } else { "trusted.overlay." };
    let mut made: HashMap<Id, PathBuf> = HashMap::new();
    let mut dirs = Vec::new();
    let mut result = Ok(());
    tree.walk(|path, id| {
        if result.is_ok() {
            result = write_one(tree, place, path, id, prefix, redirects, &mut made, &mut dirs, notes);
        }
    });
    result?;
    // Modes and times of directories last: what is made in them changes both.
    for (path, id) in dirs.into_iter().rev() {
        set_meta(tree, &path, id, user, notes)?;
    }
    Ok(())
}

#[expect(clippy::too_many_arguments, reason = "the loop body of write_directory, apart for its length")]
fn write_one(
    tree: &Tree,
    place: &Path,
    path: &[u8],
    id: Id,
    prefix: &str,
    redirects: &Redirects,
    made: &mut HashMap<Id, PathBuf>,
    dirs: &mut Vec<(PathBuf, Id)>,
    notes: &mut BTreeMap<&'static str, u64>,
) -> Result<()> {
    let full = if path.is_empty() { place.to_path_buf() } else { place.join(OsStr::from_bytes(path)) };
    let inode = tree.inode(id);
    if !matches!(inode.kind, FileKind::Dir(_)) {
        match made.get(&id).map(|first| fs::hard_link(first, &full)) {
            Some(Err(error)) if error.raw_os_error() == Some(libc::EMLINK) => {
                // One more file that leads to the same object, or has the same bytes.
                *notes
                    .entry("hard links are files of their own: more than the store's file system has")
                    .or_default() += 1;
            }
            Some(linked) => return linked.at(&full),
            None => {}
        }
        made.insert(id, full.clone());
    }
    let device = |kind: FileType, major: u32, minor: u32, notes: &mut BTreeMap<&'static str, u64>| {
        let device = rustix::fs::makedev(major, minor);
        match rustix::fs::mknodat(CWD, &full, kind, Mode::from_raw_mode(inode.meta.mode.into()), device) {
            Err(Errno::PERM) => {
                let in_dev = path.starts_with(b"dev/");
                let what = if in_dev { NO_DEV_NODES } else { "device nodes are missing: making them needs root" };
                *notes.entry(what).or_default() += 1;
                Ok(false)
            }
            other => other.map(|()| true).at(&full),
        }
    };
    let there = match &inode.kind {
        FileKind::Dir(_) => {
            if !path.is_empty() {
                fs::create_dir(&full).at(&full)?;
            }
            dirs.push((full, id));
            return Ok(());
        }
        FileKind::File(data) => {
            let mut file = File::options().write(true).create_new(true).open(&full).at(&full)?;
            match data {
                Data::Inline(bytes) => file.write_all(bytes).at(&full)?,
                Data::Object(digest, size) => {
                    file.set_len(*size).at(&full)?;
                    let redirect = redirects.of(digest);
                    for (name, value) in [("metacopy", ""), ("redirect", redirect.as_str())] {
                        let name = format!("{prefix}{name}");
                        rustix::fs::fsetxattr(&file, name, value.as_bytes(), XattrFlags::empty()).at(&full)?;
                    }
                }
            }
            true
        }
        FileKind::Symlink(target) => {
            rustix::fs::symlink(OsStr::from_bytes(target), &full).at(&full)?;
            true
        }
        FileKind::Char(major, minor) => device(FileType::CharacterDevice, *major, *minor, notes)?,
        FileKind::Block(major, minor) => device(FileType::BlockDevice, *major, *minor, notes)?,
        FileKind::Fifo => device(FileType::Fifo, 0, 0, notes)?,
        FileKind::Socket => device(FileType::Socket, 0, 0, notes)?,
    };
    if there {
        set_meta(tree, &full, id, prefix.starts_with("user"), notes)?;
    } else {
        made.remove(&id);
    }
    Ok(())
}

/// Whether the disk of `path` has no room for what an inode may need: an attribute may have 64 KiB, whatever the size of blocks.
fn is_full(path: &Path) -> Result<bool> {
    let dir = path.parent().unwrap_or(path);
    let room = rustix::fs::statvfs(dir).at(dir)?;
    Ok(room.f_bavail < 32 || room.f_bavail.saturating_mul(room.f_frsize) < 128 << 10)
}

/// What in a metadata directory is not as in the image: the first such thing. Owners, modes, times and attributes are left
/// aside, which a user may not have; so is what this user may not or cannot look at.
pub(crate) fn difference(tree: &Tree, place: &Path) -> Option<String> {
    let shelved = place.as_os_str().as_bytes().ends_with(SHELVED.as_bytes());
    let (redirects, mut found) = (Redirects::new(tree, shelved), None);
    tree.walk(|path, id| {
        if found.is_some() {
            return;
        }
        let full = if path.is_empty() { place.to_path_buf() } else { place.join(OsStr::from_bytes(path)) };
        let what = match differs(&tree.inode(id).kind, &full, &redirects) {
            Ok(what) => what.map(str::to_string),
            // The directory has a longer name than it was written under.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::ENAMETOOLONG)) => None,
            Err(error) => Some(error.to_string()),
        };
        found = what.map(|what| format!("/{}: {what}", show(path)));
    });
    found
}

/// What one file of a metadata directory has that the image has not, if anything.
fn differs(kind: &FileKind, path: &Path, redirects: &Redirects) -> io::Result<Option<&'static str>> {
    let meta = match fs::symlink_metadata(path) {
        // A user may not make them.
        Err(error)
            if error.kind() == io::ErrorKind::NotFound && matches!(kind, FileKind::Char(..) | FileKind::Block(..)) =>
        {
            return Ok(None);
        }
        other => other?,
    };
    if meta.mode() & libc::S_IFMT != u32::from(kind.type_bits()) {
        return Ok(Some("another kind of file"));
    }
    let same = match kind {
        FileKind::Dir(names) => {
            for entry in fs::read_dir(path)? {
                if !names.contains_key(entry?.file_name().as_bytes()) {
                    return Ok(Some("a name too many"));
                }
            }
            true
        }
        FileKind::File(Data::Inline(bytes)) => fs::read(path)? == **bytes,
        FileKind::File(Data::Object(digest, size)) => {
            let redirect = redirects.of(digest);
            let mut value = [0; 128];
            let mut leads_to = |prefix: &str| {
                let count = rustix::fs::lgetxattr(path, format!("{prefix}redirect"), &mut value[..]);
                count.map(|count| value[..count] == *redirect.as_bytes())
            };
            let leads = match leads_to("user.overlay.") {
                Err(Errno::NODATA | Errno::NOTSUP) => leads_to("trusted.overlay."),
                other => other,
            };
            meta.len() == *size && leads?
        }
        FileKind::Symlink(target) => fs::read_link(path)?.as_os_str().as_bytes() == &**target,
        FileKind::Char(major, minor) | FileKind::Block(major, minor) => {
            meta.rdev() == rustix::fs::makedev(*major, *minor)
        }
        FileKind::Fifo | FileKind::Socket => true,
    };
    Ok((!same).then_some("not what the image has"))
}

fn set_meta(tree: &Tree, path: &Path, id: Id, user: bool, notes: &mut BTreeMap<&'static str, u64>) -> Result<()> {
    let inode = tree.inode(id);
    let meta = &inode.meta;
    let owner = (Some(rustix::fs::Uid::from_raw(meta.uid)), Some(rustix::fs::Gid::from_raw(meta.gid)));
    match rustix::fs::chownat(CWD, path, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::PERM | Errno::INVAL) => {
            *notes.entry("files show your own user as owner: others need root").or_default() += 1;
        }
        other => other.at(path)?,
    }
    for (name, value) in &meta.xattrs {
        match rustix::fs::lsetxattr(path, &**name, value, XattrFlags::empty()) {
            Err(Errno::PERM | Errno::NOTSUP | Errno::ACCESS | Errno::INVAL) => {
                *notes.entry("attributes are missing: setting them needs root").or_default() += 1;
            }
            // A full disk passes, and what was left out would be missing for good.
            Err(errno @ Errno::NOSPC) if is_full(path)? => return Err(errno).at(path),
            // ext4 keeps all of an inode's attributes in one block.
            Err(Errno::NOSPC | Errno::TOOBIG | Errno::RANGE) => {
                *notes.entry("attributes are missing: too large for the store's file system").or_default() += 1;
            }
            other => other.at(path)?,
        }
    }
    if !matches!(inode.kind, FileKind::Symlink(_)) {
        let mode = if user { meta.mode & 0o7777 } else { meta.mode };
        rustix::fs::chmod(path, Mode::from_raw_mode(mode.into())).at(path)?;
    }
    let time = Timespec { tv_sec: meta.mtime_s, tv_nsec: meta.mtime_ns.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).at(path)
}

/// Whether a mount shows a metadata directory.
fn by_directory(mount: &Mount) -> bool {
    let name =
        |option: &[u8]| option.rsplit(|byte| *byte == b'/').next().and_then(|name| name.get(65..72)?.try_into().ok());
    let lower = mount.options.split(|byte| *byte == b',').filter(|option| option.starts_with(b"lowerdir"));
    lower.filter_map(name).any(|end: [u8; 7]| [ROOT_DIRECTORY, USER_DIRECTORY].map(str::as_bytes).contains(&&end[..]))
}

/// Unmounts what [`mount`] mounted at `target`; with `lazy` it is gone from there at once, and ends with its last user.
/// Nothing tells the collector of those who use a metadata directory without a mount: there `lazy` changes nothing.
///
/// # Errors
/// Nothing of ours is mounted there; it is in use.
pub fn umount(target: &Path, lazy: bool) -> Result<()> {
    let target = &target.canonicalize().at(target)?;
    // The kernel would make the root read-only instead, or take all there is out of sight.
    if target.parent().is_none() {
        return Err(Error::Refused("/: the root is not for pagefold to unmount".into()));
    }
    let table = fs::read("/proc/self/mountinfo").at("/proc/self/mountinfo")?;
    let last = mountinfo::parse(&table).filter(|mount| mount.at == *target).last();
    match last.as_ref().map(|mount| mount.source.as_os_str().as_bytes()) {
        Some(source) if source.starts_with(b"pagefold:") || source.ends_with(b".full.erofs") => {}
        Some(_) => return Err(Error::Refused(format!("{}: not mounted by pagefold; use umount", target.display()))),
        None => return Err(Error::Refused(format!("{}: nothing is mounted there", target.display()))),
    }
    let kept = last.is_some_and(|mount| by_directory(&mount));
    let flags = if lazy && !kept { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(target, flags).map_err(|errno| match errno {
        Errno::BUSY if kept => Error::Refused(format!(
            "{}: in use; end what uses it (a mount by a metadata directory cannot be unmounted before: gc would take it)",
            target.display()
        )),
        Errno::BUSY => Error::Refused(format!("{}: in use; end what uses it, or umount --lazy", target.display())),
        other => failed(target.display().to_string())(other),
    })
}

/// A name for an open file.
pub(crate) fn by_descriptor(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens a directory only to pass it on.
pub(crate) fn open_path(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Inode, Meta};
    use std::process::Command;

    #[test]
    fn a_mistyped_place_for_changes_makes_no_directories() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        for name in ["none/upper", "file", "file/upper"] {
            let error = make_upper(&dir.path().join(name)).unwrap_err().to_string();
            assert!(error.ends_with("; give a directory, or where one can be made"), "{error}");
        }
        assert!(!dir.path().join("none").exists());
        let new = dir.path().join("new");
        for _ in 0..2 {
            make_upper(&new).unwrap();
        }
    }

    #[test]
    fn a_path_too_long_for_a_directory_is_one_short_line() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap().without_sync();
        let (mut tree, mut path) = (Tree::default(), Vec::new());
        for _ in 0..20 {
            path.extend([b'x'; 250]);
            tree.put(
                &path,
                Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: FileKind::Dir(BTreeMap::new()) },
            )
            .unwrap();
            path.push(b'/');
        }
        let record = store.build().unwrap().publish("deep", &tree, "t", Default::default(), vec![]).unwrap();
        let error = metadata_directory(&store, &record.digest, &Lease::new(&store).unwrap(), true, true)
            .unwrap_err()
            .to_string();
        let short = error.len() < 500 + store.root().as_os_str().len();
        assert!(error.starts_with("mount: xxx") && error.contains("shorter path") && short, "{error}");
        let staged = fs::read_dir(store.path("staging")).unwrap().count();
        assert_eq!(staged, 0, "what was written so far is gone");
    }

    #[test]
    fn what_is_no_mountpoint_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let said = |path: &Path| check_mountpoint(path).unwrap_err().to_string();
        for (path, what) in
            [(&*dir.path().join("none"), "make it first"), (&file, "not a directory"), (Path::new("/"), "the root")]
        {
            assert!(said(path).contains(what), "{}", said(path));
        }
        assert!(said(Path::new("/proc/..")).contains("the root"));
        check_mountpoint(dir.path()).unwrap();
        assert!(umount(Path::new("/"), false).unwrap_err().to_string().contains("the root"));
    }

    /// In a child process with few descriptors: removes the tree.
    #[test]
    fn child_that_removes() {
        let Some(path) = std::env::var_os("PAGEFOLD_TEST_REMOVE") else { return };
        remove_tree(Path::new(&path)).unwrap();
    }

    #[test]
    fn a_tree_of_any_depth_and_mode_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut at = open_dir(CWD, &top).unwrap();
        for depth in 0..3000u32 {
            // Names that removing gives, too.
            let (name, mode) = (format!("{}", depth % 7), Mode::from_raw_mode(0o700));
            for name in [&name, "9"] {
                rustix::fs::mkdirat(&at, name, mode).unwrap();
            }
            rustix::fs::openat(&at, "8", OFlags::CREATE | OFlags::CLOEXEC, mode).unwrap();
            let below = open_dir(&at, &*name).unwrap();
            rustix::fs::chmodat(&at, "9", Mode::empty(), AtFlags::empty()).unwrap();
            rustix::fs::fchmod(&at, Mode::empty()).unwrap();
            at = below;
        }
        let mut child = Command::new("sh");
        child.args(["-c", "ulimit -n 64; exec \"$0\" --exact mount::tests::child_that_removes"]);
        let out = child.arg(std::env::current_exe().unwrap()).env("PAGEFOLD_TEST_REMOVE", &top).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
        assert!(!top.exists());
    }
}
