//! The proof of a store: every object is read and compared with its name, and every mount with its objects.

use super::export::is_erofs_full;
use super::frames::compare_frames;
use crate::digest::{Digest, hash_reader};
use crate::error::{At, Result};
use crate::link_farm;
use crate::progress::Progress;
use crate::runtime::mount::{difference, in_initial_namespace};
use crate::store::{DamagedImage, ImageRecords, Lease, Store, is_marked};
use crate::tree::Tree;
use pagefold_os::read_once::ReadOnce;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

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
    /// Pages of mounted files that were compared, by frame, with the object's; 0 when not asked or not root. Of a
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
/// that has its content replaces it; a mark on a whole one is taken away.
///
/// # Errors
/// An unknown name; the system's. Damage is a result, not an error.
pub fn verify(store: &Store, names: &[String], frames: bool) -> Result<Verified> {
    verify_with(store, names, frames, &Progress::silent())
}

/// As [`verify`]; `progress` counts the bytes read.
///
/// # Errors
/// As [`verify`].
pub fn verify_with(store: &Store, names: &[String], frames: bool, progress: &Progress) -> Result<Verified> {
    let mut found = Verified::default();
    let lease = Lease::new(store)?;
    let ImageRecords { images, damaged } = lease.claim_images(names)?;
    for DamagedImage { name, path, what } in damaged {
        if names.is_empty() || names.contains(&name) {
            found.damaged.push(Damage { path, what, images: vec![name] });
        }
    }
    // Trees with the names of their images.
    let mut trees: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
    let mut layers: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
    for image in images {
        for layer in image.layers.iter().filter(|layer| layer.tree != image.digest) {
            layers.entry(layer.tree).or_default().push(image.name.clone());
        }
        trees.entry(image.digest).or_default().push(image.name);
    }
    let mut needed = verify_trees(store, &lease, &trees, names, &mut found)?;
    needed.extend(verify_layers(store, &layers, names, &mut found));
    progress.expect(needed.values().sum());
    let damaged = verify_objects(store, &lease, &needed, &mut found, progress)?;
    // If it cannot be noted, mounts do not mention what is reported here.
    let _ = store.note_damaged(damaged.keys().copied(), names.is_empty());
    name_images(store, &trees, &damaged, &mut found);
    name_images(store, &layers, &damaged, &mut found);
    if frames && rustix::process::geteuid().is_root() && in_initial_namespace() {
        let frames = compare_frames(store, &lease)?;
        (found.frames_compared, found.frames_equal) = (frames.compared, frames.equal);
        found.frames_skipped = (!frames.any_mount).then(|| "nothing is mounted here".into());
    } else if frames {
        found.frames_skipped = Some(FRAMES_NEED_ROOT.into());
    }
    Ok(found)
}

/// Verifies the trees of the images `names`, and what was made of them. Returns the objects that they need, with their
/// sizes.
fn verify_trees(
    store: &Store,
    lease: &Lease,
    trees: &BTreeMap<Digest, Vec<String>>,
    names: &[String],
    found: &mut Verified,
) -> Result<BTreeMap<Digest, u64>> {
    let mut needed = BTreeMap::new();
    let directories = store.directories()?;
    for (digest, images) in trees {
        if !names.is_empty() && !images.iter().any(|image| names.contains(image)) {
            continue;
        }
        let damage =
            |path: &Path, what: String| Damage { path: path.display().to_string(), what, images: images.clone() };
        let tree = match store.tree(digest) {
            Ok(tree) => tree,
            Err(error) => {
                let (path, what) = (store.tree_path(digest), error.to_string());
                let what = what.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&what).to_string();
                found.damaged.push(damage(&path, what));
                continue;
            }
        };
        found.images += images.len() as u64;
        let (what, unmarked) = damage_of_full(store, lease, digest, &tree)?;
        found.damaged.extend(what.map(|what| damage(&store.full_path(digest), what)));
        found.restored += u64::from(unmarked);
        for place in directories.get(digest).into_iter().flatten() {
            let again = "unmount the image and remove this directory; the next mount makes it again";
            let what = difference(&tree, place).map(|what| format!("{what}; {again}"));
            found.damaged.extend(what.map(|what| damage(place, what)));
        }
        let farm = link_farm::verify(store, digest, &tree)?;
        found.damaged.extend(farm.into_iter().map(|(path, what): (PathBuf, String)| damage(&path, what)));
        needed.extend(tree.objects().into_iter().map(|(object, size, _)| (object, size)));
    }
    Ok(needed)
}

/// Verifies the trees of the layers of the images `names`. Returns the objects that they need, with their sizes.
fn verify_layers(
    store: &Store,
    layers: &BTreeMap<Digest, Vec<String>>,
    names: &[String],
    found: &mut Verified,
) -> BTreeMap<Digest, u64> {
    let mut needed = BTreeMap::new();
    for (digest, images) in layers {
        if !names.is_empty() && !images.iter().any(|image| names.contains(image)) {
            continue;
        }
        match store.tree(digest) {
            Ok(tree) => needed.extend(tree.objects().into_iter().map(|(object, size, _)| (object, size))),
            Err(error) => {
                let path = store.tree_path(digest).display().to_string();
                let what = format!("{error}; a tree of layers that the images themselves do not need");
                found.damaged.push(Damage { path, what, images: images.clone() });
            }
        }
    }
    needed
}

