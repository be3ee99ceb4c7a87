//! An image whose documents come one by one, as a registry hands them out.

use super::choose::{Wanted, pick};
use super::documents::{Configuration, Index, Manifest, blob_path, run_config};
use super::image::{Layer, check_layers, check_platform, layers_of};
use super::platform::Platform;
use crate::config::Limits;
use crate::digest::Digest;
use crate::error::{Result, input};
use crate::run_config::RunConfig;

/// What a registry has under an image's reference, and what is to be fetched next.
#[derive(Debug)]
pub enum Next {
    /// An index: the manifest or index for the wanted platform, by digest and size.
    Manifest(Digest, u64),
    /// A manifest: the configuration, by digest and size.
    Configuration(Digest, u64),
}

impl Next {
    /// Reads an index or a manifest. `platform` is this machine's if none is named.
    ///
    /// # Errors
    /// Something else; an index without an image for the platform.
    pub fn parse(document: &[u8], platform: Option<&Platform>) -> Result<Next> {
        let bad = |error: serde_json::Error| input!("neither an image's manifest nor an index of images: {error}");
        let value: serde_json::Value = serde_json::from_slice(document).map_err(bad)?;
        if value.get("manifests").is_some() {
            let index: Index = serde_json::from_value(value).map_err(bad)?;
            let platform = Some(platform.cloned().unwrap_or_else(Platform::host));
            let (descriptor, _) = pick(&index, &Wanted { reference: None, platform }, "the registry's index")?;
            return Ok(Next::Manifest(blob_path(&descriptor.digest)?.1, descriptor.size));
        }
        let manifest: Manifest = serde_json::from_value(value).map_err(bad)?;
        Ok(Next::Configuration(blob_path(&manifest.config.digest)?.1, manifest.config.size))
    }
}

/// The documents of an image.
#[derive(Debug)]
pub struct Documents {
    /// The layers, lowest first.
    pub layers: Vec<Layer>,
    /// How the image wants to be run.
    pub config: RunConfig,
}

impl Documents {
    /// Reads an image's manifest and configuration, the digests of which the caller has checked. Returns its layers and how
    /// it wants to be run.
    ///
    /// # Errors
    /// Documents that break the format or the limits; an image for another platform than `platform`.
    pub fn parse(manifest: &[u8], configuration: &[u8], platform: Option<&Platform>, limits: Limits) -> Result<Self> {
        let manifest: Manifest = serde_json::from_slice(manifest).map_err(|error| input!("manifest: {error}"))?;
        check_layers(manifest.layers.len(), limits)?;
        let configuration: Configuration =
            serde_json::from_slice(configuration).map_err(|error| input!("configuration: {error}"))?;
        check_platform(&configuration, &Wanted { reference: None, platform: platform.cloned() })?;
        Ok(Self { layers: layers_of(&manifest, &configuration)?, config: run_config(configuration) })
    }
}
