//! Images of the store into a registry.

use crate::common::{Common, mib, say};
use crate::error::{Error, Result};
use crate::registry::{MANIFEST, Registry, retry};
use crate::start_profile;
use bytes::Bytes;
use oci_client::errors::OciDistributionError;
use oci_client::{Reference, RegistryOperation};
use pagefold_image::export;
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use pagefold_os::sanitize::clean;
use serde::Deserialize;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Bytes that are read and sent at a time.
const PIECE: usize = 1 << 18;

#[derive(Deserialize)]
struct Blob {
    digest: String,
    size: u64,
}

#[derive(Deserialize)]
struct Manifest {
    config: Blob,
    layers: Vec<Blob>,
}

/// Uploads the image `name` as one layer, only blobs that the registry lacks, and its start profile.
///
/// # Errors
/// No such image; a damaged object; a registry that fails or refuses the login.
pub fn push(runtime: &Runtime, common: &Common, reference: &Reference, name: &str) -> Result<()> {
    let store = common.open_with(name)?;
    let (record, _lease) = store.hold(name)?;
    let operation = RegistryOperation::Push;
    let registry = Registry::connect(reference, common.server.plain_http, common.server.timeout, operation);
    let registry = runtime.block_on(registry)?;
    let build = store.build()?;
    let dir = build.scratch_path();
    let progress = Progress::new("pack");
    progress.expect(record.bytes);
    let digest = export::oci(&store, &record, &store.tree(&record.digest)?, &dir, true, &progress)?;
    drop(progress);
    let blobs = dir.join("blobs/sha256");
    let path = blobs.join(digest.hex());
    let bytes = fs::read(&path).map_err(|error| Error::Said(format!("{}: {error}", path.display())))?;
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| Error::Said(error.to_string()))?;
    let progress = Arc::new(Progress::new("push"));
    let (mut uploaded, mut bytes_uploaded, mut known) = (0, 0, 0);
    for blob in manifest.layers.iter().chain([&manifest.config]) {
        let has = retry(async || registry.has_blob(&blob.digest).await);
        if runtime.block_on(has).map_err(|error| registry.name(error))? {
            known += 1;
            continue;
        }
        let path = blobs.join(blob.digest.trim_start_matches("sha256:"));
        progress.expect(blob.size);
        let send = async || registry.push_blob(&blob.digest, blob.size, pieces(&path, &progress)?).await;
        runtime.block_on(retry(send)).map_err(|error| registry.name(error))?;
        uploaded += 1;
        bytes_uploaded += blob.size;
    }
    let send = async || registry.push_manifest(None, MANIFEST, bytes.clone()).await;
    runtime.block_on(retry(send)).map_err(|error| registry.name(error))?;
    drop(progress);
    let whole = reference.whole();
    let profile = Profile::load(&store, &record.digest);
    let has_profile = profile.is_some_and(|profile| {
        let recorded_s = Profile::recorded_s(&store, &record.digest);
        let sent = runtime.block_on(start_profile::push(&registry, &bytes, &profile, recorded_s));
        sent.map_err(|error| {
            let text = clean(&registry.name(error).to_string());
            eprintln!("pagefold: note: {whole} is pushed, its start profile is not: {text}");
        })
        .is_ok()
    });
    let text = if common.server.json {
        let value = serde_json::json!({ "name": name, "reference": whole, "manifest": digest,
            "blobs_known": known, "blobs_uploaded": uploaded, "bytes_uploaded": bytes_uploaded,
            "start_profile": has_profile });
        format!("{value:#}")
    } else {
        let mib = mib(bytes_uploaded);
        let profile = if has_profile { "; with its start profile" } else { "" };
        format!("{digest}  {whole}\nblobs: {known} known, {uploaded} uploaded, {mib:.1} MiB{profile}")
    };
    say(&text)
}

/// The bytes of the file `path`, which count as done.
fn pieces(
    path: &Path,
    progress: &Arc<Progress>,
) -> Result<impl futures_util::Stream<Item = Result<Bytes, OciDistributionError>> + Send + 'static + use<>> {
    let mut file = File::open(path).map_err(|error| Error::Said(format!("{}: {error}", path.display())))?;
    let progress = progress.clone();
    let next = move || {
        let mut piece = vec![0; PIECE];
        match file.read(&mut piece) {
            Ok(0) => None,
            Ok(count) => {
                piece.truncate(count);
                progress.add(count as u64, false);
                Some(Ok(Bytes::from(piece)))
            }
            Err(error) => Some(Err(error.into())),
        }
    };
    Ok(futures_util::stream::iter(std::iter::from_fn(next)))
}