/// Reads and compares the objects `needed`. Returns the damaged ones, each with its index in what was found.
fn verify_objects(
    store: &Store,
    lease: &Lease,
    needed: &BTreeMap<Digest, u64>,
    found: &mut Verified,
    progress: &Progress,
) -> Result<HashMap<Digest, usize>> {
    let mut damaged = HashMap::new();
    for (digest, size) in needed {
        progress.add(*size, true);
        if let Some(what) = damage_of_object(store, lease, digest, *size, found)? {
            damaged.insert(*digest, found.damaged.len());
            let path = store.object_path(digest).display().to_string();
            found.damaged.push(Damage { path, what, images: Vec::new() });
        }
    }
    Ok(damaged)
}

/// What is wrong with an object, if anything. A damaged object is marked, and a mark is taken from a whole one.
fn damage_of_object(
    store: &Store,
    lease: &Lease,
    digest: &Digest,
    size: u64,
    found: &mut Verified,
) -> Result<Option<String>> {
    let path = store.object_path(digest);
    let hash = |file| hash_reader(&mut ReadOnce::new(file));
    let hashed = open_marked(store, lease, &path)?.and_then(|(file, marked)| {
        hash(file)
            // A read error that occurs once may be the cable's or the network's.
            .or_else(|error| if is_lasting(&error) { hash(File::open(&path)?) } else { Err(error) })
            .map(|hash| (hash, marked))
    });
    Ok(Some(match hashed {
        Ok(((hash, bytes), marked)) => {
            found.objects += 1;
            found.bytes += bytes;
            if hash == *digest && bytes == size {
                if marked {
                    store.unmark_damaged(&path)?;
                    found.restored += 1;
                }
                return Ok(None);
            }
            mark_and_report(store, &path, &format!("{bytes} bytes with digest {hash}"))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            "found damaged before; build an image that has it again".into()
        }
        Err(error) if error.kind() == ErrorKind::NotFound => format!("{error}; build an image that has it again"),
        Err(error) if is_lasting(&error) => mark_and_report(store, &path, &error.to_string()),
        Err(error) => error.to_string(),
    }))
}

/// Names all images that have a damaged object, the ones that were not chosen too. An image that cannot be read has its own
/// line.
fn name_images(
    store: &Store,
    trees: &BTreeMap<Digest, Vec<String>>,
    damaged: &HashMap<Digest, usize>,
    found: &mut Verified,
) {
    for (digest, images) in trees.iter().filter(|_| !damaged.is_empty()) {
        for (object, ..) in store.tree_objects(digest).unwrap_or_default() {
            if let Some(&index) = damaged.get(&object) {
                found.damaged[index].images.extend(images.iter().cloned());
            }
        }
    }
    for &index in damaged.values() {
        found.damaged[index].images.sort();
        found.damaged[index].images.dedup();
    }
}

/// Returns true if an error says that the file itself is damaged. Other errors pass: no memory, an unreachable server.
fn is_lasting(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EUCLEAN | libc::EBADMSG | libc::EISDIR))
}

/// Opens a file that may be marked as damaged; returns whether it is. The mark keeps its owner out as well, so it is removed
/// for a moment, under the exclusive domain lock: no build looks meanwhile.
fn open_marked(store: &Store, lease: &Lease, path: &Path) -> Result<std::io::Result<(File, bool)>> {
    match File::open(path) {
        // A lease that holds the domain lock itself would wait for itself.
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !lease.is_held() => {
            let _exclusive = store.lock(true)?;
            if store.unmark_damaged(path).is_err() {
                return Ok(Err(error));
            }
            let file = File::open(path);
            store.mark_damaged(path)?;
            Ok(file.map(|file| (file, true)))
        }
        other => Ok(other.and_then(|file| {
            let marked = is_marked(&file.metadata()?);
            Ok((file, marked))
        })),
    }
}

/// What is wrong with an image's self-contained form, if it has one; and whether a mark was taken from a whole one.
fn damage_of_full(store: &Store, lease: &Lease, digest: &Digest, tree: &Tree) -> Result<(Option<String>, bool)> {
    let path = store.full_path(digest);
    let again = "build the image with --native again";
    let what = match open_marked(store, lease, &path)? {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Some(format!("found damaged before; {again}")),
        Err(error) => return Err(error).at(path),
        Ok((file, marked)) => match is_erofs_full(ReadOnce::new(file), tree)? {
            Ok(true) if marked => {
                store.unmark_damaged(&path)?;
                return Ok((None, true));
            }
            Ok(true) => None,
            Err(error) if !is_lasting(&error) => Some(error.to_string()),
            other => {
                let what = other.err().map_or("damaged".to_string(), |error| error.to_string());
                store.mark_damaged(&path)?;
                Some(format!("{what}; {again}"))
            }
        },
    };
    Ok((what, false))
}

/// Marks a damaged object, for the reason `what`. Returns the line to report.
fn mark_and_report(store: &Store, path: &Path, what: &str) -> String {
    match store.mark_damaged(path) {
        Ok(()) => format!("{what}; build an image that has it again"),
        Err(error) => format!("{what}, and builds still rely on it: {error}"),
    }
}
