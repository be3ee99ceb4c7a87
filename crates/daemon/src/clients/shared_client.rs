//! What the rest of the daemon reads of a client while a worker holds its link.

use crate::clients::agent_time::note_cpu_ns;
use crate::clients::attached::Attached;
use crate::clients::leftover::State;
use crate::clients::look::Look;
use crate::waits::PastCounts;
use pagefold_protocol::channel::{AgentCounters, Channel};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What the daemon reads of a client while a worker holds it.
#[derive(Debug)]
pub struct SharedClient {
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Command name.
    pub name: String,
    /// All its large private memory is managed, not only what it marks.
    pub manages_all: bool,
    /// It ran before it became a client.
    pub(crate) attached: Option<Arc<Attached>>,
    pub(crate) past_counts: Mutex<PastCounts>,
    /// What /proc told of its memory.
    pub(crate) look: Mutex<Look>,
    /// What became of its leftover.
    pub(crate) leftover: Mutex<State>,
    pub(super) channel: Channel,
    /// The most that was known of its agent's processor time.
    cpu_ns: AtomicU64,
}

impl SharedClient {
    /// The process `pid` of user `uid`; its agent shares `channel`. Nothing was looked at yet.
    pub(super) fn new(
        (pid, uid): (i32, u32),
        name: String,
        manages_all: bool,
        attached: Option<Arc<Attached>>,
        channel: Channel,
    ) -> SharedClient {
        SharedClient {
            pid,
            uid,
            name,
            manages_all,
            attached,
            past_counts: Mutex::default(),
            look: Mutex::default(),
            leftover: Mutex::default(),
            channel,
            cpu_ns: AtomicU64::new(0),
        }
    }

    /// Of a process that has no link.
    #[cfg(test)]
    pub(crate) fn of(pid: i32) -> SharedClient {
        let channel = Channel::create(c"channel").expect("memory");
        SharedClient::new((pid, 0), "test".into(), true, None, channel)
    }

    /// Processor time of the agent.
    pub fn cpu_ns(&self) -> u64 {
        note_cpu_ns(&self.cpu_ns, self.pid, self.counters().cpu_ns.load(Ordering::Relaxed))
    }

    /// The agent's counters, as it keeps them; a hostile agent may keep nonsense.
    pub fn counters(&self) -> &AgentCounters {
        self.channel.counters()
    }
}
