//! All threads of a program stand still for the length of a closure, so that a mapping can be checked and replaced as one
//! step.
//!
//! A thread that sleeps in the kernel and cannot be stopped there, for a disk say, counts as still if the call in which it
//! sleeps changes no mappings: before it runs code of the program's again it stops. Any other thread that does not stop in
//! time makes the stop fail, and the program goes on.
//!
//! The closure runs on a thread of its own, the tracer. When that ends, the kernel lets go of whatever is still traced.
//!
//! On a busy machine a thread waits for its turn, for tens of milliseconds and more, and the program would stand still for
//! all of the turns that tracer and agent need. So both take the first turn meanwhile, where the daemon may give it.

use crate::trace::{Report, Tracer};
use pagefold_os::fd::{self, Fd};
use pagefold_os::{procfs, sched, stat};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// How long threads may take until they stand still.
pub const PATIENCE: Duration = Duration::from_millis(20);
/// After this time a thread that does not stand still is looked at.
const LOOK_AFTER: Duration = Duration::from_micros(300);
/// Between two looks at whether the threads stand still: they may need this processor for that.
const PAUSE: Duration = Duration::from_micros(20);
/// Names of the agent's own threads begin with this; they go on.
const OWN_THREADS: &str = "pagefold-";
/// How many of them run first, and for how long at most: a program may give any of its threads such a name.
const FIRST_THREADS_MAX: usize = 2;
const FIRST_MS_MAX: i32 = 20;

/// Why a program could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// A thread did not stand still in time.
    #[error("thread {0} did not stop in time")]
    Late(i32),
    /// A thread may not be traced.
    #[error("thread {thread} cannot be traced: {error}")]
    Refused {
        /// The thread.
        thread: i32,
        /// The kernel's reason.
        error: io::Error,
    },
    /// The program is stopped by a signal: its threads would stay so.
    #[error("it is stopped (SIGSTOP or a debugger)")]
    Group,
    /// The program has ended.
    #[error("it has ended")]
    Ended,
}

/// A program that stands still.
#[derive(Debug)]
pub struct Stopped {
    tracer: Tracer,
    pid: i32,
    threads: BTreeMap<i32, State>,
    /// The agent's.
    own: Vec<i32>,
    /// When the first of them was asked to stand still.
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Asked to stand still.
    Asked,
    /// Stands still, before it handles this signal.
    Still(i32),
    /// Asleep in a call that changes no mappings.
    Asleep,
    Ended,
}

