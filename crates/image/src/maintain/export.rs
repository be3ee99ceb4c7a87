//! Exports of images: as a tar archive, an OCI layout, or a self-contained EROFS image.

use super::holes::{self, PartsOnly};
use crate::digest::{Digest, HashingWriter, hash_reader};
use crate::error::{At, Error, OUTPUT, Result};
use crate::format::acl::{self, Acl};
use crate::format::erofs;
use crate::format::oci::Platform;
use crate::format::tar::{self, Acls, ArchiveEntry, EntryKind};
use crate::progress::Progress;
use crate::random_id::random_id;
use crate::store::{ImageRecord, Store};
use crate::tree::{Data, FileKind, Id, Tree, show};
use pagefold_os::read_once::ReadOnce;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

/// Calls `write` to fill the file `path`, which gets its name when it is whole. An export that ends early leaves the file
/// that had the name, and if it was killed, a file `NAME.….part` beside it. A pipe, device or link at `path` is written to
/// directly.
///
/// # Errors
/// Those of `write`; the system's.
pub fn to_file(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let there = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        other => Some(other.at_output(path)?),
    };
    if there.as_ref().is_some_and(|meta| !meta.is_file()) {
        return write(&mut File::create(path).at_output(path)?).map_err(|error| error.of_output(path));
    }
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", random_id()?));
    let part = PathBuf::from(part);
    let mode = if there.is_some() { 0o600 } else { 0o666 };
    let mut file = File::options().write(true).create_new(true).mode(mode).open(&part).at_output(path)?;
    let finish = || -> Result<()> {
        if let Some(there) = there {
            // The old file's owner stays, if this user may set it.
            let _ = fchown(&file, Some(there.uid()), Some(there.gid()));
            file.set_permissions(there.permissions()).at_output(path)?;
        }
        write(&mut file).map_err(|error| error.of_output(path))?;
        // Some file systems report only now that they are full.
        file.sync_all().at_output(path)?;
        fs::rename(&part, path).at_output(path)
    };
    let finished = finish();
    if finished.is_err() {
        let _ = fs::remove_file(&part);
    }
    finished
}

/// Writes `tree` as one tar archive: the same image always as the same bytes, if the store's file system has holes. Large
/// files with holes are sparse members.
///
/// # Errors
/// A damaged object (the archive is then incomplete), the system's.
pub fn tar(store: &Store, tree: &Tree, out: &mut impl Write, progress: &Progress) -> Result<()> {
    archive(store, tree, out, true, progress)
}

/// The same; members are `sparse` only where the reader is known to be an archiver.
fn archive(store: &Store, tree: &Tree, out: &mut impl Write, sparse: bool, progress: &Progress) -> Result<()> {
    let mut export = Export { store, tree, names: tree.reachable().1, first: HashMap::new(), out, sparse, progress };
    let mut result = Ok(());
    // Name by name: all paths of a deep tree together are larger than its content.
    tree.walk(|path, id| {
        if result.is_ok() {
            result = export.entry(path, id);
        }
    });
    result?;
    out.write_all(&[0; 1024]).and_then(|()| out.flush()).at_output(OUTPUT)
}

/// An archive being written.
struct Export<'a, W> {
    store: &'a Store,
    tree: &'a Tree,
    /// How many names each inode has.
    names: Vec<u32>,
    /// The path by which a file with several names was written.
    first: HashMap<Id, Vec<u8>>,
    out: &'a mut W,
    sparse: bool,
    progress: &'a Progress,
}

