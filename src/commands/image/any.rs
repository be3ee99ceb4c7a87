//! `pagefold image stat --any`: what directories hold in memory, and how much of it twice.

use crate::commands::scan_tree::note_unreadable;
use crate::error::Error;
use crate::output::{Style, Table, print, print_json};
use crate::units::{show_count, show_counted, show_size};
use crate::{note, say};
use pagefold_image::progress::Progress;
use pagefold_image::stat;
use std::path::PathBuf;
use std::process::ExitCode;

/// Prints what `dirs` hold in memory.
pub fn stat_directories(dirs: &[PathBuf], json: bool) -> Result<ExitCode, Error> {
    let progress = Progress::new("stat");
    let held = stat::held(dirs, &progress)?;
    drop(progress);
    let code = if held.unreadable > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    if json {
        print_json(&held)?;
        return Ok(code);
    }
    let mut table =
        Table::new(Style::stdout(), &["directory", ">files", ">size", ">resident", ">shared", ">duplicate"]);
    for tree in &held.trees {
        table.row([
            tree.path.display().to_string(),
            show_count(tree.files),
            show_size(tree.bytes),
            show_size(tree.resident_bytes),
            show_size(tree.shared_bytes),
            show_size(tree.duplicate_bytes),
        ]);
    }
    print(&table.render(0))?;
    say!(
        "in memory: {} resident; {} of it could be shared, because equal files hold it again",
        show_size(held.resident_bytes),
        show_size(held.duplicate_bytes)
    );
    if held.memory_unknown > 0 {
        let files = show_counted(held.memory_unknown, "file", "files");
        note!(
            "pagefold: note: {files} on overlayfs may show memory that was counted with another file; only root learns"
        );
    }
    if held.resident_unknown > 0 {
        let files = show_counted(held.resident_unknown, "file", "files");
        note!("pagefold: note: of {files} of other users the kernel does not say what is in memory");
    }
    note_unreadable(held.unreadable);
    Ok(code)
}
