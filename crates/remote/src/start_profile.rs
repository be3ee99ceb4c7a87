//! Start profiles beside the images of a registry: what `image exec --record-profile` has learned goes with a push and comes
//! with a pull.
//!
//! A profile is an artifact as OCI 1.1 has it: a manifest of its own, with the image's manifest as its subject. A registry
//! lists what refers to a manifest. Of one that does not, clients keep that list, under a tag that is made of the digest.
//!
//! A profile is a hint. Whatever goes wrong with one, the image is pushed or pulled all the same.

use crate::error::{Error, Result};
use crate::registry::{INDEX, MANIFEST, Referrers, Registry, retry};
use pagefold_image::digest::Digest;
use pagefold_image::profile::Profile;
use pagefold_image::store::Store;
use serde::Deserialize;
use serde_json::{Value, json};

/// The type of the artifact and of its one blob.
const KIND: &str = "application/vnd.pagefold.start-profile.v1+json";

/// The configuration of an artifact that needs none, and its type.
const EMPTY: (&[u8], &str) = (b"{}", "application/vnd.oci.empty.v1+json");

/// When the profile was recorded, seconds since 1970. Of several the newest counts.
const RECORDED: &str = "vnd.pagefold.recorded";

/// A manifest or blob, as another manifest names it.
#[derive(Deserialize)]
struct Descriptor {
    digest: String,
    size: u64,
}

/// The artifact's manifest.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Artifact {
    artifact_type: String,
    layers: Vec<Descriptor>,
    subject: Descriptor,
}

/// Uploads the profile of the image with the manifest `image`.
///
/// # Errors
/// A registry that fails, or takes no artifacts.
pub async fn push(registry: &Registry, image: &[u8], profile: &Profile, recorded_s: u64) -> Result<()> {
    let Some(value) = profile.for_outside() else { return Ok(()) };
    let profile = value.to_string().into_bytes();
    for blob in [&profile, EMPTY.0] {
        let name = Digest::of(blob).to_string();
        if !retry(async || registry.has_blob(&name).await).await? {
            let bytes = || futures_util::stream::iter([Ok(blob.to_vec().into())]);
            retry(async || registry.push_blob(&name, blob.len() as u64, bytes()).await).await?;
        }
    }
    let annotations = json!({ RECORDED: recorded_s.to_string() });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": KIND,
        "config": descriptor(EMPTY.1, EMPTY.0),
        "layers": [descriptor(KIND, &profile)],
        "subject": descriptor(MANIFEST, image),
        "annotations": annotations,
    });
    let manifest = manifest.to_string().into_bytes();
    let subject = Digest::of(image);
    let name = Digest::of(&manifest).to_string();
    retry(async || registry.push_manifest(Some(&name), MANIFEST, manifest.clone()).await).await?;
    let Referrers::Tag(tag, list) = registry.referrers(subject, KIND).await? else { return Ok(()) };
    let mut entry = descriptor(MANIFEST, &manifest);
    entry["artifactType"] = KIND.into();
    entry["annotations"] = annotations;
    let list = with(list, entry)?;
    retry(async || registry.push_manifest(Some(&tag), INDEX, list.clone()).await).await
}

fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": Digest::of(bytes).to_string(), "size": bytes.len() })
}

/// The list of what refers to an image, with `entry` in place of the profiles in it. What others have put there stays.
fn with(list: Option<Vec<u8>>, entry: Value) -> Result<Vec<u8>> {
    let new = || json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [] });
    let mut list = list.map_or_else(|| Ok(new()), |bytes| serde_json::from_slice(&bytes)).map_err(not_a_list)?;
    let entries = list.get_mut("manifests").and_then(Value::as_array_mut).ok_or_else(|| not_a_list("no manifests"))?;
    entries.retain(|other| other["artifactType"] != KIND);
    entries.push(entry);
    Ok(list.to_string().into_bytes())
}

fn not_a_list(error: impl std::fmt::Display) -> Error {
    Error::Said(format!("what refers to the image is no index: {error}"))
}

