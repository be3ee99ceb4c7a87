//! A client of the cold tier, and how its faults are served.
//!
//! One thread per client waits for its userfaultfd, so that a client that
//! faults in a storm takes its own share of the processor and nobody else's.
//! Everything that touches a page's state is done in one order, under the
//! client's `service` lock and the pact (see `agent::cold_table`):
//!
//! - a page comes back: copied in, then *resident* in the table, then its entry
//!   is discarded;
//! - a page that the program discarded: *resident* in the table before the next
//!   event is read, then its entry is discarded;
//! - only pages that are *out* have their entries discarded here, and only
//!   pages that are *resident* are stored by the [pump](super::pump).
//!
//! So no entry is discarded that a page will be asked for.

use super::Group;
use super::hand::Hand;
use super::link::ColdLink;
use super::place::Place;
use super::room::Room;
use crate::server::lock;
use pagefold_agent::cold_table::{self, FROZEN, OUT, PACT_DAEMON, RESIDENT, Table, VOID};
use pagefold_os::fd::{self, Fd};
use pagefold_os::mem::Mapping;
use pagefold_os::uffd::{self, Event, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, Page, Range, pagemap, sched};
use pagefold_tier::policy::Window;
use pagefold_tier::{LoadError, Tier};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;
/// Most pages that one fault brings back.
pub(super) const CLUSTER_PAGES: usize = 64;
/// Pages that lie beside each other and are fresh zeros are made at once up to this many.
const ZERO_PAGES_MAX: u64 = 256;
/// A window of so many pages or more is brought back by two hands: decompression is what takes the time.
const SHARED_FROM: u64 = 16;
/// Events read before the thread looks at anything else.
const EVENTS: usize = uffd::EVENTS_MAX;
/// A thread that found work looks for more for so long before it sleeps, in nanoseconds: a sleeping processor takes
/// longer to wake than a page takes to come back.
const SPIN_NS: u64 = 30_000;
/// Looks of who waits for a client's `service` before it sleeps: some hundred microseconds.
const SERVICE_TRIES: u32 = 10_000;
/// Pages loaded ahead before the thread looks whether somebody waits.
const AHEAD_AT_ONCE: usize = 8;
/// Lost pages of a client that get a line each; the counter has all. A client can claim as many as it likes.
const LOSSES_TOLD: u64 = 16;
/// Buckets of the histogram of faults.
pub const FAULT_BUCKETS: usize = 16;

/// What is being served of a client.
pub(super) struct Service {
    /// Faults that wait: the page's address and whether it was a write.
    pending: Vec<(u64, bool)>,
    /// Who faulted last, by its own namespace's number.
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
    pub(super) fn is_awaited(&self, page: u64) -> bool {
        self.moving.values().any(|from| from / PAGE == page)
    }

    /// True while entries lie under addresses that are no longer theirs.
    pub(super) fn is_moving(&self) -> bool {
        !self.moving.is_empty()
    }
}

/// What the client's thread has loaded ahead, while the program walks through what came last.
///
/// Loading needs no lock; that nothing left in the meantime and that a page is still out is looked at when it is used.
#[derive(Default)]
pub(super) struct Ahead {
    /// What the next fault will probably want.
    wanted: std::ops::Range<u64>,
    /// The first page that is here.
    first: u64,
    loaded: Vec<bool>,
    pages: Vec<Page>,
    /// [`Client::leaving`] before they were loaded.
    leaving: u64,
}

impl Ahead {
    /// Pages from `page` on that are here, for as long as `is_wanted`.
    fn run(&self, page: u64, is_wanted: impl Fn(u64) -> bool) -> &[Page] {
        let Some(place) = page.checked_sub(self.first).map(|place| place as usize) else { return &[] };
        let from = self.loaded.get(place..).unwrap_or_default();
        let len = from.iter().zip(page..).take_while(|(loaded, page)| **loaded && is_wanted(*page)).count();
        &self.pages[place.min(self.pages.len())..][..len]
    }
}

/// Counters of a client.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub pages_out_ever: AtomicU64,
    pub refaults: AtomicU64,
    pub pages_back: AtomicU64,
    pub zero_faults: AtomicU64,
    pub lost: AtomicU64,
    pub fault_ns: AtomicU64,
    pub fault_us: [AtomicU64; FAULT_BUCKETS],
    pub agent_cpu_ns: AtomicU64,
}

