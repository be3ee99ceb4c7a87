//! `pagefold image ls`, `stat` and `verify`: what a store holds.

use crate::error::Error;
use crate::output::{Style, Table, clean, on_stdout, print, print_json};
use crate::units::{show_count, show_counted, show_size};
use crate::{note, say};
use pagefold_image::progress::Progress;
use pagefold_image::stat;
use pagefold_image::store::{DamagedImage, ImageRecords, Store};
use pagefold_image::tree::{Data, FileKind, Tree, show};
use serde_json::json;
use std::io::{BufWriter, Write};
use std::process::ExitCode;

/// Names what could not be read, and says how that ends.
fn complain_of(damaged: &[DamagedImage]) -> ExitCode {
    for record in damaged {
        note!("pagefold: {record}");
    }
    if damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

pub fn list_images(store: Option<&Store>, json: bool) -> Result<ExitCode, Error> {
    let ImageRecords { images, damaged } = store.map_or(Ok(ImageRecords::default()), Store::records)?;
    if json {
        print_json(&serde_json::to_value(images)?)?;
        return Ok(complain_of(&damaged));
    }
    let mut table = Table::new(Style::stdout(), &["image", "digest", ">files", ">size"]);
    for image in images {
        let digest = image.digest.hex()[..12].to_owned();
        table.row([image.name, digest, show_count(image.files), show_size(image.bytes)]);
    }
    print(&table.render(0))?;
    Ok(complain_of(&damaged))
}

pub fn list_files(tree: &Tree, json: bool) -> Result<(), Error> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut result = Ok(());
    tree.walk(|path, id| {
        if result.is_err() {
            return;
        }
        let inode = tree.inode(id);
        let meta = &inode.meta;
        let (kind, size, more) = match &inode.kind {
            FileKind::Dir(_) => ('d', 0, String::new()),
            FileKind::File(data) => ('-', data.size(), String::new()),
            FileKind::Symlink(target) => ('l', target.len() as u64, format!(" -> {}", show(target))),
            FileKind::Char(major, minor) => ('c', 0, format!(" ({major},{minor})")),
            FileKind::Block(major, minor) => ('b', 0, format!(" ({major},{minor})")),
            FileKind::Fifo => ('p', 0, String::new()),
            FileKind::Socket => ('s', 0, String::new()),
        };
        result = if json {
            let digest = match &inode.kind {
                FileKind::File(Data::Object(digest, _)) => Some(digest.to_string()),
                _ => None,
            };
            let mut line = json!({ "type": kind.to_string(), "mode": format!("{:04o}", meta.mode),
                "uid": meta.uid, "gid": meta.gid, "size": size, "mtime_s": meta.mtime_s, "digest": digest });
            let mut add = |key: &str, bytes: &[u8]| {
                line[key] = String::from_utf8_lossy(bytes).into();
                if std::str::from_utf8(bytes).is_err() {
                    line[format!("{key}_hex")] =
                        bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
                }
            };
            add("path", path);
            match &inode.kind {
                FileKind::Symlink(target) => add("target", target),
                FileKind::Char(major, minor) | FileKind::Block(major, minor) => {
                    line["device"] = format!("{major}:{minor}").into();
                }
                _ => {}
            }
            writeln!(out, "{line}")
        } else {
            writeln!(out, "{kind}{:04o} {:>5} {:>5} {size:>12} /{}{more}", meta.mode, meta.uid, meta.gid, show(path))
        };
    });
    // A reader that has seen enough (`| head`) is no error.
    match result.and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.map_err(on_stdout)?),
    }
}

pub fn stat_images(store: Option<&Store>, domain: &str, names: &[String], json: bool) -> Result<ExitCode, Error> {
    let (total, images) = store.map_or(Ok(Default::default()), |store| stat::stat(store, names))?;
    let beside = store.map_or(Ok(Default::default()), stat::beside)?;
    if json {
        let mut value = serde_json::to_value(&total)?;
        value["native_bytes"] = beside.native_bytes.into();
        value["directory_bytes"] = beside.directory_bytes.into();
        value["shelf_bytes"] = beside.shelf_bytes.into();
        value["index_bytes"] = beside.index_bytes.into();
        value["staged_bytes"] = beside.staged_bytes.into();
        value["domain"] = domain.into();
        value["per_image"] = serde_json::to_value(&images)?;
        print_json(&value)?;
        return Ok(complain_of(&total.damaged));
    }
    let heading = ["image", ">size", ">own", ">mounts", ">resident", ">shared"];
    let mut table = Table::new(Style::stdout(), &heading);
    for image in &images {
        table.row([
            image.record.name.clone(),
            show_size(image.record.bytes),
            show_size(image.own_bytes),
            show_count(image.mounts),
            show_size(image.resident_bytes),
            show_size(image.resident_shared_bytes),
        ]);
    }
    if !table.is_empty() {
        print(&table.render(0))?;
    }
    let objects = show_counted(total.objects, "object", "objects");
    let mut parts = format!("{objects}, metadata {}", show_size(total.metadata_bytes));
    let others = [
        ("link farms", beside.shelf_bytes),
        ("native", beside.native_bytes),
        ("directories", beside.directory_bytes),
        ("indexes", beside.index_bytes),
        ("staged", beside.staged_bytes),
    ];
    for (what, bytes) in others.iter().filter(|(_, bytes)| *bytes > 0) {
        parts += &format!(", {what} {}", show_size(*bytes));
    }
    let beside: u64 = others.iter().map(|(_, bytes)| bytes).sum();
    say!(
        "on disk: {} for {} of images ({parts})",
        show_size(total.object_bytes + total.metadata_bytes + beside),
        show_size(total.logical_bytes)
    );
    say!(
        "in memory: {} resident, {} of it shared; {} {} of memory",
        show_size(total.resident_bytes),
        show_size(total.shared_bytes),
        show_counted(total.mounts - total.native_mounts, "mount saves", "mounts save"),
        show_size(total.memory_saved_bytes)
    );
    if total.native_mounts > 0 {
        let mounts = show_counted(total.native_mounts, "native mount", "native mounts");
        say!("not counted: the memory of {mounts}");
    }
    Ok(complain_of(&total.damaged))
}

pub fn verify_images(store: Option<&Store>, names: &[String], frames: bool, json: bool) -> Result<ExitCode, Error> {
    let progress = Progress::new("verify");
    let found = store.map_or(Ok(Default::default()), |store| stat::verify_with(store, names, frames, &progress))?;
    drop(progress);
    if json {
        print_json(&serde_json::to_value(&found)?)?;
    } else {
        for damage in &found.damaged {
            let images = damage.images.join(", ");
            say!("{}", clean(&format!("damaged: {}: {} (images: {images})", damage.path, damage.what)));
        }
        say!(
            "{}, {}, {}: {} damaged",
            show_counted(found.images, "image", "images"),
            show_counted(found.objects, "object", "objects"),
            show_size(found.bytes),
            found.damaged.len()
        );
        if found.restored > 0 {
            let marks = show_counted(found.restored, "mark", "marks");
            say!("{marks} of damage taken away: what had one is whole, and builds rely on it again");
        }
        match &found.frames_skipped {
            Some(why) => say!("frames not compared: {why}"),
            None if frames => {
                say!("{} of {} pages show the object's own frame", found.frames_equal, found.frames_compared)
            }
            None => {}
        }
    }
    // What was asked for was not done.
    let refused = found.frames_skipped.as_deref() == Some(stat::FRAMES_NEED_ROOT);
    let good = found.damaged.is_empty() && found.frames_equal == found.frames_compared && !refused;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
