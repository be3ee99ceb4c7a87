//! An image in any of the forms: whether there is one, and its layers.

use super::blobs::{Blobs, Member, Range, each_member, index_archive};
use super::choose::{Wanted, best, choose, fit, list};
use super::documents::{Configuration, DockerManifest, Manifest, ManifestOrIndex, blob_path, diff_ids, run_config};
use crate::config::Limits;
use crate::digest::Digest;
use crate::error::{At, Error, Result, input};
use crate::format::chunked::TableLocation;
use crate::format::decompress::{is_packed, unpack};
use crate::proc_fd::open_path;
use crate::run_config::RunConfig;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// What the file `version` of a plain directory of blobs begins with.
const PLAIN: &[u8] = b"Directory Transport Version: ";

/// Returns true if a directory's `version` file says that the directory holds the blobs of one image.
fn is_plain(dir: &Path) -> bool {
    let (path, mut version) = (dir.join("version"), Vec::new());
    // Opening a pipe would wait for its writer.
    let file = if path.is_file() { File::open(path).ok() } else { None };
    let read = file.is_some_and(|file| file.take(PLAIN.len() as u64).read_to_end(&mut version).is_ok());
    read && version == PLAIN && !dir.join("oci-layout").exists()
}

/// Most members of an archive that are looked at to recognize an image: an image has a few for each layer, a tree may have
/// millions.
const MEMBERS_MAX: u32 = 1 << 16;

/// Returns true if `path` holds an image, and not a tree to be taken as it is: an `oci-layout` beside an `index.json`, a
/// `manifest.json` of docker's form, or one beside skopeo's `version`.
///
/// # Errors
/// The system's.
pub fn is_image(path: &Path) -> Result<bool> {
    let meta = fs::metadata(path).at(path)?;
    if meta.is_dir() {
        let there = |name: &str| path.join(name).is_file();
        return Ok(there("oci-layout") && there("index.json") || there("manifest.json") && is_plain(path));
    }
    // A pipe can be read only once.
    if !meta.is_file() {
        return Ok(false);
    }
    let file = File::open(path).at(path)?;
    let limits = Limits::default();
    let (mut layout, mut index, mut manifest, mut members) = (false, false, None, 0);
    let looked = each_member(&file, limits, |path, member| {
        match (&path[..], member) {
            (b"oci-layout", _) => layout = true,
            (b"index.json", _) => index = true,
            (b"manifest.json", Member::File { offset, size }) => manifest = Some((offset, size)),
            _ => {}
        }
        members += 1;
        Ok(!(layout && index) && members < MEMBERS_MAX)
    });
    match looked {
        // Not a readable archive: the build of a tree reports what is wrong with it.
        Err(Error::Input(_) | Error::Foreign(_)) => return Ok(false),
        other => other?,
    }
    let Some((offset, size)) = manifest.filter(|(_, size)| !(layout && index) && *size <= limits.json_bytes) else {
        return Ok(layout && index);
    };
    let mut bytes = Vec::new();
    Range { file: &file, at: offset, left: size }.read_to_end(&mut bytes).at(path)?;
    Ok(serde_json::from_slice::<Vec<DockerManifest>>(&bytes).is_ok_and(|images| !images.is_empty()))
}

/// A layer of an image.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its number and digest or path, for messages.
    pub(crate) what: String,
    path: String,
    /// The digest and size of the blob, where the manifest has them.
    pub(crate) expect: Option<(Digest, u64)>,
    /// The digest of the unpacked layer, where the configuration has it.
    pub(crate) diff_id: Option<Digest>,
    /// The table of contents, where the manifest names one.
    table: Option<TableLocation>,
}

impl Layer {
    /// Its number and digest, for messages.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The table of contents by which the layer can be fetched in parts. `None` without a digest of the unpacked layer:
    /// nothing else proves that the parts are the layer.
    pub fn table(&self) -> Option<&TableLocation> {
        self.table.as_ref().filter(|_| self.diff_id.is_some())
    }

    /// The digest and size of the packed layer, where a manifest has them.
    pub fn blob(&self) -> Option<(Digest, u64)> {
        self.expect
    }
}

/// An image with its layers, of which nothing is unpacked yet.
pub(crate) struct Image {
    blobs: Blobs,
    /// The layers, lowest first.
    pub(crate) layers: Vec<Layer>,
    /// Bytes of all layers as they are packed.
    pub(crate) packed_bytes: u64,
    /// How the image wants to be run.
    pub(crate) config: RunConfig,
}

impl Image {
    /// Opens the image in `path` that is `wanted`. Layers are read out of order, so a
    /// packed archive or a pipe is first copied to the file that `spool` makes.
    ///
    /// # Errors
    /// Not an image, none or several that fit; documents that break the format or the limits.
    pub(crate) fn open(
        path: &Path,
        wanted: &Wanted,
        limits: Limits,
        spool: impl FnOnce() -> Result<File>,
    ) -> Result<Self> {
        let blobs = if path.is_dir() {
            Blobs::Directory { dir: open_path(path).at(path)?, layout: !is_plain(path) }
        } else {
            let file = seekable(path, limits, spool)?;
            let members = index_archive(&file, limits)?;
            Blobs::Archive { file, members }
        };
        let is_docker =
            blobs.has_member("manifest.json") && !(blobs.has_member("oci-layout") && blobs.has_member("index.json"));
        if is_docker { Self::docker(blobs, wanted, limits) } else { Self::oci(blobs, wanted, limits) }
    }

