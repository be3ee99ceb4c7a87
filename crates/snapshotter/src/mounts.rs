//! What containerd is to mount for a snapshot, and the metadata of committed snapshots, which this process mounts.
//!
//! A container gets overlayfs over two layers: mounted metadata, and the objects as a data-only layer behind `::`. Three
//! properties of containerd shape the options:
//!
//! - For a mount of type overlay its applier mounts nothing. It writes to `upperdir`, and takes the attributes of
//!   directories that a layer does not name from `lowerdir`, which it splits at each `:`. The empty part of `META::OBJECTS`
//!   would stand for the host's own root. So snapshots that it unpacks to get the metadata alone.
//! - mount(2) takes one page of options. containerd shortens longer ones by a common prefix, which an empty part prevents.
//!   Two layers of limited length stay far below that, whatever the number of layers of an image.
//! - It mounts in its own time and mount namespace: metadata is mounted where it sees it, until the snapshot is removed.

use crate::database::{Snapshot, SnapshotKind};
use crate::error::{At, Error, Result};
use pagefold_image::digest::Digest;
use pagefold_image::mount::layers::{self, Naming};
use pagefold_image::store::Store;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};

/// A mount as containerd makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The file system's type.
    pub kind: &'static str,
    /// Its source.
    pub source: String,
    /// Its options.
    pub options: Vec<String>,
}

/// containerd's keys for snapshots that it unpacks a layer to begin with this.
const EXTRACT: &str = "extract-";

/// The most bytes of the paths of root directory and store: four paths of a mount's options then take less than half a page.
const PATH_BYTES_MAX: usize = 250;

/// Returns true if containerd unpacks a layer to the snapshot, and mounts it nowhere. Its metadata plugin puts a namespace
/// and a number before the key.
pub fn is_extracted_to(key: &str) -> bool {
    key.starts_with(EXTRACT) || key.splitn(3, '/').nth(2).is_some_and(|key| key.starts_with(EXTRACT))
}

/// Refuses a path that cannot stand in overlayfs's options.
///
/// # Errors
/// A path that is too long, is not UTF-8, or has a sign that separates options or layers.
pub fn check_path(path: &Path) -> Result<()> {
    let shown = path.display();
    let Some(text) = path.to_str() else {
        return Err(Error::Invalid(format!("{shown}: not UTF-8, which containerd needs; choose another path")));
    };
    if text.contains([':', ',', '\\', '"', '\n']) {
        return Err(Error::Invalid(format!(
            "{shown}: has one of : , \\ \" which separate mount options; choose another path"
        )));
    }
    if text.len() > PATH_BYTES_MAX {
        let text = format!("{shown}: {} bytes, more than {PATH_BYTES_MAX}: choose a shorter path", text.len());
        return Err(Error::Invalid(text));
    }
    Ok(())
}

/// Returns true if overlayfs needs `metacopy` for a data-only layer: before Linux 6.16.
pub fn needs_metacopy() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|sign: char| !sign.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version < (6, 16)
}

/// Whether a directory of a snapshot has a mount on it.
fn is_mounted(path: &Path) -> Result<bool> {
    let found = rustix::fs::statx(CWD, path, AtFlags::NO_AUTOMOUNT, StatxFlags::empty()).at(path)?;
    Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// The directory in a snapshot's directory where its metadata of that naming is mounted.
fn place(dir: &Path, naming: Naming) -> PathBuf {
    dir.join(match naming {
        Naming::Places => "places",
        Naming::Digests => "digests",
    })
}

/// Makes sure that the metadata of the committed snapshot with directory `dir` is mounted. Returns where, and the objects
/// that belong to it. Calls must not run at the same time.
///
/// # Errors
/// A damaged image, the kernel's.
pub fn mount_metadata(store: &Store, digest: &Digest, dir: &Path, extract: bool) -> Result<(PathBuf, PathBuf)> {
    let namings: &[Naming] = if extract { &[Naming::Digests] } else { &[Naming::Places, Naming::Digests] };
    for &naming in namings {
        let target = place(dir, naming);
        match std::fs::create_dir(&target) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => made.at(&target)?,
        }
        if is_mounted(&target)? || layers::mount_metadata(store, digest, naming, &target)? {
            return Ok((target, layers::objects(store, digest, naming)));
        }
    }
    unreachable!("metadata that names objects by digest is always there, or an error")
}

/// Unmounts what is mounted in the snapshot's directory `dir`: everything, or what only unpacking needs.
///
/// # Errors
/// The kernel's.
pub fn unmount_metadata(dir: &Path, all: bool) -> Result<()> {
    for naming in [Naming::Places, Naming::Digests] {
        let target = place(dir, naming);
        if (all || naming == Naming::Digests) && target.exists() {
            while is_mounted(&target)? {
                // Mounts over it have it by a clone of their own, and a process that looks into it does not keep it.
                rustix::mount::unmount(&target, UnmountFlags::DETACH).at(&target)?;
            }
        }
    }
    Ok(())
}

