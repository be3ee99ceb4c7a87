//! What a fleet's store keeps beside its packs: an index for each pack, and a manifest for each image.
//!
//! Both come from outside. Reading checks every number; the digests of objects and trees are the reader's to check.

use crate::digest::Digest;
use crate::error::{Result, input};
use crate::run_config::RunConfig;
use serde::{Deserialize, Serialize};

/// The format that this version writes, and the only one that it reads.
const FORMAT: u8 = 1;

/// An object's pieces are of this many bytes before they are packed, but for the last.
pub const PIECE: u64 = 4 << 20;

/// Most bytes of a packed piece: more than the compressor needs for bytes that do not compress.
pub const PACKED_MAX: u32 = (PIECE + (PIECE >> 7)) as u32;

/// Most bytes of a pack.
pub const PACK_MAX: u32 = 16 << 20;

const INDEX: &[u8; 6] = b"PFPACK";
const MANIFEST: &[u8; 6] = b"PFIMAG";

/// Bytes of the digest at the end of a file.
const CHECK: usize = 8;

/// Bytes of one piece in an index, and in a manifest.
const INDEXED: usize = 52;
const PLACED: usize = 12;

/// How many pieces an object of `size` bytes has.
pub fn piece_count(size: u64) -> u64 {
    size.div_ceil(PIECE)
}

/// Bytes of piece `number` of an object of `size` bytes, before it is packed.
pub fn piece_bytes(size: u64, number: u32) -> u64 {
    PIECE.min(size.saturating_sub(u64::from(number) * PIECE))
}

/// A piece of an object in the pack that an index belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexed {
    /// The object, and its bytes.
    pub object: Digest,
    /// The object's bytes.
    pub size: u64,
    /// Which of its pieces.
    pub number: u32,
    /// Where in the pack the piece begins.
    pub offset: u32,
    /// Its bytes there.
    pub packed: u32,
}

/// Where a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceLocation {
    /// The pack, by its number in the manifest.
    pub pack: u32,
    /// Where in the pack the piece begins.
    pub offset: u32,
    /// Its bytes there.
    pub packed: u32,
}

/// What a manifest says of its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// SHA-256 of the metadata image.
    pub tree: Digest,
    /// Bytes of the metadata image before it is packed.
    pub tree_bytes: u64,
    /// How to run it.
    #[serde(default)]
    pub config: RunConfig,
    /// What could not be stored, one line each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// What a start reads, if that was recorded: see [`profile`](crate::profile).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<serde_json::Value>,
}

/// An image in a fleet's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// What it is.
    pub head: Head,
    /// The metadata image, packed.
    pub tree: Vec<u8>,
    /// The packs that hold its objects.
    pub packs: Vec<Digest>,
    /// The pieces of its objects. The objects are in the order of their digests.
    pub locations: Vec<PieceLocation>,
}

/// Writes the index of pack `pack`.
pub fn encode_index(pack: &Digest, pieces: &[Indexed]) -> Vec<u8> {
    let mut out = begin(INDEX);
    out.extend(pack.0);
    for piece in pieces {
        out.extend(piece.object.0);
        out.extend(piece.size.to_le_bytes());
        [piece.number, piece.offset, piece.packed].iter().for_each(|number| out.extend(number.to_le_bytes()));
    }
    end(out)
}

/// Reads the index of a pack: the pack, and its pieces. `None` if it is damaged: its pieces count as not there.
///
/// # Errors
/// Another format.
pub fn decode_index(bytes: &[u8]) -> Result<Option<(Digest, Vec<Indexed>)>> {
    match format_of(bytes, INDEX) {
        Some(format) if format != FORMAT => Err(other_format("pack index", format)),
        _ => Ok(read_index(bytes).ok()),
    }
}

fn read_index(bytes: &[u8]) -> Result<(Digest, Vec<Indexed>)> {
    let mut rest = Rest(checked(bytes, INDEX, "pack index")?);
    let pack = rest.digest()?;
    let mut pieces = Vec::with_capacity(rest.0.len() / INDEXED);
    while !rest.0.is_empty() {
        let (object, size) = (rest.digest()?, rest.number64()?);
        let piece = Indexed { object, size, number: rest.number()?, offset: rest.number()?, packed: rest.number()? };
        if u64::from(piece.number) >= piece_count(size) {
            return Err(damaged());
        }
        check_location(piece.offset, piece.packed)?;
        pieces.push(piece);
    }
    Ok((pack, pieces))
}

/// Writes a manifest.
pub fn encode_manifest(manifest: &Manifest) -> Vec<u8> {
    let mut out = begin(MANIFEST);
    let head = serde_json::to_vec(&manifest.head).expect("plain data");
    for length in [head.len(), manifest.tree.len(), manifest.packs.len()] {
        out.extend((length as u64).to_le_bytes());
    }
    out.extend(head);
    out.extend(&manifest.tree);
    manifest.packs.iter().for_each(|pack| out.extend(pack.0));
    for location in &manifest.locations {
        [location.pack, location.offset, location.packed].iter().for_each(|number| out.extend(number.to_le_bytes()));
    }
    end(out)
}

