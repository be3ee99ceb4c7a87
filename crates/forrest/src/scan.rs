//! Scans by key order.

use crate::order::KeyBound;
use crate::store::Store;
use crate::value::Value;
use std::collections::VecDeque;
use std::ops::Bound;

/// Keys taken from the order at a time, at most and at first.
const PAGE: usize = 64;
const FIRST_PAGE: usize = 8;
/// Bytes of values copied at a time, if those to come are as long as those before.
const PAGE_BYTES: usize = 1 << 20;

/// Entries of an ordered store by key, from either end; see [`Store::scan`].
pub struct Scan<'a> {
    store: &'a Store,
    low: KeyBound,
    high: KeyBound,
    /// Keys of the next page.
    count: usize,
    front: VecDeque<(Vec<u8>, Value)>,
    back: VecDeque<(Vec<u8>, Value)>,
    /// Nothing was left between the two ends. Keys set there later are not visited: they would come after keys that one end
    /// took from the other end's page.
    met: bool,
}

impl<'a> Scan<'a> {
    pub(crate) fn new(store: &'a Store, low: KeyBound, high: KeyBound) -> Scan<'a> {
        Scan { store, low, high, count: FIRST_PAGE, front: VecDeque::new(), back: VecDeque::new(), met: false }
    }

    /// Takes the next page from one end. False if nothing is left between the two ends.
    fn fill(&mut self, from_back: bool) -> bool {
        loop {
            // In a forked child the order may stay locked for ever; an inherited scan ends with the entries it has.
            if self.met || self.store.is_forked() {
                return false;
            }
            let keys = self.store.key_page(&self.low, &self.high, from_back, self.count);
            let Some(last) = keys.last() else {
                self.met = true;
                return false;
            };
            if from_back {
                self.high = Bound::Excluded(last.clone());
            } else {
                self.low = Bound::Excluded(last.clone());
            }
            let mut values: Vec<Option<Value>> = vec![None; keys.len()];
            self.store.get_many(&keys, |index, value| values[index] = value.map(Value::copied));
            let longest = values.iter().flatten().map(|value| value.len()).max().unwrap_or_default();
            self.count = (PAGE_BYTES / longest.max(1)).clamp(1, PAGE);
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
            // The remaining entries were already taken from the other end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_long_values_are_copied_ahead() {
        let store = crate::Options::new().ordered().private().unwrap();
        for number in 0..200u32 {
            let value = if number < 20 { vec![1; PAGE_BYTES / 2] } else { vec![2] };
            store.set(&number.to_be_bytes(), &value).unwrap();
        }
        let mut scan = store.scan::<[u8]>(..).unwrap();
        let mut ahead = Vec::new();
        let mut seen = 0u32;
        while let Some((key, value)) = scan.next() {
            assert_eq!((&key[..], value[0]), (&seen.to_be_bytes()[..], if seen < 20 { 1 } else { 2 }));
            seen += 1;
            ahead.push(scan.front.len());
        }
        assert_eq!(seen, 200);
        // Eight, two at a time, and the short ones after the first page of these.
        assert_eq!((ahead[0], ahead[8..20].iter().max(), ahead.iter().max()), (7, Some(&1), Some(&63)), "{ahead:?}");
        let back: Vec<_> = store.scan::<[u8]>(..).unwrap().rev().map(|(key, _)| key).collect();
        assert!(back.len() == 200 && back.is_sorted_by(|one, next| one > next));
    }
    #[test]
    fn what_is_set_before_a_key_that_was_seen_is_not_seen_behind_it() {
        let store = crate::Options::new().ordered().private().unwrap();
        for key in [b"b", b"c", b"d"] {
            store.set(key, b"1").unwrap();
        }
        let mut scan = store.scan::<[u8]>(..).unwrap();
        // One end takes all three, the other goes on with what that took.
        assert_eq!(scan.next_back().unwrap().0, b"d");
        assert_eq!(scan.next().unwrap().0, b"b");
        store.set(b"a", b"1").unwrap();
        assert_eq!(scan.by_ref().map(|(key, _)| key).collect::<Vec<_>>(), [b"c"]);
        assert!(scan.next_back().is_none());
    }
}
