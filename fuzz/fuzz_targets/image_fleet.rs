//! Pack indexes and manifests of a fleet's store take any bytes, with their check mended so that all is reached. What can be
//! read is written again as the same bytes, but for the text of a manifest's head.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_image::digest::Digest;
use pagefold_image::fleet;

fn mended(magic: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = [magic, data].concat();
    let check = Digest::of(&bytes);
    bytes.extend(&check.0[..8]);
    bytes
}

fuzz_target!(|data: &[u8]| {
    let _ = (fleet::decode_index(data), fleet::decode_manifest(data));
    let index = mended(b"PFPACK01", data);
    if let Ok(Some((pack, pieces))) = fleet::decode_index(&index) {
        assert_eq!(fleet::encode_index(&pack, &pieces), index);
        assert!(pieces.iter().all(|piece| fleet::piece_bytes(piece.size, piece.number) > 0));
    }
    if let Ok(manifest) = fleet::decode_manifest(&mended(b"PFIMAG01", data)) {
        assert!(manifest.locations.iter().all(|location| (location.pack as usize) < manifest.packs.len()));
        assert_eq!(fleet::decode_manifest(&fleet::encode_manifest(&manifest)).ok(), Some(manifest));
    }
});
