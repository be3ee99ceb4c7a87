//! Memory for images that differ by an upgrade.

use super::files::{cached_bytes, drop_cached, read_data, xorshift};
use super::server::Server;
use super::{Failure, MemoryRow, Results, Scratch, Size};
use crate::undo::command;
use std::path::{Path, PathBuf};

/// Copies files of this system into `to` until there are `mib` of them: real content, the same for every image.
fn copy_tree(to: &Path, mib: u64) -> Result<Vec<PathBuf>, Failure> {
    let mut copied = Vec::new();
    let mut bytes = 0;
    let mut pending =
        vec![PathBuf::from("/usr/bin"), PathBuf::from("/usr/lib/x86_64-linux-gnu"), PathBuf::from("/usr/share")];
    pending.reverse();
    while let Some(directory) = pending.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let Ok(metadata) = path.symlink_metadata() else { continue };
            if metadata.is_dir() {
                pending.push(path);
            } else if metadata.is_file() && metadata.len() < 32 << 20 {
                let target = to.join(format!("{:05}", copied.len()));
                if std::fs::copy(&path, &target).is_ok() {
                    bytes += metadata.len();
                    copied.push(target);
                }
            }
            if bytes >= mib << 20 {
                return Ok(copied);
            }
        }
    }
    Ok(copied)
}

/// Makes the images: image n is installed apart, after one package (every 20th file) was upgraded to version n.
fn make_images(scratch: &Scratch, size: &Size) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let tree = scratch.dir("tree")?;
    let directory = scratch.dir("images")?;
    let files = copy_tree(&tree, size.tree_mib)?;
    let mut images = Vec::new();
    for n in 0..size.images {
        for (at, file) in files.iter().enumerate().filter(|(at, _)| at % 20 == 7) {
            let mut bytes = std::fs::read(file)?;
            // Longer than before and different from the middle on, as a rebuilt program is.
            let mut state = (n * 1_000_003 + at + 1) as u64;
            let half = bytes.len() / 2;
            bytes[half..].chunks_mut(8).for_each(|word| {
                let fresh = xorshift(&mut state).to_le_bytes();
                word.copy_from_slice(&fresh[..word.len()]);
            });
            bytes.extend(std::iter::repeat_n(n as u8 + 1, 5000));
            std::fs::write(file, bytes)?;
        }
        let image = directory.join(format!("image{n}.raw"));
        let blocks = format!("{}", (size.tree_mib * 3 / 2 + 64) * 256);
        let tree = tree.display().to_string();
        command("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &tree, &image.display().to_string(), &blocks])?;
        images.push(image);
    }
    std::fs::remove_dir_all(tree)?;
    Ok((directory, images))
}

pub(super) fn memory(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    match make_images(scratch, size) {
        Ok((directory, images)) => {
            memory_of(scratch, "files of this system, every 20th rebuilt", &directory, &images, results)?;
            std::fs::remove_dir_all(directory)?;
        }
        Err(error) => results.skipped.push(format!("memory of images: {error}")),
    }
    let Some(inputs) = &size.inputs else {
        results.skipped.push("memory of real packages: bench/fetch-images.sh DIR, then --inputs DIR".to_owned());
        return Ok(());
    };
    for name in ["redis", "nginx", "mariadb", "postgres"] {
        match upgraded_images(scratch, inputs, name) {
            Ok((directory, images)) => {
                memory_of(scratch, &format!("Debian with {name}, two versions"), &directory, &images, results)?;
                std::fs::remove_dir_all(directory)?;
            }
            Err(error) => results.skipped.push(format!("memory of {name}: {error}")),
        }
    }
    Ok(())
}

/// Disk images of a Debian root with each version of a package, as `bench/fetch-images.sh` fetched them.
fn upgraded_images(scratch: &Scratch, inputs: &Path, name: &str) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let directory = scratch.dir(&format!("real-{name}"))?;
    let merged = scratch.dir("merged")?;
    let mut images = Vec::new();
    for version in [1, 2] {
        let (base, layer) = (inputs.join("base"), inputs.join(format!("layers/{name}-{version}")));
        if !layer.is_dir() {
            return Err(format!("{} is not there", layer.display()).into());
        }
        let at = merged.display().to_string();
        let layers = format!("lowerdir={}:{}", layer.display(), base.display());
        command("mount", &["-t", "overlay", "-o", &layers, "pagefold-bench", &at])?;
        let image = directory.join(format!("{name}{version}.raw"));
        let made =
            command("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &at, &image.display().to_string(), "1G"]);
        command("umount", &[&at])?;
        made?;
        images.push(image);
    }
    Ok((directory, images))
}

/// All images read through the kernel's page cache, as overlays on one base, and through the mount.
fn memory_of(
    scratch: &Scratch,
    what: &str,
    directory: &Path,
    images: &[PathBuf],
    results: &mut Results,
) -> Result<(), Failure> {
    let report = pagefold_disk::scan::scan(images, |_, _| ());
    let unique_bytes = report.equal.first().ok_or("an empty scan")?.unique_bytes;
    let mut row = |name: &str, bytes: u64| {
        results.memory.push(MemoryRow {
            what: what.to_owned(),
            name: name.to_owned(),
            images: images.len(),
            bytes,
            unique_bytes,
            over_unique_percent: 100.0 * (bytes as f64 / unique_bytes as f64 - 1.0),
        });
    };
    let mut sums = Vec::new();
    let mut kernel = 0;
    for image in images {
        drop_cached(image)?;
        sums.push(read_data(image)?);
        kernel += cached_bytes(image)?;
    }
    row("plain files, kernel's page cache", kernel);
    if let Ok(bytes) = overlays(scratch, images) {
        row("qcow2 overlays on one base (clones only)", bytes);
    }
    images.iter().try_for_each(|image| drop_cached(image))?;
    let cache_mib = (unique_bytes >> 20) as usize + 64;
    let server = Server::start(scratch, "cache", directory, cache_mib, None)?;
    let idle = server.anonymous_bytes()?;
    for (image, sum) in images.iter().zip(&sums) {
        let name = image.file_name().ok_or("no name")?;
        if read_data(&server.at.join(name))? != *sum {
            return Err("the mount gives other bytes than the file".into());
        }
    }
    let status = server.status()?;
    let kept: u64 = images.iter().map(|image| cached_bytes(image)).sum::<Result<u64, _>>()?;
    row("pagefold disk: blocks and bookkeeping", status.resident_bytes + status.metadata_bytes + kept);
    row("pagefold disk: growth of the process", server.anonymous_bytes()?.saturating_sub(idle) + kept);
    Ok(())
}

/// What the page cache would hold of a base and of overlays with the clusters that differ, all read.
fn overlays(scratch: &Scratch, images: &[PathBuf]) -> Result<u64, Failure> {
    let directory = scratch.dir("overlays")?;
    let base = images[0].display().to_string();
    let mut bytes = cached_bytes(&images[0])?;
    for (n, image) in images.iter().enumerate().skip(1) {
        let overlay = directory.join(format!("{n}.qcow2"));
        let (from, to) = (image.display().to_string(), overlay.display().to_string());
        command("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "-B", &base, "-F", "raw", &from, &to])?;
        drop_cached(&overlay)?;
        read_data(&overlay)?;
        bytes += cached_bytes(&overlay)?;
    }
    std::fs::remove_dir_all(directory)?;
    Ok(bytes)
}
