//! Whether devices may be reading straight into a process's memory right now.
//!
//! Pages of a pool mapping have no check of the kernel's against that (plain memory has: `UFFDIO_MOVE` refuses pinned
//! pages), so they are healed only while there is no way to pin them.

use pagefold_os::procfs;
use pagefold_protocol::pinning_devices::may_pin_pages;
use std::fs;
use std::os::unix::fs::FileTypeExt;

/// By what process `pid` may be reading from devices into its memory; `None` if it has no way to.
pub(crate) fn way(pid: i32) -> Option<String> {
    if procfs::field(&procfs::status(pid), "VmPin").unwrap_or(1) > 0 {
        return Some("pinned memory".into());
    }
    let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Some("files that cannot be listed".into()) };
    fds.flatten().find_map(|entry| {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        if is_device_that_may_pin(&target) {
            return Some(format!("{target}, which is open"));
        }
        let name = entry.file_name();
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", name.to_string_lossy())).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?.trim();
        let is_direct = u64::from_str_radix(flags, 8).is_ok_and(|flags| flags & libc::O_DIRECT as u64 != 0);
        is_direct.then(|| format!("{target}, which is open with O_DIRECT"))
    })
}

/// True if `target`, an open file, is a device with a driver that may pin pages of the process. Disks show by `O_DIRECT`.
fn is_device_that_may_pin(target: &str) -> bool {
    let block = || fs::metadata(target).is_ok_and(|meta| meta.file_type().is_block_device());
    may_pin_pages(target.as_bytes()) && !block()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn devices_that_are_not_known_may_pin() {
        for device in
            ["vfio/7", "infiniband/uverbs0", "nvidia0", "nvidiactl", "dri/renderD128", "video0", "kfd", "nullish"]
        {
            assert!(is_device_that_may_pin(&format!("/dev/{device}")), "{device}");
        }
        for tame in ["/dev/null", "/dev/pts/3", "/dev/ttyS0", "/dev/net/tun", "/dev/kvm", "/tmp/vfio", "socket:[7]"] {
            assert!(!is_device_that_may_pin(tame), "{tame}");
        }
    }

    #[test]
    fn a_file_open_with_o_direct_is_a_way() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("direct");
        let Ok(file) = fs::File::options().write(true).create(true).custom_flags(libc::O_DIRECT).open(&path) else {
            return eprintln!("SKIPPED: no O_DIRECT in {}", dir.path().display());
        };
        let pid = std::process::id() as i32;
        let said = way(pid).unwrap_or_default();
        // Another test's file may be found first.
        assert!(said.contains("which is open"), "{said}");
        drop(file);
        assert!(way(i32::MAX).is_some(), "nothing is known of a process that is gone");
    }
}
