//! Whether devices may be reading straight into a process's memory. The kernel moves no plain page that is held for that; of a
//! page that was written where the pool is shown nobody can tell, and a copy would leave the device behind.

/// Device nodes that reach a process's memory only as the process itself would, and directories of such.
const TAME_DEVICES: [&str; 17] = [
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

/// Whether `target`, an open file that is no disk, is one whose driver may hold pages of the process: `io_uring`, graphics,
/// video, RDMA, VFIO and whatever else is not known for the contrary. Disks are told by `O_DIRECT`.
pub fn may_hold_pages(target: &[u8]) -> bool {
    let Some(name) = target.strip_prefix(b"/dev/") else { return target.starts_with(b"anon_inode:[io_uring]") };
    let tame =
        |tame: &str| name.strip_prefix(tame.as_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"));
    !TAME_DEVICES.iter().any(|device| tame(device)) && !name.starts_with(b"tty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_told_by_name() {
        for tame in ["/dev/null", "/dev/pts/3", "/dev/ttyS0", "/dev/net/tun", "/tmp/dev/dri", "socket:[1]"] {
            assert!(!may_hold_pages(tame.as_bytes()), "{tame}");
        }
        for wild in ["/dev/dri/card0", "/dev/nullx", "/dev/vfio/1", "anon_inode:[io_uring]"] {
            assert!(may_hold_pages(wild.as_bytes()), "{wild}");
        }
    }
}
