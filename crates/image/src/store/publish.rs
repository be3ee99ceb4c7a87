//! The last steps of a build: an image's files are staged, the tree gets its name, and then the record.

use super::staging::Staging;
use super::trees::encode_objects;
use super::{ImageRecord, LayerTree, check_name};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::format::erofs;
use crate::run_config::RunConfig;
use crate::tree::{FileKind, Tree};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// A metadata image and its list of objects that are staged and have no names yet.
#[derive(Debug)]
struct StagedTree {
    digest: Digest,
    bytes: u64,
    image: PathBuf,
    list: PathBuf,
}

/// The tree of some layers, with its files if they are staged and have no names yet.
#[derive(Debug)]
pub(crate) struct StagedLayer {
    layer: LayerTree,
    staged: Option<StagedTree>,
}

impl StagedLayer {
    /// The tree of layers that the store has. The build must have claimed it.
    pub(crate) fn known(layer: LayerTree) -> Self {
        Self { layer, staged: None }
    }
}

/// An image that is staged and has no name yet.
pub(crate) struct Publication {
    record: ImageRecord,
    trees: Vec<StagedTree>,
    staged_record: PathBuf,
}

/// The record of image `name`, of which `staged` has the metadata image of `tree`. It has no layers yet.
fn record(
    name: &str,
    tree: &Tree,
    staged: &StagedTree,
    source: &str,
    config: RunConfig,
    notes: Vec<String>,
) -> ImageRecord {
    let objects = tree.objects();
    let (mut entries, mut bytes) = (0, 0);
    tree.walk(|_, _| entries += 1);
    let (reachable, _) = tree.reachable();
    let sizes = reachable.iter().filter_map(|&id| match &tree.inode(id).kind {
        FileKind::File(data) => Some(data.size()),
        _ => None,
    });
    let files = sizes.inspect(|size| bytes += size).count() as u64;
    ImageRecord {
        name: name.into(),
        digest: staged.digest,
        // The root has no name.
        entries: entries - 1,
        files,
        bytes,
        objects: objects.len() as u64,
        object_bytes: objects.iter().map(|object| object.1).sum(),
        metadata_bytes: staged.bytes,
        created_s: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        source: source.into(),
        config,
        notes,
        layers: Vec::new(),
    }
}

impl Staging<'_> {
    /// Writes `bytes` to a new file of the build.
    fn stage_bytes(&self, bytes: &[u8]) -> Result<PathBuf> {
        let (path, mut file) = self.scratch()?;
        file.write_all(bytes).at(&path)?;
        Ok(path)
    }

    /// Writes the files of a tree without giving them names.
    fn stage_tree(&self, tree: &Tree) -> Result<StagedTree> {
        let bytes = erofs::write(tree, erofs::Layout::Metadata)?.head;
        Ok(StagedTree {
            digest: Digest::of(&bytes),
            bytes: bytes.len() as u64,
            image: self.stage_bytes(&bytes)?,
            list: self.stage_bytes(&encode_objects(&tree.objects()))?,
        })
    }

    /// Writes the files of the tree that the layers with chain ID `chain` have made, without giving them names.
    pub(crate) fn stage_layer(&self, chain: Digest, tree: &Tree, notes: Vec<String>) -> Result<StagedLayer> {
        let staged = self.stage_tree(tree)?;
        Ok(StagedLayer { layer: LayerTree { chain, tree: staged.digest, notes }, staged: Some(staged) })
    }

    /// Writes the files of an image without giving them names.
    pub(crate) fn stage_image(
        &self,
        name: &str,
        tree: &Tree,
        source: &str,
        config: RunConfig,
        notes: Vec<String>,
        layers: Vec<StagedLayer>,
    ) -> Result<Publication> {
        check_name(name)?;
        let staged = self.stage_tree(tree)?;
        let mut record = record(name, tree, &staged, source, config, notes);
        let mut trees = vec![staged];
        for StagedLayer { layer, staged } in layers {
            record.layers.push(layer);
            trees.extend(staged);
        }
        let staged_record = self.stage_bytes(&serde_json::to_vec_pretty(&record).expect("plain data"))?;
        Ok(Publication { record, trees, staged_record })
    }

    /// Gives the metadata images and their lists of objects their names, after all that they refer to has its own. The disk
    /// may not have them yet: they carry checksums, and nothing refers to them before the record does. Returns true if link
    /// farms need a repair: an earlier build may have ended before its repair, or could not read this image then.
    pub(crate) fn name_trees(&self, publication: &Publication) -> Result<bool> {
        self.give_names(&publication.trees)?;
        Ok(self.store.is_repair_due())
    }

    /// Gives a tree its name before the store has its objects: the tree can be mounted while they come. It stays as long as
    /// this build lives, and longer if the build publishes it.
    pub(crate) fn name_early(&self, tree: &Tree) -> Result<Digest> {
        let staged = self.stage_tree(tree)?;
        let digest = staged.digest;
        self.give_names(&[staged])?;
        Ok(digest)
    }

    fn give_names(&self, trees: &[StagedTree]) -> Result<()> {
        let digests: Vec<Digest> = trees.iter().map(|tree| tree.digest).collect();
        // This build keeps the trees from here on; what takes long needs no lock.
        self.lease.claim(&digests, || ())?;
        for tree in trees {
            let (tree_path, list_path) =
                (self.store.tree_path(&tree.digest), self.store.objects_list_path(&tree.digest));
            // The collector knows of a mount that no table shows by the mount's hold on this very file: a whole one is
            // never replaced.
            if self.store.check_tree(&tree.digest).is_ok() {
                fs::remove_file(&tree.image).at(&tree.image)?;
            } else {
                fs::rename(&tree.image, &tree_path).at(&tree_path)?;
            }
            // The disk may not have the new list yet: it must not take the place of one that a record relies on.
            if fs::read(&list_path).ok() == fs::read(&tree.list).ok() {
                fs::remove_file(&tree.list).at(&tree.list)?;
            } else {
                fs::rename(&tree.list, &list_path).at(&list_path)?;
            }
        }
        Ok(())
    }

    /// Gives the record its name, which makes the image visible.
    pub(crate) fn name_record(&self, publication: Publication) -> Result<ImageRecord> {
        let record = publication.record;
        // Every name that the record relies on is durable before the record has its own; the record's content is already.
        self.sync(&self.store.objects_list_path(&record.digest))?;
        let images = self.store.path("images");
        let dir = File::open(&images).at(&images)?;
        self.lease.claim(&[], || {
            // The collector reads this log to learn of images published since it listed them.
            let log = self.store.path("published");
            let mut file = File::options().append(true).create(true).mode(0o600).open(&log).at(&log)?;
            let digests = [record.digest].into_iter().chain(record.layers.iter().map(|layer| layer.tree));
            file.write_all(&digests.flat_map(|digest| digest.0).collect::<Vec<u8>>()).at(&log)?;
            let path = self.store.image_path(&record.name);
            fs::rename(&publication.staged_record, &path).at(&path)
        })??;
        if self.store.sync {
            dir.sync_all().map_err(|error| {
                Error::Refused(format!(
                    "{}: stored, but the disk does not say that it will last: {error}; build it again",
                    record.name
                ))
            })?;
        }
        Ok(record)
    }
}
