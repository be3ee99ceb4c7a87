//! The sizes that several modules agree on. This module imports nothing.

/// Size of a block and of a page, in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// Blocks per chunk: 1 MiB, the largest request of a front end.
pub(crate) const CHUNK_BLOCKS: usize = 256;
/// Bytes per chunk.
pub(crate) const CHUNK_BYTES: u64 = (CHUNK_BLOCKS * BLOCK_BYTES) as u64;

/// Bits of a frame number. The remaining two bits of a block's entry hold its state.
pub(crate) const FRAME_BITS: u32 = 30;
/// Most frames of one cache. The number after the last one stands for a block of zeros.
pub(crate) const FRAMES_MAX: usize = (1 << FRAME_BITS) - 1;

/// Largest file: what a signed 64-bit offset can address, in whole blocks.
pub(crate) const FILE_BYTES_MAX: u64 = i64::MAX as u64 & !(BLOCK_BYTES as u64 - 1);
