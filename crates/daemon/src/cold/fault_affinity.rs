//! Where a client's faults are served best.
//!
//! A fault is two switches between threads. Where processors rest, they are cheapest if the thread that serves stays on
//! one of its own and looks for more before it sleeps. Where none rests, each of the two would wait there for its turn
//! beside others, tens of microseconds and now and then milliseconds. On the processor of the faulting thread it
//! does not wait: that thread gives the processor up at this very moment, and gets it back right after.
//!
//! So the thread *follows* when the two of them were seen to wait for processors, and no longer when the other thread
//! moves on although it was followed: it is moved to a processor that rests.

use pagefold_os::sched::Cpus;
use pagefold_os::stat;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Pause between looks while the thread stays where it is, and while it follows.
const LOOKS_NS: [u64; 2] = [4_000_000, 1_000_000];
/// Faults since the last look without which there is nothing to see.
const FAULTS: u32 = 16;
/// Both threads together waited for processors longer than this per fault: none rests.
const WAITED_NS: u64 = 4_000;
/// So many looks in a row must say so: it may be a moment's.
const LOOKS_BEFORE: u32 = 2;
/// So many looks while it follows are one trial, in which the other thread may be found elsewhere so often: threads are
/// moved now and then. More often means that some processor rests.
const TRIAL: u32 = 8;
const MOVES_MAX: u32 = 2;
/// Most looks that are passed by before it follows again.
const PAUSE_MAX: u32 = 256;

/// What /proc tells about the thread that faulted last.
#[derive(Debug)]
struct FaultingThread {
    thread: i32,
    stat: File,
    schedstat: File,
}

/// What was seen at a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    /// Faults since the last one.
    faults: u32,
    /// Nanoseconds that both threads waited for processors meanwhile.
    waited_ns: u64,
    /// The processor of the thread that faulted last.
    cpu: u64,
}

/// Whether to follow, from what is seen.
#[derive(Debug, Default)]
struct FollowState {
    /// The processor where the thread that is followed was.
    at: Option<u64>,
    /// Looks that said so in a row; or of this trial.
    looks: u32,
    moves: u32,
    /// Looks to pass by before the next trial, and what that becomes if it fails again.
    pause: u32,
    next_pause: u32,
}

impl FollowState {
    fn look(&mut self, seen: Sample) {
        match self.at {
            None if self.pause > 0 => self.pause -= 1,
            None => {
                let waits = seen.faults >= FAULTS && seen.waited_ns / u64::from(seen.faults) > WAITED_NS;
                self.looks = if waits { self.looks + 1 } else { 0 };
                if self.looks == LOOKS_BEFORE {
                    self.begin(Some(seen.cpu));
                }
            }
            Some(at) => {
                self.at = Some(seen.cpu);
                self.looks += 1;
                self.moves += u32::from(at != seen.cpu);
                if self.moves > MOVES_MAX {
                    self.begin(None);
                    self.pause = self.next_pause;
                    self.next_pause = (self.next_pause * 2).clamp(1, PAUSE_MAX);
                } else if self.looks == TRIAL {
                    self.begin(self.at);
                    self.next_pause = 0;
                }
            }
        }
    }

    fn begin(&mut self, at: Option<u64>) {
        *self = FollowState { at, looks: 0, moves: 0, ..*self };
    }
}

/// Where the thread that serves a client runs.
#[derive(Debug)]
pub(crate) struct FaultAffinity {
    client: i32,
    /// Where the thread may run.
    cpus: Cpus,
    own_schedstat: Option<File>,
    faulting: Option<FaultingThread>,
    state: FollowState,
    looked_ns: u64,
    faults: u32,
    /// What both had waited in all at the last look.
    waited_ns: u64,
}

impl FaultAffinity {
    /// Of the calling thread, which serves process `client`.
    pub fn new(client: i32) -> FaultAffinity {
        FaultAffinity {
            client,
            cpus: Cpus::of_thread().unwrap_or(Cpus::NONE),
            own_schedstat: File::open("/proc/thread-self/schedstat").ok(),
            faulting: None,
            state: FollowState::default(),
            looked_ns: 0,
            faults: 0,
            waited_ns: 0,
        }
    }

    /// True while the fault thread is on the processor of the thread that it serves, which can go on only when it sleeps.
    pub fn follows(&self) -> bool {
        self.state.at.is_some()
    }

    /// `faults` were served by `now` (monotonic nanoseconds), the last one of `thread`.
    pub fn served(&mut self, faults: usize, thread: i32, now: u64) {
        self.faults = self.faults.saturating_add(faults as u32);
        if now < self.looked_ns + LOOKS_NS[usize::from(self.follows())] {
            return;
        }
        self.looked_ns = now;
        let before = self.state.at;
        match self.see(thread) {
            Some(seen) => self.state.look(seen),
            None => self.state = FollowState::default(),
        }
        self.faults = 0;
        if self.state.at != before {
            self.go(before);
        }
    }

    /// No thread faults: earlier samples say nothing about the next faults.
    pub fn rest(&mut self) {
        if self.follows() {
            let before = self.state.at;
            self.state = FollowState::default();
            self.go(before);
        }
    }

    /// From where it was told to be `before`. Only a matter of time, so that failing is none.
    fn go(&mut self, before: Option<u64>) {
        let Ok(now) = Cpus::of_thread() else { return };
        if before.and_then(Cpus::one) != Some(now) {
            // Another process has set this thread's affinity meanwhile: that holds.
            self.cpus = now;
        }
        let there = self.state.at.filter(|cpu| self.cpus.contains(*cpu)).and_then(Cpus::one);
        let _ = there.unwrap_or(self.cpus).bind_thread();
    }

