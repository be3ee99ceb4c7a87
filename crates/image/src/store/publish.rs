//! The last steps of a build: an image's files are staged, the tree gets its name, and then the record.

use super::staging::Staging;
use super::trees::encode_objects;
use super::{ImageRecord, check_name};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::format::erofs;
use crate::run_config::RunConfig;
use crate::tree::{FileKind, Tree};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// An image that is staged and has no name yet.
pub(crate) struct Publication {
    record: ImageRecord,
    /// The bytes of the metadata image.
    image: Vec<u8>,
    staged_tree: PathBuf,
    staged_list: PathBuf,
    staged_record: PathBuf,
}

/// The record of image `name` with the metadata image `image` of `tree`.
fn record(name: &str, tree: &Tree, image: &[u8], source: &str, config: RunConfig, notes: Vec<String>) -> ImageRecord {
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
        digest: Digest::of(image),
        // The root has no name.
        entries: entries - 1,
        files,
        bytes,
        objects: objects.len() as u64,
        object_bytes: objects.iter().map(|object| object.1).sum(),
        metadata_bytes: image.len() as u64,
        created_s: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        source: source.into(),
        config,
        notes,
    }
}

impl Staging<'_> {
    /// Writes the files of an image without giving them names.
    pub(crate) fn stage_image(
        &self,
        name: &str,
        tree: &Tree,
        source: &str,
        config: RunConfig,
        notes: Vec<String>,
    ) -> Result<Publication> {
        check_name(name)?;
        let image = erofs::write(tree, erofs::Layout::Metadata)?.head;
        let record = record(name, tree, &image, source, config, notes);
        let stage = |bytes: &[u8]| -> Result<PathBuf> {
            let (path, mut file) = self.scratch()?;
            file.write_all(bytes).at(&path)?;
            Ok(path)
        };
        Ok(Publication {
            staged_tree: stage(&image)?,
            staged_list: stage(&encode_objects(&tree.objects()))?,
            staged_record: stage(&serde_json::to_vec_pretty(&record).expect("plain data"))?,
            record,
            image,
        })
    }

    /// Gives the metadata image and its list of objects their names, after all that it refers to has its own. Returns true if
    /// link farms need a repair: an earlier build may have ended before its repair, or could not read this image then.
    pub(crate) fn name_tree(&self, publication: &Publication) -> Result<bool> {
        let digest = publication.record.digest;
        // This build keeps the tree from here on; what takes long needs no lock.
        self.lease.claim(&[digest], || ())?;
        let (tree_path, list_path) = (self.store.tree_path(&digest), self.store.objects_list_path(&digest));
        // The collector knows of a mount that no table shows by the mount's hold on this very file: a whole one is never
        // replaced.
        if same_content(&tree_path, &publication.image) {
            fs::remove_file(&publication.staged_tree).at(&publication.staged_tree)?;
        } else {
            fs::rename(&publication.staged_tree, &tree_path).at(&tree_path)?;
        }
        fs::rename(&publication.staged_list, &list_path).at(&list_path)?;
        Ok(self.store.is_repair_due())
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
            file.write_all(&record.digest.0).at(&log)?;
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

/// Returns true if the file at `path` holds exactly `bytes`.
fn same_content(path: &Path, bytes: &[u8]) -> bool {
    let Ok(mut file) = File::open(path) else { return false };
    let (mut piece, mut at) = (vec![0; 1 << 16], 0);
    loop {
        match file.read(&mut piece) {
            Ok(0) => return at == bytes.len(),
            Ok(count) if bytes.get(at..at + count) == Some(&piece[..count]) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}
