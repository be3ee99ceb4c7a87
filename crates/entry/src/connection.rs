//! The socket to an agent, which the agent makes and the daemon takes.

use crate::agent_thread::own_thread;
use crate::error::{EntryError, step};
use crate::instructions;
use crate::look::{look_at_threads, open_memory};
use crate::memory::{self, Memory};
use crate::waits::wait_for;
use pagefold_os::fd::Fd;
use pagefold_os::syscall;
use pagefold_protocol::entry::{EntryPage, order, stage};
use std::io;
use std::mem::offset_of;
use std::time::Duration;

/// How long an agent without a daemon may take to see that one asks for a connection: it looks twice a second.
const AGENT_LOOKS: Duration = Duration::from_secs(2);

/// Has the agent in process `pid`, which finds no daemon, open another socket; returns our end. The agent greets on it.
///
/// # Errors
/// [`EntryError`]: another daemon has the agent, or it is of another version.
pub fn ask_for_connection(pid: i32) -> Result<Fd, EntryError> {
    let refuse = |reason: &str| EntryError::Refused(format!("an agent is in it already, {reason}"));
    let maps = look_at_threads(pid)?;
    let own = own_thread(pid).ok_or(EntryError::Gone)?;
    let memory = open_memory(pid)?;
    let code = memory::unfinished(&memory, &maps, &instructions::MARK).map(|found| found.start);
    let words = code.and_then(|code| instructions::words(|bytes| memory.read(code, bytes).is_ok()));
    let page =
        words.map(|words| words.page).ok_or_else(|| refuse("and was not entered by this version of pagefold"))?;
    let asking = step("asking its agent for a connection");
    let put = |at: usize, word: u32| memory.write(page + at as u64, &word.to_ne_bytes()).map_err(&asking);
    put(offset_of!(EntryPage, stage), 0)?;
    put(offset_of!(EntryPage, order), order::CONNECT)?;
    let opened = wait_for(AGENT_LOOKS, || {
        let stage = memory.word(page + offset_of!(EntryPage, stage) as u64);
        stage.ok().filter(|stage| *stage == stage::OPEN)
    });
    if opened.is_none() {
        put(offset_of!(EntryPage, order), order::TAKEN)?;
        return Err(refuse("a client of another daemon"));
    }
    take_connection(own, &memory, page)
}

/// Takes the socket that the agent's thread `own` has opened, as its entry page says.
pub(crate) fn take_connection(own: i32, memory: &Memory, page: u64) -> Result<Fd, EntryError> {
    let taking = step("taking the agent's socket (Linux 6.9 or newer)");
    let fd = memory.word(page + offset_of!(EntryPage, requests) as u64).map_err(&taking)?;
    let requests = take_descriptor(own, fd as i32).map_err(&taking)?;
    let order = page + offset_of!(EntryPage, order) as u64;
    memory.write(order, &order::TAKEN.to_ne_bytes()).map_err(step("writing the agent"))?;
    Ok(requests)
}

/// A copy of descriptor `fd` of `thread`, which has descriptors of its own.
fn take_descriptor(thread: i32, fd: i32) -> io::Result<Fd> {
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    // SAFETY: pidfd_open(2) takes no pointer.
    let pidfd = unsafe { syscall!(libc::SYS_pidfd_open, thread, PIDFD_THREAD) }?;
    // SAFETY: just made, ours.
    let pidfd = unsafe { Fd::from_raw(pidfd as i32) };
    // SAFETY: pidfd_getfd(2) takes no pointer.
    let taken = unsafe { syscall!(libc::SYS_pidfd_getfd, pidfd.raw(), fd, 0) }?;
    // SAFETY: just made, ours.
    Ok(unsafe { Fd::from_raw(taken as i32) })
}
