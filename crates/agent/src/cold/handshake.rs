//! How the agent of a cold client connects to a daemon, and what it makes for its first connection.
//!
//! Userfaultfd and residency map are made once and outlive each connection: a new daemon finds both.

use super::leave::restore_discards;
use super::session::{ColdSession, Connection, RESIDENCY, TIER_MAX, TOLERANCE_PPM, WAKEUP};
use crate::address_space::list_clock::ListClock;
use crate::address_space::maps::Maps;
use crate::attached;
use crate::owned_ranges::{self, Owned, OwnedMapping};
use crate::runtime::connection::{ANSWER_MS, is_lasting, wait_for_answer};
use crate::state::{is_lent, read_settings};
use core::sync::atomic::{AtomicU32, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem, memfd, sched, sock, syscall};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::handshake::{receive, receive_welcome, send_hello, send_unable, take_welcome};
use pagefold_protocol::message::{self, FETCH_PAGES_MAX, Op, Packet};
use pagefold_protocol::residency_map::{self, ResidencyMap};

/// Why there is no connection.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) errno: Errno,
    /// A daemon answered, and another attempt right now would be of no use.
    pub(super) rests: bool,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure { errno, rests: false }
    }
}

pub(super) fn connect(cold: &mut Option<ColdSession>, phase: &AtomicU32) -> core::result::Result<Connection, Failure> {
    greet(attached::connect()?, cold, phase)
}

/// Greets the daemon at `socket`; makes what is missing.
fn greet(socket: Fd, cold: &mut Option<ColdSession>, phase: &AtomicU32) -> core::result::Result<Connection, Failure> {
    let mut hello = Packet::new(Op::Hello);
    hello.a = message::HELLO_ALL | message::HELLO_COLD;
    if is_lent() {
        hello.a |= message::HELLO_LENT;
    }
    let options = [&TOLERANCE_PPM, &TIER_MAX].map(|option| option.load(Ordering::Relaxed));
    [hello.b, hello.count] = options;
    attached::describe_entry(&mut hello);
    hello.text = *read_settings().1;
    let pagemap = Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?;
    sock::set_timeout(&socket, ANSWER_MS)?;
    // The thread of a loan has the one of live merging.
    let to_keeper = if is_lent() { None } else { attached::new_keeper_socket()? };
    send_hello(&socket, &hello, &pagemap, to_keeper.as_ref().map(|(_, theirs)| theirs))?;
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
    let [sequence, count] = options;
    let ready = Packet { a: u64::from(cold.bare), b, sequence, count, ..Packet::new(Op::Ready) };
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
    // The daemon has passed on the other end before it sent its welcome.
    if let Some((ours, _)) = to_keeper {
        attached::begin_keeper_socket(ours);
    }
    RESIDENCY.store(cold.residency.base(), Ordering::Release);
    sock::set_timeout(&socket, 0)?;
    Ok(Connection { socket, channel, epoch: go.a as u32 })
}

pub(super) fn set_up(cold: &mut Option<ColdSession>, channel: &Channel, device: Option<&Fd>) -> Result<()> {
    owned_ranges::hide(channel.mapping());
    if cold.is_none() {
        *cold = Some(make(device)?);
    }
    let Some(cold) = cold else { return Err(Errno(libc::EPROTO)) };
    if cold.freeze_area.is_none() {
        let mover = Uffd::new(device, uffd::FEATURE_MOVE | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_PAGEFAULT_FLAG_WP)?;
        let map = mem::Mapping::anonymous(FETCH_PAGES_MAX * PAGE_SIZE)?;
        let range = Range::pages_from(map.addr(), FETCH_PAGES_MAX as u64);
        let freeze_area = OwnedMapping::new(Owned::ColdFreezeArea, map, range);
        // The target of a move must be registered; not in missing mode, so that no thread ever waits there.
        mover.register(range, uffd::MODE_WP)?;
        WAKEUP.register(&mover);
        freeze_area.register();
        cold.mover = Some(mover);
        cold.freeze_area = Some(freeze_area);
    }
    Ok(())
}

fn make(device: Option<&Fd>) -> Result<ColdSession> {
    let maps = Maps::open()?;
    let pagemap = Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?;
    let hold = Uffd::bare(device)?;
    let residency_fd = memfd::create(residency_map::FILE_NAME, residency_map::FILE_BYTES_WITH_WAKINGS as u64)?;
    memfd::add_seals(&residency_fd, memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL)?;
    let map = mem::Mapping::file(residency_fd.raw(), 0, residency_map::FILE_BYTES, mem::READ_WRITE, libc::MAP_SHARED)?;
    owned_ranges::hide(&map);
    // SAFETY: the file cannot shrink, and the mapping is kept for good.
    let residency = unsafe { ResidencyMap::at(map.addr()) };
    core::mem::forget(map);
    residency.initialize();
    restore_discards(&residency);
    // SAFETY: the call takes no arguments.
    let pid = unsafe { syscall!(libc::SYS_getpid) }.unwrap_or(0);
    residency.head().pid.store(pid as u32, Ordering::Relaxed);
    Ok(ColdSession {
        maps,
        pagemap,
        hold,
        bare: true,
        mover: None,
        freeze_area: None,
        list_clock: ListClock::default(),
        residency_fd,
        residency,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::fixture::LEAVING;
    use std::sync::PoisonError;
    use std::thread;

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
}
