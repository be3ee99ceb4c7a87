//! Keys of any kind, found exactly: the tree finds what is probably equal, a resolver proves it.

use super::{Full, SdTree};
use std::cell::Cell;

/// Something that can be looked up: raw content, a fingerprint, any string of bytes.
pub trait Key {
    /// The key's bytes, borrowed or in an array.
    type Bytes<'a>: AsRef<[u8]>
    where
        Self: 'a;

    /// Gives the bytes by which keys are equal or not.
    fn bytes(&self) -> Self::Bytes<'_>;

    /// Gives 64 evenly spread bits. The default reads each byte of the key once.
    fn fingerprint(&self, seed: u64) -> u64 {
        fingerprint_bytes(self.bytes().as_ref(), seed)
    }

    /// How many bytes of the key [`Key::fingerprint`] reads.
    fn fingerprint_reads(&self) -> usize {
        self.bytes().as_ref().len()
    }
}

/// A fingerprint of 64 bits that is spread evenly already; used as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint64(pub u64);

impl Key for Fingerprint64 {
    type Bytes<'a> = [u8; 8];

    fn bytes(&self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    fn fingerprint(&self, _seed: u64) -> u64 {
        self.0
    }
}

/// A fingerprint of 128 bits that is spread evenly already; its upper half leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint128(pub u128);

impl Key for Fingerprint128 {
    type Bytes<'a> = [u8; 16];

    fn bytes(&self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    fn fingerprint(&self, _seed: u64) -> u64 {
        (self.0 >> 64) as u64
    }

    fn fingerprint_reads(&self) -> usize {
        8
    }
}

impl Key for [u8] {
    type Bytes<'a> = &'a [u8];

    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A page's content, all 4096 bytes.
impl Key for [u8; 4096] {
    type Bytes<'a> = &'a [u8];

    fn bytes(&self) -> &[u8] {
        self
    }
}

/// What tells the lanes of a fingerprint apart.
const LANES: [u64; 4] = [0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaaaa_aaab_5bd1_e995, 0x8cb9_2ba7_2f3d_8dd7];

/// Reads each byte once and gives 64 evenly spread bits that depend on the seed.
///
/// Four lanes of multiply-and-fold. Without the seed an attacker cannot aim keys at a bucket. It is
/// not a cryptographic hash, and equality is never derived from it.
pub fn fingerprint_bytes(bytes: &[u8], seed: u64) -> u64 {
    const K: [u64; 4] = LANES;
    let fold = |a: u64, b: u64| {
        let wide = u128::from(a) * u128::from(b);
        wide as u64 ^ (wide >> 64) as u64
    };
    let word = |chunk: &[u8]| {
        let mut padded = [0; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(padded)
    };
    let mut lanes = K.map(|k| fold(seed ^ k, K[0]) | 1);
    let mut blocks = bytes.chunks_exact(64);
    for block in &mut blocks {
        for (lane, state) in lanes.iter_mut().enumerate() {
            let pair = &block[lane * 16..lane * 16 + 16];
            *state = fold(word(&pair[..8]) ^ K[lane] ^ seed, word(&pair[8..]) ^ *state);
        }
    }
    for (index, chunk) in blocks.remainder().chunks(8).enumerate() {
        // The seed is in both factors: a factor that an attacker makes 0 would erase everything read before it.
        let factor = word(chunk) ^ K[index % 4] ^ seed;
        lanes[index % 4] = fold(factor, lanes[index % 4] ^ seed.rotate_left(32) ^ index as u64);
    }
    let low = fold(lanes[0] ^ K[1], lanes[1] ^ bytes.len() as u64);
    let high = fold(lanes[2] ^ K[3], lanes[3] ^ seed);
    fold(low ^ K[2], high.rotate_left(29) ^ K[0])
}

/// Finds the key of a value, so that a probable match can be proven.
pub trait Resolve {
    /// Calls `read` with the bytes of the key that was stored with `value`.
    fn with_key<T>(&self, value: u64, read: impl FnOnce(&[u8]) -> T) -> T;
}

impl<R: Resolve + ?Sized> Resolve for &R {
    fn with_key<T>(&self, value: u64, read: impl FnOnce(&[u8]) -> T) -> T {
        (**self).with_key(value, read)
    }
}

/// How much of a key one search read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyReads {
    /// Bytes of the key read to make its fingerprint.
    pub fingerprint_bytes: u64,
    /// Bytes of the key compared with stored keys: none unless a leaf matched.
    pub compared_bytes: u64,
    /// Leaves that matched by tag and were another key.
    pub false_matches: u64,
}

/// An [`SdTree`] with proven matches: equal means equal in every byte.
pub struct Exact<R> {
    tree: SdTree,
    resolver: R,
    seed: u64,
}

impl<R: Resolve> Exact<R> {
    /// Puts keys over an empty tree. `seed` should be random where an attacker chooses keys.
    pub fn new(tree: SdTree, resolver: R, seed: u64) -> Self {
        Self { tree, resolver, seed }
    }

