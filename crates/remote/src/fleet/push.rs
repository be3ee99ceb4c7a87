//! Images of the store into a fleet's store: only pieces that it lacks, and the manifest last.

use super::bucket::{Access, Bucket};
use super::lease::Lease;
use super::packs::{self, Uploads};
use super::pieces::Packer;
use crate::address::Address;
use crate::common::{Common, mib, say};
use crate::error::{Error, Result};
use bytes::Bytes;
use pagefold_image::digest::{Digest, hash_reader};
use pagefold_image::fleet::{Head, Indexed, Manifest, PIECE, PieceLocation, encode_manifest, piece_bytes, piece_count};
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::{Data, FileKind, Tree};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Most bytes of a manifest.
pub const MANIFEST_MAX: u64 = 1 << 30;

/// A piece: the object, and which of its pieces.
type PieceKey = (Digest, u32);

/// A place, with the pack's own name.
type Lies = (Digest, u32, u32);

/// Uploads the image `name`: packs with the pieces that the store lacks, then the manifest.
///
/// # Errors
/// No such image; a damaged object; a store that fails or refuses the login; another push that has given the image's name to
/// another image meanwhile.
pub fn push(runtime: &Runtime, common: &Common, address: &Address, name: &str) -> Result<()> {
    let store = common.open_with(name)?;
    let (record, _lease) = store.hold(name)?;
    let tree = store.tree(&record.digest)?;
    let bucket = Arc::new(Bucket::open(
        &address.store_address,
        Access::Create,
        common.server.plain_http,
        common.server.timeout,
    )?);
    let path = address.manifest();
    let before = runtime.block_on(bucket.get(&path, MANIFEST_MAX))?;
    // Before the packs are listed: what a collection removes after this, it removes with regard to this push.
    let lease = Lease::take(runtime, bucket.clone())?;
    let objects = tree.objects();
    let mut locations: HashMap<PieceKey, Lies> = HashMap::new();
    runtime.block_on(known(&bucket, &objects, &mut locations))?;
    let pieces_known = locations.len() as u64;
    let mut uploads = Uploads::new(runtime, bucket.clone());
    upload(&store, &tree, &mut locations, &mut uploads)?;
    uploads.finish()?;
    let metadata = store.tree_bytes(&record.digest)?;
    let head = Head {
        tree: record.digest,
        tree_bytes: metadata.len() as u64,
        config: record.config.clone(),
        notes: record.notes.clone(),
        profile: Profile::load(&store, &record.digest).and_then(|profile| profile.for_outside()),
    };
    let manifest = manifest(head, &metadata, &objects, &locations);
    let bytes = Bytes::from(encode_manifest(&manifest));
    let mut uploaded = uploads.bytes_uploaded;
    lease.check()?;
    if before.as_ref().is_none_or(|(before, _)| *before != bytes) {
        uploaded += bytes.len() as u64;
        let put = bucket.put_unless_changed(&path, bytes, before.as_ref().map(|(_, version)| version));
        if !runtime.block_on(put)? {
            let whole = address.whole();
            return Err(Error::Said(format!(
                "{whole}: another push has replaced it meanwhile; push again to replace that"
            )));
        }
    }
    runtime.block_on(check_packs(&bucket, &manifest, address))?;
    lease.end();
    let reference = address.whole();
    let text = if common.server.json {
        let value = serde_json::json!({ "name": name, "reference": reference, "digest": record.digest,
            "pieces_known": pieces_known, "pieces_uploaded": locations.len() as u64 - pieces_known,
            "packs_uploaded": uploads.packs_uploaded, "bytes_uploaded": uploaded });
        format!("{value:#}")
    } else {
        let mib = mib(uploaded);
        let new = locations.len() as u64 - pieces_known;
        format!("{}  {reference}\npieces: {pieces_known} known, {new} uploaded, {mib:.1} MiB", record.digest)
    };
    say(&text)
}

/// Fails if a pack of a manifest that was written is not there: a collection has taken this push for dead, and ended its
/// work at the same moment.
async fn check_packs(bucket: &Bucket, manifest: &Manifest, address: &Address) -> Result<()> {
    let there = packs::list_all(bucket).await?;
    let is_there = |pack: &&Digest| there.get(*pack).is_some_and(|files| files.pack.is_some());
    match manifest.packs.iter().find(|pack| !is_there(pack)) {
        None => Ok(()),
        Some(pack) => Err(Error::Said(format!(
            "{}: a collection has removed {} meanwhile; push again",
            address.whole(),
            packs::pack_path(pack)
        ))),
    }
}

