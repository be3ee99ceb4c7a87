//! `pagefold scan --tree`: what storing directories as images would save, before anything is built.

use super::Error;
use super::image::human;
use pagefold_image::progress::Progress;
use pagefold_image::scan;
use std::path::PathBuf;
use std::process::ExitCode;

/// Scans `dirs` and prints the duplicates by whole files and by 64, 16 and 4 KiB.
pub fn run_tree(dirs: &[PathBuf], json: bool) -> Result<ExitCode, Error> {
    let progress = Progress::new("scan");
    let found = scan::trees(dirs, &progress)?;
    drop(progress);
    if json {
        println!("{}", serde_json::to_string_pretty(&found)?);
        return Ok(ExitCode::SUCCESS);
    }
    for tree in &found.trees {
        println!("{:>10}  {:>8} files  {}", human(tree.bytes), tree.files, tree.path.display());
    }
    println!(
        "{:>10}  {:>8} files  in all ({} of zero pages)",
        human(found.total_bytes),
        found.files,
        human(found.zero_bytes)
    );
    for (name, level, how) in [
        ("whole files", found.file, "pagefold image, on any kernel"),
        ("64 KiB", found.chunk_64k, "not by ordinary file reads; pagefold disk"),
        ("16 KiB", found.chunk_16k, "not by ordinary file reads; pagefold disk"),
        ("4 KiB", found.page_4k, "not by ordinary file reads; pagefold disk"),
    ] {
        println!("{:>10}  {:>3} %  duplicate by {name:11} ({how})", human(level.duplicate_bytes), level.percent);
    }
    println!(
        "{:>10}  in memory now, {} of it held twice by equal files",
        human(found.resident_bytes),
        human(found.resident_duplicate_bytes)
    );
    if found.unreadable > 0 {
        eprintln!("pagefold: note: {} files or directories could not be read", found.unreadable);
    }
    Ok(ExitCode::SUCCESS)
}
