//! How the agent connects to a daemon, and what it sets up for that.
//!
//! Merged ranges are registered with one userfaultfd, `hold`. While a daemon is slow, refuses the agent or is gone, threads
//! of the program may wait for its events. So the agent of the earlier connection answers them meanwhile, and each step
//! passes its `hold` on or keeps it. Everything that can fail comes before `hold` is taken over.

use super::earlier_segments::EarlierSegments;
use super::freeze_area::FreezeArea;
use super::session::{Agent, WAKEUP};
use crate::address_space::heap::HeapEnd;
use crate::address_space::list_clock::ListClock;
use crate::address_space::maps::Maps;
use crate::address_space::rss_watch::RssWatch;
use crate::attached;
use crate::owned_ranges::{Owned, hide};
use crate::runtime::affinity::Affinity;
use crate::runtime::connection::{ANSWER_MS, REFUSED_MS, is_lasting, wait_for_answer};
use crate::runtime::housekeeping::exit_if_alone;
use crate::runtime::sparse_table::SparseTable;
use crate::state::{AGENT, ATTACHED, SHARED, is_lent, read_settings};
use core::ffi::CStr;
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{sched, sock, syscall};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::handshake::{
    HOLD_FEATURES, WATCH_FEATURES, receive_welcome, send_hello, send_unable, take_welcome,
};
use pagefold_protocol::message::{self, Op, Packet};

pub(super) fn wait_or_leave(left: Option<&Agent>, ms: i32) {
    let began = sched::monotonic_ns();
    exit_if_alone();
    while SHARED.phase.load(Ordering::Acquire) == 1 && sched::monotonic_ns() - began < ms as u64 * 1_000_000 {
        if attached::is_asked_to_leave() {
            return SHARED.give_up();
        }
        let Some(agent) = left else {
            let timeout = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            // SAFETY: the word outlives the call; [`stop`] wakes us.
            let _ = unsafe {
                syscall!(
                    libc::SYS_futex,
                    SHARED.phase.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    1,
                    core::ptr::from_ref(&timeout)
                )
            };
            continue;
        };
        let fd = agent.hold.fd().raw();
        let _ = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], 20);
        agent.serve_alone();
    }
}

/// Takes charge, without a daemon yet, of merged pages without an agent: those of a forked child, or of an agent that left.
/// An agent that may not make a userfaultfd gets one from the daemon.
pub(super) fn adopt_merged_ranges(left: &mut Option<Agent>) {
    if left.is_some() {
        // Must not wait for the mapping lock either: its holder may wait for a page that only `left` answers for.
        return;
    }
    let held = SHARED.mapping_lock.lock(AGENT);
    let none = SHARED.tables(&held).merged.is_empty();
    drop(held);
    if !none {
        let made = Channel::create(c"pagefold-alone")
            .and_then(|channel| set_up(channel, open_files()?, uffd::open_device().ok().as_ref(), left));
        *left = made.ok();
    }
}

fn open_files() -> Result<(Fd, Maps)> {
    Ok((Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?, Maps::open()?))
}

/// Greets the daemon and sets everything up; the socket is the daemon's.
///
/// `left` is what an earlier connection left: its hold is taken over, for merged ranges hang on it.
pub(super) fn connect(left: &mut Option<Agent>) -> Result<(Agent, Fd)> {
    let socket = attached::connect()?;
    let mut hello = Packet::new(Op::Hello);
    hello.a = if SHARED.all.load(Ordering::Relaxed) { message::HELLO_ALL } else { 0 };
    if SHARED.forked.load(Ordering::Relaxed) {
        hello.a |= message::HELLO_FORKED;
    }
    attached::describe_entry(&mut hello);
    let away = is_lent();
    if away {
        hello.a |= message::HELLO_LENT;
    }
    hello.text = *read_settings().1;
    let files = open_files()?;
    sock::set_timeout(&socket, ANSWER_MS)?;
    let to_keeper = attached::new_keeper_socket()?;
    send_hello(&socket, &hello, &files.0, to_keeper.as_ref().map(|(_, theirs)| theirs))?;
    let hold = left.as_ref().map_or(-1, |agent| agent.hold.fd().raw());
    wait_for_answer(&socket, &SHARED.phase, hold, || left.iter().for_each(Agent::serve_alone))?;
    let mut fds = receive_welcome(&socket)?;
    let made = take_welcome(&mut fds)
        .and_then(|(channel, device)| Ok((set_up(channel, files, device.as_ref(), left)?, device)));
    match made {
        Ok((mut agent, device)) => {
            (agent.device, agent.is_lent) = (device, away);
            // From now on we wait for requests as long as it takes.
            let told =
                sock::send(&socket, Packet::new(Op::Ready).bytes(), &[]).and_then(|()| sock::set_timeout(&socket, 0));
            if let Err(errno) = told {
                // Its hold is the one that merged ranges hang on.
                *left = Some(agent);
                return Err(errno);
            }
            // The daemon has passed on the other end before it sent its welcome.
            if let Some((ours, _)) = to_keeper {
                attached::begin_keeper_socket(ours);
            }
            Ok((agent, socket))
        }
        Err(errno) => {
            let told = send_unable(&socket, errno);
            drop(socket);
            if left.is_none() && is_lasting(errno) {
                SHARED.give_up();
            } else {
                wait_or_leave(left.as_ref(), REFUSED_MS);
            }
            told.and(Err(errno))
        }
    }
}

