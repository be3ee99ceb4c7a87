//! What this kernel and user can mount: tried, not guessed, wherever trying leaves nothing behind.

use crate::erofs;
use crate::mount;
use crate::sys;
use crate::tree::Tree;
use rustix::mount::MountAttrFlags;
use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;

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

/// Says which kinds of mount this kernel and user have. The process should have one thread: a child is forked for
/// the rootless test.
pub fn doctor() -> Vec<Check> {
    let Ok(scratch) = Scratch::new() else {
        return vec![check(
            "image scratch",
            Err("no temporary directory".into()),
            "set TMPDIR to a writable directory",
        )];
    };
    let text = |error: crate::Error| {
        error.to_string().replace("; `pagefold doctor` says which mounts this kernel and user have", "")
    };
    let image = scratch.0.join("tree.erofs");
    let tiny = erofs::write(&Tree::default(), erofs::Layout::Metadata).expect("an empty tree fits");
    let wrote = fs::write(&image, &tiny.head).map_err(|error| error.to_string());
    let from_file = wrote.clone().and_then(|()| {
        mount::erofs_mount(&image, None, false).map(|_| "mounts a plain file".to_string()).map_err(text)
    });
    let through_loop = wrote.clone().and_then(|()| {
        let file = fs::File::open(&image).map_err(|error| error.to_string())?;
        let (device, _held) = sys::loop_device(&file).map_err(|error| error.to_string())?;
        mount::erofs_mount(&device, None, false).map(|_| format!("mounts {}", device.display())).map_err(text)
    });
    let overlay = {
        let options = mount::Options::default();
        let (meta, objects) = (scratch.0.join("meta"), scratch.0.join("objects"));
        let user = !mount::in_initial_namespace();
        mount::overlay_mount(
            "pagefold-doctor",
            &meta,
            std::slice::from_ref(&objects),
            user,
            &options,
            MountAttrFlags::MOUNT_ATTR_RDONLY,
        )
        .map(|_| "data-only layer accepted".to_string())
        .map_err(text)
    };
    let rootless = {
        let layers = |path: &OsStr| path.as_bytes().to_vec();
        let (meta, objects) = (scratch.0.join("meta"), scratch.0.join("objects"));
        let data =
            [b"userxattr,lowerdir=", &layers(meta.as_os_str())[..], b"::", &layers(objects.as_os_str())].concat();
        let target = CString::new(scratch.0.join("target").as_os_str().as_bytes()).expect("no NUL in a path");
        let data = CString::new(data).expect("no NUL in a path");
        match sys::try_mount_in_user_namespace(&target, &data) {
            Ok(()) => Ok("overlayfs with userxattr in a user namespace".to_string()),
            Err(error) => Err(error.to_string()),
        }
    };
    let share = if mount::has_inode_share() {
        Ok("EROFS accepts inode_share: `build --native` uses it".to_string())
    } else {
        Err("EROFS does not know inode_share".to_string())
    };
    let frames = if rustix::process::geteuid().is_root() && mount::in_initial_namespace() {
        Ok("pagemap shows frame numbers".to_string())
    } else {
        Err("frame numbers are hidden from this user".to_string())
    };
    vec![
        check(
            "image erofs",
            from_file,
            "needs root and Linux 6.12 with EROFS_FS_BACKED_BY_FILE; loop or directory mounts do without",
        ),
        check(
            "image loop",
            through_loop,
            "needs root and loop devices (modprobe loop); only used where erofs above is missing",
        ),
        check(
            "image overlay",
            overlay,
            "needs overlayfs of Linux 6.8 or later (modprobe overlay), and root before 6.16",
        ),
        check(
            "image rootless",
            rootless,
            "needs Linux 6.16 and unprivileged user namespaces (sysctl user.max_user_namespaces)",
        ),
        check(
            "image inode_share",
            share,
            "needs Linux 7.0 built with EROFS_FS_PAGE_CACHE_SHARE; overlay mounts share the same files without it",
        ),
        check("image verify --check-frames", frames, "run as root; without it `stat` still counts residency"),
    ]
}

/// A directory for the tries, removed at the end.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("pagefold-doctor-{}", std::process::id()));
        fs::create_dir(&path)?;
        let scratch = Self(path);
        for part in ["meta", "objects", "target"] {
            fs::create_dir(scratch.0.join(part))?;
        }
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
