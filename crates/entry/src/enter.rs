//! The steps of an entry.
//!
//! 1. [`look`] decides whether the program can be entered, and says why not.
//! 2. One thread of it is stopped, at a moment at which nothing would be lost: no signal is on its way to the thread, and
//!    the thread is not in the middle of a restartable sequence. Its registers are set to the [`instructions`], and it goes
//!    on.
//! 3. The new thread waits for the agent's code, which is written from outside; then it begins.
//! 4. The agent opens its socket, and the other end is taken.
//!
//! After each step the tracer may die: the program goes on, and the new thread ends by itself if it is not served.

use crate::agent_thread::{own_thread, wait_for_end};
use crate::borrowed_thread::{Borrowed, Plan, Purpose, borrow_aside};
use crate::connection::take_connection;
use crate::error::{EntryError, step};
use crate::image::AgentImage;
use crate::instructions;
use crate::layout::Layout;
use crate::leave::clear;
use crate::look::{look, open_memory};
use crate::memory::{self, Memory};
use crate::waits::wait_until;
use pagefold_os::fd::Fd;
use pagefold_protocol::entry::{EntryPage, SOCKET_MAX, order, stage};
use std::io;
use std::mem::offset_of;
use std::time::Duration;

/// What the agent needs to know.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Where the daemon listens.
    pub socket: &'a [u8],
    /// The domain's name, 64 bytes at most.
    pub domain: &'a str,
    /// All large private memory is managed, not only what the program marks as mergeable.
    pub all: bool,
    /// Idle memory is evicted to the cold tier instead of being merged.
    pub cold: Option<ColdOptions>,
    /// The agent makes its userfaultfd by a system call, for the daemon has no device for it.
    pub makes_userfaultfd: bool,
}

/// What a client of the cold tier asks for; zeros stand for the daemon's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColdOptions {
    /// Share of run time that may be lost to refaults, in millionths.
    pub tolerance_ppm: u64,
    /// Limit of the domain's tier in bytes, if this client is its first.
    pub tier_max: u64,
}

/// An agent in a program, before its greeting.
#[derive(Debug)]
pub struct Entered {
    /// Our end of the agent's connection.
    pub requests: Fd,
    /// How long the borrowed thread stood still.
    pub still: Duration,
    /// The program's filters let its agent map a file as code.
    pub may_map_code: bool,
}

/// Enters process `pid` and starts `agent` there.
///
/// # Errors
/// [`EntryError`]; the program goes on as if nothing had been.
pub fn enter(pid: i32, agent: &AgentImage, settings: &Settings<'_>) -> Result<Entered, EntryError> {
    if settings.socket.len() >= SOCKET_MAX || settings.domain.len() > 64 {
        return Err(EntryError::Refused("the path of the daemon's socket or the domain's name is too long".into()));
    }
    let maps = look(pid)?;
    let memory = open_memory(pid)?;
    if let Some(left) = memory::unfinished(&memory, &maps, &instructions::MARK) {
        clear(pid, left)?;
    }
    let layout = Layout::free(&maps, agent)
        .ok_or_else(|| EntryError::Refused("its address space has no room for the agent".into()))?;
    let what = Purpose::Agent(agent, layout, settings.makes_userfaultfd);
    let borrowed = borrow_aside(&Plan { pid, what, maps: &maps })?;
    let memory = open_memory(pid)?;
    let result = begin(pid, agent, &layout, settings, &borrowed, &memory);
    match result {
        Ok(requests) => Ok(Entered { requests, still: borrowed.still, may_map_code: borrowed.leeway.code_of_file }),
        Err(error) => {
            let _ = memory.write(layout.page() + offset_of!(EntryPage, order) as u64, &order::GIVE_UP.to_ne_bytes());
            wait_for_end(pid, layout.0);
            let _ = clear(pid, instructions::range(borrowed.code));
            Err(error)
        }
    }
}

/// Writes the agent's code, has its first thread begin, and takes its socket.
fn begin(
    pid: i32,
    agent: &AgentImage,
    layout: &Layout,
    settings: &Settings<'_>,
    borrowed: &Borrowed,
    memory: &Memory,
) -> Result<Fd, EntryError> {
    let word = |at: usize| memory.word(layout.page() + at as u64);
    let late = |what: &str| EntryError::Busy(what.into());
    // A program without room for a mapping or a thread goes on without either.
    let thread = wait_until(|| {
        // In this order: the kernel writes the number before the borrowed thread goes back.
        let left = word(offset_of!(EntryPage, left)).unwrap_or(0);
        let thread = word(offset_of!(EntryPage, thread)).unwrap_or(0) as i32;
        (left != 0 && thread > 0).then_some(thread)
    });
    let thread = thread.ok_or_else(|| {
        late("the thread did not get to map memory and start another (limits of memory, address space or threads?)")
    })?;
    let writing = step("writing the agent");
    memory.write(layout.0.start, &agent.at(layout.0.start)).map_err(&writing)?;
    let put = |at: usize, bytes: &[u8]| memory.write(layout.page() + at as u64, bytes).map_err(&writing);
    let both = |words: [u64; 2]| words.map(u64::to_ne_bytes).concat();
    put(offset_of!(EntryPage, socket_len), &(settings.socket.len() as u32).to_ne_bytes())?;
    put(offset_of!(EntryPage, all), &u32::from(settings.all).to_ne_bytes())?;
    put(offset_of!(EntryPage, may_follow), &u16::from(borrowed.leeway.follow).to_ne_bytes())?;
    put(offset_of!(EntryPage, may_execute), &u16::from(borrowed.leeway.execute).to_ne_bytes())?;
    if let Some(cold) = settings.cold {
        put(offset_of!(EntryPage, cold), &1u32.to_ne_bytes())?;
        put(offset_of!(EntryPage, cold_options), &both([cold.tolerance_ppm, cold.tier_max]))?;
    }
    put(offset_of!(EntryPage, image), &both([layout.0.start, layout.0.len()]))?;
    put(offset_of!(EntryPage, stack), &both([layout.stack(), layout.0.end]))?;
    put(offset_of!(EntryPage, leave_at), &instructions::leave_at(borrowed.code).to_ne_bytes())?;
    put(offset_of!(EntryPage, domain), settings.domain.as_bytes())?;
    put(offset_of!(EntryPage, socket), settings.socket)?;
    put(offset_of!(EntryPage, order), &order::BEGIN.to_ne_bytes())?;
    let opened = wait_until(|| word(offset_of!(EntryPage, stage)).ok().filter(|stage| *stage != 0));
    if opened != Some(stage::OPEN) {
        let errno = word(offset_of!(EntryPage, error)).unwrap_or(0) as i32;
        if errno == libc::EACCES {
            return Err(EntryError::Refused("it forbids that others read its memory (PR_SET_DUMPABLE)".into()));
        }
        return Err(EntryError::System {
            step: "the agent could not begin",
            error: io::Error::from_raw_os_error(errno),
        });
    }
    // The number that the kernel wrote is that of the program's own namespace of processes.
    take_connection(own_thread(pid).unwrap_or(thread), memory, layout.page())
}
