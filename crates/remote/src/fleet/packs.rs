//! The packs of a fleet's store: which pieces they hold, and how new ones get there.

use super::bucket::{Bucket, Listed};
use crate::common::random;
use crate::error::{Error, Result};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use pagefold_image::digest::Digest;
use pagefold_image::fleet::{Indexed, decode_index, encode_index};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// Bytes after which a pack is full. One more piece is below the format's limit.
const FULL: usize = 8 << 20;

/// Most bytes of an index: 52 for each piece, and no piece is shorter than a dozen bytes.
const INDEX_MAX: u64 = 128 << 20;

/// Indexes that are read at the same time.
const READ_AT_ONCE: usize = 16;

/// Packs that are uploaded at the same time.
const UPLOADS: usize = 3;

/// Where the store has the pack.
pub fn pack_path(pack: &Digest) -> String {
    format!("packs/{}.pack", pack.hex())
}

/// Where the store has the pack's index.
pub fn index_path(pack: &Digest) -> String {
    format!("packs/{}.index", pack.hex())
}

/// A pack that has an index.
pub struct Pack {
    pub digest: Digest,
    pub bytes: u64,
}

/// The files of a pack, as far as they are there.
#[derive(Default)]
pub struct Files {
    pub pack: Option<Listed>,
    pub index: Option<Listed>,
}

/// All packs, whole or not.
pub async fn list_all(bucket: &Bucket) -> Result<HashMap<Digest, Files>> {
    let mut packs = HashMap::<Digest, Files>::new();
    for file in bucket.list("packs").await? {
        let Some((stem, kind)) = file.path.rsplit('/').next().and_then(|name| name.split_once('.')) else { continue };
        match (Digest::from_hex(stem.as_bytes()), kind) {
            (Some(digest), "pack") => packs.entry(digest).or_default().pack = Some(file),
            (Some(digest), "index") => packs.entry(digest).or_default().index = Some(file),
            _ => {}
        }
    }
    Ok(packs)
}

/// The packs that have an index: both are whole, since the index comes last. An index without its pack is worth nothing.
pub async fn list(bucket: &Bucket) -> Result<Vec<Pack>> {
    let whole = |(digest, files): (Digest, Files)| {
        files.index?;
        Some(Pack { digest, bytes: files.pack?.bytes })
    };
    Ok(list_all(bucket).await?.into_iter().filter_map(whole).collect())
}

/// Calls `each` for all pieces in `packs`. Returns how many bytes of indexes came. An index that is damaged or gone counts
/// as empty: its pieces are uploaded again.
///
/// # Errors
/// No connection; an index of another format.
pub async fn read(bucket: &Bucket, packs: Vec<Pack>, mut each: impl FnMut(Digest, Indexed)) -> Result<u64> {
    let read = |pack: Pack| async move {
        let path = index_path(&pack.digest);
        let Some((bytes, _)) = bucket.get(&path, INDEX_MAX).await? else {
            return Ok::<_, Error>((pack, 0, Vec::new()));
        };
        let index = decode_index(&bytes).map_err(|error| Error::Said(format!("{path}: {error}")))?;
        let pieces = index.filter(|(digest, _)| *digest == pack.digest).map_or_else(Vec::new, |(_, pieces)| pieces);
        Ok((pack, bytes.len() as u64, pieces))
    };
    let mut came = 0;
    let mut reads = futures_util::stream::iter(packs).map(read).buffer_unordered(READ_AT_ONCE);
    while let Some((pack, bytes, pieces)) = reads.try_next().await? {
        came += bytes;
        // A pack that has lost its end has lost these pieces.
        let is_there = |piece: &Indexed| u64::from(piece.offset) + u64::from(piece.packed) <= pack.bytes;
        pieces.into_iter().filter(is_there).for_each(|piece| each(pack.digest, piece));
    }
    Ok(came)
}

/// Fills packs with pieces and uploads them, a few at the same time.
pub struct Uploads<'a> {
    runtime: &'a Runtime,
    bucket: Arc<Bucket>,
    bytes: Vec<u8>,
    pieces: Vec<Indexed>,
    tasks: JoinSet<Result<()>>,
    /// Packs, and bytes of them and their indexes, of this push.
    pub packs_uploaded: u64,
    pub bytes_uploaded: u64,
}

impl<'a> Uploads<'a> {
    pub fn new(runtime: &'a Runtime, bucket: Arc<Bucket>) -> Self {
        let tasks = JoinSet::new();
        Self { runtime, bucket, bytes: Vec::new(), pieces: Vec::new(), tasks, packs_uploaded: 0, bytes_uploaded: 0 }
    }

    /// Adds a piece. Returns the pack and its pieces if that has filled one.
    ///
    /// # Errors
    /// An earlier upload has failed.
    pub fn add(&mut self, object: (Digest, u64), number: u32, packed: &[u8]) -> Result<Option<(Digest, Vec<Indexed>)>> {
        self.pieces.push(Indexed {
            object: object.0,
            size: object.1,
            number,
            offset: self.bytes.len() as u32,
            packed: packed.len() as u32,
        });
        self.bytes.extend_from_slice(packed);
        if self.bytes.len() < FULL { Ok(None) } else { self.begin() }
    }

    /// Uploads the pieces that fill no pack. Returns the pack and its pieces, if there are any.
    ///
    /// # Errors
    /// An earlier upload has failed.
    pub fn begin(&mut self) -> Result<Option<(Digest, Vec<Indexed>)>> {
        if self.pieces.is_empty() {
            return Ok(None);
        }
        while self.tasks.len() >= UPLOADS {
            self.wait_for_one()?;
        }
        let (mut bytes, pieces) = (std::mem::take(&mut self.bytes), std::mem::take(&mut self.pieces));
        // No other pack has its name, even one with the same pieces: a collection may be about to remove that one.
        bytes.extend(random()?);
        let digest = Digest::of(&bytes);
        let index = encode_index(&digest, &pieces);
        self.packs_uploaded += 1;
        self.bytes_uploaded += (bytes.len() + index.len()) as u64;
        let bucket = self.bucket.clone();
        let upload = async move {
            bucket.put(&pack_path(&digest), Bytes::from(bytes)).await?;
            // The index comes last: other hosts rely on packs that have one.
            bucket.put(&index_path(&digest), Bytes::from(index)).await
        };
        self.tasks.spawn_on(upload, self.runtime.handle());
        Ok(Some((digest, pieces)))
    }

    /// Waits until all packs are there.
    ///
    /// # Errors
    /// An upload has failed.
    pub fn finish(&mut self) -> Result<()> {
        while !self.tasks.is_empty() {
            self.wait_for_one()?;
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<()> {
        let ended = self.runtime.block_on(self.tasks.join_next());
        ended.map_or(Ok(()), |ended| ended.unwrap_or_else(|error| Err(Error::Said(error.to_string()))))
    }
}
