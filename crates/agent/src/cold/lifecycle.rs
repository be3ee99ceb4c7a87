//! The thread of a client of the tier: its connections, one after the other, and its end.
//!
//! It is the only thread of a cold client ([`run`]), or the second thread of a merged one while its anonymous memory is leased
//! ([`lease`]). Userfaultfd and residency map outlive each connection: a new daemon finds both. They end only when every page is
//! back, or when no process lives that could bring pages back.

use super::daemon_liveness::DaemonLiveness;
use super::fault_in::{dismiss_standby, fault_in_by_thread, fault_in_everything};
use super::lease::ask_end_of_lease;
use super::session::{ColdSession, Connection, RESIDENCY, TIER_MAX, TOLERANCE_PPM, WAKEUP};
use crate::address_space::maps::Maps;
use crate::address_space::regions::{for_each_anonymous, list_anonymous};
use crate::limits::NOTHING;
use crate::owned_ranges::{self, Owned};
use crate::runtime::connection::{ACCEPT_MS, ANSWER_MS, REFUSED_MS, is_lasting, wait_for_answer};
use crate::runtime::housekeeping::{exit_if_alone, housekeep};
use crate::runtime::thread::{begin_thread, exit_thread};
use crate::runtime::wakeup::Wakeup;
use crate::state::{COLD_AGENT, LEASE, LEASE_THREAD, SHARED, is_leased, read_settings};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem, memfd, sched, sock, syscall};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::handshake::{receive, receive_welcome, send_hello, send_unable, take_welcome};
use pagefold_protocol::message::{self, FETCH_PAGES_MAX, LIST_MAX, Op, Packet};
use pagefold_protocol::residency_map::{self, EVICTED, OWNER_AGENT, ResidencyMap, poison_evicted};

const PAGE: u64 = PAGE_SIZE as u64;

/// Pause between attempts to reach a daemon, in milliseconds.
const RECONNECT_MS: i32 = 50;

/// How long a leaving agent waits for the owner lock at a time, in milliseconds, and how often: in all longer than the time after which
/// daemon and keeper count as gone.
const SETTLE_MS: u32 = 100;
const SETTLE_TRIES: u32 = 150;

/// Becomes a client of the tier beside live merging, once that has let go of the plain memory by `give_up`.
///
/// # Errors
/// `EBUSY` while the lease before has not ended; `EAGAIN` if there is no memory for the thread; as `give_up`.
pub(crate) fn lease(give_up: impl FnOnce() -> Result<()>) -> Result<()> {
    if !LEASE_THREAD.is_gone() || LEASE.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return Err(Errno(libc::EBUSY));
    }
    let leased =
        give_up().and_then(|()| if LEASE_THREAD.start(second_main) { Ok(()) } else { Err(Errno(libc::EAGAIN)) });
    if leased.is_err() {
        LEASE.store(0, Ordering::Release);
        // All is to be watched again.
        SHARED.changed();
    }
    leased
}

extern "C" fn second_main() -> ! {
    if begin_thread(c"pagefold-cold") {
        serve_while(&LEASE);
    }
    LEASE.store(0, Ordering::Release);
    // All is to be watched again.
    SHARED.changed();
    exit_thread()
}

/// Body of a cold client's only thread; never returns.
pub(crate) fn run() -> ! {
    serve_while(&SHARED.phase);
    exit_thread()
}

/// Serves daemons for as long as `phase` is 1, then brings everything back.
fn serve_while(phase: &AtomicU32) {
    let goes_on = || phase.load(Ordering::Acquire) == 1;
    let mut cold: Option<ColdSession> = None;
    let mut liveness = DaemonLiveness::default();
    let mut rests_until = 0;
    while goes_on() {
        let connected = (sched::monotonic_ns() >= rests_until).then(|| connect(&mut cold, phase));
        match connected {
            None => {}
            Some(Ok(mut connection)) => {
                liveness.note_alive();
                if let Some(cold) = &mut cold {
                    let _ = cold.serve(&mut connection, phase);
                }
                if !goes_on() {
                    // Before the connection ends: its end makes the daemon look.
                    cold.take().into_iter().for_each(ColdSession::leave);
                    break;
                }
            }
            Some(Err(failure)) => {
                SHARED.error.store(failure.errno.0, Ordering::Relaxed);
                if failure.rests {
                    rests_until = sched::monotonic_ns() + REFUSED_MS as u64 * 1_000_000;
                }
            }
        }
        exit_if_alone();
        if goes_on() {
            let _ = pagefold_os::fd::poll(&mut [], RECONNECT_MS);
        }
        cold.iter().for_each(ColdSession::drain_wakeups);
        if let Some(cold) = cold.take_if(|cold| liveness.is_lost(&cold.residency)) {
            cold.give_up();
            // No process has the leased memory any more.
            ask_end_of_lease();
        }
    }
    cold.into_iter().for_each(ColdSession::leave);
    dismiss_standby();
    owned_ranges::register(Owned::ColdStaging, NOTHING);
}

