//! The processor on which the agent's thread runs: that of the daemon's worker while it sends requests, if the program
//! allows it.
//!
//! Worker and agent take turns, so they can share a processor. The agent returns to its own set when the connection ends:
//! threads that it starts inherit the set, and so would its next connection.

use crate::state::MAY_FOLLOW;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pagefold_os::sched::Cpus;

/// Our thread chooses its processor at this moment.
static CHOOSES: AtomicBool = AtomicBool::new(false);

/// Where our thread may run, while it follows: to be read where it does not choose.
static HOME: [AtomicU64; Cpus::WORDS] = [const { AtomicU64::new(0) }; Cpus::WORDS];

/// The place of the agent's thread.
#[derive(Debug)]
pub(crate) struct Affinity {
    /// Where it may run.
    home: Cpus,
    /// Where it was called to, out of these.
    at: Option<u64>,
}

impl Affinity {
    /// The set of the calling thread, which follows no worker yet.
    pub(crate) fn current() -> Affinity {
        Affinity { home: Cpus::of_thread().unwrap_or(Cpus::NONE), at: None }
    }

    /// Has the calling thread run on `cpu`, if it may.
    pub(crate) fn follow(&mut self, cpu: u64) {
        if self.at == Some(cpu) {
            return;
        }
        if !self.is_ours() {
            // A set that something else chose meanwhile is respected.
            *self = Affinity::current();
        }
        if let Some(one) = Cpus::one(cpu).filter(|_| self.home.contains(cpu))
            && choose(&one, &self.home)
        {
            self.at = Some(cpu);
        }
    }

    /// Has the calling thread run wherever it may.
    pub(crate) fn leave(&mut self) {
        if self.at.is_some() && self.is_ours() && choose(&self.home, &Cpus::NONE) {
            self.at = None;
        }
    }

    /// True if the thread may run where we had it run.
    fn is_ours(&self) -> bool {
        let set = self.at.map_or(Some(self.home), Cpus::one);
        Cpus::of_thread().ok() == set
    }
}

/// Has the calling thread run in `cpus`, if the program's filters allow that; `home` is where it may run after that.
fn choose(cpus: &Cpus, home: &Cpus) -> bool {
    // In this order, as the other side has it: one of us sees the other.
    CHOOSES.store(true, Ordering::SeqCst);
    let chosen = MAY_FOLLOW.load(Ordering::SeqCst) && cpus.bind_thread().is_ok();
    if chosen {
        HOME.iter().zip(home.words()).for_each(|(to, word)| to.store(*word, Ordering::Relaxed));
    }
    CHOOSES.store(false, Ordering::SeqCst);
    chosen
}

/// The agent's thread, by the kernel's `thread` number, chooses its processor no more when this returns: a filter that is
/// about to come forbids it. It runs wherever it may from then on.
#[cfg(any(test, feature = "preload"))]
pub(crate) fn forbid(thread: i32) {
    let chose = MAY_FOLLOW.swap(false, Ordering::SeqCst);
    while CHOOSES.load(Ordering::SeqCst) {
        crate::runtime::thread::yield_now();
    }
    let home = Cpus::of_words(core::array::from_fn(|at| HOME[at].load(Ordering::Relaxed)));
    if chose && thread != 0 && home != Cpus::NONE {
        let _ = home.bind(thread);
    }
}

/// What an earlier thread of the agent's has left.
pub(crate) fn forget() {
    HOME.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    CHOOSES.store(false, Ordering::SeqCst);
}

#[cfg(all(test, not(feature = "preload")))]
mod tests {
    use super::*;

    /// The statics are one thread's.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    fn now() -> Cpus {
        Cpus::of_thread().expect("a set")
    }

    /// In a thread of its own, with two processors to choose from; nothing, said loudly, if there is one only.
    fn with_two(act: impl FnOnce(Cpus, [u64; 2]) + Send) {
        let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        forget();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let all = now();
                let mut cpus = all.iter();
                match (cpus.next(), cpus.next()) {
                    (Some(first), Some(second)) => act(all, [first, second]),
                    _ => eprintln!("SKIPPED: one processor only"),
                }
            });
        });
    }

    #[test]
    fn an_agent_that_stops_following_runs_on_its_own_set() {
        with_two(|all, [first, second]| {
            let mut seat = Affinity::current();
            for cpu in [first, second, second, first] {
                seat.follow(cpu);
                assert_eq!(Some(now()), Cpus::one(cpu));
            }
            seat.follow(1 << 40);
            assert_eq!(Some(now()), Cpus::one(first), "there is no such processor");
            seat.leave();
            assert_eq!(now(), all);
            // As the next connection finds it.
            let mut seat = Affinity::current();
            seat.follow(second);
            assert_eq!(Some(now()), Cpus::one(second));
        });
    }

    #[test]
    fn a_set_chosen_by_another_thread_stands() {
        with_two(|_, [first, second]| {
            let mut seat = Affinity::current();
            seat.follow(first);
            let there = Cpus::one(second).expect("a processor");
            there.bind_thread().expect("allowed");
            seat.follow(second);
            seat.follow(first);
            assert_eq!(now(), there, "it went where it may not run any more");
            seat.leave();
            assert_eq!(now(), there);
        });
    }

    #[test]
    fn an_agent_forbidden_to_choose_runs_on_its_own_set() {
        with_two(|all, [first, second]| {
            let mut seat = Affinity::current();
            seat.follow(first);
            let thread = pagefold_os::sched::thread();
            std::thread::scope(|scope| _ = scope.spawn(move || forbid(thread)));
            assert_eq!(now(), all);
            seat.follow(second);
            seat.leave();
            assert_eq!(now(), all);
            MAY_FOLLOW.store(true, Ordering::SeqCst);
        });
    }
}
