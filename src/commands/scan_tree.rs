//! `pagefold scan --tree`: what storing directories as images would save, before anything is built.

use crate::error::Error;
use crate::output::{clean, print_json};
use crate::units::{show_counted, show_size};
use crate::{note, say};
use pagefold_image::progress::Progress;
use pagefold_image::scan;
use std::path::PathBuf;
use std::process::ExitCode;

/// Scans `dirs` and prints the duplicates by whole files and by 64, 16 and 4 KiB.
pub fn run_tree(dirs: &[PathBuf], json: bool) -> Result<ExitCode, Error> {
    let progress = Progress::new("scan");
    let found = scan::trees(dirs, &progress)?;
    drop(progress);
    let code = if found.unreadable > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    if json {
        print_json(&found)?;
        return Ok(code);
    }
    for tree in &found.trees {
        let path = clean(&tree.path.display().to_string());
        let files = if tree.files == 1 { "file " } else { "files" };
        say!("{:>10}  {:>8} {files}  {path}", show_size(tree.bytes), tree.files);
    }
    say!(
        "{:>10}  {:>8} {}  in all ({} of zero pages)",
        show_size(found.total_bytes),
        found.files,
        if found.files == 1 { "file " } else { "files" },
        show_size(found.zero_bytes)
    );
    for (name, level, how) in [
        ("whole files", found.file, "pagefold image, on any kernel"),
        ("64 KiB", found.chunk_64k, "not by ordinary file reads; pagefold disk"),
        ("16 KiB", found.chunk_16k, "not by ordinary file reads; pagefold disk"),
        ("4 KiB", found.page_4k, "not by ordinary file reads; pagefold disk"),
    ] {
        say!("{:>10}  {:>3} %  duplicate by {name:11} ({how})", show_size(level.duplicate_bytes), level.percent);
    }
    say!(
        "{:>10}  in memory now, {} of it held twice by equal files",
        show_size(found.resident_bytes),
        show_size(found.resident_duplicate_bytes)
    );
    if found.resident_unknown > 0 {
        note!(
            "pagefold: note: of {} (other users', on overlayfs) the kernel does not say what is in memory",
            show_counted(found.resident_unknown, "file", "files")
        );
    }
    note_unreadable(found.unreadable);
    Ok(code)
}

/// Says how many files and directories could not be read, if any.
pub fn note_unreadable(count: u64) {
    if count > 0 {
        let unread = show_counted(count, "file or directory", "files or directories");
        note!("pagefold: note: {unread} could not be read");
    }
}
