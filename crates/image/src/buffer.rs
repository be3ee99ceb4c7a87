//! A buffer for each thread: a new one for each file would cost more than most files do.

use std::cell::Cell;

/// Calls `work` with `bytes` bytes that hold anything.
pub(crate) fn with_buffer<T>(bytes: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local! {
        static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    }
    let mut buffer = BUFFER.take();
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    let result = work(&mut buffer[..bytes]);
    BUFFER.set(buffer);
    result
}
