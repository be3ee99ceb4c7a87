//! Images of a registry into the store.
//!
//! Layers that the store knows are neither fetched nor unpacked. The others are fetched by a few requests at the same time,
//! and unpacked in their order as they arrive. Of a layer with a table of contents only the parts come that the store lacks.

use crate::common::{Common, mib, say};
use crate::downloads::Downloads;
use crate::error::{Error, Result};
use crate::parts;
use crate::registry::Registry;
use crate::start_profile;
use oci_client::{Reference, RegistryOperation};
use pagefold_image::build::Omissions;
use pagefold_image::config::Limits;
use pagefold_image::digest::Digest;
use pagefold_image::oci::{Documents, Layer, LayerImport, Next, Platform};
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use pagefold_image::store::{BuildStats, ImageRecord, Store};
use pagefold_os::sanitize::clean;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Runtime;

/// Most indexes that lead to each other.
const DEPTH_MAX: usize = 5;

/// Which image, and how much of it.
pub struct Wanted {
    pub platform: Option<Platform>,
    pub max_bytes: Option<u64>,
    pub max_entries: Option<u64>,
}

/// What a pull has moved.
#[derive(Default)]
struct Moved {
    manifest: String,
    layers_known: u64,
    layers_fetched: u64,
    bytes_fetched: u64,
    /// Of the fetched layers, those of which parts came.
    layers_in_parts: u64,
    /// Files of these that the store had, and their packed bytes.
    files_known: u64,
    bytes_known: u64,
    /// Whether the image has a start profile now.
    start_profile: bool,
}

/// Stores the image under `name`.
///
/// # Errors
/// No such image; a registry that fails; layers that are not what the manifest says, or break the limits.
pub fn pull(runtime: &Runtime, common: &Common, reference: &Reference, name: &str, wanted: &Wanted) -> Result<()> {
    let defaults = Limits::default();
    let limits = Limits {
        bytes: wanted.max_bytes.unwrap_or(defaults.bytes),
        entries: wanted.max_entries.unwrap_or(defaults.entries),
        ..defaults
    };
    let operation = RegistryOperation::Pull;
    let registry = Registry::connect(reference, common.server.plain_http, common.server.timeout, operation);
    let registry = Arc::new(runtime.block_on(registry)?);
    let mut moved = Moved::default();
    let (documents, manifest) = runtime.block_on(documents(&registry, wanted, limits, &mut moved))?;
    moved.manifest = manifest.to_string();
    let store = Store::open(&common.store, &common.domain)?;
    let build = store.build()?;
    let mut notes = Omissions::default();
    let layers = LayerImport::new(&build, &documents.layers)?;
    let mut downloads = Downloads::lock(runtime, &registry, &store, layers.missing())?;
    // Another pull with some of these layers may have ended meanwhile.
    let import = LayerImport::new(&build, &documents.layers)?;
    moved.layers_known = (documents.layers.len() - import.missing().len()) as u64;
    let parts =
        parts::plan(runtime, &registry, &build, &downloads.unbegun(import.missing()), &mut moved.bytes_fetched)?;
    downloads.begin(import.missing(), parts)?;
    let mut failed = None;
    let open = |layer: &Layer| {
        downloads.wait(layer).map_err(|error| match error {
            Error::Image(error) => error,
            other => {
                // The import knows no such error.
                let text = other.to_string();
                failed = Some(other);
                pagefold_image::Error::Input(text)
            }
        })
    };
    let tree = match import.run(open, limits, &mut notes, &Progress::silent()) {
        Ok(tree) => tree,
        Err(error) => {
            let is_bad = failed.is_none()
                && matches!(error, pagefold_image::Error::Input(_) | pagefold_image::Error::Digest { .. });
            if is_bad {
                // The next pull would find the same.
                downloads.remove()?;
            }
            return Err(failed.unwrap_or(error.into()));
        }
    };
    let record = build.publish(name, &tree, &reference.whole(), documents.config, notes.lines())?;
    moved.layers_fetched = downloads.layers_fetched;
    moved.bytes_fetched += downloads.bytes_fetched;
    for known in downloads.in_parts() {
        moved.layers_in_parts += 1;
        moved.files_known += known.files;
        moved.bytes_known += known.bytes;
    }
    downloads.remove()?;
    moved.start_profile = bring_profile(runtime, &registry, &store, &record, manifest, &mut moved.bytes_fetched);
    report(&record, build.stats(), &moved, common.server.json)
}