fn set_up(
    channel: Channel,
    (pagemap, maps): (Fd, Maps),
    device: Option<&Fd>,
    left: &mut Option<Agent>,
) -> Result<Agent> {
    hide(channel.mapping());
    let watch = Uffd::new(device, WATCH_FEATURES)?;
    let make = || attached::take_hold().map_or_else(|| Uffd::new(device, HOLD_FEATURES), Ok);
    let new = if left.is_none() { Some(make()?) } else { None };
    let quiet = if ATTACHED { Some(Uffd::new(device, HOLD_FEATURES & !uffd::FEATURE_EVENT_REMOVE)?) } else { None };
    let freeze_area = FreezeArea::new(&watch)?;
    let heap = HeapEnd::new(device)?;
    let is_new = new.is_some();
    freeze_area.own();
    // From here on nothing fails: merged ranges hang on it.
    let new = new.map(|hold| (hold, EarlierSegments::none()));
    let taken_over = new.or_else(|| left.take().map(|agent| (agent.hold, agent.earlier)));
    let (hold, earlier) = taken_over.ok_or(Errno(libc::EBADF))?;
    let agent = Agent {
        channel,
        watch,
        hold,
        quiet,
        heap,
        device: None,
        is_lent: false,
        freeze_area,
        huge_freeze_area: None,
        nursery: None,
        segments: SparseTable::new(Owned::Segments),
        earlier,
        pagemap,
        maps,
        rss_watch: RssWatch::begin(),
        list_clock: ListClock::default(),
        affinity: Affinity::current(),
        cpu_before_ns: sched::thread_cpu_ns(),
    };
    if is_new && !ATTACHED {
        WAKEUP.register(&agent.hold);
    }
    agent.hold_merged(is_new);
    dump_merged_pages();
    Ok(agent)
}

/// Core dumps must contain merged pages: to the kernel they are private file pages, which it leaves out by default.
fn dump_merged_pages() {
    // A thread's directory has no such file; where the first thread has ended this was done before, or is not done.
    const PATH: &CStr = c"/proc/self/coredump_filter";
    let Ok(file) = Fd::open(PATH, libc::O_RDWR, 0) else { return };
    let mut text = [0u8; 16];
    let Ok(got) = file.read(&mut text) else { return };
    let digits = text[..got].iter().map_while(|&b| (b as char).to_digit(16));
    let filter = digits.fold(0u32, |all, digit| all << 4 | digit) | 1 << 2;
    let mut out = *b"0x00000000";
    for (index, byte) in out[2..].iter_mut().enumerate() {
        let nibble = (filter >> (28 - 4 * index)) & 15;
        *byte = b"0123456789abcdef"[nibble as usize];
    }
    let _ = file.write(&out);
}

/// For tests: there is one agent in a process.
#[cfg(test)]
pub(crate) fn one_at_a_time() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// For tests: an agent without a daemon, which has `segment` as the first; `None` if there is no userfaultfd.
#[cfg(test)]
pub(crate) fn alone(segment: Fd) -> Option<Agent> {
    use pagefold_os::{PAGE_SIZE, mem};
    let channel = Channel::create(c"channel").ok()?;
    let mut agent = set_up(channel, open_files().ok()?, uffd::open_device().ok().as_ref(), &mut None).ok()?;
    let (len, _) = pagefold_os::memfd::len_and_inode(segment.raw()).ok()?;
    let map = mem::Mapping::file(segment.raw(), 0, len as usize, libc::PROT_READ, libc::MAP_SHARED).ok()?;
    let segment = super::session::Segment { id: 0, fd: segment, map, pages: (len / PAGE_SIZE as u64) as u32 };
    agent.segments.put(0, segment).then_some(agent)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that connects again has told the daemon before what it took until then.
    #[test]
    fn the_agent_reports_its_processor_time_once() {
        let _one = one_at_a_time();
        let connect = || {
            let channel = Channel::create(c"channel").unwrap();
            set_up(channel, open_files().unwrap(), uffd::open_device().ok().as_ref(), &mut None)
        };
        let mut told = 0;
        let began = sched::thread_cpu_ns();
        for _ in 0..2 {
            let Ok(agent) = connect() else {
                eprintln!("SKIPPED: no userfaultfd for us");
                return;
            };
            let before = sched::thread_cpu_ns();
            while sched::thread_cpu_ns() - before < 50_000_000 {}
            agent.tell_cpu_time();
            told += agent.counters().cpu_ns.load(Ordering::Relaxed);
        }
        let took = sched::thread_cpu_ns() - began;
        assert!(told >= 100_000_000 && told <= took, "{told} of {took} ns");
    }
}
