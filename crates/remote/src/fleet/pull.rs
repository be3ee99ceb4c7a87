//! Images of a fleet's store into the store: only objects that the store lacks, each compared with its digest.
//!
//! What is damaged or withheld is looked for in other packs. If none has it, all other objects stay in the store for the
//! next pull.

use super::bucket::Bucket;
use super::image::Image;
use super::objects::{Needs, Object, ObjectPiece, Request, from_other_packs, missing, put, unpack_piece};
use super::packs::pack_path;
use crate::address::Address;
use crate::common::{Common, mib, say};
use crate::error::{Error, Result};
use crate::pull::{Wanted, say_notes};
use crate::start_profile;
use futures_util::StreamExt;
use pagefold_image::build::Build;
use pagefold_image::fleet::Manifest;
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use pagefold_image::store::{ImageRecord, Store};
use pagefold_image::tree::{Data, FileKind, Tree, show};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Most bytes of a request.
const REQUEST_MAX: u32 = 8 << 20;

/// Requests at the same time.
const AT_ONCE: usize = 4;

/// Bytes of objects after which they get their names: a killed pull fetches no more than these again.
const KEEP_BYTES: u64 = 256 << 20;

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
    let Image { bucket, manifest, manifest_bytes, tree, objects } =
        Image::open(runtime, &common.server, address, wanted)?;
    let mut moved = Moved { bytes_fetched: manifest_bytes, ..Moved::default() };
    let store = Store::open(&common.store, &common.domain)?;
    let build = store.build()?;
    let has = build.has_all(&objects)?;
    moved.objects_known = has.iter().filter(|has| **has).count() as u64;
    moved.objects_fetched = objects.len() as u64 - moved.objects_known;
    let needs = Needs::of(&manifest, objects, &has);
    let mut fetched = Moved::default();
    let named = match fetch(runtime, &bucket, &build, &needs, &mut fetched) {
        Ok(bad) if bad.is_empty() => Ok(()),
        Ok(bad) => Err(lost(&tree, &needs.objects, &bad)),
        Err(error) => Err(error),
    };
    if named.is_err() {
        // What came need not come again.
        build.keep()?;
    }
    named?;
    moved.bytes_fetched += fetched.bytes_fetched;
    let Manifest { head, .. } = manifest;
    let profile = head.profile.as_ref().and_then(Profile::from_outside);
    let record = build.publish(name, &tree, &address.whole(), head.config, head.notes)?;
    start_profile::keep(&store, &record.digest, profile);
    report(&record, build.stats().bytes_new.load(Relaxed), &moved, common.server.json)
}

/// Fetches the missing objects. Returns those that no pack gives, with the reason for each.
fn fetch(
    runtime: &Runtime,
    bucket: &Arc<Bucket>,
    build: &Build,
    needs: &Needs,
    moved: &mut Moved,
) -> Result<BTreeMap<usize, String>> {
    let mut arrivals = Arrivals::begin(runtime, bucket, &needs.objects, needs.plan(REQUEST_MAX));
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
        moved.bytes_fetched += from_other_packs(runtime.handle(), bucket, build, needs, &mut bad)?;
    }
    Ok(bad)
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
    fn next(&mut self) -> Result<Option<(ObjectPiece, Result<Vec<u8>>)>> {
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
