//! `pagefold status`: what is merged now, once.

use super::Error;
use crate::output::{Style, Table, print, print_json};
use crate::{host, units};
use pagefold_daemon::status::Status;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const PAGE: u64 = 4096;

/// Show what is merged, for whom, and what it costs
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold status
  pagefold status --json | jq .totals.general_profit

The counters have KSM's names where they mean the same: pages_shared are the pages kept,
pages_sharing the places that show them, general_profit the bytes saved less all that we hold.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let status = host::status(&host::socket(args.socket.as_deref())?)?;
    if args.json {
        print_json(&status)?;
    } else {
        print(&render(&status, Style::stdout()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn render(status: &Status, style: Style) -> String {
    let mut out = String::new();
    let totals = &status.totals;
    let _ = writeln!(
        out,
        "{} saved by one copy of {} pages shown in {} places, and {} zero pages",
        style.bold(&units::show_size_signed(totals.general_profit)),
        units::show_count(totals.pages_shared),
        units::show_count(totals.pages_sharing),
        units::show_count(totals.pages_zero),
    );
    let _ = writeln!(
        out,
        "pool {}, records and mappings {}, {} of processor time in {}",
        units::show_size(totals.pool_bytes),
        units::show_size(totals.metadata_bytes),
        units::show_duration(Duration::from_nanos(totals.cpu_ns)),
        units::show_duration(Duration::from_secs_f64(status.uptime_s)),
    );
    if !status.clients.is_empty() {
        let heading =
            ["pid", "name", "domain", "managed", "shared", "zero", "volatile", "unshared", "broken", "longest wait"];
        let mut table = Table::new(style, &heading);
        for client in &status.clients {
            let size = |pages: u64| units::show_size(pages * PAGE);
            let name = if client.stats.paused { format!("{} (paused)", client.name) } else { client.name.clone() };
            table.row([
                client.pid.to_string(),
                name,
                client.domain.clone(),
                size(client.stats.pages),
                size(client.stats.pages_sharing),
                size(client.stats.pages_zero),
                size(client.stats.pages_volatile),
                size(client.stats.pages_unshared),
                size(client.stats.pages_broken),
                units::show_duration(Duration::from_nanos(client.freeze_ns_max)),
            ]);
        }
        out.push('\n');
        out.push_str(&table.render(0));
    }
    let mut reasons: std::collections::BTreeMap<&str, u64> = std::collections::BTreeMap::new();
    for client in &status.clients {
        for (why, count) in &client.stats.not_merged {
            *reasons.entry(why).or_default() += count;
        }
    }
    let huge: u64 = status.clients.iter().map(|client| client.stats.pages_huge).sum();
    let events = status.domains.iter().map(|domain| domain.events);
    let (budget, full) = events.fold((0, 0), |(b, f), e| (b + e.over_vma_budget, f + e.over_pool_max));
    let extra = [
        ("in huge pages left whole", huge),
        ("over the budget of mappings (runs)", budget),
        ("the pool was full", full),
    ];
    let all: Vec<(&str, u64)> = reasons.into_iter().chain(extra).filter(|(_, count)| *count > 0).collect();
    if !all.is_empty() {
        out.push_str("\nnot merged:\n");
        for (why, count) in all {
            let _ = writeln!(out, "{:>12} {why}", units::show_count(count));
        }
    }
    if !status.not_covered.is_empty() {
        out.push_str("\nnot covered:\n");
        for process in &status.not_covered {
            let _ = writeln!(out, "{:>12} {}: {}", process.pid, process.name, process.reason);
        }
    }
    out
}
