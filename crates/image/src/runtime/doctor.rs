//! What this kernel and user can mount: tried, not guessed, wherever trying leaves nothing behind.

use crate::error::Error;
use crate::format::erofs;
use crate::runtime::mount::{
    self, SHARED_OPTION, attach, erofs_mount, in_initial_namespace, mount_shows_option, overlay_mount,
};
use crate::store::default_root;
use crate::sys;
use crate::tree::Tree;
use rustix::mount::{MountAttrFlags, UnmountFlags};
use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// One line of the answer.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// Whether it is there.
    pub ok: bool,
    /// What was seen.
    pub detail: String,
    /// What to do when it is missing; empty when nothing is.
    pub cure: &'static str,
}

fn check(name: &'static str, result: Result<String, String>, cure: &'static str) -> Check {
    match result {
        Ok(detail) => Check { name, ok: true, detail, cure: "" },
        Err(detail) => Check { name, ok: false, detail, cure },
    }
}

/// The text of an error, without the hint at this very answer.
fn text(error: Error) -> String {
    error.to_string().replace("; `pagefold doctor` says which mounts this kernel and user have", "")
}

/// Reports which kinds of mount this kernel and user have. The process should have one thread: a child is forked for
/// the rootless test.
pub fn doctor() -> Vec<Check> {
    let Some(scratch) = Scratch::new() else {
        return vec![check(
            "image scratch",
            Err("no temporary directory".into()),
            "set TMPDIR to a writable directory",
        )];
    };
    let erofs = if scratch.is_on_tmpfs {
        let dir = scratch.path.parent().unwrap_or(&scratch.path).display();
        check(
            "image erofs",
            Err(format!("not tried: {dir} is on a tmpfs, from which the kernel mounts no image file")),
            "set TMPDIR to a directory on a disk",
        )
    } else {
        check(
            "image erofs",
            try_file(&scratch),
            "needs root and Linux 6.12 with EROFS_FS_BACKED_BY_FILE; loop or directory mounts do without",
        )
    };
    vec![
        erofs,
        check(
            "image loop",
            try_loop_device(&scratch),
            "needs root and loop devices (modprobe loop); only used where erofs above is missing",
        ),
        check(
            "image overlay",
            try_overlay(&scratch),
            "needs overlayfs of Linux 6.8 or later (modprobe overlay), and root before 6.16",
        ),
        check(
            "image rootless",
            try_rootless(&scratch),
            "needs Linux 6.16 and unprivileged user namespaces (sysctl user.max_user_namespaces)",
        ),
        check(
            "image inode_share",
            try_inode_share(&scratch),
            "needs Linux 7.0 built with EROFS_FS_PAGE_CACHE_SHARE; overlay mounts share the same files without it",
        ),
        check("image verify --check-frames", frames(), "run as root; without it `stat` still counts residency"),
    ]
}

/// Writes an image of an empty tree. Returns its path.
fn write_image(scratch: &Scratch, layout: erofs::Layout) -> Result<PathBuf, String> {
    let image = scratch.path.join(format!("{layout:?}.erofs"));
    let bytes = erofs::write(&Tree::default(), layout).expect("an empty tree fits").head;
    fs::write(&image, bytes).map(|()| image).map_err(|error| error.to_string())
}

fn try_file(scratch: &Scratch) -> Result<String, String> {
    let image = write_image(scratch, erofs::Layout::Metadata)?;
    erofs_mount(&image, None, false).map(|_| "mounts a plain file".to_string()).map_err(text)
}

fn try_loop_device(scratch: &Scratch) -> Result<String, String> {
    let image = write_image(scratch, erofs::Layout::Metadata)?;
    let file = fs::File::open(&image).map_err(|error| error.to_string())?;
    let (device, _held) = sys::loop_device(&file).map_err(|error| error.to_string())?;
    erofs_mount(&device, None, false).map(|_| format!("mounts {}", device.display())).map_err(text)
}

fn try_overlay(scratch: &Scratch) -> Result<String, String> {
    let (meta, objects) = (scratch.path.join("meta"), scratch.path.join("objects"));
    let (user, attributes) = (!in_initial_namespace(), MountAttrFlags::MOUNT_ATTR_RDONLY);
    overlay_mount("pagefold-doctor", &meta, std::slice::from_ref(&objects), user, None, attributes)
        .map(|_| "data-only layer accepted".to_string())
        .map_err(text)
}

