//! What images cost now: on disk, and in memory, counted on the store's own objects.
//!
//! The page cache of every mounted file is its object's, so one cachestat(2) per
//! object says what is resident. `memory_saved_bytes` is what plain copies would need beyond that: for each object its
//! resident bytes once for every further file of a mount that shows it. That is exact when each of those files has been
//! read as far as the object is resident, and an upper bound before.

use crate::digest::Digest;
use crate::dirs::{disk_bytes, staged_bytes};
use crate::error::{At, Error, Result};
use crate::export::is_erofs_full;
use crate::mounts::mounts;
use crate::progress::Progress;
use crate::shelf;
use crate::store::{DamagedImage, Lease, Record, Records, Store, is_marked};
use crate::sys::{self, PAGE};
use crate::tree::Tree;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// One image now.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ImageStat {
    /// Its record.
    #[serde(flatten)]
    pub record: Record,
    /// Bytes of objects that no other image of the domain has.
    pub own_bytes: u64,
    /// How often it is mounted.
    pub mounts: u64,
    /// Bytes of its objects in the page cache.
    pub resident_bytes: u64,
    /// Of those, bytes that another mounted image shows too.
    pub resident_shared_bytes: u64,
}

/// A domain now.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Stat {
    /// Images by name.
    pub images: u64,
    /// Mounts of them, in all namespaces we may see.
    pub mounts: u64,
    /// Bytes of all files of all images.
    pub logical_bytes: u64,
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub object_bytes: u64,
    /// Bytes of the metadata images.
    pub metadata_bytes: u64,
    /// Bytes of objects in the page cache.
    pub resident_bytes: u64,
    /// Of those, bytes that more than one file of the mounts shows.
    pub shared_bytes: u64,
    /// What plain copies would need in addition: for each object its resident bytes once for every further mounted file
    /// that shows it.
    pub memory_saved_bytes: u64,
    /// Images that cannot be read; they are not counted.
    pub damaged: Vec<DamagedImage>,
}

/// What a domain takes on the disk beside objects and metadata images.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Beside {
    /// Bytes of the self-contained images that `build --native` writes.
    pub native_bytes: u64,
    /// What the metadata directories take on the disk.
    pub directory_bytes: u64,
    /// What the shelves take: the metadata as it is mounted, and directories that lead to the objects in its order.
    pub shelf_bytes: u64,
    /// Bytes of the lists of objects, start profiles and stat caches.
    pub index_bytes: u64,
    /// What builds have staged that are in progress, or have died.
    pub staged_bytes: u64,
}

/// Looks at what there is beside objects and metadata images: at each file of metadata directories, which may be many.
///
/// # Errors
/// The system's.
pub fn beside(store: &Store) -> Result<Beside> {
    let (trees, staging, cache) = (store.path("trees"), store.path("staging"), store.path("cache"));
    let mut found = Beside::default();
    for entry in fs::read_dir(&trees).at(&trees)?.flatten() {
        let name = entry.file_name();
        let bytes = || entry.metadata().map_or(0, |meta| meta.len());
        match name.as_bytes().get(64..).unwrap_or_default() {
            b".full.erofs" => found.native_bytes += bytes(),
            b".objects" | b".start" | b".unshelved" => found.index_bytes += bytes(),
            b".shelf" => found.shelf_bytes += shelf::disk_bytes(&entry.path()),
            end if end.ends_with(b".notes") => found.index_bytes += bytes(),
            _ => {}
        }
    }
    found.index_bytes += fs::read_dir(&cache)
        .at(&cache)?
        .flatten()
        .map(|entry| entry.metadata().map_or(0, |meta| meta.len()))
        .sum::<u64>();
    found.directory_bytes = store.directories()?.values().flatten().map(|place| disk_bytes(place)).sum();
    found.staged_bytes = fs::read_dir(&staging).at(&staging)?.flatten().map(|entry| staged_bytes(&entry.path())).sum();
    Ok(found)
}

/// Bytes of `digest`'s object in the page cache.
fn resident(store: &Store, digest: &Digest) -> Result<u64> {
    match resident_bytes(&store.object_path(digest), false) {
        // `verify` is who complains of a missing or damaged object.
        Err(Error::Io { source, .. }) if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Ok(0)
        }
        other => other,
    }
}

