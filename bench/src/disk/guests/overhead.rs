//! What it costs: processor time of guests that work on files.

use super::machines::{BUILD, MOUNT, Stage, WORK, boot_all, cpu_s, plain_setup, raw_drive, through};
use crate::disk::server::{Mount, Server};
use crate::process::Failure;
use crate::record;
use crate::stats::Spread;
use crate::vm::{self, Guest, same};
use serde_json::json;

fn guests_have(guests: &mut [Guest], path: &str) -> Result<bool, Failure> {
    Ok(vm::all(guests, &format!("ls {path}"))?.iter().all(|said| said == path))
}

pub(super) fn overhead(Stage { scratch, boot, directory, images, size }: Stage<'_>) -> Result<(), Failure> {
    let server = Server::start(scratch, Mount { cache_mib: size.cache_mib(), ..Mount::cache(directory) })?;
    let mut plain = boot_all(boot, images.iter().map(|image| raw_drive(image, "writeback")), &plain_setup())?;
    let mut ours = boot_all(boot, through(&server, images), &plain_setup())?;
    same(&[vm::all(&mut plain, MOUNT)?, vm::all(&mut ours, MOUNT)?].concat())?;
    let pids = |guests: &[Guest]| guests.iter().map(Guest::pid).collect::<Vec<_>>();
    let mut rows = Vec::new();
    let builds = guests_have(&mut plain, "/mnt/build/run")?;
    // One kind is enough to see that it runs.
    let (plain_work, build) = if size.all_rows { (WORK, builds.then_some(&BUILD)) } else { (&WORK[..1], None) };
    for (work, command) in plain_work.iter().chain(build) {
        let mut samples: Vec<[f64; 3]> = Vec::new();
        // The first round warms up: memory is plentiful on both sides.
        for round in 0..=size.rounds {
            // At the same time, so that other load of the machine weighs on both alike.
            let before = [cpu_s(pids(&plain)), cpu_s(pids(&ours)), cpu_s([server.pid()])];
            plain.iter_mut().chain(&mut ours).try_for_each(|guest| guest.begin(command))?;
            same(&plain.iter_mut().chain(&mut ours).map(Guest::wait).collect::<Result<Vec<_>, _>>()?)?;
            let after = [cpu_s(pids(&plain)), cpu_s(pids(&ours)), cpu_s([server.pid()])];
            if round > 0 {
                samples.push(std::array::from_fn(|at| after[at] - before[at]));
            }
        }
        let column = |value: &dyn Fn(&[f64; 3]) -> f64| Spread::of(samples.iter().map(value));
        let total = column(&|s| 100.0 * ((s[1] + s[2]) / s[0] - 1.0));
        let guests = [("plain files, kernel's page cache", column(&|s| s[0])), ("pagefold disk", column(&|s| s[1]))];
        for (name, guests) in guests {
            let ours = name == "pagefold disk";
            let of_ours = |value: f64| if ours { value } else { 0.0 };
            rows.push(json!({
                "part": "overhead", "work": work, "name": name, "guest_cpu_s": guests.median,
                "spread_percent": guests.half_range_percent(), "server_cpu_s": of_ours(column(&|s| s[2]).median),
                "server_share_percent": of_ours(column(&|s| 100.0 * s[2] / (s[1] + s[2])).median),
                // Guests and server together; median of rounds, and half their range.
                "total_against_plain_percent": of_ours(total.median),
                "total_range_percent": of_ours((total.high - total.low) / 2.0),
            }));
        }
    }
    record::table(
        "Processor time of guests that work on a kernel tree, their own caches emptied, the host's warm",
        "work|name|guests' s=guest_cpu_s:2|+-=spread_percent:1 %|server s=server_cpu_s:3|\
         server's share=server_share_percent:2 %|all against plain=total_against_plain_percent:1 %|+-=total_range_percent:1",
        rows,
    );
    Ok(())
}
