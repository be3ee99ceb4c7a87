//! `pagefold image`: trees stored by content and mounted so that equal files share page cache.

mod any;
mod args;
mod build;
mod exec;
mod export;
mod registry;
mod show;

use crate::error::Error;
use crate::output::print_json;
use crate::units::{show_counted, show_size};
use crate::{note, say};
pub use args::Args;
use args::{Action, DEFAULT_DOMAIN, GcArgs, MountArgs, RegistryArgs};
use pagefold_image::Error as ImageError;
use pagefold_image::gc;
use pagefold_image::mount;
use pagefold_image::store::{Store, default_root};
pub use registry::{CURE as REGISTRY_CURE, program as registry_program};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Where a command finds its store, and the domain there.
struct StoreLocation {
    root: PathBuf,
    domain: String,
}

impl StoreLocation {
    /// The store, made if it is missing.
    fn make(&self) -> Result<Store, Error> {
        Store::open(&self.root, &self.domain).map_err(elsewhere)
    }

    /// The store, if it is there. Only build and import make a store; a missing one is as good as an empty one.
    fn find(&self) -> Result<Option<Store>, Error> {
        match Store::open_existing(&self.root, &self.domain).map_err(elsewhere)? {
            None if self.domain != DEFAULT_DOMAIN => {
                Err(format!("no domain {:?} in {}; image build makes one", self.domain, self.root.display()).into())
            }
            found => Ok(found),
        }
    }

    /// The store that should hold image `name`.
    fn of_image(&self, name: &str) -> Result<Store, Error> {
        let missing =
            || ImageError::NoImage { name: name.into(), domain: self.domain.clone(), store: self.root.clone() };
        Ok(self.find()?.ok_or_else(missing)?)
    }

    /// The store for a command about the images `names`, or about all if none is named; a missing store is noted.
    fn of_images(&self, names: &[String]) -> Result<Option<Store>, Error> {
        if let Some(name) = names.first() {
            return self.of_image(name).map(Some);
        }
        let store = self.find()?;
        if store.is_none() {
            note!("pagefold: note: no image store in {}; image build makes one", self.root.display());
        }
        Ok(store)
    }
}

/// Runs the image command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let location = StoreLocation { root: args.store.unwrap_or_else(default_root), domain: args.domain };
    match args.action {
        Action::Build(build) => {
            let stdin = build::is_stdin(&build.path)?;
            build::build_image(&location.make()?, build, stdin)?;
        }
        Action::Import(import) => {
            let stdin = build::is_stdin(&import.path)?;
            build::import_image(&location.make()?, import, stdin)?;
        }
        Action::Pull(pull) => return Err(registry::pull(&location.root, &location.domain, &pull)),
        Action::Push(push) => return Err(registry::push(&location.root, &location.domain, &push)),
        Action::Mount(mount) if mount.lazy => return registry::mount(&location.root, &location.domain, &mount),
        Action::Mount(mount) => mount_image(&location, &mount)?,
        Action::Umount { mountpoint, lazy, json } => unmount(&mountpoint, lazy, json)?,
        Action::Ls { remote: Some(remote), registry, .. } => {
            return Err(registry::of_fleet("ls", &remote, Vec::new(), &[], &registry));
        }
        Action::Ls { name: None, registry: RegistryArgs { json, .. }, .. } => {
            return show::list_images(location.of_images(&[])?.as_ref(), json);
        }
        Action::Ls { name: Some(name), registry: RegistryArgs { json, .. }, .. } => {
            let store = location.of_image(&name)?;
            let (record, _lease) = store.hold(&name)?;
            show::list_files(&store.tree(&record.digest)?, json)?;
        }
        Action::Stat { any, json, .. } if !any.is_empty() => return any::stat_directories(&any, json),
        Action::Stat { names, json, .. } => {
            return show::stat_images(location.of_images(&names)?.as_ref(), &location.domain, &names, json);
        }
        Action::Verify { names, check_frames, json } => {
            return show::verify_images(location.of_images(&names)?.as_ref(), &names, check_frames, json);
        }
        Action::Gc(GcArgs { remote: Some(remote), dry_run, keep, wait, registry }) => {
            let mut more = vec![format!("--keep={}", keep.as_secs_f64()), format!("--wait={}", wait.as_secs_f64())];
            more.extend(dry_run.then(|| "--dry-run".into()));
            return Err(registry::of_fleet("gc", &remote, more, &[], &registry));
        }
        Action::Gc(gc) => return collect(location.of_images(&[])?.as_ref(), gc.dry_run, gc.registry.json),
        Action::Rm { names, remote: Some(remote), registry } => {
            return Err(registry::of_fleet("rm", &remote, Vec::new(), &names, &registry));
        }
        Action::Rm { names, registry, .. } => return remove(&location, &names, registry.json),
        Action::Export { name, output, format } => {
            export::export_image(&location.of_image(&name)?, &name, &output, format)?;
        }
        Action::Exec(exec) => return Ok(exec::run(|name| location.of_image(name), exec)),
        Action::Scan { dirs, json } => return super::scan_tree::run_tree(&dirs, json),
    }
    Ok(ExitCode::SUCCESS)
}

fn mount_image(location: &StoreLocation, args: &MountArgs) -> Result<(), Error> {
    let store = location.of_image(&args.name)?;
    let (record, _lease) = store.hold(&args.name)?;
    let mounted = mount::mount(&store, &record, &args.mountpoint, &args.options.options())
        .map_err(|error| with_other_way(error, &args.name))?;
    for note in &mounted.notes {
        note!("pagefold: note: {note}");
    }
    if args.registry.json {
        print_json(
            &json!({ "name": record.name, "digest": record.digest, "mountpoint": args.mountpoint.display().to_string(),
            "kind": mounted.kind, "notes": mounted.notes, "prefetched_bytes": mounted.prefetched_bytes }),
        )?;
    }
    Ok(())
}

fn unmount(mountpoint: &Path, lazy: bool, json: bool) -> Result<(), Error> {
    mount::umount(mountpoint, lazy)?;
    if json {
        print_json(&json!({ "mountpoint": mountpoint.display().to_string() }))?;
    }
    Ok(())
}

/// Forgets the images `names`; their objects stay until gc.
fn remove(location: &StoreLocation, names: &[String], json: bool) -> Result<ExitCode, Error> {
    let remove = |name: &String| location.of_image(name)?.remove(name).map(|_| name.clone()).map_err(Error::from);
    let (removed, code) = super::control::for_each(names, remove)?;
    if json {
        print_json(&json!({ "removed": removed }))?;
    }
    Ok(code)
}

fn collect(store: Option<&Store>, dry_run: bool, json: bool) -> Result<ExitCode, Error> {
    let stats = store.map_or(Ok(gc::Stats::default()), |store| gc::collect(store, dry_run))?;
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
            "pagefold: note: {} kept, because mounts of other processes cannot be seen here; {}",
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
    Ok(if stats.damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Adds to the error of an unreachable store how to name another.
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

/// Adds to the error of a user that may not mount how to use the image without.
fn with_other_way(error: ImageError, name: &str) -> Error {
    let root = pagefold_os::user::effective() == 0;
    match &error {
        ImageError::Mount { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied && !root => {
            format!("{error}; without root: pagefold image exec {name} -- CMD").into()
        }
        _ => error.into(),
    }
}