/// Finds the pieces of `objects` that the store has.
async fn known(bucket: &Bucket, objects: &[(Digest, u64, u32)], locations: &mut HashMap<PieceKey, Lies>) -> Result<()> {
    let sizes: HashMap<Digest, u64> = objects.iter().map(|(digest, size, _)| (*digest, *size)).collect();
    let packs = packs::list(bucket).await?;
    let keep = |pack, piece: Indexed| {
        if sizes.get(&piece.object) == Some(&piece.size) {
            locations.insert((piece.object, piece.number), (pack, piece.offset, piece.packed));
        }
    };
    packs::read(bucket, packs, keep).await.map(drop)
}

/// Uploads the pieces that have no place, in the order of the tree: a host that lacks a directory asks for one range.
fn upload(store: &Store, tree: &Tree, locations: &mut HashMap<PieceKey, Lies>, uploads: &mut Uploads) -> Result<()> {
    let (mut order, mut seen) = (Vec::new(), HashSet::new());
    tree.walk(|_, id| {
        if let FileKind::File(Data::Object(digest, size)) = tree.inode(id).kind
            && seen.insert(digest)
        {
            let numbers = 0..piece_count(size) as u32;
            let missing: Vec<u32> = numbers.filter(|number| !locations.contains_key(&(digest, *number))).collect();
            if !missing.is_empty() {
                order.push((digest, size, missing));
            }
        }
    });
    let progress = Progress::new("push");
    progress.expect(order.iter().map(|(_, size, _)| size).sum());
    let mut packer = Packer::new();
    let mut place = |filled: Option<(Digest, Vec<Indexed>)>| {
        let (pack, pieces) = filled.unwrap_or((Digest([0; 32]), Vec::new()));
        locations.extend(pieces.iter().map(|piece| ((piece.object, piece.number), (pack, piece.offset, piece.packed))));
    };
    for (digest, size, missing) in order {
        let file = open_whole(store, digest, size)?;
        for number in missing {
            let mut plain = vec![0; piece_bytes(size, number) as usize];
            let read = file.read_exact_at(&mut plain, u64::from(number) * PIECE);
            read.map_err(|error| unread(store, digest, &error))?;
            progress.add(plain.len() as u64, false);
            place(uploads.add((digest, size), number, &packer.pack(&plain))?);
        }
        progress.add(0, true);
    }
    place(uploads.begin()?);
    Ok(())
}

/// Opens an object after it was compared with its digest: damage must not spread.
fn open_whole(store: &Store, digest: Digest, size: u64) -> Result<File> {
    let path = store.object_path(&digest);
    let read = || -> io::Result<(File, (Digest, u64))> {
        let mut file = File::open(&path)?;
        let found = hash_reader(&mut file)?;
        Ok((file, found))
    };
    match read().map_err(|error| unread(store, digest, &error))? {
        (file, found) if found == (digest, size) => Ok(file),
        _ => Err(unread(store, digest, &"damaged; build or pull an image that has it")),
    }
}

fn unread(store: &Store, digest: Digest, what: &dyn std::fmt::Display) -> Error {
    Error::Said(format!("{}: {what}", store.object_path(&digest).display()))
}

/// The manifest of an image with all its pieces in their locations.
fn manifest(
    head: Head,
    metadata: &[u8],
    objects: &[(Digest, u64, u32)],
    locations: &HashMap<PieceKey, Lies>,
) -> Manifest {
    let (mut packs, mut numbers) = (Vec::new(), HashMap::new());
    let mut number = |pack: Digest| {
        *numbers.entry(pack).or_insert_with(|| {
            packs.push(pack);
            packs.len() as u32 - 1
        })
    };
    let pieces =
        objects.iter().flat_map(|(digest, size, _)| (0..piece_count(*size) as u32).map(|piece| (*digest, piece)));
    let placed = pieces.map(|piece| {
        let (pack, offset, packed) = locations[&piece];
        PieceLocation { pack: number(pack), offset, packed }
    });
    let locations = placed.collect();
    Manifest { head, tree: Packer::new().pack(metadata), packs, locations }
}
