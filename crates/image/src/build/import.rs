//! OCI images into trees: the layers in their order, each checked against its digests.

use super::Build;
use super::apply_layer;
use super::omissions::Omissions;
use crate::config::{Limits, Used};
use crate::digest::Hashing;
use crate::error::{Error, Result, input};
use crate::format::decompress::unpack;
use crate::format::oci::{Image, Layer, Wanted};
use crate::progress::Progress;
use crate::run_config::RunConfig;
use crate::tree::Tree;
use std::io::Read;
use std::path::Path;

/// Reads the image in `path` that is `wanted` into a tree.
///
/// # Errors
/// Anything that does not have the digest that names it; layers that break the format or the limits.
pub fn import(
    build: &Build,
    path: &Path,
    wanted: &Wanted,
    limits: Limits,
    omissions: &mut Omissions,
    progress: &Progress,
) -> Result<(Tree, RunConfig)> {
    let image = Image::open(path, wanted, limits, || build.spool())?;
    progress.expect(image.packed_bytes);
    let (mut tree, mut left) = (Tree::default(), limits);
    for layer in &image.layers {
        let reader = image.open_layer(layer)?;
        // Counted packed, as the manifest counts: how much a layer unpacks to is not known before.
        let mut packed = Hashing::new(progress.watch(reader));
        let applied = apply_layer(build, &mut tree, &mut packed, layer, limits, left, omissions);
        // A layer with the wrong digest explains every other complaint about it.
        if let Some((digest, _)) = layer.expect {
            packed.finish(&layer.what, digest)?;
        }
        let used = applied.map_err(|error| match error {
            Error::Input(text) | Error::Foreign(text) => input!("{}: {text}", layer.what),
            other => other,
        })?;
        left = left.without(used);
    }
    Ok((tree, image.config))
}

/// Unpacks and applies a layer within `left`, what the lower layers have left of the limits. Returns what it used.
fn apply_layer(
    build: &Build,
    tree: &mut Tree,
    packed: impl Read,
    layer: &Layer,
    limits: Limits,
    left: Limits,
    omissions: &mut Omissions,
) -> Result<Used> {
    let mut plain = Hashing::new(unpack(packed, limits)?);
    let used = apply_layer::apply_layer(build, tree, &mut plain, left, omissions, &Progress::silent())?;
    if let Some(diff_id) = layer.diff_id {
        plain.finish(&layer.what, diff_id)?;
    }
    Ok(used)
}
