//! Runs a command with an image as its root, in a mount namespace of its own.
//!
//! As root the tree is mounted as `mount` would; other users get a user namespace in which they are root and the tree
//! a metadata directory (Linux 6.16). As root the command runs as the image's user. The namespace ends with its last
//! process, and the mount with it.

mod environment;
mod mounts;
mod namespace;
mod run;
mod user;

use crate::error::{At, Error, Result};
use crate::link_farm::LinkFarm;
use crate::proc_fd::open_path;
use crate::runtime::mount::{Options, attach, in_initial_namespace, mount_detached};
use crate::runtime::profile::{self, OpenWatch};
use crate::store::{ImageRecord, Lease, Store};
use rustix::fs::AtFlags;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;

pub use run::ExecOptions;

/// Replaces this process by the command, which `become_it` does (exec(2)); must be called while it has one thread. Returns
/// only errors. Record and lease are those of [`Store::hold`].
///
/// # Errors
/// The kernel or user cannot mount; the command is not in the tree.
pub fn exec(
    store: &Store,
    record: &ImageRecord,
    lease: &Lease,
    run: &ExecOptions,
    become_it: impl FnOnce(Command) -> io::Error,
) -> Error {
    match prepare(store, record, lease, run) {
        Ok(command) => {
            let program = command.get_program().to_string_lossy().into_owned();
            Error::Exec { program, image: record.name.clone(), source: become_it(command) }
        }
        Err(error) => error,
    }
}

/// Makes the image's tree the root of this process, and returns the command to become.
fn prepare(store: &Store, record: &ImageRecord, lease: &Lease, run: &ExecOptions) -> Result<Command> {
    // Before this process leaves the host's namespace and can no longer see the store.
    let watch = run.learn.map(|patience| profile::watch(store, &record.digest, patience)).transpose()?;
    // The disk can start to read while this process does other work.
    if let Ok(file) = fs::File::open(LinkFarm::of(store, &record.digest).metadata()) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed);
    }
    let is_system_root = rustix::process::geteuid().is_root() && in_initial_namespace();
    let profile = if run.learn.is_none() { run.mount.profile(store, &record.digest) } else { None };
    // If it cannot be started, the command starts without it, only later.
    let read_ahead = profile.and_then(|profile| profile.read_ahead(store, &record.digest));
    namespace::enter_private()?;
    let leases = open_path(&store.path("leases")).at(store.path("leases"))?;
    let mounts = MountPoints::new(store, run)?;
    let (tree, mounted) = mount_detached(store, &record.digest, lease, &mounts.options, Some(&mounts.aside))?;
    if let Some(read_ahead) = read_ahead {
        read_ahead.look_up(&tree);
    }
    mounts::report(&tree, &mounted.notes);
    attach(&tree, &mounts.root)?;
    mounts::mount_system(&tree, mounts.options.upper.is_none())?;
    mounts::mount_binds(&tree, &run.binds)?;
    enter_tree(&mounts, watch.as_ref(), &leases, lease)?;
    namespace::enter_workdir(record, run)?;
    let (program, arguments) = environment::command(record, run)?;
    let home = user::become_user(record, run, is_system_root)?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(environment::variables(record, run, home));
    Ok(command)
}

/// Where the tree and its parts are mounted in the private namespace.
struct MountPoints {
    options: Options,
    /// The tree.
    root: PathBuf,
    /// The metadata's mount.
    aside: PathBuf,
}

impl MountPoints {
    /// All commands use one directory of the store: each sees only its own mounts there. Making and removing a directory
    /// of its own would wait for the disk. With scratch changes, everything is on a tmpfs in it.
    fn new(store: &Store, run: &ExecOptions) -> Result<Self> {
        let mut options = run.mount.clone();
        let place = store.exec_place();
        if !run.scratch || options.upper.is_some() {
            return Ok(Self { options, root: place.clone(), aside: place });
        }
        mounts::tmpfs(&place, c"mode=0700")?;
        options.upper = Some(place.join("scratch"));
        let (root, aside) = (place.join("root"), place.join("metadata"));
        fs::create_dir(&root).and_then(|()| fs::create_dir(&aside)).at(&root)?;
        Ok(Self { options, root, aside })
    }
}

/// Makes the tree the root, and ends the lease: the mount table names the image now.
fn enter_tree(mounts: &MountPoints, watch: Option<&OpenWatch>, leases: &OwnedFd, lease: &Lease) -> Result<()> {
    if let Some(watch) = watch {
        watch.begin(&mounts.root)?;
    }
    namespace::pivot_to(&mounts.root)?;
    // By descriptor: the store is no longer visible, and the lease cannot remove its own file.
    let _ = rustix::fs::unlinkat(leases, lease.id(), AtFlags::empty());
    Ok(())
}
