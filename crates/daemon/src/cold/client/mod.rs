//! A client of the cold tier, and how its faults are served.
//!
//! One thread per client waits for its userfaultfd, so that a client that
//! faults in a storm takes its own share of the processor only.
//! Everything that touches a page's state is done in one order, under the
//! client's `service` lock and the owner lock (see `pagefold_protocol::residency_map`):
//!
//! - a page comes back: copied in, then *resident* in the table, then its entry
//!   is discarded;
//! - a page that the program discarded: *resident* in the table before the next
//!   event is read, then its entry is discarded;
//! - only pages that are *out* have their entries discarded here, and only
//!   pages that are *resident* are stored by the [evictor](super::evict::evictor).
//!
//! So no entry is discarded that a page will be asked for.
//!
//! `serve` is the thread; it has `events` read into the `event_journal` and obeyed, and `faults` answered, both of which
//! let pages in by `copy_in`; `fork` gives children theirs. `reconcile` is what comes before, where a daemon died.

pub(crate) mod ages;
mod copy_in;
pub(crate) mod event_journal;
mod events;
mod fault_thread;
pub(crate) mod faults;
mod fork;
mod reconcile;

use crate::clients::attached::Attached;
use crate::clients::connection::Connection;
use crate::cold::agent_connection::AgentConnection;
use crate::cold::handover::pending_children::PendingChildren;
use crate::cold::idle::policy::Idleness;
use crate::cold::idle::waking::Wakings;
use crate::cold::prefetcher::Prefetcher;
use crate::memory_limits::MemoryLimits;
use crate::waits::PastCounts;
use ages::EvictionState;
use event_journal::EventJournal;
use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_os::{Errno, PAGE_SIZE, Page, Range, sched};
use pagefold_protocol::residency_map::{self, OWNER_DAEMON, ResidencyMap, WakingRuns};
use pagefold_tier::Tier;
use pagefold_tier::policy::Window;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;
/// Most pages that one fault brings back.
pub(crate) const CLUSTER_PAGES: usize = 64;
/// Pages out that a table may claim beyond those that the tier has.
const LOST_MAX: u64 = 1 << 16;
/// Pages that lie beside each other and are fresh zeros are made at once up to this many.
const ZERO_PAGES_MAX: u64 = 256;
/// Tries to lock a client's `service` before the thread sleeps: some hundred microseconds.
const SERVICE_TRIES: u32 = 10_000;
/// Buckets of the histogram of faults.
pub const FAULT_BUCKETS: usize = 16;

/// A fault that waits to be answered.
pub(crate) struct Pending {
    /// The page's address.
    addr: u64,
    /// It was a write.
    write: bool,
    /// When it was read.
    since_ns: u64,
    /// How many pages it shall bring, as was found when it was first tried; 0 before.
    want: u64,
}

/// What is being served of a client.
pub(crate) struct Service {
    /// Events that were read and are not obeyed yet; empty while `service` is not locked.
    journal: EventJournal,
    /// Faults that wait.
    pending: Vec<Pending>,
    /// The thread that faulted last, by its number in its own pid namespace.
    faulter: i32,
    /// Pages that moved while they were out: where they are now, and under which address the tier has them.
    moving: BTreeMap<u64, u64>,
    window: Window,
    zeros: Window,
    cluster: Box<[Page]>,
    zero: Box<Page>,
}

impl Service {
    /// Whether page `page` of the tier is still to be brought to where it was moved.
    pub(crate) fn is_awaited(&self, page: u64) -> bool {
        self.moving.values().any(|from| from / PAGE == page)
    }

    /// True while entries lie under addresses that are no longer theirs.
    pub(crate) fn is_moving(&self) -> bool {
        !self.moving.is_empty()
    }

    /// Addresses of the pages of `range` that must not be stored: their entry is still that of a page that moved away, or
    /// they are awaited.
    pub(crate) fn moving_in(&self, range: Range) -> HashSet<u64> {
        let entries = self.moving.values().copied().filter(|from| (range.start..range.end).contains(from));
        entries.chain(self.moving.range(range.start..range.end).map(|(to, _)| *to)).collect()
    }
}

/// Counters of a client.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub pages_evicted: AtomicU64,
    pub refaults: AtomicU64,
    pub pages_returned: AtomicU64,
    pub zero_faults: AtomicU64,
    /// Pages that the evictor's looks found written: a page counts once in each look.
    pub pages_written: AtomicU64,
    pub lost: AtomicU64,
    pub fault_ns: AtomicU64,
    pub fault_ns_max: AtomicU64,
    pub fault_us: [AtomicU64; FAULT_BUCKETS],
    pub agent_cpu_ns: AtomicU64,
}

