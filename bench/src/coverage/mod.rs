//! Coverage: which kinds of program are merged, and how much of their equal memory, beside the kernel's KSM.
//!
//! Three instances of each kind hold the same bytes ([`kinds`]). Their memory, the sum of Pss of all processes, is measured
//! with nothing, with KSM at full speed, with `pagefold attach` once they hold the data, and under `pagefold run --manage
//! all`. Saved is the difference to the memory with nothing; what the engine takes for itself stands beside it. Each
//! instance compares every byte afterwards.

mod kinds;
mod way;

use crate::files::random_file;
use crate::options::{self, Extent, Only, positive};
use crate::process::{self, Failure};
use crate::record;
use crate::restore;
use crate::stats::Spread;
use clap::Parser;
use kinds::ProgramKind;
use pagefold_os::{ksm, procfs};
use serde_json::{Value, json};
use std::process::ExitCode;
use way::{Measured, Rest, Way};

/// Coverage: three instances of each kind of program, merged by us and by KSM.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench coverage",
    after_help = "Examples:\n  pagefold bench coverage --quick\n  pagefold bench coverage --only 'Java, Serial' --only Go"
)]
struct Args {
    #[command(flatten)]
    only: Only,
    /// Runs of each row; the median and the spread are shown. Without it one, with --full three.
    #[arg(long, value_name = "N", value_parser = positive())]
    rounds: Option<usize>,
    #[command(flatten)]
    extent: Extent,
}

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("coverage", args, |args| measure(&args))
}

impl Args {
    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.extent.full { 3 } else { 1 })
    }

    fn mib(&self) -> usize {
        if self.extent.quick { 32 } else { 64 }
    }

    fn wants(&self, kind: &ProgramKind) -> bool {
        self.only.wants(&kind.name).unwrap_or(kind.is_quick || !self.extent.quick)
    }
}

/// The ways that this machine and this user can measure; the others are named.
fn ways() -> Vec<Way> {
    let able = |way: Way| -> Result<(), String> {
        match way {
            Way::Nothing | Way::Run => Ok(()),
            _ if !process::is_root() => Err("it needs root".into()),
            Way::Ksm => ksm::unused().map_err(|error| error.to_string()),
            Way::Attach if !cfg!(target_arch = "x86_64") => Err("programs are entered on x86-64 only".into()),
            Way::Attach => Ok(()),
        }
    };
    let skipped = |way: &Way| able(*way).inspect_err(|why| eprintln!("SKIPPED: {}: {why}", way.name())).is_ok();
    Way::ALL.into_iter().filter(skipped).collect()
}

/// All rounds of a kind, and the row of the table that they make.
struct Row<'a> {
    kind: &'a ProgramKind,
    rounds: Vec<Vec<Measured>>,
}

impl Row<'_> {
    fn spread(&self, of: impl Fn(&[Measured]) -> Option<f64>) -> Option<Spread> {
        let values: Vec<f64> = self.rounds.iter().filter_map(|round| of(round)).collect();
        (!values.is_empty()).then(|| Spread::of(values))
    }

    fn json(&self, args: &Args) -> Value {
        let by = |way: Way| move |round: &[Measured]| saved_mib(round, way);
        let against_ksm = |way: Way| self.spread(move |round| ratio(saved_mib(round, way), saved_mib(round, Way::Ksm)));
        let own = |way: Way| self.spread(move |round| Some(of(round, way)?.own_mib));
        let mut notes: Vec<&str> = self.measures().flat_map(|measured| &measured.notes).map(String::as_str).collect();
        notes.sort_unstable();
        notes.dedup();
        json!({
            "kind": self.kind.name, "mib_each": args.mib(),
            "before_mib": self.spread(|round| Some(nothing(round)?.pss_mib)),
            "found_mib": self.spread(|round| nothing(round)?.left_mib),
            "attach_left_mib": self.spread(|round| of(round, Way::Attach)?.left_mib),
            "run_left_mib": self.spread(|round| of(round, Way::Run)?.left_mib),
            "ksm_saved_mib": self.spread(by(Way::Ksm)),
            "attach_saved_mib": self.spread(by(Way::Attach)),
            "run_saved_mib": self.spread(by(Way::Run)),
            "ksm_own_mib": own(Way::Ksm),
            "attach_own_mib": own(Way::Attach),
            "run_own_mib": own(Way::Run),
            "attach_against_ksm": against_ksm(Way::Attach),
            "run_against_ksm": against_ksm(Way::Run),
            "right": self.measures().all(|measured| measured.is_right),
            "notes": notes,
        })
    }

    fn measures(&self) -> impl Iterator<Item = &Measured> {
        self.rounds.iter().flatten()
    }
}

