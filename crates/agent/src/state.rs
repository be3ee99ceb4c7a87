//! What the program's threads and the agent's share: one state per process.
//!
//! The words are atomic. Only a holder of the mapping lock reaches the tables. Socket and domain are written before the
//! agent's first thread and never again.

use crate::mapping_lock::{MappingLock, MappingLockGuard};
use crate::owned_ranges::Owned;
use crate::range_attributes::{MergedChunks, RangeAttributes};
use crate::runtime::thread::Thread;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The agent entered a program that ran already: it sees no call of the program, and while it replaces mappings the daemon
/// has stopped the program's threads.
pub(crate) const ATTACHED: bool = cfg!(feature = "attached");

/// `me` of the agent's thread for the mapping lock, and of the cold tier's; no thread pointer has these values.
pub(crate) const AGENT: usize = 1;
pub(crate) const COLD_AGENT: usize = 2;

/// What program threads and the agent's thread share; one per process.
pub struct Shared {
    /// Held while mappings change.
    pub mapping_lock: MappingLock,
    /// Counts changes of the managed ranges.
    pub generation: AtomicU64,
    /// 0 not started, 1 running, 2 asked to leave, 3 given up.
    pub phase: AtomicU32,
    /// The agent's thread.
    pub thread: Thread,
    /// Manage every large private anonymous mapping.
    pub all: AtomicBool,
    /// Memory that can be executed is managed, or was.
    pub executable: AtomicBool,
    /// `malloc` is the C library's, and `free` comes by us: blocks that it mapped for themselves can be managed.
    pub blocks: AtomicBool,
    /// The agent's thread answers discards of merged pages.
    pub holds: AtomicBool,
    /// Forked from a process that had merged pages.
    pub forked: AtomicBool,
    /// Errno that made the agent give up, for the curious.
    pub error: AtomicI32,
    socket_len: AtomicUsize,
    socket: UnsafeCell<[u8; 108]>,
    domain: UnsafeCell<[u8; 64]>,
}

// SAFETY: the cells are written before the thread starts.
unsafe impl Sync for Shared {}

/// What the mapping lock protects; zeros at first, so that it takes no room in the library's file.
struct Guarded {
    table: UnsafeCell<RangeAttributes>,
    merged: UnsafeCell<MergedChunks>,
}

// SAFETY: only `Shared::tables` reaches them, which takes the guard of the mapping lock.
unsafe impl Sync for Guarded {}

static GUARDED: Guarded =
    Guarded { table: UnsafeCell::new(RangeAttributes::new()), merged: UnsafeCell::new(MergedChunks::new()) };

/// The one state of this process.
pub static SHARED: Shared = Shared {
    mapping_lock: MappingLock::new(),
    generation: AtomicU64::new(1),
    phase: AtomicU32::new(0),
    thread: Thread::new(Owned::Stack),
    all: AtomicBool::new(false),
    executable: AtomicBool::new(false),
    blocks: AtomicBool::new(false),
    holds: AtomicBool::new(false),
    forked: AtomicBool::new(false),
    error: AtomicI32::new(0),
    socket_len: AtomicUsize::new(0),
    socket: UnsafeCell::new([0; 108]),
    domain: UnsafeCell::new([0; 64]),
};

/// Access to what the mapping lock protects.
pub struct Tables<'a> {
    _held: &'a MappingLockGuard<'a>,
    /// Ranges and notes.
    pub table: &'a mut RangeAttributes,
    /// Chunks with merged pages.
    pub merged: &'a mut MergedChunks,
}

impl Shared {
    /// Sets where the daemon listens and which domain we belong to; false if either is too long.
    /// Call before [`start`](crate::live::start).
    pub fn configure(&self, socket: &[u8], domain: &[u8], all: bool) -> bool {
        if socket.len() >= 108 || domain.len() > 64 || self.phase.load(Ordering::Acquire) != 0 {
            return false;
        }
        // SAFETY: no thread of ours runs yet (phase 0), and the caller is the only one to configure.
        unsafe {
            (&mut *self.socket.get())[..socket.len()].copy_from_slice(socket);
            *self.domain.get() = [0; 64];
            (&mut *self.domain.get())[..domain.len()].copy_from_slice(domain);
        }
        self.socket_len.store(socket.len(), Ordering::Release);
        self.all.store(all, Ordering::Relaxed);
        true
    }

    /// True if [`configure`](Self::configure) was called.
    pub fn is_configured(&self) -> bool {
        self.socket_len.load(Ordering::Acquire) > 0
    }

    /// The tables, for a holder of the mapping lock.
    pub fn tables<'a>(&'a self, held: &'a MappingLockGuard<'a>) -> Tables<'a> {
        // SAFETY: the caller's guard shows that this thread holds the mapping lock, so no other thread has the tables. An
        // outer frame of the same thread may hold the lock too (a signal handler interrupted it): signals are blocked while
        // the table changes, and such a frame has read copies only.
        unsafe { Tables { _held: held, table: &mut *GUARDED.table.get(), merged: &mut *GUARDED.merged.get() } }
    }

    /// The agent ends for good, unless a thread has asked it to leave meanwhile: that comes first.
    pub(crate) fn give_up(&self) {
        let _ = self.phase.compare_exchange(1, 3, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Tells the daemon, at its next look, that the managed ranges changed.
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// The daemon's socket and the domain's name, padded with zeros.
pub(crate) fn read_settings() -> (&'static [u8], &'static [u8; 64]) {
    let len = SHARED.socket_len.load(Ordering::Acquire);
    // SAFETY: written before the thread started.
    unsafe { (&(&*SHARED.socket.get())[..len], &*SHARED.domain.get()) }
}

/// The program has locked all its memory: there is nothing for the agent to do.
pub(crate) static ALL_LOCKED: AtomicBool = AtomicBool::new(false);

/// What filters of the program's leave the agent (see [`seccomp_filter`](pagefold_protocol::seccomp_filter)).
pub(crate) static MAY_START: AtomicBool = AtomicBool::new(true);
pub(crate) static MAY_FOLLOW: AtomicBool = AtomicBool::new(true);
/// Changed with the mapping lock held: without it no memory that can be executed is listed.
pub(crate) static MAY_EXECUTE: AtomicBool = AtomicBool::new(true);

/// The thread that serves the cold tier during a loan.
pub(crate) static LOAN_THREAD: Thread = Thread::new(Owned::LoanStack);
/// The thread that faults in everything that is evicted when the agent leaves.
pub(crate) static FAULT_IN_THREAD: Thread = Thread::new(Owned::FaultInStack);

/// How many threads of the agent there are.
pub(crate) fn count_threads() -> usize {
    [&SHARED.thread, &LOAN_THREAD, &FAULT_IN_THREAD].into_iter().filter(|thread| !thread.is_gone()).count()
}

/// The loan of a merged client's anonymous memory to the cold tier: 0 none, 1 lent, 2 asked to end.
pub(crate) static LOAN: AtomicU32 = AtomicU32::new(0);

/// Returns true while the anonymous memory is lent to the tier.
pub(crate) fn is_lent() -> bool {
    LOAN.load(Ordering::Acquire) != 0
}
