//! OCI layouts, OCI archives, docker-archives and plain directories of blobs (skopeo's `dir:`): what podman, skopeo, buildah
//! and docker write.
//!
//! Only the part of the specification that leads from a name to layers and a run
//! configuration is read (about forty fields), so the JSON is described here rather than by a crate for all of it.
//! Unknown fields are ignored, as the specification asks; digests and sizes are checked before anything is used.

use crate::config::{Limits, Used};
use crate::digest::{Digest, Hashing};
use crate::error::{At, Error, Result, input};
use crate::ingest::{Notes, apply_tar};
use crate::mount::{by_descriptor, open_path};
use crate::progress::Progress;
use crate::store::{Build, RunConfig};
use crate::stream::{is_packed, unpack};
use crate::tar::{EntryKind, Reader};
use crate::tree::{Tree, show};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: HashMap<String, String>,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
    variant: Option<String>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// A manifest, or a list of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum One {
    Image(Manifest),
    Of(Index),
}

#[derive(Deserialize, Default)]
struct Configuration {
    #[serde(default)]
    config: Option<RunSection>,
    #[serde(default)]
    rootfs: RootFs,
}

#[derive(Deserialize, Default)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct RunSection {
    #[serde(default)]
    env: Option<Vec<String>>,
    #[serde(default)]
    entrypoint: Option<Vec<String>>,
    #[serde(default)]
    cmd: Option<Vec<String>>,
    #[serde(default)]
    working_dir: Option<String>,
    #[serde(default)]
    user: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Parses any of the documents, for fuzzing: bytes in, nothing or an error out.
///
/// # Errors
/// None of them.
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

fn run_config(configuration: Configuration) -> RunConfig {
    let run = configuration.config.unwrap_or_default();
    RunConfig {
        env: run.env.unwrap_or_default(),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
        working_dir: run.working_dir.unwrap_or_default(),
        user: run.user.unwrap_or_default(),
    }
}

/// Where a digest's blob lies in a layout; refuses what is no digest, and with it every path that is none.
fn blob_path(digest: &str) -> Result<(String, Digest)> {
    let parsed = Digest::parse(digest)?;
    if !digest.starts_with("sha256:") {
        return Err(input!("{digest:?} is not a sha256 digest"));
    }
    Ok((format!("{BLOBS}{}", parsed.hex()), parsed))
}

/// What the paths of blobs begin with in a layout.
const BLOBS: &str = "blobs/sha256/";

/// What the file `version` of a plain directory of blobs begins with.
const PLAIN: &[u8] = b"Directory Transport Version: ";

/// Named blobs: a directory, or the files of a tar archive. Without a layout they are in the directory itself.
enum Blobs {
    Directory { dir: OwnedFd, layout: bool },
    Archive { file: File, members: HashMap<Vec<u8>, Member> },
}

enum Member {
    File { offset: u64, size: u64 },
    Link(Vec<u8>),
}

/// A range of a file, read without moving the file's own position.
struct Range<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl Read for Range<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let want = self.left.min(buffer.len() as u64) as usize;
        let count = self.file.read_at(&mut buffer[..want], self.at)?;
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// Joins a link's target to the directory of the link, as old docker-archives use it; one with a leading `/` counts
/// from the archive's root.
fn join_link(from: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = from.split(|&byte| byte == b'/').collect();
    parts.pop();
    if target.starts_with(b"/") {
        parts.clear();
    }
    for part in target.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join(&b'/')
}

