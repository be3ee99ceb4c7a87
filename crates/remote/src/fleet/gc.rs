//! Removes packs of a fleet's store that no image needs, while other hosts push.
//!
//! A push relies on a pack only if it has seen the pack's index, and it has written a lease before it looked. So a
//! collection removes the index of each pack that no manifest names, and then lists the leases: later pushes do not see
//! these packs. It waits until those leases have ended, reads the manifests again, and removes the packs that still none
//! names. An index does not come back, and no two packs have one name. So collections on several hosts need not know of each
//! other, and one that is killed leaves packs without an index for the next.

use super::bucket::{Access, Bucket, Listed};
use super::lease::{self, unique};
use super::packs::{Files, index_path, list_all, pack_path};
use super::push::MANIFEST_MAX;
use crate::address::StoreAddress;
use crate::common::{Server, mib, say, seconds};
use crate::error::{Error, Result};
use bytes::Bytes;
use clap::Args;
use pagefold_image::digest::Digest;
use pagefold_image::fleet::decode_manifest;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// Where a collection writes files to learn the time of the store's clock.
const CLOCK: &str = "collections";

/// Shortest and longest pause between two looks at the leases.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// What a collection is asked for.
#[derive(Args)]
pub struct Wanted {
    /// Say what would go, remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Seconds for which packs that no image names stay: a push that was killed goes on with them
    #[arg(long, default_value = "86400", value_parser = seconds)]
    keep: Duration,
    /// Most seconds to wait for pushes in progress
    #[arg(long, default_value = "900", value_parser = seconds)]
    wait: Duration,
}

/// What a collection has done.
#[derive(Default, serde::Serialize)]
struct Collected {
    /// Manifests of images.
    images: u64,
    packs_kept: u64,
    bytes_kept: u64,
    /// Bytes of pieces in kept packs that no image names.
    bytes_unused: u64,
    packs_removed: u64,
    bytes_removed: u64,
    /// Packs that the next collection removes: pushes in progress may need them.
    packs_waiting: u64,
    /// Files of a directory that killed hosts have not written to their ends.
    unfinished_removed: u64,
    dry_run: bool,
}

/// The packs that manifests name, each with the locations that they name in it.
type Needed = HashMap<Digest, HashSet<(u32, u32)>>;

/// Removes packs that no image needs.
///
/// # Errors
/// A manifest that cannot be read: what it needs is unknown, and nothing is removed. A store that fails or refuses the
/// login.
pub async fn collect(server: &Server, store_address: &StoreAddress, wanted: &Wanted) -> Result<()> {
    let access = if wanted.dry_run { Access::Read } else { Access::Write };
    let bucket = Bucket::open(store_address, access, server.plain_http, server.timeout)?;
    let clock = unique(CLOCK)?;
    let collected = run(&bucket, wanted, &clock).await;
    if !wanted.dry_run {
        let _ = bucket.remove(&clock).await;
    }
    let mut collected = collected?;
    if let StoreAddress::Directory(path) = store_address {
        let age = wanted.keep.max(lease::LIFE);
        collected.unfinished_removed = remove_unfinished(path.as_ref(), age, wanted.dry_run);
    }
    if server.json {
        return say(&format!("{:#}", serde_json::json!(collected)));
    }
    let Collected { images, packs_kept, packs_removed, packs_waiting, dry_run, .. } = collected;
    let verb = if dry_run { "would remove" } else { "removed" };
    say(&format!(
        "{verb} {packs_removed} packs, {:.1} MiB; {packs_kept} packs of {images} images kept, {:.1} MiB, {:.1} of it unused",
        mib(collected.bytes_removed),
        mib(collected.bytes_kept),
        mib(collected.bytes_unused)
    ))?;
    if packs_waiting > 0 {
        say(&format!("{packs_waiting} packs stay until the next collection: pushes in progress may need them"))?;
    }
    Ok(())
}

