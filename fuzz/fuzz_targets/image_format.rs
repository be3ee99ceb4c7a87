//! Our own formats take any bytes: metadata images (with their checksum mended, so that all is reached) and object lists.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_image::{erofs, store};

/// CRC-32C, seed of ones, not inverted at the end.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg()))
    })
}

fuzz_target!(|data: &[u8]| {
    let _ = store::decode_objects(data);
    let mut image = data.to_vec();
    if image.len() >= 4096 {
        image[1024..1028].copy_from_slice(&0xE0F5_E1E2u32.to_le_bytes());
        image[1028..1032].fill(0);
        let sum = crc32c(&image[1024..4096]);
        image[1028..1032].copy_from_slice(&sum.to_le_bytes());
    }
    if let Ok(tree) = erofs::read(&image, erofs::Limits { inodes: 100_000 }) {
        // What can be read is a tree: it can be walked, and either written again or refused.
        let mut names = 0u32;
        tree.walk(|_, _| names += 1);
        let _ = erofs::write(&tree, erofs::Layout::Metadata);
    }
});
