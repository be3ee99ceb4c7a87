//! The agent of a client whose cold pages go to the tier (`pagefold run --cold`).
//!
//! One thread as in [`engine`](crate::engine), with a connection of its own
//! kind. The daemon serves the faults; what only the process itself can do is
//! here: copy pages out, and take those away that did not change since.
//!
//! **A page leaves in two steps.** `ColdCopy` copies it to the channel while
//! the program goes on. The daemon stores the copy. `ColdDrop` then freezes the
//! page (`UFFDIO_MOVE` to the staging area), compares it with the copy, and
//! only if they are equal says in the table that the page is out, and lets the
//! frozen page go. So an access waits for a comparison, never for a compressor,
//! and the page is in the tier before it is taken from the program. Pages that
//! differ, and those that the kernel will not move (pinned, shared by a fork),
//! stay.
//!
//! Guard, then pact (see [`cold_table`]): in this order.
//!
//! **A lease.** A client that is merged live becomes a client of the tier as well when it is parked: a second thread then
//! does what the only one of a cold client does, for the plain memory, which the other thread leaves alone meanwhile. What
//! is merged stays merged.

use crate::cold_table::{self, FROZEN, OUT, PACT_AGENT, RESIDENT, Table, VOID};
use crate::engine::{
    COLD_AGENT, Maps, SHARED, TAKEN_MS, Thread, begin_thread, exit_thread, for_each_plain, input, is_left_alone,
    leave_if_alone, list_plain, look_around, read_settings, wait_for_answer, write_out,
};
use crate::wire::{
    self, CHANNEL_LEN, CHANNEL_OUT, CHANNEL_PAGES, DROP_BUSY, DropEntry, FETCH_PAGES_MAX, LIST_MAX, Op, Packet,
    RegionEntry,
};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range, mem, memfd, sched, sock, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

/// How long daemon and keeper must both be out of reach, and no daemon serve the table, before pages that are out count as
/// lost, in nanoseconds.
const LOST_NS: u64 = 10_000_000_000;
/// Pause between attempts to reach a daemon, in milliseconds.
const RECONNECT_MS: i32 = 50;
/// A chunk from which the program discarded pages is left alone for so long, in nanoseconds: the thread that does it
/// through a raw system call acts a moment after the daemon heard of it.
const REMOVED_NS: u64 = 1_000_000_000;
/// How often a move that says "try again" is tried again before the page counts as pinned.
const MOVE_TRIES: u32 = 64;

/// Set before the thread starts: this process's cold pages go to the tier.
pub static COLD: AtomicBool = AtomicBool::new(false);
/// Share of run time that may be lost to refaults, in millionths; 0 for the daemon's default.
pub static TOLERANCE_PPM: AtomicU64 = AtomicU64::new(0);
/// Limit of the domain's tier in bytes, if this client is its first; 0 for the daemon's default.
pub static TIER_MAX: AtomicU64 = AtomicU64::new(0);

/// The thread of a lease.
static SECOND: Thread = Thread::new();
/// Where frozen pages wait, 0 if there is no such place.
pub(crate) static STAGING: AtomicU64 = AtomicU64::new(0);
/// 0 no lease, 1 leased, 2 asked to end.
static LEASE: AtomicU32 = AtomicU32::new(0);

/// Becomes a client of the tier beside live merging, once that has let go of the plain memory by `give_up`.
///
/// # Errors
/// `EBUSY` while the lease before has not ended; `EAGAIN` if there is no memory for the thread; as `give_up`.
pub(crate) fn lease(give_up: impl FnOnce() -> Result<()>) -> Result<()> {
    if !SECOND.is_gone() || LEASE.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return Err(Errno(libc::EBUSY));
    }
    let leased = give_up().and_then(|()| if SECOND.start(second_main) { Ok(()) } else { Err(Errno(libc::EAGAIN)) });
    if leased.is_err() {
        LEASE.store(0, Ordering::Release);
        // All is to be watched again.
        SHARED.changed();
    }
    leased
}

/// True while the plain memory is the tier's.
pub(crate) fn is_leased() -> bool {
    LEASE.load(Ordering::Acquire) != 0
}

/// Asks for the memory back; the generation changes when it is.
pub(crate) fn ask_end_of_lease() {
    let _ = LEASE.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire);
}

/// Asks for the memory back and waits until it is.
pub(crate) fn end_lease() {
    ask_end_of_lease();
    SECOND.wait();
}

pub(crate) fn has_second_thread() -> bool {
    !SECOND.is_gone()
}

pub(crate) fn second_thread() -> &'static Thread {
    &SECOND
}

extern "C" fn second_main() -> ! {
    begin_thread(c"pagefold-cold");
    serve_while(&LEASE);
    LEASE.store(0, Ordering::Release);
    // All is to be watched again.
    SHARED.changed();
    exit_thread()
}

/// What the tables of earlier leases knew of discards: who was told that his is heard may act in the lease behind.
static REMOVALS: [AtomicU64; cold_table::OTHERS] = [const { AtomicU64::new(0) }; cold_table::OTHERS];

