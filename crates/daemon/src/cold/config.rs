//! How the cold tier works.

use super::idle::policy::ParkPolicy;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// How the cold tier works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Limit of each domain's tier in bytes; its first client may name less.
    pub tier_max_bytes: u64,
    /// Directory for the files that tiers write back to; `None` for no writeback.
    pub directory: Option<PathBuf>,
    /// Bytes that such a file may have.
    pub file_max_bytes: u64,
    /// Contents that were not used for so long go to the file while there is memory, too; `None`: only when memory is full.
    pub file_after: Option<Duration>,
    /// Share of run time that may be lost to refaults, if the client names none.
    pub tolerance: f64,
    /// Unit of a page's age, and pause between two looks at a client.
    pub tick: Duration,
    /// No page goes out before it was silent for so long, unless memory is short.
    pub idle_min: Duration,
    /// Parks idle clients without a request; `None` for no such policy.
    pub park: Option<ParkPolicy>,
    /// While less of the host's memory is available, idle clients are parked sooner; 0 for no reserve.
    pub reserve_bytes: u64,
    /// Pages go out by themselves; else only by `park`, hints and shortage.
    pub automatic: bool,
    /// Near pages are kept as patches.
    pub patches: bool,
    /// What is parked is made dense at once; else some ticks later, as what goes out by itself.
    pub park_densely: bool,
    /// Program and arguments of the keeper, before its socket; `None` for no keeper.
    pub keeper: Option<Vec<OsString>>,
    /// What the keeper starts when we are killed while pages are out.
    pub successor: Vec<OsString>,
    /// On an orderly stop pages stay out, for a successor that is about to come.
    pub hand_over: bool,
    /// Processors are kept from sleeping while faults come thick.
    pub keep_awake: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            tier_max_bytes: 4 << 30,
            directory: None,
            file_max_bytes: 64 << 30,
            file_after: None,
            tolerance: 0.01,
            tick: Duration::from_secs(5),
            idle_min: Duration::from_secs(10),
            park: None,
            reserve_bytes: 0,
            automatic: true,
            patches: true,
            park_densely: true,
            keeper: None,
            successor: Vec::new(),
            hand_over: false,
            keep_awake: true,
        }
    }
}
