//! Arena access: how a writer gets its thread record and blocks from the arena.
//!
//! When none are left, dead processes may hold some: their threads are recovered
//! (`recover.rs`), and the request is repeated.

use super::Table;
use llds::arena::ThreadRef;

impl Table {
    /// Returns the calling thread's record. If all records are taken, recovers dead threads and tries again.
    #[inline]
    pub fn thread(&self) -> Result<ThreadRef<'_>, llds::arena::Error> {
        match self.arena.thread() {
            Err(llds::arena::Error::TooManyThreads) => self.thread_again(),
            thread => thread,
        }
    }

    #[cold]
    fn thread_again(&self) -> Result<ThreadRef<'_>, llds::arena::Error> {
        self.recover_all();
        self.arena.thread()
    }

    /// Allocates. If there is no room, frees the blocks that this thread and ended threads retired, then recovers dead
    /// threads, and tries again after each.
    #[inline]
    pub(super) fn or_recover(
        &self,
        thread: &ThreadRef<'_>,
        alloc: impl Fn() -> Result<u64, llds::arena::Error>,
    ) -> Result<u64, llds::arena::Error> {
        alloc().or_else(|_| self.alloc_again(thread, alloc))
    }

    #[cold]
    fn alloc_again(
        &self,
        thread: &ThreadRef<'_>,
        alloc: impl Fn() -> Result<u64, llds::arena::Error>,
    ) -> Result<u64, llds::arena::Error> {
        self.arena.collect(thread);
        self.arena.collect_left();
        let second = alloc();
        if second.is_ok() || self.arena.dead_threads().is_empty() {
            return second;
        }
        self.recover_all();
        alloc()
    }
}
