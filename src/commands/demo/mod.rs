//! `pagefold demo`: the main job, live, on real data, with nothing but this machine's own files.
//!
//! Several processes read the same files in different orders into private memory, and then run as any program does. A daemon
//! merges them: as root it attaches to them, else they load the agent. Nothing changes for a while, and what that costs is
//! measured. Each process compares every byte with the files, writes to pages anywhere, and compares again. As root the same
//! is done once more with the kernel's KSM.

mod client;
mod crew;
mod interrupt;
mod ksm_row;
mod ours;
mod row;

pub use client::{Args as ClientArgs, run as client};

use crate::error::Error;
use crate::output::{Style, Table, print, print_json};
use crate::{say, units};
use ours::SILENCE_S;
use pagefold_os::{ksm, procfs};
use row::{REST, Row, STORM_PAGES};
use std::process::ExitCode;

/// See it work: real processes, merged live, beside the kernel's KSM
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold demo
  pagefold demo --processes 8 --size 256M --no-ksm
  pagefold demo --json

Nothing is left behind but the agent's file, also when interrupted; KSM's settings are put back.")]
pub struct Args {
    /// Processes to start
    #[arg(long, default_value = "4", value_name = "N", value_parser = processes)]
    processes: usize,
    /// Memory that each fills with the contents of this machine's files
    #[arg(long, default_value = "128M", value_name = "SIZE", value_parser = size)]
    size: u64,
    /// Leave the comparison with KSM out (it needs root)
    #[arg(long)]
    no_ksm: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn processes(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (2..=64).contains(count)).ok_or_else(|| "takes 2 to 64".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    let size = units::size(text)?;
    if size >= 1 << 20 { Ok(size) } else { Err("takes at least 1 MiB".into()) }
}

/// Runs the demonstration.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    interrupt::heed_signals();
    let done = demonstrate(&args);
    interrupt::end_as_asked();
    done
}

fn demonstrate(args: &Args) -> Result<ExitCode, Error> {
    let (available, _) = procfs::available_and_total();
    if args.size > available / 4 * 3 / args.processes as u64 {
        let (size, free) = (units::show_size(args.size), units::show_size(available));
        return Err(format!(
            "{} processes of {size} do not fit: {free} are free; use a smaller --size",
            args.processes
        )
        .into());
    }
    if let Some(lack) = pagefold_os::probe::all().into_iter().find(|finding| finding.needed && !finding.works) {
        return Err(format!("{}: {}; {}", lack.name, lack.detail, lack.cure).into());
    }
    let root = pagefold_os::user::effective() == 0;
    let mut rows = vec![ours::merge(args.processes, args.size, root)?];
    let why_no_ksm = match ksm::unused() {
        _ if args.no_ksm => None,
        _ if !root => Some("As root the kernel's KSM does the same beside it.".to_owned()),
        Err(error) => Some(format!("Without the kernel's KSM beside it: {error}.")),
        Ok(()) => {
            rows.push(ksm_row::merge(args.processes, args.size)?);
            None
        }
    };
    if args.json {
        print_json(&rows)?;
    } else {
        show(&rows, why_no_ksm)?;
    }
    let intact = rows.iter().all(|row| row.intact == row.processes);
    Ok(if intact { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Percent of a processor.
fn percent(value: f64) -> String {
    if value < 10.0 { format!("{value:.2} %") } else { format!("{value:.0} %") }
}

fn show(rows: &[Row], why_no_ksm: Option<String>) -> Result<(), Error> {
    let style = Style::stdout();
    say!("");
    let mut table =
        Table::new(style, &["", "before", "after", "time", "processor", "per page", "at rest", "write", "data"]);
    for row in rows {
        let data = if row.intact == row.processes { "intact".to_owned() } else { "WRONG".to_owned() };
        table.row([
            row.name.to_owned(),
            units::show_size(row.before_bytes),
            units::show_size(row.after_bytes),
            format!("{:.1} s", row.seconds),
            format!("{:.2} s", row.cpu_seconds),
            format!("{:.2} us", row.cpu_seconds * 1e6 / row.pages_merged.max(1) as f64),
            percent(row.rest_cpu_percent),
            format!("{:.1} us", row.write_us),
            data,
        ]);
    }
    print(&table.render(0))?;
    let own = |row: &Row| match row.name {
        "KSM" => format!("KSM's records, {}", units::show_size(row.own_bytes)),
        _ => format!("{}'s daemon and mappings, {}", row.name, units::show_size(row.own_bytes)),
    };
    let own = rows.iter().map(own).collect::<Vec<_>>().join(", or ");
    say!("after: the processes and {own}");
    say!(
        "time: of pagefold's, {SILENCE_S} s are the silence that it waits for; per page: processor time per page merged"
    );
    let rest = REST.as_secs();
    say!(
        "at rest: of one processor over {rest} s in which nothing changes; write: each of {STORM_PAGES} to pages anywhere"
    );
    if let Some(slow) = rows.iter().find_map(|row| row.rest_cpu_percent_by_default) {
        say!("KSM runs at full speed; at the kernel's own speed it takes {} at rest, and merges slowly", percent(slow));
    }
    if let Some(why) = why_no_ksm {
        say!("\n{why}");
    }
    say!(
        "\nNow yours: sudo pagefold attach PID ..., or pagefold run --manage all -- YOUR-PROGRAM, and pagefold status."
    );
    Ok(())
}
