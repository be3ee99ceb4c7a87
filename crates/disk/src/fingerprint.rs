//! What a block's content is called: a keyed 128-bit fingerprint.

use crate::config::FingerprintKey;

/// Fingerprint of 4 KiB. Finds equals; proves them only in the strong kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Fingerprint(pub(crate) u128);

impl Fingerprint {
    /// A block of zeros, whatever the key; also what no hash of other content is mapped to.
    pub(crate) const ZERO_BLOCK: Self = Self(1);
    /// Nothing known; never the fingerprint of any block.
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
    pub(crate) fn proves(&self) -> bool {
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
        // 0 and 1 have a meaning of their own; a hash that falls there moves aside.
        Fingerprint(if value < 2 { value + 2 } else { value })
    }
}

/// Whether `block` holds zeros only.
pub(crate) fn is_zero(block: &[u8]) -> bool {
    // Most blocks differ from zero within their first bytes: look there before the whole.
    let (head, rest) = block.split_at(block.len().min(64));
    head.iter().all(|&b| b == 0) && rest.chunks(256).all(|part| part.iter().fold(0, |or, b| or | b) == 0)
}