/// Bytes of a file in the page cache: cachestat(2), else mincore(2). With `mapped` mincore at once, which also
/// sees through overlayfs, where cachestat counts nothing.
///
/// # Errors
/// The system's.
pub fn resident_bytes(path: &Path, mapped: bool) -> Result<u64> {
    let file = File::open(path).at(path)?;
    if !mapped && let Ok(pages) = sys::cached_pages(&file) {
        return Ok(pages * PAGE);
    }
    let size = file.metadata().at(path)?.len();
    if size == 0 {
        return Ok(0);
    }
    Ok(sys::Map::new(&file, size).and_then(|map| map.resident_pages()).at(path)? * PAGE)
}

/// The images there are, each claimed: while the lease is held nothing of them goes. Each of `names` must be among them.
fn claimed(store: &Store, lease: &Lease, names: &[String]) -> Result<Records> {
    let mut all = store.records()?;
    for name in names.iter().filter(|name| !all.damaged.iter().any(|record| record.name == **name)) {
        store.image(name)?;
    }
    for image in std::mem::take(&mut all.images) {
        match lease.claim_image(&image.name) {
            // Removed meanwhile.
            Err(Error::NoImage { .. }) => {}
            other => all.images.push(other?),
        }
    }
    Ok(all)
}

/// Looks at the whole domain, and at the images `names` (all when empty).
///
/// # Errors
/// An unknown name; the system's. A damaged image is a result, not an error.
pub fn stat(store: &Store, names: &[String]) -> Result<(Stat, Vec<ImageStat>)> {
    let lease = Lease::new(store)?;
    let Records { images, mut damaged } = claimed(store, &lease, names)?;
    let mut mounted: HashMap<Digest, HashSet<String>> = HashMap::new();
    for mount in mounts(store)? {
        // What is not there any more was unmounted and collected just now.
        if lease.claim_tree(&mount.digest)? || store.knows(&mount.digest) {
            mounted.entry(mount.digest).or_default().insert(mount.device);
        }
    }
    let mount_count = |digest: &Digest| mounted.get(digest).map_or(0, HashSet::len) as u64;

    /// What is known of an object: in how many images, in how many mounted files, by how many mounted trees.
    #[derive(Default)]
    struct Use {
        images: u32,
        shows: u64,
        mounted_trees: u32,
        resident: Option<u64>,
    }
    let wanted = |image: &Record| names.is_empty() || names.contains(&image.name);
    let mut uses: HashMap<u128, Use> = HashMap::new();
    // Each with the number of its names.
    let mut trees: BTreeMap<Digest, u32> = BTreeMap::new();
    for image in &images {
        *trees.entry(image.digest).or_insert(0) += 1;
    }
    for digest in mounted.keys() {
        trees.entry(*digest).or_insert(0);
    }
    let mut unreadable = HashMap::new();
    for (digest, names) in &trees {
        let count = mount_count(digest);
        let objects = store.tree_objects(digest).unwrap_or_else(|error| {
            unreadable.insert(*digest, error.to_string());
            Vec::new()
        });
        for (object, _, files) in objects {
            let entry = uses.entry(object.key()).or_default();
            // What is only mounted is an image too.
            entry.images += (*names).max(1);
            entry.shows += count * u64::from(files);
            entry.mounted_trees += u32::from(count > 0);
        }
    }
    let (lost, images): (Vec<_>, Vec<_>) = images.into_iter().partition(|image| unreadable.contains_key(&image.digest));
    damaged.extend(lost.iter().map(|image| DamagedImage::by_tree(image, store, &unreadable[&image.digest])));
    let mut total = Stat {
        images: images.len() as u64,
        mounts: mounted.keys().map(mount_count).sum(),
        logical_bytes: images.iter().map(|image| image.bytes).sum(),
        damaged,
        ..Stat::default()
    };
    let mut counted = HashSet::new();
    for image in images.iter().filter(|image| counted.insert(image.digest)) {
        total.metadata_bytes += image.metadata_bytes;
    }
    let dir = store.objects_dir();
    for shard in fs::read_dir(&dir).at(&dir)?.flatten() {
        let prefix = shard.file_name().to_string_lossy().into_owned();
        for entry in fs::read_dir(shard.path()).at(shard.path())?.flatten() {
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let Some(digest) = Digest::from_hex(name.as_bytes()) else { continue };
            total.objects += 1;
            total.object_bytes += entry.metadata().map_or(0, |meta| meta.len());
            let bytes = resident(store, &digest)?;
            total.resident_bytes += bytes;
            if let Some(entry) = uses.get_mut(&digest.key()) {
                entry.resident = Some(bytes);
                if entry.shows > 1 {
                    total.shared_bytes += bytes;
                    total.memory_saved_bytes += bytes * (entry.shows - 1);
                }
            }
        }
    }
    let mut all = Vec::new();
    for image in images.into_iter().filter(wanted) {
        let mut stat = ImageStat {
            own_bytes: 0,
            mounts: mount_count(&image.digest),
            resident_bytes: 0,
            resident_shared_bytes: 0,
            record: image,
        };
        for (object, size, _) in store.tree_objects(&stat.record.digest)? {
            let Some(entry) = uses.get(&object.key()) else { continue };
            if entry.images == 1 {
                stat.own_bytes += size;
            }
            let bytes = entry.resident.unwrap_or(0);
            stat.resident_bytes += bytes;
            if entry.mounted_trees > u32::from(stat.mounts > 0) {
                stat.resident_shared_bytes += bytes;
            }
        }
        all.push(stat);
    }
    Ok((total, all))
}

