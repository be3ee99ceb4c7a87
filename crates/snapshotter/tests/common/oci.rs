//! OCI archives.

use pagefold_image::digest::Digest;

/// A file of a layer: path, mode, bytes. A path that ends with a slash is a directory.
pub type File<'a> = (&'a str, u32, &'a [u8]);

pub fn tar(files: &[File]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, mode, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(*mode);
        header.set_size(bytes.len() as u64);
        let kind = if path.ends_with('/') { tar::EntryType::Directory } else { tar::EntryType::Regular };
        header.set_entry_type(kind);
        archive.append_data(&mut header, path, *bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

/// An OCI archive with one image.
pub fn archive(name: &str, layers: &[&[File]]) -> Vec<u8> {
    let mut blobs: Vec<(String, Vec<u8>)> = Vec::new();
    let mut put = |kind: &str, bytes: Vec<u8>| {
        let digest = Digest::of(&bytes);
        let text =
            format!(r#"{{"mediaType":"application/vnd.oci.image.{kind}","digest":"{digest}","size":{}}}"#, bytes.len());
        blobs.push((format!("blobs/sha256/{}", digest.hex()), bytes));
        (text, digest)
    };
    let layers: Vec<(String, Digest)> = layers.iter().map(|files| put("layer.v1.tar", tar(files))).collect();
    let list = |each: &dyn Fn(&(String, Digest)) -> String| layers.iter().map(each).collect::<Vec<_>>().join(",");
    let diffs = list(&|(_, digest)| format!("\"{digest}\""));
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Env":["PATH=/bin"]}},"rootfs":{{"type":"layers","diff_ids":[{diffs}]}}}}"#
    );
    let (config, _) = put("config.v1+json", config.into_bytes());
    let layers = list(&|(layer, _)| layer.clone());
    let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layers}]}}"#);
    let (manifest, _) = put("manifest.v1+json", manifest.into_bytes());
    let named =
        format!(r#"{},"annotations":{{"io.containerd.image.name":"{name}"}}}}"#, &manifest[..manifest.len() - 1]);
    let index = format!(r#"{{"schemaVersion":2,"manifests":[{named}]}}"#).into_bytes();
    let mut files: Vec<(&str, u32, &[u8])> =
        vec![("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#), ("index.json", 0o644, &index)];
    files.extend(blobs.iter().map(|(path, bytes)| (&**path, 0o644, &**bytes)));
    tar(&files)
}
