//! The mounts as OpenMetrics families.

use crate::stats::{ImageStatus, Status};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// One family: name, kind, unit, help, value of a mount or an image.
type Family<T> = (&'static str, &'static str, &'static str, &'static str, fn(&T) -> u64);

const OF_MOUNTS: &[Family<Status>] = &[
    ("uptime_seconds", "gauge", "seconds", "Time since the mount.", |s| s.uptime_s),
    ("resident_bytes", "gauge", "bytes", "Memory that blocks take.", |s| s.resident_bytes),
    ("cache_bytes", "gauge", "bytes", "Limit of the memory for blocks.", |s| s.cache_bytes),
    ("metadata_bytes", "gauge", "bytes", "Memory that bookkeeping takes.", |s| s.metadata_bytes),
    ("memory_saved_bytes", "gauge", "bytes", "Memory that equal blocks would take besides.", |s| s.memory_saved_bytes),
    ("dirty_bytes", "gauge", "bytes", "Blocks newer than the disk.", |s| s.dirty_bytes),
    ("pages_shared", "gauge", "", "Frames that several blocks share.", |s| s.pages_shared),
    ("pages_sharing", "gauge", "", "Blocks that share frames.", |s| s.pages_sharing),
    ("pages_unshared", "gauge", "", "Clean frames with one block.", |s| s.pages_unshared),
    ("pages_zero", "gauge", "", "Blocks of zeros, which need no frame.", |s| s.pages_zero),
    ("io_saved_bytes", "counter", "bytes", "Reads that needed no disk.", |s| s.io_saved_bytes),
    ("read_bytes", "counter", "bytes", "Bytes read from the images' disk.", |s| s.disk_read_bytes),
    ("written_bytes", "counter", "bytes", "Bytes written to the images' disk.", |s| s.disk_written_bytes),
    ("hits", "counter", "", "Blocks found in memory.", |s| s.hits),
    ("misses", "counter", "", "Blocks not found in memory.", |s| s.misses),
    ("cow_breaks", "counter", "", "Shared blocks that were written.", |s| s.cow_breaks),
    ("shared_on_load", "counter", "", "Blocks whose content was in memory when loaded.", |s| s.shared_on_load),
    ("shared_after_writeback", "counter", "", "Blocks whose content was in memory when written back.", |s| {
        s.shared_after_writeback
    }),
    ("evictions", "counter", "", "Frames that were evicted.", |s| s.evictions),
    ("collisions", "counter", "", "Equal fingerprints of unequal blocks.", |s| s.collisions),
    ("read_ahead_blocks", "counter", "", "Blocks read before they were asked for.", |s| s.read_ahead_blocks),
    ("syncs", "counter", "", "Syncs that reached the disk.", |s| s.syncs),
    ("uncached_reads", "counter", "", "Reads that bypassed the cache: no free frame.", |s| s.uncached_reads),
    ("fingerprint_files_rejected", "counter", "", "Stale or damaged fingerprint files.", |s| {
        s.fingerprint_files_rejected
    }),
    ("writeback_errors", "counter", "", "Writebacks that the disk refused.", |s| s.writeback_errors),
];

const OF_IMAGES: &[Family<ImageStatus>] = &[
    ("image_resident_bytes", "gauge", "bytes", "Blocks of the image in memory.", |i| i.resident_bytes),
    ("image_shared_bytes", "gauge", "bytes", "Of these, in frames with others.", |i| i.shared_bytes),
    ("image_dirty_bytes", "gauge", "bytes", "Of these, newer than the disk.", |i| i.dirty_bytes),
    ("image_memory_saved_bytes", "gauge", "bytes", "The image's part of what sharing saves.", |i| i.memory_saved_bytes),
    ("image_io_saved_bytes", "counter", "bytes", "Reads of the image that needed no disk.", |i| i.io_saved_bytes),
];

/// Appends the metrics of `mounts` to `out`, with mount point and image as labels.
pub fn render(mounts: &[Status], out: &mut String) {
    for family in OF_MOUNTS {
        let suffix = head(out, family);
        for mount in mounts {
            let (name, at, value) = (family.0, escape(&mount.mountpoint), (family.4)(mount));
            let _ = writeln!(out, "pagefold_disk_{name}{suffix}{{mount=\"{at}\"}} {value}");
        }
    }
    for family in OF_IMAGES {
        let suffix = head(out, family);
        for mount in mounts {
            let (name, at) = (family.0, escape(&mount.mountpoint));
            // An open image without a name may share its old name with another image. A collector accepts a series once,
            // so the two are added up.
            let mut sums = BTreeMap::<&str, u64>::new();
            mount.images.iter().for_each(|image| *sums.entry(&image.name).or_default() += (family.4)(image));
            for (image, value) in sums {
                let image = escape(image);
                let _ = writeln!(out, "pagefold_disk_{name}{suffix}{{mount=\"{at}\",image=\"{image}\"}} {value}");
            }
        }
    }
}

/// Writes the head of a family and returns the suffix of its samples.
fn head<T>(out: &mut String, &(name, kind, unit, help, _): &Family<T>) -> &'static str {
    let _ = writeln!(out, "# TYPE pagefold_disk_{name} {kind}");
    if !unit.is_empty() {
        let _ = writeln!(out, "# UNIT pagefold_disk_{name} {unit}");
    }
    let _ = writeln!(out, "# HELP pagefold_disk_{name} {help}");
    if kind == "counter" { "_total" } else { "" }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mount_and_image_has_its_line() {
        let image = ImageStatus { name: "a \"b\".raw".into(), io_saved_bytes: 7, ..ImageStatus::default() };
        let mount =
            Status { mountpoint: "/mnt".into(), memory_saved_bytes: 4096, images: vec![image], ..Status::default() };
        let mut text = String::new();
        render(&[mount], &mut text);
        assert!(text.contains("pagefold_disk_memory_saved_bytes{mount=\"/mnt\"} 4096\n"), "{text}");
        let escaped = "pagefold_disk_image_io_saved_bytes_total{mount=\"/mnt\",image=\"a \\\"b\\\".raw\"} 7\n";
        assert!(text.contains(escaped), "{text}");
    }

    #[test]
    fn images_of_one_name_are_one_series() {
        let image = |dirty_bytes| ImageStatus { name: "a".into(), dirty_bytes, ..ImageStatus::default() };
        let mount = Status { mountpoint: "/mnt".into(), images: vec![image(3), image(4)], ..Status::default() };
        let mut text = String::new();
        render(&[mount], &mut text);
        let lines: Vec<&str> =
            text.lines().filter(|line| line.starts_with("pagefold_disk_image_dirty_bytes{")).collect();
        assert_eq!(lines, ["pagefold_disk_image_dirty_bytes{mount=\"/mnt\",image=\"a\"} 7"]);
    }
}
