//! Hashes: MurmurHash64A as in libforrest, a secret mix over it, and keyed hashes against hostile keys.
//!
//! Keys of 8 bytes are hashed by a *bijection*: the mix is one under any
//! secret, and so is Speck64/128 under any key. Two different keys of 8
//! bytes therefore never have the same hash, so comparing the full hash compares
//! the full key, and inverting the hash returns the key. Keys of any other length
//! may collide; there the bytes are compared. The position of a hash in the table
//! is as secret as the store's random numbers.

/// Multiplier of MurmurHash64A.
const M: u64 = 0xc6a4_a793_5bd1_e995;
const R: u32 = 47;

/// The multiplicative inverse of an odd number modulo 2^64.
const fn inverse(odd: u64) -> u64 {
    // Newton's iteration doubles the correct low bits each time; an odd number is its own inverse modulo 8.
    let mut inverse = odd;
    let mut round = 0;
    while round < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        round += 1;
    }
    inverse
}

/// A secret bijection of 64 bits in few steps. It is no cipher, but without the secret and without any hash an attacker
/// cannot tell which words land together.
#[derive(Clone, Copy)]
pub(crate) struct Mix {
    sum: u64,
    odd: u64,
}

impl Mix {
    /// Multiplier of the second step.
    const LAST: u64 = 0xd6e8_feb8_6659_fd93;

    fn new(keys: [u64; 2]) -> Mix {
        Mix { sum: keys[0], odd: keys[1] | 1 }
    }

    #[inline(always)]
    fn of(self, word: u64) -> u64 {
        let word = (word ^ self.sum).wrapping_mul(self.odd);
        (word ^ word >> 32).wrapping_mul(Mix::LAST)
    }

    /// Inverts `of`. (`x ^ x >> 32` is its own inverse.)
    fn back(self, mixed: u64) -> u64 {
        let word = mixed.wrapping_mul(const { inverse(Mix::LAST) });
        (word ^ word >> 32).wrapping_mul(inverse(self.odd)) ^ self.sum
    }
}

/// Returns the 64-bit MurmurHash, revision A, of `key`, as `ft_MurmurHash64A` of libforrest does.
///
/// ```
/// assert_eq!(forrest::murmur64a(b"", 0), 0);
/// ```
pub fn murmur64a(key: &[u8], seed: u64) -> u64 {
    let mut hash = seed ^ (key.len() as u64).wrapping_mul(M);
    let mut chunks = key.chunks_exact(8);
    for chunk in &mut chunks {
        let mut word = u64::from_le_bytes(chunk.try_into().unwrap_or_default()).wrapping_mul(M);
        word ^= word >> R;
        hash = (hash ^ word.wrapping_mul(M)).wrapping_mul(M);
    }
    let tail = chunks.remainder();
    if !tail.is_empty() {
        let mut word = [0; 8];
        word[..tail.len()].copy_from_slice(tail);
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(M);
    }
    finish(hash)
}

#[inline]
fn finish(mut hash: u64) -> u64 {
    hash ^= hash >> R;
    hash = hash.wrapping_mul(M);
    hash ^ (hash >> R)
}

/// SipHash with 1 compression and 3 finalisation rounds.
pub(crate) fn siphash13(keys: [u64; 2], bytes: &[u8]) -> u64 {
    let mut v = [
        keys[0] ^ 0x736f_6d65_7073_6575,
        keys[1] ^ 0x646f_7261_6e64_6f6d,
        keys[0] ^ 0x6c79_6765_6e65_7261,
        keys[1] ^ 0x7465_6462_7974_6573,
    ];
    let round = |v: &mut [u64; 4]| {
        v[0] = v[0].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[2] = v[2].rotate_left(32);
    };
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
        v[3] ^= word;
        round(&mut v);
        v[0] ^= word;
    }
    let mut last = [0; 8];
    last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    last[7] = bytes.len() as u8;
    let word = u64::from_le_bytes(last);
    v[3] ^= word;
    round(&mut v);
    v[0] ^= word;
    v[2] ^= 0xff;
    for _ in 0..3 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

/// Rounds of Speck64/128.
const SPECK_ROUNDS: usize = 27;

/// Round keys of Speck64/128, a published block cipher on 64-bit blocks.
#[derive(Clone)]
pub(crate) struct Speck([u32; SPECK_ROUNDS]);

impl Speck {
    fn new(keys: [u64; 2]) -> Speck {
        let mut k = keys[0] as u32;
        let mut l = [(keys[0] >> 32) as u32, keys[1] as u32, (keys[1] >> 32) as u32];
        let mut rounds = [0; SPECK_ROUNDS];
        for (round, out) in rounds.iter_mut().enumerate() {
            *out = k;
            let at = round % 3;
            l[at] = k.wrapping_add(l[at].rotate_right(8)) ^ round as u32;
            k = k.rotate_left(3) ^ l[at];
        }
        Speck(rounds)
    }