/// Reads a manifest.
///
/// # Errors
/// Another format; anything damaged.
pub fn decode_manifest(bytes: &[u8]) -> Result<Manifest> {
    let mut rest = Rest(checked(bytes, MANIFEST, "manifest")?);
    let (head, tree, packs) = (rest.number64()?, rest.number64()?, rest.number64()?);
    let head: Head = serde_json::from_slice(rest.take(head)?).map_err(|_| damaged())?;
    let tree = rest.take(tree)?.to_vec();
    let packs = rest.take(packs.checked_mul(32).ok_or_else(damaged)?)?;
    let packs: Vec<Digest> = packs.chunks_exact(32).map(|pack| Digest(pack.try_into().expect("32 bytes"))).collect();
    let mut locations = Vec::with_capacity(rest.0.len() / PLACED);
    while !rest.0.is_empty() {
        let location = PieceLocation { pack: rest.number()?, offset: rest.number()?, packed: rest.number()? };
        if location.pack as usize >= packs.len() {
            return Err(damaged());
        }
        check_location(location.offset, location.packed)?;
        locations.push(location);
    }
    Ok(Manifest { head, tree, packs, locations })
}

/// What cannot be a piece's location in a pack is damage.
fn check_location(offset: u32, packed: u32) -> Result<()> {
    let is_inside = offset.checked_add(packed).is_some_and(|end| end <= PACK_MAX);
    if is_inside && (1..=PACKED_MAX).contains(&packed) { Ok(()) } else { Err(damaged()) }
}

fn damaged() -> crate::Error {
    input!("damaged")
}

fn other_format(what: &str, format: u8) -> crate::Error {
    input!("{what} of format {format}; this program reads format {FORMAT}: use another pagefold")
}

/// The format that a file names behind its magic.
fn format_of(bytes: &[u8], magic: &[u8; 6]) -> Option<u8> {
    let (format, _) = bytes.strip_prefix(magic)?.split_at_checked(2)?;
    std::str::from_utf8(format).ok()?.parse().ok()
}

fn begin(magic: &[u8; 6]) -> Vec<u8> {
    [&magic[..], format!("{FORMAT:02}").as_bytes()].concat()
}

fn end(mut out: Vec<u8>) -> Vec<u8> {
    let check = Digest::of(&out);
    out.extend(&check.0[..CHECK]);
    out
}

/// What a file holds between its magic and its check.
fn checked<'a>(bytes: &'a [u8], magic: &[u8; 6], what: &str) -> Result<&'a [u8]> {
    let format = format_of(bytes, magic).ok_or_else(|| input!("not a {what} of pagefold"))?;
    if format != FORMAT {
        return Err(other_format(what, format));
    }
    let end = bytes.len().checked_sub(CHECK).filter(|end| *end >= 8).ok_or_else(damaged)?;
    if Digest::of(&bytes[..end]).0[..CHECK] == bytes[end..] { Ok(&bytes[8..end]) } else { Err(damaged()) }
}

/// What is left to read.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let count = usize::try_from(count).map_err(|_| damaged())?;
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("4 bytes")))
    }

    fn number64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("8 bytes")))
    }

    fn digest(&mut self) -> Result<Digest> {
        Ok(Digest(self.take(32)?.try_into().expect("32 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let head = Head {
            tree: Digest::of(b"tree"),
            tree_bytes: 4,
            config: RunConfig::default(),
            notes: vec![],
            profile: None,
        };
        let locations = vec![
            PieceLocation { pack: 0, offset: 0, packed: 9 },
            PieceLocation { pack: 1, offset: 9, packed: PACKED_MAX },
        ];
        Manifest { head, tree: b"tree".to_vec(), packs: vec![Digest::of(b"1"), Digest::of(b"2")], locations }
    }

    fn index() -> (Digest, Vec<Indexed>) {
        let piece = |number, offset| Indexed { object: Digest::of(b"o"), size: PIECE + 1, number, offset, packed: 5 };
        (Digest::of(b"pack"), vec![piece(0, 0), piece(1, 5)])
    }

    #[test]
    fn what_was_written_is_read_and_any_other_byte_is_damage() {
        let (pack, pieces) = index();
        let written = encode_index(&pack, &pieces);
        assert_eq!(decode_index(&written).unwrap(), Some((pack, pieces)));
        let manifest = manifest();
        let bytes = encode_manifest(&manifest);
        assert_eq!(decode_manifest(&bytes).unwrap(), manifest);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert!(decode_manifest(&other).is_err(), "byte {at}");
            assert!(decode_manifest(&bytes[..at]).is_err(), "{at} bytes");
        }
        for at in 0..written.len() {
            assert_eq!(decode_index(&written[..at]).unwrap(), None, "{at} bytes");
        }
    }

    #[test]
    fn numbers_that_cannot_be_are_damage_with_the_right_check_too() {
        let (pack, mut pieces) = index();
        for change in [
            |piece: &mut Indexed| piece.number = 2,
            |piece: &mut Indexed| piece.packed = 0,
            |piece: &mut Indexed| piece.packed = PACKED_MAX + 1,
            |piece: &mut Indexed| piece.offset = u32::MAX,
            |piece: &mut Indexed| piece.offset = PACK_MAX - 4,
        ] {
            let whole = pieces[1];
            change(&mut pieces[1]);
            assert_eq!(decode_index(&encode_index(&pack, &pieces)).unwrap(), None, "{:?}", pieces[1]);
            pieces[1] = whole;
        }
        let mut manifest = manifest();
        manifest.locations[0].pack = 2;
        assert!(decode_manifest(&encode_manifest(&manifest)).is_err());
    }

    #[test]
    fn another_format_is_named() {
        let mut bytes = encode_manifest(&manifest());
        bytes[7] = b'2';
        let error = decode_manifest(&bytes).unwrap_err().to_string();
        assert!(error.contains("format 2") && error.contains("reads format 1"), "{error}");
        let (pack, pieces) = index();
        let mut bytes = encode_index(&pack, &pieces);
        bytes[7] = b'2';
        let error = decode_index(&bytes).unwrap_err().to_string();
        assert!(error.contains("pack index of format 2"), "{error}");
    }
}
