//! Images of a registry into the store.
//!
//! Layers that the store knows are neither fetched nor unpacked. The others are fetched by a few requests at the same time,
//! and unpacked in their order as they arrive.

use crate::common::{Common, mib, say};
use crate::error::{Error, Result};
use crate::fetch::fetch;
use crate::registry::Registry;
use oci_client::{Reference, RegistryOperation};
use pagefold_image::build::Omissions;
use pagefold_image::config::Limits;
use pagefold_image::digest::Digest;
use pagefold_image::oci::{Documents, Layer, LayerImport, Next, Platform};
use pagefold_image::progress::Progress;
use pagefold_image::store::{BuildStats, Download, ImageRecord, Store};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, oneshot};

/// Layers that are fetched at the same time, as docker does it.
const AT_ONCE: usize = 3;

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
    let documents = runtime.block_on(documents(&registry, wanted, limits, &mut moved))?;
    let store = Store::open(&common.store, &common.domain)?;
    let build = store.build()?;
    let mut notes = Omissions::default();
    let mut downloads = Downloads::lock(&store, LayerImport::new(&build, &documents.layers)?.missing())?;
    // Another pull with some of these layers may have ended meanwhile.
    let import = LayerImport::new(&build, &documents.layers)?;
    moved.layers_known = (documents.layers.len() - import.missing().len()) as u64;
    downloads.begin(runtime, &registry, import.missing())?;
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
    downloads.remove()?;
    report(&record, build.stats(), &moved, common.server.json)
}

/// Fetches the documents that lead to the layers.
async fn documents(registry: &Registry, wanted: &Wanted, limits: Limits, moved: &mut Moved) -> Result<Documents> {
    let platform = wanted.platform.as_ref();
    let (mut document, mut digest) = registry.manifest(None).await?;
    for _ in 0..DEPTH_MAX {
        moved.bytes_fetched += document.len() as u64;
        match Next::parse(&document, platform)? {
            Next::Manifest(next, _) => (document, digest) = registry.manifest(Some(next)).await?,
            Next::Configuration(next, size) => {
                moved.manifest = digest.to_string();
                let configuration = registry.document(next, size).await?;
                moved.bytes_fetched += configuration.len() as u64;
                return Ok(Documents::parse(&document, &configuration, platform, limits)?);
            }
        }
    }
    Err(Error::Said(format!("indexes in indexes, deeper than {}", DEPTH_MAX - 1)))
}

/// The end of a layer's way from the registry: its file and how many bytes came.
type Fetched = Result<(Download, u64)>;

/// A packed layer on its way.
enum State {
    Locked(Download),
    Coming(oneshot::Receiver<Fetched>),
    Here(Download),
}

/// The packed layers of a pull. Their files are locked until it ends.
struct Downloads {
    by_digest: BTreeMap<Digest, State>,
    layers_fetched: u64,
    bytes_fetched: u64,
}

impl Downloads {
    /// Locks the files of `layers`, in the order of their digests.
    fn lock(store: &Store, layers: &[Layer]) -> Result<Self> {
        let mut by_digest: BTreeMap<Digest, State> = BTreeMap::new();
        let mut digests: Vec<Digest> = layers.iter().filter_map(Layer::blob).map(|(digest, _)| digest).collect();
        digests.sort();
        digests.dedup();
        for digest in digests {
            by_digest.insert(digest, State::Locked(store.download(&digest)?));
        }
        Ok(Self { by_digest, layers_fetched: 0, bytes_fetched: 0 })
    }

    /// Begins to fetch the `missing` layers. Another pull has brought the others.
    fn begin(&mut self, runtime: &Runtime, registry: &Arc<Registry>, missing: &[Layer]) -> Result<()> {
        let progress = Arc::new(Progress::new("pull"));
        let permits = Arc::new(Semaphore::new(AT_ONCE));
        let mut locked = std::mem::take(&mut self.by_digest);
        let mut expected = 0;
        for (digest, size) in missing.iter().filter_map(Layer::blob) {
            let Some(State::Locked(mut download)) = locked.remove(&digest) else { continue };
            let (give, take) = oneshot::channel();
            self.by_digest.insert(digest, State::Coming(take));
            expected += size;
            let (registry, progress, permits) = (registry.clone(), progress.clone(), permits.clone());
            runtime.spawn(async move {
                let _permit = permits.acquire().await;
                let fetched = fetch(&registry, (digest, size), &mut download, &progress).await;
                // No receiver: the pull has failed.
                let _ = give.send(fetched.map(|moved| (download, moved)));
            });
        }
        progress.expect(expected);
        for state in locked.into_values() {
            if let State::Locked(download) = state {
                download.remove()?;
            }
        }
        Ok(())
    }

    /// Waits for a layer. Returns its packed bytes.
    fn wait(&mut self, layer: &Layer) -> Result<impl std::io::Read + use<>> {
        let gone = || Error::Said("a layer's download has ended".into());
        let (digest, _) = layer.blob().ok_or_else(gone)?;
        let state = self.by_digest.remove(&digest).ok_or_else(gone)?;
        let download = match state {
            State::Locked(download) | State::Here(download) => download,
            State::Coming(coming) => {
                let (download, moved) = coming.blocking_recv().map_err(|_| gone())??;
                self.layers_fetched += 1;
                self.bytes_fetched += moved;
                download
            }
        };
        let reader = download.reader()?;
        self.by_digest.insert(digest, State::Here(download));
        Ok(reader)
    }

    /// Removes what has arrived.
    fn remove(self) -> Result<()> {
        for state in self.by_digest.into_values() {
            if let State::Here(download) = state {
                download.remove()?;
            }
        }
        Ok(())
    }
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
        eprintln!("pagefold: note: {}", pagefold_os::sanitize::clean(note));
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
        format!("{value:#}")
    } else {
        format!(
            "{}  {}\nlayers: {} known, {} fetched, {:.1} MiB; {} files, {new} new objects, {:.1} MiB new on disk",
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
