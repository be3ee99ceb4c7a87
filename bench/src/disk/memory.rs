//! Memory for images that differ by an upgrade.

use super::args::Size;
use super::server::{Mount, Server};
use crate::files::{cached_bytes, copy_files, drop_cached, ext4, read_data};
use crate::process::{Failure, run};
use crate::record;
use crate::scratch::Scratch;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Makes the images: image n is installed apart, after one package (every 20th file) was upgraded to version n.
fn make_images(scratch: &Scratch, size: &Size) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let (tree, directory) = (scratch.sub("tree")?, scratch.sub("images")?);
    let from = ["/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/share"].map(PathBuf::from);
    let files = copy_files(&from, &tree, size.tree_mib, true)?;
    let mut images = Vec::new();
    for n in 0..size.images {
        for (at, file) in files.iter().enumerate().filter(|(at, _)| at % 20 == 7) {
            let mut bytes = std::fs::read(file)?;
            // Longer than before and different from the middle on, as a rebuilt program is.
            let half = bytes.len() / 2;
            fastrand::Rng::with_seed((n * 1_000_003 + at + 1) as u64).fill(&mut bytes[half..]);
            bytes.extend(std::iter::repeat_n(n as u8 + 1, 5000));
            std::fs::write(file, bytes)?;
        }
        let image = directory.join(format!("image{n}.raw"));
        ext4(&tree, &image, size.tree_mib * 3 / 2 + 64)?;
        images.push(image);
    }
    std::fs::remove_dir_all(tree)?;
    Ok((directory, images))
}

pub(super) fn memory(scratch: &Scratch, size: &Size, inputs: Option<&Path>) -> Result<(), Failure> {
    let mut rows = Vec::new();
    match make_images(scratch, size) {
        Ok((directory, images)) => {
            memory_of(scratch, "files of this system, every 20th rebuilt", &directory, &images, &mut rows)?;
            std::fs::remove_dir_all(directory)?;
        }
        Err(error) => eprintln!("SKIPPED: memory of images: {error}"),
    }
    if inputs.is_none() {
        eprintln!("SKIPPED: memory of real packages: bench/fetch-images.sh DIR, then --inputs DIR");
    }
    for (inputs, name) in
        inputs.iter().flat_map(|inputs| ["redis", "nginx", "postgres", "mariadb"].map(|name| (inputs, name)))
    {
        match upgraded_images(scratch, inputs, name) {
            Ok((directory, images)) => {
                memory_of(scratch, &format!("Debian with {name}, two versions"), &directory, &images, &mut rows)?;
                std::fs::remove_dir_all(directory)?;
            }
            Err(error) => eprintln!("SKIPPED: memory of {name}: {error}"),
        }
    }
    record::table(
        "Memory for images that differ by one upgrade, everything in them read",
        "what|name|images|MiB=bytes:M1|unique MiB=unique_bytes:M1|over it=over_unique_percent:1 %",
        rows,
    );
    Ok(())
}

/// Disk images of a Debian root with each version of a package, as `bench/fetch-images.sh` fetched them.
fn upgraded_images(scratch: &Scratch, inputs: &Path, name: &str) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let directory = scratch.sub(&format!("real-{name}"))?;
    let merged = scratch.sub("merged")?;
    let mut images = Vec::new();
    for version in [1, 2] {
        let (base, layer) = (inputs.join("base"), inputs.join(format!("layers/{name}-{version}")));
        if !layer.is_dir() {
            return Err(format!("{} is not there", layer.display()).into());
        }
        let at = merged.display().to_string();
        let layers = format!("lowerdir={}:{}", layer.display(), base.display());
        run("mount", &["-t", "overlay", "-o", &layers, "pagefold-bench", &at])?;
        let image = directory.join(format!("{name}{version}.raw"));
        let made = ext4(&merged, &image, 1024);
        run("umount", &[&at])?;
        made?;
        images.push(image);
    }
    Ok((directory, images))
}

/// All images read through the kernel's page cache, and through the mount.
fn memory_of(
    scratch: &Scratch,
    what: &str,
    directory: &Path,
    images: &[PathBuf],
    rows: &mut Vec<Value>,
) -> Result<(), Failure> {
    let report = pagefold_disk::scan::scan(images, |_, _| ());
    let unique_bytes = report.equal.first().ok_or("an empty scan")?.unique_bytes;
    let mut row = |name: &str, bytes: u64| {
        rows.push(json!({
            "part": "memory", "what": what, "name": name, "images": images.len(), "bytes": bytes,
            "unique_bytes": unique_bytes, "over_unique_percent": 100.0 * (bytes as f64 / unique_bytes as f64 - 1.0),
        }));
    };
    let (mut sums, mut kernel) = (Vec::new(), 0);
    for image in images {
        drop_cached(image)?;
        sums.push(read_data(image)?);
        kernel += cached_bytes(image)?;
    }
    row("plain files, kernel's page cache", kernel);
    images.iter().try_for_each(|image| drop_cached(image))?;
    let cache_mib = (unique_bytes >> 20) as usize + 64;
    let server = Server::start(scratch, Mount { cache_mib, ..Mount::cache(directory) })?;
    let idle = server.anonymous_bytes()?;
    for (image, sum) in images.iter().zip(&sums) {
        if read_data(&server.at.join(image.file_name().ok_or("no name")?))? != *sum {
            return Err("the mount gives other bytes than the file".into());
        }
    }
    let kept: u64 = images.iter().map(|image| cached_bytes(image)).sum::<Result<u64, _>>()?;
    row("pagefold disk: growth of the process", server.anonymous_bytes()?.saturating_sub(idle) + kept);
    Ok(())
}