    #[inline]
    fn encrypt(&self, block: u64) -> u64 {
        let (mut x, mut y) = ((block >> 32) as u32, block as u32);
        for key in self.0 {
            x = x.rotate_right(8).wrapping_add(y) ^ key;
            y = y.rotate_left(3) ^ x;
        }
        u64::from(x) << 32 | u64::from(y)
    }

    fn decrypt(&self, block: u64) -> u64 {
        let (mut x, mut y) = ((block >> 32) as u32, block as u32);
        for key in self.0.into_iter().rev() {
            y = (y ^ x).rotate_right(3);
            x = (x ^ key).wrapping_sub(y).rotate_left(8);
        }
        u64::from(x) << 32 | u64::from(y)
    }
}

/// How keys are hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// MurmurHash64A with this seed, as in libforrest, where programs use seed 9; not applied to keys of 8 bytes. Both are
    /// mixed with random numbers of the store.
    Murmur {
        /// The seed.
        seed: u64,
    },
    /// Keyed with random numbers of the store: for keys that a stranger chooses.
    ///
    /// SipHash-1-3, and Speck64/128 for keys of 8 bytes.
    Keyed,
}

impl Default for Hash {
    fn default() -> Hash {
        Hash::Murmur { seed: 9 }
    }
}

/// The hash function of one store.
pub(crate) enum Hasher {
    Murmur { seed: u64, mix: Mix, keys: [u64; 2] },
    Keyed { speck: Box<Speck>, keys: [u64; 2] },
}

impl Hasher {
    /// `keys` and `mix` are random.
    pub fn new(hash: Hash, keys: [u64; 2], mix: [u64; 2]) -> Hasher {
        match hash {
            Hash::Murmur { seed } => Hasher::Murmur { seed, mix: Mix::new(mix), keys },
            Hash::Keyed => Hasher::Keyed { speck: Box::new(Speck::new([keys[1], keys[0]])), keys },
        }
    }

    /// The hash under which `key` is found first.
    #[inline(always)]
    pub fn first(&self, key: &[u8]) -> u64 {
        if let (Hasher::Murmur { mix, .. }, Ok(word)) = (self, <&[u8; 8]>::try_from(key)) {
            return mix.of(u64::from_le_bytes(*word));
        }
        self.first_of_any(key)
    }

    /// Out of line, so that the common case stays small where it is inlined.
    #[inline(never)]
    fn first_of_any(&self, key: &[u8]) -> u64 {
        match (self, <&[u8; 8]>::try_from(key).ok()) {
            (Hasher::Murmur { seed, mix, .. }, _) => mix.of(murmur64a(key, *seed)),
            (Hasher::Keyed { speck, .. }, Some(word)) => speck.encrypt(u64::from_le_bytes(*word)),
            (Hasher::Keyed { keys, .. }, None) => siphash13(*keys, key),
        }
    }

    /// The key of 8 bytes with the first hash `hash`.
    pub fn word_of(&self, hash: u64) -> [u8; 8] {
        match self {
            Hasher::Murmur { mix, .. } => mix.back(hash),
            Hasher::Keyed { speck, .. } => speck.decrypt(hash),
        }
        .to_le_bytes()
    }

    /// The hash under which a key is found when too many others have its first hash.
    pub fn second(&self, key: &[u8]) -> u64 {
        let (Hasher::Murmur { keys, .. } | Hasher::Keyed { keys, .. }) = self;
        siphash13([!keys[0], keys[1]], key)
    }
}

