//! Where the parts of an agent lie in a program.

use crate::image::AgentImage;
use crate::instructions;
use crate::memory;
use pagefold_os::procfs::OwnedMap;
use pagefold_os::{PAGE_SIZE, Range, procfs};

/// Bytes of the stack of the agent's first thread.
const STACK_LEN: u64 = 256 << 10;

const PAGE: u64 = PAGE_SIZE as u64;

/// The agent's memory in a program: its image, the entry page, and the first stack.
#[derive(Clone, Copy)]
pub(crate) struct Layout(pub(crate) Range);

impl Layout {
    /// A place for `agent` between `maps`.
    pub(crate) fn free(maps: &[OwnedMap], agent: &AgentImage) -> Option<Layout> {
        memory::free_range(maps, agent.len + PAGE + STACK_LEN).map(Layout)
    }

    /// The entry page.
    pub(crate) const fn page(&self) -> u64 {
        self.stack() - PAGE
    }

    /// The first stack.
    pub(crate) const fn stack(&self) -> u64 {
        self.0.end - STACK_LEN
    }
}

/// What an entry leaves in a program as long as the agent is there.
#[derive(Clone, Copy, Debug)]
pub struct Traces {
    /// The process.
    pub pid: i32,
    /// Its start time, in ticks since boot.
    pub started: u64,
    /// The agent's memory.
    pub image: Range,
    /// Where the instructions lie.
    pub code: u64,
}

impl Traces {
    /// Of process `pid`, as its agent says: where its memory lies, and where the code that leaves. `None` if that cannot be.
    pub fn of(pid: i32, image: Range, leave_at: u64) -> Option<Traces> {
        let is_whole = image.start.is_multiple_of(PAGE) && image.len() > STACK_LEN + PAGE;
        let code = instructions::code_at(leave_at)?;
        Some(Traces { pid, started: procfs::start_time(pid)?, image, code }).filter(|_| is_whole)
    }
}
