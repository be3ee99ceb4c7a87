//! The park policy for clients that are merged live. A quiet client lends its memory to the cold tier, and the tier's parker
//! parks it like any other. A client that works again for a while gets its memory back, and is merged again.

use crate::cold::idle::parker::monotonic;
use crate::cold::idle::policy::{Activity, Decision, Idleness, ParkPolicy, Sample};
use crate::cold::idle::signals;
use crate::cold::selector::ClientSelector;
use crate::service::daemon::Daemon;
use crate::service::park;
use pagefold_os::procfs;
use pagefold_os::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What the thread knows of the clients, by process.
#[derive(Default)]
struct Watch {
    /// Clients that have not lent their memory.
    live: BTreeMap<i32, Idleness>,
    /// Since when clients work that have lent their memory.
    working: BTreeMap<i32, Duration>,
}

/// Looks at the clients until the daemon stops.
pub(crate) fn follow_policy(daemon: &Daemon, policy: ParkPolicy) {
    let mut watch = Watch::default();
    while !daemon.is_stopping() {
        watch.look(daemon, policy);
        std::thread::sleep(policy.look_interval());
    }
}

impl Watch {
    fn look(&mut self, daemon: &Daemon, policy: ParkPolicy) {
        let now = monotonic();
        let lent = lent(daemon);
        self.working.retain(|pid, _| lent.get(pid) == Some(&Activity::Busy));
        for (pid, activity) in &lent {
            self.live.remove(pid);
            if *activity == Activity::Busy
                && now.saturating_sub(*self.working.entry(*pid).or_insert(now)) >= policy.work_time()
            {
                park::unpark(daemon, &ClientSelector::Pid(*pid));
            }
        }
        let idle = policy.idle_time(signals::is_host_short(daemon.config.reserve_bytes));
        let clients = daemon.live.clients_where(|pid| pid != 0 && !lent.contains_key(&pid));
        self.live.retain(|pid, _| clients.iter().any(|(own, ..)| own == pid));
        for (pid, domain, id) in clients {
            let Some(sample) = sample(daemon, pid) else { continue };
            let idleness = self.live.entry(pid).or_default();
            if idleness.step(now, sample, idle, daemon.config.period) != Decision::Park {
                continue;
            }
            match park::lend(daemon, pid, &domain, id) {
                Ok(()) => {
                    for (_, client) in daemon.cold.clients_of(&ClientSelector::Pid(pid)) {
                        *lock(&client.idleness) = idleness.as_begun();
                    }
                }
                Err(reason) => {
                    daemon.refusals.note(pid, reason);
                    idleness.postpone(now);
                }
            }
        }
    }
}

/// What the clients do that have lent their memory.
fn lent(daemon: &Daemon) -> BTreeMap<i32, Activity> {
    let clients = daemon.cold.clients_of(&ClientSelector::All).into_iter();
    let lent = clients.filter(|(_, client)| client.lent.load(Ordering::Relaxed));
    lent.map(|(_, client)| (client.pid, lock(&client.idleness).activity())).collect()
}

/// The sample of a client that has not lent its memory: the process takes a page fault for each page that it writes or
/// touches first. `None` if the process has ended.
fn sample(daemon: &Daemon, pid: i32) -> Option<Sample> {
    let cpu_ns = procfs::cpu_ns(pid)?;
    Some(Sample {
        cpu: Duration::from_nanos(cpu_ns.saturating_sub(daemon.live.agent_cpu_ns(pid))),
        touched_pages: procfs::faults(pid)?,
        suspended: signals::is_suspended(pid),
        ..Sample::default()
    })
}