async fn run(bucket: &Bucket, wanted: &Wanted, clock: &str) -> Result<Collected> {
    let now = if wanted.dry_run { SystemTime::now() } else { time(bucket, clock).await? };
    let mut collected = Collected { dry_run: wanted.dry_run, ..Collected::default() };
    let needed = needed(bucket, &mut collected).await?;
    let packs = list_all(bucket).await?;
    let is_old = |file: &Option<Listed>| file.as_ref().is_none_or(|file| file.age(now) >= wanted.keep);
    let mut doomed = Vec::new();
    for (digest, files) in &packs {
        if !needed.contains_key(digest) && is_old(&files.pack) && is_old(&files.index) {
            doomed.push(*digest);
        }
    }
    if !wanted.dry_run && !doomed.is_empty() {
        for pack in doomed.iter().filter(|pack| packs[pack].index.is_some()) {
            bucket.remove(&index_path(pack)).await?;
        }
        if pushes_have_ended(bucket, wanted, clock).await? {
            // What ended meanwhile may need some of them.
            collected.images = 0;
            let (needed, there) = (self::needed(bucket, &mut collected).await?, list_all(bucket).await?);
            let is_whole = |pack: &Digest| there.get(pack).is_some_and(|files| files.index.is_some());
            doomed.retain(|pack| !needed.contains_key(pack) && !is_whole(pack));
            for pack in &doomed {
                bucket.remove(&pack_path(pack)).await?;
            }
        } else {
            collected.packs_waiting = std::mem::take(&mut doomed).len() as u64;
        }
    }
    let doomed: HashSet<Digest> = doomed.into_iter().collect();
    let bytes = |files: &Files| files.pack.as_ref().map_or(0, |pack| pack.bytes);
    for (digest, files) in packs.iter().filter(|(_, files)| files.pack.is_some()) {
        if doomed.contains(digest) {
            collected.packs_removed += 1;
            collected.bytes_removed += bytes(files);
            continue;
        }
        collected.packs_kept += 1;
        collected.bytes_kept += bytes(files);
        let used =
            needed.get(digest).map_or(0, |locations| locations.iter().map(|(_, packed)| u64::from(*packed)).sum());
        collected.bytes_unused += bytes(files).saturating_sub(used);
    }
    Ok(collected)
}

/// Removes what hosts were writing to a directory when they died, `age` ago or earlier: files without their names yet, which
/// no list shows. Returns how many there are.
fn remove_unfinished(path: &Path, age: Duration, dry_run: bool) -> u64 {
    let (mut count, mut todo) = (0, vec![path.to_path_buf()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                todo.push(entry.path());
                continue;
            }
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.split_once('#')).map_or("", |(_, number)| number);
            let is_unfinished = !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
            let is_old = meta.modified().is_ok_and(|written| written.elapsed().is_ok_and(|passed| passed >= age));
            if is_unfinished && is_old && (dry_run || fs::remove_file(entry.path()).is_ok()) {
                count += 1;
            }
        }
    }
    count
}

/// The time of the store's clock.
async fn time(bucket: &Bucket, clock: &str) -> Result<SystemTime> {
    bucket.put(clock, Bytes::new()).await?;
    let mut found = bucket.list(CLOCK).await?.into_iter();
    let lost = || Error::Said(format!("{clock} was written, and is not there"));
    found.find(|file| file.path == clock).map(|file| file.written).ok_or_else(lost)
}

/// What the manifests name.
async fn needed(bucket: &Bucket, collected: &mut Collected) -> Result<Needed> {
    let mut needed = Needed::new();
    for file in bucket.list("images").await? {
        // Its image was taken away at this moment.
        let Some((bytes, _)) = bucket.get(&file.path, MANIFEST_MAX).await? else { continue };
        let manifest = decode_manifest(&bytes).map_err(|error| {
            Error::Said(format!(
                "{}: {error}; nothing is removed: push the image again, or remove this file",
                file.path
            ))
        })?;
        collected.images += 1;
        for pack in &manifest.packs {
            needed.entry(*pack).or_default();
        }
        for location in &manifest.locations {
            let pack = manifest.packs[location.pack as usize];
            needed.entry(pack).or_default().insert((location.offset, location.packed));
        }
    }
    Ok(needed)
}

/// Waits until the pushes that are in progress now have ended or died. Returns false if they take too long.
async fn pushes_have_ended(bucket: &Bucket, wanted: &Wanted, clock: &str) -> Result<bool> {
    let (began, mut pause) = (Instant::now(), PAUSES[0]);
    let mut running: Option<HashSet<String>> = None;
    loop {
        let (alive, dead) = lease::list(bucket, time(bucket, clock).await?).await?;
        for lease in dead {
            // Before anything relies on its death: a push that was only stopped sees that its lease is gone.
            bucket.remove(&lease.path).await?;
        }
        let mut alive: HashSet<String> = alive.into_iter().map(|lease| lease.path).collect();
        if let Some(first) = &running {
            alive.retain(|lease| first.contains(lease));
        }
        if alive.is_empty() {
            return Ok(true);
        }
        if began.elapsed() >= wanted.wait {
            return Ok(false);
        }
        running = Some(alive);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES[1]);
    }
}
