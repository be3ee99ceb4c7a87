//! How a daemon works.

use crate::program_filter::ProgramFilter;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Programs that are attached as they appear, and as the daemon starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachRule {
    /// Which programs.
    pub programs: ProgramFilter,
    /// Name of their domain.
    pub domain: String,
    /// Their idle memory is evicted to the cold tier instead of being merged.
    pub cold: bool,
}

/// What merges the memory that the budget of mappings keeps private.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leftover {
    /// The kernel's KSM, where it runs, for clients of domains without a name.
    #[default]
    Ksm,
    /// No system: it stays private.
    Private,
}

/// What merges the pages of an attached program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// The agent; where none can live, the kernel's KSM, if that runs and the domain has no name.
    #[default]
    Auto,
    /// The agent.
    Agent,
    /// The kernel's KSM.
    Ksm,
}

/// How a daemon works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it listens.
    pub socket: PathBuf,
    /// Worker threads per domain.
    pub workers: usize,
    /// One pass of the watch stage.
    pub period: Duration,
    /// Largest size of each domain's pool, in bytes.
    pub pool_max_bytes: u64,
    /// Memory of the host that pools leave available when they grow, in bytes; 0 for none.
    pub reserve_bytes: u64,
    /// Mappings that merging may add to one client.
    pub vma_budget: u64,
    /// What becomes of memory that this budget keeps private.
    pub leftover: Leftover,
    /// Workers run only on processors that no other thread wants.
    pub idle_priority: bool,
    /// Exit when there was neither client nor request for this long.
    pub idle_exit: Option<Duration>,
    /// Started on behalf of a program: an address for metrics or the page that is taken is not an error.
    pub on_demand: bool,
    /// How systemctl names the service that this daemon is, which systemd would start again.
    pub service: Option<String>,
    /// Serve metrics here: `HOST:PORT` on loopback, or `unix:PATH`.
    pub metrics: Option<String>,
    /// Serve the page here, in the same way.
    pub web: Option<String>,
    /// The agent for programs that run already, a file in the ELF format.
    pub attached_agent: &'static [u8],
    /// Programs to attach; the first rule that a program satisfies counts.
    pub attach: Vec<AttachRule>,
    /// Predict slots from neighbours.
    pub predict: bool,
    /// How the cold tier works.
    pub cold: crate::cold::config::Config,
}

/// One worker at ordinary priority and a period of 2 s, a pool of 1 GiB, slots predicted; everything else is off. The
/// socket has no default.
impl Default for Config {
    fn default() -> Config {
        Config {
            socket: PathBuf::new(),
            workers: 1,
            period: Duration::from_secs(2),
            pool_max_bytes: 1 << 30,
            reserve_bytes: 0,
            vma_budget: 1 << 14,
            leftover: Leftover::Ksm,
            idle_priority: false,
            idle_exit: None,
            on_demand: false,
            service: None,
            metrics: None,
            web: None,
            attached_agent: &[],
            attach: Vec::new(),
            predict: true,
            cold: crate::cold::config::Config::default(),
        }
    }
}
