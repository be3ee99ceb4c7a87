//! A user's own directory, for sockets and for what programs load.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where this user's sockets and agent lie: `$PAGEFOLD_RUNTIME_DIR`, else `/run/pagefold` for root, else
/// `$XDG_RUNTIME_DIR/pagefold`, else a directory in /tmp. Nothing is made: see [`make_own`].
///
/// # Errors
/// A relative name where there is no current directory.
pub fn runtime_dir() -> Result<PathBuf> {
    let uid = crate::user::effective();
    Ok(match (std::env::var_os("PAGEFOLD_RUNTIME_DIR"), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(dir), _) if !dir.is_empty() => std::path::absolute(dir)?,
        _ if uid == 0 => PathBuf::from("/run/pagefold"),
        // A relative one is to be ignored, says its specification: each process would have another.
        (_, Some(dir)) if Path::new(&dir).is_absolute() => PathBuf::from(dir).join("pagefold"),
        _ => std::env::temp_dir().join(format!("pagefold-{uid}")),
    })
}

/// Makes `dir` and what is missing above it, and makes sure that only this user can change what lies in it. To be called
/// before anything is put there.
///
/// # Errors
/// It cannot be made, or it exists and is a link, another user's, or writable by others. The text is a line with path
/// and cause.
pub fn make_own(dir: &Path) -> Result<()> {
    let told = |kind, why: String| Err(Error::new(kind, why));
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    // In /tmp another user may have made it first: then it cannot be trusted.
    let found = match (made, std::fs::symlink_metadata(dir)) {
        (_, Ok(found)) => found,
        (Err(error), _) | (_, Err(error)) => {
            return told(error.kind(), format!("cannot make {}: {error}", dir.display()));
        }
    };
    let uid = crate::user::effective();
    if found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    let is = match found.is_dir() {
        true => format!("of user {} with mode {:04o}", found.uid(), found.mode() & 0o7777),
        false => "no directory".to_owned(),
    };
    let must = format!("must be a directory of user {uid} that no other user may write");
    told(ErrorKind::PermissionDenied, format!("{} {must}, and is {is}", dir.display()))
}

/// Makes the directory `dir` with `mode`, unless it is there, and none above it: a typing error shall not.
///
/// # Errors
/// As mkdir(2).
pub fn make_last(dir: &Path, mode: u32) -> Result<()> {
    match std::fs::DirBuilder::new().mode(mode).create(dir) {
        Err(_) if dir.is_dir() => Ok(()),
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_directory_is_ours_alone_or_refused() {
        let base = std::env::temp_dir().join(format!("pagefold-own-{}", std::process::id()));
        let (deep, link) = (base.join("a/b"), base.join("link"));
        make_own(&deep).expect("it and what is above it are made");
        make_own(&deep).expect("it is ours");
        assert_eq!(deep.metadata().unwrap().mode() & 0o7777, 0o700);
        symlink(&deep, &link).unwrap();
        let mode = |mode| std::fs::set_permissions(&deep, std::fs::Permissions::from_mode(mode)).unwrap();
        let refused = |dir: &Path| make_own(dir).unwrap_err().to_string();
        let of_link = refused(&link);
        let of_modes = [0o770, 0o702].map(|bits| {
            mode(bits);
            refused(&deep)
        });
        mode(0o711);
        let shown = make_own(&deep);
        std::fs::write(base.join("file"), "").unwrap();
        let (of_file, below) = (refused(&base.join("file")), refused(&base.join("file/dir")));
        std::fs::remove_dir_all(&base).unwrap();
        assert!(of_link.ends_with("and is no directory") && of_file.ends_with("and is no directory"), "{of_link}");
        assert!(of_modes[0].ends_with("with mode 0770") && of_modes[1].ends_with("with mode 0702"), "{of_modes:?}");
        assert!(shown.is_ok(), "others may pass");
        assert!(below.starts_with("cannot make ") && below.contains("Not a directory"), "{below}");
    }
}
