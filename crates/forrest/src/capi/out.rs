//! Values on their way out: copied once, from the store to where a C program wants them.

use super::codes::{Code, FORREST_NO_MEMORY, FORREST_NOT_FOUND};
use crate::overflow_record::OverflowRecord;
use crate::store::Store;
use crate::table::Sink;
use libc::{c_void, size_t};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// Copies a slot's value to the beginning of `room`, which is empty or long enough.
fn copy_slot(bytes: &[u8], room: &mut [MaybeUninit<u8>]) {
    for (to, &from) in room.iter_mut().zip(bytes) {
        to.write(from);
    }
}

/// A caller's buffer, which may be too small: then only the length is taken.
pub(super) struct Buffer<'b> {
    room: &'b mut [MaybeUninit<u8>],
    pub(super) length: usize,
}

impl<'b> Buffer<'b> {
    /// # Safety
    /// `buffer` must be NULL or writable for `capacity` bytes.
    pub(super) unsafe fn new(buffer: *mut c_void, capacity: size_t) -> Buffer<'b> {
        let room = if buffer.is_null() {
            &mut []
        } else {
            // SAFETY: `# Safety` requires `capacity` writable bytes; NULL was ruled out, and no object is larger than
            // `isize::MAX`.
            unsafe { std::slice::from_raw_parts_mut(buffer.cast(), capacity.min(isize::MAX as usize)) }
        };
        Buffer { room, length: 0 }
    }
}

impl Sink for Buffer<'_> {
    #[inline]
    fn inline(&mut self, bytes: [u8; 8], length: usize) {
        self.length = length;
        if let Some(room) = self.room.get_mut(..length) {
            copy_slot(&bytes[..length], room);
        }
    }

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        self.length = record.value_bytes;
        if let Some(room) = self.room.get_mut(..record.value_bytes) {
            record.copy_value_to(room);
        }
    }
}

/// Memory from malloc, as C programs free it. NULL if there is none.
pub(super) struct Malloced {
    copy: *mut c_void,
    length: usize,
}

impl Malloced {
    /// The value of `key` in memory of its own, at least one byte, and its length.
    pub(super) fn of(store: &Store, key: &[u8]) -> Result<(*mut c_void, usize), Code> {
        let mut value = Malloced { copy: null_mut(), length: 0 };
        if !store.read(key, &mut value) {
            return Err(Code(FORREST_NOT_FOUND));
        }
        let copy = std::mem::replace(&mut value.copy, null_mut());
        if copy.is_null() { Err(Code(FORREST_NO_MEMORY)) } else { Ok((copy, value.length)) }
    }

    /// Replaces the buffer by one of `length` bytes; empty if there is no memory.
    fn allocate(&mut self, length: usize) -> &mut [MaybeUninit<u8>] {
        self.length = length;
        // SAFETY: `copy` is NULL or from malloc, and not used after the free; the new block has at least `length` bytes.
        unsafe {
            libc::free(self.copy);
            self.copy = libc::malloc(length.max(1));
            if self.copy.is_null() { &mut [] } else { std::slice::from_raw_parts_mut(self.copy.cast(), length) }
        }
    }
}

impl Drop for Malloced {
    fn drop(&mut self) {
        // SAFETY: `copy` is NULL or memory from malloc that `of` has not passed on.
        unsafe { libc::free(self.copy) };
    }
}

impl Sink for Malloced {
    fn inline(&mut self, bytes: [u8; 8], length: usize) {
        copy_slot(&bytes[..length], self.allocate(length));
    }

    fn record(&mut self, record: OverflowRecord<'_>, _offset: u64) {
        let buffer = self.allocate(record.value_bytes);
        if buffer.len() == record.value_bytes {
            record.copy_value_to(buffer);
        }
    }
}
