//! Real guests: QEMU boots a distribution kernel with a busybox root and reads its disk through the mount.
//!
//! The images are independent copies; the host keeps one. With merging on, the guests' own copies and the host's
//! become one physical frame, which the kernel's page map shows.

#[path = "../../../tests/common/boot.rs"]
mod boot;
mod common;

use boot::{Console, DISK};
use common::{Mount, Random, Setup, has};
use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn the_process_that_serves() {
    common::serve_if_asked();
}

const IMAGE_MIB: usize = 16;

/// Reads the disk twice, writes to it, and waits.
const INIT: &str = "export PATH=/bin
while ! [ -b /dev/vda ]; do busybox sleep 0.1; done
echo SUM $(busybox md5sum < /dev/vda)
echo guest-was-here | busybox dd of=/dev/vda bs=4096 seek=1000 conv=fsync,notrunc 2>/dev/null
busybox sync
echo WRITTEN
busybox cat /dev/vda > /dev/null
echo READY
busybox sleep 100000
";

struct Guest {
    child: Child,
    console: Console,
}

impl Guest {
    fn start(kernel: &Path, initramfs: &Path, disk: &Path) -> Self {
        let mut child = Command::new("qemu-system-x86_64")
            .args([
                "-accel",
                "tcg",
                "-m",
                "128",
                "-display",
                "none",
                "-no-reboot",
                "-nodefaults",
                "-machine",
                "mem-merge=on",
            ])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check tsc=unstable", "-serial", "stdio"])
            .arg("-drive")
            .arg(format!("file={},format=raw,if=virtio,cache=none", disk.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let console = Console::read(child.stdout.take().unwrap());
        Self { child, console }
    }

    fn said(&mut self, word: &str) -> String {
        let started = Instant::now();
        loop {
            if let Some(line) = self.console.after(word) {
                return line;
            }
            let text = self.console.text();
            assert!(self.child.try_wait().unwrap().is_none(), "the guest ended: {text}");
            assert!(started.elapsed() < Duration::from_secs(150), "the guest never says {word}: {text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The kernel's same-page merging; dropping this restores its settings.
struct Merging([(&'static str, String); 3]);

impl Merging {
    fn start() -> Option<Self> {
        let read = |name| std::fs::read_to_string(format!("/sys/kernel/mm/ksm/{name}")).ok();
        let before = Self([
            ("pages_to_scan", read("pages_to_scan")?),
            ("sleep_millisecs", read("sleep_millisecs")?),
            ("run", read("run")?),
        ]);
        for (name, value) in [("pages_to_scan", "20000"), ("sleep_millisecs", "10"), ("run", "1")] {
            std::fs::write(format!("/sys/kernel/mm/ksm/{name}"), value).ok()?;
        }
        Some(before)
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            let _ = std::fs::write(format!("/sys/kernel/mm/ksm/{name}"), value.trim());
        }
    }
}

/// The physical frames behind a process's writable anonymous memory.
fn physical_frames(pid: u32) -> HashSet<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let pagemap = std::fs::File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let mut frames = HashSet::new();
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (range, rights) = (fields.next().unwrap(), fields.next().unwrap());
        let (from, to) = range.split_once('-').unwrap();
        let (from, to) = (u64::from_str_radix(from, 16).unwrap(), u64::from_str_radix(to, 16).unwrap());
        // Large anonymous mappings: the cache's frames, a guest's memory.
        if !rights.starts_with("rw") || to - from < 8 << 20 || fields.nth(2) != Some("0") {
            continue;
        }
        let mut entries = vec![0; ((to - from) / 4096 * 8) as usize];
        let Ok(count) = pagemap.read_at(&mut entries, from / 4096 * 8) else { continue };
        let words = entries[..count].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap()));
        frames.extend(words.filter(|word| word >> 63 == 1).map(|word| word & ((1 << 55) - 1)));
    }
    frames
}

#[test]
fn guests_read_equal_images_from_one_copy_and_share_its_frames() {
    skip_unless_mountable!();
    let Some(kernel) = boot::kernel(&DISK).filter(|_| has("qemu-system-x86_64") && has("cpio")) else {
        println!(
            "SKIPPED: needs qemu-system-x86_64, cpio and a kernel with modules in /boot (linux-image-cloud-amd64)"
        );
        return;
    };
    if !Path::new("/bin/busybox").exists() {
        println!("SKIPPED: needs busybox-static");
        return;
    }
    let mut mount = Mount::new(Setup { cache_mib: 64, ..Setup::default() });
    mount.terminate();
    mount.setup.merge = true;
    mount.start();
    let mut data = vec![0; IMAGE_MIB << 20];
    Random::new(11).fill(&mut data);
    let archive = boot::initramfs(mount.base.path(), Path::new("/bin/busybox"), &kernel.modules, INIT, &[]).unwrap();
    let names = ["a.raw", "b.raw", "c.raw"];
    for name in names {
        std::fs::write(mount.dir().join(name), &data).unwrap();
    }
    let expected = common::run("md5sum", &[mount.dir().join("a.raw").to_str().unwrap()]);
    let expected = expected.split_whitespace().next().unwrap().to_owned();
    let mut guests: Vec<Guest> =
        names.iter().map(|name| Guest::start(&kernel.path, &archive, &mount.path(name))).collect();
    for guest in &mut guests {
        let sum = guest.said("SUM");
        assert!(sum.contains(&expected), "a guest read other bytes: {sum} for {expected}");
        guest.said("WRITTEN");
        guest.said("READY");
    }
    let status = mount.status();
    let image_bytes = (IMAGE_MIB << 20) as u64;
    println!(
        "three guests: {} MiB of images in {} MiB, saved {} MiB",
        3 * IMAGE_MIB,
        status.resident_bytes >> 20,
        status.memory_saved_bytes >> 20
    );
    assert!(status.memory_saved_bytes >= 2 * (image_bytes - (1 << 20)), "{status:?}");
    for name in names {
        let file = std::fs::File::open(mount.dir().join(name)).unwrap();
        let mut bytes = [0; 14];
        file.read_exact_at(&mut bytes, 1000 * 4096).unwrap();
        assert_eq!(&bytes, b"guest-was-here", "what the guest synced is in the directory's own file");
    }

    // The guests' own page caches hold the same blocks: one physical frame for the host and all of them.
    let Some(_merging) = Merging::start().filter(|_| mount.status().merging) else {
        println!("SKIPPED: the part with merged frames needs KSM");
        return;
    };
    let started = Instant::now();
    let goal = image_bytes as usize / 4096 / 2;
    let common = loop {
        let mut common = physical_frames(mount.pid());
        for guest in &guests {
            let theirs = physical_frames(guest.child.id());
            common.retain(|frame| theirs.contains(frame));
        }
        if common.len() >= goal || started.elapsed() > Duration::from_secs(60) {
            break common.len();
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    println!("{common} physical frames of {} are the host's and all three guests' at once", image_bytes / 4096);
    assert!(common >= goal, "only {common} frames are common");
}
