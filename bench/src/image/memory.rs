//! What trees hold in memory: all of them read, and their programs run.

use super::composefs::Composefs;
use super::trees::*;
use crate::process::{Failure, sh};
use crate::scratch::Scratch;
use pagefold_image::mount::{self, Options};
use pagefold_image::progress::Progress;
use pagefold_image::scan;
use pagefold_image::store::{ImageRecord, Store};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One pair of versions: what reading everything holds in memory, by each way of keeping the trees.
pub(super) struct Pair<'a> {
    pub(super) name: &'a str,
    /// Plain copies of both trees, on the scratch file system.
    pub(super) plain: [PathBuf; 2],
    /// Base and the two layers, when the trees are made of them.
    pub(super) layers: Option<[PathBuf; 3]>,
}

/// The ways of keeping a pair of trees, and the rows that they give.
struct Ways<'a> {
    scratch: &'a Scratch,
    pair: &'a Pair<'a>,
    lists: [Vec<(PathBuf, u64)>; 2],
    /// Bytes of equal files, which sharing of files could save.
    ideal: u64,
    /// Resident bytes of the plain directories.
    plain: u64,
    out: &'a mut Vec<Value>,
}

impl Ways<'_> {
    fn dir(&self, name: &str) -> Result<PathBuf, Failure> {
        self.scratch.sub(&format!("{name}-{}", self.pair.name))
    }

    fn files(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.lists.iter().flatten().map(|(path, _)| path.clone())
    }

    fn row(&mut self, peer: &str, bytes: u64, metadata: u64) {
        let percent = |part: u64, whole: u64| (part as f64 * 1000.0 / whole.max(1) as f64).round() / 10.0;
        self.out.push(json!({
            "bench": "read-all", "pair": self.pair.name, "peer": peer, "resident_bytes": bytes,
            "metadata_bytes": metadata, "saved_percent": percent(self.plain.saturating_sub(bytes + metadata), self.plain),
            "of_ideal_percent": percent(self.plain.saturating_sub(bytes), self.ideal),
        }));
    }

    fn plain(&mut self) -> Result<(), Failure> {
        evict(self.files());
        self.lists.iter().try_for_each(|list| read_all(list).map(drop))?;
        self.plain = resident(self.files(), false);
        self.row("plain directories", self.plain, 0);
        evict(self.files());
        Ok(())
    }

    fn overlayfs(&mut self) -> Result<(), Failure> {
        let Some([base, first, second]) = &self.pair.layers else { return Ok(()) };
        let mut mounts = Vec::new();
        for (number, layer) in [first, second].into_iter().enumerate() {
            let at = self.dir(&format!("overlay-{number}"))?;
            let (layer, base) = (layer.display(), base.display());
            sh(&format!("mount -t overlay -o ro,lowerdir={layer}:{base} bench {}", at.display()))?;
            mounts.push(at);
        }
        let lower = || [base, first, second].into_iter().flat_map(|dir| names_below(dir));
        evict(lower());
        mounts.iter().try_for_each(|at| read_all(&files(at)).map(drop))?;
        self.row("overlayfs, shared base layer", resident(lower(), false), 0);
        evict(lower());
        mounts.iter().try_for_each(|at| Ok(sh(&format!("umount {}", at.display()))?))
    }

    /// A hard-linked store: one inode per content, with one owner, mode and time for all its names.
    fn hard_links(&mut self) -> Result<(), Failure> {
        let linked = self.dir("linked")?;
        let mut first_of: HashMap<String, PathBuf> = HashMap::new();
        for (count, path) in self.files().enumerate() {
            let digest = pagefold_image::digest::hash_reader(&mut File::open(&path)?)?.0.hex();
            let target = linked.join(count.to_string());
            match first_of.get(&digest) {
                Some(first) => fs::hard_link(first, &target).or_else(|_| fs::copy(path, &target).map(drop))?,
                None => {
                    fs::copy(path, &target)?;
                    first_of.insert(digest, target);
                }
            }
        }
        sh(&format!("sync -f {}", linked.display()))?;
        evict(self.files().chain(names_below(&linked)));
        read_all(&files(&linked))?;
        self.row("hard-linked store", resident(names_below(&linked), false), 0);
        Ok(fs::remove_dir_all(&linked)?)
    }

    fn composefs(&mut self, composefs: &Composefs) -> Result<(), Failure> {
        let (objects, images) = (self.dir("cfs")?, self.dir("cfs-images")?);
        let mut mounts = Vec::new();
        for (number, dir) in self.pair.plain.iter().enumerate() {
            let (image, at) = (images.join(number.to_string()), self.dir(&format!("cfs-{number}"))?);
            composefs.build(&objects, dir, &image)?;
            composefs.mount(&objects, &image, &at)?;
            mounts.push(at);
        }
        sh(&format!("sync -f {}", objects.display()))?;
        mounts.iter().for_each(|at| evict(names_below(at)));
        evict(names_below(&objects).into_iter().chain(names_below(&images)));
        mounts.iter().try_for_each(|at| read_all(&files(at)).map(drop))?;
        let of = |dir: &Path| resident(names_below(dir), false);
        self.row("composefs' own tools", of(&objects), of(&images));
        mounts.iter().try_for_each(|at| sh(&format!("umount {}", at.display())))?;
        fs::remove_dir_all(&objects)?;
        Ok(fs::remove_dir_all(&images)?)
    }

    fn pagefold(&mut self, store: &Store, records: &[ImageRecord; 2]) -> Result<[PathBuf; 2], Failure> {
        let mounts = [self.dir("mnt-1")?, self.dir("mnt-2")?];
        for (record, at) in records.iter().zip(&mounts) {
            mount::mount(store, record, at, &Options::default())?;
        }
        sh(&format!("sync -f {}", store.root().display()))?;
        evict(self.files());
        evict_store(store, &mounts);
        let read: Vec<u64> = mounts.iter().map(|at| read_all(&files(at))).collect::<Result<_, _>>()?;
        let expected: Vec<u64> = self.lists.iter().map(|list| list.iter().map(|(_, size)| size).sum()).collect();
        if read != expected {
            let name = self.pair.name;
            return Err(format!("{name}: the mounts gave {read:?} bytes, the directories {expected:?}").into());
        }
        let (objects, metadata) = pagefold_memory(store, &mounts);
        self.row("pagefold", objects, metadata);
        Ok(mounts)
    }
}

