//! Values as readers get them.

use crate::overflow_record::OverflowRecord;
use crate::table::Sink;
use llds::arena::{Arena, ThreadRef};
use std::ops::Deref;

/// A value, copied out of the store. Values of up to 8 bytes cost no allocation.
#[derive(Clone)]
pub struct Value(Repr);

#[derive(Clone)]
enum Repr {
    Short { bytes: [u8; 8], length: u8 },
    Long(Vec<u8>),
}

impl Value {
    pub(crate) fn new() -> Value {
        Value(Repr::Short { bytes: [0; 8], length: 0 })
    }

    #[inline]
    pub(crate) fn short(bytes: [u8; 8], length: usize) -> Value {
        Value(Repr::Short { bytes, length: length as u8 })
    }

    pub(crate) fn copied(bytes: &[u8]) -> Value {
        let mut short = [0; 8];
        match short.get_mut(..bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                Value::short(short, bytes.len())
            }
            None => Value(Repr::Long(bytes.to_vec())),
        }
    }

    /// Returns the bytes as a vector.
    pub fn into_vec(self) -> Vec<u8> {
        match self.0 {
            Repr::Short { bytes, length } => bytes[..usize::from(length)].to_vec(),
            Repr::Long(bytes) => bytes,
        }
    }
}

impl Deref for Value {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Short { bytes, length } => &bytes[..usize::from(*length)],
            Repr::Long(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Value) -> bool {
        **self == **other
    }
}

impl Eq for Value {}

impl std::hash::Hash for Value {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl PartialEq<[u8]> for Value {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}

impl<const N: usize> PartialEq<&[u8; N]> for Value {
    fn eq(&self, other: &&[u8; N]) -> bool {
        **self == other[..]
    }
}

impl std::fmt::Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\"", self.escape_ascii())
    }
}

impl Sink for Value {
    #[inline]
    fn inline(&mut self, bytes: [u8; 8], length: usize) {
        self.0 = Repr::Short { bytes, length: length as u8 };
    }

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        self.0 = match record.short_value() {
            Some(bytes) => Repr::Short { bytes, length: record.value_bytes as u8 },
            None => {
                let mut bytes = Vec::with_capacity(record.value_bytes);
                record.copy_value(&mut bytes);
                Repr::Long(bytes)
            }
        };
    }
}

/// Copies into a vector that the caller keeps, replacing what is in it.
pub(crate) struct Into<'v>(pub &'v mut Vec<u8>);

impl Sink for Into<'_> {
    #[inline]
    fn inline(&mut self, bytes: [u8; 8], length: usize) {
        self.0.clear();
        self.0.extend_from_slice(&bytes[..length]);
    }

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        self.0.clear();
        record.copy_value(self.0);
    }
}

/// Takes nothing: whether the key is there.
pub(crate) struct Presence;

impl Sink for Presence {
    const READS: bool = false;

    fn inline(&mut self, _bytes: [u8; 8], _length: usize) {}
    fn record(&mut self, _record: OverflowRecord<'_>, _offset: u64) {}
}

/// A value read in place, not copied. It keeps its bytes until this guard is dropped, whatever happens to its key.
///
/// A thread can hold 8 guards on long values at a time; further ones are copies. A guard keeps the memory of that one
/// value, and blocks no other thread.
pub struct Ref<'a> {
    pub(crate) bytes: RefBytes<'a>,
}

pub(crate) enum RefBytes<'a> {
    Short { bytes: [u8; 8], length: u8 },
    Held { value: &'a [u8], hazard: usize, thread: ThreadRef<'a>, arena: &'a Arena },
    Copied(Vec<u8>),
}

impl Deref for Ref<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            RefBytes::Short { bytes, length } => &bytes[..usize::from(*length)],
            RefBytes::Held { value, .. } => value,
            RefBytes::Copied(bytes) => bytes,
        }
    }
}

impl Drop for Ref<'_> {
    fn drop(&mut self) {
        // The record belongs to the thread that took the guard; a forked child has only a copy of the guard.
        if let RefBytes::Held { hazard, thread, arena, .. } = &self.bytes
            && !arena.is_forked()
        {
            thread.hazard_clear(*hazard);
        }
    }
}

impl std::fmt::Debug for Ref<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\"", self.escape_ascii())
    }
}

/// Puts a hazard on the record it is given; `Table::read` then checks that the record was still linked.
pub(crate) struct Guarding<'a> {
    pub arena: &'a Arena,
    pub thread: Option<ThreadRef<'a>>,
    pub hazard: Option<usize>,
    pub bytes: RefBytes<'a>,
    pub offset: u64,
}

impl Sink for Guarding<'_> {
    /// This sink sets its own hazard; a second one would be redundant.
    const READS: bool = false;

    fn inline(&mut self, bytes: [u8; 8], length: usize) {
        self.offset = 0;
        self.bytes = RefBytes::Short { bytes, length: length as u8 };
    }

    fn record(&mut self, record: OverflowRecord<'_>, offset: u64) {
        match (&self.thread, self.hazard) {
            (Some(thread), Some(hazard)) => {
                thread.hazard_set(hazard, offset);
                self.offset = offset;
            }
            _ => {
                let mut bytes = Vec::with_capacity(record.value_bytes);
                record.copy_value(&mut bytes);
                self.bytes = RefBytes::Copied(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use std::collections::HashSet;

    #[test]
    fn values_of_the_same_bytes_are_equal_under_whatever_key() {
        let store = Options::new().ordered().private().unwrap();
        let keys: [&[u8]; 3] = [b"a", b"12345678", b"a key of sixteen"];
        for value in [&b""[..], b"1", b"\0\0", b"12345678", b"123456789", &[7; 100]] {
            for key in keys {
                store.set(key, value).unwrap();
            }
            let got: Vec<Value> = keys.iter().map(|key| store.get(key).unwrap()).collect();
            let scanned: Vec<Value> = store.scan::<[u8]>(..).unwrap().map(|(_, value)| value).collect();
            assert!(got.iter().all(|got| **got == *value), "{got:?}");
            assert!(got.iter().chain(&scanned).all(|one| *one == got[0]), "{got:?} {scanned:?}");
            assert!(got.iter().all(|got| matches!(got.0, Repr::Short { .. }) == (value.len() <= 8)), "{value:?}");
            assert_eq!(got.into_iter().chain(scanned).collect::<HashSet<_>>().len(), 1);
        }
    }
}