impl<W: Write> Export<'_, W> {
    /// Writes the entry of one of the names of inode `id`.
    fn entry(&mut self, path: &[u8], id: Id) -> Result<()> {
        let inode = self.tree.inode(id);
        let is_dir = matches!(inode.kind, FileKind::Dir(_));
        let kind = match &inode.kind {
            FileKind::Dir(_) => EntryKind::Dir,
            _ if self.first.contains_key(&id) => EntryKind::HardLink(self.first[&id].clone()),
            FileKind::File(data) => EntryKind::File(data.size()),
            FileKind::Symlink(target) => EntryKind::Symlink(target.to_vec()),
            FileKind::Char(major, minor) => EntryKind::Char(*major, *minor),
            FileKind::Block(major, minor) => EntryKind::Block(*major, *minor),
            FileKind::Fifo => EntryKind::Fifo,
            // tar has no sockets; programs make their own when they start.
            FileKind::Socket => return Ok(()),
        };
        if !is_dir && self.names[id as usize] > 1 {
            self.first.entry(id).or_insert_with(|| path.to_vec());
        }
        let path = match (path.is_empty(), is_dir) {
            (true, _) => b"./".to_vec(),
            (false, true) => [path, b"/"].concat(),
            (false, false) => path.to_vec(),
        };
        let mut meta = inode.meta.clone();
        if matches!(kind, EntryKind::HardLink(_)) {
            meta.xattrs.clear();
        }
        let list = |name: &[u8]| meta.xattrs.get(name).and_then(|value| Acl::from_attribute(value));
        let acls = Acls { access: list(acl::ACCESS), default: list(acl::DEFAULT) };
        let entry = ArchiveEntry { path, kind, meta, acls, has_foreign_acl: false, is_sparse: false };
        match &inode.kind {
            FileKind::File(data) if matches!(entry.kind, EntryKind::File(_)) => self.file(&entry, data),
            _ => self.headers(|bytes| tar::write_header(bytes, &entry)),
        }
    }

    /// Writes a file: its headers, and its bytes or the parts that are not zeros.
    fn file(&mut self, entry: &ArchiveEntry, data: &Data) -> Result<()> {
        let stored = match self.parts(data)? {
            None => {
                self.headers(|bytes| tar::write_header(bytes, entry))?;
                copy_data(self.store, data, self.out)?;
                data.size()
            }
            Some(mut parts) => {
                self.headers(|bytes| tar::write_sparse_header(bytes, entry, &parts))?;
                let stored = parts.iter().map(|(_, length)| length).sum();
                parts.reverse();
                copy_data(self.store, data, &mut PartsOnly { out: self.out, parts, at: 0 })?;
                stored
            }
        };
        self.progress.add(data.size(), true);
        self.headers(|bytes| tar::pad(bytes, stored))
    }

    /// The parts of a file to write if it is a sparse member.
    fn parts(&self, data: &Data) -> Result<Option<Vec<tar::Part>>> {
        let Data::Object(digest, _) = data else { return Ok(None) };
        if !self.sparse {
            return Ok(None);
        }
        let path = self.store.object_path(digest);
        holes::parts(&File::open(&path).at(&path)?).at(&path)
    }

    /// Writes what `make` makes.
    fn headers(&mut self, make: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        let mut bytes = Vec::new();
        make(&mut bytes);
        self.out.write_all(&bytes).at_output(OUTPUT)
    }
}

/// Copies a file's bytes to `out`; their number and digest must be right.
fn copy_data(store: &Store, data: &Data, out: &mut impl Write) -> Result<()> {
    let (digest, size) = match data {
        Data::Inline(bytes) => return out.write_all(bytes).at_output(OUTPUT),
        Data::Object(digest, size) => (digest, *size),
    };
    let path = store.object_path(digest);
    let file = File::open(&path).at(&path)?;
    let mut hashing = crate::digest::Hashing::new(ReadOnce::new(file));
    let (mut left, mut piece) = (size, vec![0; size.min(1 << 17) as usize]);
    while left > 0 {
        let want = left.min(piece.len() as u64) as usize;
        let count = match hashing.read(&mut piece[..want]) {
            Ok(0) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other.at(&path)?,
        };
        out.write_all(&piece[..count]).at_output(OUTPUT)?;
        left -= count as u64;
    }
    let damaged = || Error::Damaged(format!("{}: damaged; `pagefold image verify` names the images", path.display()));
    if left > 0 {
        return Err(damaged());
    }
    hashing.finish(&path.display().to_string(), *digest).map_err(|_| damaged())
}

