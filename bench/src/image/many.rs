//! Many images in one store.

use crate::process::{self, Failure};
use crate::scratch::Scratch;
use pagefold_image::store::Store;
use pagefold_image::tree::{FileKind, Inode, Meta, Tree};
use pagefold_image::{gc, stat};
use pagefold_os::procfs;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Makes a store of `images` images over `bases` bases: 200 files of each base, 3 of each image's own.
fn fill(root: &Path, images: u32, bases: u32) -> Result<Store, Failure> {
    let store = Store::open(root, "default")?.without_sync();
    let (base_files, own_files) = (200, 3);
    let file = |data| Inode { meta: Meta { mode: 0o644, ..Meta::default() }, kind: FileKind::File(data) };
    let content = |kind: u32, image: u32, number: u32| {
        let mut bytes = format!("{kind} {image} {number} ").repeat(12);
        bytes.truncate(100);
        bytes.into_bytes()
    };
    for base in 0..bases {
        let build = store.build()?;
        let mut tree = Tree::default();
        for number in 0..base_files {
            tree.put(format!("base/{number}").as_bytes(), file(build.put_bytes(&content(0, base, number))?))?;
        }
        for image in (base..images).step_by(bases as usize) {
            let mut tree = tree.clone();
            for number in 0..own_files {
                tree.put(format!("own/{number}").as_bytes(), file(build.put_bytes(&content(1, image, number))?))?;
            }
            build.publish(&format!("image-{image}"), &tree, "bench", Default::default(), vec![])?;
        }
    }
    Ok(store)
}

/// One look at a store, in a process of its own so that its memory is its own: a count, and its peak memory in KiB.
pub(super) fn look(what: &str, root: &Path) -> Result<(u64, u64), Failure> {
    let store = Store::open(root, "default")?;
    let count = match what {
        "list" => store.images()?.len() as u64,
        "stat" => stat::stat(&store, &[])?.0.objects,
        "gc" => gc::collect(&store, false)?.objects_removed,
        _ => 0,
    };
    // Of this program alone: the peak that wait4 reports to a parent begins with the parent's own size.
    let status = fs::read_to_string("/proc/self/status")?;
    Ok((count, procfs::field(&status, "VmHWM").ok_or("no VmHWM")?))
}

/// Runs [`look`] as a child; returns its count, seconds, and peak memory in MiB.
fn look_in_child(what: &str, root: &Path) -> Result<(u64, f64, f64), Failure> {
    let start = Instant::now();
    let text = process::output(process::own("erofs")?.args(["--look", what]).arg(root))?;
    let seconds = start.elapsed().as_secs_f64();
    let (count, peak_kib) =
        text.trim().split_once(' ').ok_or_else(|| format!("{what} of {}: {text}", root.display()))?;
    Ok((count.parse()?, seconds, peak_kib.parse::<f64>()? / 1024.0))
}

/// Many images over few bases: list, stat, gc, and what memory each takes at its peak.
pub(super) fn many_images(scratch: &Scratch, images: u32, bases: u32, out: &mut Vec<Value>) -> Result<(), Failure> {
    let root = scratch.dir.join(format!("many-{images}"));
    let start = Instant::now();
    let store = fill(&root, images, bases)?;
    let built = start.elapsed().as_secs_f64();
    let (_, _, nothing) = look_in_child("nothing", &root)?;
    let (count, list_s, list_mib) = look_in_child("list", &root)?;
    let (objects, stat_s, stat_mib) = look_in_child("stat", &root)?;
    // Every tenth image of each base, so that only their own files go.
    let gone: Vec<u32> = (0..images).filter(|image| image / bases % 10 == 1).collect();
    for image in &gone {
        store.remove(&format!("image-{image}"))?;
    }
    let (removed, gc_s, gc_mib) = look_in_child("gc", &root)?;
    if (count, removed) != (images.into(), gone.len() as u64 * 3) {
        return Err(format!("{count} images listed, {removed} objects collected").into());
    }
    out.push(json!({ "bench": "many images", "images": count, "bases": bases, "objects": objects, "build_s": built,
        "list_s": list_s, "stat_s": stat_s, "gc_s": gc_s, "gc_removed_objects": removed, "rss_mib_of_nothing": nothing,
        "list_rss_mib": list_mib, "stat_rss_mib": stat_mib, "gc_rss_mib": gc_mib }));
    fs::remove_dir_all(&root)?;
    Ok(())
}
