//! Which open files may pin memory of a process for a device.
//!
//! The kernel refuses to move a pinned anonymous page. For a private copy of a pool page there is no such check: replacing
//! it would leave the device with the old page. So such copies stay while the process has one of these files open.

/// Device nodes, and directories of device nodes, with drivers that access memory only by the system calls of the process.
const HARMLESS: [&str; 17] = [
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "tty",
    "pts",
    "ptmx",
    "console",
    "kmsg",
    "shm",
    "mqueue",
    "fuse",
    "kvm",
    "net/tun",
    "vhost-net",
    "vhost-vsock",
];

/// Returns true if the driver of `target`, an open file that is not a disk, may pin pages of the process: `io_uring`,
/// graphics, video, RDMA, VFIO and every device not known to be harmless. Disks pin only with `O_DIRECT`.
pub fn may_pin_pages(target: &[u8]) -> bool {
    let Some(name) = target.strip_prefix(b"/dev/") else { return target.starts_with(b"anon_inode:[io_uring]") };
    let is_in = |device: &str| {
        name.strip_prefix(device.as_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    !HARMLESS.iter().any(|device| is_in(device)) && !name.starts_with(b"tty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_devices_may_pin() {
        for harmless in ["/dev/null", "/dev/pts/3", "/dev/ttyS0", "/dev/net/tun", "/tmp/dev/dri", "socket:[1]"] {
            assert!(!may_pin_pages(harmless.as_bytes()), "{harmless}");
        }
        for pinning in ["/dev/dri/card0", "/dev/nullx", "/dev/vfio/1", "anon_inode:[io_uring]"] {
            assert!(may_pin_pages(pinning.as_bytes()), "{pinning}");
        }
    }
}
