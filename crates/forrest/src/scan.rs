//! Scans by key order.

use crate::order::KeyBound;
use crate::store::Store;
use crate::value::Value;
use std::collections::VecDeque;
use std::ops::Bound;

/// Keys taken from the order at a time.
const PAGE: usize = 64;

/// Entries of an ordered store by key, from either end; see [`Store::scan`].
pub struct Scan<'a> {
    store: &'a Store,
    low: KeyBound,
    high: KeyBound,
    front: VecDeque<(Vec<u8>, Value)>,
    back: VecDeque<(Vec<u8>, Value)>,
}

impl<'a> Scan<'a> {
    pub(crate) fn new(store: &'a Store, low: KeyBound, high: KeyBound) -> Scan<'a> {
        Scan { store, low, high, front: VecDeque::new(), back: VecDeque::new() }
    }

    /// Takes the next page from one end. False if nothing is left between the two ends.
    fn fill(&mut self, from_back: bool) -> bool {
        loop {
            // In a forked child the order may stay locked for ever; a scan that came along ends with what it has.
            if self.store.is_forked() {
                return false;
            }
            let keys = self.store.key_page(&self.low, &self.high, from_back, PAGE);
            let Some(last) = keys.last() else { return false };
            if from_back {
                self.high = Bound::Excluded(last.clone());
            } else {
                self.low = Bound::Excluded(last.clone());
            }
            let mut values: Vec<Option<Value>> = vec![None; keys.len()];
            self.store.get_many(&keys, |index, value| values[index] = value.map(Value::copied));
            let page = if from_back { &mut self.back } else { &mut self.front };
            page.extend(keys.into_iter().zip(values).filter_map(|(key, value)| Some((key, value?))));
            if !page.is_empty() {
                return true;
            }
        }
    }
}

impl Iterator for Scan<'_> {
    type Item = (Vec<u8>, Value);

    fn next(&mut self) -> Option<(Vec<u8>, Value)> {
        if self.front.is_empty() && !self.fill(false) {
            // What is left was taken from the other end already.
            return self.back.pop_back();
        }
        self.front.pop_front()
    }
}

impl DoubleEndedIterator for Scan<'_> {
    fn next_back(&mut self) -> Option<(Vec<u8>, Value)> {
        if self.back.is_empty() && !self.fill(true) {
            return self.front.pop_back();
        }
        self.back.pop_front()
    }
}
