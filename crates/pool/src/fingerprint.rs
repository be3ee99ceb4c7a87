//! Keyed fingerprints of pages: they find equals, they never prove them.

use pagefold_os::Page;
use std::fs::File;
use std::io::{self, Read};

/// 64 bits of a page's keyed hash.
pub type Fingerprint = u64;

/// The key of a domain: random, so that no outsider can aim at its index.
#[derive(Clone)]
pub struct Key {
    secret: [u8; 192],
}

impl Key {
    /// Makes a new random key.
    ///
    /// # Errors
    /// If the kernel's random numbers cannot be read.
    pub fn random() -> io::Result<Key> {
        let mut secret = [0; 192];
        File::open("/dev/urandom")?.read_exact(&mut secret)?;
        Ok(Key { secret })
    }

    /// Makes the key of a seed, for simulations that must replay.
    pub fn from_seed(seed: u64) -> Key {
        let mut secret = [0; 192];
        let mut state = seed;
        for chunk in secret.chunks_exact_mut(8) {
            // SplitMix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            chunk.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
        }
        Key { secret }
    }

    /// The fingerprint of `page`: XXH3 with the key as its secret.
    pub fn fingerprint(&self, page: &Page) -> Fingerprint {
        xxhash_rust::xxh3::xxh3_64_with_secret(page, &self.secret)
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}