/// Why frames were not compared, where this user may not see them.
pub const FRAMES_NEED_ROOT: &str = "frame numbers need root (CAP_SYS_ADMIN)";

/// What `verify` found.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Verified {
    /// Images looked at.
    pub images: u64,
    /// Objects read and hashed.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What is damaged or missing, with every image that has it.
    pub damaged: Vec<Damage>,
    /// What was marked as damaged and is whole: the mark was taken away.
    pub restored: u64,
    /// Pages of mounted files whose frame was compared with the object's frame; 0 when not asked or not root. Of a
    /// writable mount only the files that show their objects count.
    pub frames_compared: u64,
    /// Of those, equal ones.
    pub frames_equal: u64,
    /// Why frames were not compared, when they were not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_skipped: Option<String>,
}

/// One damaged thing.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Damage {
    /// The file.
    pub path: String,
    /// What is wrong with it.
    pub what: String,
    /// Every image that needs it.
    pub images: Vec<String>,
}

/// Reads every object of the images `names` (all when empty) and compares it with its name; with `frames`, also
/// proves on every mount that its files show the objects' own page frames. A damaged object is marked, so that a build
/// that has its content puts it in its place; a mark on a whole one is taken away.
///
/// # Errors
/// An unknown name; the system's. Damage is a result, not an error.
pub fn verify(store: &Store, names: &[String], frames: bool) -> Result<Verified> {
    verify_with(store, names, frames, &Progress::silent())
}

