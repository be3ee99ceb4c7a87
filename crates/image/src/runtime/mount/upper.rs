//! The directory that holds a mount's changes: it belongs to one image, and to one mount at a time.

use super::directory::{note_lines, set_meta, without_xattrs};
use super::kernel::{Context, failed};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::store::Store;
use crate::tree::ROOT;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long an ending mount may still use its upper directory.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Returns true if some mount, in any namespace, has its changes in the directory `layer`. Overlayfs knows, and refuses such
/// a layer to a mount with an index. The try never mounts: overlayfs checks this first, and next refuses a work directory
/// that is the upper directory itself, before it writes anything and before it finds that a user namespace has no index.
/// Each refusal is a line in the kernel's log.
pub(super) fn in_use(layer: &Path, user: bool) -> bool {
    let attempt = || -> Result<()> {
        let mut context = Context::new("overlay")?;
        for key in ["lowerdir+", "upperdir", "workdir"] {
            context.path(key, layer)?;
        }
        if user {
            context.flag("userxattr")?;
        }
        context.string("index", "on")?;
        rustix::mount::fsconfig_create(context.fd.as_fd()).map_err(failed("overlay"))
    };
    // The mount itself reports every other error.
    let is_busy = |error| matches!(error, Error::Mount { source, .. } if source.raw_os_error() == Some(libc::EBUSY));
    attempt().is_err_and(is_busy)
}

/// Makes the directory `upper`, and none above it.
fn make_upper(upper: &Path) -> Result<()> {
    pagefold_os::private_dir::make_last(upper, 0o777).map_err(|error| {
        let cure = "give a directory, or where one can be made";
        Error::Refused(format!("mount: --upper {}: {error}; {cure}", upper.display()))
    })
}

/// Waits until no mount has its changes in `upper`: one may be just ending.
fn wait_until_unused(upper: &Path, user: bool) -> Result<()> {
    let (began, mut pause) = (Instant::now(), Duration::from_millis(20));
    while in_use(&upper.join("upper"), user) {
        if began.elapsed() > END_PATIENCE {
            return Err(Error::Refused(format!(
                "mount: {} is in use by another mount; unmount that one, or give --upper another directory",
                upper.display()
            )));
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    Ok(())
}

/// Makes the directories of `upper`, and notes in it to which image its changes belong. Returns the directory, locked, and
/// what the root lacks.
///
/// Over another image the changes would be taken for changes of that image's files, and an old size and mode would be shown
/// over new bytes. Two concurrent mounts would not see each other's changes, so the second one is refused. Changes that were
/// made over a link farm are refused without one (`uses_farm`): for a file with a changed mode, only the farm says where
/// its content is.
pub(super) fn prepare_upper(
    store: &Store,
    digest: &Digest,
    upper: &Path,
    user: bool,
    uses_farm: bool,
) -> Result<(File, Vec<String>)> {
    let (root, note, farm_note) = (upper.join("upper"), upper.join("image"), upper.join("shelved"));
    make_upper(upper)?;
    let lock = File::open(upper).at(upper)?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).at(upper)?;
    let there = root.exists();
    if there {
        wait_until_unused(upper, user)?;
    }
    for part in [&root, &upper.join("work")] {
        fs::create_dir_all(part).at_output(part)?;
    }
    let noted = match fs::read_to_string(&note) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        other => Some(other.at(&note)?),
    };
    // Without changes it belongs to no image.
    let empty = fs::read_dir(&root).at(&root)?.next().is_none();
    let own = there && noted.as_deref().map(str::trim_end) == Some(&digest.to_string());
    if own && !uses_farm && !empty && farm_note.exists() {
        return Err(Error::Refused(format!(
            "mount: {} has changes that lead to the image's link farm (.shelf), and there is none and none can be made (no \
             space in the store, or nothing may be written); free some, or give --upper another directory",
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
        set_meta(&store.tree(digest)?, &root, ROOT, &mut notes)?;
    }
    // Noted durably before the first change.
    let farm_noted = match (uses_farm, farm_note.exists()) {
        (true, false) => File::create(&farm_note).and_then(|_| lock.sync_all()),
        (false, true) => fs::remove_file(&farm_note),
        _ => Ok(()),
    };
    match farm_noted {
        // Changes of an earlier version, perhaps on a full disk: they can be mounted without a note too.
        Err(_) if own && uses_farm => {}
        noted => noted.at_output(&farm_note)?,
    }
    if own {
        return Ok((lock, Vec::new()));
    }
    let staged = upper.join("image.new");
    let mut file = File::create(&staged).at_output(&staged)?;
    writeln!(file, "{digest}").and_then(|()| file.sync_all()).at_output(&staged)?;
    fs::rename(&staged, &note).at_output(&note)?;
    lock.sync_all().at_output(upper)?;
    // A user's metadata directory lacks the same, and its notes say so.
    Ok((lock, if user { Vec::new() } else { note_lines(&notes) }))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