impl Blobs {
    fn open(&self, path: &str) -> Result<(Box<dyn Read + '_>, u64)> {
        let missing = || input!("{path}: not in the layout; copy the whole image (skopeo copy … oci:DIR)");
        match self {
            Blobs::Directory { dir, layout } => {
                use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
                // A layout is somebody else's directory: no link may lead out of it, and what is no file is not opened: a
                // pipe's writer would notice, and some devices do things.
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let open = |path: &str| rustix::fs::openat2(dir, path, flags, Mode::empty(), ResolveFlags::BENEATH);
                let file = match path.strip_prefix(BLOBS).filter(|_| !layout) {
                    // Manifests that an index lists have an end of their own.
                    Some(name) => open(name).or_else(|_| open(&format!("{name}.manifest.json"))),
                    None => open(path),
                };
                let file = match file {
                    Err(rustix::io::Errno::NOENT) => return Err(missing()),
                    other => other.at(path)?,
                };
                let found = rustix::fs::fstat(&file).at(path)?;
                if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
                    return Err(input!("{path}: not a regular file"));
                }
                let file = File::open(by_descriptor(&file)).at(path)?;
                Ok((Box::new(file), found.st_size as u64))
            }
            Blobs::Archive { file, members } => {
                let mut name = path.as_bytes().to_vec();
                for _ in 0..8 {
                    match members.get(&name).ok_or_else(missing)? {
                        Member::File { offset, size } => {
                            return Ok((Box::new(Range { file, at: *offset, left: *size }), *size));
                        }
                        Member::Link(target) => name = join_link(&name, target),
                    }
                }
                Err(input!("{path}: too many links"))
            }
        }
    }

    fn json<T: DeserializeOwned>(&self, path: &str, expect: Option<(Digest, u64)>, limits: Limits) -> Result<T> {
        let (mut reader, size) = self.open(path)?;
        if size > limits.json_bytes {
            return Err(input!("{path}: {size} bytes of JSON; {} are allowed", limits.json_bytes));
        }
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).at(path)?;
        if let Some((digest, size)) = expect {
            let found = Digest::of(&bytes);
            if found != digest || bytes.len() as u64 != size {
                let (expected, found) = (digest.to_string(), found.to_string());
                return Err(Error::Digest { what: path.into(), expected, found });
            }
        }
        serde_json::from_slice(&bytes).map_err(|error| input!("{path}: {error}"))
    }
}

/// Shows `each` the members of a plain tar archive, a regular file, until it has seen enough. Headers are read, and what
/// is between them is not.
fn each_member(file: &File, limits: Limits, mut each: impl FnMut(Vec<u8>, Member) -> Result<bool>) -> Result<()> {
    struct Positioned<'a> {
        inner: BufReader<&'a File>,
        at: u64,
    }
    impl Read for Positioned<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.inner.read(buffer)?;
            self.at += count as u64;
            Ok(count)
        }
    }
    let end = file.metadata().map_err(|error| input!("tar: {error}"))?.len();
    let mut reader = Reader::new(Positioned { inner: BufReader::new(file), at: 0 }, limits);
    let mut first = true;
    while let Some(entry) = reader.next_entry().map_err(|error| if first { error.foreign() } else { error })? {
        first = false;
        let path = entry.path.strip_prefix(b"./").unwrap_or(&entry.path).to_vec();
        let offset = reader.get_ref().at;
        let member = match entry.kind {
            EntryKind::File(size) if size > end.saturating_sub(offset) => {
                return Err(input!("tar: cut off in {}", show(&path)));
            }
            EntryKind::File(size) => Member::File { offset, size },
            EntryKind::Symlink(target) => Member::Link(target),
            // Relative to the archive's root, where a symbolic link's is relative to its own place.
            EntryKind::HardLink(target) => Member::Link([&b"/"[..], &target].concat()),
            _ => continue,
        };
        if !each(path, member)? {
            break;
        }
        reader.pass_over(|stream, bytes| {
            stream.at += bytes;
            stream.inner.seek_relative(bytes as i64)
        })?;
    }
    Ok(())
}

/// Lists the members of a plain tar archive by their place in the file.
fn index_archive(file: &File, limits: Limits) -> Result<HashMap<Vec<u8>, Member>> {
    let (mut members, mut names) = (HashMap::new(), 0);
    each_member(file, limits, |path, member| {
        // In a tree paths share their directories; here each is kept whole.
        names += path.len() as u64;
        if names > limits.names_bytes {
            return Err(input!("archive: the paths in it are more than the limit's {} bytes", limits.names_bytes));
        }
        match members.entry(path) {
            Entry::Vacant(new) => {
                new.insert(member);
                Ok(true)
            }
            Entry::Occupied(old) => Err(input!("archive: {} is in it twice", show(old.key()))),
        }
    })?;
    Ok(members)
}