/// A client.
pub(crate) struct Client {
    pub client_id: u32,
    pub token: u64,
    pub pid: i32,
    pub uid: u32,
    pub name: String,
    pub uffd: Uffd,
    pub table: ResidencyMap,
    /// Keeps the table where it is.
    _map: Mapping,
    pub table_fd: Fd,
    pub pagemap: Fd,
    /// The file of the journal of events.
    pub journal_fd: Fd,
    pub tolerance_ppm: AtomicU64,
    pub service: Mutex<Service>,
    /// Threads that wait for `service` beside the client's own.
    waiting: AtomicU32,
    /// The agent, if it is connected; held by the thread that talks to it, and for as long as pages are evicted or unparked.
    /// The client's own thread never takes it: agents wait for that thread.
    pub link: Mutex<Option<AgentConnection>>,
    /// The socket of `link`, to notice its end.
    pub socket: Mutex<Option<Arc<Connection>>>,
    pub counters: Counters,
    pub past_counts: Mutex<PastCounts>,
    /// Processor time of the agent before we heard from it.
    pub cpu_before_ns: OnceLock<u64>,
    /// It has ended: nothing is done for it any more.
    pub gone: AtomicBool,
    /// It ran before it became a client, as its agent has said.
    pub attached: Mutex<Option<Arc<Attached>>>,
    /// It is merged live as well, and has its memory here until it is unparked.
    pub lent: AtomicBool,
    /// The kernel refused memory to the client since the last step of the evictor: its limit is reached.
    pub lacks_memory: AtomicBool,
    /// The fault thread rang the evictor because memory is short, and the evictor has not freed any yet.
    pub rang_evictor: AtomicBool,
    /// Moved pages come in whether there is memory or not: the daemon stops, and could not bring them later.
    pub moved_at_once: AtomicBool,
    pub eviction: Mutex<EvictionState>,
    /// What the park policy knows of it.
    pub idleness: Mutex<Idleness>,
    /// What it touches first when it wakes.
    pub wakings: Wakings,
    pub limits: MemoryLimits,
    /// Counts requests to drop pages, before each: a page that was loaded earlier may be stale.
    pub leaving: AtomicU64,
    /// The group's prefetcher.
    prefetcher: Arc<Prefetcher>,
    /// The children that are left without their pages.
    pending_children: Arc<PendingChildren>,
}

/// What identifies a client.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    /// Its number in the tier.
    pub client_id: u32,
    /// Tells it from others that had the number.
    pub token: u64,
    pub pid: i32,
    pub uid: u32,
}

/// What a client handed over.
pub(crate) struct ClientDescriptors {
    pub uffd: Uffd,
    pub table: Fd,
    pub pagemap: Fd,
}

/// What became of a fault.
pub(crate) enum Served {
    Done,
    /// The agent has the page frozen, and wakes the threads that wait.
    Left,
    /// An event must be read first, or memory found.
    Again,
}