/// A client.
pub(super) struct Client {
    pub region: u32,
    pub token: u64,
    pub pid: i32,
    pub uid: u32,
    pub name: String,
    pub uffd: Uffd,
    pub table: Table,
    /// Keeps the table where it is.
    _map: Mapping,
    pub table_fd: Fd,
    pub pagemap: Fd,
    pub tolerance_ppm: AtomicU64,
    pub service: Mutex<Service>,
    /// How many wait for `service` beside the client's own thread.
    waiting: AtomicU32,
    /// The agent, if it is connected; held by whoever talks to it, and while pages go out or are brought back at once.
    /// The client's own thread never takes it: agents wait for that thread.
    pub link: Mutex<Option<ColdLink>>,
    /// The socket of `link`, to notice its end.
    pub socket: Mutex<Option<Arc<Fd>>>,
    pub counters: Counters,
    /// Nothing is to be done for it any more.
    pub gone: AtomicBool,
    pub parked: AtomicBool,
    /// It is merged live as well, and has its memory here until it is unparked.
    pub leased: AtomicBool,
    /// Memory of the client was refused by the kernel since the last look: its limit is reached.
    pub starved: AtomicBool,
    pub policy: Mutex<super::pump::Policy>,
    pub room: Room,
    /// Counts requests that pages be taken away, before each: what was loaded earlier may be old.
    pub leaving: AtomicU64,
    /// The group's second hand.
    hand: Arc<Hand>,
}

/// Who a client is.
#[derive(Clone, Copy)]
pub(super) struct Identity {
    /// Its number in the tier.
    pub region: u32,
    /// Tells it from others that had the number.
    pub token: u64,
    pub pid: i32,
    pub uid: u32,
}

/// What a client handed over.
pub(super) struct Handed {
    pub uffd: Uffd,
    pub table: Fd,
    pub pagemap: Fd,
}

/// What became of a fault.
enum Served {
    Done,
    /// An event must be read first, or memory found.
    Again,
}

impl Client {
    /// Takes what a client handed over.
    ///
    /// # Errors
    /// `EPROTO` if its table is none.
    pub(super) fn new(who: Identity, handed: Handed, hand: Arc<Hand>) -> Result<Client, Errno> {
        let Identity { region, token, pid, uid } = who;
        let Handed { uffd, table: table_fd, pagemap } = handed;
        let (len, _) = pagefold_os::memfd::len_and_inode(table_fd.raw())?;
        let seals = pagefold_os::memfd::seals(&table_fd)?;
        // Of ordinary pages: huge ones may run out under whoever maps them, and that is SIGBUS.
        let small = pagefold_os::memfd::page_size(table_fd.raw())? == PAGE;
        if len < cold_table::LEN as u64 || seals & pagefold_os::memfd::SEAL_SHRINK == 0 || !small {
            return Err(Errno(libc::EPROTO));
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(table_fd.raw(), 0, cold_table::LEN, prot, libc::MAP_SHARED)?;
        // SAFETY: the file is sealed against shrinking, and the mapping lives as long as the client.
        let table = unsafe { Table::at(map.addr()) };
        if !table.is_table() {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Client {
            region,
            token,
            pid,
            uid,
            name: pagefold_os::procfs::name(pid).unwrap_or_else(|| "?".into()),
            uffd,
            table,
            _map: map,
            table_fd,
            pagemap,
            tolerance_ppm: AtomicU64::new(0),
            service: Mutex::new(Service {
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
            gone: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            leased: AtomicBool::new(false),
            starved: AtomicBool::new(false),
            policy: Mutex::default(),
            room: Room::of(pid),
            leaving: AtomicU64::new(0),
            hand,
        })
    }

    pub(super) fn pages_out(&self) -> u64 {
        self.table.head().out.load(Ordering::Relaxed)
    }

    /// Tries for about `us` microseconds to take the pact.
    pub(super) fn take_pact(&self, us: u64) -> bool {
        let end = sched::quick_monotonic_ns() + us * 1000;
        let mut turn = 0;
        loop {
            if self.table.try_pact(PACT_DAEMON) {
                return true;
            }
            if sched::quick_monotonic_ns() > end {
                return false;
            }
            turn += 1;
            if turn < 20 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
        }
    }

    /// The client's thread: serves faults until the client has ended.
    pub(super) fn run(self: &Arc<Client>, group: &Arc<Group>) {
        let mut patience = 8u32;
        let mut ahead = Ahead::default();
        let mut place = Place::new(self.pid);
        while !self.gone.load(Ordering::Acquire) {
            self.table.head().beat.fetch_add(1, Ordering::Release);
            let socket = lock(&self.socket).clone();
            let mut polls = [
                libc::pollfd { fd: self.uffd.fd().raw(), events: libc::POLLIN, revents: 0 },
                libc::pollfd {
                    fd: socket.as_ref().map_or(-1, |socket| socket.raw()),
                    events: libc::POLLRDHUP,
                    revents: 0,
                },
            ];
            let waiting = !lock(&self.service).pending.is_empty();
            let ready = fd::poll(&mut polls, if waiting { 1 } else { group.awake.pause_ms(500) });
            if ready == Ok(0) {
                group.awake.idle(sched::quick_monotonic_ns());
                place.rest();
            }
            if polls[1].revents != 0 || (ready == Ok(0) && socket.is_none()) {
                self.hung_up(group, socket.as_ref());
            }
            if polls[0].revents == 0 && !waiting {
                continue;
            }
            // Looks for more for a while when that paid lately.
            let mut spin_end = 0;
            let mut sum = 0;
            loop {
                let (served, faulter) = self.serve(&group.tier, &mut ahead);
                sum += served;
                let now = sched::quick_monotonic_ns();
                if served > 0 {
                    group.awake.answered(served as u32, now);
                    if faulter != 0 {
                        place.served(served, faulter, now);
                    }
                }
                if place.follows() {
                    break;
                }
                self.load_ahead(&group.tier, &mut ahead);
                let now = sched::quick_monotonic_ns();
                if served > 0 {
                    spin_end = if patience > 0 { now + SPIN_NS } else { 0 };
                    patience = (patience + 1).min(16);
                } else if now > spin_end {
                    patience = patience.saturating_sub(1);
                    if patience == 0 && now.is_multiple_of(64) {
                        patience = 2;
                    }
                    break;
                }
                std::hint::spin_loop();
            }
            if self.room.is_short() || self.starved.load(Ordering::Relaxed) {
                group.ring();
            }
            if sum == 0 {
                // The client keeps the pact, or has no memory: at its own cost.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // Nobody else may be there to see that it is over; who still needs it has it back at once.
        group.awake.idle(u64::MAX);
    }

    /// The agent's connection has ended: did the process, or did it only leave?
    fn hung_up(&self, group: &Group, socket: Option<&Arc<Fd>>) {
        if let Some(socket) = socket {
            let mut current = lock(&self.socket);
            if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, socket)) {
                *current = None;
            }
        }
        let left = self.table.head().region.load(Ordering::Acquire) == 0;
        if left || !self.uffd.is_alive() {
            group.remove(self.region);
        }
    }

    /// Takes `service`, as somebody beside the client's own thread, which lets it go for moments only and is asked to wait.
    pub(super) fn take_service(&self) -> MutexGuard<'_, Service> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let soon = (0..SERVICE_TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.service.try_lock().ok()
        });
        let service = soon.unwrap_or_else(|| lock(&self.service));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        service
    }

