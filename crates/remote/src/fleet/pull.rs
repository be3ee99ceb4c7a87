//! Images of a fleet's store into the store: only objects that the store lacks, each compared with its digest.
//!
//! What is damaged or withheld is looked for in other packs. If none has it, all other objects stay in the store for the
//! next pull.

use super::bucket::{Access, Bucket};
use super::packs::{self, pack_path};
use super::pieces::unpack;
use super::push::MANIFEST_MAX;
use crate::address::Address;
use crate::common::{Common, mib, say};
use crate::error::{Error, Result};
use crate::pull::{Wanted, say_notes};
use futures_util::StreamExt;
use pagefold_image::build::Build;
use pagefold_image::digest::Digest;
use pagefold_image::erofs;
use pagefold_image::fleet::{Indexed, Manifest, decode_manifest, piece_bytes, piece_count};
use pagefold_image::progress::Progress;
use pagefold_image::store::{ImageRecord, Store};
use pagefold_image::tree::{Data, FileKind, INLINE_MAX, Tree, drop_overlay_xattrs, show};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Most bytes of a request.
const REQUEST_MAX: u32 = 8 << 20;

/// Bytes between two pieces that are fetched along: a request of its own would cost more.
const GAP: u32 = 16 << 10;

/// Requests at the same time.
const AT_ONCE: usize = 4;

/// Bytes of objects after which they get their names: a killed pull fetches no more than these again.
const KEEP_BYTES: u64 = 256 << 20;

/// An object of the image: digest, bytes.
type Object = (Digest, u64);

/// A place, with the pack's own name: pack, offset, bytes there.
type Lies = (Digest, u32, u32);

/// A piece of object `object` of the image, and where in its pack it lies.
#[derive(Clone, Copy)]
struct Piece {
    object: usize,
    number: u32,
    offset: u32,
    packed: u32,
}

/// A range of a pack, and the pieces in it.
struct Request {
    pack: Digest,
    pieces: Vec<Piece>,
}

impl Request {
    fn begin(&self) -> u32 {
        self.pieces[0].offset
    }

    fn end(&self) -> u32 {
        self.pieces.last().map_or(0, |piece| piece.offset + piece.packed)
    }
}

/// What a pull has moved.
#[derive(Default)]
struct Moved {
    objects_known: u64,
    objects_fetched: u64,
    bytes_fetched: u64,
}

/// Stores the image under `name`.
///
/// # Errors
/// No such image; a store that fails; objects that are damaged or withheld in every pack; limits.
pub fn pull(runtime: &Runtime, common: &Common, address: &Address, name: &str, wanted: &Wanted) -> Result<()> {
    if wanted.platform.is_some() {
        return Err(Error::Said("--platform: in a fleet's store a name stands for one image".into()));
    }
    let bucket =
        Arc::new(Bucket::open(&address.backend, Access::Read, common.server.plain_http, common.server.timeout)?);
    let found = runtime.block_on(bucket.get(&address.manifest(), MANIFEST_MAX))?;
    let whole = address.whole();
    let (bytes, _) = found.ok_or_else(|| Error::Said(format!("{whole}: no such image")))?;
    let in_manifest = |error: &dyn std::fmt::Display| Error::Said(format!("{whole}: manifest: {error}"));
    let manifest = decode_manifest(&bytes).map_err(|error| in_manifest(&error))?;
    let tree = read_tree(&manifest, wanted).map_err(|error| in_manifest(&error))?;
    let objects: Vec<Object> = tree.objects().into_iter().map(|(digest, size, _)| (digest, size)).collect();
    check(&manifest, &objects, wanted).map_err(|error| in_manifest(&error))?;
    let mut moved = Moved { bytes_fetched: bytes.len() as u64, ..Moved::default() };
    let store = Store::open(&common.store, &common.domain)?;
    let build = store.build()?;
    let has = build.has_all(&objects)?;
    moved.objects_known = has.iter().filter(|has| **has).count() as u64;
    moved.objects_fetched = objects.len() as u64 - moved.objects_known;
    let (needs, plan) = plan(&manifest, &objects, &has);
    let mut fetched = Moved::default();
    let named = match fetch(runtime, &bucket, &build, (&needs, plan), &mut fetched) {
        Ok(bad) if bad.is_empty() => Ok(()),
        Ok(bad) => Err(lost(&tree, &objects, &bad)),
        Err(error) => Err(error),
    };
    if named.is_err() {
        // What came need not come again.
        build.keep()?;
    }
    named?;
    moved.bytes_fetched += fetched.bytes_fetched;
    let Manifest { head, .. } = manifest;
    let record = build.publish(name, &tree, &whole, head.config, head.notes)?;
    report(&record, build.stats().bytes_new.load(Relaxed), &moved, common.server.json)
}