/// Returns `N` random words from the system.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u64; N]> {
    let mut words = [0u64; N];
    // SAFETY: getrandom writes at most N * 8 bytes, the size of `words`.
    let got = unsafe { libc::getrandom(words.as_mut_ptr().cast(), N * 8, 0) };
    if got == (N * 8) as isize { Ok(words) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::Hasher as _;

    /// The reference code of MurmurHash64A, written as its author published it (byte-wise tail).
    fn reference(key: &[u8], seed: u64) -> u64 {
        let mut h = seed ^ (key.len() as u64).wrapping_mul(M);
        let blocks = key.len() / 8;
        for i in 0..blocks {
            let mut k = 0u64;
            for j in (0..8).rev() {
                k = k << 8 | u64::from(key[i * 8 + j]);
            }
            k = k.wrapping_mul(M);
            k ^= k >> R;
            k = k.wrapping_mul(M);
            h ^= k;
            h = h.wrapping_mul(M);
        }
        let tail = &key[blocks * 8..];
        for i in (0..tail.len()).rev() {
            h ^= u64::from(tail[i]) << (8 * i);
            if i == 0 {
                h = h.wrapping_mul(M);
            }
        }
        h ^= h >> R;
        h = h.wrapping_mul(M);
        h ^ (h >> R)
    }

    #[test]
    fn murmur_equals_the_reference() {
        let bytes: Vec<u8> = (0..100u32).map(|i| (i * 37 + 11) as u8).collect();
        for length in 0..bytes.len() {
            for seed in [0, 9, u64::MAX, 0xdead_beef] {
                assert_eq!(murmur64a(&bytes[..length], seed), reference(&bytes[..length], seed), "{length}");
            }
        }
    }

    /// Keys as in the test of the original source; the values come from the original C code.
    const VECTORS: &[(&str, u64)] = &[
        ("", 0xfbc9_e42e_3a60_c1ae),
        ("key0", 0xd5ab_aea0_efc0_e080),
        ("key1", 0x3dd2_f071_3e00_c495),
        ("key42", 0xed2d_2b16_a198_f5a6),
        ("key500000", 0x9c65_4fb4_e163_a214),
        ("key1234567", 0xfa73_44f8_764c_ec03),
        ("key12345678", 0x3699_70f1_99d2_a00e),
        ("key2003009040", 0xd9a3_f50a_6b91_414a),
    ];

    #[test]
    fn murmur_vectors_of_seed_9() {
        for (key, expected) in VECTORS {
            assert_eq!(murmur64a(key.as_bytes(), 9), *expected, "{key}");
        }
    }

    #[test]
    fn keys_of_eight_bytes_come_back_from_their_hash() {
        for key in (0..2000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i) {
            for hash in [Hash::default(), Hash::Keyed] {
                let hasher = Hasher::new(hash, [key, !key], [key.rotate_left(7), key.rotate_left(40)]);
                assert_eq!(hasher.word_of(hasher.first(&key.to_le_bytes())), key.to_le_bytes());
            }
        }
    }

    /// Keys as programs make them: counted, in strides, digits, few bits apart.
    #[test]
    fn keys_with_a_pattern_are_spread_evenly() {
        const COUNT: u64 = 1 << 16;
        let digits = |number: u64| u64::from_le_bytes(format!("{number:08}").into_bytes().try_into().unwrap());
        let patterns: [(&str, &dyn Fn(u64) -> u64); 6] = [
            ("counted", &|i| i),
            ("strides of a page", &|i| i << 12),
            ("high bits", &|i| i << 48),
            ("big-endian", &|i| i.swap_bytes()),
            ("digits", &digits),
            ("bits the other way round", &|i| i.reverse_bits()),
        ];
        // Fixed secrets: with one secret in 300, keys that differ only in their highest bits are spread less evenly, with
        // sums of squares of 330 to 430 each.
        for mix in 1..=8u64 {
            let mix = [mix, !mix].map(|number| murmur64a(&number.to_le_bytes(), 9));
            let hasher = Hasher::new(Hash::default(), [1, 2], mix);
            for (what, pattern) in &patterns {
                // The bits that the table uses: shard, first and second bucket.
                for shift in [52, 40, 20] {
                    let mut counts = vec![0u64; 1 << 12];
                    (0..COUNT)
                        .for_each(|i| counts[(hasher.first(&pattern(i).to_le_bytes()) >> shift & 0xfff) as usize] += 1);
                    // For random hashes 16 each, with a sum of squares of about 272 each.
                    let squares: u64 = counts.iter().map(|count| count * count).sum();
                    assert!(squares < 330 << 12, "{what}, bits from {shift} on, {mix:x?}: {}", squares >> 12);
                }
            }
        }
    }

    #[test]
    fn speck_gives_the_published_vector() {
        let speck = Speck::new([0x0b0a_0908_0302_0100, 0x1b1a_1918_1312_1110]);
        assert_eq!(speck.encrypt(0x3b72_6574_7475_432d), 0x8c6f_a548_454e_028b);
        assert_eq!(speck.decrypt(0x8c6f_a548_454e_028b), 0x3b72_6574_7475_432d);
    }

    #[test]
    fn siphash_equals_the_standard_library() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 91 + 3) as u8).collect();
        for length in 0..bytes.len() {
            let mut std = std::collections::hash_map::DefaultHasher::new();
            std.write(&bytes[..length]);
            assert_eq!(siphash13([0, 0], &bytes[..length]), std.finish(), "{length}");
        }
    }
}
