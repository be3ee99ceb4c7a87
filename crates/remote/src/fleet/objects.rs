//! Objects of an image: where their pieces lie, in which requests they are fetched, and how they get into the store.

use super::bucket::Bucket;
use super::packs::{self, pack_path};
use super::pieces::unpack;
use crate::error::{Error, Result};
use pagefold_image::build::Build;
use pagefold_image::digest::Digest;
use pagefold_image::fleet::{Indexed, Manifest, piece_bytes, piece_count};
use pagefold_image::tree::Data;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Read};
use std::path::Path;
use tokio::runtime::Handle;

/// Bytes between two pieces that are fetched along: a request of its own would cost more.
pub const GAP: u32 = 16 << 10;

/// An object of the image: digest, bytes.
pub type Object = (Digest, u64);

/// A location, with the pack's own name: pack, offset, bytes there.
pub type Lies = (Digest, u32, u32);

/// A piece of object `object` of the image, and where in its pack it lies.
#[derive(Clone, Copy)]
pub struct ObjectPiece {
    pub object: usize,
    pub number: u32,
    pub offset: u32,
    pub packed: u32,
}

/// A piece, and its pack.
pub type InPack = (Digest, ObjectPiece);

/// A range of a pack, and the pieces in it.
pub struct Request {
    pub pack: Digest,
    pub pieces: Vec<ObjectPiece>,
}

impl Request {
    pub fn begin(&self) -> u32 {
        self.pieces[0].offset
    }

    pub fn end(&self) -> u32 {
        self.pieces.last().map_or(0, |piece| piece.offset + piece.packed)
    }
}

/// What an image needs of the store's packs.
pub struct Needs {
    pub objects: Vec<Object>,
    /// Where the pieces of each missing object lie, by object and number.
    pub locations: HashMap<(usize, u32), Lies>,
    /// How many objects are missing.
    pub missing: usize,
}

impl Needs {
    /// What `manifest`'s image needs, with these `objects`, of which the store `has` some.
    pub fn of(manifest: &Manifest, objects: Vec<Object>, has: &[bool]) -> Self {
        let missing = has.iter().filter(|has| !**has).count();
        let (mut lie, mut locations) = (HashMap::new(), manifest.locations.iter());
        for (object, (_, size)) in objects.iter().enumerate() {
            let count = piece_count(*size) as usize;
            for (number, location) in locations.by_ref().take(count).enumerate().filter(|_| !has[object]) {
                let pack = manifest.packs[location.pack as usize];
                lie.insert((object, number as u32), (pack, location.offset, location.packed));
            }
        }
        Self { objects, locations: lie, missing }
    }

    /// Returns true if object `object` has several pieces.
    pub fn is_large(&self, object: usize) -> bool {
        piece_count(self.objects[object].1) > 1
    }

    /// The missing pieces: first those that are whole objects, in the order of the packs, then the others, object by object.
    pub fn pieces(&self) -> (Vec<InPack>, Vec<InPack>) {
        let pieces = self
            .locations
            .iter()
            .map(|(&(object, number), &(pack, offset, packed))| (pack, ObjectPiece { object, number, offset, packed }));
        let (mut large, mut small): (Vec<_>, Vec<_>) = pieces.partition(|(_, piece)| self.is_large(piece.object));
        small.sort_by_key(|(pack, piece)| (*pack, piece.offset));
        large.sort_by_key(|(_, piece)| (piece.object, piece.number));
        (small, large)
    }

    /// What is to be fetched, in requests of `most` bytes each at most.
    pub fn plan(&self, most: u32) -> Vec<Request> {
        let (small, large) = self.pieces();
        let mut plan: Vec<Request> = Vec::new();
        for (pack, piece) in small.into_iter().chain(large) {
            let fits = |last: &&mut Request| {
                let gap = piece.offset.checked_sub(last.end());
                let bytes = (piece.offset + piece.packed).saturating_sub(last.begin());
                last.pack == pack && gap.is_some_and(|gap| gap <= GAP) && bytes <= most
            };
            match plan.last_mut().filter(fits) {
                Some(last) => last.pieces.push(piece),
                None => plan.push(Request { pack, pieces: vec![piece] }),
            }
        }
        plan
    }
}

/// The error for a pack that is not there.
pub fn missing(pack: &Digest) -> Error {
    Error::Said(format!("{} is missing", pack_path(pack)))
}

