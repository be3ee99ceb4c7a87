//! Archives from everywhere: an image has what GNU tar unpacks, and what umoci and podman make of a layer, in names, kinds,
//! modes, owners, times, links, attributes, bytes.
//!
//! The test takes the archives that the machine has (crates, Go's and Python's own tests). `PAGEFOLD_ARCHIVES` names files
//! and directories to compare instead, with colons between them. Run it as root: GNU tar sets owners for root alone.

use pagefold_image::build::{self, Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::digest::Digest;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tar::Reader;
use pagefold_image::tree::{FileKind, Id, Meta, Tree, show, split};
use pagefold_image::unpack;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

/// What an archive holds, path by path: a description, and the metadata of what has an entry of its own.
type Listing = BTreeMap<String, (String, Option<Meta>)>;

/// Most bytes of an archive that is taken without being named.
const BYTES_MAX: u64 = 200_000;
/// Most archives of one place that are.
const COUNT_MAX: usize = 60;

/// Archives that an image and another program read differently, by parts of their names, and why ours is right. Readers
/// differ about most of these, so that one archive would be two.
const ARGUED: &[(&[&str], &str)] = &[
    (&["sparse-formats.tar"], "parts of one byte: GNU tar takes each one from the next block, and loses its way"),
    (&["gnu-sparse-many-zeros.tar"], "a map of more than 2^20 parts"),
    (&["nil-uid.tar", "ustar-file-reg.tar", "gnu-incremental.tar"], "no end mark: it may be cut off"),
    (&["pax-pos-size-file.tar"], "two sizes for one entry"),
    (&["pax-path-hdr.tar"], "an extended header that belongs to no entry"),
    (&["pax-global-records.tar"], "a global header that names one file: some take it for the next one, some for none"),
    (&["invalid-go17.tar"], "a prefix where GNU tar has other fields: readers in Go take it for a part of the name"),
    (&["/xattrs.tar"], "umoci and podman leave out labels of SELinux"),
    (&["gnu-long-nul.tar", "pax-nul-path.tar"], "some cut names at a NUL, others do not"),
    (&["pax-bad-mtime-file.tar", "tar_pax_timestamps.tar"], "a time that is no number: GNU tar takes another one"),
    (&["gnu-multi-hdrs.tar", "pax-multi-hdrs.tar"], "two names for one entry"),
    (
        &["hdr-only.tar", "testtar.tar", "tar_directory_1.tar", "tar_hardlink_1.tar"],
        "data where an entry can have none",
    ),
    (&["plexus_archiver_tar.tar", "tar_concatenated.tar"], "data behind the end: a second archive for others"),
    (&["tar_timestamp_overflow.tar"], "a number that begins with NULs"),
    (&["xattr_header_libarchive.tar"], "GNU tar does not know LIBARCHIVE.xattr, and loses the attributes"),
    (&["solaris_tar_acl.tar"], "lists of Solaris, in entries of their own"),
    (&["acl_posix1e.tar", "acl_pax_posix1e.tar"], "GNU tar leaves the mode too wide where it cannot set a list"),
];

/// Opens an archive; a Debian package is opened at its files.
fn open(path: &Path) -> Box<dyn Read> {
    if path.extension().is_some_and(|end| end == "deb") {
        let out = Command::new("dpkg-deb").arg("--fsys-tarfile").arg(path).output().unwrap();
        return Box::new(std::io::Cursor::new(out.stdout));
    }
    Box::new(File::open(path).unwrap())
}

/// The directories that have entries of their own: others have whatever owner, mode and time they are made with.
fn named(path: &Path, limits: Limits) -> BTreeSet<Vec<u8>> {
    let Ok(plain) = unpack(open(path), limits) else { return BTreeSet::new() };
    let (mut reader, mut found) = (Reader::new(plain, limits), BTreeSet::new());
    while let Ok(Some(entry)) = reader.next_entry() {
        if let Ok(parts) = split(&entry.path) {
            found.insert(parts.join(&b'/'));
        }
    }
    found
}

fn listing(tree: &Tree, named: &BTreeSet<Vec<u8>>) -> Listing {
    let (mut found, mut first) = (Listing::new(), HashMap::<Id, String>::new());
    tree.walk(|path, id| {
        let (inode, shown) = (tree.inode(id), show(path));
        let is_dir = matches!(inode.kind, FileKind::Dir(_));
        let what = match (&inode.kind, first.get(&id)) {
            (_, Some(other)) => format!("another name of {other}"),
            (FileKind::Dir(_), _) => "directory".to_string(),
            (kind, _) => format!("{kind:?}"),
        };
        first.entry(id).or_insert_with(|| shown.clone());
        let meta = (!is_dir || named.contains(path)).then(|| inode.meta.clone());
        found.insert(shown, (what, meta));
    });
    found
}

/// What the image of an archive has.
fn of_image(store: &Store, path: &Path, named: &BTreeSet<Vec<u8>>, limits: Limits) -> Result<Listing, String> {
    let build = store.build().unwrap();
    let (mut tree, mut notes) = (Tree::default(), Omissions::default());
    let plain = unpack(open(path), limits).map_err(|error| error.to_string())?;
    apply_archive(&build, &mut tree, plain, limits, &mut notes, &Progress::silent())
        .map_err(|error| error.to_string())?;
    Ok(listing(&tree, named))
}

/// Another program that unpacks archives.
#[derive(Clone, Copy)]
enum Peer {
    Tar,
    Umoci,
    Podman,
}

impl Peer {
    /// Unpacks `packed`, a plain archive, somewhere below `dir`; returns where.
    fn unpack(self, packed: &Path, dir: &Path) -> Result<PathBuf, String> {
        let out = dir.join("out");
        match self {
            Peer::Tar => {
                fs::create_dir(&out).unwrap();
                let attributes = ["--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls", "--selinux"];
                run(Command::new("tar").args(attributes).arg("-pxf").arg(packed).arg("-C").arg(&out))?;
                Ok(out)
            }
            Peer::Umoci => {
                layout(packed, &dir.join("layout"));
                run(Command::new("umoci").args(["raw", "unpack", "--image", LAYOUT]).arg(&out).current_dir(dir))?;
                Ok(out)
            }
            Peer::Podman => {
                layout(packed, &dir.join("layout"));
                let podman = |args: &[&str]| {
                    let mut command = Command::new("podman");
                    command.arg("--root").arg(out.join("root")).arg("--runroot").arg(out.join("run"));
                    run(command.args(["--storage-driver", "vfs"]).args(args).current_dir(dir))
                };
                let id = podman(&["pull", "--quiet", &format!("oci:{LAYOUT}")])?;
                Ok(podman(&["image", "mount", id.trim()])?.trim().into())
            }
        }
    }
}

/// What `command` prints, if it succeeds within a minute; else the last line that it says.
fn run(command: &mut Command) -> Result<String, String> {
    let mut limited = Command::new("timeout");
    limited.arg("60").arg(command.get_program()).args(command.get_args()).env("LC_ALL", "C");
    limited.current_dir(command.get_current_dir().unwrap_or(Path::new("/")));
    let told = limited.output().unwrap();
    let errors = String::from_utf8_lossy(&told.stderr);
    let said = errors.lines().rfind(|line| !line.trim().is_empty());
    if told.status.success() {
        Ok(String::from_utf8_lossy(&told.stdout).into_owned())
    } else {
        Err(said.unwrap_or("fails").to_string())
    }
}

/// The image of a layer, from its directory. Engines make names of it, and those have no capitals.
const LAYOUT: &str = "layout:latest";

/// Makes an image of one layer in `dir`.
fn layout(layer: &Path, dir: &Path) {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let blob = |kind: &str, bytes: &[u8]| {
        let hex = Digest::of(bytes).hex();
        fs::write(blobs.join(&hex), bytes).unwrap();
        let (kind, len) = (format!("application/vnd.oci.image.{kind}"), bytes.len());
        (format!(r#"{{"mediaType":"{kind}","digest":"sha256:{hex}","size":{len}"#), hex)
    };
    let (layer, hex) = blob("layer.v1.tar", &fs::read(layer).unwrap());
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{}},"rootfs":{{"type":"layers","diff_ids":["sha256:{hex}"]}},
        "history":[{{"created_by":"a layer"}}]}}"#
    );
    let (config, _) = blob("config.v1+json", config.as_bytes());
    let manifest = format!(r#"{{"schemaVersion":2,"config":{config}}},"layers":[{layer}}}]}}"#);
    let (manifest, _) = blob("manifest.v1+json", manifest.as_bytes());
    let name = r#""annotations":{"org.opencontainers.image.ref.name":"latest"}"#;
    fs::write(dir.join("index.json"), format!(r#"{{"schemaVersion":2,"manifests":[{manifest},{name}}}]}}"#)).unwrap();
}

/// What a peer unpacks.
fn of_peer(
    peer: Peer,
    store: &Store,
    path: &Path,
    named: &BTreeSet<Vec<u8>>,
    dir: &Path,
    limits: Limits,
) -> Result<Listing, String> {
    let work = dir.join("work");
    fs::create_dir(&work).unwrap();
    let packed = work.join("packed");
    // Unpacked already: GNU tar would need a program for each compression.
    let unpacked = unpack(open(path), limits).map_err(|error| error.to_string());
    let copied = unpacked.and_then(|mut plain| {
        std::io::copy(&mut plain, &mut File::create(&packed).unwrap()).map_err(|error| error.to_string())
    });
    let listed = copied.and_then(|_| {
        let out = peer.unpack(&packed, &work)?;
        let (build, mut notes) = (store.build().unwrap(), Omissions::default());
        let tree = build::from_directory(&build, &out, Default::default(), &mut notes, &Progress::silent());
        Ok(listing(&tree.map_err(|error| error.to_string())?, named))
    });
    fs::remove_dir_all(&work).unwrap();
    listed
}

/// The archives at `path`, in order of their sizes.
fn archives(path: &Path) -> Vec<(u64, PathBuf)> {
    let (mut found, mut todo) = (Vec::new(), vec![path.to_path_buf()]);
    while let Some(path) = todo.pop() {
        let Ok(meta) = fs::metadata(&path) else { continue };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let ends = [".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".crate", ".deb"];
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if ends.iter().any(|end| name.ends_with(end)) {
            found.push((meta.len(), path));
        }
    }
    found.sort();
    found
}

/// Small archives that the machine has.
fn of_this_machine() -> Vec<PathBuf> {
    let told = |program: &str, args: &[&str]| {
        let out = Command::new(program).args(args).output().ok().filter(|out| out.status.success())?;
        Some(PathBuf::from(String::from_utf8(out.stdout).ok()?.trim()))
    };
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let places = [
        ("crates", cargo.map(|cargo| cargo.join("registry/cache"))),
        ("Go's archive/tar", told("go", &["env", "GOROOT"]).map(|root| root.join("src/archive/tar/testdata"))),
        ("Python's tests", told("python3", &["-c", "import os, test; print(os.path.dirname(test.__file__))"])),
    ];
    let mut all = Vec::new();
    for (what, place) in places {
        let mut found = place.map(|place| archives(&place)).unwrap_or_default();
        found.retain(|(size, _)| *size <= BYTES_MAX);
        found.truncate(COUNT_MAX);
        if found.is_empty() {
            println!("SKIPPED: {what}: not on this machine");
        }
        all.extend(found.into_iter().map(|(_, path)| path));
    }
    all
}

#[test]
fn an_image_has_what_gnu_tar_unpacks() {
    compare(Peer::Tar, "tar", 1);
}

#[test]
fn an_image_has_what_umoci_makes_of_a_layer() {
    compare(Peer::Umoci, "umoci", 2);
}

#[test]
fn an_image_has_what_podman_makes_of_a_layer() {
    compare(Peer::Podman, "podman", 8);
}

/// Compares all archives that are named, or one in `each` of this machine's, with `peer`. Its program is `name`.
fn compare(peer: Peer, name: &str, each: usize) {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: needs root");
        return;
    }
    if Command::new(name).arg("--version").output().is_err() {
        println!("SKIPPED: {name} is not installed");
        return;
    }
    let paths = match std::env::var("PAGEFOLD_ARCHIVES") {
        Ok(named) => named.split(':').flat_map(|path| archives(path.as_ref())).map(|(_, path)| path).collect(),
        Err(_) => of_this_machine().into_iter().step_by(each).collect::<Vec<_>>(),
    };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), "default").unwrap().without_sync();
    let limits = Limits { bytes: 4 << 30, ..Limits::default() };
    let began = UNIX_EPOCH.elapsed().unwrap().as_secs() as i64;
    let (mut counts, mut faults) = (BTreeMap::<&str, u32>::new(), 0);
    for path in &paths {
        let named = named(path, limits);
        let image = of_image(&store, path, &named, limits);
        let is_large = matches!(&image, Err(error) if error.contains("the limit leaves room"));
        let theirs =
            if is_large { Err(String::new()) } else { of_peer(peer, &store, path, &named, dir.path(), limits) };
        let (outcome, said) = match (image, theirs) {
            (Ok(image), Ok(theirs)) if image == untouched(theirs.clone(), &image, began) => ("equal", String::new()),
            (Ok(image), Ok(theirs)) => ("different", difference(&image, &untouched(theirs, &image, began))),
            (Err(_), _) if is_large => ("too large", String::new()),
            (Err(image), Err(_)) if image.contains("is packed with") => ("packed otherwise", String::new()),
            (Err(_), Err(_)) => ("both refuse it", String::new()),
            (Err(image), Ok(_)) => ("only the image refuses it", image),
            (Ok(_), Err(theirs)) => ("only the other refuses it", theirs),
        };
        let argued = ARGUED.iter().find(|(parts, _)| parts.iter().any(|part| path.to_string_lossy().contains(part)));
        if !said.is_empty() {
            println!(
                "{}: {outcome}: {said}{}",
                path.display(),
                argued.map_or(String::new(), |(_, why)| format!(" ({why})"))
            );
        }
        let is_ours = matches!(outcome, "different" | "only the image refuses it");
        *counts.entry(if is_ours && argued.is_some() { "argued" } else { outcome }).or_default() += 1;
        faults += u32::from(is_ours && argued.is_none());
    }
    println!("{name}: {} archives: {counts:?}", paths.len());
    assert!(paths.is_empty() || counts.contains_key("equal"), "{name} unpacks none of them");
    assert_eq!(faults, 0, "archives that differ, and of which ARGUED does not say why");
}

/// Gives directories the time that they have in the image if the other has written in them after it had set their times: it
/// makes links to elsewhere last, and takes a directory's entry when it comes.
fn untouched(mut tar: Listing, image: &Listing, began: i64) -> Listing {
    for (path, (what, meta)) in &mut tar {
        if let (Some(meta), Some((_, Some(of_image)))) = (meta, image.get(path))
            && what == "directory"
            && meta.mtime_s >= began
        {
            (meta.mtime_s, meta.mtime_ns) = (of_image.mtime_s, of_image.mtime_ns);
        }
    }
    tar
}

/// The first paths at which two listings differ.
fn difference(image: &Listing, tar: &Listing) -> String {
    let paths: BTreeSet<&String> = image.keys().chain(tar.keys()).collect();
    let differ = paths.into_iter().filter(|path| image.get(*path) != tar.get(*path));
    let show = |listing: &Listing, path| listing.get(path).map_or("nothing".into(), |found| format!("{found:?}"));
    let lines: Vec<String> = differ
        .take(5)
        .map(|path| format!("\n  {path}\n    image {}\n    other {}", show(image, path), show(tar, path)))
        .collect();
    lines.concat()
}