/// As [`verify`]; `progress` hears of the bytes read.
///
/// # Errors
/// As [`verify`].
pub fn verify_with(store: &Store, names: &[String], frames: bool, progress: &Progress) -> Result<Verified> {
    let mut found = Verified::default();
    let mut needed: BTreeMap<Digest, u64> = BTreeMap::new();
    let mut trees: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
    let lease = Lease::new(store)?;
    let Records { images, damaged } = claimed(store, &lease, names)?;
    for DamagedImage { name, path, what } in damaged {
        if names.is_empty() || names.contains(&name) {
            found.damaged.push(Damage { path, what, images: vec![name] });
        }
    }
    for image in images {
        trees.entry(image.digest).or_default().push(image.name);
    }
    let directories = store.directories()?;
    for (digest, images) in &trees {
        if !names.is_empty() && !images.iter().any(|image| names.contains(image)) {
            continue;
        }
        match store.tree(digest) {
            Ok(tree) => {
                found.images += images.len() as u64;
                let (what, restored) = damage_of_full(store, &lease, digest, &tree)?;
                let path = store.full_path(digest).display().to_string();
                found.damaged.extend(what.map(|what| Damage { path, what, images: images.clone() }));
                found.restored += u64::from(restored);
                for place in directories.get(digest).into_iter().flatten() {
                    let again = "unmount the image and remove this directory; the next mount makes it again";
                    let what = crate::mount::difference(&tree, place).map(|what| format!("{what}; {again}"));
                    let path = place.display().to_string();
                    found.damaged.extend(what.map(|what| Damage { path, what, images: images.clone() }));
                }
                let damaged = |(path, what): (PathBuf, String)| Damage {
                    path: path.display().to_string(),
                    what,
                    images: images.clone(),
                };
                found.damaged.extend(shelf::verify(store, digest, &tree)?.into_iter().map(damaged));
                needed.extend(tree.objects().into_iter().map(|(object, size, _)| (object, size)));
            }
            Err(error) => {
                let (path, what) = (store.tree_path(digest).display().to_string(), error.to_string());
                let what = what.strip_prefix(&format!("{path}: ")).unwrap_or(&what).to_string();
                found.damaged.push(Damage { path, what, images: images.clone() });
            }
        }
    }
    progress.expect(needed.values().sum());
    // Each with its place in what was found.
    let mut damaged: HashMap<Digest, usize> = HashMap::new();
    for (digest, size) in &needed {
        progress.add(*size, true);
        let path = store.object_path(digest);
        let hash = |mut file| crate::digest::hash_reader(&mut file);
        // What a read error says once may be the cable's or the network's.
        let looked = open_marked(store, &lease, &path)?;
        let hashed = looked.and_then(|(file, marked)| {
            hash(file)
                .or_else(|error| if is_lasting(&error) { hash(File::open(&path)?) } else { Err(error) })
                .map(|hash| (hash, marked))
        });
        let what = match hashed {
            Ok(((hash, bytes), marked)) => {
                found.objects += 1;
                found.bytes += bytes;
                if hash == *digest && bytes == *size {
                    if marked {
                        store.restore(&path)?;
                        found.restored += 1;
                    }
                    continue;
                }
                condemned(store, &path, &format!("{bytes} bytes with digest {hash}"))
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                "found damaged before; build an image that has it again".into()
            }
            Err(error) if error.kind() == ErrorKind::NotFound => format!("{error}; build an image that has it again"),
            Err(error) if is_lasting(&error) => condemned(store, &path, &error.to_string()),
            Err(error) => error.to_string(),
        };
        damaged.insert(*digest, found.damaged.len());
        found.damaged.push(Damage { path: path.display().to_string(), what, images: Vec::new() });
    }
    // Without it mounts say nothing of what is reported here.
    let _ = store.note_damaged(damaged.keys().copied(), names.is_empty());
    // All images that have it are named, the others than the chosen ones, too. One that cannot be read has its own line.
    for (digest, images) in trees.iter().filter(|_| !damaged.is_empty()) {
        for (object, ..) in store.tree_objects(digest).unwrap_or_default() {
            if let Some(&place) = damaged.get(&object) {
                found.damaged[place].images.extend(images.iter().cloned());
            }
        }
    }
    for &place in damaged.values() {
        found.damaged[place].images.sort();
    }
    if frames {
        if !rustix::process::geteuid().is_root() || !crate::mount::in_initial_namespace() {
            found.frames_skipped = Some(FRAMES_NEED_ROOT.into());
        } else {
            compare_frames(store, &lease, &mut found)?;
        }
    }
    Ok(found)
}

/// Whether a file that could not be read is damaged itself: other errors (no memory, a server that is away) pass.
fn is_lasting(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EUCLEAN | libc::EBADMSG | libc::EISDIR))
}

/// Opens a file that may be marked as damaged, and says whether it is. The mark keeps its owner out as well, and is taken
/// off for a moment in which no build looks.
fn open_marked(store: &Store, lease: &Lease, path: &Path) -> Result<std::io::Result<(File, bool)>> {
    match File::open(path) {
        // Who keeps others out would wait for himself.
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !lease.is_held() => {
            let _exclusive = store.lock(true)?;
            if store.restore(path).is_err() {
                return Ok(Err(error));
            }
            let file = File::open(path);
            store.condemn(path)?;
            Ok(file.map(|file| (file, true)))
        }
        other => Ok(other.and_then(|file| {
            let marked = is_marked(&file.metadata()?);
            Ok((file, marked))
        })),
    }
}