/// Where the table is mapped in this process, 0 if it is not.
static TABLE: AtomicU64 = AtomicU64::new(0);

fn table() -> Option<Table> {
    match TABLE.load(Ordering::Acquire) {
        0 => None,
        // SAFETY: stored once the mapping is there, which stays as long as the guard is held; who asks holds that.
        base => Some(unsafe { Table::at(base) }),
    }
}

/// What the agent keeps over all its connections.
struct Cold {
    /// The process's mappings.
    maps: Maps,
    /// Holds the managed ranges.
    hold: Uffd,
    /// True until a daemon has enabled `hold`.
    bare: bool,
    /// Holds the staging area only, sends no events.
    mover: Option<Uffd>,
    staging: Option<mem::Mapping>,
    table_fd: Fd,
    table: Table,
}

struct Connection {
    socket: Fd,
    channel_fd: Fd,
    channel: mem::Mapping,
    epoch: u32,
}

/// Body of a cold client's only thread; never returns.
pub(crate) fn run() -> ! {
    serve_while(&SHARED.phase);
    exit_thread()
}

/// Serves daemons for as long as `phase` is 1, then brings everything back.
fn serve_while(phase: &AtomicU32) {
    let goes_on = || phase.load(Ordering::Acquire) == 1;
    let mut cold: Option<Cold> = None;
    let (mut alone_since, mut heard) = (0, 0);
    while goes_on() {
        match connect(&mut cold, phase) {
            Ok(mut connection) => {
                alone_since = 0;
                if let Some(cold) = &mut cold {
                    let _ = cold.serve(&mut connection, phase);
                }
                if !goes_on() {
                    // Before the connection ends: its end makes the daemon look.
                    cold.take().into_iter().for_each(Cold::leave);
                    break;
                }
            }
            Err(Errno(errno)) => SHARED.error.store(errno, Ordering::Relaxed),
        }
        leave_if_alone();
        if goes_on() {
            let _ = pagefold_os::fd::poll(&mut [], RECONNECT_MS);
        }
        let Some(held) = &cold else { continue };
        // Who lives may still bring the pages back: a successor, or the keeper that will have one.
        let now = sched::monotonic_ns();
        let (socket, _) = read_settings();
        // Who cannot reach it (a program with another root directory, or out of descriptors) is served all the same.
        let beat = held.table.head().beat.load(Ordering::Acquire);
        if beat != core::mem::replace(&mut heard, beat) || sock::connect(socket).is_ok() || keeper_lives(socket) {
            alone_since = 0;
        } else if alone_since == 0 {
            alone_since = now;
        } else if now - alone_since > LOST_NS
            && let Some(cold) = cold.take()
        {
            cold.give_up();
            // Nobody has the memory any more that was leased.
            ask_end_of_lease();
        }
    }
    cold.into_iter().for_each(Cold::leave);
    STAGING.store(0, Ordering::Relaxed);
}

/// Name of the keeper's socket: the daemon's, and this behind it.
pub const KEEPER_SUFFIX: &[u8] = b".keeper";

fn keeper_lives(socket: &[u8]) -> bool {
    let mut path = [0u8; 120];
    let len = socket.len() + KEEPER_SUFFIX.len();
    if len > path.len() {
        return false;
    }
    path[..socket.len()].copy_from_slice(socket);
    path[socket.len()..len].copy_from_slice(KEEPER_SUFFIX);
    lives(&path[..len])
}

/// Somebody listens at `path`, even if he has no time.
fn lives(path: &[u8]) -> bool {
    matches!(sock::connect_within(path, TAKEN_MS), Ok(_) | Err(Errno(libc::EAGAIN)))
}

/// Marks a mapping of ours: not copied by fork, not dumped.
pub(crate) fn mark_own(map: &mem::Mapping) {
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        // SAFETY: changes no bytes.
        let _ = unsafe { mem::advise(map.addr(), map.len() as u64, advice) };
    }
}