    /// Reads and serves what waits; returns how many faults and events that were, and the thread that faulted last.
    pub(super) fn serve(&self, tier: &Tier, ahead: &mut Ahead) -> (usize, i32) {
        // A mutex is not fair: who comes again and again gets it again and again.
        if self.waiting.load(Ordering::Relaxed) > 0 {
            let patience = sched::quick_monotonic_ns() + SPIN_NS;
            while self.waiting.load(Ordering::Relaxed) > 0 && sched::quick_monotonic_ns() < patience {
                std::hint::spin_loop();
            }
        }
        let mut service = lock(&self.service);
        let mut served = 0;
        if !self.take_pact(200) {
            return (0, 0);
        }
        let began = sched::quick_monotonic_ns();
        let got = self.read_events(&mut service, tier);
        served += got;
        self.bring_moved(&mut service, tier);
        let mut waiting = std::mem::take(&mut service.pending);
        let count = waiting.len();
        waiting.retain(|(addr, write)| match self.serve_fault(&mut service, tier, ahead, *addr, *write) {
            Served::Done => {
                let ns = sched::quick_monotonic_ns() - began;
                self.counters.fault_ns.fetch_add(ns, Ordering::Relaxed);
                let bucket = (64 - (ns / 1000).leading_zeros() as usize).min(FAULT_BUCKETS - 1);
                self.counters.fault_us[bucket].fetch_add(1, Ordering::Relaxed);
                served += 1;
                false
            }
            Served::Again => true,
        });
        // All of them waiting for memory: no use in asking again at once.
        let stuck = count > 0 && waiting.len() == count && got == 0;
        service.pending.append(&mut waiting);
        self.table.free_pact();
        if stuck {
            drop(service);
            std::thread::sleep(Duration::from_micros(200));
            return (0, 0);
        }
        (served, service.faulter)
    }