    /// Gives the tree below.
    pub fn tree(&self) -> &SdTree {
        &self.tree
    }

    fn is_same(&self, key: &[u8], value: u64, reads: &Cell<KeyReads>) -> bool {
        let same = self.resolver.with_key(value, |stored| stored == key);
        let mut sum = reads.get();
        sum.compared_bytes += key.len() as u64;
        sum.false_matches += u64::from(!same);
        reads.set(sum);
        same
    }

    /// Gives the value stored with this key, and how much of the key was read to find it.
    pub fn get_counted<K: Key + ?Sized>(&self, key: &K) -> (Option<u64>, KeyReads) {
        let bytes = key.bytes();
        let reads = Cell::new(KeyReads { fingerprint_bytes: key.fingerprint_reads() as u64, ..KeyReads::default() });
        let fingerprint = key.fingerprint(self.seed);
        let value = self.tree.get_with(fingerprint, |value| self.is_same(bytes.as_ref(), value, &reads));
        (value, reads.get())
    }

    /// Gives the value stored with this key.
    pub fn get<K: Key + ?Sized>(&self, key: &K) -> Option<u64> {
        let bytes = key.bytes();
        self.tree.get_with(key.fingerprint(self.seed), |value| {
            self.resolver.with_key(value, |stored| stored == bytes.as_ref())
        })
    }

    /// Stores the value with this key unless the key has one already; gives that one. The resolver
    /// must know the value's key before the call.
    ///
    /// # Errors
    /// [`Full`] when too many keys share their fingerprints' leading bits.
    ///
    /// # Panics
    /// When the value exceeds [`VALUE_MAX`](super::VALUE_MAX).
    pub fn get_or_insert<K: Key + ?Sized>(&self, key: &K, value: u64) -> Result<Option<u64>, Full> {
        let bytes = key.bytes();
        self.tree.get_or_insert_with(key.fingerprint(self.seed), value, |value| {
            self.resolver.with_key(value, |stored| stored == bytes.as_ref())
        })
    }

    /// Removes the key if its value is `expected`; tells whether it was there.
    pub fn remove<K: Key + ?Sized>(&self, key: &K, expected: u64) -> bool {
        self.tree.remove(key.fingerprint(self.seed), expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_ending_makes_all_keys_equal() {
        // Keys made from the public lane constants, in each lane, after whole blocks and without any.
        let ending: Vec<u8> = LANES.iter().flat_map(|lane| lane.to_le_bytes()).collect();
        for length in [0, 8, 64, 128] {
            for seed in 1..100u64 {
                let [x, y] = [1, 2].map(|byte| [&vec![byte; length][..], &ending].concat());
                if length != 0 {
                    assert_ne!(fingerprint_bytes(&x, seed), fingerprint_bytes(&y, seed), "{length} bytes, seed {seed}");
                }
                assert_ne!(fingerprint_bytes(&x, seed), fingerprint_bytes(&x, seed + 1));
            }
        }
    }
}
