//! Checks whether disk mounts work here, by trying what they need.

use crate::fuse::ENABLE;
use crate::fuse::ring::{self, Support};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// Whether it works.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do if it does not work; empty if it does.
    pub cure: &'static str,
}

fn check(name: &'static str, seen: Result<String, (String, &'static str)>) -> Check {
    match seen {
        Ok(detail) => Check { name, ok: true, detail, cure: "" },
        Err((detail, cure)) => Check { name, ok: false, detail, cure },
    }
}

/// Runs all checks.
pub fn doctor() -> Vec<Check> {
    let root = rustix::process::geteuid().is_root();
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let configuration = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    vec![
        check("disk: /dev/fuse", device(opened.map(drop))),
        check("disk: right to mount", mounting(root, in_path("fusermount3"))),
        check("disk: transport", transport(Support::of_kernel(), ring::try_ring)),
        check("disk: --allow-other", others(root, &configuration)),
        check(
            "disk: NBD tools",
            tools(["qemu-img", "qemu-io", "nbdinfo", "nbdcopy"].map(|name| (name, in_path(name)))),
        ),
    ]
}

fn device(opened: io::Result<()>) -> Result<String, (String, &'static str)> {
    let error = match opened {
        Ok(()) => return Ok("opens for reading and writing".to_owned()),
        Err(error) => error,
    };
    Err(match error.kind() {
        io::ErrorKind::NotFound => ("it does not exist".to_owned(), "as root: modprobe fuse"),
        io::ErrorKind::PermissionDenied => (error.to_string(), "as root: chmod 666 /dev/fuse"),
        _ => (error.to_string(), "in a container: pass it through (--device /dev/fuse) with CAP_SYS_ADMIN"),
    })
}

/// Which transport a mount has, and how it gets the faster one.
fn transport(support: Support, try_ring: impl FnOnce() -> io::Result<()>) -> Result<String, (String, &'static str)> {
    const REFUSED: &str = "allow io_uring: sysctl kernel.io_uring_disabled=0, or the container's seccomp profile";
    match support {
        Support::Missing => Ok("classic: this kernel has no FUSE over io_uring (Linux 6.14)".to_owned()),
        Support::Off => Err(("classic; FUSE over io_uring is turned off".to_owned(), ENABLE)),
        Support::On => match try_ring() {
            Ok(()) => Ok("ring: FUSE over io_uring".to_owned()),
            Err(error) => Err((format!("classic; io_uring is refused: {error}"), REFUSED)),
        },
    }
}

/// Whether this user may mount. Root mounts directly; other users need the set-uid helper.
fn mounting(root: bool, helper: Option<PathBuf>) -> Result<String, (String, &'static str)> {
    const CURE: &str = "install fuse3; its fusermount3 must be set-uid root";
    match helper {
        _ if root => Ok("root mounts without help".to_owned()),
        None => Err(("fusermount3 is not installed".to_owned(), CURE)),
        Some(path) => match path.metadata() {
            Ok(metadata) if metadata.permissions().mode() & 0o4000 != 0 => Ok(path.display().to_string()),
            _ => Err((format!("{} is not set-uid root", path.display()), CURE)),
        },
    }
}

/// Whether VMs of other users may read this user's mounts.
fn others(root: bool, configuration: &str) -> Result<String, (String, &'static str)> {
    if root {
        return Ok("root may give other users access".to_owned());
    }
    if configuration.lines().any(|line| line.trim() == "user_allow_other") {
        return Ok("/etc/fuse.conf lets users give other users access".to_owned());
    }
    let seen = "only this user may access its mounts".to_owned();
    Err((seen, "as root, if others should: echo user_allow_other >> /etc/fuse.conf"))
}

fn tools<const N: usize>(tools: [(&str, Option<PathBuf>); N]) -> Result<String, (String, &'static str)> {
    let (there, missing): (Vec<_>, Vec<_>) = tools.iter().partition(|(_, path)| path.is_some());
    let names = |tools: &[&(&str, Option<PathBuf>)]| tools.iter().map(|tool| tool.0).collect::<Vec<_>>().join(", ");
    if missing.is_empty() {
        return Ok(names(&there));
    }
    // For inspecting exports manually; QEMU needs none of them.
    Err((format!("missing: {}", names(&missing)), "install qemu-utils and libnbd-bin to inspect exports manually"))
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // On some systems the helper's directory is not in the path of unprivileged users.
    let directories = std::env::split_paths(&path).chain([Path::new("/usr/sbin").into(), Path::new("/usr/bin").into()]);
    directories.map(|directory| directory.join(name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_cure() {
        assert!(device(Err(io::ErrorKind::NotFound.into())).unwrap_err().1.contains("modprobe"));
        assert!(device(Err(io::ErrorKind::PermissionDenied.into())).unwrap_err().1.contains("chmod"));
        assert!(device(Ok(())).is_ok());
        assert!(transport(Support::Off, || Ok(())).unwrap_err().1.contains("enable_uring"));
        let refused = transport(Support::On, || Err(io::ErrorKind::PermissionDenied.into())).unwrap_err();
        assert!(refused.0.contains("refused") && refused.1.contains("kernel.io_uring_disabled"));
        assert!(transport(Support::On, || Ok(())).is_ok_and(|seen| seen.starts_with("ring")));
        assert!(transport(Support::Missing, || Ok(())).is_ok_and(|seen| seen.starts_with("classic")));
        assert!(mounting(false, None).unwrap_err().1.contains("fuse3"));
        let plain = tempfile::NamedTempFile::new().unwrap();
        assert!(mounting(false, Some(plain.path().into())).unwrap_err().0.contains("set-uid"));
        assert!(mounting(true, None).is_ok());
        assert!(others(false, "#user_allow_other\n").is_err());
        assert!(others(false, "mount_max = 5\n user_allow_other\n").is_ok());
        let seen = tools([("here", Some(PathBuf::from("/x"))), ("absent", None)]).unwrap_err();
        assert_eq!(seen.0, "missing: absent");
    }
}
