//! The thread of a group that looks which clients are idle, and parks them part by part.
//!
//! A parking is spread over the time that the policy gives it, and between two parts the thread looks whether the client
//! works again: then the rest stays. The link to the agent is held for one part only.

use super::policy::{self, Decision, ParkPolicy, Sample};
use super::signals;
use crate::cold::client::Client;
use crate::cold::evict::batch::Run;
use crate::cold::evict::park;
use crate::cold::group::Group;
use pagefold_os::sched;
use pagefold_os::sync::lock;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A client that is being parked.
struct Job {
    client: Arc<Client>,
    /// What is still to be evicted.
    parts: VecDeque<Vec<Run>>,
    /// When it must be done.
    deadline: Duration,
    /// When it began, and what the client had done until then.
    began: (Duration, Sample),
}

/// What the thread knows.
pub(crate) struct Parker {
    policy: ParkPolicy,
    jobs: Vec<Job>,
    next_look: Duration,
}

impl Parker {
    pub(crate) fn new(policy: ParkPolicy) -> Parker {
        Parker { policy, jobs: Vec::new(), next_look: Duration::ZERO }
    }

    /// Looks at the clients if that is due, and does one part of the most urgent parking. Returns how long the thread may
    /// wait.
    pub(crate) fn turn(&mut self, group: &Group, now: Duration) -> Duration {
        if now >= self.next_look {
            self.next_look = now + self.policy.look_interval();
            self.look(group, now);
        }
        let until_look = self.next_look.saturating_sub(now);
        let urgent = self.jobs.iter().enumerate().min_by_key(|(_, job)| job.deadline).map(|(index, _)| index);
        let Some(urgent) = urgent else { return until_look };
        let is_over = self.advance(group, urgent, now);
        let took = monotonic().saturating_sub(now);
        let left = self.jobs[urgent].deadline.saturating_sub(now);
        if is_over {
            self.jobs.swap_remove(urgent);
        }
        // The parts of all parkings come before the first deadline, which is sooner than they must.
        let parts = self.jobs.iter().map(|job| job.parts.len()).sum();
        policy::pause(parts, left, took).min(until_look)
    }

    fn look(&mut self, group: &Group, now: Duration) {
        let clients: Vec<Arc<Client>> = lock(&group.clients).values().cloned().collect();
        let idle = self.policy.idle_time(signals::is_host_short(group.config.reserve_bytes));
        for client in clients {
            let Some(sample) = signals::sample(&client) else { continue };
            let decision = lock(&client.idleness).step(now, sample, idle, group.config.tick);
            match decision {
                // Also one that was parked by request.
                Decision::Nothing if sample.parked => client.wakings.sleep(nanoseconds(now)),
                Decision::Nothing => {}
                Decision::Woke => client.set_parked(false),
                Decision::Park => {
                    if !self.jobs.iter().any(|job| Arc::ptr_eq(&job.client, &client)) {
                        self.begin(group, client, now, sample);
                    }
                }
            }
        }
    }

    fn begin(&mut self, group: &Group, client: Arc<Client>, now: Duration, sample: Sample) {
        let Some(parts) = park::parts(group, &client) else {
            // The agent is not connected, or the daemon stops.
            return lock(&client.idleness).postpone(now);
        };
        self.jobs.push(Job { client, parts: parts.into(), deadline: now + self.policy.within, began: (now, sample) });
    }

    /// Evicts one part; returns true if the parking is over.
    fn advance(&mut self, group: &Group, index: usize, now: Duration) -> bool {
        let job = &mut self.jobs[index];
        let client = &job.client;
        if client.gone.load(Ordering::Acquire) {
            return true;
        }
        let (began, before) = &job.began;
        let goes_on = signals::sample(client).is_some_and(|sample| {
            let touched = sample.refaults > before.refaults;
            let elapsed = now.saturating_sub(*began).max(self.policy.look_interval());
            !touched && !sample.suspended && !sample.shows_work_since(before, elapsed, group.config.tick)
        });
        let part = job.parts.pop_front();
        if !goes_on || part.as_ref().is_some_and(|part| park::park_part(group, client, part).is_none()) {
            lock(&client.idleness).postpone(now);
            return true;
        }
        if job.parts.is_empty() {
            client.set_parked(true);
            client.wakings.sleep(nanoseconds(now));
            park::end_parts(group, client);
            if group.config.park_densely {
                group.densify();
            }
            return true;
        }
        false
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The time since the host started, without the time in which it slept.
pub(crate) fn monotonic() -> Duration {
    Duration::from_nanos(sched::monotonic_ns())
}