/// Runs `act` while all threads of process `pid` stand still but the agent's own.
///
/// # Errors
/// [`StopError`]; the program goes on then, and `act` did not run.
pub fn with_stopped<T: Send>(pid: i32, act: impl FnOnce(&Stopped) -> T + Send) -> Result<T, StopError> {
    thread::scope(|scope| {
        let tracing = thread::Builder::new().name("tracer".into()).stack_size(256 << 10).spawn_scoped(scope, || {
            // A worker that donates idle time would let the program stand still for as long as others have work.
            if sched::take_first_turn(0).is_err() {
                let _ = sched::take_ordinary_time();
            }
            let mut stopped = Stopped {
                tracer: Tracer::default(),
                pid,
                threads: BTreeMap::new(),
                own: Vec::new(),
                since: Instant::now(),
            };
            let result = stopped.stop();
            let done = result.map(|()| act(&stopped));
            stopped.resume();
            done
        });
        let tracing = tracing.map_err(|error| StopError::Refused { thread: pid, error })?;
        tracing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Stopped {
    /// The threads that stand still, and can be read and changed.
    pub fn still(&self) -> impl Iterator<Item = i32> {
        self.threads.iter().filter(|(_, state)| matches!(state, State::Still(_))).map(|(thread, _)| *thread)
    }

    /// For how long its first thread stands still.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// The agent's threads run first until there is an answer at `answers`; false if it took too long: they do not then.
    pub fn hurry(&self, answers: &Fd) -> bool {
        let first = self.own.iter().take(FIRST_THREADS_MAX);
        let before: Vec<_> = first.filter_map(|thread| Some((thread, sched::take_first_turn(*thread).ok()?))).collect();
        let mut polls = [libc::pollfd { fd: answers.raw(), events: libc::POLLIN, revents: 0 }];
        let came = before.is_empty() || fd::poll(&mut polls, FIRST_MS_MAX).is_ok_and(|ready| ready > 0);
        for (thread, turn) in before {
            let _ = turn.give_back(*thread);
        }
        came
    }

    /// The calling thread as their tracer.
    pub const fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    fn stop(&mut self) -> Result<(), StopError> {
        let began = self.since;
        loop {
            let any_new = self.ask_new_threads()?;
            if !any_new && self.threads.values().all(|state| *state != State::Asked) {
                return if self.threads.values().any(|state| *state != State::Ended) {
                    Ok(())
                } else {
                    Err(StopError::Ended)
                };
            }
            self.wait(began)?;
        }
    }

    /// Asks the threads that were not seen before to stand still; false if there is none.
    fn ask_new_threads(&mut self) -> Result<bool, StopError> {
        let mut any = false;
        for thread in procfs::threads(self.pid).map_err(|_| StopError::Ended)? {
            if self.threads.contains_key(&thread) || self.own.contains(&thread) {
                continue;
            }
            if is_own(self.pid, thread) {
                self.own.push(thread);
                continue;
            }
            any = true;
            let asked = self.tracer.seize(thread).and_then(|()| self.tracer.interrupt(thread));
            match asked {
                Ok(()) => self.threads.insert(thread, State::Asked),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => self.threads.insert(thread, State::Ended),
                // A thread that has ended and is not yet reaped cannot be traced either.
                Err(_) if is_dead(self.pid, thread) => self.threads.insert(thread, State::Ended),
                Err(error) => return Err(StopError::Refused { thread, error }),
            };
        }
        Ok(any)
    }

    /// Waits until every thread that was asked stands still, sleeps, or has ended.
    fn wait(&mut self, began: Instant) -> Result<(), StopError> {
        let mut looked = began;
        while self.threads.values().any(|state| *state == State::Asked) {
            match self.tracer.poll(-1) {
                Ok(Some((_, Report::Stopped { group: true, .. }))) => return Err(StopError::Group),
                Ok(Some((thread, Report::Stopped { signal, .. }))) => {
                    self.threads.insert(thread, State::Still(signal));
                    continue;
                }
                Ok(Some((thread, Report::Ended))) => {
                    self.threads.insert(thread, State::Ended);
                    continue;
                }
                Ok(None) => {}
                Err(_) => return Err(StopError::Ended),
            }
            if looked.elapsed() > LOOK_AFTER {
                looked = Instant::now();
                let late = self.look_at_late();
                if let Some(late) = late.filter(|_| began.elapsed() > PATIENCE) {
                    return Err(StopError::Late(late));
                }
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Marks the threads that sleep where they change nothing; returns one that does not.
    fn look_at_late(&mut self) -> Option<i32> {
        let mut late = None;
        for (thread, state) in &mut self.threads {
            if *state != State::Asked {
                continue;
            }
            if is_dead(self.pid, *thread) {
                *state = State::Ended;
            } else if changes_nothing(self.pid, *thread) {
                *state = State::Asleep;
            } else {
                late = Some(*thread);
            }
        }
        late
    }

    fn resume(&mut self) {
        for (thread, state) in &self.threads {
            if let State::Still(signal) = state {
                let _ = self.tracer.detach(*thread, *signal);
            }
        }
        // A thread that was asked and has not stopped is let go of when this thread ends.
    }
}

/// True if `thread` is the agent's. A program that gives its threads such a name harms itself alone.
pub(crate) fn is_own(pid: i32, thread: i32) -> bool {
    fs::read(format!("/proc/{pid}/task/{thread}/comm")).is_ok_and(|name| name.starts_with(OWN_THREADS.as_bytes()))
}

fn state_of(pid: i32, thread: i32) -> Option<u8> {
    let text = fs::read(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
    stat::field(&text, 3)?.bytes().next()
}

/// /proc/PID/task/THREAD/status, for [`procfs::field`]; empty if there is none.
pub(crate) fn status_of(pid: i32, thread: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default()
}

/// What system call `thread` is in, as the kernel says: a number, or a word.
pub(crate) fn call_of(pid: i32, thread: i32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).unwrap_or_default();
    text.split_ascii_whitespace().next().unwrap_or_default().to_owned()
}

fn is_dead(pid: i32, thread: i32) -> bool {
    state_of(pid, thread).is_none_or(|state| matches!(state, b'Z' | b'X'))
}

/// True if `thread` sleeps where no signal wakes it, in a call that changes no mappings: it will stop before it makes
/// another.
fn changes_nothing(pid: i32, thread: i32) -> bool {
    const CALLS: [libc::c_long; 16] = [
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_pread64,
        libc::SYS_pwrite64,
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_preadv,
        libc::SYS_pwritev,
        libc::SYS_fsync,
        libc::SYS_fdatasync,
        libc::SYS_openat,
        libc::SYS_close,
        libc::SYS_newfstatat,
        libc::SYS_getdents64,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
    ];
    let number = call_of(pid, thread).parse::<libc::c_long>();
    // The state after the call: a thread that is asleep in it was so before, too, or made the same call again.
    number.is_ok_and(|number| CALLS.contains(&number)) && state_of(pid, thread) == Some(b'D')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// A program that is killed and reaped when this is dropped.
    struct Program(Child);

    impl Program {
        fn start(words: &[&str]) -> Program {
            Program(Command::new(words[0]).args(&words[1..]).spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            self.0.id() as i32
        }

        fn end(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    impl Drop for Program {
        fn drop(&mut self) {
            self.end();
        }
    }

    /// As [`with_stopped`], again while a busy machine does not let the program stop in time.
    fn with_stopped_at_last<T: Send>(pid: i32, act: impl Fn(&Stopped) -> T + Sync) -> Result<T, StopError> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match with_stopped(pid, &act) {
                Err(StopError::Late(_)) if Instant::now() < deadline => {}
                other => return other,
            }
        }
    }

    #[test]
    fn a_program_stands_still_and_goes_on() {
        let mut program = Program::start(&["sh", "-c", "while :; do :; done"]);
        let pid = program.pid();
        let ticks = || {
            let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let after = text.rsplit_once(')').unwrap().1;
            after.split_whitespace().nth(11).unwrap().parse::<u64>().unwrap()
        };
        for _ in 0..20 {
            let moved = with_stopped_at_last(pid, |stopped| {
                assert_eq!(stopped.still().collect::<Vec<_>>(), [pid]);
                let before = ticks();
                thread::sleep(Duration::from_millis(30));
                ticks() - before
            });
            assert_eq!(moved.unwrap(), 0, "it ran");
        }
        let before = ticks();
        let deadline = Instant::now() + Duration::from_secs(30);
        while ticks() == before && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        assert_ne!(ticks(), before, "it stands still for ever");
        program.end();
        assert!(matches!(with_stopped(pid, |_| ()), Err(StopError::Ended)));
    }

    fn policy(thread: i32) -> i32 {
        // SAFETY: returns a number.
        unsafe { libc::sched_getscheduler(thread) }
    }

    const FIRST: i32 = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;

    /// Also on a busy machine, for a worker of idle priority.
    #[test]
    fn a_program_stands_still_for_no_turn_of_others() {
        let program = Program::start(&["sleep", "60"]);
        let pid = program.pid();
        let policies = thread::spawn(move || {
            sched::donate_idle_time().unwrap();
            (policy(0), with_stopped_at_last(pid, |_| policy(0)).unwrap(), policy(0))
        });
        let may = sched::take_first_turn(pid).is_ok();
        let while_stopped = if may { FIRST } else { libc::SCHED_OTHER };
        assert_eq!(policies.join().unwrap(), (libc::SCHED_IDLE, while_stopped, libc::SCHED_IDLE));
    }

    #[test]
    fn the_agents_thread_runs_first_until_it_answers_or_takes_too_long() {
        let program = Program::start(&["sleep", "60"]);
        let pid = program.pid();
        let Ok(before) = sched::take_first_turn(pid) else {
            return println!("SKIPPED: needs CAP_SYS_NICE");
        };
        before.give_back(pid).unwrap();
        assert_eq!(policy(pid), libc::SCHED_OTHER);
        let stopped =
            Stopped { tracer: Tracer::default(), pid, threads: BTreeMap::new(), own: vec![pid], since: Instant::now() };
        let answers = pagefold_os::wait::Bell::new().unwrap();
        assert!(!stopped.hurry(answers.fd()), "nothing came");
        assert_eq!(policy(pid), libc::SCHED_OTHER);
        answers.ring();
        assert!(stopped.hurry(answers.fd()));
        assert_eq!(policy(pid), libc::SCHED_OTHER);
        // Of a tracer that was killed meanwhile.
        sched::take_first_turn(pid).unwrap();
        assert_eq!(policy(pid), FIRST);
        assert!(stopped.hurry(answers.fd()));
        assert_eq!(policy(pid), libc::SCHED_OTHER);
    }

    #[test]
    fn a_program_that_is_stopped_stays_so() {
        let program = Program::start(&["sleep", "60"]);
        let pid = program.pid();
        // SAFETY: sends a signal to a child of ours.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        let deadline = Instant::now() + Duration::from_secs(30);
        while state_of(pid, pid) != Some(b'T') && Instant::now() < deadline {
            thread::yield_now();
        }
        assert!(matches!(with_stopped_at_last(pid, |_| ()), Err(StopError::Group)));
        thread::sleep(Duration::from_millis(20));
        assert_eq!(state_of(pid, pid), Some(b'T'));
    }
}