/// Measures a pair in all ways; the mounts of its images stay.
pub(super) fn memory_of_pair(
    scratch: &Scratch,
    pair: &Pair,
    composefs: Option<&Composefs>,
    out: &mut Vec<Value>,
) -> Result<(Store, [PathBuf; 2], [ImageRecord; 2]), Failure> {
    let lists = [files(&pair.plain[0]), files(&pair.plain[1])];
    let predicted = scan::trees(&pair.plain, &Progress::silent())?;
    let mut ways = Ways { scratch, pair, lists, ideal: predicted.file.duplicate_bytes, plain: 0, out };
    ways.plain()?;
    ways.overlayfs()?;
    ways.hard_links()?;
    let store = Store::open(&scratch.dir.join(format!("store-{}", pair.name)), "default")?;
    let records = [build_tree(&store, "1", &pair.plain[0])?.0, build_tree(&store, "2", &pair.plain[1])?.0];
    if let Some(composefs) = composefs {
        ways.composefs(composefs)?;
    }
    let mounts = ways.pagefold(&store, &records)?;
    Ok((store, mounts, records))
}

/// Runs the pair's programs from plain directories and from mounts, and counts the trees' pages in memory.
pub(super) fn run_time(
    scratch: &Scratch,
    pair: &Pair,
    work: &str,
    store: &Store,
    records: &[ImageRecord; 2],
    out: &mut Vec<Value>,
) -> Result<(), Failure> {
    let upper = scratch.sub(&format!("run-{}", pair.name))?;
    sh(&format!("mount -t tmpfs tmpfs {}", upper.display()))?;
    let run = |root: &Path| -> Result<(), Failure> {
        sh(&format!(
            "mount -t proc proc {0}/proc && mount --bind /dev {0}/dev && mount -t tmpfs tmpfs {0}/tmp",
            root.display()
        ))?;
        let outcome =
            Command::new("timeout").args(["400", "chroot"]).arg(root).args(["/bin/sh", "-c", work]).output()?;
        sh(&format!("umount -l {0}/tmp {0}/dev {0}/proc", root.display()))?;
        if outcome.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&outcome.stderr).chars().take(300).collect::<String>();
        Err(format!("{}: {}: {text}", pair.name, outcome.status).into())
    };
    let plain_files = || pair.plain.iter().flat_map(|dir| names_below(dir));
    evict(plain_files());
    for root in &pair.plain {
        // Over a scratch layer as well, so that both do the same.
        let at = scratch.sub("run-plain")?;
        let layer = upper.join(format!("plain-{}", root.file_name().expect("a name").to_string_lossy()));
        sh(&format!(
            "mkdir -p {0}/u {0}/w && mount -t overlay -o lowerdir={1},upperdir={0}/u,workdir={0}/w bench {2}",
            layer.display(),
            root.display(),
            at.display()
        ))?;
        let result = run(&at);
        sh(&format!("umount -l {}", at.display()))?;
        result?;
    }
    let plain = resident(plain_files(), false);
    evict(plain_files());
    evict_store(store, &[]);
    let mut tops = Vec::new();
    for (number, record) in records.iter().enumerate() {
        let at = scratch.sub(&format!("run-mnt-{number}"))?;
        let options = Options { upper: Some(upper.join(format!("mount-{number}"))), ..Options::default() };
        mount::mount(store, record, &at, &options)?;
        let result = run(&at);
        tops.push(at);
        result?;
    }
    let (objects, metadata) = pagefold_memory(store, &[]);
    for at in tops {
        mount::umount(&at, true)?;
    }
    sh(&format!("umount -l {}", upper.display()))?;
    let saved = plain.saturating_sub(objects + metadata);
    out.push(
        json!({ "bench": "run time", "pair": pair.name, "plain_bytes": plain, "pagefold_bytes": objects + metadata,
        "saved_percent": (saved as f64 * 1000.0 / plain.max(1) as f64).round() / 10.0 }),
    );
    Ok(())
}