    /// Reads what events there are, obeys those that take pages away, and keeps the faults.
    fn read_events(&self, service: &mut Service, tier: &Tier) -> usize {
        let mut events = [Event::Other(0); EVENTS];
        let got = self.uffd.read_events(&mut events).unwrap_or(0);
        let events = &events[..got];
        // What takes pages away comes first: the kernel delivers faults before it, and they wait anyway.
        for event in events {
            match *event {
                Event::Remove(range) | Event::Unmap(range) => self.forget(service, tier, range),
                Event::Remap { from, to } => self.moved(service, tier, from, to),
                Event::Fork(fd) => self.forked(service, tier, fd),
                Event::PageFault { .. } | Event::Other(_) => {}
            }
        }
        for event in events {
            if let Event::PageFault { addr, write, thread } = *event {
                let addr = addr & !(PAGE - 1);
                service.faulter = thread;
                match service.pending.iter_mut().find(|(other, _)| *other == addr) {
                    Some((_, other)) => *other |= write,
                    None => service.pending.push((addr, write)),
                }
            }
        }
        got
    }

    /// The pages of `range` are the program's nothing from now on.
    fn forget(&self, service: &mut Service, tier: &Tier, range: Range) {
        if range.is_empty() {
            return;
        }
        self.table.note_removed(range, sched::quick_monotonic_ns());
        self.table.for_each_run(range.start, range.end, FROZEN, |start, end| self.set(start, end, VOID));
        self.table.for_each_run(range.start, range.end, OUT, |start, end| {
            self.set(start, end, RESIDENT);
            tier.discard(self.region, start / PAGE..end / PAGE);
        });
        if service.is_moving() {
            let void: Vec<u64> = service.moving.range(range.start..range.end).map(|(to, _)| *to).collect();
            for to in void {
                if let Some(from) = service.moving.remove(&to) {
                    tier.discard(self.region, from / PAGE..from / PAGE + 1);
                }
            }
        }
    }

    fn set(&self, start: u64, end: u64, state: u8) {
        for addr in (start..end).step_by(PAGE_SIZE) {
            self.table.set_state(addr, state);
        }
    }

    /// The pages of `from` are at `to` now; those that are out must come in there.
    fn moved(&self, service: &mut Service, tier: &Tier, from: Range, to: u64) {
        let target = Range { start: to, end: to.saturating_add(from.len()) };
        // Whatever was known of the target's addresses is of an earlier mapping.
        self.forget(service, tier, target);
        let again: Vec<(u64, u64)> = service.moving.range(from.start..from.end).map(|(to, at)| (*to, *at)).collect();
        for (was, at) in again {
            service.moving.remove(&was);
            service.moving.insert(to + (was - from.start), at);
        }
        self.table.for_each_run(from.start, from.end, OUT, |start, end| {
            for addr in (start..end).step_by(PAGE_SIZE) {
                self.table.set_state(addr, RESIDENT);
                service.moving.insert(to + (addr - from.start), addr);
            }
        });
    }

    /// Brings in what moved; what must wait stays in the list.
    fn bring_moved(&self, service: &mut Service, tier: &Tier) {
        let Service { moving, cluster, .. } = service;
        moving.retain(|to, from| {
            let page = &mut cluster[0];
            if let Err(error) = tier.load(self.region, *from / PAGE, page) {
                self.lose(tier, *to, &error);
            } else {
                // SAFETY: the page is ours.
                let (_, error) = unsafe { self.uffd.copy(*to, page.as_ptr() as u64, PAGE, 0) };
                if matches!(error, Some(Errno(libc::EAGAIN | libc::ENOMEM))) {
                    return true;
                }
            }
            tier.discard(self.region, *from / PAGE..*from / PAGE + 1);
            false
        });
    }