/// Writes `tree` as an EROFS image with all its data and the fingerprints that `inode_share` uses.
///
/// # Errors
/// A damaged object, the system's.
pub fn erofs_full(store: &Store, tree: &Tree, out: &mut impl Write, progress: &Progress) -> Result<()> {
    let image = erofs::write(tree, erofs::Layout::Full)?;
    out.write_all(&image.head).at_output(OUTPUT)?;
    for (digest, size) in &image.data {
        copy_data(store, &Data::Object(*digest, *size), out)?;
        progress.add(*size, true);
        let padding = size.next_multiple_of(erofs::BLOCK) - size;
        out.write_all(&vec![0; padding as usize]).at_output(OUTPUT)?;
    }
    out.flush().at_output(OUTPUT)
}

/// Returns true if `file` is, byte for byte, what [`erofs_full`] writes for `tree`: the tree determines the bytes, so they
/// need no digest.
pub(crate) fn is_erofs_full(mut file: impl Read, tree: &Tree) -> Result<io::Result<bool>> {
    use sha2::Digest as _;
    let image = erofs::write(tree, erofs::Layout::Full)?;
    let mut piece = vec![0; 1 << 17];
    // Calls `each` with the next `size` bytes, in pieces.
    let mut next = |mut size: u64, each: &mut dyn FnMut(&[u8])| -> io::Result<()> {
        while size > 0 {
            let part = &mut piece[..size.min(1 << 17) as usize];
            file.read_exact(part)?;
            each(part);
            size -= part.len() as u64;
        }
        Ok(())
    };
    let mut compare = || -> io::Result<bool> {
        let (mut at, mut same) = (0, true);
        next(image.head.len() as u64, &mut |part| {
            same &= image.head[at..at + part.len()] == *part;
            at += part.len();
        })?;
        for (digest, size) in &image.data {
            let mut hasher = sha2::Sha256::new();
            next(*size, &mut |part| hasher.update(part))?;
            same &= Digest(hasher.finalize().into()) == *digest;
            next(size.next_multiple_of(erofs::BLOCK) - size, &mut |part| same &= part.iter().all(|&byte| byte == 0))?;
        }
        Ok(same)
    };
    Ok(match compare() {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        other => other,
    })
}

/// Makes the image's self-contained form in the store, for native mounts. A damaged one is replaced.
///
/// # Errors
/// A damaged object, a full store.
pub fn make_native(store: &Store, digest: &Digest, progress: &Progress) -> Result<()> {
    let target = store.full_path(digest);
    if store.has_full(digest) {
        return Ok(());
    }
    let build = store.build()?;
    let staged = build.staging().scratch_path();
    let mut file = File::create_new(&staged).at(&staged)?;
    erofs_full(store, &store.tree(digest)?, &mut file, progress)
        .map_err(|error| error.of_output(&staged).in_store())?;
    file.sync_all().at(&staged)?;
    fs::rename(&staged, &target).at(&target)
}

