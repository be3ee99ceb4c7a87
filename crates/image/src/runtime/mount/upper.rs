//! The directory that holds a mount's changes: whose they are, and that two mounts never have one.

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
pub(super) fn prepare_upper(
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
