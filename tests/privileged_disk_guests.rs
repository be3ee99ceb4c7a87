//! One pool: guests under `pagefold run` that read images under `pagefold disk` share the physical frame of the host's
//! cached block, with each other and with the host. KSM has no part in it.

mod common;

use common::boot::{Console, DISK};
use common::{Daemon, Reaped, TOOL, can_merge, guest, skipped, wait_for};
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

const IMAGE_LEN: usize = 8 << 20;
const GUESTS: usize = 3;

/// Reads the whole disk into the guest's page cache, prints its digest, and rests.
const INIT: &str = "
while ! [ -b /dev/vda ]; do /bin/busybox sleep 0.1; done
echo PAGEFOLD-SUM $(/bin/busybox md5sum < /dev/vda)
while :; do /bin/busybox sleep 1000; done
";

struct Guest {
    qemu: Reaped,
    console: Console,
}

impl Guest {
    fn start(daemon: &Daemon, kernel: &Path, initramfs: &Path, disk: &Path) -> Guest {
        let mut command = daemon.run(&[]);
        command.args(["qemu-system-x86_64", "-accel", "tcg", "-m", "128", "-nodefaults", "-no-reboot", "-display"]);
        command.args(["none", "-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1 no_timer_check"]);
        command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs).arg("-drive");
        command.arg(format!("file={},format=raw,if=virtio,cache=none", disk.display()));
        let mut qemu = Reaped(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("qemu"));
        let console = Console::read(qemu.0.stdout.take().expect("a pipe"));
        Guest { qemu, console }
    }

    fn sum(&mut self) -> Option<String> {
        assert!(self.qemu.0.try_wait().expect("wait").is_none(), "a guest ended:\n{}", self.console.text());
        let sum = self.console.after("PAGEFOLD-SUM ")?;
        sum.split(' ').next().map(str::to_owned)
    }
}

/// The physical frames behind a process's private writable memory, each with one address that shows it.
fn frames(pid: i32) -> HashMap<u64, u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    let pagemap = std::fs::File::open(format!("/proc/{pid}/pagemap")).expect("root may look");
    let mut frames = HashMap::new();
    for line in maps.lines().filter(|line| line.split(' ').nth(1).is_some_and(|rights| rights.ends_with('p'))) {
        let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let number = |text| u64::from_str_radix(text, 16).expect("an address");
        let (from, to) = (number(from), number(to));
        let mut entries = vec![0; ((to - from) / 4096 * 8) as usize];
        let Ok(count) = pagemap.read_at(&mut entries, from / 4096 * 8) else { continue };
        for (n, word) in entries[..count].chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            if word >> 63 == 1 {
                frames.insert(word & ((1 << 55) - 1), from + n as u64 * 4096);
            }
        }
    }
    frames
}

#[test]
fn a_disk_block_is_one_frame_in_the_host_and_in_every_guest() {
    if !common::root() || !Path::new("/dev/fuse").exists() {
        return skipped("mounting and looking at frames needs root and /dev/fuse");
    }
    let Some(boot) = guest::needs(&DISK).filter(|_| can_merge()) else { return };
    let mut daemon = Daemon::start(&["--scan-interval", "200ms"]);
    let base = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (images, mount) = (base.path().join("images"), base.path().join("mnt"));
    std::fs::create_dir_all(&images).and_then(|()| std::fs::create_dir(&mount)).expect("directories");
    let data = guest::noise(IMAGE_LEN, u64::MAX);
    for n in 0..GUESTS {
        std::fs::write(images.join(format!("{n}.raw")), &data).expect("an image");
    }
    let sum = Command::new("md5sum").arg(images.join("0.raw")).output().expect("md5sum");
    let sum = String::from_utf8_lossy(&sum.stdout).split(' ').next().expect("a digest").to_owned();

    // The mount is a client like the guests: its cache is in the pool of their domain.
    let mut command = daemon.run(&[]);
    command.arg(TOOL).args(["disk", "mount"]).arg(&images).arg(&mount).args(["--cache-size", "64M"]);
    command.env("PAGEFOLD_RUNTIME_DIR", base.path().join("run")).stdin(Stdio::null());
    let server = Reaped(command.spawn().expect("the mount"));
    wait_for("the images to be shown", 30, || mount.join("0.raw").exists());

    let archive = guest::initramfs(base.path(), &boot, INIT, &[]);
    let start = |n: usize| Guest::start(&daemon, &boot.0.path, &archive, &mount.join(format!("{n}.raw")));
    let mut guests: Vec<Guest> = (0..GUESTS).map(start).collect();
    wait_for("the guests to read their disks", 400, || guests.iter_mut().all(|guest| guest.sum().is_some()));
    for guest in &mut guests {
        assert_eq!(guest.sum(), Some(sum.clone()), "a guest read other bytes");
    }

    // Frames that the server and every guest map, and that hold a block of the image.
    let blocks: HashSet<&[u8]> = data.chunks_exact(4096).collect();
    let mut common = 0;
    let goal = IMAGE_LEN / 4096 / 2;
    wait_for("the host's blocks and the guests' pages to be one", 120, || {
        let host = frames(server.pid());
        let theirs: Vec<HashMap<u64, u64>> = guests.iter().map(|guest| frames(guest.qemu.pid())).collect();
        let memory = std::fs::File::open(format!("/proc/{}/mem", server.pid())).expect("root may look");
        let is_block = |address: u64| {
            let mut page = [0; 4096];
            memory.read_exact_at(&mut page, address).is_ok() && blocks.contains(&page[..])
        };
        let everywhere = host.iter().filter(|(frame, _)| theirs.iter().all(|guest| guest.contains_key(frame)));
        common = everywhere.filter(|(_, address)| is_block(**address)).count();
        std::thread::sleep(std::time::Duration::from_millis(300));
        common >= goal
    });
    let of = IMAGE_LEN / 4096;
    println!("{common} of {of} blocks are one physical frame in the host's cache and in {GUESTS} guests");
    daemon.verify();

    // It is still a disk, also without the daemon: what is read now, through all of that, is the image.
    daemon.kill();
    for n in 0..GUESTS {
        assert!(std::fs::read(mount.join(format!("{n}.raw"))).expect("an image") == data, "image {n}");
    }
    drop(guests);
    let umount = Command::new(TOOL)
        .args(["disk", "umount"])
        .arg(&mount)
        .env("PAGEFOLD_RUNTIME_DIR", base.path().join("run"))
        .output()
        .expect("umount");
    assert!(umount.status.success(), "{}", String::from_utf8_lossy(&umount.stderr));
}