/// The tree of the manifest's metadata image.
fn read_tree(manifest: &Manifest, wanted: &Wanted) -> Result<Tree> {
    let head = &manifest.head;
    if head.tree_bytes > MANIFEST_MAX {
        return Err(Error::Said(format!("{} bytes of metadata; {MANIFEST_MAX} are allowed", head.tree_bytes)));
    }
    let metadata = unpack(&manifest.tree, head.tree_bytes)?;
    let found = Digest::of(&metadata);
    if found != head.tree {
        let (what, expected, found) = ("metadata".into(), head.tree.to_string(), found.to_string());
        return Err(pagefold_image::Error::Digest { what, expected, found }.into());
    }
    let inodes = wanted.max_entries.map(|most| usize::try_from(most).unwrap_or(usize::MAX));
    let limits = inodes.map_or(erofs::Limits::default(), |inodes| erofs::Limits { inodes });
    let mut tree = erofs::read(&metadata, limits)?;
    refuse_foreign(&mut tree)?;
    Ok(tree)
}

/// Refuses what no build writes: attributes that would lead overlayfs to files of other images, objects so small that they
/// are none, and an object with two sizes.
fn refuse_foreign(tree: &mut Tree) -> Result<()> {
    let mut sizes = HashMap::new();
    for id in 0..tree.inode_count() as u32 {
        let inode = tree.inode_mut(id);
        let is_known = match &inode.kind {
            FileKind::File(Data::Object(digest, size)) => {
                *size > INLINE_MAX && *sizes.entry(*digest).or_insert(*size) == *size
            }
            _ => true,
        };
        if !is_known || drop_overlay_xattrs(&mut inode.meta.xattrs) > 0 {
            return Err(Error::Said("a tree that pagefold does not write".into()));
        }
    }
    Ok(())
}

/// Refuses a manifest that does not fit its tree, and an image that is too large.
fn check(manifest: &Manifest, objects: &[Object], wanted: &Wanted) -> Result<()> {
    let sum = |of: fn(u64) -> u64| objects.iter().fold(0u64, |sum, (_, size)| sum.saturating_add(of(*size)));
    if sum(piece_count) != manifest.places.len() as u64 {
        return Err(Error::Said("damaged".into()));
    }
    let most = wanted.max_bytes.unwrap_or(pagefold_image::config::Limits::default().bytes);
    let bytes = sum(|size| size);
    if bytes > most {
        return Err(Error::Said(format!("{bytes} bytes of content; {most} are allowed (--max-bytes)")));
    }
    Ok(())
}

/// What an image needs of the store's packs.
struct Needs<'a> {
    objects: &'a [Object],
    /// Where the pieces of each missing object lie, by object and number.
    places: HashMap<(usize, u32), Lies>,
    /// How many objects are missing.
    missing: usize,
}