/// Whether a directory says that its files are the blobs of one image.
fn is_plain(dir: &Path) -> bool {
    let (path, mut version) = (dir.join("version"), Vec::new());
    // What is no file may make the open wait.
    let file = if path.is_file() { File::open(path).ok() } else { None };
    let read = file.is_some_and(|file| file.take(PLAIN.len() as u64).read_to_end(&mut version).is_ok());
    read && version == PLAIN && !dir.join("oci-layout").exists()
}

/// Members of an archive that are looked at to know an image: one has a few for each layer, a tree may have millions.
const MEMBERS_MAX: u32 = 1 << 16;

/// Whether `path` holds an image rather than a tree to be taken as it is: an `oci-layout` beside an `index.json`, a
/// `manifest.json` of docker's form, or one beside a `version` of skopeo's.
///
/// # Errors
/// The system's.
pub fn is_image(path: &Path) -> Result<bool> {
    let meta = fs::metadata(path).at(path)?;
    if meta.is_dir() {
        let there = |name: &str| path.join(name).is_file();
        return Ok(there("oci-layout") && there("index.json") || there("manifest.json") && is_plain(path));
    }
    // What a pipe gives can be had once only.
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
        // No archive of ours: who builds it as a tree says what is wrong with it.
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

/// Reads the image in `path` into a tree; `reference` chooses among several by tag.
///
/// # Errors
/// Anything that is not what its digests say; layers that break the format or the limits.
pub fn import(
    build: &Build,
    path: &Path,
    reference: Option<&str>,
    limits: Limits,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<(Tree, RunConfig)> {
    let blobs = if path.is_dir() {
        Blobs::Directory { dir: open_path(path).at(path)?, layout: !is_plain(path) }
    } else {
        let mut file = File::open(path).at(path)?;
        // What is no regular file, a pipe say, is read once and cannot be gone back in.
        let stream = !file.metadata().at(path)?.is_file() || {
            let mut magic = [0; 5];
            let count = file.read(&mut magic).at(path)?;
            file.seek(SeekFrom::Start(0)).at(path)?;
            is_packed(&magic[..count])
        };
        if stream {
            // Layers are read out of order: a stream must be laid down first.
            let mut spool = build.spool()?;
            let mut plain = unpack(file, limits)?.take(limits.bytes.saturating_add(1));
            if std::io::copy(&mut plain, &mut spool).at(path)? > limits.bytes {
                return Err(input!("archive: more than the limit's {} bytes", limits.bytes));
            }
            spool.seek(SeekFrom::Start(0)).at(path)?;
            drop(plain);
            file = spool;
        }
        let members = index_archive(&file, limits)?;
        Blobs::Archive { file, members }
    };
    let docker = matches!(&blobs, Blobs::Archive { members, .. } if members.contains_key(&b"manifest.json"[..])
        && [&b"oci-layout"[..], b"index.json"].iter().any(|name| !members.contains_key(*name)));
    if docker {
        return import_docker(build, &blobs, reference, limits, notes, progress);
    }
    let manifest = if matches!(blobs, Blobs::Directory { layout: false, .. }) {
        match blobs.json("manifest.json", None, limits)? {
            One::Of(index) => choose(&blobs, index, reference, limits, 0)?,
            One::Image(_) if reference.is_some() => {
                return Err(input!("manifest.json: one image, without a name; leave --ref out"));
            }
            One::Image(manifest) => manifest,
        }
    } else {
        if blobs.open("oci-layout").and(blobs.open("index.json")).is_err_and(|error| matches!(error, Error::Input(_))) {
            return Err(Error::Foreign(
                "no OCI layout (oci-layout, index.json) nor docker-archive (manifest.json)".into(),
            ));
        }
        choose(&blobs, blobs.json("index.json", None, limits)?, reference, limits, 0)?
    };
    if manifest.layers.len() > limits.layers {
        return Err(input!("{} layers; {} are allowed", manifest.layers.len(), limits.layers));
    }
    let (config_path, config_digest) = blob_path(&manifest.config.digest)?;
    let configuration: Configuration = blobs.json(&config_path, Some((config_digest, manifest.config.size)), limits)?;
    let diff_ids = diff_ids(&configuration, manifest.layers.len())?;
    progress.expect(manifest.layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.size)));
    let (mut tree, mut room) = (Tree::default(), limits);
    for (number, layer) in manifest.layers.iter().enumerate() {
        let (path, digest) = blob_path(&layer.digest)?;
        let (reader, size) = blobs.open(&path)?;
        let what = format!("layer {} ({})", number + 1, layer.digest);
        if size != layer.size {
            return Err(input!("{what}: {size} bytes, its manifest says {}", layer.size));
        }
        let diff_id = diff_ids.get(number).copied();
        let used = apply_layer(build, &mut tree, reader, &what, Some(digest), diff_id, limits, room, notes, progress)?;
        room = room.without(used);
    }
    Ok((tree, run_config(configuration)))
}

