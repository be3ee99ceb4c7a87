//! The JSON documents that lead from a name to layers and a run configuration.
//!
//! Only about forty fields are needed, so they are described here instead of by a crate for the whole specification.
//! Unknown fields are ignored, as the specification asks.

use super::platform::Platform;
use crate::digest::Digest;
use crate::error::{Result, input};
use crate::run_config::RunConfig;
use serde::Deserialize;
use std::collections::HashMap;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    pub(super) media_type: String,
    pub(super) digest: String,
    pub(super) size: u64,
    #[serde(default)]
    pub(super) annotations: HashMap<String, String>,
    pub(super) platform: Option<Platform>,
}

#[derive(Deserialize)]
pub(super) struct Index {
    #[serde(default)]
    pub(super) manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
pub(super) struct Manifest {
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
}

/// A manifest, or a list of manifests.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum ManifestOrIndex {
    Manifest(Manifest),
    Index(Index),
}

#[derive(Deserialize, Default)]
pub(super) struct Configuration {
    #[serde(default)]
    pub(super) config: Option<RunSection>,
    #[serde(default)]
    pub(super) rootfs: RootFs,
    os: Option<String>,
    architecture: Option<String>,
    variant: Option<String>,
}

impl Configuration {
    /// What the image's programs run on, if it says so.
    pub(super) fn platform(&self) -> Option<Platform> {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        Platform::of_parts(&part(&self.os), &part(&self.architecture), &part(&self.variant))
    }
}

#[derive(Deserialize, Default)]
pub(super) struct RootFs {
    #[serde(default)]
    pub(super) diff_ids: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
pub(super) struct RunSection {
    #[serde(default)]
    pub(super) env: Option<Vec<String>>,
    #[serde(default)]
    pub(super) entrypoint: Option<Vec<String>>,
    #[serde(default)]
    pub(super) cmd: Option<Vec<String>>,
    #[serde(default)]
    pub(super) working_dir: Option<String>,
    #[serde(default)]
    pub(super) user: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct DockerManifest {
    pub(super) config: String,
    #[serde(default)]
    pub(super) repo_tags: Option<Vec<String>>,
    pub(super) layers: Vec<String>,
}

/// How the image wants to be run.
pub(super) fn run_config(configuration: Configuration) -> RunConfig {
    let platform = configuration.platform().map(|platform| platform.to_string()).unwrap_or_default();
    let run = configuration.config.unwrap_or_default();
    RunConfig {
        env: run.env.unwrap_or_default(),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
        working_dir: run.working_dir.unwrap_or_default(),
        user: run.user.unwrap_or_default(),
        platform,
    }
}

/// The path of a digest's blob in a layout. Anything but a digest is refused, and with it every other path.
pub(super) fn blob_path(digest: &str) -> Result<(String, Digest)> {
    let parsed = Digest::parse(digest)?;
    if !digest.starts_with("sha256:") {
        return Err(input!("{digest:?} is not a sha256 digest"));
    }
    Ok((format!("{BLOBS}{}", parsed.hex()), parsed))
}

/// What the paths of blobs begin with in a layout.
pub(super) const BLOBS: &str = "blobs/sha256/";

/// The digests of the unpacked layers, if the configuration names them.
pub(super) fn diff_ids(configuration: &Configuration, layers: usize) -> Result<Vec<Digest>> {
    let ids = &configuration.rootfs.diff_ids;
    if !ids.is_empty() && ids.len() != layers {
        return Err(input!("the configuration names {} layers, the manifest {layers}", ids.len()));
    }
    ids.iter().map(|id| Digest::parse(id)).collect()
}

/// Parses any of the documents, for fuzzing.
///
/// # Errors
/// The bytes are none of them.
pub fn parse_document(bytes: &[u8]) -> Result<()> {
    let bad = |error: serde_json::Error| input!("JSON: {error}");
    let index = serde_json::from_slice::<Index>(bytes).map(|index| {
        index.manifests.iter().for_each(|descriptor| {
            let _ = blob_path(&descriptor.digest);
        });
    });
    let manifest = serde_json::from_slice::<Manifest>(bytes).map(|_| ());
    let configuration = serde_json::from_slice::<Configuration>(bytes).map(run_config).map(|_| ());
    let docker = serde_json::from_slice::<Vec<DockerManifest>>(bytes).map(|_| ());
    index.or(manifest).or(configuration).or(docker).map_err(bad)
}
