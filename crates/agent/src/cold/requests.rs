//! What the daemon asks of a cold client, one request at a time.

use super::loan::ask_end_of_loan;
use super::session::{COLD, ColdSession, Connection};
use crate::address_space::regions::list_anonymous;
use crate::address_space::vm_flags;
use crate::attached;
use crate::runtime::housekeeping::housekeep;
use crate::runtime::thread::trim_stack;
use crate::state::{ATTACHED, COLD_AGENT, SHARED};
use core::sync::atomic::{AtomicU32, Ordering};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, sched, sock, uffd};
use pagefold_protocol::message::{LIST_MAX, Op, Packet};

/// The thread that manages all memory of an attached program ends if the daemon has told it to leave. The thread of a loan
/// is told by the other one.
pub(super) fn end_if_asked() {
    if COLD.load(Ordering::Relaxed) && attached::is_asked_to_leave() {
        SHARED.give_up();
    }
}

impl ColdSession {
    /// Answers requests until the daemon is gone or we are asked to leave.
    pub(super) fn serve(&mut self, connection: &mut Connection, phase: &AtomicU32) -> Result<()> {
        let mut looked = sched::monotonic_ns();
        // Greetings and evictions call deep.
        let mut was_deep = true;
        loop {
            housekeep(&mut looked, COLD_AGENT, self.mover.as_ref());
            let bell = self.mover.as_ref().map_or(-1, |mover| mover.fd().raw());
            let mut polls =
                [connection.socket.raw(), bell].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
            // A thread that asked before the wakeup page was registered could not wake this one.
            let goes_on = || phase.load(Ordering::Acquire) == 1;
            if goes_on() && pagefold_os::fd::poll(&mut polls, 500)? == 0 && core::mem::take(&mut was_deep) {
                trim_stack();
            }
            if polls[1].revents != 0 {
                self.drain_wakeups();
            }
            end_if_asked();
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
                ask_end_of_loan();
                return sock::send(&connection.socket, answer.bytes(), &[]);
            }
            was_deep |= request.op == Op::ColdEvict as u32;
            match self.answer(&request, connection) {
                Ok(count) => answer.count = count as u64,
                Err(Errno(errno)) => answer.status = errno,
            }
            // So that the daemon can tell what our work costs.
            answer.a = sched::thread_cpu_ns();
            sock::send(&connection.socket, answer.bytes(), &[])?;
        }
    }

    /// Brings the table up to what the kernel says about the memory of an attached program: the agent sees none of its
    /// calls.
    fn refresh_attributes(&mut self) -> Result<()> {
        let held = SHARED.mapping_lock.lock(COLD_AGENT);
        self.list_clock.measure(|| vm_flags::refresh(SHARED.tables(&held).table))
    }

    fn answer(&mut self, request: &Packet, connection: &Connection) -> Result<usize> {
        let count = (request.count as usize).min(LIST_MAX);
        const REGIONS: u32 = Op::Regions as u32;
        const WATCH: u32 = Op::Watch as u32;
        const COPY: u32 = Op::ColdCopy as u32;
        const DROP: u32 = Op::ColdEvict as u32;
        const RELEASE: u32 = Op::ColdUnregister as u32;
        match request.op {
            REGIONS => {
                if ATTACHED && request.b == 0 && self.list_clock.is_due() {
                    self.refresh_attributes()?;
                }
                list_anonymous(&self.maps, &connection.channel, request.b)
            }
            WATCH => {
                for index in 0..count {
                    let range: Range = connection.channel.request(index);
                    let status = self.hold.register(range, uffd::MODE_WP).map_or_else(|errno| errno.0, |()| 0);
                    connection.channel.put_answer(index, status);
                }
                Ok(count)
            }
            COPY => self.copy(connection, count, request.a as usize),
            DROP => {
                if ATTACHED && self.list_clock.is_old() {
                    self.refresh_attributes()?;
                }
                self.evict_pages(connection, count, request.a)
            }
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
}