fn make(device: Option<&Fd>) -> Result<Cold> {
    let maps = Maps::open()?;
    let hold = Uffd::bare(device)?;
    let table_fd = memfd::create(cold_table::NAME, cold_table::LEN as u64)?;
    memfd::add_seals(&table_fd, memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL)?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let map = mem::Mapping::file(table_fd.raw(), 0, cold_table::LEN, prot, libc::MAP_SHARED)?;
    mark_own(&map);
    // SAFETY: the file cannot shrink, and the mapping is kept for good.
    let table = unsafe { Table::at(map.addr()) };
    core::mem::forget(map);
    table.begin();
    for (other, removal) in table.head().others.iter().zip(&REMOVALS) {
        other.store(removal.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    // SAFETY: takes nothing.
    let pid = unsafe { syscall!(libc::SYS_getpid) }.unwrap_or(0);
    table.head().pid.store(pid as u32, Ordering::Relaxed);
    Ok(Cold { maps, hold, bare: true, mover: None, staging: None, table_fd, table })
}

/// Greets the daemon; makes what is missing.
fn connect(cold: &mut Option<Cold>, phase: &AtomicU32) -> Result<Connection> {
    let (path, domain) = read_settings();
    let socket = sock::connect_within(path, TAKEN_MS)?;
    let mut hello = Packet::new(Op::Hello);
    hello.a = wire::HELLO_ALL | wire::HELLO_COLD;
    if is_leased() {
        hello.a |= wire::HELLO_AWAY;
    }
    hello.b = TOLERANCE_PPM.load(Ordering::Relaxed);
    hello.count = TIER_MAX.load(Ordering::Relaxed);
    hello.text = *domain;
    let pagemap = Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?;
    sock::set_timeout(&socket, 10_000)?;
    sock::send(&socket, hello.bytes(), &[pagemap.raw()])?;
    drop(pagemap);
    let (welcome, mut fds) = receive(&socket, Op::Welcome, phase)?;
    if welcome.status != 0 {
        return Err(Errno(welcome.status));
    }
    let channel_fd = fds.take(0).ok_or(Errno(libc::EPROTO))?;
    let device = fds.take(1).or_else(|| uffd::open_device().ok());
    let set_up = set_up(cold, &channel_fd, device.as_ref());
    let mut ready = Packet::new(Op::Ready);
    let channel = match set_up {
        Ok(channel) => channel,
        Err(errno) => {
            // A lack that will not go away by itself.
            ready.status = errno.0;
            let _ = sock::send(&socket, ready.bytes(), &[]);
            phase.store(3, Ordering::Release);
            return Err(errno);
        }
    };
    let cold = cold.as_mut().ok_or(Errno(libc::EPROTO))?;
    ready.a = u64::from(cold.bare);
    sock::send(&socket, ready.bytes(), &[cold.hold.fd().raw(), cold.table_fd.raw()])?;
    let (go, _) = receive(&socket, Op::ColdGo, phase)?;
    if go.status != 0 {
        if cold.bare {
            // It may have been enabled, which goes once; nothing hangs on it yet.
            cold.hold = Uffd::bare(device.as_ref())?;
        }
        return Err(Errno(go.status));
    }
    cold.bare = false;
    TABLE.store(cold.table.base(), Ordering::Release);
    sock::set_timeout(&socket, 0)?;
    Ok(Connection { socket, channel_fd, channel, epoch: go.a as u32 })
}

fn receive(socket: &Fd, op: Op, phase: &AtomicU32) -> Result<(Packet, sock::Fds)> {
    wait_for_answer(socket, None, phase)?;
    let mut buffer = [0u8; size_of::<Packet>()];
    let (got, fds) = sock::receive(socket, &mut buffer, 0)?;
    let packet = Packet::parse(&buffer[..got]).filter(|packet| packet.op == op as u32);
    Ok((packet.ok_or(Errno(libc::EPROTO))?, fds))
}

fn set_up(cold: &mut Option<Cold>, channel_fd: &Fd, device: Option<&Fd>) -> Result<mem::Mapping> {
    let (len, _) = memfd::len_and_inode(channel_fd.raw())?;
    if len < CHANNEL_LEN as u64 || memfd::seals(channel_fd)? & memfd::SEAL_SHRINK == 0 {
        return Err(Errno(libc::EPROTO));
    }
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let channel = mem::Mapping::file(channel_fd.raw(), 0, CHANNEL_LEN, prot, libc::MAP_SHARED)?;
    mark_own(&channel);
    if cold.is_none() {
        *cold = Some(make(device)?);
    }
    let Some(cold) = cold else { return Err(Errno(libc::EPROTO)) };
    if cold.staging.is_none() {
        let mover = Uffd::new(device, uffd::FEATURE_MOVE | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_PAGEFAULT_FLAG_WP)?;
        let staging = mem::Mapping::anonymous(FETCH_PAGES_MAX * PAGE_SIZE)?;
        mark_own(&staging);
        let range = Range::pages_from(staging.addr(), FETCH_PAGES_MAX as u64);
        // A move wants its target to be ours; not in missing mode, so that nobody ever waits there.
        mover.register(range, uffd::MODE_WP)?;
        STAGING.store(staging.addr(), Ordering::Relaxed);
        cold.mover = Some(mover);
        cold.staging = Some(staging);
    }
    Ok(channel)
}

impl Cold {
    /// Answers requests until the daemon is gone or we are asked to leave.
    fn serve(&mut self, connection: &mut Connection, phase: &AtomicU32) -> Result<()> {
        let mut looked = sched::monotonic_ns();
        loop {
            look_around(&mut looked, COLD_AGENT, self.mover.as_ref());
            let mut polls = [libc::pollfd { fd: connection.socket.raw(), events: libc::POLLIN, revents: 0 }];
            let ready = pagefold_os::fd::poll(&mut polls, 500)?;
            if phase.load(Ordering::Acquire) != 1 {
                return Ok(());
            }
            if ready == 0 {
                continue;
            }
            let mut buffer = [0u8; size_of::<Packet>()];
            let (got, _) = sock::receive(&connection.socket, &mut buffer, libc::MSG_DONTWAIT)?;
            let Some(request) = Packet::parse(&buffer[..got]) else { return Err(Errno(libc::EPROTO)) };
            let mut answer = Packet { status: 0, count: 0, ..request };
            if request.op == Op::Leave as u32 {
                ask_end_of_lease();
                return sock::send(&connection.socket, answer.bytes(), &[]);
            }
            match self.answer(&request, connection) {
                Ok(count) => answer.count = count as u64,
                Err(Errno(errno)) => answer.status = errno,
            }
            // So that the daemon can tell what our work costs.
            answer.a = sched::thread_cpu_ns();
            sock::send(&connection.socket, answer.bytes(), &[])?;
        }
    }

    fn answer(&mut self, request: &Packet, connection: &Connection) -> Result<usize> {
        let count = (request.count as usize).min(LIST_MAX);
        const REGIONS: u32 = Op::Regions as u32;
        const WATCH: u32 = Op::Watch as u32;
        const COPY: u32 = Op::ColdCopy as u32;
        const DROP: u32 = Op::ColdDrop as u32;
        const RELEASE: u32 = Op::ColdRelease as u32;
        match request.op {
            REGIONS => list_plain(&self.maps, connection.channel.addr(), request.b),
            WATCH => {
                for index in 0..count {
                    let range: Range = input(connection.channel.addr(), index);
                    let status = self.hold.register(range, uffd::MODE_WP).map_or_else(|errno| errno.0, |()| 0);
                    write_out(connection.channel.addr(), index, status);
                }
                Ok(count)
            }
            COPY => self.copy(connection, count, request.a as usize),
            DROP => self.drop_pages(connection, count),
            RELEASE => {
                for index in 0..count {
                    let range: Range = input(connection.channel.addr(), index);
                    let status = self.release(range).map_or_else(|errno| errno.0, |()| 0);
                    write_out(connection.channel.addr(), index, status);
                }
                Ok(count)
            }
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    /// Copies pages to the channel by pwrite(2): a page that is gone is an error here and not a fault in the program.
    /// Page `n` of all runs together lies in place `first + n`, and the byte of that place in the answer says whether it
    /// was copied. Returns the place behind the last.
    fn copy(&self, connection: &Connection, count: usize, first: usize) -> Result<usize> {
        let out = connection.channel.addr() + CHANNEL_OUT as u64;
        let mut place = first.min(FETCH_PAGES_MAX);
        for index in 0..count {
            let run: RegionEntry = input(connection.channel.addr(), index);
            let range = Range { start: run.start, end: run.end };
            let pages = if range.is_empty() { 0 } else { (range.pages() as usize).min(FETCH_PAGES_MAX - place) };
            let mut copied = 0;
            while copied < pages {
                let to = CHANNEL_PAGES + (place + copied) * PAGE_SIZE;
                // SAFETY: the kernel reads from the program's memory and reports what it cannot read.
                let wrote = unsafe {
                    syscall!(
                        libc::SYS_pwrite64,
                        connection.channel_fd.raw(),
                        range.start + (copied * PAGE_SIZE) as u64,
                        (pages - copied) * PAGE_SIZE,
                        to
                    )
                };
                match wrote {
                    Ok(bytes) if bytes >= PAGE_SIZE => copied += bytes / PAGE_SIZE,
                    _ => break,
                }
            }
            for page in 0..pages {
                // SAFETY: at most 512 bytes from the start of the answer's list, inside the channel.
                unsafe { core::ptr::write_volatile((out as *mut u8).add(place + page), u8::from(page < copied)) };
            }
            place += pages;
        }
        Ok(place)
    }

    /// Takes those pages away that still equal their copies; byte `n` of the answer says whether page `n` is out.
    fn drop_pages(&mut self, connection: &Connection, count: usize) -> Result<usize> {
        let channel = connection.channel.addr();
        let out = (channel + CHANNEL_OUT as u64) as *mut u8;
        // SAFETY: inside the channel.
        unsafe { core::ptr::write_bytes(out, 0, FETCH_PAGES_MAX) };
        let _held = SHARED.guard.lock(COLD_AGENT);
        if !self.table.wait_pact(200) {
            return Err(Errno(libc::EBUSY));
        }
        if self.table.head().epoch.load(Ordering::Relaxed) != connection.epoch {
            // Another daemon has taken over, and does not know what this request is about.
            self.table.free_pact();
            return Err(Errno(libc::ESTALE));
        }
        for index in 0..count {
            let run: DropEntry = input(channel, index);
            let (pages, place) = (run.pages as usize, run.place as usize);
            let range = Range::pages_from(run.start, u64::from(run.pages));
            let around = Range { start: run.around_start, end: run.around_end };
            let inside = around.start <= range.start && range.end <= around.end;
            if pages == 0 || place + pages > FETCH_PAGES_MAX || !range.start.is_multiple_of(PAGE) || !inside {
                continue;
            }
            // The pact may have been away for a moment, and with it the daemon that asked.
            if self.table.head().epoch.load(Ordering::Relaxed) == connection.epoch {
                self.drop_run(range, around, place, channel, out);
            }
        }
        self.table.free_pact();
        // Who waited for a page that stayed, or whose fault was read while it was frozen.
        for index in 0..count {
            let run: DropEntry = input(channel, index);
            let _ = self.hold.wake(Range::pages_from(run.start, u64::from(run.pages.min(FETCH_PAGES_MAX as u32))));
        }
        self.make_exclusive(channel, count, out);
        let Some(staging) = &self.staging else { return Ok(0) };
        // SAFETY: the staging area is ours; what is there is out, or void.
        let _ = unsafe { mem::advise(staging.addr(), staging.len() as u64, libc::MADV_DONTNEED) };
        Ok(count)
    }

    /// Makes pages that the kernel would not move the process's own, as the next write would: a page that a fork shared
    /// counts as shared until then, also when the child is long gone. The daemon may ask again.
    ///
    /// Without the pact: a page that is gone meanwhile is a fault that the daemon answers.
    fn make_exclusive(&self, channel: u64, count: usize, out: *mut u8) {
        for index in 0..count {
            let run: DropEntry = input(channel, index);
            let pages = run.pages as usize;
            if run.place as usize + pages > FETCH_PAGES_MAX {
                continue;
            }
            // SAFETY: inside the channel's list, as was just checked.
            let busy =
                |page: usize| unsafe { core::ptr::read_volatile(out.add(run.place as usize + page)) } == DROP_BUSY;
            let mut page = 0;
            while page < pages {
                let from = page;
                while page < pages && busy(page) {
                    page += 1;
                }
                if from < page {
                    let start = run.start + (from * PAGE_SIZE) as u64;
                    // SAFETY: changes no bytes.
                    let _ =
                        unsafe { mem::advise(start, ((page - from) * PAGE_SIZE) as u64, libc::MADV_POPULATE_WRITE) };
                }
                page += 1;
            }
        }
    }

    fn drop_run(&self, range: Range, around: Range, place: usize, channel: u64, out: *mut u8) {
        let (Some(mover), Some(staging)) = (&self.mover, &self.staging) else { return };
        let held = SHARED.guard.lock(COLD_AGENT);
        if is_left_alone(SHARED.tables(&held).table, range) {
            return;
        }
        let now = sched::monotonic_ns();
        let mut chunk = range.start / cold_table::CHUNK_BYTES * cold_table::CHUNK_BYTES;
        while chunk < range.end {
            match self.table.find_or_add(chunk) {
                Some(index) if now.wrapping_sub(self.table.removed(index).load(Ordering::Relaxed)) > REMOVED_NS => {}
                _ => return,
            }
            chunk += cold_table::CHUNK_BYTES;
        }
        // In missing mode from here on: an access to an absent page of the region waits for the daemon.
        if self.hold.register(around, uffd::MODE_MISSING | uffd::MODE_WP).is_err()
            && self.hold.register(range, uffd::MODE_MISSING | uffd::MODE_WP).is_err()
        {
            return;
        }
        let pages = range.pages() as usize;
        let base = staging.addr() + (place * PAGE_SIZE) as u64;
        // So that nobody takes an absent page for one that never was, should the pact be away before it is back.
        for addr in (range.start..range.end).step_by(PAGE_SIZE) {
            self.table.set_state(addr, FROZEN);
        }
        let mut at = range.start;
        let mut tries = 0;
        // A move stays within one mapping; a run may lie in several. Then page by page.
        let mut single = false;
        while at < range.end {
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let end = if single { at + PAGE } else { range.end };
            let (moved, error) = mover.move_pages(base + (at - range.start), Range { start: at, end }, mode);
            at += moved;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN)) if tries < MOVE_TRIES => tries += 1,
                Some(Errno(libc::EINVAL)) if !single => single = true,
                Some(Errno(errno)) => {
                    if errno == libc::EBUSY {
                        let page = (at - range.start) as usize / PAGE_SIZE;
                        // SAFETY: inside the channel's list.
                        unsafe { core::ptr::write_volatile(out.add(place + page), DROP_BUSY) };
                    }
                    at += PAGE;
                    tries = 0;
                }
            }
        }
        let mut resident = [0u8; FETCH_PAGES_MAX];
        // SAFETY: the kernel writes one byte per page of the run.
        let known = unsafe { syscall!(libc::SYS_mincore, base, range.len(), resident.as_mut_ptr()) }.is_ok();
        let mut back = [true; FETCH_PAGES_MAX];
        for page in 0..pages {
            if !known || resident[page] & 1 == 0 {
                continue;
            }
            // SAFETY: the page is resident in the staging area, where nobody else writes.
            let frozen = unsafe { &*((base + (page * PAGE_SIZE) as u64) as *const Page) };
            // SAFETY: inside the channel; whoever writes there meanwhile is the daemon, which waits for our answer.
            let copy = unsafe { &*((channel + (CHANNEL_PAGES + (place + page) * PAGE_SIZE) as u64) as *const Page) };
            if frozen == copy {
                back[page] = false;
                self.table.set_state(range.start + (page * PAGE_SIZE) as u64, OUT);
                // SAFETY: inside the channel's list.
                unsafe { core::ptr::write_volatile(out.add(place + page), 1) };
            }
        }
        let mut page = 0;
        while page < pages {
            let from = page;
            while page < pages && back[page] {
                page += 1;
            }
            if from < page {
                let start = (from * PAGE_SIZE) as u64;
                self.move_back(range.start + start, base + start, (page - from) as u64);
                for addr in (range.start + start..range.start + (page * PAGE_SIZE) as u64).step_by(PAGE_SIZE) {
                    self.table.set_state(addr, RESIDENT);
                }
            }
            page += 1;
        }
    }

    /// Moves staged pages back to where they were; holes are skipped. The pact is held before and after.
    fn move_back(&self, dst: u64, src: u64, pages: u64) {
        let end = src + pages * PAGE;
        let mut at = src;
        let mut single = false;
        while at < end {
            let target = dst + (at - src);
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let stop = if single { at + PAGE } else { end };
            let (moved, error) = self.hold.move_pages(target, Range { start: at, end: stop }, mode);
            at += moved;
            let target = dst + (at - src);
            match error {
                None => {}
                // The program discards something through a raw call: its event must be read before anything moves.
                Some(Errno(libc::EAGAIN)) => self.let_events_pass(target, at, (end - at) / PAGE),
                Some(Errno(libc::ENOMEM | libc::EBUSY)) => yield_now(),
                // The run lies in several mappings.
                Some(Errno(errno)) if !single && errno != libc::EEXIST => single = true,
                // The place is marked for write protection, which a move does not take for empty, but a copy does; or its
                // rights have changed by a raw call. Where nothing was there zeros are right too.
                Some(_) => {
                    // SAFETY: the page is in the staging area.
                    let (_, error) = unsafe { self.hold.copy(target, at, PAGE, uffd::DONTWAKE) };
                    match error {
                        Some(Errno(libc::EAGAIN)) => self.let_events_pass(target, at, (end - at) / PAGE),
                        Some(Errno(libc::ENOMEM)) => yield_now(),
                        _ => at += PAGE,
                    }
                }
            }
        }
    }

    /// Gives the pact away for a moment, so that the daemon reads the events that wait; drops pages discarded by them.
    fn let_events_pass(&self, dst: u64, src: u64, pages: u64) {
        self.table.free_pact();
        yield_now();
        while !self.table.wait_pact(1000) {}
        for page in 0..pages {
            if self.table.state(dst + page * PAGE) == VOID {
                // SAFETY: the staging area is ours; the program declared the page void.
                let _ = unsafe { mem::advise(src + page * PAGE, PAGE, libc::MADV_DONTNEED) };
            }
        }
    }

    /// Ends the missing mode of `range` if no page of it is out; new pages cost nothing of ours again.
    fn release(&self, range: Range) -> Result<()> {
        let _held = SHARED.guard.lock(COLD_AGENT);
        if !self.table.wait_pact(200) {
            return Err(Errno(libc::EBUSY));
        }
        let result = if self.table.has(range, OUT) {
            Err(Errno(libc::EBUSY))
        } else {
            self.hold.unregister(range).and_then(|()| self.hold.register(range, uffd::MODE_WP))
        };
        self.table.free_pact();
        result
    }

    /// The pages that are out are lost: who touches them gets SIGBUS, not other bytes. Everything else is the kernel's
    /// again, for we are the last to hold the descriptor: who waited goes on.
    fn give_up(self) {
        // Without the guard: who has it may be waiting for a daemon to read an event, and nobody moves pages but us.
        self.table.head().pact.store(PACT_AGENT, Ordering::SeqCst);
        poison_out(&self.hold, &self.table);
        self.table.free_pact();
        TABLE.store(0, Ordering::Release);
        self.table.head().region.store(0, Ordering::Release);
    }

    /// Brings everything back and ends; for good, or until the thread is started again.
    fn leave(self) {
        let held = SHARED.guard.lock(COLD_AGENT);
        let _ = bring_back(&self.table, &Wanted { range: EVERYTHING, stretch: all, whatever_it_takes: true });
        drop(held);
        // At once, for daemon and keeper have the descriptor too: somebody else may want the memory.
        for_each_plain(&self.maps, |range| {
            // A page is here a moment before the table says so; the daemon lets go of the pact behind that.
            let settled = self.table.wait_pact(1000);
            // What could not be brought back shall not read as zeros.
            if !self.table.has(range, OUT) {
                let _ = self.hold.unregister(range);
            }
            if settled {
                self.table.free_pact();
            }
        });
        if self.table.wait_pact(1000) {
            self.hear_the_last();
            self.table.free_pact();
        }
        // Tells the daemon that the end of the connection is no accident.
        self.table.head().region.store(0, Ordering::Release);
        // Who looks at the table holds the guard.
        let held = SHARED.guard.lock(COLD_AGENT);
        TABLE.store(0, Ordering::Release);
        drop(held);
        // SAFETY: the mapping that `make` kept, which nobody can find any more.
        let _ = unsafe { mem::unmap(self.table.base(), cold_table::LEN as u64) };
        // Closing the descriptors ends all watching.
    }

    /// Reads the events that wait, after which there are no more, and keeps what is known of discards. The pact is held.
    fn hear_the_last(&self) {
        while let Ok(Some(event)) = self.hold.read_event() {
            match event {
                uffd::Event::Remove(range) => self.table.note_removed(range, sched::monotonic_ns()),
                uffd::Event::PageFault { addr, .. } => {
                    let _ = self.hold.wake(Range::pages_from(addr & !(PAGE - 1), 1));
                }
                // SAFETY: the kernel made the descriptor for us just now; the child has all its memory.
                uffd::Event::Fork(fd) => drop(unsafe { Fd::from_raw(fd) }),
                _ => {}
            }
        }
        for (kept, removal) in REMOVALS.iter().zip(self.table.removals()) {
            kept.store(removal, Ordering::Relaxed);
        }
    }
}

/// Makes every page that is out a SIGBUS; the pact is held. Returns how many.
pub fn poison_out(hold: &Uffd, table: &Table) -> u64 {
    let mut lost = 0;
    table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| {
        let mut at = start;
        let mut single = false;
        while at < end {
            // Within one mapping; a run may lie in several.
            let stop = if single { at + PAGE } else { end };
            let (done, error) = hold.poison(Range { start: at, end: stop }, 0);
            at += done;
            match error {
                None => {}
                // A discard is under way, and nothing can be done before its event is read.
                Some(Errno(libc::EAGAIN)) if hold.is_alive() => match hold.read_event() {
                    Ok(Some(uffd::Event::Remove(range) | uffd::Event::Unmap(range))) => {
                        table.for_each_run(range.start, range.end, OUT, |start, end| {
                            for addr in (start..end).step_by(PAGE_SIZE) {
                                table.set_state(addr, RESIDENT);
                            }
                        });
                    }
                    // SAFETY: the kernel made the descriptor for us just now. The child loses what its parent loses.
                    Ok(Some(uffd::Event::Fork(fd))) => drop(unsafe { Fd::from_raw(fd) }),
                    _ => yield_now(),
                },
                Some(Errno(libc::ENOMEM)) => yield_now(),
                Some(_) if !single => single = true,
                // There already, or nothing there any more.
                Some(_) => at += PAGE,
            }
        }
        for addr in (start..end).step_by(PAGE_SIZE) {
            if table.set_state(addr, RESIDENT) == OUT {
                lost += 1;
            }
        }
        let _ = hold.wake(Range { start, end });
    });
    table.head().lost.fetch_add(lost, Ordering::Relaxed);
    lost
}