/// The newest profile of the image with the manifest `image`, if there is one.
///
/// # Errors
/// A registry that fails; one that gives something else as the profile.
pub async fn pull(registry: &Registry, image: Digest, bytes_fetched: &mut u64) -> Result<Option<Profile>> {
    let (Referrers::Listed(list) | Referrers::Tag(_, Some(list))) = registry.referrers(image, KIND).await? else {
        return Ok(None);
    };
    *bytes_fetched += list.len() as u64;
    let Some(digest) = newest(&list)? else { return Ok(None) };
    let (manifest, _) = registry.manifest(Some(digest)).await?;
    *bytes_fetched += manifest.len() as u64;
    let not_a_profile = || Error::Said(format!("{digest} is no start profile of {image}"));
    let artifact: Artifact = serde_json::from_slice(&manifest).map_err(|_| not_a_profile())?;
    let [blob] = artifact.layers.as_slice() else { return Err(not_a_profile()) };
    if artifact.artifact_type != KIND || Digest::parse(&artifact.subject.digest)? != image {
        return Err(not_a_profile());
    }
    let bytes = registry.document(Digest::parse(&blob.digest)?, blob.size).await?;
    *bytes_fetched += bytes.len() as u64;
    let value = serde_json::from_slice(&bytes).map_err(|_| not_a_profile())?;
    Profile::from_outside(&value).map(Some).ok_or_else(not_a_profile)
}

/// The manifest of the newest profile in the list of what refers to an image.
fn newest(list: &[u8]) -> Result<Option<Digest>> {
    let list: Value = serde_json::from_slice(list).map_err(not_a_list)?;
    let entries = list["manifests"].as_array().into_iter().flatten().filter(|entry| entry["artifactType"] == KIND);
    let recorded = |entry: &&Value| entry["annotations"][RECORDED].as_str().and_then(|text| text.parse::<u64>().ok());
    let Some(entry) = entries.max_by_key(recorded) else { return Ok(None) };
    Ok(Some(Digest::parse(entry["digest"].as_str().unwrap_or_default())?))
}

/// Keeps what a start reads, as another host has recorded it, unless this one knows better. It is a hint: without it a start
/// takes longer.
///
/// Returns true if the store has a profile of the image now.
pub fn keep(store: &Store, digest: &Digest, profile: Option<Profile>) -> bool {
    Profile::load(store, digest).is_some() || profile.is_some_and(|profile| profile.save(store, digest).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: &str, name: &str, recorded: &str) -> Value {
        json!({ "mediaType": MANIFEST, "digest": Digest::of(name.as_bytes()).to_string(), "size": 1,
            "artifactType": kind, "annotations": { RECORDED: recorded, "of others": "x" } })
    }

    fn list(entries: &[Value]) -> Vec<u8> {
        json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries }).to_string().into_bytes()
    }

    #[test]
    fn the_newest_profile_counts_and_nothing_of_others() {
        let signature = entry("application/vnd.example.signature", "signature", "9");
        let entries = [entry(KIND, "old", "5"), signature, entry(KIND, "new", "30"), entry(KIND, "odd", "x")];
        assert_eq!(newest(&list(&entries)).unwrap(), Some(Digest::of(b"new")));
        assert_eq!(newest(&list(&entries[1..2])).unwrap(), None);
        assert_eq!(newest(b"{}").unwrap(), None);
        newest(b"<html>").unwrap_err();
        newest(&list(&[json!({ "artifactType": KIND, "digest": "sha256:../../x" })])).unwrap_err();
    }

    #[test]
    fn what_others_have_put_beside_an_image_stays() {
        let signature = entry("application/vnd.example.signature", "signature", "9");
        let before = list(&[entry(KIND, "old", "5"), signature.clone()]);
        let new = entry(KIND, "new", "6");
        let after: Value = serde_json::from_slice(&with(Some(before), new.clone()).unwrap()).unwrap();
        assert_eq!(after["manifests"], json!([signature, new]));
        let first: Value = serde_json::from_slice(&with(None, new.clone()).unwrap()).unwrap();
        assert_eq!((&first["mediaType"], &first["manifests"]), (&json!(INDEX), &json!([new])));
        with(Some(b"[]".to_vec()), new.clone()).unwrap_err();
        with(Some(b"<html>".to_vec()), new).unwrap_err();
    }
}
