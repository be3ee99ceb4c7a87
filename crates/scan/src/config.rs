//! What a scan can be told.

use std::time::Duration;

/// Settings of a scan.
#[derive(Clone, Debug)]
pub struct Config {
    /// Threads that read and analyse, at least 1.
    pub workers: usize,
    /// Remember one page content in this many; 1 is all. Counts are scaled up.
    pub one_in: u32,
    /// Mappings that a merge may cost each source; longest runs come first.
    pub map_budget: u64,
    /// The shortest run, in pages, that is worth its mappings when so many of so many (used, budget) are taken: never fewer
    /// the more are. By default all are until the budget is used up.
    pub shortest_run: fn(u64, u64) -> u64,
    /// How long one read may take before its source is given up. A process can hang the reader of a page
    /// that is under its own userfaultfd.
    pub patience: Duration,
    /// Key of the page hash: with a secret key no process can prepare pages that only look equal.
    pub seed: u64,
}

impl Config {
    /// Mappings that the kernel allows a process by default (`vm.max_map_count`).
    pub const MAX_MAP_COUNT_DEFAULT: u64 = 65_530;
}

impl Default for Config {
    fn default() -> Config {
        Config {
            workers: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            one_in: 1,
            map_budget: Config::MAX_MAP_COUNT_DEFAULT / 4,
            shortest_run: |used, budget| if used < budget { 1 } else { u64::MAX },
            patience: Duration::from_secs(10),
            seed: random(),
        }
    }
}

/// A secret number: the standard library keys its hash maps from the system's randomness.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
