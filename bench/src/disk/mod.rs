//! Disk images through the deduplicated cache, beside plain files in the kernel's page cache and a plain FUSE pass-through.
//!
//! On the host: how fast warm reads are, and how much memory images take that differ by one package upgrade. Every read is
//! checked against the content by a checksum, so no row can win by reading something else. With guests: see [`guests`].

mod args;
mod guests;
mod memory;
mod reads;
mod server;

use crate::files;
use crate::process::{self, Failure};
use crate::scratch::Scratch;
use crate::{options, record};
use args::{Args, Part, Size};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("pagecache", args, |args: Args| match &args.serve[..] {
        [directory, at] => server::serve_plain(directory, at),
        _ => measure(&args),
    })
}

fn measure(args: &Args) -> Result<(), Failure> {
    // A run that cannot measure anything has rows, too: none.
    record::emit(Vec::new());
    if !process::is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: mounting needs root and /dev/fuse");
        return Ok(());
    }
    record::emit_versions(json!({ "qemu": record::first_line(&["qemu-system-x86_64", "--version"]) }));
    let size = Size::of(args);
    let inputs = args.inputs.clone().or_else(|| Some(files::fetched_images()).filter(|dir| dir.exists()));
    let scratch = Scratch::new(Path::new("/var/tmp"))?;
    let wanted = |part: Part| args.part.is_empty() || args.part.contains(&part);
    if wanted(Part::Reads) {
        reads::reads(&scratch, &size)?;
    }
    if wanted(Part::Memory) {
        memory::memory(&scratch, &size, inputs.as_deref())?;
    }
    guests::measure(&scratch, &size.guests, &wanted)
}
