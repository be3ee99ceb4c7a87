//! OCI images into trees: the layers in their order, each checked against its digests.
//!
//! The store remembers what layers add up to: an import begins above the layers that an image of the store has too.

use super::Build;
use super::apply_layer;
use super::omissions::Omissions;
use super::parts::Parts;
use crate::config::{Limits, Used};
use crate::digest::{Digest, Hashing};
use crate::error::{Error, Result, input};
use crate::format::decompress::unpack;
use crate::format::oci::{Image, Layer, Wanted};
use crate::progress::{Progress, note};
use crate::run_config::RunConfig;
use crate::store::LayerTree;
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
    let layers = LayerImport::new(build, &image.layers)?;
    let tree = layers.run(|layer| image.open_layer(layer).map(Source::Packed), limits, omissions, progress)?;
    Ok((tree, image.config))
}

/// What a layer is read from.
pub enum Source<R> {
    /// The whole packed layer.
    Packed(R),
    /// Parts of it, and contents that the store has.
    Parts(Parts),
}

/// Layers on their way into a tree.
pub struct LayerImport<'a, 'b> {
    build: &'a Build<'b>,
    layers: &'a [Layer],
    /// The chain ID of each layer; none if a layer has no digest of its unpacked form.
    chains: Vec<Digest>,
    /// The lowest layers, as far as the store knows them.
    known: Vec<LayerTree>,
    /// What these add up to.
    tree: Tree,
}

impl<'a, 'b> LayerImport<'a, 'b> {
    /// Begins above the lowest of `layers` that an image of the store has too. Their objects stay until the build ends.
    ///
    /// # Errors
    /// The system's.
    pub fn new(build: &'a Build<'b>, layers: &'a [Layer]) -> Result<Self> {
        let chains = chain_ids(layers);
        let mut import = Self { build, layers, chains, known: Vec::new(), tree: Tree::default() };
        let mut candidates: Vec<Vec<LayerTree>> = Vec::new();
        for mut image in build.store().records()?.images.into_iter().filter(|image| !image.layers.is_empty()) {
            let equal = import.chains.iter().zip(&image.layers).take_while(|(chain, layer)| **chain == layer.chain);
            image.layers.truncate(equal.count());
            candidates.push(image.layers);
        }
        // From the most layers down: a tree of which something is damaged is not used.
        candidates.sort_by_key(Vec::len);
        while let Some(mut layers) = candidates.pop().filter(|layers| !layers.is_empty()) {
            if let Some(tree) = build.reuse_layers(&layers)? {
                (import.known, import.tree) = (layers, tree);
                break;
            }
            layers.pop();
            let place = candidates.partition_point(|other| other.len() <= layers.len());
            candidates.insert(place, layers);
        }
        Ok(import)
    }

    /// The layers that the store does not know, lowest first.
    pub fn missing(&self) -> &'a [Layer] {
        &self.layers[self.known.len()..]
    }

    /// Reads the missing layers into a tree, lowest first. Calls `open` for each one, and again for a layer with parts that
    /// are not the layer: it must then return the whole one.
    ///
    /// # Errors
    /// Those of `open`; a layer that does not have its digest, or breaks the format or the limits.
    pub fn run<R: Read>(
        self,
        mut open: impl FnMut(&Layer) -> Result<Source<R>>,
        limits: Limits,
        omissions: &mut Omissions,
        progress: &Progress,
    ) -> Result<Tree> {
        let Self { build, layers, chains, known, mut tree } = self;
        let (mut left, missing) = (limits, known.len()..layers.len());
        if let Some(top) = known.last() {
            omissions.of_known(top.notes.clone());
        }
        build.add_known_layers(known);
        for (index, layer) in missing.map(|index| (index, &layers[index])) {
            let apply = |packed: R, tree: &mut Tree, omissions: &mut Omissions| {
                // Counted packed, as the manifest counts: how much a layer unpacks to is not known before.
                apply_packed(build, tree, progress.watch(packed), layer, limits, left, omissions)
            };
            let used = match open(layer)? {
                Source::Packed(packed) => apply(packed, &mut tree, omissions)?,
                Source::Parts(parts) => match apply_parts(build, &mut tree, &parts, layer, limits, left, omissions)? {
                    Some(used) => used,
                    None => match open(layer)? {
                        Source::Packed(packed) => apply(packed, &mut tree, omissions)?,
                        Source::Parts(_) => return Err(input!("{}: it is not what its parts are", layer.what)),
                    },
                },
            };
            left = left.without(used);
            if let Some(chain) = chains.get(index) {
                build.add_layer(*chain, &tree, omissions.lines())?;
            }
        }
        Ok(tree)
    }
}