    /// The program forked by a call that nobody saw: the child gets its copies now, before it can miss them.
    ///
    /// The child's descriptor is closed then, which makes its memory the kernel's own and wakes it.
    fn forked(&self, service: &mut Service, tier: &Tier, fd: i32) {
        // SAFETY: the kernel made the descriptor for us when the event was read.
        let child = Uffd::from_fd(unsafe { Fd::from_raw(fd) });
        let Service { moving, cluster, .. } = service;
        let page = &mut cluster[0];
        // Under one address the tier has it, at the other the child needs it.
        let mut give = |from: u64, to: u64| {
            if tier.load(self.region, from / PAGE, page).is_err() {
                child.poison(Range::pages_from(to, 1), 0);
                return;
            }
            for _ in 0..1000 {
                // SAFETY: the page is ours.
                let (_, error) = unsafe { child.copy(to, page.as_ptr() as u64, PAGE, 0) };
                match error {
                    Some(Errno(libc::EAGAIN | libc::ENOMEM)) => std::thread::sleep(Duration::from_micros(100)),
                    // Done, or not the child's (MADV_DONTFORK).
                    _ => break,
                }
            }
        };
        self.table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| {
            (start..end).step_by(PAGE_SIZE).for_each(|addr| give(addr, addr));
        });
        // Those that the parent still waits for after an mremap(2) are out as well, and nothing at their new place says so.
        moving.iter().for_each(|(to, from)| give(*from, *to));
    }

    fn serve_fault(&self, service: &mut Service, tier: &Tier, ahead: &mut Ahead, addr: u64, write: bool) -> Served {
        if service.moving.contains_key(&addr) {
            return Served::Again;
        }
        match self.table.state(addr) {
            OUT => self.bring_fault(service, tier, ahead, addr),
            // In the agent's hands, which wakes whoever waits.
            FROZEN | VOID => Served::Done,
            _ => self.bring_zero(service, addr, write),
        }
    }

    /// A page that never was, or was discarded: zeros, with its absent neighbours if the program walks upwards.
    fn bring_zero(&self, service: &mut Service, addr: u64, write: bool) -> Served {
        self.counters.zero_faults.fetch_add(1, Ordering::Relaxed);
        let ahead = service.zeros.fault(addr / PAGE);
        let mut end = addr + PAGE;
        while end < addr + ahead * PAGE
            && self.table.state(end) == RESIDENT
            && (service.moving.is_empty() || !service.moving.contains_key(&end))
        {
            end += PAGE;
        }
        let mut from = addr;
        if write {
            if self.grant(1) == 0 {
                return self.starve();
            }
            // SAFETY: the page of zeros is ours.
            let (_, error) = unsafe { self.uffd.copy(addr, service.zero.as_ptr() as u64, PAGE, 0) };
            match error {
                Some(Errno(libc::EAGAIN)) => return Served::Again,
                Some(Errno(libc::ENOMEM)) => return self.starve(),
                None => {}
                Some(_) => {
                    let _ = self.uffd.wake(Range::pages_from(addr, 1));
                    return Served::Done;
                }
            }
            from += PAGE;
            if from == end {
                return Served::Done;
            }
        }
        let (done, error) = self.uffd.zero(Range { start: from, end }, 0);
        if done > 0 || write {
            return Served::Done;
        }
        match error {
            Some(Errno(libc::EAGAIN)) => Served::Again,
            Some(Errno(libc::ENOMEM)) => self.starve(),
            _ => {
                // There already; or marked for write protection, which a copy takes for empty; or the run lies in
                // several mappings.
                // SAFETY: the page of zeros is ours.
                let (_, error) = unsafe { self.uffd.copy(addr, service.zero.as_ptr() as u64, PAGE, 0) };
                match error {
                    Some(Errno(libc::EAGAIN)) => return Served::Again,
                    Some(Errno(libc::ENOMEM)) => return self.starve(),
                    _ => {}
                }
                let _ = self.uffd.wake(Range::pages_from(addr, 1));
                Served::Done
            }
        }
    }

    /// How many of `want` pages may come back now.
    ///
    /// Who holds up all that could go out until they are back would wait for itself: it gets them, and is told what room
    /// there is.
    fn grant(&self, want: u64) -> u64 {
        let granted = self.room.grant(want);
        let head = self.table.head();
        head.set_room(self.room.free());
        if head.bringing.load(Ordering::SeqCst) > 0 { want } else { granted }
    }

    /// The kernel gives the client no memory, or would soon: its limit is reached. The access waits until something else
    /// went out.
    fn starve(&self) -> Served {
        self.starved.store(true, Ordering::Relaxed);
        Served::Again
    }

    /// A page that is out comes back, and then its neighbours, as many as the pattern of faults says.
    fn bring_fault(&self, service: &mut Service, tier: &Tier, ahead: &mut Ahead, addr: u64) -> Served {
        let page = addr / PAGE;
        let want = service.window.fault(page).min(CLUSTER_PAGES as u64);
        let want = match self.grant(want) {
            0 => return self.starve(),
            granted if granted < want => 1,
            _ => want,
        };
        let first = page / want * want;
        // The page itself at once: who waits goes on while its neighbours come.
        if let Err(error) = tier.load(self.region, page, &mut service.cluster[0]) {
            return self.lose(tier, addr, &error);
        }
        self.counters.refaults.fetch_add(1, Ordering::Relaxed);
        if !self.copy_run(tier, page, page + 1, service.cluster[0].as_ptr() as u64).contains(&page) {
            return Served::Again;
        }
        // The other half goes to the second hand, if it is free.
        let (mut at, mut end) = (first, first + want);
        if want >= SHARED_FROM {
            let middle = first + want / 2;
            let other = if page < middle { middle..end } else { first..middle };
            if self.hand.give(self.region, other) {
                (at, end) = if page < middle { (first, middle) } else { (middle, end) };
            }
        }
        if ahead.leaving != self.leaving.load(Ordering::SeqCst) {
            // A page that came and went again since has another content.
            ahead.loaded.clear();
        }
        while at < end {
            let ready = ahead.run(at, |page| page < end && self.table.state(page * PAGE) == OUT);
            if !ready.is_empty() {
                let len = ready.len() as u64;
                if self.copy_run(tier, at, at + len, ready.as_ptr() as u64).end < at + len {
                    break;
                }
                at += len;
                continue;
            }
            // Entries of pages that are not out are nobody's. One that cannot be read waits for its own fault.
            let mut len = 0;
            while at + len < end
                && self.table.state((at + len) * PAGE) == OUT
                && tier.load_quietly(self.region, at + len, &mut service.cluster[len as usize])
            {
                len += 1;
            }
            if len > 0 && self.copy_run(tier, at, at + len, service.cluster[0].as_ptr() as u64).end < at + len {
                break;
            }
            at += len.max(1);
        }
        if want == CLUSTER_PAGES as u64 {
            // Our half of the next window.
            ahead.wanted = first + want..first + want + want / 2;
        }
        Served::Done
    }

    /// Loads what the next fault will probably want, until somebody waits.
    fn load_ahead(&self, tier: &Tier, ahead: &mut Ahead) {
        let wanted = std::mem::take(&mut ahead.wanted);
        if wanted.is_empty() {
            return;
        }
        ahead.leaving = self.leaving.load(Ordering::SeqCst);
        ahead.first = wanted.start;
        ahead.loaded.clear();
        ahead.pages.resize(CLUSTER_PAGES / 2, [0; PAGE_SIZE]);
        for (page, place) in wanted.zip(&mut ahead.pages) {
            if ahead.loaded.len() % AHEAD_AT_ONCE == AHEAD_AT_ONCE - 1 {
                let mut poll = [libc::pollfd { fd: self.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                if fd::poll(&mut poll, 0) != Ok(0) {
                    return;
                }
            }
            ahead.loaded.push(self.table.state(page * PAGE) == OUT && tier.load_quietly(self.region, page, place));
        }
    }

    /// Brings back what of `pages`, at most [`CLUSTER_PAGES`], is out; beside the client's own thread. What cannot be brought
    /// now is left to its own fault.
    pub(super) fn bring_ahead(&self, tier: &Tier, pages: std::ops::Range<u64>, buffer: &mut [Page]) {
        let leaving = self.leaving.load(Ordering::SeqCst);
        // Loading needs no lock: what is true at the end counts.
        let load = |(page, place): (u64, &mut Page)| {
            self.table.state(page * PAGE) == OUT && tier.load_quietly(self.region, page, place)
        };
        let loaded: Vec<bool> = pages.clone().zip(&mut *buffer).map(load).collect();
        let _service = self.take_service();
        // A page that came and went again meanwhile has another content.
        if self.leaving.load(Ordering::SeqCst) == leaving && self.take_pact(200) {
            self.copy_loaded(tier, pages, &loaded, buffer);
            self.table.free_pact();
        }
    }

    /// Copies those of `pages` to the client that were loaded into `buffer` and are still out; true if all came. The
    /// caller holds `service` and the pact.
    pub(super) fn copy_loaded(
        &self,
        tier: &Tier,
        pages: std::ops::Range<u64>,
        loaded: &[bool],
        buffer: &[Page],
    ) -> bool {
        let place = |page: u64| (page - pages.start) as usize;
        let ready = |page: u64| loaded[place(page)] && self.table.state(page * PAGE) == OUT;
        let mut all = true;
        let mut page = pages.start;
        while page < pages.end {
            if !ready(page) {
                page += 1;
                continue;
            }
            let from = page;
            while page < pages.end && ready(page) {
                page += 1;
            }
            let came = self.copy_run(tier, from, page, buffer[place(from)..place(page)].as_ptr() as u64);
            all &= came.end == page;
        }
        all
    }

    /// Copies pages `start..end`, which are out, to the client and settles the books; returns the part that is done.
    pub(super) fn copy_run(&self, tier: &Tier, start: u64, end: u64, source: u64) -> std::ops::Range<u64> {
        let mut at = start;
        // A copy stays within one mapping; a run may lie in several. Then page by page.
        let mut single = false;
        while at < end {
            let len = if single { 1 } else { end - at };
            // SAFETY: the caller's pages are ours and lie one behind the other from `source`.
            let (done, error) = unsafe { self.uffd.copy(at * PAGE, source + (at - start) * PAGE, len * PAGE, 0) };
            let came = at + done / PAGE;
            if came > at {
                self.settle(tier, at, came);
                at = came;
            }
            match error {
                None => {}
                // It is there: somebody was quicker, or a predecessor died right after the copy.
                Some(Errno(libc::EEXIST)) => {
                    self.settle(tier, at, at + 1);
                    let _ = self.uffd.wake(Range::pages_from(at * PAGE, 1));
                    at += 1;
                }
                Some(Errno(libc::ENOMEM)) => {
                    self.starved.store(true, Ordering::Relaxed);
                    return start..at;
                }
                Some(Errno(libc::EAGAIN)) => return start..at,
                Some(Errno(libc::ESRCH)) => return start..end,
                Some(_) if !single => single = true,
                // No mapping of ours there: an event will say so.
                Some(_) => {
                    let _ = self.uffd.wake(Range::pages_from(at * PAGE, 1));
                    at += 1;
                }
            }
        }
        start..at
    }

    fn settle(&self, tier: &Tier, start: u64, end: u64) {
        self.set(start * PAGE, end * PAGE, RESIDENT);
        tier.discard(self.region, start..end);
        self.counters.pages_back.fetch_add(end - start, Ordering::Relaxed);
    }

    /// A page cannot be brought back: SIGBUS for who touches it, never other bytes.
    fn lose(&self, tier: &Tier, addr: u64, error: &LoadError) -> Served {
        let (_, result) = self.uffd.poison(Range::pages_from(addr, 1), 0);
        if result == Some(Errno(libc::EAGAIN)) {
            return Served::Again;
        }
        if self.counters.lost.load(Ordering::Relaxed) < LOSSES_TOLD {
            eprintln!(
                "pagefold: {} ({}): the page at {addr:#x} is lost ({error}); an access to it ends in SIGBUS",
                self.name, self.pid
            );
        }
        if self.table.set_state(addr, RESIDENT) == OUT {
            tier.discard(self.region, addr / PAGE..addr / PAGE + 1);
        }
        let _ = self.uffd.wake(Range::pages_from(addr, 1));
        self.counters.lost.fetch_add(1, Ordering::Relaxed);
        self.table.head().lost.fetch_add(1, Ordering::Relaxed);
        Served::Done
    }

    /// Makes books and world agree after another daemon's death or an agent's new greeting: what that one began is void.
    ///
    /// Entries of pages that are not out are discarded; pages that are out and here are here; everybody who waits for an
    /// event that died with its reader faults again.
    pub(super) fn reconcile(&self, tier: &Tier) -> bool {
        let mut service = lock(&self.service);
        // A dead daemon may have held it. An agent that holds it will give it back soon.
        let head = self.table.head();
        let _ = head.pact.compare_exchange(PACT_DAEMON, 0, Ordering::AcqRel, Ordering::Relaxed);
        if !self.take_pact(2_000_000) {
            return false;
        }
        head.epoch.fetch_add(1, Ordering::SeqCst);
        // A discard that is under way: the event may have died with its reader.
        let end = head.void_end.load(Ordering::SeqCst);
        let start = head.void_start.load(Ordering::Relaxed);
        if start < end && end < 1 << 47 {
            self.forget(&mut service, tier, Range { start, end });
        }
        self.find_present(tier);
        let mut from = 0;
        loop {
            let stored = tier.neighbours(self.region, from, 4096);
            let Some(last) = stored.last() else { break };
            from = last + 1;
            for page in stored {
                if self.table.state(page * PAGE) != OUT && !service.is_awaited(page) {
                    tier.discard(self.region, page..page + 1);
                }
            }
        }
        // The count may have been between two stores.
        let mut out = 0;
        self.table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| out += (end - start) / PAGE);
        head.out.store(out, Ordering::Relaxed);
        self.table.free_pact();
        drop(service);
        self.wake_all();
        true
    }

    /// Pages that were copied in, but not yet called resident, by a daemon that died.
    fn find_present(&self, tier: &Tier) {
        let query = pagemap::Query {
            // Not what is in swap: marks without a page count as that.
            all_of: pagemap::PRESENT,
            report: pagemap::PRESENT,
            ..Default::default()
        };
        let mut found = [pagemap::Region::default(); 64];
        let mut failed = false;
        // Run by run: a table may claim more of them than we want to hold.
        self.table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| {
            let mut start = start;
            while start < end && !failed {
                let Ok((count, walked)) = pagemap::scan(&self.pagemap, Range { start, end }, query, &mut found) else {
                    failed = true;
                    return;
                };
                for region in &found[..count] {
                    self.settle(tier, region.start / PAGE, region.end / PAGE);
                }
                if walked <= start {
                    break;
                }
                start = walked;
            }
        });
    }

    /// Wakes everybody who waits in memory of ours; who must go on waiting faults again.
    pub(super) fn wake_all(&self) {
        self.table.for_each_chunk(|base, _| {
            let _ = self.uffd.wake(Range { start: base, end: base + cold_table::CHUNK_BYTES });
        });
        // Fresh memory of registered ranges may lie in chunks that the table does not have.
        let everything = Range { start: 1 << 20, end: (1 << 47) - PAGE };
        let _ = self.uffd.wake(everything);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What this process would hand over, and the table's mapping.
    pub(crate) fn handed(uffd: Uffd) -> (Handed, Mapping) {
        let table = pagefold_os::memfd::create(cold_table::NAME, cold_table::LEN as u64).unwrap();
        pagefold_os::memfd::add_seals(&table, pagefold_os::memfd::SEAL_SHRINK).unwrap();
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(table.raw(), 0, cold_table::LEN, prot, libc::MAP_SHARED).unwrap();
        // SAFETY: of that length, and mapped beyond the call.
        unsafe { Table::at(map.addr()) }.begin();
        let pagemap = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).unwrap();
        (Handed { uffd, table, pagemap }, map)
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
        let who = Identity { region: 1, token: 1, pid: std::process::id() as i32, uid: 0 };
        Some((Client::new(who, handed(uffd).0, Arc::new(Hand::new().0)).unwrap(), memory))
    }

    /// What an event of mremap(2) does.
    pub(crate) fn moved(client: &Client, tier: &Tier, from: Range, to: u64) {
        client.moved(&mut lock(&client.service), tier, from, to);
    }

    /// What the client's thread does next about it.
    pub(crate) fn bring_moved(client: &Client, tier: &Tier) {
        client.bring_moved(&mut lock(&client.service), tier);
    }

    /// A forked child has what its parent moved by mremap(2) and has not got back yet.
    #[test]
    fn a_child_has_pages_that_were_on_the_move() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_FORK, 3) else { return };
        let config = pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() };
        let tier = Tier::create(config, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        // Page 1 is out, and page 2 was when it lay elsewhere.
        let elsewhere = 1 << 30;
        for (addr, byte) in [(page_at(1), 7), (elsewhere, 8)] {
            let page: Page = std::array::from_fn(|at| if at % 2 == 0 { byte } else { at as u8 });
            tier.store(client.region, addr / PAGE, &page, pagefold_tier::Effort::Fast).unwrap();
        }
        client.table.find_or_add(page_at(1)).unwrap();
        client.table.set_state(page_at(1), OUT);
        lock(&client.service).moving.insert(page_at(2), elsewhere);
        // The reader must be there when the fork waits for it.
        let forked = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                fd::poll(&mut polls, 20_000).unwrap();
                let mut service = lock(&client.service);
                client.read_events(&mut service, &tier)
            });
            // By a bare call: fork(3) holds the allocator's locks meanwhile, which the reader may want.
            // SAFETY: the child reads memory and ends.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
            if child == 0 {
                // SAFETY: mapped and readable.
                let byte = |number: u64| unsafe { core::ptr::read_volatile(page_at(number) as *const u8) };
                let seen = i32::from(byte(1) == 7) | i32::from(byte(2) == 8) << 1 | i32::from(byte(0) == 0) << 2;
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(seen) };
            }
            assert_eq!(reader.join().unwrap(), 1, "no event of the fork");
            child
        });
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(forked, &mut status, 0) }, forked);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7), "bits of pages that were right");
    }

    #[test]
    fn what_was_loaded_ahead_ends_where_something_is_missing() {
        let mut ahead = Ahead { first: 64, ..Ahead::default() };
        let all = |_| true;
        assert!(ahead.run(64, all).is_empty());
        ahead.pages = (0..4).map(|page| [page; PAGE_SIZE]).collect();
        ahead.loaded = vec![true, true, false, true];
        let run = |page: u64, is_wanted: &dyn Fn(u64) -> bool| -> Vec<u8> {
            ahead.run(page, is_wanted).iter().map(|page| page[0]).collect()
        };
        assert_eq!(run(64, &all), [0, 1]);
        assert_eq!(run(65, &all), [1]);
        assert!(run(66, &all).is_empty());
        assert_eq!(run(67, &all), [3]);
        assert!([63, 68, 1000].iter().all(|page| run(*page, &all).is_empty()));
        assert_eq!(run(64, &|page| page != 65), [0]);
    }
}
