//! SHA-256 names for objects and images.
//!
//! The same function names OCI blobs and is what the kernel's `inode_share`
//! fingerprints carry, so one pass over a file's bytes serves all three.

use crate::buffer::with_buffer;
use crate::error::{Error, Result, input};
use sha2::Digest as _;
use std::fmt;
use std::io::{self, Read, Write};

/// The SHA-256 of some content; its name in the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Hashes `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// Reads 64 lower-case hexadecimal digits, with or without the `sha256:` before them.
    ///
    /// # Errors
    /// [`Error::Input`] for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        Self::from_hex(hex.as_bytes()).ok_or_else(|| input!("{text:?} is not a sha256 digest"))
    }

    /// Reads exactly 64 lower-case hexadecimal digits.
    pub fn from_hex(hex: &[u8]) -> Option<Self> {
        let mut bytes = [0u8; 32];
        if hex.len() != 64 {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
            *byte = (nibble(pair[0])? << 4) | nibble(pair[1])?;
        }
        Some(Self(bytes))
    }

    /// Writes 64 hexadecimal digits.
    pub fn hex(&self) -> String {
        use fmt::Write;
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// The object's path inside `objects/`: two digits, a slash, the other 62.
    pub fn object_path(&self) -> String {
        let mut path = self.hex();
        path.insert(2, '/');
        path
    }

    /// The first 16 bytes as a key for sets: a collision there only keeps an object too long.
    pub(crate) fn key(&self) -> u128 {
        u128::from_le_bytes(self.0[..16].try_into().expect("16 bytes"))
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.to_string())
    }
}

impl<'de> serde::Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A reader that counts and hashes what passes through it.
pub(crate) struct Hashing<R> {
    inner: R,
    hasher: sha2::Sha256,
    /// Bytes read so far.
    pub count: u64,
}

impl<R: Read> Hashing<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: sha2::Sha256::new(), count: 0 }
    }

    /// Reads what is left and compares the digest of everything with `expected`.
    pub fn finish(mut self, what: &str, expected: Digest) -> Result<()> {
        let mut buffer = vec![0; 1 << 16];
        while self.read(&mut buffer).map_err(|error| input!("{what}: {error}"))? > 0 {}
        let found = Digest(self.hasher.finalize().into());
        if found == expected {
            return Ok(());
        }
        Err(Error::Digest { what: what.into(), expected: expected.to_string(), found: found.to_string() })
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        self.count += count as u64;
        Ok(count)
    }
}

/// A writer that hashes what passes through it.
pub(crate) struct HashingWriter<W> {
    inner: W,
    hasher: sha2::Sha256,
}

impl<W: Write> HashingWriter<W> {
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: sha2::Sha256::new() }
    }

    /// The digest of what was written.
    pub fn digest(self) -> Digest {
        Digest(self.hasher.finalize().into())
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Hashes everything `reader` gives; returns the digest and the byte count.
///
/// # Errors
/// The reader's.
pub fn hash_reader(reader: &mut impl Read) -> io::Result<(Digest, u64)> {
    with_buffer(1 << 18, |buffer| {
        let (mut hasher, mut total) = (sha2::Sha256::new(), 0);
        loop {
            match reader.read(buffer) {
                Ok(0) => return Ok((Digest(hasher.finalize().into()), total)),
                Ok(count) => {
                    hasher.update(&buffer[..count]);
                    total += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trip_and_known_value() {
        let digest = Digest::of(b"abc");
        assert_eq!(digest.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(Digest::parse(&digest.to_string()).unwrap(), digest);
        assert_eq!(digest.object_path(), format!("ba/{}", &digest.hex()[2..]));
        for bad in ["", "sha256:", "sha512:00", &digest.hex()[1..], &digest.hex().to_uppercase()] {
            assert!(Digest::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reader_with_the_wrong_digest_is_named() {
        let error = Hashing::new(&b"abd"[..]).finish("layer 1", Digest::of(b"abc")).unwrap_err();
        assert!(error.to_string().contains("layer 1"), "{error}");
        Hashing::new(&b"abc"[..]).finish("layer 1", Digest::of(b"abc")).unwrap();
    }
}
