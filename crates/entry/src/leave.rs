//! What an entry left in a program is taken out again.

use crate::agent_thread::wait_for_end;
use crate::error::{EntryError, step};
use crate::instructions;
use crate::layout::{Layout, Traces};
use crate::look::open_memory;
use crate::memory;
use crate::registers::at_of;
use crate::stop::with_stopped;
use pagefold_os::{Range, procfs};
use pagefold_protocol::entry::{EntryPage, order};
use std::mem::offset_of;
use std::time::Duration;
use std::{io, thread};

/// How often the instructions are looked at until no thread executes them.
const TRIES: usize = 20;

/// Has the agent leave, and takes out of the program what its entry has left. No page may be merged any more.
///
/// # Errors
/// [`EntryError::Busy`] if the agent does not end in time, or no moment is found to take the rest out: then
/// [`clear_unfinished`] does; [`EntryError::Gone`] if the program has ended.
pub fn leave(traces: &Traces) -> Result<(), EntryError> {
    if procfs::start_time(traces.pid) != Some(traces.started) {
        return Err(EntryError::Gone);
    }
    let memory = open_memory(traces.pid)?;
    // Looked at once more: the number may have become another process's until the memory was open.
    if procfs::start_time(traces.pid) != Some(traces.started) {
        return Err(EntryError::Gone);
    }
    let order = Layout(traces.image).page() + offset_of!(EntryPage, order) as u64;
    memory.write(order, &order::LEAVE.to_ne_bytes()).map_err(step("telling the agent to leave"))?;
    if !wait_for_end(traces.pid, traces.image) {
        return Err(EntryError::Busy("the agent has not ended".into()));
    }
    clear_soon(traces.pid, instructions::range(traces.code))
}

/// Takes out what an entry, or a leave, that did not get to its end has left in process `pid`, which has no agent; false if
/// there is nothing.
///
/// # Errors
/// [`EntryError::Busy`] if no moment is found; as opening the program's memory.
pub fn clear_unfinished(pid: i32) -> Result<bool, EntryError> {
    let maps = procfs::maps(pid).map_err(|_| EntryError::Gone)?;
    let left = memory::unfinished(&open_memory(pid)?, &maps, &instructions::MARK);
    left.map_or(Ok(false), |left| clear_soon(pid, left).map(|()| true))
}

/// Takes the instructions out of the program again, at a moment at which no thread executes them.
pub(crate) fn clear(pid: i32, code: Range) -> Result<(), EntryError> {
    let cleared = with_stopped(pid, |stopped| {
        let executes =
            |thread| stopped.tracer().registers(thread).is_ok_and(|registers| code.overlaps(&at_of(&registers)));
        if stopped.still().any(executes) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let thread = stopped.still().next().ok_or_else(|| io::Error::from_raw_os_error(libc::EBUSY))?;
        stopped.tracer().write(thread, code.start, &vec![0; code.len() as usize])
    });
    match cleared {
        Ok(Err(error)) if error.raw_os_error() == Some(libc::EBUSY) => {
            Err(EntryError::Busy("an entry that was not finished is under way: it ends by itself within 10 s".into()))
        }
        Ok(done) => done.map_err(step("clearing the instructions of the entry")),
        Err(error) => Err(EntryError::Busy(error.to_string())),
    }
}

/// As [`clear`], tried again while a thread executes the instructions.
pub(crate) fn clear_soon(pid: i32, code: Range) -> Result<(), EntryError> {
    let mut last = Ok(());
    for _ in 0..TRIES {
        last = clear(pid, code);
        if !matches!(last, Err(EntryError::Busy(_))) {
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    last
}
