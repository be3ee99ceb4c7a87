//! Real programs on a mount: fio with verification, qemu-img and qemu-io, a loop device with ext4, NBD clients, and
//! random operations, as fsx does them, against a model.

mod common;

use common::{Mount, Random, Setup, has, run};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

#[test]
fn the_process_that_serves() {
    common::serve_if_asked();
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn fio_verifies_its_writes() {
    skip_unless_mountable!();
    if !has("fio") {
        println!("SKIPPED: needs fio");
        return;
    }
    let mount = Mount::new(Setup { cache_mib: 16, ..Setup::default() });
    let file = format!("--filename={}", text(&mount.path("fio")));
    let common =
        [&file, "--name=v", "--size=24M", "--verify=crc32c", "--verify_fatal=1", "--randrepeat=1", "--group_reporting"];
    for (rw, bs, more) in [
        ("randwrite", "4k", &["--ioengine=libaio", "--iodepth=8", "--direct=1"][..]),
        ("randwrite", "--bsrange", &["--bsrange=512-70k", "--bs_unaligned=1", "--fsync=50"][..]),
        ("write", "1M", &["--end_fsync=1"][..]),
        ("randrw", "16k", &["--ioengine=io_uring", "--iodepth=4"][..]),
    ] {
        let mut args = common.to_vec();
        let (rw, bs) = (format!("--rw={rw}"), format!("--bs={bs}"));
        args.push(&rw);
        if !bs.contains("bsrange") {
            args.push(&bs);
        }
        args.extend_from_slice(more);
        run("fio", &args);
        // Once more after everything was written back.
        mount.flush();
    }
}

#[test]
fn qemu_img_and_qemu_io_work_on_mounted_images() {
    skip_unless_mountable!();
    if !has("qemu-img") || !has("qemu-io") {
        println!("SKIPPED: needs qemu-utils");
        return;
    }
    let mount = Mount::new(Setup { cache_mib: 16, ..Setup::default() });
    let mut data = vec![0; 6 << 20];
    Random::new(3).fill(&mut data[1 << 20..4 << 20]);
    std::fs::write(mount.dir().join("raw"), &data).unwrap();
    let (raw, qcow2, back) = (mount.path("raw"), mount.path("disk.qcow2"), mount.path("back"));
    for cache in ["none", "writeback"] {
        run("qemu-img", &["convert", "-t", cache, "-T", cache, "-f", "raw", "-O", "qcow2", &text(&raw), &text(&qcow2)]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &text(&raw), &text(&qcow2)]);
        run("qemu-img", &["check", &text(&qcow2)]);
        let write =
            ["-c", "write -P 0x55 1M 300k", "-c", "write -z 2M 64k", "-c", "flush", "-c", "read -P 0x55 1M 300k"];
        let file = text(&qcow2);
        let args: Vec<&str> = ["-t", cache, "-f", "qcow2"].iter().chain(&write).copied().chain([&*file]).collect();
        run("qemu-io", &args);
        run("qemu-img", &["check", &text(&qcow2)]);
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &text(&qcow2), &text(&back)]);
        let mut expected = data.clone();
        expected[1 << 20..(1 << 20) + (300 << 10)].fill(0x55);
        expected[2 << 20..(2 << 20) + (64 << 10)].fill(0);
        assert!(std::fs::read(&back).unwrap() == expected, "cache={cache}");
        // Flushed data is in the directory's file.
        mount.flush();
        run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &text(&back), &text(&mount.dir().join("disk.qcow2"))]);
    }
}

