//! What guests of QEMU boot from, and what they print. The tests and the benchmarks of all crates share this file.

#![allow(dead_code)]

use std::io::{Read, Result, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// Drivers for a virtio disk.
pub const DISK: [&str; 2] = ["virtio_pci.ko", "virtio_blk.ko"];

/// A kernel of this machine.
pub struct Kernel {
    pub path: PathBuf,
    pub version: String,
    /// Modules, in the order to load them.
    pub modules: Vec<PathBuf>,
}

/// The newest readable kernel in /boot that has modules for some of `drivers` (a driver that is built in has none), with
/// those modules and all that they depend on. Without `drivers`: the newest readable kernel.
pub fn kernel(drivers: &[&str]) -> Option<Kernel> {
    let mut kernels: Vec<PathBuf> = std::fs::read_dir("/boot").ok()?.flatten().map(|entry| entry.path()).collect();
    kernels.retain(|path| std::fs::File::open(path).is_ok());
    kernels.sort();
    kernels.into_iter().rev().find_map(|path| {
        let version = path.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
        let home = Path::new("/lib/modules").join(&version);
        let table = std::fs::read_to_string(home.join("modules.dep")).unwrap_or_default();
        let mut modules = Vec::new();
        for driver in drivers {
            let is_drivers = |line: &&str| line.split(':').next().is_some_and(|name| name.ends_with(driver));
            // The dependencies follow the colon, and the last one is loaded first.
            let line = table.lines().find(is_drivers).unwrap_or_default();
            for name in line.split([':', ' ']).filter(|part| !part.is_empty()).rev() {
                let module = home.join(name);
                if !modules.contains(&module) {
                    modules.push(module);
                }
            }
        }
        (drivers.is_empty() || !modules.is_empty()).then_some(Kernel { path, version, modules })
    })
}

/// Makes an initial file system in `dir`: busybox, `files` by name, and a first program that loads `modules` and then
/// runs the lines of the shell script `init`.
///
/// # Errors
/// A file cannot be read or written, or cpio fails.
pub fn initramfs(
    dir: &Path,
    busybox: &Path,
    modules: &[PathBuf],
    init: &str,
    files: &[(String, Vec<u8>)],
) -> Result<PathBuf> {
    let root = dir.join("guest-root");
    let mut names = ".\n".to_owned();
    for name in ["bin", "dev", "proc", "sys", "mnt"] {
        std::fs::create_dir_all(root.join(name))?;
        names += &format!("{name}\n");
    }
    let mut add = |name: &str, content: &[u8]| -> Result<()> {
        names += &format!("{name}\n");
        std::fs::write(root.join(name), content)?;
        std::fs::set_permissions(root.join(name), PermissionsExt::from_mode(0o755))
    };
    add("bin/busybox", &std::fs::read(busybox)?)?;
    let mut script = "#!/bin/busybox sh\n".to_owned();
    if !modules.is_empty() {
        script += "/bin/busybox mount -t devtmpfs none /dev\n";
    }
    for (n, module) in modules.iter().enumerate() {
        add(&format!("{n}.ko"), &std::fs::read(module)?)?;
        script += &format!("/bin/busybox insmod /{n}.ko\n");
    }
    add("init", (script + init).as_bytes())?;
    for (name, content) in files {
        add(name, content)?;
    }
    let archive = dir.join("guest-root.cpio");
    let mut cpio = Command::new("cpio");
    cpio.args(["--quiet", "-o", "-H", "newc"]).current_dir(&root).stdin(Stdio::piped());
    let mut child = cpio.stdout(std::fs::File::create(&archive)?).spawn()?;
    child.stdin.take().expect("a pipe").write_all(names.as_bytes())?;
    match child.wait()? {
        status if status.success() => Ok(archive),
        status => Err(std::io::Error::other(format!("cpio: {status}"))),
    }
}

/// What a guest has printed on its console so far.
#[derive(Clone)]
pub struct Console(Arc<Mutex<String>>);

impl Console {
    /// Starts a thread that reads QEMU's standard output to its end.
    pub fn read(mut output: ChildStdout) -> Console {
        let console = Console(Arc::default());
        let printed = console.0.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(got @ 1..) = output.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..got]);
                printed.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        console
    }

    pub fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The rest of the first complete line that contains `mark`, from there on: the guest prints a few bytes at a time, and
    /// the firmware leaves escape sequences on the same line.
    pub fn after(&self, mark: &str) -> Option<String> {
        let text = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, rest) = text.split_once(mark)?;
        rest.split_once('\n').map(|(line, _)| line.trim().to_owned())
    }
}
