//! The name of a block's content: a keyed 128-bit fingerprint.

/// The kind of fingerprint, and its key.
#[derive(Clone, Debug)]
pub enum FingerprintKey {
    /// XXH3-128 with a seed: fast. Equal fingerprints are followed by a comparison of the bytes.
    Fast(u64),
    /// BLAKE3 with a key, cut to 128 bits: strong enough to stand for the bytes, as fingerprint files require.
    Strong([u8; 32]),
}

/// Fingerprint of 4 KiB. Equal blocks have equal fingerprints; only the strong kind proves the reverse.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Fingerprint(pub(crate) u128);

impl Fingerprint {
    /// A block of zeros, whatever the key. No other content has it.
    pub(crate) const ZERO_BLOCK: Self = Self(1);
    /// Not known. No block has it.
    pub(crate) const UNKNOWN: Self = Self(0);

    /// The key in the content index.
    pub(crate) fn index_key(self) -> u64 {
        self.0 as u64
    }
}

/// Computes fingerprints.
pub(crate) enum Hasher {
    Fast(u64),
    Strong(Box<[u8; 32]>),
}

impl Hasher {
    pub(crate) fn new(key: &FingerprintKey) -> Self {
        match key {
            FingerprintKey::Fast(seed) => Self::Fast(*seed),
            FingerprintKey::Strong(key) => Self::Strong(Box::new(*key)),
        }
    }

    /// Whether equal fingerprints may stand for equal bytes.
    pub(crate) fn proves_equality(&self) -> bool {
        matches!(self, Self::Strong(_))
    }

    /// The fingerprint of `block`, which must not be all zeros.
    pub(crate) fn fingerprint(&self, block: &[u8]) -> Fingerprint {
        let value = match self {
            Self::Fast(seed) => xxhash_rust::xxh3::xxh3_128_with_seed(block, *seed),
            Self::Strong(key) => {
                let hash = blake3::keyed_hash(key, block);
                u128::from_le_bytes(hash.as_bytes()[..16].try_into().expect("a hash has 32 bytes"))
            }
        };
        // 0 and 1 are `UNKNOWN` and `ZERO_BLOCK`.
        Fingerprint(if value < 2 { value + 2 } else { value })
    }
}

/// Whether `block` holds zeros only.
pub(crate) fn is_zero(block: &[u8]) -> bool {
    // Most blocks differ from zero within their first bytes, so these are compared first.
    let (head, rest) = block.split_at(block.len().min(64));
    head.iter().all(|&b| b == 0) && rest.chunks(256).all(|part| part.iter().fold(0, |or, b| or | b) == 0)
}