/// Pages that are brought back at once.
const STEP_PAGES: usize = 64;

/// Has every page of `range` here; false if some are not.
pub(crate) fn read_in(range: Range) -> bool {
    // SAFETY: reads pages in, changes nothing.
    unsafe { mem::advise(range.start, range.len(), libc::MADV_POPULATE_READ) }.is_ok()
}

/// As [`read_in`], of a step that lies in several mappings, has lost pages, or that the program may not read. The last it may
/// for a moment: nothing else has the kernel wait for a page there (`/proc/PID/mem` does not), and its own calls that change
/// rights wait for the guard.
#[inline(never)]
fn read_in_parts(step: Range) {
    let Ok(maps) = Maps::open() else { return };
    let mut parts = [(Range { start: 0, end: 0 }, 0); STEP_PAGES];
    let mut count = 0;
    let mut buffer = [0u8; 8 << 10];
    let _ = maps.for_each(&mut buffer, |map| {
        if let Some(part) = parts.get_mut(count).filter(|_| map.range.overlaps(&step)) {
            let range = Range { start: map.range.start.max(step.start), end: map.range.end.min(step.end) };
            *part = (range, map.prot);
            count += 1;
        }
    });
    for &(part, rights) in &parts[..count] {
        let hidden = rights & libc::PROT_READ == 0;
        // SAFETY: adds a right, and takes it away again.
        let protect = |rights| unsafe { mem::protect(part.start, part.len(), rights) };
        if hidden && protect(rights | libc::PROT_READ).is_err() {
            continue;
        }
        if !read_in(part) {
            // What is lost stays lost.
            for addr in (part.start..part.end).step_by(PAGE_SIZE) {
                let _ = read_in(Range::pages_from(addr, 1));
            }
        }
        if hidden {
            let _ = protect(rights);
        }
    }
}

