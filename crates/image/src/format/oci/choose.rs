//! The manifest that a tag, a digest or this machine asks for, among several.

use super::blobs::Blobs;
use super::documents::{Descriptor, Index, Manifest, blob_path};
use super::platform::Platform;
use crate::config::Limits;
use crate::digest::Digest;
use crate::error::{Result, input};
use std::collections::HashSet;

/// Which image is taken where there are several.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// A tag or a digest.
    pub reference: Option<String>,
    /// What its programs run on; this machine, where there is a choice, if none is named.
    pub platform: Option<Platform>,
}

/// Most tags and digests in a message.
const SHOWN: usize = 20;

/// The names to choose from, for a message.
pub(super) fn list<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    shown.join(", ") + if names.len() > SHOWN { ", …" } else { "" }
}

/// How well a tag matches a wanted one: 2 in full, 1 without the registry or path before it (`redis:7` for
/// `docker.io/library/redis:7`), else 0.
pub(super) fn fit(tag: &str, wanted: &str) -> u8 {
    match tag.strip_suffix(wanted) {
        Some("") => 2,
        Some(rest) if rest.ends_with('/') => 1,
        _ => 0,
    }
}

/// The items of `all` that fit best by the score `how`; none if all scores are 0.
pub(super) fn best<T>(all: Vec<T>, how: impl Fn(&T) -> u8) -> Vec<T> {
    let most = all.iter().map(&how).max().unwrap_or(0);
    all.into_iter().filter(|one| most > 0 && how(one) == most).collect()
}

impl Descriptor {
    /// The manifest's names: docker (from 25) writes the tag alone to the first annotation, the whole name to the second.
    fn names(&self) -> impl Iterator<Item = &str> {
        let keys = ["org.opencontainers.image.ref.name", "io.containerd.image.name"];
        keys.into_iter().filter_map(|key| self.annotations.get(key)).map(String::as_str)
    }

    fn is_index(&self) -> bool {
        self.media_type.contains("index") || self.media_type.contains("manifest.list")
    }

    fn show(&self) -> String {
        let platform = self.platform.as_ref().map(|platform| format!(" for {platform}"));
        let (name, platform) = (self.names().last().unwrap_or_default(), platform.unwrap_or_default());
        if name.is_empty() {
            format!("{}{platform}", self.digest)
        } else {
            format!("{name} = {}{platform}", self.digest)
        }
    }
}

/// Most indexes that lead to each other.
const DEPTH_MAX: usize = 5;

/// Finds the manifest that is `wanted`.
pub(super) fn choose(blobs: &Blobs, mut index: Index, wanted: &Wanted, limits: Limits) -> Result<Manifest> {
    let mut wanted = wanted.clone();
    for _ in 0..DEPTH_MAX {
        let (descriptor, below) = pick(&index, &wanted, "index.json")?;
        let (path, digest) = blob_path(&descriptor.digest)?;
        let expect = Some((digest, descriptor.size));
        if !descriptor.is_index() {
            return blobs.json(&path, expect, limits);
        }
        (index, wanted) = (blobs.json(&path, expect, limits)?, below);
    }
    Err(input!("index.json: indexes in indexes, deeper than {}", DEPTH_MAX - 1))
}

/// Picks the manifest or index that is `wanted` from the index `what`. Returns also what is wanted of a picked index.
pub(super) fn pick<'a>(index: &'a Index, wanted: &Wanted, what: &str) -> Result<(&'a Descriptor, Wanted)> {
    let all: Vec<String> = index.manifests.iter().map(Descriptor::show).collect();
    let mut fits: Vec<&Descriptor> = index.manifests.iter().collect();
    let mut below = Wanted { reference: None, platform: wanted.platform.clone() };
    let reference = wanted.reference.as_deref();
    if let Some(wanted) = reference {
        let how = |one: &&Descriptor| {
            let by_digest = if one.digest == wanted { 2 } else { 0 };
            one.names().map(|name| fit(name, wanted)).chain([by_digest]).max().unwrap_or(0)
        };
        let found = best(fits.clone(), how);
        if found.is_empty() && Digest::parse(wanted).is_ok() {
            // The manifest may be listed by a nested index.
            fits.retain(|one| one.is_index());
            below.reference = reference.map(str::to_owned);
        } else {
            fits = found;
        }
    }
    // One image may have several tags.
    let mut seen = HashSet::new();
    fits.retain(|one| seen.insert(&one.digest));
    let by_digest = fits.len() == 1 && reference.is_some_and(|wanted| fits[0].digest == wanted);
    if fits.len() > 1 || wanted.platform.is_some() && !by_digest {
        let platform = wanted.platform.clone().unwrap_or_else(Platform::host);
        let is_for = |one: &&Descriptor| one.platform.as_ref().is_none_or(|have| have.fits(&platform));
        if !fits.iter().any(is_for) {
            return Err(input!(
                "{what}: no image for {platform}; --platform names another (there are: {})",
                list(&all)
            ));
        }
        fits.retain(is_for);
        // Several variants of one architecture: the one that is meant where none is named.
        let is_usual = |one: &&Descriptor| one.platform.as_ref().is_none_or(Platform::is_usual);
        if fits.len() > 1 && fits.iter().any(is_usual) {
            fits.retain(is_usual);
        }
    }
    let [descriptor] = fits[..] else {
        return Err(input!(
            "{what}: {} images fit{}; choose one with --ref, by tag or digest, or with --platform (there are: {})",
            fits.len(),
            reference.map(|wanted| format!(" {wanted:?}")).unwrap_or_default(),
            list(&all)
        ));
    };
    Ok((descriptor, below))
}