/// Unpacks piece `number` of an object of `size` bytes; `pack` names it in an error.
///
/// # Errors
/// Damage.
pub fn unpack_piece(pack: &Digest, packed: &[u8], size: u64, number: u32) -> Result<Vec<u8>> {
    unpack(packed, piece_bytes(size, number)).map_err(|_| Error::Said(format!("{} is damaged", pack_path(pack))))
}

/// Stores an object of which `next` gives the pieces.
///
/// # Errors
/// Those of `next`; pieces that do not have the object's digest; the store's.
pub fn put(build: &Build, (digest, size): Object, mut next: impl FnMut(u32) -> Result<Vec<u8>>) -> Result<()> {
    let other = || Error::Said("the store gives other bytes".into());
    if piece_count(size) == 1 {
        let plain = next(0)?;
        if Digest::of(&plain) != digest {
            return Err(other());
        }
        build.put_bytes(&plain)?;
        return Ok(());
    }
    let count = piece_count(size) as u32;
    let mut reader = Pieces { next, number: 0, count, plain: Vec::new(), at: 0, failed: None };
    let stored = build.put_reader(&mut reader, Path::new("an object"), |_| ());
    match (reader.failed, stored?) {
        (Some(error), _) => Err(error),
        (None, data) if data == Data::Object(digest, size) => Ok(()),
        _ => Err(other()),
    }
}

/// Reads an object piece by piece.
struct Pieces<F> {
    next: F,
    number: u32,
    count: u32,
    plain: Vec<u8>,
    at: usize,
    /// Why it ends early.
    failed: Option<Error>,
}

impl<F: FnMut(u32) -> Result<Vec<u8>>> Read for Pieces<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.plain.len() && self.number < self.count && self.failed.is_none() {
            match (self.next)(self.number) {
                Ok(plain) => (self.plain, self.at, self.number) = (plain, 0, self.number + 1),
                Err(error) => self.failed = Some(error),
            }
        }
        let count = (&self.plain[self.at..]).read(buffer)?;
        self.at += count;
        Ok(count)
    }
}

/// Fetches the `bad` objects piece by piece from whichever pack has them, and takes those that are whole from the list.
/// Returns how many bytes came.
pub fn from_other_packs(
    runtime: &Handle,
    bucket: &Bucket,
    build: &Build,
    needs: &Needs,
    bad: &mut BTreeMap<usize, String>,
) -> Result<u64> {
    let numbers: HashMap<Object, usize> = bad.keys().map(|object| (needs.objects[*object], *object)).collect();
    let mut others: HashMap<(usize, u32), Vec<Lies>> = HashMap::new();
    let keep = |pack, piece: Indexed| {
        if let Some(object) = numbers.get(&(piece.object, piece.size)) {
            others.entry((*object, piece.number)).or_default().push((pack, piece.offset, piece.packed));
        }
    };
    let look = async { packs::read(bucket, packs::list(bucket).await?, keep).await };
    // A store that lists nothing has no other packs to look into.
    let Ok(mut came) = runtime.block_on(look) else { return Ok(0) };
    let mut gone = HashSet::new();
    let objects: Vec<usize> = bad.keys().copied().collect();
    for object in objects {
        let (digest, size) = needs.objects[object];
        let next = |number| {
            let piece = (object, number);
            let all = needs.locations.get(&piece).into_iter().chain(others.get(&piece).into_iter().flatten());
            let mut failed = Error::Said("no pack has it".into());
            for (pack, offset, packed) in all {
                if gone.contains(pack) {
                    continue;
                }
                let range = u64::from(*offset)..u64::from(offset + packed);
                let plain = runtime.block_on(bucket.range(&pack_path(pack), range)).and_then(|bytes| {
                    let bytes = bytes.ok_or_else(|| {
                        gone.insert(*pack);
                        missing(pack)
                    })?;
                    came += bytes.len() as u64;
                    unpack_piece(pack, &bytes, size, number)
                });
                match plain {
                    Ok(plain) if piece_count(size) > 1 || Digest::of(&plain) == digest => return Ok(plain),
                    Ok(_) => {}
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        };
        match put(build, (digest, size), next) {
            Ok(()) => drop(bad.remove(&object)),
            Err(Error::Said(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(came)
}
