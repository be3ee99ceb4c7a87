//! A guest that reads an image through NBD, beside the plain file.

use super::machines::{Stage, cpu_s, plain_setup, raw_drive};
use crate::disk::server::{Mount, Server};
use crate::process::Failure;
use crate::record;
use crate::stats::Spread;
use crate::vm::{Guest, Setup};
use serde_json::json;
use std::time::Instant;

/// 4 KiB reads past the guest's own cache, each waiting for the one before: round trips, nothing else.
pub(super) fn front_ends(Stage { scratch, boot, directory, images, size }: Stage<'_>) -> Result<(), Failure> {
    let image = &images[0];
    let reads: usize = if size.all_rows { 4000 } else { 500 };
    let socket = scratch.dir.join("nbd");
    let mount = Mount { cache_mib: size.cache_mib(), nbd: Some(socket.clone()), ..Mount::cache(directory) };
    let server = Server::start(scratch, mount)?;
    let name = image.file_name().and_then(|name| name.to_str()).ok_or("no name")?;
    let ways = [
        ("plain file, kernel's page cache", format!("{},file.locking=off", raw_drive(image, "writeback")), Vec::new()),
        (
            "pagefold disk, NBD",
            format!("file=nbd+unix:///{name}?socket={},format=raw", socket.display()),
            vec![server.pid()],
        ),
    ];
    let start = |drive: &String| Guest::start(boot, &Setup { drive: drive.clone(), ..plain_setup() });
    let mut guests = ways.iter().map(|(_, drive, _)| start(drive)).collect::<Result<Vec<_>, _>>()?;
    guests.iter_mut().try_for_each(Guest::ready)?;
    let command = format!("dd if=/dev/vda of=/dev/null bs=4k count={reads} iflag=direct 2> /dev/null && echo done");
    let mut samples = ways.each_ref().map(|_| (Vec::new(), Vec::new()));
    for round in 0..=size.rounds {
        for (((_, _, servers), guest), samples) in ways.iter().zip(&mut guests).zip(&mut samples) {
            let pids = [&servers[..], &[guest.pid()]].concat();
            let (cpu, started) = (cpu_s(pids.clone()), Instant::now());
            guest.begin(&command)?;
            let said = guest.wait()?;
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
    let rows = ways.iter().zip(samples).map(|((name, ..), (rates, cpu))| {
        let (rates, cpu) = (Spread::of(rates), Spread::of(cpu));
        json!({ "part": "front_ends", "name": name, "reads_per_s": rates, "cpu_us_per_read": cpu })
    });
    record::table(
        "4 KiB reads of one guest past its cache, one at a time",
        "name|reads/s=reads_per_s:0|CPU us a read=cpu_us_per_read:1",
        rows.collect(),
    );
    Ok(())
}