/// A mount behind that of overlayfs, which changes nothing: a remount without options. containerd 2.4 looks users up in the
/// layers of an overlay that comes last, and does not mount it. It knows no data-only layer, and the files of the metadata
/// have no bytes.
fn no_change() -> Mount {
    Mount { kind: "none", source: "none".into(), options: vec!["remount".into()] }
}

/// What containerd is to mount for `snapshot`, whose directory is `dir`, over the layers of its parent.
pub fn mounts(snapshot: &Snapshot, dir: &Path, layers: Option<(PathBuf, PathBuf)>) -> Vec<Mount> {
    let is_view = snapshot.kind == SnapshotKind::View;
    let text = |path: &Path| path.display().to_string();
    let Some((metadata, objects)) = layers else {
        let access = if is_view { "ro" } else { "rw" };
        let options = vec![access.into(), "rbind".into()];
        return vec![Mount { kind: "bind", source: text(&dir.join("fs")), options }];
    };
    let mut options = Vec::new();
    if Path::new("/sys/module/overlay/parameters/index").exists() {
        options.push("index=off".into());
    }
    // Said in any case: a distribution may have set another default.
    options.extend(match (snapshot.metacopy, is_view) {
        (true, true) => vec!["metacopy=on".to_string()],
        (true, false) => vec!["metacopy=on".into(), "redirect_dir=on".into()],
        (false, _) => vec!["metacopy=off".into(), "redirect_dir=off".into()],
    });
    if is_view {
        options.push("ro".into());
    } else {
        options.push(format!("workdir={}", text(&dir.join("work"))));
        options.push(format!("upperdir={}", text(&dir.join("fs"))));
    }
    let is_extracted = is_extracted_to(&snapshot.name) && !is_view;
    options.push(match is_extracted {
        true => format!("lowerdir={}", text(&metadata)),
        false => format!("lowerdir={}::{}", text(&metadata), text(&objects)),
    });
    let overlay = Mount { kind: "overlay", source: "overlay".into(), options };
    if is_extracted { vec![overlay] } else { vec![overlay, no_change()] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn snapshot(name: &str, kind: SnapshotKind) -> Snapshot {
        Snapshot {
            id: u64::MAX,
            name: name.into(),
            parent: "p".into(),
            kind,
            created: (0, 0),
            updated: (0, 0),
            labels: BTreeMap::new(),
            metacopy: true,
            digest: None,
        }
    }

    /// containerd would take the attributes of the host's directories for those of an image.
    #[test]
    fn what_containerd_unpacks_to_has_no_empty_lower_layer() {
        let layers = || Some(("/r/digests".into(), "/s/objects".into()));
        let lower = |name: &str, kind| {
            let mounts = mounts(&snapshot(name, kind), "/r/7".as_ref(), layers());
            let lasts = [&mounts[0], &no_change()];
            let is_extracted = is_extracted_to(name) && kind == SnapshotKind::Active;
            assert_eq!(mounts.last(), Some(lasts[usize::from(!is_extracted)]), "a layer is unpacked to one mount");
            let lower = mounts[0].options.iter().find_map(|option| option.strip_prefix("lowerdir=")).unwrap();
            lower.to_string()
        };
        for key in ["extract-1-ab sha256:cd", "default/12/extract-1-ab sha256:cd"] {
            assert_eq!(lower(key, SnapshotKind::Active), "/r/digests");
        }
        for key in ["default/12/web", "web/extract-1", "default/12/x/extract-1", "k8s.io/3/not-extract-1"] {
            assert_eq!(lower(key, SnapshotKind::Active), "/r/digests::/s/objects");
        }
        // Nothing is unpacked to a view, and without an upper layer overlayfs needs two.
        assert_eq!(lower("default/1/extract-1", SnapshotKind::View), "/r/digests::/s/objects");
    }

    /// containerd compacts options above 4096 - 512 bytes, which an empty part prevents.
    #[test]
    fn options_of_the_longest_paths_need_no_compaction() {
        let long = PathBuf::from(format!("/{}", "x".repeat(PATH_BYTES_MAX - 1)));
        check_path(&long).unwrap();
        let dir = long.join("snapshots").join(u64::MAX.to_string());
        let objects =
            long.join("domains").join("d".repeat(100)).join(format!("trees/{}.shelf/objects", "0".repeat(64)));
        let mounts = mounts(&snapshot("web", SnapshotKind::Active), &dir, Some((dir.join("digests"), objects)));
        let bytes = mounts[0].options.join(",").len();
        assert!((1000..4096 - 512).contains(&bytes), "{bytes}");
        let longer = long.join("x");
        assert!(check_path(&longer).unwrap_err().to_string().ends_with("choose a shorter path"));
        for bad in ["/a:b", "/a,b", "/a\\b"] {
            assert!(check_path(bad.as_ref()).unwrap_err().to_string().contains("separate mount options"));
        }
    }
}
