//! Key order beside the table: which keys there are, sorted, for scans.
//!
//! The table holds every entry, so point lookups cost the same as without order. A B-tree holds the keys of up to
//! [`SHORT_BYTES`] bytes as numbers that sort like the bytes; longer ones lie in an ordered set under a lock. A scan
//! takes keys from both, a page at a time, and reads their values from the table in batches.
//!
//! Table and order must name the same keys: a thread that inserts or deletes a key holds one of [`STRIPES`] locks, chosen
//! by the key's hash, over both changes. Readers and scans hold none; a scan skips a key without an entry.

use crate::error::Error;
use crate::table::{Change, Table};
use crate::value::Presence;
use llds::b_tree::BTree;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::{Mutex, PoisonError, RwLock};

/// The longest key that the B-tree holds.
const SHORT_BYTES: usize = 15;

/// Locks for inserts and deletes.
const STRIPES: usize = 256;

/// The keys of a store in order.
pub struct Order {
    short: BTree<u128>,
    long: RwLock<BTreeSet<Box<[u8]>>>,
    stripes: Box<[Stripe]>,
}

#[repr(align(64))]
struct Stripe(Mutex<()>);

/// The end of a range of keys.
pub type KeyBound = Bound<Vec<u8>>;

/// The number that stands for a short key: its bytes, zeros, its length. Numbers sort as the keys do.
fn number(key: &[u8]) -> u128 {
    let mut bytes = [0; 16];
    bytes[..key.len()].copy_from_slice(key);
    bytes[SHORT_BYTES] = key.len() as u8;
    u128::from_be_bytes(bytes)
}

/// The key a number stands for.
fn key(number: u128) -> Vec<u8> {
    let bytes = number.to_be_bytes();
    bytes[..usize::from(bytes[SHORT_BYTES]).min(SHORT_BYTES)].to_vec()
}

/// Translates a bound on keys to a bound on numbers. A long key sorts after every short one that it begins with.
fn number_bound(bound: &KeyBound) -> Bound<u128> {
    let long = |key: &[u8]| number(&key[..SHORT_BYTES]) | 0xff;
    match bound {
        Bound::Unbounded => Bound::Unbounded,
        Bound::Included(key) if key.len() <= SHORT_BYTES => Bound::Included(number(key)),
        Bound::Excluded(key) if key.len() <= SHORT_BYTES => Bound::Excluded(number(key)),
        Bound::Included(key) | Bound::Excluded(key) => Bound::Excluded(long(key)),
    }
}

fn as_slice(bound: &KeyBound) -> Bound<&[u8]> {
    match bound {
        Bound::Unbounded => Bound::Unbounded,
        Bound::Included(key) => Bound::Included(key),
        Bound::Excluded(key) => Bound::Excluded(key),
    }
}