/// Where what is to be brought back lies, but for what shall stay out.
struct Wanted<F: Fn(u64, u64) -> (u64, bool)> {
    range: Range,
    /// How far what lies at an address is of one kind (to an end at most), and whether it shall stay out.
    stretch: F,
    /// Whether a limit has room for it or not.
    whatever_it_takes: bool,
}

/// For [`Wanted`]: nothing stays out.
fn all(_: u64, end: u64) -> (u64, bool) {
    (end, false)
}

const EVERYTHING: Range = Range { start: 0, end: u64::MAX >> 1 };

/// Touches every page that is out, so that it comes back.
///
/// Nothing can go out meanwhile, for the caller holds the guard. So the daemon keeps none of these pages waiting for room; it
/// tells how much there is, and who comes to its end stops.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for all of it; what came stays.
fn bring_back<F: Fn(u64, u64) -> (u64, bool)>(table: &Table, wanted: &Wanted<F>) -> Result<()> {
    /// Between two looks at the room; what is kept free beyond it is far more.
    const STEP: usize = STEP_PAGES * PAGE_SIZE;
    let head = table.head();
    if head.out.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let mut is_full = false;
    head.bringing.fetch_add(1, Ordering::SeqCst);
    table.for_each_run(wanted.range.start, wanted.range.end, OUT, |mut start, run_end| {
        while start < run_end && !is_full {
            let (end, stays) = (wanted.stretch)(start, run_end.min(start + STEP as u64));
            let step = Range { start, end };
            start = end;
            if stays {
                continue;
            }
            if !read_in(step) {
                read_in_parts(step);
            }
            // Behind the step: what was true at the last fault long ago would be no news.
            is_full = !wanted.whatever_it_takes && head.room() * (PAGE_SIZE as u64) < STEP as u64;
        }
    });
    head.bringing.fetch_sub(1, Ordering::SeqCst);
    if is_full { Err(Errno(libc::ENOMEM)) } else { Ok(()) }
}