    /// Looks; `None` if there is nothing to compare with, or to see: a thread of another namespace has another number.
    fn see(&mut self, thread: i32) -> Option<Sample> {
        if self.faulting.as_ref().is_none_or(|other| other.thread != thread) {
            let open = |name| File::open(format!("/proc/{}/task/{thread}/{name}", self.client)).ok();
            self.faulting = None;
            self.faulting = Some(FaultingThread { thread, stat: open("stat")?, schedstat: open("schedstat")? });
            self.waited_ns = self.waited()?;
            // The next look will have something to compare with.
            self.faults = 0;
        }
        let waited_ns = self.waited()?;
        let seen = Sample {
            faults: self.faults,
            waited_ns: waited_ns.saturating_sub(self.waited_ns),
            cpu: processor(&self.faulting.as_ref()?.stat)?,
        };
        self.waited_ns = waited_ns;
        Some(seen)
    }

    fn waited(&self) -> Option<u64> {
        Some(waited_ns(self.own_schedstat.as_ref()?)? + waited_ns(&self.faulting.as_ref()?.schedstat)?)
    }
}

/// Time that a thread was ready to run and did not, from its schedstat.
fn waited_ns(schedstat: &File) -> Option<u64> {
    let mut text = [0; 80];
    let len = schedstat.read_at(&mut text, 0).ok()?;
    str::from_utf8(&text[..len]).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The processor that a thread runs on, or ran on last, from its stat.
fn processor(stat: &File) -> Option<u64> {
    // Its name may hold any bytes; 50 numbers of 20 digits follow.
    let mut text = [0; 1280];
    let len = stat.read_at(&mut text, 0).ok()?;
    stat::field(&text[..len], 39)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::sched;

    fn seen(waited_ns: u64, cpu: u64) -> Sample {
        Sample { faults: 100, waited_ns, cpu }
    }

    #[test]
    fn it_follows_where_both_wait_for_processors() {
        let mut choice = FollowState::default();
        choice.look(seen(100 * WAITED_NS, 1));
        assert_eq!(choice.at, None, "short waits are no reason");
        choice.look(Sample { faults: FAULTS - 1, ..seen(u64::MAX, 1) });
        assert_eq!(choice.at, None, "a few faults are none");
        for waited in [101 * WAITED_NS, 0, 101 * WAITED_NS] {
            choice.look(seen(waited, 1));
            assert_eq!(choice.at, None, "once may be by chance");
        }
        choice.look(seen(101 * WAITED_NS, 1));
        assert_eq!(choice.at, Some(1));
        for look in 0..100 {
            // Now and then it is moved, as threads are.
            choice.look(seen(0, look / 10 % 2));
            assert_eq!(choice.at, Some(look / 10 % 2));
        }
    }

    #[test]
    fn it_stays_where_the_other_runs_away_and_tries_ever_more_rarely() {
        let mut choice = FollowState::default();
        let mut pauses = Vec::new();
        let mut pause = 0;
        for look in 0..10_000 {
            pause += 1;
            let followed = choice.at.is_some();
            choice.look(seen(u64::MAX, look % 2));
            if !followed && choice.at.is_some() {
                pauses.push(pause);
                pause = 0;
            }
        }
        assert!(pauses.windows(2).all(|two| two[0] <= two[1]), "{pauses:?}");
        assert_eq!(pauses.last(), Some(&(MOVES_MAX + 1 + PAUSE_MAX + LOOKS_BEFORE)), "{pauses:?}");
    }

    #[test]
    fn an_affinity_that_another_process_sets_is_kept() {
        let all = Cpus::of_thread().expect("a set");
        let mut cpus = all.iter();
        let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
            return eprintln!("SKIPPED: one processor only");
        };
        std::thread::spawn(move || {
            let [first, second] = [first, second].map(|cpu| (cpu, Cpus::one(cpu).expect("a processor")));
            let mut place = FaultAffinity::new(std::process::id() as i32);
            let go = |place: &mut FaultAffinity, to: Option<(u64, Cpus)>| {
                let before = core::mem::replace(&mut place.state.at, to.map(|(cpu, _)| cpu));
                place.go(before);
                Cpus::of_thread().expect("a set")
            };
            assert_eq!(go(&mut place, Some(first)), first.1);
            assert_eq!(go(&mut place, Some(second)), second.1);
            assert_eq!(go(&mut place, None), all);
            assert_eq!(go(&mut place, Some(first)), first.1);
            second.1.bind_thread().expect("allowed");
            assert_eq!(go(&mut place, Some(first)), second.1, "it went where it may not run any more");
            assert_eq!(go(&mut place, None), second.1);
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn the_kernel_tells_where_a_thread_runs_and_what_it_waited() {
        let here = Cpus::of_thread().expect("a set").iter().last().expect("a processor");
        std::thread::spawn(move || {
            Cpus::one(here).expect("a processor").bind_thread().expect("allowed");
            let mut place = FaultAffinity::new(std::process::id() as i32);
            let seen = place.see(sched::thread()).expect("this thread");
            assert_eq!(seen, Sample { faults: 0, waited_ns: seen.waited_ns, cpu: here });
            assert_eq!(place.see(0), None, "no such thread");
        })
        .join()
        .expect("no panic");
    }
}
