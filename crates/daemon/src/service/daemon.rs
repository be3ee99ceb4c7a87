//! The daemon's state: what all its threads share. The service's other modules act on it by functions of their own.

use crate::clients::domains::LiveClients;
use crate::clients::forked_children::ForkedChildren;
use crate::clients::looks::Looks;
use crate::clients::refusals::Refusals;
use crate::cold::tiers::Tiers;
use crate::config::Config;
use crate::history::History;
use pagefold_os::fd::Fd;
use pagefold_os::uffd;
use pagefold_os::wait::Bell;
use std::collections::BTreeSet;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// Appends the metrics of other parts, as OpenMetrics families.
pub type MoreMetrics = fn(&mut String);
/// Adds the status of other parts to the page's status.
pub type MoreStatus = fn(&mut serde_json::Map<String, serde_json::Value>);

/// The daemon's state.
pub struct Daemon {
    pub(crate) config: Config,
    pub(crate) live: Arc<LiveClients>,
    pub(crate) cold: Tiers,
    /// What attached programs fork.
    pub(crate) forked_children: Arc<ForkedChildren>,
    /// Programs that an operator detached, by number and start time: no rule attaches them again.
    pub(crate) detached: Mutex<BTreeSet<(i32, u64)>>,
    pub(crate) refusals: Refusals,
    pub(crate) looks: Looks,
    /// `/dev/userfaultfd`, which clients without the privilege to open it are handed.
    pub(crate) userfault_device: Option<Fd>,
    /// The code of the agent that attached programs share, once there is one; `None` if the kernel gives no file for it.
    pub(crate) agent_code: OnceLock<Option<Fd>>,
    pub(crate) started: Instant,
    stopping: AtomicBool,
    /// Wakes the listener when the daemon stops.
    pub(crate) stopped: Bell,
    /// The locked file beside the socket, from when the daemon listens until its process ends.
    pub(crate) socket_lock: Mutex<Option<File>>,
    /// Connections that are being answered.
    pub(crate) connections: AtomicU64,
    pub(crate) last_busy: Mutex<Instant>,
    pub(crate) more_metrics: OnceLock<MoreMetrics>,
    pub(crate) more_status: OnceLock<MoreStatus>,
    pub(crate) history: Mutex<History>,
    /// The page takes samples, more often than the daemon would.
    pub(crate) page_samples: AtomicBool,
    /// Progress of `verify`: pages compared, and of how many.
    pub(crate) verified: [AtomicU64; 2],
}

impl Daemon {
    /// Makes a daemon with no domain yet.
    pub fn new(config: Config) -> Arc<Daemon> {
        Arc::new(Daemon {
            live: LiveClients::new(config.clone()),
            cold: Tiers::new(config.cold.clone(), &config.socket),
            forked_children: ForkedChildren::new(config.socket.clone()),
            config,
            detached: Mutex::default(),
            refusals: Refusals::default(),
            looks: Looks::default(),
            userfault_device: uffd::open_device().ok(),
            agent_code: OnceLock::new(),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
            stopped: Bell::new().expect("the first descriptors are there"),
            socket_lock: Mutex::default(),
            connections: AtomicU64::new(0),
            last_busy: Mutex::new(Instant::now()),
            more_metrics: OnceLock::new(),
            more_status: OnceLock::new(),
            history: Mutex::default(),
            page_samples: AtomicBool::new(false),
            verified: Default::default(),
        })
    }

    /// Lets `more` append the metrics of parts that the daemon does not know. The first call counts.
    pub fn add_metrics(&self, more: MoreMetrics) {
        let _ = self.more_metrics.set(more);
    }

    /// Lets `more` add to the page's status what the daemon does not know. The first call counts.
    pub fn add_status(&self, more: MoreStatus) {
        let _ = self.more_status.set(more);
    }

    /// Asks the daemon to stop; [`run`](crate::run) returns soon after. Clients keep their merged pages.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.stopped.ring();
        self.live.stop();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A daemon that does not listen.
    pub(crate) fn daemon() -> Arc<Daemon> {
        Daemon::new(Config { pool_max_bytes: 64 << 20, ..Config::default() })
    }
}
