//! Layers in parts: a layer's table of contents names the contents that the store has, and the rest comes by ranges.
//!
//! Whatever fails here that another try would not change leads to the whole layer: a table is a short cut.

use crate::error::{Error, Result};
use crate::fetch::FailedTries;
use crate::registry::Registry;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use pagefold_image::build::Build;
use pagefold_image::digest::Digest;
use pagefold_image::oci::{Layer, Parts, Plan, TableLocation, TableOfContents};
use pagefold_image::progress::Progress;
use pagefold_os::sanitize::clean;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::runtime::Runtime;

/// Requests for parts of one layer at the same time.
const AT_ONCE: usize = 4;

/// Fewest packed bytes of a layer with a table that is looked at: below, the table costs more than it saves.
const LAYER_MIN: u64 = 256 << 10;

/// A table is looked at only if its packed bytes are at most one of so many of the layer.
const TABLE_SHARE: u64 = 4;

/// Most bytes of all tables of a pull, unpacked: they stay in memory until the layers are planned.
const TABLES_MAX: u64 = 128 << 20;

/// Plans parts for those of `layers` that have a table and of which the store has enough. Adds the bytes that come to
/// `moved`.
///
/// # Errors
/// No connection; the system's.
pub fn plan(
    runtime: &Runtime,
    registry: &Registry,
    build: &Build,
    layers: &[&Layer],
    moved: &mut u64,
) -> Result<BTreeMap<Digest, Parts>> {
    let mut all = BTreeMap::new();
    let wanted = worthwhile(layers);
    // A store without an image has nothing that a table could name.
    if wanted.is_empty() || build.store().images()?.is_empty() {
        return Ok(all);
    }
    for (digest, table) in runtime.block_on(tables(registry, wanted, moved))? {
        let contents: Vec<(Digest, u64)> =
            table.contents().iter().map(|content| (content.digest, content.size)).collect();
        if let Some(plan) = Plan::new(table, &build.has_all(&contents)?) {
            all.insert(digest, Parts::new(build, plan)?);
        }
    }
    Ok(all)
}

/// The layers with tables that are worth a look, with their digests.
fn worthwhile<'l>(layers: &[&'l Layer]) -> Vec<(&'l Layer, Digest, &'l TableLocation)> {
    let mut left = TABLES_MAX;
    let mut wanted = Vec::new();
    for layer in layers {
        let (Some(location), Some((digest, size))) = (layer.table(), layer.blob()) else { continue };
        let range = location.range();
        // The layer's second place in the image would need the whole layer.
        let is_once = layers.iter().filter(|other| other.blob() == layer.blob()).count() == 1;
        if is_once
            && size >= LAYER_MIN
            && range.end - range.start <= size / TABLE_SHARE
            && location.bytes_in_all() <= left
        {
            left -= location.bytes_in_all();
            wanted.push((*layer, digest, location));
        }
    }
    wanted
}

/// Fetches the tables, and reads those that can be used.
async fn tables(
    registry: &Registry,
    wanted: Vec<(&Layer, Digest, &TableLocation)>,
    moved: &mut u64,
) -> Result<Vec<(Digest, TableOfContents)>> {
    let mut found = Vec::new();
    let count = AtomicU64::new(0);
    let mut coming = FuturesUnordered::new();
    let mut wanted = wanted.into_iter();
    loop {
        while coming.len() < AT_ONCE
            && let Some((layer, digest, location)) = wanted.next()
        {
            let count = &count;
            coming.push(async move { (digest, table(registry, layer, digest, location, count).await) });
        }
        match coming.next().await {
            Some((digest, table)) => found.extend(table?.map(|table| (digest, table))),
            None => break,
        }
    }
    *moved += count.load(Relaxed);
    Ok(found)
}

/// The table of a layer; `None`, after a note if it is not what the manifest says, if the layer is to come as a whole.
async fn table(
    registry: &Registry,
    layer: &Layer,
    digest: Digest,
    location: &TableLocation,
    moved: &AtomicU64,
) -> Result<Option<TableOfContents>> {
    let packed = Cell::new(Vec::new());
    let sink = |_, piece: &[u8]| {
        let mut bytes = packed.take();
        bytes.extend_from_slice(piece);
        packed.set(bytes);
        Ok(())
    };
    if !bring(registry, digest, location.range(), moved, sink).await? {
        return Ok(None);
    }
    match location.read(&packed.take()) {
        Ok(table) => Ok(Some(table)),
        Err(error) => {
            let text = format!("{}: {error}; the layer is fetched as a whole", layer.what());
            eprintln!("pagefold: note: {}", clean(&text));
            Ok(None)
        }
    }
}

/// Brings the ranges of `parts` of the layer `digest`. Returns how many bytes came, and false if the registry does not send
/// ranges.
///
/// # Errors
/// No connection; the system's.
pub async fn fetch(registry: &Registry, digest: Digest, parts: &Parts, progress: &Progress) -> Result<(bool, u64)> {
    let moved = AtomicU64::new(0);
    let mut coming = FuturesUnordered::new();
    let (mut ranges, mut place) = (parts.plan().ranges.iter(), 0);
    loop {
        while coming.len() < AT_ONCE
            && let Some(range) = ranges.next()
        {
            let (begin, moved) = (place, &moved);
            let sink = move |at, piece: &[u8]| {
                progress.add(piece.len() as u64, false);
                Ok(parts.write(begin + at, piece)?)
            };
            coming.push(bring(registry, digest, range.clone(), moved, sink));
            place += range.end - range.start;
        }
        match coming.next().await {
            Some(Ok(true)) => {}
            Some(Ok(false)) => break,
            Some(Err(error)) => return Err(error),
            None => return Ok((true, moved.load(Relaxed))),
        }
    }
    Ok((false, moved.load(Relaxed)))
}

/// Brings a range of the blob `digest`. `sink` gets each piece with its place in the range. Returns false if the registry
/// does not send ranges, or not this one.
async fn bring(
    registry: &Registry,
    digest: Digest,
    range: Range<u64>,
    moved: &AtomicU64,
    mut sink: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<bool> {
    let (mut at, mut failed) = (range.start, FailedTries::default());
    loop {
        let before = at;
        let mut take = |place, piece: &[u8]| {
            moved.fetch_add(piece.len() as u64, Relaxed);
            sink(place - range.start, piece)
        };
        let text = match advance(registry, digest, &mut at, range.end, &mut take).await {
            Ok(true) if at == range.end => return Ok(true),
            Ok(true) => format!("layer {digest}: a range ended {} bytes early", range.end - at),
            Ok(false) | Err(Error::Said(_)) => return Ok(false),
            Err(Error::Passing(text)) => text,
            Err(error) => return Err(error),
        };
        failed.count(at - before, text).await.map_err(|error| registry.name(error))?;
    }
}

/// Takes what one request gives of the blob from `at` to `end`, and moves `at`. Returns false if that is no such range.
async fn advance(
    registry: &Registry,
    digest: Digest,
    at: &mut u64,
    end: u64,
    sink: &mut impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<bool> {
    let Some(mut stream) = registry.range(digest, *at..end).await? else { return Ok(false) };
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        if piece.len() as u64 > end - *at {
            return Ok(false);
        }
        sink(*at, &piece)?;
        *at += piece.len() as u64;
    }
    Ok(true)
}
