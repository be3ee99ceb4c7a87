//! Operations in progress, written down so that the other side, or a successor, knows of them: a discard by a call of the
//! program, and a move that the daemon enters; and the room below the client's memory limit.

use super::Head;
use core::sync::atomic::Ordering;
use pagefold_os::Range;

/// Flag in `discard_end`: the kernel has discarded the range.
const DISCARD_DONE: u64 = 1;

/// Flag in `move_to`: the states at the target have been cleared.
const MOVE_CLEARED: u64 = 1;

impl Head {
    /// Daemon: there is room for `pages` more pages below the client's memory limit.
    pub fn set_headroom(&self, pages: u64) {
        self.headroom.store(pages.saturating_add(1), Ordering::Release);
    }

    /// Pages for which there is room, as far as is known.
    pub fn headroom(&self) -> u64 {
        self.headroom.load(Ordering::Acquire).wrapping_sub(1)
    }

    /// The range that a call of the program is discarding, and whether the kernel has discarded it. Of two consecutive calls
    /// it reports one or the other, if the caller holds the owner lock.
    pub fn discarding(&self) -> Option<(Range, bool)> {
        let [end, start, again] =
            [&self.discard_end, &self.discard_start, &self.discard_end].map(|word| word.load(Ordering::SeqCst));
        let range = Range { start, end: end & !DISCARD_DONE };
        (end == again && start < range.end && range.end < 1 << 47).then_some((range, end & DISCARD_DONE != 0))
    }

    /// Agent: a call of the program discards `range` from now on, or has done so; none does if `range` is empty. Returns
    /// what was set before, for the call that a signal handler interrupts.
    pub fn set_discarding(&self, range: Range, is_done: bool) -> (Range, bool) {
        let start = self.discard_start.load(Ordering::SeqCst);
        let mut end = self.discard_end.load(Ordering::SeqCst);
        if start != range.start {
            // The end goes first and comes last: `discarding` must never pair one call's start with another's end.
            end = self.discard_end.swap(0, Ordering::SeqCst);
            self.discard_start.store(range.start, Ordering::SeqCst);
        }
        let new_end = match range.is_empty() {
            true => 0,
            false => range.end | if is_done { DISCARD_DONE } else { 0 },
        };
        self.discard_end.store(new_end, Ordering::SeqCst);
        (Range { start, end: end & !DISCARD_DONE }, end & DISCARD_DONE != 0)
    }

    /// Daemon, with the owner lock: begins to enter an mremap(2) from `from` to `to`. The target has no states any more if
    /// `is_cleared`. A successor finishes it if this daemon dies.
    pub fn begin_move(&self, from: Range, to: u64, is_cleared: bool) {
        self.move_start.store(from.start, Ordering::SeqCst);
        self.move_to.store(to | if is_cleared { MOVE_CLEARED } else { 0 }, Ordering::SeqCst);
        // Last: a record with an end is complete.
        self.move_end.store(from.end, Ordering::SeqCst);
    }

    /// Daemon: the move is in the map.
    pub fn end_move(&self) {
        self.move_end.store(0, Ordering::SeqCst);
    }

    /// The move that a dead daemon left unfinished, with the owner lock: see [`begin_move`](Self::begin_move).
    pub fn begun_move(&self) -> Option<(Range, u64, bool)> {
        let [start, end, to] =
            [&self.move_start, &self.move_end, &self.move_to].map(|word| word.load(Ordering::SeqCst));
        let (range, is_cleared) = (Range { start, end }, to & MOVE_CLEARED != 0);
        let to = to & !MOVE_CLEARED;
        let is_valid = !range.is_empty() && end < 1 << 47 && to < 1 << 47;
        is_valid.then_some((range, to, is_cleared))
    }
}

#[cfg(test)]
mod tests {
    use super::super::CHUNK_BYTES;
    use super::super::tests::with_map;
    use pagefold_os::Range;

    #[test]
    fn a_discard_in_a_discard_ends_alone() {
        with_map(|map| {
            let head = map.head();
            let [outer, inner] =
                [4, 6].map(|chunk| Range { start: chunk * CHUNK_BYTES, end: (chunk + 1) * CHUNK_BYTES });
            assert!(head.set_discarding(outer, false).0.is_empty() && head.discarding() == Some((outer, false)));
            let before = head.set_discarding(inner, false);
            head.set_discarding(inner, true);
            assert_eq!((before, head.discarding()), ((outer, false), Some((inner, true))));
            head.set_discarding(before.0, before.1);
            assert_eq!(head.discarding(), Some((outer, false)));
            head.set_discarding(Range { start: 0, end: 0 }, false);
            assert_eq!(head.discarding(), None);
        });
    }
}
