//! Seats and blocks: what a writer takes of the arena.
//!
//! Where there are none left, some may be dead processes': those are cleaned
//! up after (`recover.rs`), and it is tried again.

use super::Table;
use llds::arena::SeatRef;

impl Table {
    /// The calling thread's seat. When all are taken, some may be dead processes': cleans up after those and tries again.
    #[inline]
    pub fn seat(&self) -> Result<SeatRef<'_>, llds::arena::Error> {
        match self.arena.seat() {
            Err(llds::arena::Error::Seats) => self.seat_again(),
            seat => seat,
        }
    }

    #[cold]
    fn seat_again(&self) -> Result<SeatRef<'_>, llds::arena::Error> {
        self.recover_all();
        self.arena.seat()
    }

    /// Allocates; when there is no room, takes back what this thread and those that have ended retired, then what dead
    /// processes hold, and tries again after each.
    #[inline]
    pub(super) fn or_recover(
        &self,
        seat: &SeatRef<'_>,
        alloc: impl Fn() -> Result<u64, llds::arena::Error>,
    ) -> Result<u64, llds::arena::Error> {
        alloc().or_else(|_| self.alloc_again(seat, alloc))
    }

    #[cold]
    fn alloc_again(
        &self,
        seat: &SeatRef<'_>,
        alloc: impl Fn() -> Result<u64, llds::arena::Error>,
    ) -> Result<u64, llds::arena::Error> {
        self.arena.collect(seat);
        self.arena.collect_left();
        let second = alloc();
        if second.is_ok() || self.arena.dead_seats().is_empty() {
            return second;
        }
        self.recover_all();
        alloc()
    }
}
