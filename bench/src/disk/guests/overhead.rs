//! What it costs: processor time of guests that work on files.

use super::{BUILD, MOUNT, OverheadRow, Results, Size, WORK, boot_all, cpu_s, plain_setup, raw_drive, same, through};
use crate::disk::files::summary;
use crate::disk::server::Server;
use crate::disk::{Failure, Scratch};
use crate::vm::{self, Boot, Guest};
use std::path::{Path, PathBuf};

fn guests_have(guests: &mut [Guest], path: &str) -> Result<bool, Failure> {
    Ok(vm::all(guests, &format!("ls {path}"))?.iter().all(|said| said == path))
}

pub(super) fn overhead(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    images: &[PathBuf],
    size: &Size,
    results: &mut Results,
) -> Result<(), Failure> {
    let server = Server::start(scratch, "cache", directory, size.cache_mib(), None)?;
    let mut plain = boot_all(boot, images.iter().map(|image| raw_drive(image, "writeback")), &plain_setup())?;
    let mut ours = boot_all(boot, through(&server, images), &plain_setup())?;
    same(&[vm::all(&mut plain, MOUNT)?, vm::all(&mut ours, MOUNT)?].concat())?;
    let pids = |guests: &[Guest]| guests.iter().map(Guest::pid).collect::<Vec<_>>();
    let mut rows = Vec::new();
    let builds = guests_have(&mut plain, "/mnt/build/run")?;
    // One kind is enough to see that it runs.
    let (plain_work, build) = if size.all_peers { (WORK, builds.then_some(&BUILD)) } else { (&WORK[..1], None) };
    for (work, command) in plain_work.iter().chain(build) {
        let mut samples: Vec<[f64; 3]> = Vec::new();
        // The first round warms up: memory is plentiful on both sides.
        for round in 0..=size.rounds {
            // At the same time, so that what else the machine does weighs on both alike.
            let before = [cpu_s(pids(&plain)), cpu_s(pids(&ours)), cpu_s([server.pid()])];
            plain.iter_mut().chain(&mut ours).try_for_each(|guest| guest.begin(command))?;
            same(&plain.iter_mut().chain(&mut ours).map(Guest::wait).collect::<Result<Vec<_>, _>>()?)?;
            let after = [cpu_s(pids(&plain)), cpu_s(pids(&ours)), cpu_s([server.pid()])];
            if round > 0 {
                samples.push(std::array::from_fn(|at| after[at] - before[at]));
            }
        }
        let column = |value: &dyn Fn(&[f64; 3]) -> f64| summary(samples.iter().map(value).collect());
        let totals = samples.iter().map(|s| 100.0 * ((s[1] + s[2]) / s[0] - 1.0));
        let (low, high) = totals.clone().fold((f64::MAX, f64::MIN), |(low, high), t| (low.min(t), high.max(t)));
        let (guests_plain, guests_ours) = (column(&|s| s[0]), column(&|s| s[1]));
        rows.push(OverheadRow {
            work: (*work).to_owned(),
            name: "plain files, kernel's page cache".to_owned(),
            guest_cpu_s: guests_plain.0,
            server_cpu_s: 0.0,
            spread_percent: guests_plain.1,
            server_share_percent: 0.0,
            total_against_plain_percent: 0.0,
            total_range_percent: 0.0,
        });
        rows.push(OverheadRow {
            work: (*work).to_owned(),
            name: "pagefold disk".to_owned(),
            guest_cpu_s: guests_ours.0,
            server_cpu_s: column(&|s| s[2]).0,
            spread_percent: guests_ours.1,
            server_share_percent: column(&|s| 100.0 * s[2] / (s[1] + s[2])).0,
            total_against_plain_percent: summary(totals.collect()).0,
            total_range_percent: (high - low) / 2.0,
        });
    }
    results.overhead = rows;
    Ok(())
}