#[test]
fn nbd_clients_read_write_and_flush() {
    skip_unless_mountable!();
    if !has("qemu-img") || !has("qemu-io") {
        println!("SKIPPED: needs qemu-utils");
        return;
    }
    let mut mount = Mount::new(Setup::default());
    mount.terminate();
    let socket = mount.base.path().join("nbd.sock");
    mount.setup.nbd = Some(socket.clone());
    let mut data = vec![0; 5 << 20];
    Random::new(3).fill(&mut data[1 << 20..]);
    std::fs::write(mount.dir().join("a.raw"), &data).unwrap();
    std::fs::write(mount.dir().join("b.raw"), &data).unwrap();
    mount.start();
    let url = |name: &str| format!("nbd+unix:///{name}?socket={}", socket.display());
    let listed = run("qemu-img", &["info", &url("a.raw")]);
    assert!(listed.contains("5 MiB"), "{listed}");
    run("qemu-img", &["compare", &url("a.raw"), &text(&mount.path("b.raw"))]);
    assert!(mount.status().memory_saved_bytes >= 4 << 20, "shared, whether it is read through the mount or NBD");
    let commands =
        ["write -P 7 4k 8k", "write -f -P 8 100k 1k", "discard 1M 64k", "write -z 2M 64k", "flush", "read -P 7 4k 8k"];
    let url_b = url("b.raw");
    let mut args = vec!["-f", "raw"];
    commands.iter().for_each(|command| args.extend(["-c", *command]));
    args.push(&url_b);
    run("qemu-io", &args);
    // Flushed, so the directory's file has it: read without the mount.
    data[4096..12288].fill(7);
    data[102_400..103_424].fill(8);
    data[1 << 20..(1 << 20) + (64 << 10)].fill(0);
    data[2 << 20..(2 << 20) + (64 << 10)].fill(0);
    assert!(std::fs::read(mount.dir().join("b.raw")).unwrap() == data);
    // What was never written is not read: 20 GiB of nothing, 64 KiB of data, and nothing again.
    let sparse = std::fs::File::create(mount.path("sparse.raw")).unwrap();
    sparse.set_len(20 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[5; 64 << 10], 1 << 30).unwrap();
    drop(sparse);
    let map: serde_json::Value =
        serde_json::from_str(&run("qemu-img", &["map", "-f", "raw", "--output=json", &url("sparse.raw")])).unwrap();
    let found: Vec<_> =
        map.as_array().unwrap().iter().map(|part| (part["length"].as_u64(), part["data"].as_bool())).collect();
    let wanted = [(1 << 30, false), (64 << 10, true), ((19 << 30) - (64 << 10), false)];
    assert_eq!(found, wanted.map(|(length, data)| (Some(length), Some(data))));
    std::fs::write(mount.base.path().join("outside"), &data).unwrap();
    std::os::unix::fs::symlink(mount.base.path(), mount.dir().join("link")).unwrap();
    for name in ["../outside", "link/outside"] {
        let missing = std::process::Command::new("qemu-img").args(["info", &url(name)]).output().unwrap();
        assert!(!missing.status.success(), "a name outside the directory is refused: {name}");
    }
    assert!(mount.terminate().0);
}

struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["-d", &self.0]).status();
    }
}

struct Mounted(String);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").args(["-l", &self.0]).stderr(std::process::Stdio::null()).status();
    }
}

