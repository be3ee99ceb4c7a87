//! `pagefold image build` and `import`: what comes into a store.

use super::args::{BuildArgs, ImportArgs};
use crate::error::Error;
use crate::output::print_json;
use crate::units::{show_counted, show_size};
use crate::{note, say};
use pagefold_image::Error as ImageError;
use pagefold_image::build::{Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::oci::{self, Platform, Wanted};
use pagefold_image::progress::Progress;
use pagefold_image::store::{ImageRecord, RunConfig, Store};
use pagefold_image::tree::Tree;
use pagefold_image::{build, export, unpack};
use std::io::IsTerminal;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

fn report_built(record: &ImageRecord, stats: &pagefold_image::store::BuildStats, json: bool) -> Result<(), Error> {
    use std::sync::atomic::Ordering::Relaxed;
    for note in &record.notes {
        note!("pagefold: note: {note}");
    }
    let (new, bytes_new) = (stats.objects_new.load(Relaxed), stats.bytes_new.load(Relaxed));
    if json {
        let mut value = serde_json::to_value(record)?;
        value["objects_new"] = new.into();
        value["bytes_new"] = bytes_new.into();
        value["bytes_hashed"] = stats.bytes_hashed.load(Relaxed).into();
        value["files_unchanged"] = stats.files_unchanged.load(Relaxed).into();
        print_json(&value)?;
    } else {
        say!("{}  {}", record.digest, record.name);
        say!(
            "{}, {}; {}, {} new on disk",
            show_counted(record.files, "file", "files"),
            show_size(record.bytes),
            show_counted(new, "new object", "new objects"),
            show_size(bytes_new)
        );
    }
    Ok(())
}

/// The error of an input with the name it has here, and `other` as what to do where it is no such input at all.
fn of_input(error: ImageError, name: &str, other: &str) -> ImageError {
    match error {
        ImageError::Input(what) => ImageError::Input(format!("{name}: {what}")),
        ImageError::Foreign(what) => ImageError::Foreign(format!("{name}: {what}; {other}")),
        ImageError::Digest { what, expected, found } => {
            ImageError::Digest { what: format!("{name}: {what}"), expected, found }
        }
        other => other,
    }
}

/// Whether the input is standard input, after a look whether it is there and can be read. What is typed is no archive, and
/// other devices give bytes for ever.
pub fn is_stdin(path: &Path) -> Result<bool, Error> {
    let stdin = path == Path::new("-");
    if stdin && std::io::stdin().is_terminal() {
        return Err("-: an archive does not come from a terminal; give a file, or redirect".into());
    }
    let at = if stdin { Path::new("/dev/stdin") } else { path };
    if std::fs::metadata(at).is_ok_and(|meta| meta.file_type().is_char_device()) {
        return Err(format!("{}: a device, from which no archive comes; give a file, or a pipe", path.display()).into());
    }
    // A pipe can be opened once.
    if !stdin && !std::fs::metadata(at).is_ok_and(|meta| meta.file_type().is_fifo()) {
        std::fs::File::open(at).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(stdin)
}

pub fn build_image(store: &Store, args: BuildArgs, stdin: bool) -> Result<(), Error> {
    let (mut notes, limits) = (Omissions::default(), Limits::default());
    let source = args.path.display().to_string();
    let building = store.build()?;
    let progress = Progress::new("build");
    let mut config = RunConfig::default();
    let tree = if !stdin && !args.plain && oci::is_image(&args.path)? {
        let imported = oci::import(&building, &args.path, &Wanted::default(), limits, &mut notes, &progress);
        let (tree, run) = imported.map_err(|error| match of_input(error, &source, "") {
            ImageError::Input(what) => Error::from(format!(
                "{what}; it looks like an OCI image: import has --ref and limits, --plain takes it as it is"
            )),
            other => other.into(),
        })?;
        config = run;
        tree
    } else if !stdin && args.path.is_dir() {
        let options = build::Options { one_file_system: args.one_file_system, rehash: args.rehash };
        build::from_directory(&building, &args.path, options, &mut notes, &progress)?
    } else {
        let mut tree = Tree::default();
        let input: Box<dyn std::io::Read> = if stdin {
            Box::new(std::io::stdin().lock())
        } else {
            let file = std::fs::File::open(&args.path).map_err(|error| format!("{source}: {error}"))?;
            progress.expect(file.metadata()?.len());
            Box::new(file)
        };
        let silent = Progress::silent();
        let of_input = |error| of_input(error, &source, "build takes a directory, a tar archive or an OCI image");
        let plain = unpack(progress.watch(input), limits).map_err(of_input)?;
        apply_archive(&building, &mut tree, plain, limits, &mut notes, &silent).map_err(of_input)?;
        tree
    };
    drop(progress);
    let record = building.publish(&args.name, &tree, &source, config, notes.lines())?;
    if args.native {
        export::make_native(store, &record.digest, &Progress::new("native"))?;
    }
    report_built(&record, building.stats(), args.json)
}

pub fn import_image(store: &Store, args: ImportArgs, stdin: bool) -> Result<(), Error> {
    let limits = Limits { bytes: args.limits.max_bytes, entries: args.limits.max_entries, ..Limits::default() };
    let mut notes = Omissions::default();
    let building = store.build()?;
    let progress = Progress::new("import");
    let source = args.path.display().to_string();
    let path = if stdin { Path::new("/dev/stdin") } else { &args.path };
    let wanted = Wanted { reference: args.reference, platform: args.platform };
    let imported = oci::import(&building, path, &wanted, limits, &mut notes, &progress);
    let (tree, config) =
        imported.map_err(|error| of_input(error, &source, "a plain directory or archive is for image build"))?;
    drop(progress);
    let record = building.publish(&args.name, &tree, &source, config, notes.lines())?;
    let platform = record.config.platform.parse::<Platform>();
    if platform.is_ok_and(|platform| !platform.fits(&Platform::host())) {
        note!("{} holds programs for {}, which do not run on this machine", record.name, record.config.platform);
    }
    report_built(&record, building.stats(), args.json)
}
