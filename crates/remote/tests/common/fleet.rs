//! Fleets' stores in directories, and a web server that shows them.

// Each test program uses a part of this.
#![allow(dead_code)]

use super::{Answer, Host, Request, answer, noise};
use pagefold_image::build::{self, Omissions};
use pagefold_image::digest::Digest;
use pagefold_image::fleet::{self, Indexed, PIECE};
use pagefold_image::progress::Progress;
use std::fs;
use std::path::{Path, PathBuf};

/// Builds an image of these files. Returns its digest.
pub fn build(host: &Host, name: &str, files: &[(&str, Vec<u8>)]) -> String {
    let dir = host.dir.path().join(format!("tree-{name}"));
    for (path, bytes) in files {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        // Equal trees on any host have equal digests.
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
    }
    let store = host.store();
    let (build, mut notes) = (store.build().unwrap(), Omissions::default());
    let tree = build::from_directory(&build, &dir, Default::default(), &mut notes, &Progress::silent()).unwrap();
    build.publish(name, &tree, "test", Default::default(), notes.lines()).unwrap().digest.to_string()
}

/// Two versions: many small files, a large one of several pieces, and a file of each version's own.
pub fn version(number: u32) -> Vec<(&'static str, Vec<u8>)> {
    let mut files = vec![
        ("lib/large", noise(1, 2 * PIECE as usize + 1000)),
        ("lib/text", b"words that compress ".repeat(10_000)),
        ("etc/small", b"inline".to_vec()),
        ("app", noise(10 + number, 100_000)),
    ];
    let names: Vec<&'static str> = (0..200).map(|n| &*format!("share/file-{n}").leak()).collect();
    files.extend(names.iter().zip(100u32..).map(|(name, n)| (*name, noise(n, 500))));
    files
}

/// A directory as a fleet's store.
pub struct Fleet(pub tempfile::TempDir);

impl Fleet {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn address(&self, image: &str) -> String {
        format!("file://{}/{image}", self.0.path().display())
    }

    pub fn files(&self, kind: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.path().join("packs")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == kind)).collect()
    }

    /// The pieces of the store, with their packs.
    pub fn pieces(&self) -> Vec<(PathBuf, Indexed)> {
        let read = |path: PathBuf| {
            let (pack, pieces) = fleet::decode_index(&fs::read(path).unwrap()).unwrap().unwrap();
            let path = self.0.path().join(format!("packs/{}.pack", pack.hex()));
            pieces.into_iter().map(move |piece| (path.clone(), piece))
        };
        self.files("index").into_iter().flat_map(read).collect()
    }

    /// Changes a byte of each piece of an object.
    pub fn damage(&self, content: &[u8]) {
        let object = Digest::of(content);
        for (path, piece) in self.pieces().into_iter().filter(|(_, piece)| piece.object == object) {
            let mut bytes = fs::read(&path).unwrap();
            bytes[piece.offset as usize + piece.packed as usize / 2] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
}

/// What a web server with these files answers, which knows no tags of versions.
pub fn web(request: &Request, root: &Path) -> Answer {
    match fs::read(root.join(request.path.trim_start_matches("/static/"))) {
        Ok(bytes) => part(request, &bytes),
        Err(_) => answer(404, b""),
    }
}

/// The bytes, or the range that was asked for.
pub fn part(request: &Request, bytes: &[u8]) -> Answer {
    let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let Some((begin, end)) = range.and_then(|(begin, end)| Some((begin.parse().ok()?, end.parse::<usize>().ok()?)))
    else {
        return answer(200, bytes);
    };
    if begin >= bytes.len() {
        return answer(416, b"");
    }
    let end = (end + 1).min(bytes.len());
    answer(206, &bytes[begin..end]).with("content-range", &format!("bytes {begin}-{}/{}", end - 1, bytes.len()))
}
