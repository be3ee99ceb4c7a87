//! When the agent lists the mappings of an attached program anew: it sees none of the program's calls.
//!
//! A list walks the page tables of the whole program. Memory that is new to it costs the program faults, so a program
//! without faults and discards has little to list: locks, keys and advice on old memory. These are looked for seldom, and
//! once more before anything is merged or evicted.

use pagefold_os::sched;

/// Shortest pause between two lists: of a program that changes, and of one at rest.
const PAUSE_NS: u64 = 5_000_000_000;
const PAUSE_AT_REST_NS: u64 = 60_000_000_000;
/// The pause is that many times as long as the processor time of the list before.
const FACTOR: u64 = 200;
const FACTOR_AT_REST: u64 = 5000;

/// What is known of the last list.
#[derive(Debug, Default)]
pub(crate) struct ListClock {
    listed_ns: u64,
    /// When a list was last due, or made.
    due_ns: u64,
    /// Processor time that the list took.
    cost_ns: u64,
    /// Faults of the program's threads until it was due.
    faults: u64,
    /// The program discarded or moved memory since then.
    has_events: bool,
}

impl ListClock {
    /// The program discarded or moved memory.
    pub(crate) fn note_event(&mut self) {
        self.has_events = true;
    }

    /// True, once, when the mappings are to be listed.
    pub(crate) fn is_due(&mut self) -> bool {
        self.is_due_at(sched::monotonic_ns(), sched::faults_of_others())
    }

    fn is_due_at(&mut self, now_ns: u64, faults: u64) -> bool {
        let (least, factor) = match self.has_events || faults != self.faults {
            true => (PAUSE_NS, FACTOR),
            false => (PAUSE_AT_REST_NS, FACTOR_AT_REST),
        };
        let is_due = now_ns - self.due_ns > least.max(self.cost_ns.saturating_mul(factor));
        if is_due {
            *self = ListClock { due_ns: now_ns, faults, has_events: false, ..*self };
        }
        is_due
    }

    /// Lists by `list`, and notes what that costs.
    pub(crate) fn measure<T>(&mut self, list: impl FnOnce() -> T) -> T {
        // Before the list: what comes meanwhile may not be in it.
        let (now_ns, faults) = (sched::monotonic_ns(), sched::faults_of_others());
        let began_ns = sched::thread_cpu_ns();
        let listed = list();
        let cost_ns = sched::thread_cpu_ns() - began_ns;
        *self = ListClock { listed_ns: now_ns, due_ns: now_ns, cost_ns, faults, has_events: false };
        listed
    }

    /// True if the last list is too old to merge or evict by it.
    pub(crate) fn is_old(&self) -> bool {
        sched::monotonic_ns() - self.listed_ns > PAUSE_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_program_at_rest_is_listed_seldom() {
        let mut clock = ListClock { cost_ns: SECOND / 100, faults: 7, ..ListClock::default() };
        assert!(!clock.is_due_at(6 * SECOND, 7) && !clock.is_due_at(60 * SECOND, 7));
        assert!(clock.is_due_at(61 * SECOND, 7) && !clock.is_due_at(67 * SECOND, 7));
        // Faults, and events without faults.
        assert!(clock.is_due_at(67 * SECOND, 8) && !clock.is_due_at(73 * SECOND, 8));
        clock.note_event();
        assert!(!clock.is_due_at(68 * SECOND, 8));
        assert!(clock.is_due_at(73 * SECOND, 8) && !clock.is_due_at(79 * SECOND, 8));
    }

    #[test]
    fn a_list_that_takes_long_is_made_seldom() {
        let mut clock = ListClock { cost_ns: SECOND, faults: 7, has_events: true, ..ListClock::default() };
        assert!(!clock.is_due_at(199 * SECOND, 8) && clock.is_due_at(201 * SECOND, 8));
    }

    #[test]
    fn what_a_list_costs_is_measured() {
        let mut clock = ListClock::default();
        assert!(clock.is_old());
        let sum = clock.measure(|| (0..1_000_000u64).map(std::hint::black_box).sum::<u64>());
        assert!(sum > 0 && clock.cost_ns > 0 && !clock.is_old());
    }
}
