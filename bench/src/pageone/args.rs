//! Options, and the sizes that follow from them.

use super::engine::MergingEngine;
use super::workload::{PageLayout, Shape};
use crate::options::{Extent, positive};
use crate::process::Failure;
use clap::{Parser, ValueEnum};
use pagefold_os::procfs;

/// A part of the benchmark, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Time and memory per merged page.
    Merge,
    /// The first write to shared pages.
    Breaks,
    /// From duplicates to one copy.
    Delay,
    /// A pass with nothing to do.
    Idle,
    /// First looks at memory of which none, a tenth or half is equal.
    First,
    /// Shared pages that are written again and again.
    Churn,
    /// QEMU guests.
    Guests,
}

/// Live memory: merging against the kernel's KSM.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench pageone",
    after_help = "Examples:\n  pagefold bench pageone --quick\n  pagefold bench pageone --only merge --layout files --full --rounds 3"
)]
pub struct Args {
    /// This part only; without it all but guests (with --full: all).
    #[arg(long, value_enum)]
    pub only: Option<Part>,
    /// merge: files, zero, scattered or huge only.
    #[arg(long, value_enum)]
    pub layout: Option<PageLayout>,
    /// Runs of each row (guests: at most 3); the median and the spread are shown.
    #[arg(long, value_name = "N", value_parser = positive())]
    rounds: Option<usize>,
    /// The peer cannot be measured here.
    #[arg(skip)]
    pub no_ksm: bool,
    #[command(flatten)]
    pub extent: Extent,
    /// A process of the workload (used by the driver).
    #[arg(long, hide = true, num_args = 4..=5)]
    pub client: Vec<String>,
}

impl Args {
    /// Runs of each row.
    pub fn rounds(&self) -> usize {
        self.extent.rounds(self.rounds)
    }

    /// Whether a part is to be measured.
    pub fn wants(&self, part: Part) -> bool {
        self.only.map_or(part != Part::Guests || self.extent.full, |only| only == part)
    }

    /// The workload of the merge part.
    pub fn shape(&self, layout: PageLayout) -> Result<Shape, Failure> {
        let (processes, mib) = match (self.extent.quick, self.extent.full) {
            (true, _) => (3, 40),
            // Processes of the published test, a thirty-second of their size.
            (_, true) => (12, 512),
            _ => (8, 160),
        };
        let shape = Shape { layout, processes, mib, equal_percent: 100 };
        let (available, _) = procfs::available_and_total();
        if shape.pages() * 4096 > available / 10 * 9 {
            let available = available >> 20;
            return Err(format!("{processes} processes of {mib} MiB do not fit into {available} MiB").into());
        }
        Ok(shape)
    }

    /// The engines that are compared where one of each is enough, the peer first.
    pub fn pair(&self) -> Vec<MergingEngine> {
        let ours = MergingEngine::Ours { workers: 1, predict: true };
        if self.no_ksm { vec![ours] } else { vec![MergingEngine::Ksm, ours] }
    }
}