#[test]
fn a_loop_device_carries_ext4() {
    skip_unless_mountable!();
    if !Path::new("/dev/loop-control").exists() || !has("mkfs.ext4") || !has("losetup") {
        println!("SKIPPED: needs loop devices, losetup and mkfs.ext4");
        return;
    }
    let mount = Mount::new(Setup { cache_mib: 16, ..Setup::default() });
    std::fs::File::create(mount.path("disk")).unwrap().set_len(48 << 20).unwrap();
    let device = Loop(run("losetup", &["-f", "--show", &text(&mount.path("disk"))]).trim().to_owned());
    run("mkfs.ext4", &["-q", "-b", "4096", &device.0]);
    let inside = mount.base.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    let mut data = vec![0; 9 << 20];
    Random::new(6).fill(&mut data);
    for round in 0..2 {
        run("mount", &[&device.0, &text(&inside)]);
        let mounted = Mounted(text(&inside));
        if round == 0 {
            std::fs::write(inside.join("one"), &data).unwrap();
            run("cp", &[&text(&inside.join("one")), &text(&inside.join("two"))]);
            std::fs::remove_file(inside.join("one")).unwrap();
        }
        assert!(std::fs::read(inside.join("two")).unwrap() == data);
        // A process that another test has just forked has a copy of each descriptor until its exec.
        let began = std::time::Instant::now();
        let mut umount = std::process::Command::new("umount");
        umount.arg(&mounted.0);
        while !umount.status().unwrap().success() {
            assert!(began.elapsed().as_secs() < 60, "the loop device stays in use");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        run("fsck.ext4", &["-fn", &device.0]);
    }
    drop(device);
    mount.flush();
    // The directory's file contains the whole file system, too.
    run("fsck.ext4", &["-fn", &text(&mount.dir().join("disk"))]);
}

/// As fsx does: one file, random operations of all kinds, with a model of the whole content.
#[test]
fn random_operations_through_the_mount_match_a_model() {
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup { cache_mib: 4, flush_ms: 20, ..Setup::default() });
    let open = |mount: &Mount, direct: bool| {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).custom_flags(flags);
        options.open(mount.path("fsx")).unwrap()
    };
    let mut random = Random::new(20);
    let mut model: Vec<u8> = Vec::new();
    let mut file = open(&mount, false);
    let mut buffer = vec![0; 200_000];
    const SIZE: u64 = 6 << 20;
    for step in 0..4000 {
        let offset = random.below(SIZE);
        let length = 1 + random.below(if step % 8 == 0 { 150_000 } else { 9000 }) as usize;
        let case = random.below(100);
        let size = model.len();
        let what = || format!("step {step} case {case}: {length} bytes from {offset} of {size}");
        match case {
            0..40 => {
                let count = file.read_at(&mut buffer[..length], offset).unwrap();
                let from = (offset as usize).min(model.len());
                assert!(buffer[..count] == model[from..(from + length).min(model.len())], "{}", what());
            }
            40..78 => {
                random.fill(&mut buffer[..length]);
                file.write_all_at(&buffer[..length], offset).unwrap();
                let end = offset as usize + length;
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[offset as usize..end].copy_from_slice(&buffer[..length]);
            }
            78..82 => {
                file.set_len(offset).unwrap();
                model.resize(offset as usize, 0);
            }
            82..88 => {
                use rustix::fs::FallocateFlags as Flags;
                let zero = random.below(2) == 0;
                let flags = if zero { Flags::ZERO_RANGE } else { Flags::PUNCH_HOLE | Flags::KEEP_SIZE };
                rustix::fs::fallocate(&file, flags, offset, length as u64).unwrap();
                let end = offset as usize + length;
                if zero && end > model.len() {
                    model.resize(end, 0);
                }
                let (from, to) = ((offset as usize).min(model.len()), end.min(model.len()));
                model[from..to].fill(0);
            }
            88..94 => {
                file.sync_data().unwrap();
                assert!(std::fs::read(mount.dir().join("fsx")).unwrap() == model, "{}", what());
            }
            94..98 => file = open(&mount, false),
            98 => {
                // Direct and aligned, with another handle.
                let direct = open(&mount, true);
                let mut aligned = vec![0; 3 * 4096];
                let skip = aligned.as_ptr().align_offset(4096);
                let at = offset / 4096 * 4096;
                let count = direct.read_at(&mut aligned[skip..skip + 8192], at).unwrap();
                let from = (at as usize).min(model.len());
                assert!(aligned[skip..skip + count] == model[from..(from + 8192).min(model.len())], "{}", what());
            }
            _ if step % 3 == 0 => {
                drop(file);
                assert!(mount.terminate().0);
                mount.start();
                file = open(&mount, false);
            }
            _ => {}
        }
        if case.is_multiple_of(10) {
            assert_eq!(file.metadata().unwrap().len() as usize, model.len(), "{}", what());
        }
    }
    drop(file);
    assert!(std::fs::read(mount.path("fsx")).unwrap() == model);
    assert!(mount.terminate().0);
    assert!(std::fs::read(mount.dir().join("fsx")).unwrap() == model);
}
