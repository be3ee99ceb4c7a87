//! Two versions of an image, made of this machine's own directories: one base layer, and a layer of each version.

use crate::process::{Failure, sh};
use crate::scratch::Scratch;
use pagefold_image::digest::{Digest, hash_reader};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A version of the image.
pub struct Version {
    /// Its name in containerd.
    pub name: String,
    /// The archive that is imported.
    pub archive: PathBuf,
    /// What its containers show, as plain files.
    pub plain: PathBuf,
}

/// Makes both versions. In the second one every tenth file of its layer is changed.
pub fn versions(scratch: &Scratch) -> Result<[Version; 2], Failure> {
    let base = scratch.sub("base")?;
    let at = base.display();
    sh(&format!(
        "for p in /bin/sh /bin/sleep /bin/true; do cp -L --parents $p $(ldd $p | grep -o '/[^ ]*') {at}; done
         mkdir -p {at}/proc {at}/sys {at}/dev {at}/tmp {at}/etc; cd /
         cp -a --parents $(ls -d usr/share/perl 2>/dev/null) {at} 2>/dev/null || :"
    ))?;
    crate::files::random_file(&base.join("large"), 16, 1)?;
    let mut versions = Vec::new();
    for number in 1..=2 {
        let (layer, plain) = (scratch.sub(&format!("layer-{number}"))?, scratch.sub(&format!("plain-{number}"))?);
        sh(&format!("cd /; cp -a --parents $(ls -d usr/lib/python3.* 2>/dev/null) {}", layer.display()))?;
        let list = crate::image::files(&layer);
        if list.is_empty() {
            return Err("no Python here to make a layer of".into());
        }
        let changed = list.iter().step_by(10).filter(|_| number == 2);
        changed
            .into_iter()
            .try_for_each(|(path, _)| File::options().append(true).open(path)?.write_all(b"\n# changed\n"))?;
        sh(&format!("cp -a {0}/. {2}; cp -a {1}/. {2}", base.display(), layer.display(), plain.display()))?;
        let name = format!("bench.invalid/app:{number}");
        let archive = archive(scratch, number, &name, &[&base, &layer])?;
        versions.push(Version { name, archive, plain });
    }
    sh(&format!("sync -f {}", scratch.dir.display()))?;
    let second = versions.pop().expect("two");
    Ok([versions.pop().expect("two"), second])
}

/// Writes an OCI archive with these directories as layers.
fn archive(scratch: &Scratch, number: u32, name: &str, layers: &[&Path]) -> Result<PathBuf, Failure> {
    let layout = scratch.sub(&format!("layout-{number}"))?;
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let descriptor = |kind: &str, digest: &Digest, size: u64| -> Value {
        json!({ "mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest, "size": size })
    };
    let put = |kind: &str, document: &Value| -> Result<Value, Failure> {
        let bytes = serde_json::to_vec(document)?;
        let digest = Digest::of(&bytes);
        fs::write(blobs.join(digest.hex()), &bytes)?;
        Ok(descriptor(kind, &digest, bytes.len() as u64))
    };
    let (mut descriptors, mut diffs) = (Vec::new(), Vec::new());
    for layer in layers {
        let tar = layout.join("layer.tar");
        sh(&format!("tar -C {} --sort=name --numeric-owner -cf {} .", layer.display(), tar.display()))?;
        let (digest, size) = hash_reader(&mut File::open(&tar)?)?;
        fs::rename(&tar, blobs.join(digest.hex()))?;
        descriptors.push(descriptor("layer.v1.tar", &digest, size));
        diffs.push(json!(digest));
    }
    let architecture = if std::env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" };
    let config = json!({ "architecture": architecture, "os": "linux", "config": { "Env": ["PATH=/bin:/usr/bin"] },
        "rootfs": { "type": "layers", "diff_ids": diffs } });
    let config = put("config.v1+json", &config)?;
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": descriptors });
    let mut manifest = put("manifest.v1+json", &manifest)?;
    manifest["annotations"] = json!({ "io.containerd.image.name": name });
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(layout.join("index.json"), serde_json::to_vec(&index)?)?;
    fs::write(layout.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let path = scratch.dir.join(format!("image-{number}.tar"));
    sh(&format!("tar -C {} -cf {} .; rm -rf {0}", layout.display(), path.display()))?;
    Ok(path)
}
