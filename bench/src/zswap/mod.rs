//! `pagefold bench zswap`: the cold tier beside the kernel's zswap, and its index beside a red-black tree.
//!
//! Five parts: `index` (page offsets in and out of both trees), `density` (memory held for real pages), `latency` (a page
//! evicted and faulted in), `live` (a client parked, touched and unparked), `half` (redis under a limit of half its memory).
//! The kernel's side needs a swap file and zswap's switch: they are set for the run and undone afterwards. Parts that cannot
//! run here are reported as skipped, with the reason.

mod density;
mod half;
mod index;
pub(crate) mod kernel;
mod latency;
mod live;
mod measure;
mod pages;
mod row;

use crate::options::{Extent, positive};
use crate::process::Failure;
use crate::{options, record};
use clap::{Parser, ValueEnum};
use row::show;
use serde_json::Value;
use std::process::ExitCode;
use std::time::Duration;

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Index,
    Density,
    Latency,
    Live,
    Half,
}

/// The cold tier beside zswap and a red-black tree.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench zswap",
    after_help = "Examples:\n  pagefold bench zswap --quick\n  pagefold bench zswap --part density --guests 4"
)]
struct Args {
    /// Parts to run; all without it.
    #[arg(long, value_delimiter = ',')]
    part: Vec<Part>,
    /// Rounds; medians and spread are of these.
    #[arg(long, value_parser = positive())]
    rounds: Option<usize>,
    /// Guests to boot for the density of guests; 0 leaves them out.
    #[arg(long)]
    guests: Option<usize>,
    #[command(flatten)]
    extent: Extent,
    /// The client of the live part (used by the driver).
    #[arg(long, hide = true, num_args = 2)]
    client: Vec<String>,
}

impl Args {
    fn wants(&self, part: Part) -> bool {
        self.part.is_empty() || self.part.contains(&part)
    }

    fn rounds(&self) -> usize {
        self.extent.rounds(self.rounds)
    }
}

/// Runs the benchmark with the arguments after its name.
pub fn run(args: &[String]) -> ExitCode {
    options::run("zswap", args, |args: Args| match &args.client[..] {
        [] => {
            measure(&args);
            Ok(())
        }
        client => live::client(client),
    })
}

fn measure(args: &Args) {
    record::emit(Vec::new());
    record::emit_versions(serde_json::json!({ "zswap": kernel::Zswap::compressor() }));
    if args.wants(Part::Index) {
        show_or_skip("indexes", index::measure(args.rounds()));
    }
    if [Part::Density, Part::Latency, Part::Live].into_iter().any(|part| args.wants(part)) {
        match pages::unrelated(if args.extent.quick { 24 << 20 } else { 256 << 20 }) {
            Ok(pages) => on_unrelated(args, &pages),
            Err(error) => eprintln!("SKIPPED: live pages of unrelated programs: {error}"),
        }
    }
    if args.wants(Part::Half) {
        let (mib, requests) = if args.extent.quick { (32, 10_000) } else { (256, 200_000) };
        show_or_skip("redis with half its memory", half::redis(mib, requests, args.rounds().min(3)));
    }
    let guests = args.guests.unwrap_or(if args.extent.quick { 0 } else { 4 });
    if (args.wants(Part::Density) || args.wants(Part::Live)) && guests > 0 {
        match pages::guests(guests) {
            Ok(pages) => on_guests(args, &format!("{guests} guests of one distribution"), &pages),
            Err(error) => eprintln!("SKIPPED: guests: {error}"),
        }
    }
}

fn show_or_skip(what: &str, rows: Result<Vec<Value>, Failure>) {
    match rows {
        Ok(rows) => show(&rows),
        Err(error) => eprintln!("SKIPPED: {what}: {error}"),
    }
}

/// Density, live client and latency with pages of programs that have nothing in common.
fn on_unrelated(args: &Args, pages: &[u8]) {
    let on = "python heap and redis";
    if args.wants(Part::Density) {
        show(&density::measure(on, pages));
    }
    for _ in (0..args.rounds().min(3)).filter(|_| args.wants(Part::Live)) {
        let idle = Duration::from_secs(if args.extent.quick { 2 } else { 10 });
        show_or_skip("a live client", live::measure(on, pages, idle));
    }
    if args.wants(Part::Latency) {
        show(&latency::measure(pages, if args.extent.quick { 2000 } else { 20_000 }));
    }
}

/// Live client and density with pages of guests.
fn on_guests(args: &Args, on: &str, pages: &[u8]) {
    if args.wants(Part::Live) {
        show_or_skip("live guests", live::measure(on, pages, Duration::from_secs(10)));
    }
    if args.wants(Part::Density) {
        show(&density::measure(on, pages));
    }
}
