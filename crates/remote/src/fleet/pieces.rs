//! Pieces of objects, packed one by one: each is a zstd frame with a checksum.

use crate::error::{Error, Result};
use pagefold_image::fleet::{PACKED_MAX, PIECE};
use zstd_safe::{CCtx, CParameter, DCtx};

/// How strongly pieces are packed: about the size that gzip gives, in a third of its time.
const LEVEL: i32 = 6;

/// Packs pieces, and the metadata of images.
pub struct Packer(CCtx<'static>);

impl Packer {
    pub fn new() -> Self {
        let mut context = CCtx::create();
        for parameter in [CParameter::CompressionLevel(LEVEL), CParameter::ChecksumFlag(true)] {
            context.set_parameter(parameter).expect("every version of zstd has it");
        }
        Self(context)
    }

    /// Packs `plain`.
    pub fn pack(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut packed = vec![0; zstd_safe::compress_bound(plain.len())];
        let length = self.0.compress2(&mut packed[..], plain).expect("room for every input");
        packed.truncate(length);
        assert!(plain.len() as u64 > PIECE || length <= PACKED_MAX as usize, "the format's limit");
        packed
    }
}

/// Unpacks to exactly `size` bytes.
///
/// # Errors
/// Bytes that give more or fewer, or do not have the checksum that they name.
pub fn unpack(packed: &[u8], size: u64) -> Result<Vec<u8>> {
    let mut plain = Vec::new();
    let has_room = plain.try_reserve_exact(size as usize).is_ok();
    plain.resize(if has_room { size as usize } else { 0 }, 0);
    match DCtx::create().decompress(&mut plain[..], packed) {
        Ok(length) if length as u64 == size => Ok(plain),
        _ => Err(Error::Said("damaged".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked_and_other_bytes_are_damage() {
        let plain: Vec<u8> = (0..50_000u32).flat_map(|n| (n * n).to_le_bytes()).collect();
        let packed = Packer::new().pack(&plain);
        assert_eq!(unpack(&packed, plain.len() as u64).unwrap(), plain);
        for size in [0, plain.len() as u64 - 1, plain.len() as u64 + 1] {
            assert!(unpack(&packed, size).is_err(), "{size}");
        }
        for at in [0, 10, packed.len() / 2, packed.len() - 1] {
            let mut other = packed.clone();
            other[at] ^= 1;
            assert!(unpack(&other, plain.len() as u64).is_err(), "byte {at}");
        }
    }
}