/// What is wrong with an image's self-contained form, if it has one, and whether it is marked and nothing is wrong.
fn damage_of_full(store: &Store, lease: &Lease, digest: &Digest, tree: &Tree) -> Result<(Option<String>, bool)> {
    let path = store.full_path(digest);
    let again = "build the image with --native again";
    let what = match open_marked(store, lease, &path)? {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Some(format!("found damaged before; {again}")),
        Err(error) => return Err(error).at(path),
        Ok((file, marked)) => match is_erofs_full(file, tree)? {
            Ok(true) if marked => {
                store.restore(&path)?;
                return Ok((None, true));
            }
            Ok(true) => None,
            Err(error) if !is_lasting(&error) => Some(error.to_string()),
            other => {
                let what = other.err().map_or("damaged".to_string(), |error| error.to_string());
                store.condemn(&path)?;
                Some(format!("{what}; {again}"))
            }
        },
    };
    Ok((what, false))
}

/// Marks an object that is not what it should be, for the reason `what`; returns what to say of it.
fn condemned(store: &Store, path: &Path, what: &str) -> String {
    match store.condemn(path) {
        Ok(()) => format!("{what}; build an image that has it again"),
        Err(error) => format!("{what}, and builds still rely on it: {error}"),
    }
}

/// How often pages whose frames differ are looked at: the kernel moves pages to make room (compaction), rarely twice.
const FRAME_LOOKS: u32 = 8;

/// Maps each file of each mount beside its object and compares the frames under both.
fn compare_frames(store: &Store, lease: &Lease, found: &mut Verified) -> Result<()> {
    let here = fs::metadata("/proc/self/ns/mnt").map(|meta| meta.ino()).at("/proc/self/ns/mnt")?;
    let mut any = false;
    for mount in mounts(store)?.into_iter().filter(|mount| mount.namespace == here) {
        // Unmounted just now, or hidden below another mount.
        let Ok(top) = crate::mount::open_path(&mount.mountpoint) else { continue };
        let device = rustix::fs::fstat(&top).at(&mount.mountpoint)?.st_dev;
        if mount.device != format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)) {
            continue;
        }
        any = true;
        lease.claim_tree(&mount.digest)?;
        let tree = store.tree(&mount.digest)?;
        let mut result: Result<()> = Ok(());
        let mut seen = HashSet::new();
        tree.walk(|path, id| {
            use crate::tree::{Data, Kind};
            let Kind::File(Data::Object(digest, size)) = &tree.inode(id).kind else { return };
            if result.is_err() || !seen.insert(id) {
                return;
            }
            let (shown, object) = (mount.mountpoint.join(OsStr::from_bytes(path)), store.object_path(digest));
            let how = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
            let file = match rustix::fs::openat2(&top, path, flags, Mode::empty(), how) {
                // Something else is mounted over it.
                Err(Errno::XDEV) => return,
                other => other.at(&shown).map(File::from),
            };
            let compared = file.and_then(|file| {
                let object_file = File::open(&object).at(&object)?;
                same_frames(&file, &shown, &object_file, &object, *size)
            });
            match compared {
                // Over a writable layer a file may be gone, or have bytes of its own: not ours to judge.
                Err(_) if mount.writable => {}
                Ok((pages, same)) if mount.writable && pages != same => {}
                Ok((pages, same)) => {
                    found.frames_compared += pages;
                    found.frames_equal += same;
                }
                Err(error) => result = Err(error),
            }
        });
        result?;
    }
    if !any {
        found.frames_skipped = Some("nothing is mounted here".into());
    }
    Ok(())
}

/// How many pages a file and its object have, and how many of them lie in the same frames. Both are mapped at once; a
/// page that the kernel moves between the two looks is looked at again.
fn same_frames(file: &File, shown: &Path, object_file: &File, object: &Path, size: u64) -> Result<(u64, u64)> {
    let a = sys::Map::new(file, size).at(shown)?;
    let b = sys::Map::new(object_file, size).at(object)?;
    let (mut open, mut pages): (Vec<usize>, u64) = (Vec::new(), 0);
    for attempt in 0..FRAME_LOOKS {
        let (a, b) = (a.frames().at(shown)?, b.frames().at(object)?);
        if attempt == 0 {
            open = (0..a.len().max(b.len())).collect();
            pages = open.len() as u64;
        }
        open.retain(|&page| a.get(page).is_none_or(|frame| *frame == 0 || Some(frame) != b.get(page)));
        if open.is_empty() {
            break;
        }
    }
    Ok((pages, pages - open.len() as u64))
}
