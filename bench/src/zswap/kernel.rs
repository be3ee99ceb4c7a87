//! The kernel's backend: zswap over a swap file, made for the run, undone when dropped.

use crate::process::vmstat;
use crate::restore::{SwapFile, Undo};
use pagefold_os::procfs;
use std::fs;
use std::io;

/// zswap over a swap file. Swap goes off before the switches go back.
pub struct Zswap {
    _swap: SwapFile,
    _switches: Vec<Undo>,
}

impl Zswap {
    /// Switches zswap on over a swap file of `bytes`.
    ///
    /// Refuses if there is swap already: its pages would count as ours.
    pub fn start(bytes: u64) -> io::Result<Zswap> {
        let switches = [
            Undo::set("/proc/sys/vm/page-cluster", "0")?,
            Undo::set("/sys/module/zswap/parameters/max_pool_percent", "50")?,
            Undo::set("/sys/module/zswap/parameters/enabled", "Y")?,
        ];
        Zswap::over_file(bytes, switches.into())
    }

    /// The swap file alone: zswap is off, and the kernel reads neighbours ahead as it does by default.
    pub fn swap_alone(bytes: u64) -> io::Result<Zswap> {
        let switches =
            vec![Undo::set("/proc/sys/vm/page-cluster", "3")?, Undo::set("/sys/module/zswap/parameters/enabled", "N")?];
        Zswap::over_file(bytes, switches)
    }

    fn over_file(bytes: u64, switches: Vec<Undo>) -> io::Result<Zswap> {
        if fs::read_to_string("/proc/swaps")?.lines().count() > 1 {
            return Err(io::Error::other("there is swap already"));
        }
        let file = std::env::temp_dir().join(format!("pagefold-bench-swap-{}", std::process::id()));
        Ok(Zswap { _swap: SwapFile::new(file, bytes)?, _switches: switches })
    }

    /// The compressor in use.
    pub fn compressor() -> String {
        fs::read_to_string("/sys/module/zswap/parameters/compressor").unwrap_or_default().trim().to_owned()
    }

    /// Bytes of zswap's pool, and bytes of the pages in it.
    pub fn bytes() -> (f64, f64) {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name| procfs::field(&text, name).map_or(f64::NAN, |kib| kib as f64 * 1024.0);
        (field("Zswap"), field("Zswapped"))
    }

    /// Pages faulted in from zswap's pool since the machine started.
    pub fn pages_in() -> f64 {
        vmstat("zswpin") as f64
    }
}
