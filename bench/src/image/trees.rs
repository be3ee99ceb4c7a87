//! Trees of files as the parts of the bench handle them: read, built, mounted, counted in the page cache, and evicted from
//! it.

use crate::process::Failure;
use pagefold_image::build;
use pagefold_image::build::Omissions;
use pagefold_image::progress::Progress;
use pagefold_image::stat::resident_bytes;
use pagefold_image::store::{ImageRecord, Store};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// All regular files below `root`, each inode once.
pub(crate) fn files(root: &Path) -> Vec<(PathBuf, u64)> {
    let (mut seen, mut list, mut todo) = (HashSet::new(), Vec::new(), vec![root.to_path_buf()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                todo.push(entry.path());
            } else if meta.is_file() && seen.insert((meta.dev(), meta.ino())) {
                list.push((entry.path(), meta.len()));
            }
        }
    }
    list.sort();
    list
}

pub(crate) fn evict(paths: impl IntoIterator<Item = PathBuf>) {
    paths.into_iter().filter_map(|path| File::open(path).ok()).for_each(|file| crate::files::evict(&file));
}

pub(crate) fn read_all(list: &[(PathBuf, u64)]) -> Result<u64, Failure> {
    let (mut buffer, mut total) = (vec![0; 1 << 20], 0);
    for (path, _) in list {
        let mut file = File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => total += count as u64,
            }
        }
    }
    Ok(total)
}

pub(super) fn resident(list: impl IntoIterator<Item = PathBuf>, mapped: bool) -> u64 {
    list.into_iter().map(|path| resident_bytes(&path, mapped).unwrap_or(0)).sum()
}

pub(super) fn build_tree(store: &Store, name: &str, dir: &Path) -> Result<(ImageRecord, Duration), Failure> {
    let start = Instant::now();
    let (building, mut notes) = (store.build()?, Omissions::default());
    let tree = build::from_directory(&building, dir, Default::default(), &mut notes, &Progress::silent())?;
    let record = building.publish(name, &tree, "bench", Default::default(), notes.lines())?;
    Ok((record, start.elapsed()))
}

pub(crate) fn names_below(root: &Path) -> Vec<PathBuf> {
    files(root).into_iter().map(|(path, _)| path).collect()
}

/// Memory of the files that lie inside the metadata images, per mount.
pub(super) fn inline_memory(mounts: &[PathBuf]) -> u64 {
    let all = mounts.iter().flat_map(|at| files(at));
    let inline = all.filter(|(_, size)| (1..=pagefold_image::tree::INLINE_MAX).contains(size));
    inline.map(|(path, _)| resident_bytes(&path, true).unwrap_or(0)).sum()
}

/// The metadata images and what belongs to them. The objects of link farms are counted as objects.
fn metadata_below(store: &Store) -> Vec<PathBuf> {
    let trees = store.objects_dir().parent().expect("a domain").join("trees");
    let is_link = |path: &Path| path.ancestors().any(|dir| dir.ends_with("objects"));
    names_below(&trees).into_iter().filter(|path| !is_link(path.strip_prefix(&trees).expect("below"))).collect()
}

/// The store's objects, metadata images, and the inline files of the mounts: all that a mount can have in memory.
pub(super) fn pagefold_memory(store: &Store, mounts: &[PathBuf]) -> (u64, u64) {
    let objects = resident(names_below(&store.objects_dir()), false);
    let trees = resident(metadata_below(store), false);
    (objects, trees + inline_memory(mounts))
}

pub(super) fn evict_store(store: &Store, mounts: &[PathBuf]) {
    mounts.iter().for_each(|at| evict(names_below(at)));
    evict(names_below(&store.objects_dir()));
    evict(metadata_below(store));
}
