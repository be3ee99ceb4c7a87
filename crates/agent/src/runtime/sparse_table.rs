//! A table with room for many entries, of which there are few, in memory of its own.
//!
//! On the stack of the agent's thread the room would be pages of zeros, in each program that has an agent. This memory is
//! mapped with the first entry, and only its pages with entries are ever touched.

use crate::owned_ranges::{Owned, OwnedMapping};
use core::marker::PhantomData;
use pagefold_os::{Range, mem};

/// For how many entries there is room.
pub(crate) const COUNT: usize = pagefold_protocol::message::SEGMENTS_HELD;
const WORD: usize = u64::BITS as usize;

/// Entries by their number, below `COUNT`.
pub(crate) struct SparseTable<T> {
    owned: Owned,
    memory: Option<OwnedMapping>,
    /// One bit for each number that has an entry.
    present: [u64; COUNT.div_ceil(WORD)],
    entries: PhantomData<T>,
}

impl<T> SparseTable<T> {
    /// An empty table; its memory will be `owned`.
    pub(crate) const fn new(owned: Owned) -> SparseTable<T> {
        SparseTable { owned, memory: None, present: [0; COUNT.div_ceil(WORD)], entries: PhantomData }
    }

    fn has(&self, number: usize) -> bool {
        self.present[number / WORD] >> (number % WORD) & 1 == 1
    }

    /// Where the entry lies, if there is one.
    fn at(&self, number: usize) -> Option<*mut T> {
        let memory = self.memory.as_ref().filter(|_| self.has(number))?;
        Some((memory.range().start as *mut T).wrapping_add(number))
    }

    /// The entry `number`.
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        // SAFETY: its bit is set, so `put` has written it, and it has not been taken since; it is borrowed as the table is.
        self.at(number).map(|at| unsafe { &*at })
    }

    /// Takes the entry `number` out.
    pub(crate) fn take(&mut self, number: usize) -> Option<T> {
        let at = self.at(number)?;
        self.present[number / WORD] &= !(1 << (number % WORD));
        // SAFETY: its bit was set, so `put` has written it; the bit is clear from now on, so it is read out once.
        Some(unsafe { at.read() })
    }

    /// Makes `entry` the entry `number`, and drops the one before; false, without either, if there is no memory.
    pub(crate) fn put(&mut self, number: usize, entry: T) -> bool {
        drop(self.take(number));
        if self.memory.is_none() {
            let Ok(map) = mem::Mapping::anonymous(COUNT * size_of::<T>()) else { return false };
            let range = Range { start: map.addr(), end: map.addr() + map.len() as u64 };
            self.memory.insert(OwnedMapping::new(self.owned, map, range)).register();
        }
        self.present[number / WORD] |= 1 << (number % WORD);
        if let Some(at) = self.at(number) {
            // SAFETY: the memory is private to the table, has room for `COUNT` entries, and begins with a page.
            unsafe { at.write(entry) };
        }
        true
    }

    /// Numbers and their entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        (0..COUNT).filter_map(|number| Some((number, self.get(number)?)))
    }

    /// The first number without an entry.
    pub(crate) fn first_free(&self) -> Option<usize> {
        (0..COUNT).find(|number| !self.has(*number))
    }

    /// Takes all entries out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        (0..COUNT).filter_map(|number| self.take(number))
    }
}

impl<T> Drop for SparseTable<T> {
    fn drop(&mut self) {
        self.drain().for_each(drop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn entries_are_where_they_were_put_and_are_dropped_once() {
        let value = Rc::new(());
        let mut table = SparseTable::new(Owned::Segments);
        assert!(table.get(0).is_none() && table.take(COUNT - 1).is_none() && table.first_free() == Some(0));
        for number in [0, 63, 64, COUNT - 1] {
            assert!(table.put(number, (number, value.clone())));
        }
        assert!(table.put(64, (640, value.clone())), "in place of the one before");
        assert_eq!(Rc::strong_count(&value), 5);
        let seen: Vec<_> = table.iter().map(|(number, value)| (number, value.0)).collect();
        assert_eq!(seen, [(0, 0), (63, 63), (64, 640), (COUNT - 1, COUNT - 1)]);
        assert_eq!(table.take(0).map(|value| value.0), Some(0));
        assert_eq!((table.first_free(), Rc::strong_count(&value)), (Some(0), 4));
        assert_eq!(table.drain().map(|value| value.0).collect::<Vec<_>>(), [63, 640, COUNT - 1]);
        assert!(table.iter().next().is_none() && Rc::strong_count(&value) == 1);
        assert!(table.put(7, (7, value.clone())));
        drop(table);
        assert_eq!(Rc::strong_count(&value), 1);
    }
}