/// What the maps of earlier leases knew of discards: a thread that discards, and has been told that the event was read, may act in
/// the next lease.
static LAST_DISCARDS: [AtomicU64; residency_map::DISCARD_SLOTS] =
    [const { AtomicU64::new(0) }; residency_map::DISCARD_SLOTS];

fn make(device: Option<&Fd>) -> Result<ColdSession> {
    let maps = Maps::open()?;
    let pagemap = Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?;
    let hold = Uffd::bare(device)?;
    let residency_fd = memfd::create(residency_map::FILE_NAME, residency_map::FILE_BYTES as u64)?;
    memfd::add_seals(&residency_fd, memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL)?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let map = mem::Mapping::file(residency_fd.raw(), 0, residency_map::FILE_BYTES, prot, libc::MAP_SHARED)?;
    owned_ranges::hide(&map);
    // SAFETY: the file cannot shrink, and the mapping is kept for good.
    let residency = unsafe { ResidencyMap::at(map.addr()) };
    core::mem::forget(map);
    residency.initialize();
    for (other, removal) in residency.head().shared_discards.iter().zip(&LAST_DISCARDS) {
        other.store(removal.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    // SAFETY: the call takes no arguments.
    let pid = unsafe { syscall!(libc::SYS_getpid) }.unwrap_or(0);
    residency.head().pid.store(pid as u32, Ordering::Relaxed);
    Ok(ColdSession { maps, pagemap, hold, bare: true, mover: None, staging: None, residency_fd, residency })
}

/// Why there is no connection.
#[derive(Debug)]
struct Failure {
    errno: Errno,
    /// A daemon answered, and another attempt right now would be of no use.
    rests: bool,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure { errno, rests: false }
    }
}

fn connect(cold: &mut Option<ColdSession>, phase: &AtomicU32) -> core::result::Result<Connection, Failure> {
    greet(sock::connect_within(read_settings().0, ACCEPT_MS)?, cold, phase)
}

/// Greets the daemon at `socket`; makes what is missing.
fn greet(socket: Fd, cold: &mut Option<ColdSession>, phase: &AtomicU32) -> core::result::Result<Connection, Failure> {
    let mut hello = Packet::new(Op::Hello);
    hello.a = message::HELLO_ALL | message::HELLO_COLD;
    if is_leased() {
        hello.a |= message::HELLO_LENT;
    }
    hello.b = TOLERANCE_PPM.load(Ordering::Relaxed);
    hello.count = TIER_MAX.load(Ordering::Relaxed);
    hello.text = *read_settings().1;
    let pagemap = Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?;
    sock::set_timeout(&socket, ANSWER_MS)?;
    send_hello(&socket, &hello, &pagemap)?;
    drop(pagemap);
    wait_for_answer(&socket, phase, -1, || ())?;
    let mut fds = receive_welcome(&socket)?;
    let made = take_welcome(&mut fds).and_then(|(channel, device)| {
        set_up(cold, &channel, device.as_ref())?;
        Ok((channel, device))
    });
    let (channel, device) = match made {
        Ok(made) => made,
        Err(errno) => {
            let _ = send_unable(&socket, errno);
            // Not if pages hang on an earlier connection. A thread that asked the agent to leave meanwhile gets that first.
            if is_lasting(errno) && cold.as_ref().is_none_or(|cold| cold.bare) {
                let _ = phase.compare_exchange(1, 3, Ordering::AcqRel, Ordering::Acquire);
            }
            return Err(Failure { errno, rests: true });
        }
    };
    let cold = cold.as_mut().ok_or(Errno(libc::EPROTO))?;
    // Of which an earlier daemon has heard.
    let b = sched::thread_cpu_ns();
    let ready = Packet { a: u64::from(cold.bare), b, ..Packet::new(Op::Ready) };
    sock::send(&socket, ready.bytes(), &[cold.hold.fd().raw(), cold.residency_fd.raw()])?;
    let go = wait_for_answer(&socket, phase, -1, || ()).and_then(|()| receive(&socket, Op::ColdStart));
    let go = go.map_err(Failure::from).and_then(|(go, _)| match go.status {
        0 => Ok(go),
        errno => Err(Failure { errno: Errno(errno), rests: !matches!(errno, libc::EAGAIN | libc::ETIMEDOUT) }),
    });
    if go.is_err() && cold.bare {
        // It may have been enabled, which goes once; nothing hangs on it yet.
        cold.hold = Uffd::bare(device.as_ref())?;
    }
    let go = go?;
    cold.bare = false;
    RESIDENCY.store(cold.residency.base(), Ordering::Release);
    sock::set_timeout(&socket, 0)?;
    Ok(Connection { socket, channel, epoch: go.a as u32 })
}

fn set_up(cold: &mut Option<ColdSession>, channel: &Channel, device: Option<&Fd>) -> Result<()> {
    owned_ranges::hide(channel.mapping());
    if cold.is_none() {
        *cold = Some(make(device)?);
    }
    let Some(cold) = cold else { return Err(Errno(libc::EPROTO)) };
    if cold.staging.is_none() {
        let mover = Uffd::new(device, uffd::FEATURE_MOVE | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_PAGEFAULT_FLAG_WP)?;
        let staging = mem::Mapping::anonymous(FETCH_PAGES_MAX * PAGE_SIZE)?;
        owned_ranges::hide(&staging);
        let range = Range::pages_from(staging.addr(), FETCH_PAGES_MAX as u64);
        // The target of a move must be registered; not in missing mode, so that no thread ever waits there.
        mover.register(range, uffd::MODE_WP)?;
        WAKEUP.register(&mover);
        owned_ranges::register(Owned::ColdStaging, range);
        cold.mover = Some(mover);
        cold.staging = Some(staging);
    }
    Ok(())
}

impl ColdSession {
    /// Answers requests until the daemon is gone or we are asked to leave.
    fn serve(&mut self, connection: &mut Connection, phase: &AtomicU32) -> Result<()> {
        let mut looked = sched::monotonic_ns();
        loop {
            housekeep(&mut looked, COLD_AGENT, self.mover.as_ref());
            let bell = self.mover.as_ref().map_or(-1, |mover| mover.fd().raw());
            let mut polls =
                [connection.socket.raw(), bell].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
            // A thread that asked before the wakeup page was registered could not wake this one.
            let goes_on = || phase.load(Ordering::Acquire) == 1;
            if goes_on() {
                pagefold_os::fd::poll(&mut polls, 500)?;
            }
            if polls[1].revents != 0 {
                self.drain_wakeups();
            }
            if !goes_on() {
                return Ok(());
            }
            if polls[0].revents == 0 {
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
        const DROP: u32 = Op::ColdEvict as u32;
        const RELEASE: u32 = Op::ColdUnregister as u32;
        match request.op {
            REGIONS => list_anonymous(&self.maps, &connection.channel, request.b),
            WATCH => {
                for index in 0..count {
                    let range: Range = connection.channel.request(index);
                    let status = self.hold.register(range, uffd::MODE_WP).map_or_else(|errno| errno.0, |()| 0);
                    connection.channel.put_answer(index, status);
                }
                Ok(count)
            }
            COPY => self.copy(connection, count, request.a as usize),
            DROP => self.evict_pages(connection, count, request.a),
            RELEASE => {
                for index in 0..count {
                    let range: Range = connection.channel.request(index);
                    let status = self.release(range).map_or_else(|errno| errno.0, |()| 0);
                    connection.channel.put_answer(index, status);
                }
                Ok(count)
            }
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    /// Brings everything back and ends; for good, or until the thread is started again.
    fn leave(self) {
        self.fault_in_everything();
        self.leave_now();
    }

    /// Ends, when everything is back that can be.
    fn leave_now(self) {
        // Here, and not where the mapping lock is held, an owner lock is waited for that a dead daemon left behind.
        let mut settles = self.settle();
        if settles {
            // What cannot be read for now (hidden, and its rights cannot be changed) would read zeros later.
            poison_evicted(&self.hold, &self.residency);
            self.residency.unlock();
        }
        // A holder that did not give the lock away once is not waited for again.
        let mut take_pact = || {
            settles = if settles { self.residency.lock_within(1000) } else { self.residency.try_lock(OWNER_AGENT) };
            settles
        };
        self.drain_wakeups();
        // Unregistered now, because daemon and keeper have the descriptor too, and another descriptor may be about to register the memory.
        for_each_anonymous(&self.maps, |range| {
            // A page is here a moment before the table says so; the daemon lets go of the owner lock behind that.
            let settled = take_pact();
            // What could not be brought back shall not read as zeros.
            if !self.residency.has(range, EVICTED) {
                let _ = self.hold.unregister(range);
            }
            if settled {
                self.residency.unlock();
            }
        });
        if take_pact() {
            self.read_last_events();
            self.residency.unlock();
        }
        // Tells the daemon that the end of the connection is no accident.
        self.residency.head().client_id.store(0, Ordering::Release);
        self.drain_wakeups();
        // Readers of the map hold the mapping lock.
        let held = SHARED.mapping_lock.lock(COLD_AGENT);
        RESIDENCY.store(0, Ordering::Release);
        drop(held);
        // SAFETY: the mapping that `make` kept; no thread can find it any more.
        let _ = unsafe { mem::unmap(self.residency.base(), residency_map::FILE_BYTES as u64) };
        // Closing the descriptors ends all watching.
    }

    /// Faults everything in as long as a daemon or keeper lives; pages that are still evicted then are lost.
    fn fault_in_everything(&self) {
        let head = self.residency.head();
        let has_evicted = || head.evicted.load(Ordering::Acquire) > 0 || head.moving_pages.load(Ordering::SeqCst) > 0;
        let mut liveness = DaemonLiveness::of(&self.residency);
        let mut watch = || {
            self.drain_wakeups();
            let _ = pagefold_os::fd::poll(&mut [], 1);
            if liveness.is_lost(&self.residency) {
                self.poison_all();
            }
            liveness.is_unreachable()
        };
        // By another thread: a thread that waits for a page does not see that the daemon dies. Where no thread may be started, the standby
        // thread does it.
        let is_done = has_evicted() && fault_in_by_thread(|| _ = watch());
        // By this thread otherwise, but not while no daemon can be reached.
        while !is_done && has_evicted() && watch() {}
        if !is_done && has_evicted() {
            fault_in_everything();
        }
    }

    /// Takes the owner lock, from a dead daemon if need be; false if a live holder does not give it away.
    fn settle(&self) -> bool {
        let mut liveness = DaemonLiveness::of(&self.residency);
        for _ in 0..SETTLE_TRIES {
            self.drain_wakeups();
            if self.residency.lock_within(SETTLE_MS) {
                return true;
            }
            if liveness.is_lost(&self.residency) {
                self.force_lock();
                self.apply_events();
                return true;
            }
        }
        false
    }

    /// Wakes the threads that touched a wakeup page of this thread.
    fn drain_wakeups(&self) {
        self.mover.iter().for_each(Wakeup::drain);
    }

    /// Reads the events that wait, after which there are no more, and keeps what is known of discards. The owner lock is held.
    fn read_last_events(&self) {
        while let Ok(Some(event)) = self.hold.read_event() {
            match event {
                uffd::Event::Remove(range) => self.residency.note_discard(range, sched::monotonic_ns()),
                uffd::Event::PageFault { addr, .. } => {
                    let _ = self.hold.wake(Range::pages_from(addr & !(PAGE - 1), 1));
                }
                // SAFETY: the kernel made the descriptor for us just now; the child has all its memory.
                uffd::Event::Fork(fd) => drop(unsafe { Fd::from_raw(fd) }),
                _ => {}
            }
        }
        for (kept, removal) in LAST_DISCARDS.iter().zip(self.residency.last_discards()) {
            kept.store(removal, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::MAY_START;
    use pagefold_protocol::message::{EVICT_BUSY, EvictEntry};
    use pagefold_protocol::residency_map::{FROZEN, OWNER_DAEMON, RESIDENT};
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Mutex, PoisonError, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_secs(60);

    /// Agents that leave share statics: one at a time.
    static LEAVING: Mutex<()> = Mutex::new(());

    /// What a daemon's greeting makes of this process, with two pages of memory of which the second is there; nothing, said
    /// loudly, if that may not be.
    fn connected() -> Option<(ColdSession, Connection, mem::Mapping)> {
        connected_with(uffd::FEATURE_EVENT_REMOVE)
    }

    fn connected_with(events: u64) -> Option<(ColdSession, Connection, mem::Mapping)> {
        let channel = Channel::create(c"channel").unwrap();
        let mut cold = None;
        if set_up(&mut cold, &channel, uffd::open_device().ok().as_ref()).is_err() {
            eprintln!("SKIPPED: no userfaultfd for us");
            return None;
        }
        let cold = cold.unwrap();
        let features = uffd::FEATURE_PAGEFAULT_FLAG_WP
            | uffd::FEATURE_WP_ASYNC
            | uffd::FEATURE_MOVE
            | uffd::FEATURE_POISON
            | events;
        cold.hold.enable(features).unwrap();
        let memory = mem::Mapping::anonymous(2 * PAGE_SIZE).unwrap();
        // SAFETY: inside the test's memory.
        unsafe { memory.as_ptr().add(PAGE_SIZE).write_bytes(7, PAGE_SIZE) };
        let range = Range::pages_from(memory.addr(), 2);
        cold.hold.register(range, uffd::MODE_MISSING | uffd::MODE_WP).unwrap();
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: the descriptor has one owner.
        let socket = unsafe { Fd::from_raw(std::os::fd::IntoRawFd::into_raw_fd(socket)) };
        Some((cold, Connection { socket, channel, epoch: 0 }, memory))
    }

    /// What is wrong with a channel is a daemon's affair; a userfaultfd that may not be is the kernel's, for good.
    #[test]
    fn an_agent_with_a_passing_lack_connects_again() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let phase = AtomicU32::new(1);
        let mut cold = None;
        // Greets a daemon that sends this as the channel; tells what came of it, and what the daemon heard.
        let mut greeted = |channel: Fd| {
            let (ours, theirs) = sock::pair().unwrap();
            let daemon = move || {
                let mut said = [0; size_of::<Packet>()];
                sock::receive(&theirs, &mut said, 0).unwrap();
                sock::send(&theirs, Packet::new(Op::Welcome).bytes(), &[channel.raw()]).unwrap();
                sock::receive(&theirs, &mut said, 0).unwrap();
                let status = Packet::parse(&said).unwrap().status;
                if status == 0 {
                    sock::send(&theirs, Packet::new(Op::ColdStart).bytes(), &[]).unwrap();
                }
                status
            };
            thread::scope(|scope| {
                let daemon = scope.spawn(daemon);
                let failure = greet(ours, &mut cold, &phase).err();
                (failure.map(|failure| (failure.errno, failure.rests)), daemon.join().unwrap())
            })
        };
        let short = memfd::create(c"channel", PAGE_SIZE as u64).unwrap();
        memfd::add_seals(&short, memfd::SEAL_SHRINK).unwrap();
        assert_eq!(greeted(short), (Some((Errno(libc::EPROTO), true)), libc::EPROTO));
        assert_eq!(phase.load(Ordering::Relaxed), 1, "it has given up");
        let (failure, status) = greeted(Channel::create(c"channel").unwrap().fd().duplicate().unwrap());
        if status != 0 {
            assert_eq!(phase.load(Ordering::Relaxed), 3, "{failure:?}");
            return eprintln!("SKIPPED: no userfaultfd for us");
        }
        assert_eq!(failure, None);
        // Nothing hangs on it.
        RESIDENCY.store(0, Ordering::Release);
    }

    #[test]
    fn a_leaving_agent_does_not_wait_for_a_dead_daemon() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        cold.residency.find_or_add(memory.addr()).unwrap();
        cold.residency.set_state(memory.addr(), EVICTED);
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            cold.leave();
            say.send(())
        });
        assert_eq!(said.recv_timeout(LONG), Ok(()));
        assert!(!super::super::fault_in::read_in(Range::pages_from(memory.addr(), 1)), "the page is no SIGBUS");
    }

    /// No thread may be started any more, and the daemon dies while a page is waited for.
    #[test]
    fn a_leaving_agent_without_threads_does_not_wait_for_a_dying_daemon() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        let residency = cold.residency;
        residency.find_or_add(memory.addr()).unwrap();
        residency.set_state(memory.addr(), EVICTED);
        RESIDENCY.store(residency.base(), Ordering::Release);
        super::super::fault_in::start_standby();
        MAY_START.store(false, Ordering::Release);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            cold.leave();
            say.send(())
        });
        // A daemon that serves, until the page is touched.
        while residency.head().paused_evictions.load(Ordering::SeqCst) == 0 {
            residency.head().heartbeat.fetch_add(1, Ordering::Release);
            thread::sleep(Duration::from_millis(1));
        }
        let left = said.recv_timeout(LONG);
        MAY_START.store(true, Ordering::Release);
        assert_eq!(left, Ok(()), "it waits for the page for ever");
        assert!(!super::super::fault_in::read_in(Range::pages_from(memory.addr(), 1)), "the page is no SIGBUS");
    }

    /// Does `act` beside a daemon that lives and has mapped the table too.
    fn with_a_daemon<T>(residency_fd: &Fd, act: impl FnOnce(&residency_map::Head) -> T) -> T {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = mem::Mapping::file(residency_fd.raw(), 0, residency_map::FILE_BYTES, prot, libc::MAP_SHARED).unwrap();
        // SAFETY: of that length, and mapped beyond the call.
        let head = unsafe { ResidencyMap::at(map.addr()) }.head();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    head.heartbeat.fetch_add(1, Ordering::Release);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let done = act(head);
            over.store(true, Ordering::Release);
            done
        })
    }

    /// What a bare mremap(2) took elsewhere is not out by the table, and not there.
    #[test]
    fn a_leaving_agent_waits_for_moving_pages() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        // SAFETY: dup(2) takes numbers only, and the new descriptor has this one owner.
        let hold = Uffd::from_fd(unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) });
        cold.residency.head().moving_pages.store(1, Ordering::SeqCst);
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        let residency_fd = cold.residency_fd.duplicate().unwrap();
        let (waits, came) = with_a_daemon(&residency_fd, |head| {
            let leaves = thread::spawn(move || cold.leave());
            while !leaves.is_finished() && head.paused_evictions.load(Ordering::SeqCst) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            // Another daemon takes over, and knows of it.
            head.epoch.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(50));
            let waits = !leaves.is_finished();
            // SAFETY: the bytes are ours.
            let came = unsafe { hold.copy(memory.addr(), [7u8; PAGE_SIZE].as_ptr() as u64, PAGE, 0) };
            head.moving_pages.store(0, Ordering::SeqCst);
            leaves.join().unwrap();
            (waits, came)
        });
        assert_eq!((waits, came), (true, (PAGE, None)));
    }

    /// A bare mremap(2) has taken a page elsewhere, of which the daemon has no time to hear.
    #[test]
    fn a_leaving_agent_waits_for_a_move_that_is_not_read_yet() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected_with(uffd::FEATURE_EVENT_REMAP) else { return };
        // SAFETY: dup(2) takes numbers only, and the new descriptor has this one owner.
        let hold = Uffd::from_fd(unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) });
        let (residency, from) = (cold.residency, memory.addr());
        let target = mem::Mapping::anonymous(PAGE_SIZE).unwrap();
        let to = target.addr();
        residency.find_or_add(from).unwrap();
        residency.set_state(from, EVICTED);
        RESIDENCY.store(residency.base(), Ordering::Release);
        let moves = thread::spawn(move || {
            let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: the test's memory, which is not used meanwhile.
            let _ = unsafe { syscall!(libc::SYS_mremap, from, PAGE, PAGE, fixed, to) };
        });
        let mut polls = [libc::pollfd { fd: hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no move");
        let residency_fd = cold.residency_fd.duplicate().unwrap();
        with_a_daemon(&residency_fd, |head| {
            let leaves = thread::spawn(move || cold.leave());
            while !leaves.is_finished() && head.paused_evictions.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(20));
            if matches!(hold.read_event_at_once(), Ok(Some(uffd::Event::Remap { .. }))) {
                head.moving_pages.store(1, Ordering::SeqCst);
                residency.set_state(from, RESIDENT);
                moves.join().unwrap();
                // SAFETY: the bytes are ours.
                unsafe { hold.copy(to, [7u8; PAGE_SIZE].as_ptr() as u64, PAGE, 0) };
                head.moving_pages.store(0, Ordering::SeqCst);
            }
            leaves.join().unwrap();
        });
        let is_there = super::super::fault_in::read_in(Range::pages_from(to, 1));
        // SAFETY: it can be read, as was just seen.
        assert_eq!(is_there.then(|| unsafe { *(to as *const u8) }), Some(7), "it is no page, or another");
        // Its first page may belong to another mapping by now.
        core::mem::forget(memory);
    }

    /// Memory that the program may not read, and that is sealed, so that its rights cannot change.
    #[test]
    fn a_page_that_cannot_return_never_reads_zeros() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        // SAFETY: the page is never read; it stays mapped to the end of the process.
        let sealed = unsafe {
            mem::protect(memory.addr(), PAGE, libc::PROT_NONE).unwrap();
            syscall!(libc::SYS_mseal, memory.addr(), PAGE, 0)
        };
        if sealed.is_err() {
            return eprintln!("SKIPPED: this kernel seals no memory");
        }
        cold.residency.find_or_add(memory.addr()).unwrap();
        cold.residency.set_state(memory.addr(), EVICTED);
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        // SAFETY: dup(2) takes numbers only, and the new descriptor has this one owner.
        let hold = Uffd::from_fd(unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) });
        with_a_daemon(&cold.residency_fd, |_| cold.fault_in_everything());
        assert_eq!(cold.residency.state(memory.addr()), EVICTED, "it came");
        cold.leave_now();
        // Registered again it takes nothing in where a mark is.
        let range = Range::pages_from(memory.addr(), 1);
        let _ = hold.register(range, uffd::MODE_MISSING);
        assert_eq!(hold.zero(range, 0).1, Some(Errno(libc::EEXIST)), "it would read zeros");
        core::mem::forget(memory);
    }

    /// While the agent makes pages exclusive, the daemon makes no room.
    #[test]
    fn making_pages_exclusive_does_not_wait_for_room() {
        let Some((cold, connection, memory)) = connected() else { return };
        let entry = EvictEntry {
            start: memory.addr(),
            around_start: memory.addr(),
            around_end: memory.addr() + PAGE,
            pages: 1,
            place: 0,
        };
        connection.channel.put_request(0, entry);
        connection.channel.put_answer_of_page(0, EVICT_BUSY);
        let bringing = || cold.residency.head().paused_evictions.load(Ordering::SeqCst);
        let asked = thread::scope(|scope| {
            let makes = scope.spawn(|| cold.make_exclusive(&connection.channel, 1));
            let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no fault");
            let asked = bringing();
            let page = [0u8; PAGE_SIZE];
            // SAFETY: the bytes are ours.
            let _ = unsafe { cold.hold.copy(memory.addr(), page.as_ptr() as u64, PAGE, 0) };
            makes.join().unwrap();
            asked
        });
        assert_eq!((asked, bringing()), (1, 0));
    }

    /// The daemon would take what goes out for what was there before.
    #[test]
    fn no_page_is_evicted_before_the_daemon_has_read_an_unmap() {
        let Some((mut cold, connection, memory)) = connected_with(uffd::FEATURE_EVENT_UNMAP) else { return };
        let page = memory.addr() + PAGE;
        let run = EvictEntry { start: page, around_start: page, around_end: page + PAGE, pages: 1, place: 0 };
        let went = thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: the test's memory, which is not used meanwhile.
                let _ = unsafe { mem::unmap(page, PAGE) };
            });
            let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no event");
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let mut went = || {
                // SAFETY: where nothing is any more.
                unsafe {
                    assert_eq!(mem::map(page, PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0), Ok(page));
                    (page as *mut u8).write_bytes(8, PAGE_SIZE);
                }
                connection.channel.put_request(0, run);
                connection.channel.write_page(0, &[8; PAGE_SIZE]);
                let _ = cold.evict_pages(&connection, 1, sched::monotonic_ns());
                cold.residency.state(page) == EVICTED
            };
            let went = went();
            while cold.hold.is_changing() {
                let _ = cold.hold.read_event_at_once();
            }
            went
        });
        // Else the mapping's end would wait for a reader.
        drop(cold);
        assert!(!went);
    }

    /// The daemon notes discards by its own clock, which in another time namespace is another.
    #[test]
    fn a_discard_is_timed_by_the_clock_that_noted_it() {
        const DAY_NS: u64 = 86_400_000_000_000;
        const NOTED: u64 = 400 * DAY_NS;
        let Some((mut cold, connection, memory)) = connected() else { return };
        let page = memory.addr() + PAGE;
        let run = EvictEntry { start: page, around_start: page, around_end: page + PAGE, pages: 1, place: 0 };
        connection.channel.put_request(0, run);
        connection.channel.write_page(0, &[7; PAGE_SIZE]);
        cold.residency.find_or_add(page).unwrap();
        let mut goes = |noted: u64, asked: u64| {
            cold.residency.note_discard(Range::pages_from(page, 1), noted);
            cold.evict_pages(&connection, 1, asked).unwrap();
            cold.residency.state(page) == EVICTED
        };
        assert!(!goes(NOTED, NOTED + 900_000_000), "too early by the daemon's clock");
        assert!(!goes(sched::monotonic_ns(), NOTED + DAY_NS), "too early by our own");
        assert!(goes(NOTED, NOTED + 1_100_000_000));
        // Else what is not there would wait.
        drop(cold);
    }

    /// A daemon dies while it holds the owner lock, and with the event of a discard unread; another process keeps its descriptor.
    #[test]
    fn a_leaving_agent_takes_the_owner_lock_of_a_dead_daemon() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        let first = memory.addr();
        // SAFETY: dup(2) takes numbers only, and the new descriptor has this one owner.
        let _kept = unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) };
        assert!(cold.residency.try_lock(OWNER_DAEMON));
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            // SAFETY: the test's memory, which is not used meanwhile.
            let _ = unsafe { mem::advise(first, PAGE, libc::MADV_DONTNEED) };
            say.send(())
        });
        let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no discard");
        let leaves = thread::spawn(move || cold.leave());
        assert_eq!(said.recv_timeout(LONG), Ok(()), "nobody reads of the discard");
        leaves.join().unwrap();
    }

    #[test]
    fn a_thread_that_waits_for_the_owner_lock_answers_wakeups() {
        let Some((cold, _connection, _memory)) = connected() else { return };
        let bell = mem::Mapping::anonymous(PAGE_SIZE).unwrap();
        let mover = cold.mover.as_ref().unwrap();
        mover.register(Range::pages_from(bell.addr(), 1), uffd::MODE_MISSING).unwrap();
        assert!(cold.residency.try_lock(OWNER_DAEMON));
        let rung = AtomicBool::new(false);
        let (end, rung) = (Instant::now() + LONG, &rung);
        thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: mapped and ours.
                unsafe { bell.as_ptr().read_volatile() };
                rung.store(true, Ordering::Relaxed);
            });
            while !rung.load(Ordering::Relaxed) && Instant::now() < end {
                cold.settle();
            }
            let heard = rung.load(Ordering::Relaxed);
            // Otherwise the waking thread would wait for ever.
            drop(cold);
            assert!(heard, "nobody answered");
        });
    }

    /// A daemon dies while it holds the owner lock, before it has read of a discard for which a page must wait to come back.
    #[test]
    fn a_page_moves_back_though_no_daemon_is_left() {
        let Some((mut cold, connection, memory)) = connected() else { return };
        let (residency, first) = (cold.residency, memory.addr());
        // It differs from its copy.
        let run =
            EvictEntry { start: first + PAGE, around_start: first, around_end: first + 2 * PAGE, pages: 1, place: 0 };
        connection.channel.put_request(0, run);
        // SAFETY: the test's memory, which is not used meanwhile.
        let discards = thread::spawn(move || unsafe { mem::advise(first, PAGE, libc::MADV_DONTNEED) });
        let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no discard");
        let over = Arc::new(AtomicBool::new(false));
        let dies = {
            let over = over.clone();
            move || {
                while !over.load(Ordering::Relaxed)
                    && (residency.state(first + PAGE) != FROZEN || !residency.try_lock(OWNER_DAEMON))
                {
                    thread::yield_now();
                }
            }
        };
        let dies = thread::spawn(dies);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            assert!(cold.residency.lock_within(1000));
            say.send((cold.evict_with_lock(&connection, 1, sched::monotonic_ns()), cold))
        });
        let (dropped, cold) = said.recv_timeout(LONG).expect("it waits for a daemon");
        over.store(true, Ordering::Relaxed);
        dies.join().unwrap();
        assert_eq!((dropped, discards.join().unwrap()), (Ok(1), Ok(())));
        // Else what is not there would wait.
        drop(cold);
        // SAFETY: mapped and ours.
        assert_eq!(unsafe { memory.as_ptr().add(PAGE_SIZE).read() }, 7);
    }
}
