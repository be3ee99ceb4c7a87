//! A fingerprint file of any content is refused or read, never a panic; what is read back is what was kept.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_disk::file::Stamp;
use pagefold_disk::fingerprint_file::BlockFingerprints;

fuzz_target!(|data: &[u8]| {
    let stamp = Stamp { size: 64 << 20, mtime: (1, 2), ctime: (3, 4), dev: 5, ino: 6 };
    let key = [9; 32];
    if let Ok(known) = BlockFingerprints::decode(data, &stamp, &key) {
        assert_eq!(known.encode(&stamp, &key), data);
    }
    // The same bytes behind a head and sums that fit, so that the sections are reached: cut and damage a good file.
    let mut good = BlockFingerprints::default().encode(&stamp, &key);
    for pair in data.chunks_exact(2) {
        let at = pair[0] as usize % good.len();
        good[at] ^= pair[1];
    }
    let _ = BlockFingerprints::decode(&good, &stamp, &key);
});
