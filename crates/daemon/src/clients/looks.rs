//! Looks at clients: what /proc tells of their memory, which a status shows as the last look found it.
//!
//! A look at memory that is not managed walks the page tables of a client. So a client is looked at only when a status is
//! asked for, and all such looks together take at most a hundredth of one processor.
//!
//! A client may keep its reader waiting for as long as it likes. So a thread of its own looks, and a status waits for it no
//! longer than [`PATIENCE`]; no other lock is held meanwhile, and a client in hand is left out by others.

use crate::clients::domains::LiveClients;
use crate::clients::look::Look;
use crate::clients::shared_client::SharedClient;
use crate::clients::unmanaged;
use crate::status::UnmanagedMemory;
use pagefold_merge::{ClientId, Domain, Managed};
use pagefold_os::sync::lock;
use pagefold_os::{ksm, patience, sched};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Shortest pause between two rounds of looks.
const PAUSE: Duration = Duration::from_secs(5);
/// Time that the looks for one status take before the other clients wait for a later one.
const ROUND: Duration = Duration::from_millis(200);
/// How long a status waits for looks.
const PATIENCE: Duration = Duration::from_secs(1);
/// The pause is that many times as long as the processor time of the looks before it.
const PAUSE_FACTOR: u64 = 100;

/// Looks at clients, no more often than they cost little.
#[derive(Clone, Default)]
pub(crate) struct Looks {
    /// No look at memory that was seen before this time.
    next: Arc<Mutex<Option<Instant>>>,
}

impl Looks {
    /// Looks at the clients, the longest unseen first; too early for that, at those that were never looked at. Waits no
    /// longer than a status may.
    pub(crate) fn look(&self, clients: &LiveClients) {
        if let Some(round) = self.round(clients) {
            patience::within(PATIENCE, move || round.run());
        }
    }

    /// The looks that are due, if any.
    fn round(&self, clients: &LiveClients) -> Option<Round> {
        let began = Instant::now();
        let mut next = lock(&self.next);
        let is_early = next.is_some_and(|next| began < next);
        let round = Round { began, is_early, all: clients.all(), looks: self.clone() };
        if !round.all.iter().any(|(shared, ..)| round.is_due(shared)) {
            return None;
        }
        if !is_early {
            *next = Some(began + PAUSE);
        }
        Some(round)
    }
}

/// Looks for one status.
struct Round {
    began: Instant,
    is_early: bool,
    all: Vec<(Arc<SharedClient>, Arc<Domain>, ClientId)>,
    looks: Looks,
}

impl Round {
    /// True if the memory of a client is looked at in this round: it has not been since the round began.
    fn walks(&self, look: &Look) -> bool {
        look.looked.is_none_or(|looked| !self.is_early && looked < self.began)
    }

    /// True if anything of a client is looked at.
    fn is_due(&self, shared: &SharedClient) -> bool {
        let look = lock(&shared.look);
        !look.is_in_hand && (self.walks(&look) || is_handed(shared))
    }

    fn run(mut self) {
        let began_cpu_ns = sched::thread_cpu_ns();
        self.all.sort_by_key(|(shared, ..)| lock(&shared.look).looked);
        for (shared, ..) in self.all.iter().filter(|(shared, ..)| is_handed(shared)) {
            if let Some(in_hand) = InHand::take(shared) {
                in_hand.look_at_ksm();
            }
        }
        for (shared, domain, id) in &self.all {
            if self.began.elapsed() >= ROUND {
                break;
            }
            let managed = domain.managed(*id).filter(|managed| managed.generation.is_some());
            if let Some(managed) = managed.filter(|_| self.walks(&lock(&shared.look)))
                && let Some(in_hand) = InHand::take(shared)
            {
                in_hand.look_at_unmanaged(&managed);
            }
        }
        if !self.is_early {
            let took_ns = sched::thread_cpu_ns() - began_cpu_ns;
            *lock(&self.looks.next) = Some(Instant::now() + PAUSE.max(Duration::from_nanos(took_ns * PAUSE_FACTOR)));
        }
    }
}

/// True if memory of a client was handed to KSM.
fn is_handed(shared: &SharedClient) -> bool {
    shared.counters().leftover_bytes.load(Ordering::Relaxed) > 0
}

/// A client that no other thread looks at.
struct InHand<'a>(&'a SharedClient);

impl InHand<'_> {
    fn take(shared: &SharedClient) -> Option<InHand<'_>> {
        let was_in_hand = std::mem::replace(&mut lock(&shared.look).is_in_hand, true);
        (!was_in_hand).then(|| InHand(shared))
    }

    fn look_at_ksm(&self) {
        let ksm = ksm::of_process(self.0.pid).unwrap_or_default();
        lock(&self.0.look).ksm = ksm;
    }

    /// Looks at its memory beside what is `managed`.
    fn look_at_unmanaged(&self, managed: &Managed) {
        let unmanaged = unmanaged::of_process(self.0, managed).unwrap_or_else(|error| {
            vec![UnmanagedMemory {
                reason: format!("unknown: the daemon cannot read its /proc/PID/smaps: {error}"),
                bytes: 0,
            }]
        });
        let mut look = lock(&self.0.look);
        (look.looked, look.unmanaged) = (Some(Instant::now()), unmanaged);
    }
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        lock(&self.0.look).is_in_hand = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::domains::tests::{clients, connected};

    #[test]
    fn a_client_in_hand_is_left_out() {
        let (clients, looks) = (clients(), Looks::default());
        assert!(looks.round(&clients).is_none(), "there is no client");
        clients.list(connected(std::process::id() as i32));
        let shared = clients.all()[0].0.clone();
        let in_hand = InHand::take(&shared).unwrap();
        assert!(InHand::take(&shared).is_none());
        assert!(looks.round(&clients).is_none(), "its reader waits");
        drop(in_hand);
        assert!(looks.round(&clients).is_some());
        clients.end();
    }

    #[test]
    fn memory_is_looked_at_again_after_a_pause_only() {
        let (clients, looks) = (clients(), Looks::default());
        clients.list(connected(std::process::id() as i32));
        let shared = clients.all()[0].0.clone();
        let first = looks.round(&clients).unwrap();
        InHand::take(&shared).unwrap().look_at_unmanaged(&Managed::default());
        assert!(!first.is_due(&shared), "another thread has looked meanwhile");
        assert!(looks.round(&clients).is_none(), "too early");
        shared.counters().leftover_bytes.store(4096, Ordering::Relaxed);
        assert!(looks.round(&clients).is_some_and(|round| !round.walks(&lock(&shared.look))), "for what KSM has alone");
        *lock(&looks.next) = None;
        assert!(looks.round(&clients).is_some_and(|round| round.walks(&lock(&shared.look))));
        clients.end();
    }
}