/// The digests of the unpacked layers, when the configuration gives them all.
fn diff_ids(configuration: &Configuration, layers: usize) -> Result<Vec<Digest>> {
    let ids = &configuration.rootfs.diff_ids;
    if !ids.is_empty() && ids.len() != layers {
        return Err(input!("the configuration names {} layers, the manifest {layers}", ids.len()));
    }
    ids.iter().map(|id| Digest::parse(id)).collect()
}

/// Tags and digests that a message names at most.
const SHOWN: usize = 20;

/// What there is to choose from, for a message.
fn list<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    shown.join(", ") + if names.len() > SHOWN { ", …" } else { "" }
}

/// How well a tag is what was asked for: 2 if in full, 1 without the registry or path before it (`redis:7` for
/// `docker.io/library/redis:7`).
fn fit(tag: &str, wanted: &str) -> u8 {
    match tag.strip_suffix(wanted) {
        Some("") => 2,
        Some(rest) if rest.ends_with('/') => 1,
        _ => 0,
    }
}

/// What of `all` fits best, by `how` well each does; nothing where none does.
fn best<T>(all: Vec<T>, how: impl Fn(&T) -> u8) -> Vec<T> {
    let most = all.iter().map(&how).max().unwrap_or(0);
    all.into_iter().filter(|one| most > 0 && how(one) == most).collect()
}

impl Descriptor {
    /// What it is called: docker (from 25) gives its tag alone by the first, the whole name by the second.
    fn names(&self) -> impl Iterator<Item = &str> {
        let keys = ["org.opencontainers.image.ref.name", "io.containerd.image.name"];
        keys.into_iter().filter_map(|key| self.annotations.get(key)).map(String::as_str)
    }

    fn is_index(&self) -> bool {
        self.media_type.contains("index") || self.media_type.contains("manifest.list")
    }

    fn show(&self) -> String {
        let platform = self.platform.as_ref().map(|platform| {
            let variant = platform.variant.as_ref().map_or(String::new(), |variant| format!("/{variant}"));
            format!(" for {}/{}{variant}", platform.os, platform.architecture)
        });
        let (name, platform) = (self.names().last().unwrap_or_default(), platform.unwrap_or_default());
        if name.is_empty() {
            format!("{}{platform}", self.digest)
        } else {
            format!("{name} = {}{platform}", self.digest)
        }
    }
}

