//! Lists in the channel, the file of memory that agent and daemon share.
//!
//! Entries are plain integers of 32 bytes at most, read and written as volatile: the other side may write there at any time.

use crate::wire::{CHANNEL_IN, CHANNEL_OUT, LIST_MAX};

/// Entry `index` of the list that the daemon wrote to the channel at `channel`, copied.
pub(crate) fn input<T: Copy>(channel: u64, index: usize) -> T {
    assert_entry::<T>();
    let at = channel + (CHANNEL_IN + (index % LIST_MAX) * 32) as u64;
    // SAFETY: inside the channel; T is plain integers. The daemon does not write while we answer, and if it did we
    // would read other integers.
    unsafe { core::ptr::read_volatile(at as *const T) }
}

const fn assert_entry<T>() {
    assert!(size_of::<T>() <= 32);
}

pub(crate) fn write_out<T: Copy>(channel: u64, index: usize, value: T) {
    assert_entry::<T>();
    let at = channel + (CHANNEL_OUT + (index % LIST_MAX) * 32) as u64;
    // SAFETY: inside the channel, aligned to 32 bytes.
    unsafe { core::ptr::write_volatile(at as *mut T, value) }
}
