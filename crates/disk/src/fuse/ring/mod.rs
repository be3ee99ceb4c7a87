//! FUSE over io_uring: requests and answers through memory that is shared with the kernel (Linux 6.14).
//!
//! No released library has this transport. It has the shape of a session, so that a library can take its place:
//! [`Rings::prepare`] before the mount, [`Rings::start`] after the handshake, [`Session::join`] for the end. The kernel
//! still sends forgets and interrupts, and everything before the start, through /dev/fuse.
//!
//! Each module uses only later ones: `serve` has the threads, `dispatch` answers requests, `queue` is the io_uring of one
//! processor, `wire` knows the kernel's structures.

mod dispatch;
mod queue;
mod serve;
mod wire;

pub(super) use dispatch::Access;

use super::file_system::DiskFs;
use queue::Queue;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serve::Shared;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Most entries of a processor's queue: requests that wait for an answer at the same time. More wait in the kernel.
const DEPTH_MAX: u16 = 32;
/// Most entries of all queues, where each has four at least: large reads and writes leave 1 MiB of memory in each.
const ENTRIES_MAX: u16 = 512;

/// The kernel's switch; without a file the kernel has no rings.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether the kernel has rings, and serves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    Missing,
    Off,
    On,
}

impl Support {
    pub(crate) fn of_kernel() -> Self {
        match std::fs::read_to_string(SWITCH) {
            Ok(text) if text.trim() == "Y" => Self::On,
            Ok(_) => Self::Off,
            Err(_) => Self::Missing,
        }
    }
}

/// Tries whether this process may use io_uring.
///
/// # Errors
/// The kernel's refusal.
pub(crate) fn try_ring() -> io::Result<()> {
    Queue::new(0, 1).map(drop)
}

/// Rings that are ready for a connection.
pub(super) struct Rings {
    shared: Arc<Shared>,
    queues: Vec<QueueThread>,
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.shared.end();
    }
}

struct QueueThread {
    thread: JoinHandle<()>,
    start: Sender<OwnedFd>,
    /// Whether the queue is made, then whether it is registered.
    report: Receiver<io::Result<()>>,
}

impl QueueThread {
    fn report(&self) -> io::Result<()> {
        self.report.recv().unwrap_or_else(|_| Err(io::Error::other("the thread of a queue ended")))
    }
}

impl Rings {
    /// Makes a queue with a thread for each possible processor, as the kernel demands, and `workers` for what may wait.
    ///
    /// # Errors
    /// The kernel refuses io_uring, or a thread cannot be started.
    pub(super) fn prepare(fs: Arc<DiskFs>, access: Access, workers: usize) -> io::Result<Self> {
        Self::with_queues(0..possible_processors()?, fs, access, workers)
    }

    /// As [`Rings::prepare`], for queues of these numbers.
    pub(super) fn with_queues(
        numbers: Range<u16>,
        fs: Arc<DiskFs>,
        access: Access,
        workers: usize,
    ) -> io::Result<Self> {
        let own = sched_getaffinity(None)?;
        let depth = (ENTRIES_MAX / (numbers.len() as u16).max(1)).clamp(4, DEPTH_MAX);
        let is_own = |processor: usize| processor < CpuSet::MAX_CPU && own.is_set(processor);
        let mut rings = Self { shared: Arc::new(Shared::new(fs, access)), queues: Vec::new() };
        for processor in numbers {
            rings.add_queue(processor, depth, is_own(processor.into()))?;
        }
        for number in 0..workers {
            let shared = rings.shared.clone();
            Builder::new().name(format!("ring-work-{number}")).spawn(move || shared.work())?;
        }
        rings.queues.iter().try_for_each(QueueThread::report)?;
        Ok(rings)
    }

    fn add_queue(&mut self, processor: u16, depth: u16, pin: bool) -> io::Result<()> {
        let shared = self.shared.clone();
        let (start, started) = channel::<OwnedFd>();
        let (reporter, report) = channel();
        let thread = Builder::new().name(format!("ring-{processor}")).spawn(move || {
            if pin {
                // Elsewhere it works too, and costs a wakeup of another processor.
                let mut set = CpuSet::new();
                set.set(processor.into());
                let _ = sched_setaffinity(None, &set);
            }
            let mut queue = match Queue::new(processor, depth) {
                Ok(queue) => queue,
                Err(error) => return drop(reporter.send(Err(error))),
            };
            // Nothing receives a report after another queue's failure.
            let _ = reporter.send(Ok(()));
            let Ok(device) = started.recv() else { return };
            let _ = reporter.send(queue.register(device.as_fd()));
            shared.serve(queue);
        })?;
        self.queues.push(QueueThread { thread, start, report });
        Ok(())
    }

    /// Registers all queues with the connection of `device`, which has agreed to rings. The error is the kernel's, if it
    /// refused a queue: it then sends all requests through /dev/fuse.
    pub(super) fn start(self, device: BorrowedFd<'_>) -> (Session, io::Result<()>) {
        let started = self.queues.iter().try_for_each(|queue| {
            let device = device.try_clone_to_owned()?;
            queue.start.send(device).map_err(io::Error::other)
        });
        // Every queue reports before the first failure counts: the session then knows which threads serve.
        let reports: Vec<_> = self.queues.iter().map(QueueThread::report).collect();
        let result = started.and_then(|()| reports.into_iter().collect());
        (Session { rings: self }, result)
    }
}

/// Rings that serve a connection.
pub(super) struct Session {
    rings: Rings,
}

impl Session {
    /// Waits until the connection has ended.
    pub(super) fn join(mut self) {
        for QueueThread { thread, start, .. } in self.rings.queues.drain(..) {
            drop(start);
            let _ = thread.join();
        }
    }
}

/// How many processors the kernel counts, whether they are there or not.
fn possible_processors() -> io::Result<u16> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<u16>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    text.trim().split(',').map(range).sum::<Option<u16>>().ok_or_else(|| io::Error::other("no list of processors"))
}