/// Brings what a start of the image reads, as another host has recorded it, unless this one knows better. Returns true if
/// the store has it now.
fn bring_profile(
    runtime: &Runtime,
    registry: &Registry,
    store: &Store,
    record: &ImageRecord,
    manifest: Digest,
    bytes_fetched: &mut u64,
) -> bool {
    if Profile::load(store, &record.digest).is_some() {
        return true;
    }
    match runtime.block_on(start_profile::pull(registry, manifest, bytes_fetched)) {
        Ok(profile) => start_profile::keep(store, &record.digest, profile),
        Err(error) => {
            let text = clean(&registry.name(error).to_string());
            eprintln!("pagefold: note: {} came without its start profile: {text}", record.name);
            false
        }
    }
}

/// Fetches the documents that lead to the layers; also returns the manifest's digest.
async fn documents(
    registry: &Registry,
    wanted: &Wanted,
    limits: Limits,
    moved: &mut Moved,
) -> Result<(Documents, Digest)> {
    let platform = wanted.platform.as_ref();
    let (mut document, mut digest) = registry.manifest(None).await?;
    for _ in 0..DEPTH_MAX {
        moved.bytes_fetched += document.len() as u64;
        match Next::parse(&document, platform)? {
            Next::Manifest(next, _) => (document, digest) = registry.manifest(Some(next)).await?,
            Next::Configuration(next, size) => {
                let configuration = registry.document(next, size).await?;
                moved.bytes_fetched += configuration.len() as u64;
                return Ok((Documents::parse(&document, &configuration, platform, limits)?, digest));
            }
        }
    }
    Err(Error::Said(format!("indexes in indexes, deeper than {}", DEPTH_MAX - 1)))
}

/// Says what the operator of an image should know.
pub fn say_notes(record: &ImageRecord) {
    let platform = record.config.platform.parse::<Platform>();
    if platform.is_ok_and(|platform| !platform.fits(&Platform::host())) {
        eprintln!(
            "pagefold: note: {} holds programs for {}, which do not run on this machine",
            record.name, record.config.platform
        );
    }
    for note in &record.notes {
        eprintln!("pagefold: note: {}", clean(note));
    }
}

/// Says what came, and what is new in the store.
fn report(record: &ImageRecord, stats: &BuildStats, moved: &Moved, json: bool) -> Result<()> {
    say_notes(record);
    let (new, bytes_new) = (stats.objects_new.load(Relaxed), stats.bytes_new.load(Relaxed));
    let text = if json {
        let mut value = serde_json::to_value(record).expect("plain data");
        value["objects_new"] = new.into();
        value["bytes_new"] = bytes_new.into();
        value["manifest"] = moved.manifest.as_str().into();
        value["layers_known"] = moved.layers_known.into();
        value["layers_fetched"] = moved.layers_fetched.into();
        value["bytes_fetched"] = moved.bytes_fetched.into();
        value["layers_in_parts"] = moved.layers_in_parts.into();
        value["files_known"] = moved.files_known.into();
        value["bytes_known"] = moved.bytes_known.into();
        value["start_profile"] = moved.start_profile.into();
        format!("{value:#}")
    } else {
        let parts = match moved.layers_in_parts {
            0 => String::new(),
            _ => format!(" ({} files, {:.1} MiB from the store)", moved.files_known, mib(moved.bytes_known)),
        };
        format!(
            "{}  {}\nlayers: {} known, {} fetched, {:.1} MiB{parts}; {} files, {new} new objects, {:.1} MiB new on disk",
            record.digest,
            record.name,
            moved.layers_known,
            moved.layers_fetched,
            mib(moved.bytes_fetched),
            record.files,
            mib(bytes_new),
        )
    };
    say(&text)
}