/// Finds the manifest that `reference`, a tag or a digest, or this machine asks for.
fn choose(blobs: &Blobs, index: Index, reference: Option<&str>, limits: Limits, depth: u32) -> Result<Manifest> {
    if depth > 4 {
        return Err(input!("index.json: indexes in indexes, deeper than 4"));
    }
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let all: Vec<String> = index.manifests.iter().map(Descriptor::show).collect();
    let mut fits: Vec<&Descriptor> = index.manifests.iter().collect();
    let mut below = None;
    if let Some(wanted) = reference {
        let how = |one: &&Descriptor| {
            let by_digest = if one.digest == wanted { 2 } else { 0 };
            one.names().map(|name| fit(name, wanted)).chain([by_digest]).max().unwrap_or(0)
        };
        let found = best(fits.clone(), how);
        if found.is_empty() && Digest::parse(wanted).is_ok() {
            // It may be one of those that an index here lists.
            fits.retain(|one| one.is_index());
            below = reference;
        } else {
            fits = found;
        }
    }
    // One image may have several tags.
    let mut seen = HashSet::new();
    fits.retain(|one| seen.insert(&one.digest));
    if fits.len() > 1 {
        let ours = |platform: &Platform| platform.architecture == architecture && platform.os == "linux";
        fits.retain(|one| one.platform.as_ref().is_none_or(ours));
    }
    let [descriptor] = fits[..] else {
        return Err(input!(
            "index.json: {} images fit{}; choose one with --ref, by tag or digest (there are: {})",
            fits.len(),
            reference.map(|wanted| format!(" {wanted:?}")).unwrap_or_default(),
            list(&all)
        ));
    };
    let (path, digest) = blob_path(&descriptor.digest)?;
    let expect = Some((digest, descriptor.size));
    if descriptor.is_index() {
        return choose(blobs, blobs.json(&path, expect, limits)?, below, limits, depth + 1);
    }
    blobs.json(&path, expect, limits)
}

fn import_docker(
    build: &Build,
    blobs: &Blobs,
    reference: Option<&str>,
    limits: Limits,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<(Tree, RunConfig)> {
    let manifests: Vec<DockerManifest> = blobs.json("manifest.json", None, limits)?;
    let mut fits: Vec<&DockerManifest> = manifests.iter().collect();
    if let Some(wanted) = reference {
        fits = best(fits, |one| one.repo_tags.iter().flatten().map(|tag| fit(tag, wanted)).max().unwrap_or(0));
    }
    let [manifest] = fits[..] else {
        let tags: Vec<&str> = manifests.iter().flat_map(|m| m.repo_tags.iter().flatten()).map(String::as_str).collect();
        return Err(input!(
            "manifest.json: {} images fit; choose one with --ref (there are: {})",
            fits.len(),
            list(&tags)
        ));
    };
    if manifest.layers.len() > limits.layers {
        return Err(input!("{} layers; {} are allowed", manifest.layers.len(), limits.layers));
    }
    let configuration: Configuration = blobs.json(&manifest.config, None, limits)?;
    let diff_ids = diff_ids(&configuration, manifest.layers.len())?;
    let sizes = manifest.layers.iter().map(|path| Ok(blobs.open(path)?.1));
    progress.expect(sizes.sum::<Result<u64>>()?);
    let (mut tree, mut room) = (Tree::default(), limits);
    for (number, path) in manifest.layers.iter().enumerate() {
        let (reader, _) = blobs.open(path)?;
        let what = format!("layer {} ({path})", number + 1);
        let diff_id = diff_ids.get(number).copied();
        let used = apply_layer(build, &mut tree, reader, &what, None, diff_id, limits, room, notes, progress)?;
        room = room.without(used);
    }
    Ok((tree, run_config(configuration)))
}

/// Applies a layer within `room`, what the layers below have left of the limits; returns what it has taken of it.
#[expect(clippy::too_many_arguments, reason = "one call from each format; a struct would only name them again")]
fn apply_layer(
    build: &Build,
    tree: &mut Tree,
    reader: impl Read,
    what: &str,
    digest: Option<Digest>,
    diff_id: Option<Digest>,
    limits: Limits,
    room: Limits,
    notes: &mut Notes,
    progress: &Progress,
) -> Result<Used> {
    // Counted packed, as the manifest counts: what it unpacks to nobody knows before.
    let mut packed = Hashing::new(progress.watch(reader));
    let result = {
        let mut plain = Hashing::new(unpack(&mut packed, limits)?);
        let silent = Progress::silent();
        apply_tar(build, tree, &mut plain, true, room, notes, &silent)
            .and_then(|used| diff_id.map_or(Ok(()), |id| plain.finish(what, id)).map(|()| used))
    };
    // A layer that is not itself explains every other complaint about it.
    let layer = |error| match error {
        Error::Input(text) | Error::Foreign(text) => input!("{what}: {text}"),
        other => other,
    };
    match digest {
        Some(digest) => packed.finish(what, digest).and(result.map_err(layer)),
        None => result.map_err(layer),
    }
}