/// Fetches the missing objects. Returns those that no pack gives, with the reason for each.
fn fetch(
    runtime: &Runtime,
    bucket: &Arc<Bucket>,
    build: &Build,
    (needs, plan): (&Needs, Vec<Request>),
    moved: &mut Moved,
) -> Result<BTreeMap<usize, String>> {
    let mut arrivals = Arrivals::begin(runtime, bucket, needs.objects, plan);
    let (mut bad, mut whole, mut unnamed) = (BTreeMap::new(), 0, 0);
    while let Some((piece, plain)) = arrivals.next()? {
        moved.bytes_fetched = arrivals.bytes;
        if bad.contains_key(&piece.object) {
            continue;
        }
        let object = needs.objects[piece.object];
        let mut first = Some(plain);
        let next = |_| match first.take() {
            Some(first) => first,
            None => {
                arrivals.next()?.map_or_else(|| Err(Error::Said("its pieces have ended".into())), |(_, plain)| plain)
            }
        };
        match put(build, object, next) {
            Ok(()) => (whole, unnamed) = (whole + 1, unnamed + object.1),
            Err(Error::Said(text)) => drop(bad.insert(piece.object, text)),
            Err(error) => return Err(error),
        }
        if unnamed >= KEEP_BYTES {
            build.keep()?;
            unnamed = 0;
        }
    }
    moved.bytes_fetched = arrivals.bytes;
    if whole + bad.len() != needs.missing {
        return Err(Error::Said("the requests have ended".into()));
    }
    if !bad.is_empty() {
        moved.bytes_fetched += from_other_packs(runtime, bucket, build, needs, &mut bad)?;
    }
    Ok(bad)
}

/// What is to be fetched: first the objects of one piece, pack by pack, then the others, piece by piece.
fn plan<'a>(manifest: &Manifest, objects: &'a [Object], has: &[bool]) -> (Needs<'a>, Vec<Request>) {
    let (mut small, mut large) = (Vec::new(), Vec::new());
    let missing = has.iter().filter(|has| !**has).count();
    let mut needs = Needs { objects, places: HashMap::new(), missing };
    let mut places = manifest.places.iter();
    for (object, (_, size)) in objects.iter().enumerate() {
        let count = piece_count(*size) as u32;
        for (number, place) in places.by_ref().take(count as usize).enumerate() {
            if has[object] {
                continue;
            }
            let (pack, number) = (manifest.packs[place.pack as usize], number as u32);
            needs.places.insert((object, number), (pack, place.offset, place.packed));
            let piece = Piece { object, number, offset: place.offset, packed: place.packed };
            if count == 1 { small.push((pack, piece)) } else { large.push((pack, piece)) }
        }
    }
    small.sort_by_key(|(pack, piece)| (*pack, piece.offset));
    let mut plan: Vec<Request> = Vec::new();
    for (pack, piece) in small.into_iter().chain(large) {
        let fits = |last: &&mut Request| {
            let gap = piece.offset.checked_sub(last.end());
            let bytes = (piece.offset + piece.packed).saturating_sub(last.begin());
            last.pack == pack && gap.is_some_and(|gap| gap <= GAP) && bytes <= REQUEST_MAX
        };
        match plan.last_mut().filter(fits) {
            Some(last) => last.pieces.push(piece),
            None => plan.push(Request { pack, pieces: vec![piece] }),
        }
    }
    (needs, plan)
}

/// Pieces as they arrive, in the order of the plan.
struct Arrivals<'a> {
    requests: mpsc::Receiver<(Request, Result<Vec<u8>>)>,
    /// The request that is being unpacked, and how many of its pieces are.
    current: Option<(Request, Result<Vec<u8>>, usize)>,
    objects: &'a [Object],
    bytes: u64,
    progress: Progress,
}

impl<'a> Arrivals<'a> {
    /// Begins the requests, a few at the same time.
    fn begin(runtime: &Runtime, bucket: &Arc<Bucket>, objects: &'a [Object], plan: Vec<Request>) -> Self {
        let progress = Progress::new("pull");
        progress.expect(plan.iter().map(|request| u64::from(request.end() - request.begin())).sum());
        let (give, requests) = mpsc::channel(AT_ONCE);
        let bucket = bucket.clone();
        runtime.spawn(async move {
            let answer = |request: Request| {
                let bucket = bucket.clone();
                async move {
                    let range = request.begin().into()..request.end().into();
                    let answer = bucket.range(&pack_path(&request.pack), range).await;
                    let answer = answer.and_then(|bytes| bytes.ok_or_else(|| missing(&request.pack)));
                    (request, answer)
                }
            };
            let mut answers = futures_util::stream::iter(plan).map(answer).buffered(AT_ONCE);
            while let Some(answer) = answers.next().await {
                // No receiver: the pull has failed.
                if give.send(answer).await.is_err() {
                    break;
                }
            }
        });
        Self { requests, current: None, objects, bytes: 0, progress }
    }

