//! `pagefold image`: trees stored by content and mounted so that equal files share page cache.

use super::Error;
use crate::output::{Style, Table, clean, on_stdout, print, print_json};
use crate::units::{self, show_count, show_counted, show_size};
use crate::{begun, note, say};
use pagefold_image::Error as ImageError;
use pagefold_image::build::{Omissions, apply_tar};
use pagefold_image::config::Limits;
use pagefold_image::mount::{self, Kind};
use pagefold_image::progress::Progress;
use pagefold_image::store::{DamagedImage, Record, Records, RunConfig, Store, check_domain, check_name, default_root};
use pagefold_image::tree::{Data, Kind as FileKind, Tree, show};
use pagefold_image::{build, exec, export, gc, oci, stat, unpack};
use serde_json::json;
use std::env::VarError;
use std::ffi::OsString;
use std::io::{BufWriter, IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The domain of who names none.
const DEFAULT_DOMAIN: &str = "default";

/// Store trees by content and mount them so that equal files share page cache
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image build --name web:1 ./rootfs
  pagefold image import --name redis:7 ./redis.tar
  pagefold image mount web:1 /mnt/web
  pagefold image exec web:1 -- /bin/ls /
  pagefold image stat --json
  pagefold image umount /mnt/web; pagefold image rm web:1; pagefold image gc

Equal files share memory within a domain, never across domains: give each owner of data a --domain.
The store: --store, else $PAGEFOLD_STORE, else /var/lib/pagefold/images (root) or ~/.local/share/pagefold/images.")]
pub struct Args {
    /// Directory of the store
    #[arg(long, global = true, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Trust boundary: nothing is shared across domains
    #[arg(long, global = true, default_value = DEFAULT_DOMAIN, value_name = "NAME", value_parser = checked(check_domain))]
    domain: String,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Store a directory, a tar archive (`-` for standard input) or an OCI image under a name
    Build(BuildArgs),
    /// Store an OCI layout, OCI archive or docker-archive under a name
    Import(ImportArgs),
    /// Mount an image
    Mount(MountArgs),
    /// Unmount an image
    #[command(after_help = "Examples:
  pagefold image umount /mnt
  pagefold image umount --lazy /mnt")]
    Umount {
        /// Where it is mounted
        mountpoint: PathBuf,
        /// Detach now, end when the last user is gone; a mount by a metadata directory must be free first
        #[arg(long)]
        lazy: bool,
    },
    /// List images, or the files of one
    #[command(after_help = "Examples:
  pagefold image ls
  pagefold image ls app:1
  pagefold image ls app:1 --json | jq -r .path")]
    Ls {
        /// Image whose files to list
        name: Option<String>,
        /// One JSON document; of an image's files one a line
        #[arg(long)]
        json: bool,
    },
    /// Show what images take on disk and in memory, and what sharing saves now
    #[command(after_help = "Examples:
  pagefold image stat
  pagefold image stat app:1 app:2
  pagefold image stat --json | jq .memory_saved_bytes")]
    Stat {
        /// Images to show (all by default)
        names: Vec<String>,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Read every object and compare it with its name
    #[command(after_help = "Examples:
  pagefold image verify
  sudo pagefold image verify --check-frames app:1

Exit status: 0 if all is whole, 1 if something is damaged, or frames may not be looked at.")]
    Verify {
        /// Images to verify (all by default)
        names: Vec<String>,
        /// Also compare page frames (root): mounted files must map the objects' own memory
        #[arg(long)]
        check_frames: bool,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Remove what no image, mount or build needs
    #[command(after_help = "Examples:
  pagefold image gc --dry-run
  pagefold image gc")]
    Gc {
        /// Say what would go, remove nothing
        #[arg(long)]
        dry_run: bool,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Forget images (gc frees their space)
    #[command(after_help = "Examples:
  pagefold image rm app:1 app:2 && pagefold image gc")]
    Rm {
        /// Images to forget
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Write an image as tar, OCI layout or self-contained EROFS image
    #[command(after_help = "Examples:
  pagefold image export app:1 app.tar
  pagefold image export app:1 - | ssh host pagefold image build --name app:1 -
  pagefold image export --format oci app:1 ./layout")]
    Export {
        /// Image to write
        name: String,
        /// File or, for oci, new directory; `-` writes a tar to standard output
        output: PathBuf,
        /// Format
        #[arg(long, value_enum, default_value_t = Format::Tar)]
        format: Format,
    },
    /// Run a command with an image as its root
    Exec(ExecArgs),
    /// Predict what storing directories would save, before anything is built
    #[command(after_help = "Examples:
  pagefold image scan ./rootfs-1 ./rootfs-2
  pagefold image scan --json ./rootfs-*")]
    Scan {
        /// Directories to compare
        #[arg(required = true)]
        dirs: Vec<PathBuf>,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image build --name app:1 ./rootfs
  pagefold image build --name app:1 app.tar.zst
  docker export web | pagefold image build --name web:1 -

A second build of an unchanged directory reads only what stat says has changed. What cannot be kept
(devices, owners a user may not give) is left out and said. Progress shows on a terminal only.")]
struct BuildArgs {
    /// Name to store it under
    #[arg(long, value_parser = checked(check_name))]
    name: String,
    /// Directory, tar archive (plain, gzip or zstd), OCI layout, or `-`
    path: PathBuf,
    /// Do not go into other file systems: where one is mounted there is an empty directory
    #[arg(long, short = 'x')]
    one_file_system: bool,
    /// Read every file even if stat says it is unchanged
    #[arg(long)]
    rehash: bool,
    /// Take the path as it is, even if it looks like an OCI image
    #[arg(long)]
    plain: bool,
    /// Also write the self-contained form for native mounts (Linux 7.0 inode_share)
    #[arg(long)]
    native: bool,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  skopeo copy docker://redis:7 oci-archive:redis.tar
  pagefold image import --name redis:7 redis.tar
  podman save redis:7 | pagefold image import --name redis:7 -
  pagefold image import --name app:2 --ref v2 --max-bytes 20G ./layout")]
struct ImportArgs {
    /// Name to store it under
    #[arg(long, value_parser = checked(check_name))]
    name: String,
    /// OCI layout or skopeo's `dir:`, an archive of a layout, or what `podman save` and `docker save` write (`-` for standard input)
    path: PathBuf,
    /// Tag (`redis:7` finds `docker.io/library/redis:7`) or digest to take when there are several images
    #[arg(long = "ref", value_name = "TAG")]
    reference: Option<String>,
    /// Most bytes of unpacked content, of all layers together
    #[arg(long, value_name = "SIZE", default_value = "1T", value_parser = units::size)]
    max_bytes: u64,
    /// Most entries, of all layers together
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().entries)]
    max_entries: u64,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

/// A name that `check` has nothing against.
fn checked(check: fn(&str) -> Result<(), ImageError>) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |name| check(name).map(|()| name.to_owned()).map_err(|error| error.to_string())
}

#[derive(clap::Args)]
struct MountOptions {
    /// How the metadata is mounted
    #[arg(long, value_enum, default_value_t = KindArg::Auto)]
    kind: KindArg,
    /// Directory that keeps changes; without it the mount is read-only
    #[arg(long, value_name = "DIR")]
    upper: Option<PathBuf>,
    /// Ignore set-user-id bits
    #[arg(long)]
    nosuid: bool,
    /// Refuse device nodes
    #[arg(long)]
    nodev: bool,
    /// Refuse to run programs
    #[arg(long)]
    noexec: bool,
    /// Do not prefetch what `exec --record-profile` has recorded
    #[arg(long)]
    no_prefetch: bool,
}

impl MountOptions {
    fn options(&self) -> mount::Options {
        mount::Options {
            kind: match self.kind {
                KindArg::Auto => Kind::Auto,
                KindArg::Native => Kind::Native,
                KindArg::Erofs => Kind::Erofs,
                KindArg::Loop => Kind::Loop,
                KindArg::Directory => Kind::Directory,
            },
            upper: self.upper.clone(),
            nosuid: self.nosuid,
            nodev: self.nodev,
            noexec: self.noexec,
            no_prefetch: self.no_prefetch,
        }
    }
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image mount app:1 /mnt
  pagefold image mount app:1 /mnt --upper ./changes --nosuid --nodev
  pagefold image mount app:1 /mnt --json")]
struct MountArgs {
    /// Image to mount
    name: String,
    /// Directory to mount it on; what is in it is hidden meanwhile
    mountpoint: PathBuf,
    #[command(flatten)]
    options: MountOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image exec app:1 -- /bin/sh
  pagefold image exec app:1 --rw --bind ./data:/data -e HOME=/root -- env
  sudo pagefold image exec app:1 --record-profile=20 -- /usr/bin/server

With --record-profile the image remembers what the command read; later starts prefetch it.
Without a command the image's own is run. It takes this process over: its exit status and signals are passed on.
Exit status of exec itself: 125 if it fails, 126 if the command cannot be run, 127 if it is not found.")]
struct ExecArgs {
    /// Image to run in
    name: String,
    #[command(flatten)]
    options: MountOptions,
    /// Let the command write; changes vanish at its end
    #[arg(long)]
    rw: bool,
    /// Show a host path in the tree
    #[arg(long = "bind", value_name = "HOST:TREE", value_parser = bind)]
    binds: Vec<(PathBuf, PathBuf)>,
    /// Set an environment variable; a name alone passes the caller's on
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Record what the command reads, for at most SECONDS, so that later starts prefetch it (root)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "60")]
    record_profile: Option<u32>,
    /// User to run as, by name in the tree or number (root; the image's own by default)
    #[arg(long, short = 'u', value_name = "USER[:GROUP]", default_value = "", hide_default_value = true)]
    user: String,
    /// Directory of the tree to start in (the image's own by default)
    #[arg(long, value_name = "DIR", default_value = "", hide_default_value = true)]
    workdir: String,
    /// Command and its arguments (the image's own by default)
    #[arg(last = true)]
    command: Vec<OsString>,
}

fn bind(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (from, to) = text.split_once(':').ok_or("give HOST:TREE")?;
    Ok((PathBuf::from(from), PathBuf::from(to)))
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum KindArg {
    /// The best this kernel and user have
    Auto,
    /// Self-contained EROFS with inode_share (Linux 7.0)
    Native,
    /// EROFS metadata from the plain file (Linux 6.12, root)
    Erofs,
    /// EROFS metadata through a loop device (root)
    Loop,
    /// Metadata directory (rootless from Linux 6.16)
    Directory,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// One tar archive
    Tar,
    /// OCI layout with one layer
    Oci,
    /// EROFS image with data and fingerprints
    Erofs,
}

/// Runs the image command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let root = args.store.clone().unwrap_or_else(default_root);
    let make = || Store::open(&root, &args.domain).map_err(elsewhere);
    // Only who stores makes a store. One that is not there is as good as an empty one.
    let found = || match Store::open_existing(&root, &args.domain).map_err(elsewhere)? {
        None if args.domain != DEFAULT_DOMAIN => {
            Err(Error::from(format!("no domain {:?} in {}; image build makes one", args.domain, root.display())))
        }
        found => Ok(found),
    };
    let open = |name: &str| -> Result<Store, Error> {
        let missing = || ImageError::NoImage { name: name.into(), domain: args.domain.clone(), store: root.clone() };
        Ok(found()?.ok_or_else(missing)?)
    };
    // Whoever asks for all there is may have asked in a wrong place.
    let all = || {
        let store = found()?;
        if store.is_none() {
            note!("pagefold: note: no image store in {}; image build makes one", root.display());
        }
        Ok::<_, Error>(store)
    };
    // What is named must be there.
    let open_all = |names: &[String]| match names.first() {
        Some(name) => open(name).map(Some),
        None => all(),
    };
    match args.action {
        // A typing error makes no store.
        Action::Build(build) => {
            let stdin = is_stdin(&build.path)?;
            build_image(&make()?, build, stdin)?;
        }
        Action::Import(import) => {
            let stdin = is_stdin(&import.path)?;
            import_image(&make()?, import, stdin)?;
        }
        Action::Mount(mount) => {
            let store = open(&mount.name)?;
            let (record, _lease) = store.hold(&mount.name)?;
            let mounted = mount::mount(&store, &record, &mount.mountpoint, &mount.options.options())
                .map_err(|error| with_other_way(error, &mount.name))?;
            for note in &mounted.notes {
                note!("pagefold: note: {note}");
            }
            if mount.json {
                print_json(
                    &json!({ "name": record.name, "digest": record.digest, "mountpoint": mount.mountpoint.display().to_string(),
                    "kind": mounted.kind, "notes": mounted.notes, "prefetched_bytes": mounted.prefetched_bytes }),
                )?;
            }
        }
        Action::Umount { mountpoint, lazy } => mount::umount(&mountpoint, lazy)?,
        Action::Ls { name: None, json } => return list_images(all()?.as_ref(), json),
        Action::Ls { name: Some(name), json } => {
            let store = open(&name)?;
            let (record, _lease) = store.hold(&name)?;
            list_files(&store.tree(&record.digest)?, json)?;
        }
        Action::Stat { names, json } => {
            return stat_images(open_all(&names)?.as_ref(), &args.domain, &names, json);
        }
        Action::Verify { names, check_frames, json } => {
            return verify_images(open_all(&names)?.as_ref(), &names, check_frames, json);
        }
        Action::Gc { dry_run, json } => {
            let stats = all()?.map_or(Ok(gc::Stats::default()), |store| gc::collect(&store, dry_run))?;
            if json {
                print_json(&serde_json::to_value(&stats)?)?;
            } else {
                say!(
                    "{} {} and {}, {}; {} and {} kept, {} cleared",
                    if dry_run { "would remove" } else { "removed" },
                    show_counted(stats.trees_removed, "tree", "trees"),
                    show_counted(stats.objects_removed, "object", "objects"),
                    show_size(stats.bytes_removed + stats.other_bytes_removed),
                    show_counted(stats.trees_kept, "tree", "trees"),
                    show_counted(stats.objects_kept, "object", "objects"),
                    show_counted(stats.builds_removed, "dead build", "dead builds")
                );
            }
            if stats.trees_unseen > 0 {
                note!(
                    "pagefold: note: {} kept: whether somebody has one mounted cannot be seen here; {}",
                    show_counted(stats.trees_unseen, "tree is", "trees are"),
                    "run gc as root, outside of containers and user namespaces, on a file system with leases (no NFS)"
                );
            }
            for line in &stats.failed {
                note!("pagefold: {line}");
            }
            for record in &stats.damaged {
                note!("pagefold: {record}, and run gc again: it keeps every tree until then");
            }
            if stats.failures > 0 {
                let failed = show_counted(stats.failures, "file or tree", "files or trees");
                return Err(format!("gc: {failed} could not be removed, all else was").into());
            }
            if !stats.damaged.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
        }
        Action::Rm { names } => {
            return Ok(super::control::for_each(&names, |name| Ok(open(name)?.remove(name)?))?.1);
        }
        Action::Export { name, output, format } => export_image(&open(&name)?, &name, &output, format)?,
        Action::Exec(exec_args) => {
            let error = exec_image(open, exec_args);
            note!("pagefold: {error}");
            // As run's: what the command itself returned is another thing.
            return Ok(ExitCode::from(match error.downcast_ref() {
                Some(ImageError::Exec { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => 127,
                Some(ImageError::Exec { .. }) => 126,
                _ => super::run::FAILED,
            }));
        }
        Action::Scan { dirs, json } => return super::scan_tree::run_tree(&dirs, json),
    }
    Ok(ExitCode::SUCCESS)
}

/// Becomes the command; returns only why not.
fn exec_image(open: impl Fn(&str) -> Result<Store, Error>, args: ExecArgs) -> Error {
    let prepare = || -> Result<_, Error> {
        let store = open(&args.name)?;
        let run = exec::Run {
            env: environment(&args.env, |name| std::env::var(name))?,
            binds: args.binds,
            mount: args.options.options(),
            command: args.command,
            user: args.user,
            workdir: args.workdir,
            scratch: args.rw,
            learn: args.record_profile.map(|seconds| Duration::from_secs(seconds.into())),
        };
        Ok((store, run))
    };
    let (store, run) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => return error,
    };
    match store.hold(&args.name) {
        Ok((record, lease)) => exec::exec(&store, &record, &lease, &run, begun::become_it).into(),
        Err(error) => error.into(),
    }
}

/// Says how a user whose store cannot be reached names another.
fn elsewhere(error: ImageError) -> Error {
    use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem};
    match &error {
        ImageError::Io { source, .. }
            if matches!(source.kind(), NotADirectory | NotFound | PermissionDenied | ReadOnlyFilesystem) =>
        {
            format!("{error}; --store names another store").into()
        }
        _ => error.into(),
    }
}

/// Says how a user who may not mount gets at the image.
fn with_other_way(error: ImageError, name: &str) -> Error {
    // SAFETY: returns a number.
    let root = unsafe { libc::geteuid() } == 0;
    match &error {
        ImageError::Mount { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied && !root => {
            format!("{error}; without root: pagefold image exec {name} -- CMD").into()
        }
        _ => error.into(),
    }
}

/// What -e asks for, as NAME=VALUE; `caller` is the caller's environment.
fn environment(wanted: &[String], caller: impl Fn(&str) -> Result<String, VarError>) -> Result<Vec<String>, String> {
    let one = |pair: &String| match pair.split_once('=') {
        Some(("", _)) => Err(format!("-e {pair}: give NAME=VALUE")),
        Some(_) => Ok(pair.clone()),
        None => match caller(pair) {
            Ok(value) => Ok(format!("{pair}={value}")),
            Err(error) => Err(format!("-e {pair}: {error} here; give {pair}=VALUE")),
        },
    };
    wanted.iter().map(one).collect()
}

fn report_built(record: &Record, stats: &pagefold_image::store::BuildStats, json: bool) -> Result<(), Error> {
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
fn is_stdin(path: &Path) -> Result<bool, Error> {
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

fn build_image(store: &Store, args: BuildArgs, stdin: bool) -> Result<(), Error> {
    let (mut notes, limits) = (Omissions::default(), Limits::default());
    let source = args.path.display().to_string();
    let building = store.build()?;
    let progress = Progress::new("build");
    let mut config = RunConfig::default();
    let tree = if !stdin && !args.plain && oci::is_image(&args.path)? {
        let imported = oci::import(&building, &args.path, None, limits, &mut notes, &progress);
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
        apply_tar(&building, &mut tree, plain, false, limits, &mut notes, &silent).map_err(of_input)?;
        tree
    };
    drop(progress);
    let record = building.publish(&args.name, &tree, &source, config, notes.lines())?;
    if args.native {
        export::make_native(store, &record.digest, &Progress::new("native"))?;
    }
    report_built(&record, building.stats(), args.json)
}

fn import_image(store: &Store, args: ImportArgs, stdin: bool) -> Result<(), Error> {
    let limits = Limits { bytes: args.max_bytes, entries: args.max_entries, ..Limits::default() };
    let mut notes = Omissions::default();
    let building = store.build()?;
    let progress = Progress::new("import");
    let source = args.path.display().to_string();
    let path = if stdin { Path::new("/dev/stdin") } else { &args.path };
    let imported = oci::import(&building, path, args.reference.as_deref(), limits, &mut notes, &progress);
    let (tree, config) =
        imported.map_err(|error| of_input(error, &source, "a plain directory or archive is for image build"))?;
    drop(progress);
    let record = building.publish(&args.name, &tree, &source, config, notes.lines())?;
    report_built(&record, building.stats(), args.json)
}

/// Names what could not be read, and says how that ends.
fn complain_of(damaged: &[DamagedImage]) -> ExitCode {
    for record in damaged {
        note!("pagefold: {record}");
    }
    if damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn list_images(store: Option<&Store>, json: bool) -> Result<ExitCode, Error> {
    let Records { images, damaged } = store.map_or(Ok(Records::default()), Store::records)?;
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

fn list_files(tree: &Tree, json: bool) -> Result<(), Error> {
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

fn stat_images(store: Option<&Store>, domain: &str, names: &[String], json: bool) -> Result<ExitCode, Error> {
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

fn verify_images(store: Option<&Store>, names: &[String], frames: bool, json: bool) -> Result<ExitCode, Error> {
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

fn export_image(store: &Store, name: &str, output: &Path, format: Format) -> Result<(), Error> {
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
        Format::Oci => export::oci(store, &record, &tree, output, &progress)?,
        Format::Erofs => export::to_file(output, |file| export::erofs_full(store, &tree, file, &progress))?,
        Format::Tar => {
            export::to_file(output, |file| export::tar(store, &tree, &mut BufWriter::new(file), &progress))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_without_a_value_is_the_callers_or_refused() {
        let caller = |name: &str| if name == "HERE" { Ok("a=b".to_string()) } else { Err(VarError::NotPresent) };
        let all = |wanted: &[&str]| environment(&wanted.iter().map(ToString::to_string).collect::<Vec<_>>(), caller);
        assert_eq!(all(&["A=1", "HERE", "B="]).unwrap(), ["A=1", "HERE=a=b", "B="]);
        for wanted in ["MISSING", "=1", ""] {
            assert!(all(&["A=1", wanted]).unwrap_err().starts_with(&format!("-e {wanted}: ")));
        }
    }
}
