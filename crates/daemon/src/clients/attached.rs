//! A client that ran before it became one: what its entry left in it, and how its threads are stopped.

use crate::clients::handshake::GreetError;
use pagefold_entry::layout::Traces;
use pagefold_entry::stop::{StopError, Stopped, with_stopped};
use pagefold_os::fd::Fd;
use pagefold_os::{Range, sched, sock};
use pagefold_protocol::message::{HELLO_ATTACHED, Packet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An attached process.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) traces: Traces,
    /// A descriptor that no other process can come to be.
    process: Fd,
    /// How often its threads were stopped, for how long in all, and at most, in nanoseconds.
    stops: [AtomicU64; 3],
    /// Until then its agent does not run first: it kept others waiting for too long.
    slow_until_ns: AtomicU64,
}

/// For so long an agent that took too long competes as usual.
const SLOW_NS: u64 = 10_000_000_000;

/// An attached process that stands still.
pub(crate) struct Still<'a> {
    process: &'a Attached,
    stopped: &'a Stopped,
}

impl Still<'_> {
    /// The agent was asked: it runs first until its answer can be read at `answers`.
    pub(crate) fn hurry(&self, answers: &Fd) {
        let now = sched::monotonic_ns();
        if now >= self.process.slow_until_ns.load(Ordering::Relaxed) && !self.stopped.hurry(answers) {
            self.process.slow_until_ns.store(now + SLOW_NS, Ordering::Relaxed);
        }
    }
}

/// Why `act` of [`Attached::while_stopped`] did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotStopped {
    /// The process has ended.
    Ended,
    /// Its threads cannot all be stopped now.
    Busy,
}

impl Attached {
    /// The process at the other end of `socket`, as the agent that greets says of the entry by which it came: a lie would
    /// have the daemon write into the liar's own memory. `None` if it loaded its agent when it started.
    ///
    /// # Errors
    /// [`GreetError::HungUp`] if the process has ended; as getsockopt(2).
    pub(crate) fn of_peer(socket: &Fd, pid: i32, hello: &Packet) -> Result<Option<Arc<Attached>>, GreetError> {
        let image_end = hello.b.checked_add(hello.count);
        let Some(end) = image_end.filter(|_| hello.a & HELLO_ATTACHED != 0) else { return Ok(None) };
        let Some(traces) = Traces::of(pid, Range { start: hello.b, end }, hello.sequence) else { return Ok(None) };
        let process = sock::peer_process(socket)?;
        if sock::has_ended(&process) {
            return Err(GreetError::HungUp);
        }
        Ok(Some(Arc::new(Attached { traces, process, stops: Default::default(), slow_until_ns: AtomicU64::new(0) })))
    }

    /// Runs `act` while all threads of the program stand still but the agent's: no call of an attached program is followed.
    ///
    /// # Errors
    /// [`NotStopped`]; the program goes on then, and `act` did not run.
    pub(crate) fn while_stopped<T: Send>(&self, act: impl FnOnce(&Still<'_>) -> T + Send) -> Result<T, NotStopped> {
        if self.has_ended() {
            return Err(NotStopped::Ended);
        }
        let done = with_stopped(self.traces.pid, |stopped| {
            let done = act(&Still { process: self, stopped });
            let ns = stopped.elapsed().as_nanos() as u64;
            self.stops[0].fetch_add(1, Ordering::Relaxed);
            self.stops[1].fetch_add(ns, Ordering::Relaxed);
            self.stops[2].fetch_max(ns, Ordering::Relaxed);
            done
        });
        done.map_err(|error| if matches!(error, StopError::Ended) { NotStopped::Ended } else { NotStopped::Busy })
    }

    pub(crate) fn has_ended(&self) -> bool {
        sock::has_ended(&self.process)
    }

    /// Stops, their length in all, and the longest, in nanoseconds.
    pub(crate) fn stops(&self) -> [u64; 3] {
        [0, 1, 2].map(|index| self.stops[index].load(Ordering::Relaxed))
    }
}