/// What some layers add up to, by an image of the store.
pub struct KnownChain {
    /// Their tree. Its objects stay until the build ends.
    pub tree: Tree,
    /// The chain ID of the layers without the topmost one; `None` if there is only one.
    pub below: Option<Digest>,
    /// What could not be stored of them, one line each.
    pub notes: Vec<String>,
}

impl Build<'_> {
    /// What the layers with chain ID `chain` add up to, if an image of the store has them.
    ///
    /// # Errors
    /// The system's.
    pub fn known_chain(&self, chain: &Digest) -> Result<Option<KnownChain>> {
        for mut image in self.store().records()?.images {
            let Some(top) = image.layers.iter().position(|layer| layer.chain == *chain) else { continue };
            image.layers.truncate(top + 1);
            if let Some(tree) = self.reuse_layers(&image.layers)? {
                let below = top.checked_sub(1).map(|below| image.layers[below].chain);
                return Ok(Some(KnownChain { tree, below, notes: image.layers.swap_remove(top).notes }));
            }
        }
        Ok(None)
    }
}

/// The chain IDs of `layers`: of the lowest its own digest, of each other one that of `CHAIN DIGEST`, chain and digest as
/// text. None if a layer has no digest.
fn chain_ids(layers: &[Layer]) -> Vec<Digest> {
    let mut chains: Vec<Digest> = Vec::with_capacity(layers.len());
    for layer in layers {
        let Some(diff_id) = layer.diff_id else { return Vec::new() };
        let below = chains.last();
        chains.push(below.map_or(diff_id, |below| Digest::of(format!("{below} {diff_id}").as_bytes())));
    }
    chains
}

/// Unpacks and applies a layer within `left`, what the lower layers have left of the limits. Returns what it used.
fn apply_packed(
    build: &Build,
    tree: &mut Tree,
    packed: impl Read,
    layer: &Layer,
    limits: Limits,
    left: Limits,
    omissions: &mut Omissions,
) -> Result<Used> {
    let mut packed = Hashing::new(packed);
    let unpacked = unpack(&mut packed, limits);
    let applied = unpacked.and_then(|plain| apply_plain(build, tree, plain, layer, left, omissions));
    // A layer with the wrong digest explains every other complaint about it.
    if let Some((digest, _)) = layer.expect {
        packed.finish(&layer.what, digest)?;
    }
    applied.map_err(|error| match error {
        Error::Input(text) | Error::Foreign(text) => input!("{}: {text}", layer.what),
        other => other,
    })
}

/// Applies a layer that is put together from parts. Returns what it used of the limits.
///
/// Returns `None` if the parts are not the layer. Only the layer's digest proves that they are, and it comes last. Then
/// `tree` and `omissions` are as they were.
fn apply_parts(
    build: &Build,
    tree: &mut Tree,
    parts: &Parts,
    layer: &Layer,
    limits: Limits,
    left: Limits,
    omissions: &mut Omissions,
) -> Result<Option<Used>> {
    let (tree_before, omissions_before) = (tree.clone(), omissions.clone());
    match apply_plain(build, tree, parts.reader(build, limits), layer, left, omissions) {
        Ok(used) => Ok(Some(used)),
        Err(error @ (Error::Input(_) | Error::Foreign(_) | Error::Digest { .. })) => {
            (*tree, *omissions) = (tree_before, omissions_before);
            note(&format!("{}: put together by its table of contents: {error}; it is read as a whole", layer.what));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Applies the unpacked layer, and checks its digest.
fn apply_plain(
    build: &Build,
    tree: &mut Tree,
    plain: impl Read,
    layer: &Layer,
    left: Limits,
    omissions: &mut Omissions,
) -> Result<Used> {
    let mut plain = Hashing::new(plain);
    let used = apply_layer::apply_layer(build, tree, &mut plain, left, omissions, &Progress::silent())?;
    if let Some(diff_id) = layer.diff_id {
        plain.finish(&layer.what, diff_id)?;
    }
    Ok(used)
}
