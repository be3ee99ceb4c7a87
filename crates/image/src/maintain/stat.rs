//! What images cost now: on disk, and in memory, counted on the store's own objects.
//!
//! The page cache of every mounted file is its object's, so one cachestat(2) per
//! object says what is resident. `memory_saved_bytes` is what plain copies would need beyond that: for each object its
//! resident bytes once for every further file of a mount that shows it. That is exact when each of those files has been
//! read as far as the object is resident, and an upper bound before.
//!
//! A file of a native mount has page cache of its own, which the kernel shares by content and which cachestat(2) of the
//! file does not show: native mounts are counted, their memory is not.

use super::disk_usage::{disk_bytes, staged_bytes};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::link_farm;
use crate::runtime::mounts::mounts;
use crate::store::{DamagedImage, ImageRecord, ImageRecords, Lease, Store};
use crate::sys::{self, PAGE};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// One image now.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ImageStat {
    /// Its record.
    #[serde(flatten)]
    pub record: ImageRecord,
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
    /// Bytes of objects in the page cache. Files of native mounts have pages of their own, which are not among them.
    pub resident_bytes: u64,
    /// Of those, bytes that more than one file of the mounts shows.
    pub shared_bytes: u64,
    /// What plain copies would need in addition: for each object its resident bytes once for every further mounted file
    /// that shows it.
    pub memory_saved_bytes: u64,
    /// Native mounts among the mounts: what they have in memory, and share, is not counted.
    pub native_mounts: u64,
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
    /// What the link farms take: the mounted metadata, and directories that lead to the objects in its order.
    pub shelf_bytes: u64,
    /// Bytes of the lists of objects, trees of layers, start profiles and stat caches.
    pub index_bytes: u64,
    /// What builds have staged and pulls have fetched that are in progress, or have died.
    pub staged_bytes: u64,
}

/// Looks at what a domain has beside objects and metadata images: at each file of metadata directories, which may be many.
///
/// # Errors
/// The system's.
pub fn beside(store: &Store) -> Result<Beside> {
    let (trees, staging, cache) = (store.path("trees"), store.path("staging"), store.path("cache"));
    let mut found = Beside::default();
    let named: HashSet<String> = store.records()?.images.iter().map(|image| image.digest.hex()).collect();
    for entry in fs::read_dir(&trees).at(&trees)?.flatten() {
        let name = entry.file_name();
        let bytes = || entry.metadata().map_or(0, |meta| meta.len());
        match name.as_bytes().get(64..).unwrap_or_default() {
            b".erofs" if !name.to_str().is_some_and(|name| named.contains(&name[..64])) => found.index_bytes += bytes(),
            b".full.erofs" => found.native_bytes += bytes(),
            b".objects" | b".start" | b".unshelved" => found.index_bytes += bytes(),
            b".shelf" => found.shelf_bytes += link_farm::disk_bytes(&entry.path()),
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
    found.staged_bytes += disk_bytes(&store.path("downloads"));
    Ok(found)
}

/// Bytes of `digest`'s object in the page cache.
fn resident(store: &Store, digest: &Digest) -> Result<u64> {
    match resident_bytes(&store.object_path(digest), false) {
        // `verify` reports missing and damaged objects.
        Err(Error::Io { source, .. }) if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Ok(0)
        }
        other => other,
    }
}

/// Bytes of a file in the page cache: by cachestat(2), else mincore(2). With `mapped` by mincore only, which also
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
    Ok(sys::MappedFile::new(&file, size).and_then(|map| map.resident_pages()).at(path)? * PAGE)
}

/// The mounts of each image: device numbers, which binds of one mount share. Memory is counted on those that show objects.
#[derive(Default)]
struct Mounted {
    overlay: HashMap<Digest, HashSet<String>>,
    native: HashMap<Digest, HashSet<String>>,
}

impl Mounted {
    /// The mounts of images that the store still has, each claimed.
    fn look(store: &Store, lease: &Lease) -> Result<Self> {
        let mut mounted = Self::default();
        for mount in mounts(store)? {
            // An image that is gone was unmounted and collected just now.
            if lease.claim_tree(&mount.digest)? || store.knows(&mount.digest) {
                let of_kind = if mount.native { &mut mounted.native } else { &mut mounted.overlay };
                of_kind.entry(mount.digest).or_default().insert(mount.device);
            }
        }
        Ok(mounted)
    }

    fn images(&self) -> impl Iterator<Item = &Digest> {
        self.overlay.keys().chain(self.native.keys())
    }

    /// Mounts of an image that show its objects.
    fn showing(&self, digest: &Digest) -> u64 {
        self.overlay.get(digest).map_or(0, HashSet::len) as u64
    }