    /// The next piece, and its bytes or why there are none.
    ///
    /// # Errors
    /// No connection.
    fn next(&mut self) -> Result<Option<(Piece, Result<Vec<u8>>)>> {
        loop {
            if let Some((request, answer, done)) = &mut self.current
                && let Some(piece) = request.pieces.get(*done)
            {
                *done += 1;
                let plain = match answer {
                    Ok(bytes) => {
                        let begin = (piece.offset - request.begin()) as usize;
                        let packed = bytes.get(begin..begin + piece.packed as usize).unwrap_or_default();
                        unpack_piece(&request.pack, packed, self.objects[piece.object].1, piece.number)
                    }
                    Err(error) => Err(Error::Said(error.to_string())),
                };
                return Ok(Some((*piece, plain)));
            }
            self.current = match self.requests.blocking_recv() {
                None => return Ok(None),
                Some((_, Err(error @ (Error::Passing(_) | Error::Image(_))))) => return Err(error),
                Some((request, answer)) => {
                    let bytes = answer.as_ref().map_or(0, |bytes| bytes.len() as u64);
                    self.bytes += bytes;
                    self.progress.add(bytes, false);
                    Some((request, answer, 0))
                }
            };
        }
    }
}

fn missing(pack: &Digest) -> Error {
    Error::Said(format!("{} is missing", pack_path(pack)))
}

fn unpack_piece(pack: &Digest, packed: &[u8], size: u64, number: u32) -> Result<Vec<u8>> {
    unpack(packed, piece_bytes(size, number)).map_err(|_| Error::Said(format!("{} is damaged", pack_path(pack))))
}

/// Stores an object of which `next` gives the pieces.
///
/// # Errors
/// Those of `next`; pieces that do not have the object's digest; the store's.
fn put(build: &Build, (digest, size): Object, mut next: impl FnMut(u32) -> Result<Vec<u8>>) -> Result<()> {
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
fn from_other_packs(
    runtime: &Runtime,
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
            let all = needs.places.get(&piece).into_iter().chain(others.get(&piece).into_iter().flatten());
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

/// Names the first of the objects that are lost, and a file that has it.
fn lost(tree: &Tree, objects: &[Object], bad: &BTreeMap<usize, String>) -> Error {
    let Some((object, what)) = bad.first_key_value() else { return Error::Said(String::new()) };
    let (digest, _) = objects[*object];
    let mut file = String::new();
    tree.walk(|path, id| {
        if file.is_empty() && matches!(tree.inode(id).kind, FileKind::File(Data::Object(other, _)) if other == digest) {
            file = show(path);
        }
    });
    let more = if bad.len() > 1 { format!(" and {} more", bad.len() - 1) } else { String::new() };
    Error::Said(format!(
        "object {digest} ({file}){more}: {what}; remove the pack and push again from a host that has the image; the other \
         objects stay here"
    ))
}

/// Says what came.
fn report(record: &ImageRecord, new: u64, moved: &Moved, json: bool) -> Result<()> {
    say_notes(record);
    let text = if json {
        let mut value = serde_json::to_value(record).expect("plain data");
        value["bytes_new"] = new.into();
        value["objects_known"] = moved.objects_known.into();
        value["objects_fetched"] = moved.objects_fetched.into();
        value["bytes_fetched"] = moved.bytes_fetched.into();
        format!("{value:#}")
    } else {
        format!(
            "{}  {}\nobjects: {} known, {} fetched, {:.1} MiB; {} files, {:.1} MiB new on disk",
            record.digest,
            record.name,
            moved.objects_known,
            moved.objects_fetched,
            mib(moved.bytes_fetched),
            record.files,
            mib(new),
        )
    };
    say(&text)
}
