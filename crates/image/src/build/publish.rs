//! A build in progress: files go into the store, link farms are repaired where objects were replaced, and the image is
//! published last.

use crate::digest::Digest;
use crate::error::{At, Result};
use crate::link_farm;
use crate::run_config::RunConfig;
use crate::store::{Batch, BuildStats, ImageRecord, LayerTree, StagedLayer, Staging, Store};
use crate::tree::{Data, Tree};
use rustix::fs::Stat;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A build in progress; dropping it undoes what it has not published.
pub struct Build<'a> {
    staging: Staging<'a>,
    /// The trees of layers that belong to the image to be published, lowest first.
    layers: Mutex<Vec<StagedLayer>>,
}

impl Store {
    /// Starts a build: takes a lease and makes a place to stage in. Remains of dead builds are removed.
    ///
    /// # Errors
    /// The system's.
    pub fn build(&self) -> Result<Build<'_>> {
        Ok(Build { staging: Staging::new(self)?, layers: Mutex::default() })
    }
}

impl<'a> Build<'a> {
    /// The store that the build writes to.
    pub fn store(&self) -> &'a Store {
        self.staging.store()
    }

    /// What was done so far.
    pub fn stats(&self) -> &BuildStats {
        &self.staging.stats
    }

    pub(crate) fn staging(&self) -> &Staging<'a> {
        &self.staging
    }

    /// Returns true if the store has object `digest`; if it has, the object stays until this build ends.
    ///
    /// # Errors
    /// The system's.
    pub fn has(&self, digest: &Digest, size: u64) -> Result<bool> {
        self.staging.has(digest, size)
    }

    /// [`Build::has`] for many objects, in steps that keep the collector waiting for a short time each.
    ///
    /// # Errors
    /// The system's.
    pub fn has_all(&self, wanted: &[(Digest, u64)]) -> Result<Vec<bool>> {
        self.staging.has_all(wanted)
    }

    /// A new path in the build's own directory, which goes with the build.
    pub fn scratch_path(&self) -> PathBuf {
        self.staging.scratch_path()
    }

    /// Notes that the layers with chain ID `chain` have made `tree`, for the record of the image.
    pub(crate) fn add_layer(&self, chain: Digest, tree: &Tree, notes: Vec<String>) -> Result<()> {
        let layer = self.staging.stage_layer(chain, tree, notes)?;
        self.layers().push(layer);
        Ok(())
    }

    /// The tree of the topmost of `layers`, which the store has. It stays until this build ends. `None` if something of the
    /// tree is missing or damaged.
    pub(crate) fn reuse_layers(&self, layers: &[LayerTree]) -> Result<Option<Tree>> {
        let Some(top) = layers.last().filter(|top| matches!(self.staging.claim_tree(&top.tree), Ok(true))) else {
            return Ok(None);
        };
        let Ok(tree) = self.store().tree(&top.tree) else { return Ok(None) };
        let objects: Vec<(Digest, u64)> = tree.objects().into_iter().map(|(digest, size, _)| (digest, size)).collect();
        if self.has_all(&objects)?.contains(&false) {
            return Ok(None);
        }
        for layer in layers {
            // If a lower one is gone, later imports do not find it.
            self.staging.claim_tree(&layer.tree)?;
        }
        Ok(Some(tree))
    }

    /// Notes layers that [`Build::reuse_layers`] has found, for the record of the image.
    pub(crate) fn add_known_layers(&self, layers: Vec<LayerTree>) {
        self.layers().extend(layers.into_iter().map(StagedLayer::known));
    }

    fn layers(&self) -> std::sync::MutexGuard<'_, Vec<StagedLayer>> {
        self.layers.lock().expect("no panic while held")
    }

    /// A file without a name, for input that must be read twice; gone when closed.
    pub(crate) fn spool(&self) -> Result<File> {
        self.staging.spool()
    }

    /// Stores a file's bytes.
    ///
    /// # Errors
    /// The system's; [`Error::Full`](crate::Error::Full).
    pub fn put_bytes(&self, bytes: &[u8]) -> Result<Data> {
        let data = self.staging.put_bytes(bytes)?;
        self.flush_if_full()?;
        Ok(data)
    }

    /// Stores everything that `reader` gives, without holding it in memory. Calls `tick` with the size of each piece.
    ///
    /// # Errors
    /// The reader's, the system's; [`Error::Full`](crate::Error::Full).
    pub fn put_reader(&self, reader: &mut impl Read, what: &Path, tick: impl FnMut(u64)) -> Result<Data> {
        let data = self.staging.put_reader(reader, what, tick)?;
        self.flush_if_full()?;
        Ok(data)
    }

    /// Stores the bytes of an open file; its state was `stat`. With `may_link` the file becomes the object itself, by a
    /// hard link, unless another process has it open or its owner may not read it.
    pub(crate) fn take(&self, file: &mut File, what: &Path, stat: &Stat, may_link: bool) -> Result<Data> {
        let linked = if may_link { self.staging.link_file(file, what, stat)? } else { None };
        let data = match linked {
            Some(data) => data,
            None => {
                file.rewind().at(what)?;
                self.staging.put_reader(file, what, |_| ())?
            }
        };
        self.flush_if_full()?;
        Ok(data)
    }

    /// Makes the bytes durable of all files that [`Build::take`] links, while another thread hashes them. The caller has
    /// looked at each of them before, and links none that has changed since.
    pub(crate) fn sync_before_links(&self) -> Result<()> {
        self.staging.sync_before_links()
    }

    /// Opens an object that this build has put or found.
    ///
    /// # Errors
    /// The system's.
    pub fn open_object(&self, digest: &Digest) -> Result<File> {
        self.staging.open_object(digest)
    }

    /// Gives a tree its name before the store has its objects, so that [`mount`](crate::mount::mount()) can show it while
    /// they come. Returns the digest, which stands for an image when [`Build::publish`] has published the tree.
    ///
    /// # Errors
    /// The system's; [`Error::Full`](crate::Error::Full).
    pub fn name_early(&self, tree: &Tree) -> Result<Digest> {
        self.staging.name_early(tree)
    }

    /// Gives the objects so far their names: they stay if the build fails, until the next collection.
    ///
    /// # Errors
    /// The system's; [`Error::Full`](crate::Error::Full).
    pub fn keep(&self) -> Result<()> {
        self.flush(&mut self.staging.batch())
    }

    fn flush_if_full(&self) -> Result<()> {
        let mut batch = self.staging.batch();
        if batch.is_full() { self.flush(&mut batch) } else { Ok(()) }
    }

    fn flush(&self, batch: &mut Batch) -> Result<()> {
        if self.staging.flush(batch)? {
            link_farm::repair(self.store())?;
        }
        Ok(())
    }

    /// Publishes `tree` under `name`.
    ///
    /// # Errors
    /// The system's; [`Error::Full`](crate::Error::Full). The name then still stands for what it stood for before, unless
    /// the error says that the image is stored.
    pub fn publish(
        &self,
        name: &str,
        tree: &Tree,
        source: &str,
        config: RunConfig,
        notes: Vec<String>,
    ) -> Result<ImageRecord> {
        let layers = std::mem::take(&mut *self.layers());
        let publication = self.staging.stage_image(name, tree, source, config, notes, layers)?;
        self.keep()?;
        if self.staging.name_trees(&publication)? {
            link_farm::repair(self.store())?;
        }
        self.staging.name_record(publication)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ON_SYNC;
    use crate::tree::{FileKind, Inode, Meta};
    use std::cell::Cell;

    #[test]
    fn a_build_that_waits_for_the_disk_holds_no_domain_lock() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap();
        let build = store.build().unwrap();
        let mut tree = Tree::default();
        let data = build.put_bytes(&[1; 5000]).unwrap();
        tree.put(b"file", Inode { meta: Meta::default(), kind: FileKind::File(data) }).unwrap();
        let (lock, looks) = (store.path("lock"), std::rc::Rc::new(Cell::new(0)));
        let count = looks.clone();
        ON_SYNC.set(Some(Box::new(move || {
            let file = File::open(&lock).unwrap();
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
            count.set(count.get() + 1);
        })));
        build.publish("x", &tree, "t", RunConfig::default(), vec![]).unwrap();
        ON_SYNC.set(None);
        assert_eq!(looks.get(), 2, "objects, and the names that the record relies on");
    }
}