    fn native(&self, digest: &Digest) -> u64 {
        self.native.get(digest).map_or(0, HashSet::len) as u64
    }

    fn count(&self, digest: &Digest) -> u64 {
        self.showing(digest) + self.native(digest)
    }
}

/// How an object is used.
#[derive(Default)]
struct Use {
    /// Images that have it; one that is mounted and has no name counts too.
    images: u32,
    /// Mounted files that show it.
    shows: u64,
    /// Mounted trees that show it.
    mounted_trees: u32,
    /// Its bytes in the page cache.
    resident: Option<u64>,
}

/// The use of each object by `trees`, and why trees could not be read. Each tree comes with the number of its names.
fn uses(
    store: &Store,
    trees: &BTreeMap<Digest, u32>,
    mounted: &Mounted,
) -> (HashMap<u128, Use>, HashMap<Digest, String>) {
    let (mut uses, mut unreadable) = (HashMap::<u128, Use>::new(), HashMap::new());
    for (digest, names) in trees {
        let count = mounted.showing(digest);
        let objects = store.tree_objects(digest).unwrap_or_else(|error| {
            unreadable.insert(*digest, error.to_string());
            Vec::new()
        });
        for (object, _, files) in objects {
            let entry = uses.entry(object.key()).or_default();
            entry.images += (*names).max(1);
            entry.shows += count * u64::from(files);
            entry.mounted_trees += u32::from(count > 0);
        }
    }
    (uses, unreadable)
}

/// Counts the store's objects, on the disk and in memory, and notes what is resident of each in `uses`.
fn count_objects(store: &Store, uses: &mut HashMap<u128, Use>, total: &mut Stat) -> Result<()> {
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
    Ok(())
}

/// What one image costs now.
fn image_stat(store: &Store, record: ImageRecord, uses: &HashMap<u128, Use>, mounted: &Mounted) -> Result<ImageStat> {
    let is_shown = mounted.showing(&record.digest) > 0;
    let mut stat = ImageStat {
        own_bytes: 0,
        mounts: mounted.count(&record.digest),
        resident_bytes: 0,
        resident_shared_bytes: 0,
        record,
    };
    for (object, size, _) in store.tree_objects(&stat.record.digest)? {
        let Some(entry) = uses.get(&object.key()) else { continue };
        if entry.images == 1 {
            stat.own_bytes += size;
        }
        let bytes = entry.resident.unwrap_or(0);
        stat.resident_bytes += bytes;
        if entry.mounted_trees > u32::from(is_shown) {
            stat.resident_shared_bytes += bytes;
        }
    }
    Ok(stat)
}

/// Looks at the whole domain, and at the images `names` (all when empty).
///
/// # Errors
/// An unknown name; the system's. A damaged image is a result, not an error.
pub fn stat(store: &Store, names: &[String]) -> Result<(Stat, Vec<ImageStat>)> {
    let lease = Lease::new(store)?;
    let ImageRecords { images, mut damaged } = lease.claim_images(names)?;
    let mounted = Mounted::look(store, &lease)?;
    // Each with the number of its names.
    let mut trees: BTreeMap<Digest, u32> = BTreeMap::new();
    for image in &images {
        *trees.entry(image.digest).or_insert(0) += 1;
    }
    for digest in mounted.images() {
        trees.entry(*digest).or_insert(0);
    }
    let (mut uses, unreadable) = uses(store, &trees, &mounted);
    let (lost, images): (Vec<_>, Vec<_>) = images.into_iter().partition(|image| unreadable.contains_key(&image.digest));
    damaged.extend(lost.iter().map(|image| DamagedImage::by_tree(image, store, &unreadable[&image.digest])));
    let native_mounts = mounted.native.keys().map(|digest| mounted.native(digest)).sum();
    let mut total = Stat {
        images: images.len() as u64,
        mounts: mounted.overlay.keys().map(|digest| mounted.showing(digest)).sum::<u64>() + native_mounts,
        native_mounts,
        logical_bytes: images.iter().map(|image| image.bytes).sum(),
        damaged,
        ..Stat::default()
    };
    let mut counted = HashSet::new();
    for image in images.iter().filter(|image| counted.insert(image.digest)) {
        total.metadata_bytes += image.metadata_bytes;
    }
    count_objects(store, &mut uses, &mut total)?;
    let wanted = |image: &ImageRecord| names.is_empty() || names.contains(&image.name);
    let all = images.into_iter().filter(wanted).map(|image| image_stat(store, image, &uses, &mounted));
    Ok((total, all.collect::<Result<_>>()?))
}