/// Writes the image as an OCI layout with one layer, with gzip if it is to be `packed`: the same image always as the same
/// bytes. Returns the digest of its manifest.
///
/// # Errors
/// A directory that is not empty, a name that deletes in a layer (`.wh.`), a damaged object, the system's.
pub fn oci(
    store: &Store,
    record: &ImageRecord,
    tree: &Tree,
    dir: &Path,
    packed: bool,
    progress: &Progress,
) -> Result<Digest> {
    let mut mark = None;
    tree.walk(|path, _| {
        if path.rsplit(|&byte| byte == b'/').next().is_some_and(|name| name.starts_with(b".wh.")) {
            mark.get_or_insert_with(|| show(path));
        }
    });
    if let Some(path) = mark {
        return Err(Error::Refused(format!(
            "{path}: a layer takes the name for the mark of a deleted file; export a tar"
        )));
    }
    if dir.exists() && !dir.is_dir() {
        return Err(Error::Refused(format!("{}: not a directory; give a new one", dir.display())));
    }
    let is_new = !dir.exists();
    if is_new {
        // No directory above it is made: a typing error must not make one.
        fs::create_dir(dir).at_output(dir)?;
    }
    if fs::read_dir(dir).at_output(dir)?.next().is_some() {
        return Err(Error::Refused(format!("{}: not empty; give a new directory", dir.display())));
    }
    let written = layout(store, record, tree, dir, packed, progress);
    if written.is_err() {
        // Half a layout is of no use, and would hinder the next try.
        let _ = fs::remove_dir_all(dir.join("blobs"));
        for name in ["oci-layout", "index.json"] {
            let _ = fs::remove_file(dir.join(name));
        }
        if is_new {
            let _ = fs::remove_dir(dir);
        }
    }
    written
}

/// Fills the directory of a layout. The files that make it a layout come last: an export that was killed leaves none.
fn layout(
    store: &Store,
    record: &ImageRecord,
    tree: &Tree,
    dir: &Path,
    packed: bool,
    progress: &Progress,
) -> Result<Digest> {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).at_output(&blobs)?;
    let staged = blobs.join(".layer");
    let diff_id = layer(store, tree, &staged, packed, progress).map_err(|error| error.of_output(&staged))?;
    let (layer, layer_size) = hash_reader(&mut File::open(&staged).at_output(&staged)?).at_output(&staged)?;
    fs::rename(&staged, blobs.join(layer.hex())).at_output(&staged)?;
    let put = |value: serde_json::Value| -> Result<(Digest, usize)> {
        let bytes = serde_json::to_vec(&value).expect("plain data");
        let digest = Digest::of(&bytes);
        let path = blobs.join(digest.hex());
        fs::write(&path, &bytes).at_output(&path)?;
        Ok((digest, bytes.len()))
    };
    let run = &record.config;
    let platform = run.platform.parse().unwrap_or_else(|_| Platform::host());
    let mut config = serde_json::json!({
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {
            "Env": run.env, "Entrypoint": run.entrypoint, "Cmd": run.cmd, "WorkingDir": run.working_dir, "User": run.user,
        },
        "rootfs": { "type": "layers", "diff_ids": [diff_id] },
        "history": [{ "created_by": "pagefold image export" }],
    });
    if let Some(variant) = platform.variant {
        config["variant"] = variant.into();
    }
    let (config, config_size) = put(config)?;
    let (manifest, manifest_size) = put(serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": config_size },
        "layers": [{
            "mediaType": format!("application/vnd.oci.image.layer.v1.tar{}", if packed { "+gzip" } else { "" }),
            "digest": layer, "size": layer_size,
        }],
    }))?;
    let index = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest, "size": manifest_size,
            "annotations": { "org.opencontainers.image.ref.name": record.name },
        }],
    });
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).at_output(dir)?;
    fs::write(dir.join("index.json"), index.to_string()).at_output(dir)?;
    Ok(manifest)
}

/// Writes the layer to the new file `path`. Returns the digest of its unpacked form.
fn layer(store: &Store, tree: &Tree, path: &Path, packed: bool, progress: &Progress) -> Result<Digest> {
    let file = File::create_new(path).at_output(path)?;
    let plain = |out: &mut dyn Write| {
        let mut out = HashingWriter::new(io::BufWriter::new(out));
        archive(store, tree, &mut out, false, progress)?;
        Ok(out.digest())
    };
    let diff_id = if packed {
        let mut gzip = flate2::write::GzEncoder::new(&file, flate2::Compression::default());
        let diff_id = plain(&mut gzip)?;
        gzip.finish().at_output(path)?;
        diff_id
    } else {
        plain(&mut &file)?
    };
    // Some file systems report only now that they are full.
    file.sync_all().at_output(path)?;
    Ok(diff_id)
}
