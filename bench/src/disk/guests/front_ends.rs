//! The ways from a guest to the host: the mounted file, NBD, vhost-user.

use super::machines::{GUEST_MIB, cpu_s, plain_setup, raw_drive};
use crate::disk::args::GuestSize;
use crate::disk::scratch::Scratch;
use crate::disk::server::{Mount, Server};
use crate::process::Failure;
use crate::process::{Running, wait_for};
use crate::record;
use crate::stats::Spread;
use crate::vm::{Boot, Guest, Setup};
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// QEMU's own storage daemon, which exports `image` on a socket.
fn storage_daemon(image: &Path, export: &str, socket: &Path) -> Result<Running, Failure> {
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!("driver=file,node-name=f,locking=off,filename={}", image.display()));
    if export == "nbd" {
        command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
        command.args(["--export", "type=nbd,id=e,node-name=f,name=disk,writable=on"]);
    } else {
        let address = format!("addr.type=unix,addr.path={}", socket.display());
        command.arg("--export").arg(format!("type={export},id=e,node-name=f,{address},writable=on"));
    }
    let daemon = Running::start(command.stdin(Stdio::null()))?;
    wait_for("qemu-storage-daemon", Duration::from_secs(20), || socket.exists().then_some(()))?;
    Ok(daemon)
}

/// 4 KiB reads past the guest's own cache, each waiting for the one before: round trips, nothing else.
pub(super) fn front_ends(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    image: &Path,
    size: &GuestSize,
) -> Result<(), Failure> {
    let reads: usize = if size.all_peers { 4000 } else { 500 };
    let sockets = scratch.dir("sockets")?;
    let (ours_nbd, nbd, rings) = (sockets.join("ours"), sockets.join("nbd"), sockets.join("rings"));
    let mount = Mount { cache_mib: size.cache_mib(), nbd: Some(ours_nbd.clone()), ..Mount::cache(directory) };
    let server = Server::start(scratch, mount)?;
    let daemons = storage_daemon(image, "nbd", &nbd)
        .and_then(|first| Ok((first, storage_daemon(image, "vhost-user-blk", &rings)?)));
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
        Err(error) => eprintln!("SKIPPED: vhost-user-blk against NBD: {error}"),
        Ok((by_nbd, by_rings)) => {
            let setup = with_drive(socket_drive(&nbd, "disk"));
            rows.push(("QEMU's storage daemon, NBD", setup, vec![by_nbd.pid()]));
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
            rows.push(("QEMU's storage daemon, vhost-user-blk", setup, vec![by_rings.pid()]));
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
    let rows = rows.iter().zip(samples).map(|((name, setup, _), (rates, cpu))| {
        let rates = Spread::of(rates);
        json!({
            "part": "front_ends", "name": name, "reads_per_s": rates.median,
            "spread_percent": rates.half_range_percent(), "cpu_us_per_read": Spread::of(cpu).median,
            // Merging needs private memory.
            "guest_memory_private": setup.extra.is_empty(),
        })
    });
    record::table(
        "4 KiB reads of one guest past its cache, one at a time: median of rounds",
        "name|reads/s=reads_per_s:0|+-=spread_percent:1 %|CPU us a read=cpu_us_per_read:1|\
         guest memory private, can merge=guest_memory_private",
        rows.collect(),
    );
    Ok(())
}
