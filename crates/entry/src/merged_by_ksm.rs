//! A program's memory in the hands of the kernel's KSM, without an agent.

use crate::agent_thread::own_thread;
use crate::borrowed_thread::{Plan, Purpose, borrow_aside};
use crate::error::EntryError;
use crate::instructions;
use crate::leave::{clear, clear_soon};
use crate::look::{look_at_threads, open_memory};
use crate::memory;
use std::time::Duration;

/// Has the kernel's KSM merge the memory of process `pid`, or (`merges` is false) not any more, as `PR_SET_MEMORY_MERGE` of
/// prctl(2) does. Children inherit it. Returns how long one of its threads stood still.
///
/// A seccomp filter is suspended for the call. Only if the tracer is killed in these microseconds, the filter judges it.
///
/// # Errors
/// [`EntryError`].
pub fn set_merged_by_ksm(pid: i32, merges: bool) -> Result<Duration, EntryError> {
    let maps = look_at_threads(pid)?;
    let memory = open_memory(pid)?;
    if let Some(left) = memory::unfinished(&memory, &maps, &instructions::MARK).filter(|_| own_thread(pid).is_none()) {
        clear(pid, left)?;
    }
    let borrowed = borrow_aside(&Plan { pid, what: Purpose::Ksm(merges), maps: &maps })?;
    clear_soon(pid, instructions::range(borrowed.code))?;
    Ok(borrowed.still)
}
