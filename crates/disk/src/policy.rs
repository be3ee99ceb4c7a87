//! Which frame to evict: S3-FIFO.
//!
//! New frames enter a small queue (a tenth of the cache). A frame that has not
//! been touched again when it reaches the end of that queue is evicted, so a
//! long scan passes through a tenth of the cache only. A touched frame moves to
//! the main queue, where each touch earns another round. New content that was
//! evicted lately enters the main queue directly. The ghost table remembers it
//! by fingerprint, so it does not matter which image loads the content again.
//!
//! The queues hold frame numbers without owning the frames. A popped frame may
//! be dirty, free or reused, so the caller checks its record.

use crate::frames::FrameIndex;
use std::collections::VecDeque;

/// Most touches that are counted: further ones earn no further rounds.
pub(crate) const TOUCHES_MAX: u8 = 3;

pub(crate) struct Queues {
    small: VecDeque<FrameIndex>,
    main: VecDeque<FrameIndex>,
    /// Tags of evicted contents: a part of the fingerprint, at an index chosen by other bits of it. Newer ones overwrite.
    ghost: Box<[u32]>,
}

impl Queues {
    pub(crate) fn new(frame_count: usize) -> Self {
        Self {
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: vec![0; frame_count.next_power_of_two()].into_boxed_slice(),
        }
    }

    /// Enters a frame that became clean; `fingerprint_key` identifies its content.
    pub(crate) fn push(&mut self, frame: FrameIndex, fingerprint_key: u64) {
        let (slot, tag) = self.ghost_slot(fingerprint_key);
        if self.ghost[slot] == tag {
            self.ghost[slot] = 0;
            self.main.push_back(frame);
        } else {
            self.small.push_back(frame);
        }
    }

    /// Puts back a frame that was popped but could not be evicted.
    pub(crate) fn put_back(&mut self, frame: FrameIndex) {
        self.main.push_back(frame);
    }

    /// Remembers content that was evicted.
    pub(crate) fn remember(&mut self, fingerprint_key: u64) {
        let (slot, tag) = self.ghost_slot(fingerprint_key);
        self.ghost[slot] = tag;
    }

    /// Removes the next victim. `touches` reads a frame's count, `set` stores it.
    pub(crate) fn pop(
        &mut self,
        touches: impl Fn(FrameIndex) -> u8,
        set: impl Fn(FrameIndex, u8),
    ) -> Option<FrameIndex> {
        loop {
            let small_max = (self.small.len() + self.main.len()) / 10;
            if self.small.len() > small_max || self.main.is_empty() {
                let frame = self.small.pop_front()?;
                if touches(frame) == 0 {
                    return Some(frame);
                }
                set(frame, 0);
                self.main.push_back(frame);
            } else {
                let frame = self.main.pop_front()?;
                match touches(frame) {
                    0 => return Some(frame),
                    n => {
                        set(frame, n - 1);
                        self.main.push_back(frame);
                    }
                }
            }
        }
    }

    /// Bytes of memory the queues take.
    pub(crate) fn memory_bytes(&self) -> usize {
        4 * (self.small.capacity() + self.main.capacity() + self.ghost.len())
    }

    fn ghost_slot(&self, key: u64) -> (usize, u32) {
        let tag = ((key >> 32) as u32).max(1);
        (key as usize & (self.ghost.len() - 1), tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A cache of numbers, to see what the policy keeps.
    fn misses(capacity: usize, accesses: impl Iterator<Item = u32>) -> usize {
        let mut queues = Queues::new(capacity);
        let touches = RefCell::new(std::collections::HashMap::<u32, u8>::new());
        let mut misses = 0;
        for key in accesses {
            if let Some(count) = touches.borrow_mut().get_mut(&key) {
                *count = (*count + 1).min(TOUCHES_MAX);
                continue;
            }
            misses += 1;
            if touches.borrow().len() >= capacity {
                let victim = queues
                    .pop(|f| touches.borrow()[&f.0], |f, n| _ = touches.borrow_mut().insert(f.0, n))
                    .expect("full, so there is a victim");
                touches.borrow_mut().remove(&victim.0);
                queues.remember(hash(victim.0));
            }
            touches.borrow_mut().insert(key, 0);
            queues.push(FrameIndex(key), hash(key));
        }
        misses
    }

    fn hash(key: u32) -> u64 {
        u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn a_scan_does_not_wash_out_the_working_set() {
        // 50 hot keys read over and over, with a scan of 10,000 cold keys in between, in a cache of 100.
        let hot = || (0..50u32).cycle().take(500);
        let scan = (1000..11_000u32).flat_map(|cold| [cold % 50, cold]);
        let all = hot().chain(scan).chain(hot());
        let missed = misses(100, all);
        assert!(missed <= 10_000 + 50 + 60, "the scan alone misses 10,000 times and the hot keys 50: {missed}");
    }

    #[test]
    fn the_queue_ends() {
        let mut queues = Queues::new(8);
        assert_eq!(queues.pop(|_| 0, |_, _| ()), None);
        queues.push(FrameIndex(1), 99);
        assert_eq!(queues.pop(|_| 0, |_, _| ()), Some(FrameIndex(1)));
        assert_eq!(queues.pop(|_| 0, |_, _| ()), None);
    }
}