    fn oci(blobs: Blobs, wanted: &Wanted, limits: Limits) -> Result<Self> {
        let manifest = if matches!(blobs, Blobs::Directory { layout: false, .. }) {
            match blobs.json("manifest.json", None, limits)? {
                ManifestOrIndex::Index(index) => choose(&blobs, index, wanted, limits)?,
                ManifestOrIndex::Manifest(_) if wanted.reference.is_some() => {
                    return Err(input!("manifest.json: one image, without a name; leave --ref out"));
                }
                ManifestOrIndex::Manifest(manifest) => manifest,
            }
        } else {
            let both = blobs.open("oci-layout").and(blobs.open("index.json"));
            if both.is_err_and(|error| matches!(error, Error::Input(_))) {
                return Err(Error::Foreign(
                    "no OCI layout (oci-layout, index.json) nor docker-archive (manifest.json)".into(),
                ));
            }
            choose(&blobs, blobs.json("index.json", None, limits)?, wanted, limits)?
        };
        check_layers(manifest.layers.len(), limits)?;
        let (config_path, config_digest) = blob_path(&manifest.config.digest)?;
        let expect = Some((config_digest, manifest.config.size));
        let configuration: Configuration = blobs.json(&config_path, expect, limits)?;
        check_platform(&configuration, wanted)?;
        let layers = layers_of(&manifest, &configuration)?;
        let packed_bytes = manifest.layers.iter().fold(0, |sum: u64, layer| sum.saturating_add(layer.size));
        Ok(Self { layers, packed_bytes, config: run_config(configuration), blobs })
    }

    fn docker(blobs: Blobs, wanted: &Wanted, limits: Limits) -> Result<Self> {
        let manifests: Vec<DockerManifest> = blobs.json("manifest.json", None, limits)?;
        let mut fits: Vec<&DockerManifest> = manifests.iter().collect();
        if let Some(wanted) = wanted.reference.as_deref() {
            fits = best(fits, |one| one.repo_tags.iter().flatten().map(|tag| fit(tag, wanted)).max().unwrap_or(0));
        }
        let [manifest] = fits[..] else {
            let tags: Vec<&str> =
                manifests.iter().flat_map(|one| one.repo_tags.iter().flatten()).map(String::as_str).collect();
            return Err(input!(
                "manifest.json: {} images fit; choose one with --ref (there are: {})",
                fits.len(),
                list(&tags)
            ));
        };
        check_layers(manifest.layers.len(), limits)?;
        let configuration: Configuration = blobs.json(&manifest.config, None, limits)?;
        check_platform(&configuration, wanted)?;
        let diff_ids = diff_ids(&configuration, manifest.layers.len())?;
        let (mut layers, mut packed_bytes) = (Vec::with_capacity(manifest.layers.len()), 0);
        for (index, path) in manifest.layers.iter().enumerate() {
            packed_bytes += blobs.open(path)?.1;
            let what = format!("layer {} ({path})", index + 1);
            let diff_id = diff_ids.get(index).copied();
            layers.push(Layer { what, path: path.clone(), expect: None, diff_id, table: None });
        }
        Ok(Self { layers, packed_bytes, config: run_config(configuration), blobs })
    }

    /// Opens a layer as it is packed.
    ///
    /// # Errors
    /// A layer that is missing, or has another size than its manifest says.
    pub(crate) fn open_layer(&self, layer: &Layer) -> Result<Box<dyn Read + '_>> {
        let (reader, size) = self.blobs.open(&layer.path)?;
        match layer.expect {
            Some((_, expected)) if size != expected => {
                Err(input!("{}: {size} bytes, its manifest says {expected}", layer.what))
            }
            _ => Ok(reader),
        }
    }
}

/// The layers that a manifest names, with their unpacked digests from the configuration.
pub(super) fn layers_of(manifest: &Manifest, configuration: &Configuration) -> Result<Vec<Layer>> {
    let diff_ids = diff_ids(configuration, manifest.layers.len())?;
    let mut layers = Vec::with_capacity(manifest.layers.len());
    for (index, layer) in manifest.layers.iter().enumerate() {
        let (path, digest) = blob_path(&layer.digest)?;
        let what = format!("layer {} ({})", index + 1, layer.digest);
        let (expect, diff_id) = (Some((digest, layer.size)), diff_ids.get(index).copied());
        layers.push(Layer { what, path, expect, diff_id, table: TableLocation::find(&layer.annotations, layer.size) });
    }
    Ok(layers)
}

/// An index may say nothing of platforms, or something else than the image itself.
pub(super) fn check_platform(configuration: &Configuration, wanted: &Wanted) -> Result<()> {
    match (configuration.platform(), &wanted.platform) {
        (Some(have), Some(wanted)) if !have.fits(wanted) => {
            Err(input!("the image is for {have}, not for {wanted}; without --platform it is taken all the same"))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_layers(layers: usize, limits: Limits) -> Result<()> {
    if layers > limits.layers {
        return Err(input!("{layers} layers; {} are allowed", limits.layers));
    }
    Ok(())
}

/// Opens an archive so that it can be read in any order: what is packed or not a regular file is copied to a spool.
fn seekable(path: &Path, limits: Limits, spool: impl FnOnce() -> Result<File>) -> Result<File> {
    let mut file = File::open(path).at(path)?;
    if file.metadata().at(path)?.is_file() {
        let mut magic = [0; 5];
        let count = file.read(&mut magic).at(path)?;
        file.seek(SeekFrom::Start(0)).at(path)?;
        if !is_packed(&magic[..count]) {
            return Ok(file);
        }
    }
    let mut spool = spool()?;
    let mut plain = unpack(file, limits)?.take(limits.bytes.saturating_add(1));
    if std::io::copy(&mut plain, &mut spool).at(path)? > limits.bytes {
        return Err(input!("archive: more than the limit's {} bytes", limits.bytes));
    }
    spool.seek(SeekFrom::Start(0)).at(path)?;
    Ok(spool)
}
