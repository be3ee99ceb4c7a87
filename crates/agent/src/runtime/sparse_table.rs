//! Numbered places for values of which there are few, in memory of their own.
//!
//! On the stack of the agent's thread empty places would be pages of zeros, in each program that has an agent. This memory
//! is mapped with the first value, and only its pages with values are ever touched.

use crate::owned_ranges::{Owned, OwnedMapping};
use core::marker::PhantomData;
use pagefold_os::{Range, mem};

/// How many places there are.
pub(crate) const COUNT: usize = pagefold_protocol::message::SEGMENTS_HELD;
const WORD: usize = u64::BITS as usize;

/// `COUNT` places, each empty or with a value.
pub(crate) struct Places<T> {
    owned: Owned,
    memory: Option<OwnedMapping>,
    /// One bit for each place that has a value.
    full: [u64; COUNT.div_ceil(WORD)],
    values: PhantomData<T>,
}

impl<T> Places<T> {
    /// Empty places; their memory will be `owned`.
    pub(crate) const fn new(owned: Owned) -> Places<T> {
        Places { owned, memory: None, full: [0; COUNT.div_ceil(WORD)], values: PhantomData }
    }

    fn is_full(&self, place: usize) -> bool {
        self.full[place / WORD] >> (place % WORD) & 1 == 1
    }

    /// Where the value of `place` lies, if there is one.
    fn at(&self, place: usize) -> Option<*mut T> {
        let memory = self.memory.as_ref().filter(|_| self.is_full(place))?;
        Some((memory.range().start as *mut T).wrapping_add(place))
    }

    /// The value in `place`.
    pub(crate) fn get(&self, place: usize) -> Option<&T> {
        // SAFETY: the place is full, so `put` has written a value there, and it has not been taken since; it is borrowed
        // as these places are.
        self.at(place).map(|at| unsafe { &*at })
    }

    /// Takes the value out of `place`.
    pub(crate) fn take(&mut self, place: usize) -> Option<T> {
        let at = self.at(place)?;
        self.full[place / WORD] &= !(1 << (place % WORD));
        // SAFETY: the place was full, so `put` has written a value there; it is empty from now on, so this reads it once.
        Some(unsafe { at.read() })
    }

    /// Puts `value` into `place`, and drops what is there; false, without the value, if there is no memory.
    pub(crate) fn put(&mut self, place: usize, value: T) -> bool {
        drop(self.take(place));
        if self.memory.is_none() {
            let Ok(map) = mem::Mapping::anonymous(COUNT * size_of::<T>()) else { return false };
            let range = Range { start: map.addr(), end: map.addr() + map.len() as u64 };
            self.memory.insert(OwnedMapping::new(self.owned, map, range)).register();
        }
        self.full[place / WORD] |= 1 << (place % WORD);
        if let Some(at) = self.at(place) {
            // SAFETY: the memory is private to these places, has room for `COUNT` values, and begins with a page.
            unsafe { at.write(value) };
        }
        true
    }

    /// Places and their values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        (0..COUNT).filter_map(|place| Some((place, self.get(place)?)))
    }

    /// The first empty place.
    pub(crate) fn first_empty(&self) -> Option<usize> {
        (0..COUNT).find(|place| !self.is_full(*place))
    }

    /// Takes all values out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        (0..COUNT).filter_map(|place| self.take(place))
    }
}

impl<T> Drop for Places<T> {
    fn drop(&mut self) {
        self.drain().for_each(drop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn values_are_where_they_were_put_and_are_dropped_once() {
        let value = Rc::new(());
        let mut places = Places::new(Owned::Segments);
        assert!(places.get(0).is_none() && places.take(COUNT - 1).is_none() && places.first_empty() == Some(0));
        for place in [0, 63, 64, COUNT - 1] {
            assert!(places.put(place, (place, value.clone())));
        }
        assert!(places.put(64, (640, value.clone())), "in place of the one before");
        assert_eq!(Rc::strong_count(&value), 5);
        let seen: Vec<_> = places.iter().map(|(place, value)| (place, value.0)).collect();
        assert_eq!(seen, [(0, 0), (63, 63), (64, 640), (COUNT - 1, COUNT - 1)]);
        assert_eq!(places.take(0).map(|value| value.0), Some(0));
        assert_eq!((places.first_empty(), Rc::strong_count(&value)), (Some(0), 4));
        assert_eq!(places.drain().map(|value| value.0).collect::<Vec<_>>(), [63, 640, COUNT - 1]);
        assert!(places.iter().next().is_none() && Rc::strong_count(&value) == 1);
        assert!(places.put(7, (7, value.clone())));
        drop(places);
        assert_eq!(Rc::strong_count(&value), 1);
    }
}
