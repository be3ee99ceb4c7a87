//! The ways from a guest to the host: the mounted file, NBD, vhost-user.

use super::{FrontEndRow, GUEST_MIB, Results, Size, cpu_s, plain_setup, raw_drive};
use crate::disk::files::summary;
use crate::disk::server::Server;
use crate::disk::{Failure, Scratch};
use crate::vm::{Boot, Guest, Setup};
use std::path::Path;
use std::time::{Duration, Instant};

/// A server of QEMU's own, gone with this value.
struct StorageDaemon(std::process::Child);

impl StorageDaemon {
    fn start(image: &Path, export: &str, socket: &Path) -> Result<StorageDaemon, Failure> {
        let mut command = std::process::Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("driver=file,node-name=f,locking=off,filename={}", image.display()));
        if export == "nbd" {
            command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
            command.args(["--export", "type=nbd,id=e,node-name=f,name=disk,writable=on"]);
        } else {
            let address = format!("addr.type=unix,addr.path={}", socket.display());
            command.arg("--export").arg(format!("type={export},id=e,node-name=f,{address},writable=on"));
        }
        let child = command.stdin(std::process::Stdio::null()).spawn()?;
        let mut daemon = StorageDaemon(child);
        let started = Instant::now();
        while !socket.exists() {
            if daemon.0.try_wait()?.is_some() || started.elapsed() > Duration::from_secs(20) {
                return Err("qemu-storage-daemon does not come up".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// 4 KiB reads past the guest's own cache, each waiting for the one before: round trips, nothing else.
pub(super) fn front_ends(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    image: &Path,
    size: &Size,
    results: &mut Results,
    skipped: &mut Vec<String>,
) -> Result<(), Failure> {
    let reads: usize = if size.all_peers { 4000 } else { 500 };
    let sockets = scratch.dir("sockets")?;
    let (ours_nbd, nbd, rings) = (sockets.join("ours"), sockets.join("nbd"), sockets.join("rings"));
    let server = Server::start_with_nbd(scratch, directory, size.cache_mib(), &ours_nbd)?;
    let daemons = StorageDaemon::start(image, "nbd", &nbd)
        .and_then(|first| Ok((first, StorageDaemon::start(image, "vhost-user-blk", &rings)?)));
    let name = image.file_name().and_then(|name| name.to_str()).ok_or("no name")?;
    let socket_drive =
        |socket: &Path, name: &str| format!("file=nbd+unix:///{name}?socket={},format=raw", socket.display());
    let mount_drive = raw_drive(&server.at.join(name), "none");
    let with_drive = |drive: String| Setup { drive, ..plain_setup() };
    let plain_drive = format!("{},file.locking=off", raw_drive(image, "writeback"));
    let mut rows: Vec<(&str, Setup, Vec<i32>)> = vec![
        ("plain file, kernel's page cache", with_drive(plain_drive), vec![]),
        ("pagefold disk, the mounted file", with_drive(mount_drive), vec![server.pid()]),
        ("pagefold disk, NBD", with_drive(socket_drive(&ours_nbd, name)), vec![server.pid()]),
    ];
    match &daemons {
        Err(error) => skipped.push(format!("vhost-user-blk against NBD: {error}")),
        Ok((by_nbd, by_rings)) => {
            let setup = with_drive(socket_drive(&nbd, "disk"));
            rows.push(("QEMU's storage daemon, NBD", setup, vec![by_nbd.0.id() as i32]));
            let extra = [
                "-object".to_owned(),
                format!("memory-backend-memfd,id=m,size={GUEST_MIB}M,share=on"),
                "-machine".to_owned(),
                "memory-backend=m".to_owned(),
                "-chardev".to_owned(),
                format!("socket,id=c,path={}", rings.display()),
                "-device".to_owned(),
                "vhost-user-blk-pci,chardev=c".to_owned(),
            ];
            let setup = Setup { extra: extra.into(), ..plain_setup() };
            rows.push(("QEMU's storage daemon, vhost-user-blk", setup, vec![by_rings.0.id() as i32]));
        }
    }
    let command = format!("dd if=/dev/vda of=/dev/null bs=4k count={reads} iflag=direct 2> /dev/null && echo done");
    let mut guests: Vec<Guest> =
        rows.iter().map(|(_, setup, _)| Guest::start(boot, setup)).collect::<Result<_, _>>()?;
    guests.iter_mut().try_for_each(Guest::ready)?;
    let mut samples = vec![(Vec::new(), Vec::new()); rows.len()];
    for round in 0..size.rounds + 1 {
        for (((_, _, servers), guest), samples) in rows.iter().zip(&mut guests).zip(&mut samples) {
            let pids: Vec<i32> = servers.iter().copied().chain([guest.pid()]).collect();
            let (cpu, started) = (cpu_s(pids.clone()), Instant::now());
            let said = guest.run(&command)?;
            if said != "done" {
                return Err(format!("a guest's dd failed: {said}").into());
            }
            // The first round warms up.
            if round > 0 {
                samples.0.push(reads as f64 / started.elapsed().as_secs_f64());
                samples.1.push((cpu_s(pids) - cpu) * 1e6 / reads as f64);
            }
        }
    }
    for ((name, setup, _), (rates, cpu)) in rows.iter().zip(samples) {
        let (reads_per_s, spread_percent) = summary(rates);
        results.front_ends.push(FrontEndRow {
            name: (*name).to_owned(),
            reads_per_s,
            spread_percent,
            cpu_us_per_read: summary(cpu).0,
            guest_memory_private: setup.extra.is_empty(),
        });
    }
    Ok(())
}