fn of(round: &[Measured], way: Way) -> Option<&Measured> {
    round.iter().find(|measured| measured.way == way)
}

fn nothing(round: &[Measured]) -> Option<&Measured> {
    of(round, Way::Nothing)
}

/// A part of a whole that is no rounding error.
fn ratio(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    Some(part? / whole.filter(|whole| *whole >= 1.0)?)
}

/// Memory that is in use with nothing, less what is in use with this.
fn saved_mib(round: &[Measured], way: Way) -> Option<f64> {
    Some(nothing(round)?.pss_mib - of(round, way)?.pss_mib)
}

fn measure(args: &Args) -> Result<(), Failure> {
    process::tool()?;
    let (dir, _removed) = restore::folder("coverage")?;
    kinds::unpack(&dir)?;
    let data = dir.join("data");
    random_file(&data, args.mib(), 0x9E37_79B9_7F4A_7C15)?;
    let ways = ways();
    let rest = Rest::new(args.extent.quick);
    record::emit_versions(json!({ "max_map_count": procfs::mappings_max() }));
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    for kind in kinds::all().iter().filter(|kind| args.wants(kind)) {
        let words = match kind.prepare(&dir) {
            Ok(words) => words,
            Err(why) => {
                eprintln!("SKIPPED: {}: {why}", kind.name);
                continue;
            }
        };
        eprintln!("{}", kind.name);
        let mut row = Row { kind, rounds: Vec::new() };
        for _ in 0..args.rounds() {
            let measure = |way: &Way| way.measure(&words, &data, &dir, rest);
            row.rounds.push(
                ways.iter()
                    .map(measure)
                    .collect::<Result<_, _>>()
                    .map_err(|error| format!("{}: {error}", kind.name))?,
            );
        }
        for measured in row.measures() {
            measured.notes.iter().for_each(|note| eprintln!("  {note}"));
            if !measured.is_right {
                wrong.push(format!("{} {}", kind.name, measured.way.name()));
            }
        }
        // A run of half an hour may be broken off: what it has measured so far is told.
        let saved = |way: &Way| Some(format!("{} {:.0}", way.name(), saved_mib(row.rounds.last()?, *way)?));
        eprintln!("  saved MiB: {}", ways.iter().filter_map(saved).collect::<Vec<_>>().join(", "));
        rows.push(row.json(args));
    }
    record::table(
        "coverage: memory of three instances with equal data, and what is saved of it (MiB)",
        "kind|before=before_mib:0|found=found_mib:0|KSM=ksm_saved_mib:0|attach=attach_saved_mib:0|run=run_saved_mib:0|\
         attach/KSM=attach_against_ksm:2|run/KSM=run_against_ksm:2|run left=run_left_mib:0|KSM's own=ksm_own_mib:1|\
         attach's own=attach_own_mib:1|right",
        rows,
    );
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(format!("a program does not hold its data any more: {}", wrong.join(", ")).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(way: Way, pss_mib: f64, left_mib: Option<f64>) -> Measured {
        Measured { way, pss_mib, own_mib: 3.0, left_mib, is_right: true, notes: vec!["a note".into()] }
    }

    #[test]
    fn a_row_relates_what_is_saved_to_the_peer() {
        let args = Args::parse_from(["coverage"]);
        let round = |attach| {
            vec![
                measured(Way::Nothing, 200.0, Some(125.0)),
                measured(Way::Ksm, 100.0, None),
                measured(Way::Attach, attach, None),
                measured(Way::Run, 100.0, Some(2.0)),
            ]
        };
        let mut row = Row { kind: &kinds::all()[0], rounds: vec![round(80.0), round(75.0), round(90.0)] };
        let json = row.json(&args);
        let median = |field: &str| json[field]["median"].as_f64();
        assert_eq!((median("before_mib"), median("found_mib")), (Some(200.0), Some(125.0)));
        assert_eq!((median("attach_left_mib"), median("run_left_mib")), (None, Some(2.0)));
        assert_eq!((median("ksm_saved_mib"), median("attach_saved_mib")), (Some(100.0), Some(120.0)));
        assert_eq!((median("attach_against_ksm"), median("run_against_ksm")), (Some(1.2), Some(1.0)));
        assert_eq!((&json["right"], &json["notes"]), (&json!(true), &json!(["a note"])));
        row.rounds[1][2].is_right = false;
        assert_eq!(row.json(&args)["right"], json!(false), "one wrong byte in any round");
    }
}
