//! Disk images under real guests: what is shared beside KSM, what it costs the guests, and what it saves when the host
//! has memory for one copy of what four guests read.

mod front_ends;
mod machines;
mod overhead;
mod pressure;
mod sharing;

use super::args::{GuestSize, Part};
use crate::files::{copy_files, drop_cached, ext4};
use crate::process::{self, Failure};
use crate::record;
use crate::scratch::Scratch;
use crate::vm::Boot;
use machines::Stage;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Measures the wanted parts. A part that fails does not take the others' rows with it.
pub(super) fn measure(scratch: &Scratch, size: &GuestSize, wanted: &dyn Fn(Part) -> bool) -> Result<(), Failure> {
    let parts = [Part::Sharing, Part::Overhead, Part::FrontEnds, Part::MemoryForOne].map(|part| (part, wanted(part)));
    if parts.iter().all(|(_, wanted)| !wanted) {
        return Ok(());
    }
    let boot = match Boot::prepare(&scratch.sub("boot")?) {
        Ok(boot) => boot,
        Err(error) => {
            eprintln!("SKIPPED: guests: {error}");
            return Ok(());
        }
    };
    record::emit_versions(json!({ "guest_kernel": boot.version }));
    let (directory, images) = tree_images(scratch, size.tree_mib, size.guests)?;
    let stage = Stage { scratch, boot: &boot, directory: &directory, images: &images, size };
    let mut failed = Vec::new();
    for (part, _) in parts.into_iter().filter(|(_, wanted)| *wanted) {
        eprintln!("pagecache: {part:?}");
        let outcome = match part {
            Part::Sharing => sharing::sharing(stage),
            Part::Overhead => {
                overhead::overhead(Stage { images: &images[..if size.all_rows { 2 } else { 1 }], ..stage })
            }
            Part::FrontEnds => front_ends::front_ends(stage),
            _ => pressure::pressure(stage),
        };
        failed.extend(outcome.err().map(|error| format!("{part:?}: {error}")));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

/// A tree of kernel sources of this machine, or other files of the system, and what it is.
fn kernel_tree() -> PathBuf {
    let sources = std::fs::read_dir("/usr/src").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> = sources
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            path.is_dir() && name.starts_with("linux-") && (name.ends_with("-common") || !name.contains("headers"))
        })
        .collect();
    found.sort();
    found.pop().unwrap_or_else(|| PathBuf::from("/usr/include"))
}

/// Makes `count` images that were installed apart: each its own file system with the same tree.
fn tree_images(scratch: &Scratch, tree_mib: u64, count: usize) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let tree = scratch.sub("kernel-tree")?;
    copy_files(&[kernel_tree()], &tree, tree_mib, false)?;
    match process::output(Command::new("gcc").arg("--version")) {
        Ok(_) => add_compiler(&tree.join("build"))?,
        Err(error) => eprintln!("SKIPPED: pagecache: no compiler for the guests: {error}"),
    }
    let directory = scratch.sub("guest-images")?;
    let images: Vec<PathBuf> = (0..count).map(|n| directory.join(format!("guest{n}.raw"))).collect();
    for image in &images {
        ext4(&tree, image, tree_mib * 3 / 2 + 96)?;
        drop_cached(image)?;
    }
    std::fs::remove_dir_all(tree)?;
    Ok((directory, images))
}

/// A C program of this project in one text, its own headers within.
fn program() -> Result<String, Failure> {
    let sources = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/programs/semantics"));
    let entries = std::fs::read_dir(sources)?.map(|entry| Ok(entry?.path()));
    let mut files: Vec<PathBuf> = entries.collect::<Result<_, Failure>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "c"));
    files.sort();
    let mut known = BTreeSet::new();
    files.iter().map(|file| with_headers(file, &mut known)).collect()
}

/// The text of a source file, with those of its own headers that are not `known` in place of what includes them.
fn with_headers(file: &Path, known: &mut BTreeSet<PathBuf>) -> Result<String, Failure> {
    let mut text = String::new();
    for line in std::fs::read_to_string(file)?.lines().filter(|line| *line != "#pragma once") {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            None => text.extend([line, "\n"]),
            Some(name) => {
                let header = file.parent().ok_or("no parent")?.join(name).canonicalize()?;
                if known.insert(header.clone()) {
                    text += &with_headers(&header, known)?;
                }
            }
        }
    }
    Ok(text)
}

/// Leaves this machine's C compiler, a program of this project, the headers it asks for and a script in `build`.
fn add_compiler(build: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(build)?;
    let source = build.join("main.c");
    std::fs::write(&source, program()?)?;
    let say = |program: &str, args: &[&str]| process::output(Command::new(program).args(args));
    let compiler = say("gcc", &["-print-prog-name=cc1"])?.trim().to_owned();
    std::fs::copy(&compiler, build.join("cc1"))?;
    for word in say("ldd", &[&compiler])?.split_whitespace().filter(|word| word.starts_with('/')) {
        let name = Path::new(word).file_name().ok_or("no name")?;
        let name = if word.contains("ld-linux") { "ld.so".as_ref() } else { name };
        std::fs::copy(word, build.join(name))?;
    }
    let wanted = say("gcc", &["-M", &source.display().to_string()])?;
    for header in wanted.split_whitespace().filter(|word| word.starts_with('/') && word.ends_with(".h")) {
        let target = build.join(format!("root{header}"));
        std::fs::create_dir_all(target.parent().ok_or("no parent")?)?;
        std::fs::copy(header, target)?;
    }
    let own = say("gcc", &["-print-file-name=include"])?;
    let places = [own.trim(), "/usr/include/x86_64-linux-gnu", "/usr/include"];
    let places: String = places.iter().map(|place| format!(" -isystem root{place}")).collect();
    let run = format!(
        "cd /mnt/build\n./ld.so --library-path . ./cc1 -quiet -O1 -nostdinc{places} main.c -o /asm && md5sum < /asm\n"
    );
    Ok(std::fs::write(build.join("run"), run)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Stdio;

    #[test]
    fn the_guests_program_is_one_text_that_compiles() {
        let text = program().unwrap();
        assert!(!text.contains("#include \"") && text.contains("bare_call(long number"));
        let mut gcc = Command::new("gcc");
        gcc.args(["-fsyntax-only", "-x", "c", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let Ok(mut child) = gcc.spawn() else {
            println!("SKIPPED: gcc is not installed");
            return;
        };
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
