//! Reading ahead: whether a reader is sequential, and the queue of ranges that workers load for it.

use crate::cache::Cache;
use crate::image::Image;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Most ranges that wait for a worker. Few, because a late read-ahead is worth nothing.
const QUEUE_MAX: usize = 64;
/// First window of a sequential reader, in bytes; it doubles up to the setting.
const WINDOW_FIRST: u64 = 256 << 10;
/// Requests of one reader may overtake each other by this many bytes and still be in sequence.
const SEQUENCE_SLACK: u64 = 1 << 20;

/// The ranges to load.
#[derive(Default)]
pub(crate) struct ReadAhead {
    queue: Mutex<Queue>,
    signal: Condvar,
}

#[derive(Default)]
struct Queue {
    ranges: VecDeque<(Arc<Image>, Range<u64>)>,
    is_stopped: bool,
}

impl ReadAhead {
    /// Asks a worker to load `range` (in bytes) of `image`. Does nothing if the queue is full.
    pub(crate) fn request(&self, image: &Arc<Image>, range: Range<u64>) {
        let mut queue = self.queue.lock();
        if queue.ranges.len() < QUEUE_MAX {
            queue.ranges.push_back((image.clone(), range));
            self.signal.notify_one();
        }
    }

    /// Loads requested ranges until [`ReadAhead::stop`] is called. This is a worker's whole life.
    pub(crate) fn run_worker(&self, cache: &Cache) {
        loop {
            let (image, range) = {
                let mut queue = self.queue.lock();
                loop {
                    if queue.is_stopped {
                        return;
                    }
                    match queue.ranges.pop_front() {
                        Some(task) => break task,
                        None => self.signal.wait(&mut queue),
                    }
                }
            };
            cache.read_ahead(&image, range);
        }
    }

    /// Ends the workers after the range that each is loading.
    pub(crate) fn stop(&self) {
        self.queue.lock().is_stopped = true;
        self.signal.notify_all();
    }
}

/// The reads of one handle: whether they are sequential, and how far they are read ahead.
#[derive(Default)]
pub(crate) struct Sequence {
    /// Where a sequential reader reads next.
    next: u64,
    window: u64,
    ahead_until: u64,
}

impl Sequence {
    /// Notes a read and returns the range to read ahead.
    pub(crate) fn note(&mut self, offset: u64, length: u64, window_max: u64) -> Option<Range<u64>> {
        let end = offset + length;
        let in_sequence = offset.abs_diff(self.next) <= if self.window > 0 { SEQUENCE_SLACK } else { 0 };
        if !in_sequence {
            *self = Self { next: end, ..Self::default() };
            return None;
        }
        self.next = self.next.max(end);
        if self.window == 0 {
            self.window = WINDOW_FIRST.min(window_max);
        }
        let from = self.ahead_until.max(self.next);
        if self.window == 0 || from > self.next + self.window / 2 {
            return None;
        }
        let until = self.next + self.window;
        self.window = (self.window * 2).min(window_max);
        self.ahead_until = until;
        (from < until).then_some(from..until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_reader_is_read_ahead_and_a_random_one_is_not() {
        let mut sequence = Sequence::default();
        let mut covered = 0;
        for n in 0..200 {
            if let Some(range) = sequence.note(n * 4096, 4096, 2 << 20) {
                assert_eq!(range.start, covered.max((n + 1) * 4096), "no gap, nothing twice");
                covered = range.end;
            }
            assert!(covered >= (n + 2) * 4096, "the next read is covered");
        }
        assert!(covered <= 200 * 4096 + (2 << 20));
        let mut random = Sequence::default();
        for n in [5u64, 900, 3, 77, 12345] {
            assert_eq!(random.note(n * 4096, 4096, 2 << 20), None);
        }
        assert_eq!(Sequence::default().note(0, 4096, 0), None, "off");
    }
}
