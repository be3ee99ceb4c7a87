//! What guests of QEMU boot from.

use super::skipped;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A kernel of this machine that may be read, or `None` after saying that there is none.
pub fn kernel() -> Option<PathBuf> {
    let entries = std::fs::read_dir("/boot").into_iter().flatten().flatten();
    let found = entries.map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
            && std::fs::File::open(path).is_ok()
    });
    if found.is_none() {
        skipped("no kernel to boot in /boot (linux-image-cloud-amd64)");
    }
    found
}

/// Makes an initial file system in `dir`: busybox, `init` as the first program, and `files` by name.
pub fn initramfs(dir: &Path, busybox: &Path, init: &str, files: &[(String, Vec<u8>)]) -> PathBuf {
    let root = dir.join("root");
    for name in ["bin", "dev"] {
        std::fs::create_dir_all(root.join(name)).expect("a directory");
    }
    std::fs::copy(busybox, root.join("bin/busybox")).expect("busybox");
    std::fs::write(root.join("init"), init).expect("init");
    std::fs::set_permissions(root.join("init"), PermissionsExt::from_mode(0o755)).expect("permissions");
    let mut names = ".\nbin\nbin/busybox\ndev\ninit\n".to_owned();
    for (name, content) in files {
        std::fs::write(root.join(name), content).expect("a file");
        names.push_str(&format!("{name}\n"));
    }
    let archive = dir.join("initramfs");
    let mut command = Command::new("cpio");
    command.args(["--quiet", "-o", "-H", "newc"]).current_dir(&root).stdin(Stdio::piped());
    let mut child = command.stdout(std::fs::File::create(&archive).expect("a file")).spawn().expect("cpio");
    child.stdin.take().expect("a pipe").write_all(names.as_bytes()).expect("names");
    assert!(child.wait().expect("cpio ends").success());
    archive
}

/// `len` bytes that look random; only the bits of `mask` are set in each word.
pub fn noise(len: usize, mask: u64) -> Vec<u8> {
    let mut seed = 0x9E37_79B9_7F4A_7C15u64;
    let words = (0..len / 8).flat_map(|_| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed & mask).to_ne_bytes()
    });
    words.collect()
}