/// Whether nothing can lie between the bounds; the standard library's range panics at some such.
fn is_empty_range(low: &KeyBound, high: &KeyBound) -> bool {
    match (low, high) {
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
        (Bound::Included(low), Bound::Included(high)) => low > high,
        (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => low >= high,
    }
}

impl Order {
    /// # Errors
    /// [`Error::Arena`] if the address space of the tree is not there.
    pub fn new(huge: bool) -> Result<Order, Error> {
        Ok(Order {
            short: BTree::with_pages(huge)?,
            long: RwLock::default(),
            stripes: (0..STRIPES).map(|_| Stripe(Mutex::new(()))).collect(),
        })
    }

    /// [`Table::modify`], and the order follows.
    pub fn modify<'v>(
        &self,
        table: &Table,
        key: &[u8],
        hash: u64,
        decide: impl FnOnce(Option<&[u8]>) -> Result<Change<'v>, Error>,
    ) -> Result<bool, Error> {
        // In a forked child the stripe may stay locked for ever.
        if table.arena.is_forked() {
            return Err(llds::arena::Error::Forked.into());
        }
        let stripe = &self.stripes[hash as usize % STRIPES].0;
        let _held = stripe.lock().unwrap_or_else(PoisonError::into_inner);
        let mut after = false;
        let before = table.modify(key, hash, |now| {
            let change = decide(now)?;
            after = match change {
                Change::Keep => now.is_some(),
                Change::Put(_) | Change::Word(_) => true,
                Change::Delete => false,
            };
            Ok(change)
        })?;
        match (before, after) {
            (false, true) => {
                if let Err(error) = self.add(key) {
                    // A key that is not in the order must not stay in the table. No other thread can have inserted or
                    // deleted it meanwhile, because this thread holds the stripe.
                    table.modify(key, hash, |_| Ok(Change::Delete))?;
                    return Err(error);
                }
            }
            (true, false) => self.remove(key),
            _ => {}
        }
        Ok(before)
    }

    fn add(&self, key: &[u8]) -> Result<(), Error> {
        if key.len() <= SHORT_BYTES {
            let full = |_| Error::Arena(llds::arena::Error::Full { limit_bytes: self.short.memory_bytes() });
            self.short.insert_or_replace(number(key), 0).map_err(full)?;
        } else {
            self.long.write().unwrap_or_else(PoisonError::into_inner).insert(key.into());
        }
        Ok(())
    }

    fn remove(&self, key: &[u8]) {
        if key.len() <= SHORT_BYTES {
            self.short.remove(number(key));
        } else {
            self.long.write().unwrap_or_else(PoisonError::into_inner).remove(key);
        }
    }

    /// Empties `table` and the order. Returns how many entries went.
    pub fn clear(&self, table: &Table, clear: impl FnOnce() -> u64) -> u64 {
        let _held: Vec<_> =
            self.stripes.iter().map(|stripe| stripe.0.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        let cleared = clear();
        self.long.write().unwrap_or_else(PoisonError::into_inner).clear();
        for (number, _) in self.short.scan(..) {
            self.short.remove(number);
        }
        debug_assert!(!table.read(b"", table.hasher.first(b""), &mut Presence));
        cleared
    }

    /// Bytes of the tree; long keys are not counted.
    pub fn memory_bytes(&self) -> u64 {
        self.short.memory_bytes()
    }

    /// Up to `count` keys of the range, the lowest first, or the highest first if `back`.
    pub fn page(&self, low: &KeyBound, high: &KeyBound, back: bool, count: usize) -> Vec<Vec<u8>> {
        if is_empty_range(low, high) {
            return Vec::new();
        }
        let mut short = self.short.scan((number_bound(low), number_bound(high)));
        let short: Vec<Vec<u8>> = if back {
            short.rev().take(count).map(|(number, _)| key(number)).collect()
        } else {
            short.by_ref().take(count).map(|(number, _)| key(number)).collect()
        };
        let long = self.long.read().unwrap_or_else(PoisonError::into_inner);
        if long.is_empty() {
            return short;
        }
        let long = long.range::<[u8], _>((as_slice(low), as_slice(high)));
        let long: Vec<Vec<u8>> = if back {
            long.rev().take(count).map(|key| key.to_vec()).collect()
        } else {
            long.take(count).map(|key| key.to_vec()).collect()
        };
        let mut keys = short;
        keys.extend(long);
        keys.sort_unstable();
        if back {
            keys.reverse();
        }
        keys.truncate(count);
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_sort_as_keys_do(a in prop::collection::vec(0u8..4, 0..=SHORT_BYTES), b in prop::collection::vec(0u8..4, 0..=SHORT_BYTES)) {
            prop_assert_eq!(number(&a).cmp(&number(&b)), a.cmp(&b));
            prop_assert_eq!(key(number(&a)), a);
        }

        #[test]
        fn a_long_bound_parts_short_keys_as_it_should(
            a in prop::collection::vec(0u8..3, 0..=SHORT_BYTES),
            b in prop::collection::vec(0u8..3, SHORT_BYTES + 1..20),
        ) {
            let Bound::Excluded(bound) = number_bound(&Bound::Included(b.clone())) else { panic!("long keys exclude") };
            prop_assert_eq!(number(&a) < bound, a < b);
            prop_assert_ne!(number(&a), bound);
        }
    }
}