fn try_rootless(scratch: &Scratch) -> Result<String, String> {
    let layers = |path: &OsStr| path.as_bytes().to_vec();
    let (meta, objects) = (scratch.path.join("meta"), scratch.path.join("objects"));
    let data = [b"userxattr,lowerdir=", &layers(meta.as_os_str())[..], b"::", &layers(objects.as_os_str())].concat();
    let target = CString::new(scratch.path.join("target").as_os_str().as_bytes()).expect("no NUL in a path");
    let data = CString::new(data).expect("no NUL in a path");
    match sys::try_mount_in_user_namespace(&target, &data) {
        Ok(()) => Ok("overlayfs with userxattr in a user namespace".to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// Tries a native mount, and looks for the option in the mount table: some kernels only parse it.
fn try_inode_share(scratch: &Scratch) -> Result<String, String> {
    let unknown = || "EROFS does not know inode_share".to_string();
    if scratch.is_on_tmpfs {
        return Err("not tried: no directory outside of a tmpfs".into());
    }
    let image = write_image(scratch, erofs::Layout::Full)?;
    let fd = erofs_mount(&image, Some("pagefold-doctor"), false).map_err(|_| unknown())?;
    let target = scratch.path.join("target");
    attach(&fd, &target).map_err(text)?;
    let table = fs::read("/proc/self/mountinfo");
    let _ = rustix::mount::unmount(&target, UnmountFlags::DETACH);
    if mount_shows_option(&table.map_err(|error| error.to_string())?, &target, SHARED_OPTION) {
        Ok("EROFS shares by inode_share: `build --native` uses it".into())
    } else {
        Err("EROFS parses inode_share and does not share".into())
    }
}

fn frames() -> Result<String, String> {
    if rustix::process::geteuid().is_root() && mount::in_initial_namespace() {
        Ok("pagemap shows frame numbers".to_string())
    } else {
        Err("frame numbers are hidden from this user".to_string())
    }
}

/// File system type of tmpfs, as statfs(2) tells it.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// A directory for the tries, removed at the end.
struct Scratch {
    path: PathBuf,
    /// Whether no directory outside of a tmpfs could be made: a tmpfs cannot tell what the kernel does with image files on a
    /// disk.
    is_on_tmpfs: bool,
}

impl Scratch {
    /// Makes a directory in the first of TMPDIR, the store and /var/tmp that is not on a tmpfs, or else in TMPDIR.
    fn new() -> Option<Self> {
        let temporary = std::env::temp_dir();
        // In a store only names with a leading dot are left alone.
        let name = format!(".pagefold-doctor-{}", std::process::id());
        let on_disk = [temporary.clone(), default_root(), PathBuf::from("/var/tmp")]
            .into_iter()
            .filter(|dir| !is_tmpfs(dir))
            .find_map(|dir| Self::make(dir.join(&name), false));
        on_disk.or_else(|| Self::make(temporary.join(&name), true))
    }

    fn make(path: PathBuf, is_on_tmpfs: bool) -> Option<Self> {
        fs::create_dir(&path).ok()?;
        let scratch = Self { path: path.canonicalize().unwrap_or(path), is_on_tmpfs };
        for part in ["meta", "objects", "target"] {
            fs::create_dir(scratch.path.join(part)).ok()?;
        }
        Some(scratch)
    }
}

/// Returns true if a directory is on a tmpfs.
fn is_tmpfs(dir: &Path) -> bool {
    rustix::fs::statfs(dir).is_ok_and(|found| found.f_type == TMPFS_MAGIC)
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_check_is_judged_by_a_tmpfs() {
        let Some(shm) = Some(Path::new("/dev/shm")).filter(|dir| is_tmpfs(dir)) else {
            println!("SKIPPED: /dev/shm is not a tmpfs");
            return;
        };
        let path = shm.join(format!(".pagefold-doctor-test-{}", std::process::id()));
        let Some(scratch) = Scratch::make(path, true) else {
            println!("SKIPPED: nothing can be made in /dev/shm");
            return;
        };
        let error = try_inode_share(&scratch).unwrap_err();
        assert!(error.contains("not tried") && error.contains("tmpfs"), "{error}");
        let other = Scratch::new().unwrap();
        assert_eq!(other.is_on_tmpfs, is_tmpfs(&other.path));
    }
}