impl Client {
    /// Takes what a client handed over, and the file of its journal of events.
    ///
    /// # Errors
    /// `EPROTO` if its table or the journal is none.
    pub(crate) fn new(
        who: Identity,
        handed: ClientDescriptors,
        journal_fd: Fd,
        prefetcher: Arc<Prefetcher>,
        pending_children: Arc<PendingChildren>,
    ) -> Result<Client, Errno> {
        let Identity { client_id, token, pid, uid } = who;
        let ClientDescriptors { uffd, table: table_fd, pagemap } = handed;
        // First: of a file that is none of memory its owner could have us wait for the rest.
        let seals = pagefold_os::memfd::seals(&table_fd)?;
        let (len, _) = pagefold_os::memfd::len_and_inode(table_fd.raw())?;
        // Of ordinary pages: huge ones may run out, and a thread that touches the mapping then gets SIGBUS.
        let small = pagefold_os::memfd::page_size(table_fd.raw())? == PAGE;
        if len < residency_map::FILE_BYTES as u64 || seals & pagefold_os::memfd::SEAL_SHRINK == 0 || !small {
            return Err(Errno(libc::EPROTO));
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(table_fd.raw(), 0, residency_map::FILE_BYTES, prot, libc::MAP_SHARED)?;
        // SAFETY: the file is sealed against shrinking, and the mapping lives as long as the client.
        let table = unsafe { ResidencyMap::at(map.addr()) };
        if !table.is_valid() {
            return Err(Errno(libc::EPROTO));
        }
        let journal = EventJournal::of(&journal_fd)?;
        let wakings = if len < residency_map::FILE_BYTES_WITH_WAKINGS as u64 {
            Wakings::default()
        } else {
            let bytes = residency_map::WAKINGS_BYTES;
            let map = Mapping::file(table_fd.raw(), residency_map::FILE_BYTES as u64, bytes, prot, libc::MAP_SHARED)?;
            // SAFETY: the file is so long and sealed against shrinking, and the mapping goes along.
            Wakings::written_to(unsafe { WakingRuns::at(map.addr()) }, map)
        };
        Ok(Client {
            client_id,
            token,
            pid,
            uid,
            name: pagefold_os::procfs::name(pid).unwrap_or_else(|| "?".into()),
            uffd,
            table,
            _map: map,
            table_fd,
            pagemap,
            journal_fd,
            tolerance_ppm: AtomicU64::new(0),
            service: Mutex::new(Service {
                journal,
                pending: Vec::new(),
                faulter: 0,
                moving: BTreeMap::new(),
                window: Window::new(CLUSTER_PAGES as u64),
                zeros: Window::new(ZERO_PAGES_MAX),
                cluster: vec![[0; PAGE_SIZE]; CLUSTER_PAGES].into_boxed_slice(),
                zero: Box::new([0; PAGE_SIZE]),
            }),
            waiting: AtomicU32::new(0),
            link: Mutex::new(None),
            socket: Mutex::new(None),
            counters: Counters::default(),
            past_counts: Mutex::default(),
            cpu_before_ns: OnceLock::new(),
            gone: AtomicBool::new(false),
            attached: Mutex::default(),
            lent: AtomicBool::new(false),
            lacks_memory: AtomicBool::new(false),
            rang_evictor: AtomicBool::new(false),
            moved_at_once: AtomicBool::new(false),
            eviction: Mutex::default(),
            idleness: Mutex::default(),
            wakings,
            limits: MemoryLimits::of(pid),
            leaving: AtomicU64::new(0),
            prefetcher,
            pending_children,
        })
    }

    /// How many of its pages are out: no more than the tier has of it, whatever the client wrote into its table.
    pub(crate) fn pages_out(&self, tier: &Tier) -> u64 {
        self.table.head().evicted.load(Ordering::Relaxed).min(tier.client_pages(self.client_id))
    }

    /// It was parked by this daemon or one before it, and neither unparked since nor, under a policy, found at work.
    pub(crate) fn is_parked(&self) -> bool {
        self.table.head().parked.load(Ordering::Relaxed) != 0
    }

    /// It is parked, or no more.
    pub(crate) fn set_parked(&self, is_parked: bool) {
        self.table.head().parked.store(is_parked.into(), Ordering::Relaxed);
    }

    /// The agent says that it has taken `said` nanoseconds of processor time since it began.
    pub(crate) fn note_agent_cpu(&self, said: u64) {
        let before = self.cpu_before_ns.get().copied().unwrap_or(0);
        crate::clients::agent_time::note_cpu_ns(&self.counters.agent_cpu_ns, self.pid, said.saturating_sub(before));
    }

    /// Tries for about `us` microseconds to take the owner lock of the residency map.
    pub(crate) fn take_owner_lock(&self, us: u64) -> bool {
        let end = sched::quick_monotonic_ns() + us * 1000;
        let mut turn = 0;
        loop {
            if self.table.try_lock(OWNER_DAEMON) {
                return true;
            }
            if sched::quick_monotonic_ns() > end {
                return false;
            }
            turn += 1;
            if turn < 20 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
        }
    }

    /// Locks `service` beside the client's own thread, which unlocks it for moments only and is asked to wait.
    pub(crate) fn take_service(&self) -> MutexGuard<'_, Service> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let soon = (0..SERVICE_TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.service.try_lock().ok()
        });
        let service = soon.unwrap_or_else(|| lock(&self.service));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        service
    }

    fn set(&self, start: u64, end: u64, state: u8) {
        for addr in (start..end).step_by(PAGE_SIZE) {
            self.table.set_state(addr, state);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pagefold_os::uffd::{self, Event};

    impl Client {
        /// Obeys `events` as if they had been read.
        pub(crate) fn obey(&self, service: &mut Service, tier: &Tier, events: &[Event]) {
            for (place, event) in events.iter().enumerate() {
                self.obey_event(service, tier, place, *event);
            }
        }
    }

    /// A fork waits for every reader of this process's fork events, and each of them sees it: one at a time, whatever it
    /// is for.
    pub(crate) static FORKING: Mutex<()> = Mutex::new(());

    /// What this process would hand over, and the table's mapping.
    pub(crate) fn handed(uffd: Uffd) -> (ClientDescriptors, Mapping) {
        let table = pagefold_os::memfd::create(residency_map::FILE_NAME, residency_map::FILE_BYTES as u64).unwrap();
        pagefold_os::memfd::add_seals(&table, pagefold_os::memfd::SEAL_SHRINK).unwrap();
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(table.raw(), 0, residency_map::FILE_BYTES, prot, libc::MAP_SHARED).unwrap();
        // SAFETY: of that length, and mapped beyond the call.
        unsafe { ResidencyMap::at(map.addr()) }.initialize();
        let pagemap = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).unwrap();
        (ClientDescriptors { uffd, table, pagemap }, map)
    }

    /// A client that is this process, with `pages` pages of memory that its descriptor watches; nothing, said loudly, if
    /// that may not be.
    pub(crate) fn own(features: u64, pages: u64) -> Option<(Client, Mapping)> {
        let features = features | uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_POISON;
        let device = uffd::open_device().ok();
        let Ok(uffd) = Uffd::new(device.as_ref(), features) else {
            eprintln!("SKIPPED: no userfaultfd with these features for us");
            return None;
        };
        let memory = Mapping::anonymous((pages * PAGE) as usize).unwrap();
        uffd.register(Range::pages_from(memory.addr(), pages), uffd::MODE_MISSING | uffd::MODE_WP).unwrap();
        let who = Identity { client_id: 1, token: 1, pid: std::process::id() as i32, uid: 0 };
        let pending_children = Arc::new(PendingChildren::new(Arc::default()));
        let journal = event_journal::create().unwrap();
        let prefetcher = Arc::new(Prefetcher::new().0);
        Some((Client::new(who, handed(uffd).0, journal, prefetcher, pending_children).unwrap(), memory))
    }

    /// The client as the next daemon takes it over from the keeper.
    pub(crate) fn successor(dead: Client, tier: &Tier) -> Client {
        let copy = |fd: &Fd| fd.duplicate().unwrap();
        let handed = ClientDescriptors {
            uffd: Uffd::from_fd(copy(dead.uffd.fd())),
            table: copy(&dead.table_fd),
            pagemap: copy(&dead.pagemap),
        };
        let who = Identity { client_id: dead.client_id, token: dead.token, pid: dead.pid, uid: dead.uid };
        let (prefetcher, children) = (dead.prefetcher.clone(), dead.pending_children.clone());
        let next = Client::new(who, handed, copy(&dead.journal_fd), prefetcher, children).unwrap();
        assert!(next.reconcile(tier));
        next
    }

    /// The descriptor of a process that is no more.
    ///
    /// It forks: a test that holds [`FORKING`] must not call this.
    pub(crate) fn of_an_ended_process() -> Uffd {
        let _alone = lock(&FORKING);
        let device = uffd::open_device().ok();
        let number =
            Mapping::file(-1, 0, PAGE as usize, libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS).unwrap();
        let number = number.addr() as *mut i32;
        // SAFETY: the child has memory of its own and our descriptors, makes system calls only, and ends.
        let uffd = unsafe {
            let child = libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0);
            if child == 0 {
                let made = Uffd::new(device.as_ref(), uffd::FEATURE_WP_ASYNC);
                number.write(made.as_ref().map_or(-1, |made| made.fd().raw()));
                std::mem::forget(made);
                libc::_exit(0);
            }
            assert_eq!(libc::waitpid(child as i32, std::ptr::null_mut(), 0), child as i32);
            Uffd::from_fd(Fd::from_raw(number.read()))
        };
        assert!(!uffd.is_alive());
        uffd
    }

    /// What an event of mremap(2) does.
    pub(crate) fn moved(client: &Client, tier: &Tier, from: Range, to: u64) {
        client.obey(&mut lock(&client.service), tier, &[Event::Remap { from, to }]);
    }

    /// The page that was out at `from` is awaited at `to`, and cannot have been brought in yet.
    pub(crate) fn await_moved(client: &Client, from: u64, to: u64) {
        lock(&client.service).moving.insert(to, from);
    }

    /// What the client's thread does next about it.
    pub(crate) fn bring_moved(client: &Client, tier: &Tier) {
        client.bring_moved(&mut lock(&client.service), tier);
    }
}