/// Before a fork, with the guard held: the child cannot ask for pages, so all are brought back but those that it will not
/// have anyway: `dont_fork` says how far (to an end at most) an address is of one kind, and whether of that.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that; not if it is to be done `whatever_it_takes`.
#[cfg(feature = "preload")]
pub(crate) fn before_fork(whatever_it_takes: bool, dont_fork: impl Fn(u64, u64) -> (u64, bool)) -> Result<()> {
    let Some(table) = table() else { return Ok(()) };
    bring_back(&table, &Wanted { range: EVERYTHING, stretch: dont_fork, whatever_it_takes })
}

/// Before the agent leaves though it need not, with the guard held: everything comes back.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that.
#[cfg(feature = "preload")]
pub(crate) fn before_leaving() -> Result<()> {
    before_move(EVERYTHING)
}

/// Before a range moves, with the guard held: everything of it comes back, so that nothing hangs on its old address.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that.
#[cfg(feature = "preload")]
pub(crate) fn before_move(range: Range) -> Result<()> {
    let Some(table) = table() else { return Ok(()) };
    bring_back(&table, &Wanted { range, stretch: all, whatever_it_takes: false })
}

/// Makes a call of the program's that discards `range`, with the guard held.
///
/// The kernel lets the caller go when the daemon has *heard* of the discard. So wait until it has obeyed: no page of the
/// range is out any more. Should it die in between, its successor finds the range here.
#[cfg(feature = "preload")]
pub(crate) fn voiding<T>(range: Range, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(table) = table() else { return call() };
    let head = table.head();
    head.void_start.store(range.start, Ordering::Relaxed);
    // Pairs with the load in the daemon: who sees the end sees the start.
    head.void_end.store(range.end, Ordering::SeqCst);
    let result = call();
    let mut turn = 0;
    // A child that a signal handler forked meanwhile goes on here, too, and has no table.
    while result.is_ok()
        && !range.is_empty()
        && let Some(table) = self::table()
        && table.head().out.load(Ordering::Acquire) > 0
        && table.has(range, OUT)
    {
        turn += 1;
        if turn < 16 {
            yield_now();
        } else {
            let _ = pagefold_os::fd::poll(&mut [], 1);
        }
    }
    if let Some(table) = self::table() {
        table.head().void_end.store(0, Ordering::SeqCst);
    }
    result
}

/// In a forked child: table and descriptors are the parent's.
#[cfg(feature = "preload")]
pub(crate) fn after_fork_child() {
    TABLE.store(0, Ordering::Release);
    LEASE.store(0, Ordering::Release);
    SECOND.forget();
}

/// Tells the daemon what the program said about a range; true if somebody listens.
#[cfg(feature = "preload")]
pub(crate) fn hint(range: Range, advice: i32) -> bool {
    match table() {
        Some(table) => {
            table.hint(range.start, range.end, advice);
            true
        }
        None => false,
    }
}

/// True if the page at `addr` is in the tier.
pub(crate) fn is_out(addr: u64) -> bool {
    table().is_some_and(|table| table.state(addr) == OUT)
}

fn yield_now() {
    // SAFETY: takes nothing.
    let _ = unsafe { syscall!(libc::SYS_sched_yield) };
}
