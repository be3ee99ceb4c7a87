//! `pagefold image export`: an image as an archive.

use super::args::Format;
use crate::error::Error;
use crate::note;
use crate::units::{show_count, show_counted};
use pagefold_image::export;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::{FileKind, Tree};
use std::io::{BufWriter, IsTerminal};
use std::path::Path;

/// Longest path that the system takes, and with it the programs that unpack archives.
const PATH_BYTES_MAX: usize = libc::PATH_MAX as usize - 1;

/// Says what an archive has no form for, and what few can unpack.
fn note_limits(tree: &Tree, format: Format) {
    if format == Format::Erofs {
        return;
    }
    let (mut sockets, mut long) = (0, 0);
    tree.walk(|path, id| {
        sockets += u64::from(tree.inode(id).kind == FileKind::Socket);
        long += u64::from(path.len() > PATH_BYTES_MAX);
    });
    if sockets > 0 {
        let left_out = show_counted(sockets, "socket is", "sockets are");
        note!("pagefold: note: {left_out} left out: tar has none; programs make theirs when they start");
    }
    if long > 0 {
        let paths = show_counted(long, "path has", "paths have");
        let max = show_count(PATH_BYTES_MAX as u64);
        note!("pagefold: note: {paths} more than {max} bytes: pagefold image build unpacks that, tar(1) does not");
    }
}

pub fn export_image(store: &Store, name: &str, output: &Path, format: Format) -> Result<(), Error> {
    let (record, _lease) = store.hold(name)?;
    let tree = store.tree(&record.digest)?;
    let progress = Progress::new("export");
    progress.expect(record.bytes);
    if format == Format::Tar && output == Path::new("-") {
        if std::io::stdout().is_terminal() {
            return Err("export: a tar archive is not for a terminal; give a file, or redirect".into());
        }
        let mut out = BufWriter::new(std::io::stdout().lock());
        note_limits(&tree, format);
        return Ok(export::tar(store, &tree, &mut out, &progress).map_err(|error| error.of_output("standard output"))?);
    }
    if output == Path::new("-") {
        return Err("export: only a tar goes to standard output; give a file or, for oci, a new directory".into());
    }
    note_limits(&tree, format);
    match format {
        Format::Oci => drop(export::oci(store, &record, &tree, output, false, &progress)?),
        Format::Erofs => export::to_file(output, |file| export::erofs_full(store, &tree, file, &progress))?,
        Format::Tar => {
            export::to_file(output, |file| export::tar(store, &tree, &mut BufWriter::new(file), &progress))?;
        }
    }
    Ok(())
}
