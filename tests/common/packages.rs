//! The Debian packages, made from the tool under test.

use super::TOOL;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The snapshotter, a program of another package: it is there when the whole workspace was built.
pub fn snapshotter() -> PathBuf {
    Path::new(TOOL).with_file_name("pagefold-snapshotter")
}

/// The program that talks to registries, likewise.
pub fn remote() -> PathBuf {
    Path::new(TOOL).with_file_name("pagefold-remote")
}

/// The packages in a directory of their own, compressed fast instead of well.
pub fn build() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let beside = std::env::current_exe().expect("a path").parent().expect("a directory").to_path_buf();
    let made = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/build-deb.sh"))
        .args(["--binary", TOOL, "--snapshotter"])
        .arg(snapshotter())
        .arg("--remote")
        .arg(remote())
        .arg("--forrest")
        .arg(beside)
        .arg("--out")
        .arg(dir.path())
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .output()
        .expect("build-deb.sh runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    dir
}

/// The file of the package `name` in `dir`.
pub fn of(dir: &Path, name: &str) -> PathBuf {
    let of_name =
        |path: &PathBuf| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{name}_")));
    let mut found = std::fs::read_dir(dir).expect("the packages").flatten().map(|entry| entry.path()).filter(of_name);
    found.next().unwrap_or_else(|| panic!("no package {name}"))
}
