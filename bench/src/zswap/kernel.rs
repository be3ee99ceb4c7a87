//! The kernel's backend: zswap over a swap file, made for the run, undone when dropped.

use crate::restore::{SwapFile, Undo};
use std::fs;
use std::io;

const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// zswap over a swap file. Swap goes off before the switches go back.
pub struct Zswap {
    _swap: SwapFile,
    _switches: [Undo; 3],
}

impl Zswap {
    /// Switches zswap on over a swap file of `bytes`.
    ///
    /// Refuses if there is swap already: its pages would count as ours.
    pub fn start(bytes: u64) -> io::Result<Zswap> {
        if fs::read_to_string("/proc/swaps")?.lines().count() > 1 {
            return Err(io::Error::other("there is swap already"));
        }
        let switches = [
            Undo::set(PAGE_CLUSTER, "0")?,
            Undo::set("/sys/module/zswap/parameters/max_pool_percent", "50")?,
            Undo::set("/sys/module/zswap/parameters/enabled", "Y")?,
        ];
        let file = std::env::temp_dir().join(format!("pagefold-bench-swap-{}", std::process::id()));
        Ok(Zswap { _swap: SwapFile::new(file, bytes)?, _switches: switches })
    }

    /// The compressor in use.
    pub fn compressor() -> String {
        fs::read_to_string("/sys/module/zswap/parameters/compressor").unwrap_or_default().trim().to_owned()
    }

    /// Sets how many pages a fault swaps in, as a power of two.
    pub fn page_cluster(power: u32) -> io::Result<()> {
        fs::write(PAGE_CLUSTER, power.to_string())
    }

    /// Bytes of zswap's pool, and bytes of the pages in it.
    pub fn bytes() -> (f64, f64) {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse::<f64>().ok()).unwrap_or(f64::NAN) * 1024.0
        };
        (field("Zswap:"), field("Zswapped:"))
    }

    /// Pages faulted in from zswap's pool since the machine started.
    pub fn pages_in() -> f64 {
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("zswpin ")?.parse().ok());
        count.unwrap_or(f64::NAN)
    }
}
