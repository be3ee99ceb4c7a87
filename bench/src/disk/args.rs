//! Options and sizes.

use crate::options::Extent;
use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Warm reads.
    Reads,
    /// Memory of images that differ by an upgrade.
    Memory,
    /// Guests: pages saved beside KSM.
    Sharing,
    /// Guests: processor time.
    Overhead,
    /// Guests: reads through NBD.
    FrontEnds,
    /// Guests: copies of one file read with memory for one copy.
    MemoryForOne,
}

/// Disk images through the deduplicated cache, beside the kernel's page cache, plain FUSE and KSM.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench pagecache",
    after_help = "Examples:\n  pagefold bench pagecache reads --quick\n  pagefold bench pagecache sharing overhead"
)]
pub struct Args {
    /// Parts to measure; all if none is named.
    pub part: Vec<Part>,
    #[command(flatten)]
    pub extent: Extent,
    /// Images of bench/fetch-images.sh, which hold real packages; without it target/bench-images, if it is there.
    #[arg(long, value_name = "DIR")]
    pub inputs: Option<PathBuf>,
    /// Serves a directory by the plain peer (used by the driver).
    #[arg(long, hide = true, num_args = 2)]
    pub serve: Vec<PathBuf>,
}

/// How large the inputs are.
pub struct Size {
    /// Images that differ by an upgrade.
    pub images: usize,
    /// Their content.
    pub tree_mib: u64,
    /// The file of warm reads.
    pub file_mib: usize,
    /// Time for warm reads.
    pub round: Duration,
    /// For the guests.
    pub guests: GuestSize,
}

impl Size {
    pub fn of(args: &Args) -> Size {
        let guests = GuestSize {
            guests: 2,
            tree_mib: 60,
            rounds: 4,
            file_mib: 128,
            all_rows: true,
            ksm_alone: Duration::from_secs(60),
        };
        if args.extent.full {
            // Files of a gigabyte, as the paper has them. Four copies are more than the guests may have; with larger ones
            // the disk takes a quarter of an hour.
            let guests = GuestSize { file_mib: 512, ..guests };
            return Size { images: 6, tree_mib: 400, file_mib: 1024, round: Duration::from_secs(2), guests };
        }
        if args.extent.quick {
            let guests = GuestSize {
                guests: 2,
                tree_mib: 16,
                rounds: 1,
                file_mib: 32,
                all_rows: false,
                ksm_alone: Duration::from_secs(6),
            };
            return Size { images: 3, tree_mib: 40, file_mib: 64, round: Duration::from_millis(300), guests };
        }
        Size { images: 4, tree_mib: 150, file_mib: 256, round: Duration::from_secs(1), guests }
    }
}

/// How large the guests' inputs are.
pub struct GuestSize {
    /// Guests that share.
    pub guests: usize,
    /// How much of the kernel tree the images hold.
    pub tree_mib: u64,
    /// Rounds of the workload for comparing processor time.
    pub rounds: usize,
    /// The file that four guests read.
    pub file_mib: usize,
    /// Whether all rows are measured, those that take long and those that are like another one.
    pub all_rows: bool,
    /// How long KSM may go on alone.
    pub ksm_alone: Duration,
}

impl GuestSize {
    /// A cache with room for the whole content of two images.
    pub fn cache_mib(&self) -> usize {
        (self.tree_mib * 2 + 64) as usize
    }
}
