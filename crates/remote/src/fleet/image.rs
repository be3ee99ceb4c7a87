//! An image as its manifest shows it: read, and checked before anything is done for it.

use super::bucket::{Access, Bucket};
use super::objects::Object;
use super::pieces::unpack;
use super::push::MANIFEST_MAX;
use crate::address::Address;
use crate::common::Server;
use crate::error::{Error, Result};
use crate::pull::Wanted;
use pagefold_image::digest::Digest;
use pagefold_image::erofs;
use pagefold_image::fleet::{Manifest, decode_manifest, piece_count};
use pagefold_image::tree::{Data, FileKind, INLINE_MAX, Tree, drop_overlay_xattrs};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// An image of a fleet's store.
pub struct Image {
    pub bucket: Arc<Bucket>,
    pub manifest: Manifest,
    /// Bytes of the manifest.
    pub manifest_bytes: u64,
    pub tree: Tree,
    /// The tree's objects, as the manifest has them.
    pub objects: Vec<Object>,
}

impl Image {
    /// Reads the manifest at `address`.
    ///
    /// # Errors
    /// No such image; a store that fails; limits.
    pub fn open(runtime: &Runtime, server: &Server, address: &Address, wanted: &Wanted) -> Result<Self> {
        if wanted.platform.is_some() {
            return Err(Error::Said("--platform: in a fleet's store a name stands for one image".into()));
        }
        let bucket = Arc::new(Bucket::open(&address.store_address, Access::Read, server.plain_http, server.timeout)?);
        let found = runtime.block_on(bucket.get(&address.manifest(), MANIFEST_MAX))?;
        let whole = address.whole();
        let (bytes, _) = found.ok_or_else(|| Error::Said(format!("{whole}: no such image")))?;
        let in_manifest = |error: &dyn std::fmt::Display| Error::Said(format!("{whole}: manifest: {error}"));
        let manifest = decode_manifest(&bytes).map_err(|error| in_manifest(&error))?;
        let tree = read_tree(&manifest, wanted).map_err(|error| in_manifest(&error))?;
        let objects: Vec<Object> = tree.objects().into_iter().map(|(digest, size, _)| (digest, size)).collect();
        check(&manifest, &objects, wanted).map_err(|error| in_manifest(&error))?;
        Ok(Self { bucket, manifest, manifest_bytes: bytes.len() as u64, tree, objects })
    }
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
    if sum(piece_count) != manifest.locations.len() as u64 {
        return Err(Error::Said("damaged".into()));
    }
    let most = wanted.max_bytes.unwrap_or(pagefold_image::config::Limits::default().bytes);
    let bytes = sum(|size| size);
    if bytes > most {
        return Err(Error::Said(format!("{bytes} bytes of content; {most} are allowed (--max-bytes)")));
    }
    Ok(())
}
