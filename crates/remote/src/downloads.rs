//! The missing layers of a pull on their way from the registry.

use crate::error::{Error, Result};
use crate::fetch::fetch;
use crate::parts;
use crate::registry::Registry;
use pagefold_image::digest::Digest;
use pagefold_image::oci::{Layer, Parts, Source};
use pagefold_image::progress::Progress;
use pagefold_image::store::{Download, Store};
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, oneshot};

/// Layers that are fetched at the same time, as docker does it.
const AT_ONCE: usize = 3;

/// A layer that has come.
struct Arrived {
    /// The packed layer; empty if parts came.
    download: Download,
    parts: Option<Parts>,
    /// How many bytes came.
    moved: u64,
}

/// What the store had of a layer that came in parts.
#[derive(Clone, Copy)]
pub struct Known {
    pub files: u64,
    /// Packed bytes that were not needed.
    pub bytes: u64,
}

/// A packed layer on its way.
enum State {
    Locked(Download),
    Coming(oneshot::Receiver<Result<Arrived>>),
    Here(Download),
    /// Parts are here. The download is empty.
    InParts(Download, Known),
}

/// The packed layers of a pull. Their files are locked until it ends.
pub struct Downloads<'a> {
    runtime: &'a Runtime,
    registry: Arc<Registry>,
    by_digest: BTreeMap<Digest, State>,
    pub layers_fetched: u64,
    pub bytes_fetched: u64,
}

impl<'a> Downloads<'a> {
    /// Locks the files of `layers`, in the order of their digests.
    ///
    /// # Errors
    /// The system's.
    pub fn lock(runtime: &'a Runtime, registry: &Arc<Registry>, store: &Store, layers: &[Layer]) -> Result<Self> {
        let mut by_digest: BTreeMap<Digest, State> = BTreeMap::new();
        let mut digests: Vec<Digest> = layers.iter().filter_map(Layer::blob).map(|(digest, _)| digest).collect();
        digests.sort();
        digests.dedup();
        for digest in digests {
            by_digest.insert(digest, State::Locked(store.download(&digest)?));
        }
        Ok(Self { runtime, registry: registry.clone(), by_digest, layers_fetched: 0, bytes_fetched: 0 })
    }

    /// The layers of which no earlier pull has left something: a pull that was killed goes on where it ended.
    pub fn unbegun<'l>(&self, layers: &'l [Layer]) -> Vec<&'l Layer> {
        let is_empty = |digest: &Digest| matches!(self.by_digest.get(digest), Some(State::Locked(download)) if download.bytes() == 0);
        layers.iter().filter(|layer| layer.blob().is_some_and(|(digest, _)| is_empty(&digest))).collect()
    }

    /// Begins to fetch the `missing` layers, some of them in `parts`. Another pull has brought the others.
    ///
    /// # Errors
    /// The system's.
    pub fn begin(&mut self, missing: &[Layer], mut parts: BTreeMap<Digest, Parts>) -> Result<()> {
        let progress = Arc::new(Progress::new("pull"));
        let permits = Arc::new(Semaphore::new(AT_ONCE));
        let mut locked = std::mem::take(&mut self.by_digest);
        let mut expected = 0;
        for (digest, size) in missing.iter().filter_map(Layer::blob) {
            let Some(State::Locked(download)) = locked.remove(&digest) else { continue };
            let (give, take) = oneshot::channel();
            self.by_digest.insert(digest, State::Coming(take));
            let parts = parts.remove(&digest);
            expected += size - parts.as_ref().map_or(0, |parts| parts.plan().bytes_left_out);
            let (registry, progress, permits) = (self.registry.clone(), progress.clone(), permits.clone());
            self.runtime.spawn(async move {
                let _permit = permits.acquire().await;
                // No receiver: the pull has failed.
                let _ = give.send(arrive(&registry, (digest, size), download, parts, &progress).await);
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

    /// Waits for a layer. Asked again for a layer that came in parts, it fetches the whole one.
    ///
    /// # Errors
    /// Those of the download.
    pub fn wait(&mut self, layer: &Layer) -> Result<Source<impl Read + use<>>> {
        let gone = || Error::Said("a layer's download has ended".into());
        let (digest, size) = layer.blob().ok_or_else(gone)?;
        let state = self.by_digest.remove(&digest).ok_or_else(gone)?;
        let download = match state {
            State::Locked(download) | State::Here(download) => download,
            State::InParts(mut download, _) => {
                let progress = Progress::new("pull");
                progress.expect(size);
                let whole = fetch(&self.registry, (digest, size), &mut download, &progress);
                self.bytes_fetched += self.runtime.block_on(whole)?;
                download
            }
            State::Coming(coming) => {
                let Arrived { download, parts, moved } = coming.blocking_recv().map_err(|_| gone())??;
                self.layers_fetched += 1;
                self.bytes_fetched += moved;
                if let Some(parts) = parts {
                    let known = Known { files: parts.plan().contents, bytes: parts.plan().bytes_left_out };
                    self.by_digest.insert(digest, State::InParts(download, known));
                    return Ok(Source::Parts(parts));
                }
                download
            }
        };
        let reader = download.reader()?;
        self.by_digest.insert(digest, State::Here(download));
        Ok(Source::Packed(reader))
    }

    /// The layers that came in parts.
    pub fn in_parts(&self) -> impl Iterator<Item = Known> {
        self.by_digest.values().filter_map(|state| match state {
            State::InParts(_, known) => Some(*known),
            _ => None,
        })
    }

    /// Removes what has arrived.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(self) -> Result<()> {
        for state in self.by_digest.into_values() {
            if let State::Here(download) | State::InParts(download, _) = state {
                download.remove()?;
            }
        }
        Ok(())
    }
}

/// Brings a layer: its parts, or the whole one if the registry does not send these.
async fn arrive(
    registry: &Registry,
    blob: (Digest, u64),
    mut download: Download,
    parts: Option<Parts>,
    progress: &Progress,
) -> Result<Arrived> {
    let mut moved = 0;
    if let Some(parts) = parts {
        let (is_here, bytes) = parts::fetch(registry, blob.0, &parts, progress).await?;
        moved += bytes;
        if is_here {
            return Ok(Arrived { download, parts: Some(parts), moved });
        }
    }
    moved += fetch(registry, blob, &mut download, progress).await?;
    Ok(Arrived { download, parts: None, moved })
}
