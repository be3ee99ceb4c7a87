//! An image of a fleet's store, mounted before its objects are here.
//!
//! Overlayfs looks an object up in the store first, and then in a file system of ours ([`file_system`]), which knows all
//! objects of the image by name and size. Opening one that is not here waits until it has come ([`objects`]); then the
//! kernel reads the object itself, without this process (FUSE passthrough, Linux 6.9). So its pages are those that every
//! other image shares. What the image's start profile names is fetched first, what a program waits for before all else, and
//! the rest when no program waits. With the last object the image gets its name in the store.
//!
//! This process serves the mount until it is unmounted. If it is killed, open files stay readable, and what was not here
//! cannot be opened until the image is mounted again.

mod file_system;
mod objects;

use super::image::Image;
use super::objects::Needs;
use crate::address::Address;
use crate::common::{Common, mib, say};
use crate::error::{Error, Result};
use crate::pull::Wanted;
use crate::start_profile;
use file_system::ObjectFs;
use fuser::{Config, MountOption, Session, SessionACL};
use objects::{Event, Objects};
use pagefold_image::build::Build;
use pagefold_image::digest::Digest;
use pagefold_image::mount::{self, Options};
use pagefold_image::profile::Profile;
use pagefold_image::store::Store;
use pagefold_os::heap;
use rustix::mount::UnmountFlags;
use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

/// How often what has come gets its name: a process that is killed loses no more.
const KEEP_EVERY: Duration = Duration::from_secs(20);

/// How long the end waits for requests on their way.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);

/// Threads that answer the kernel. None of them waits for an object.
const THREADS: usize = 2;

/// What is mounted, and where.
pub struct Wish<'a> {
    pub address: &'a Address,
    /// Name in the store when all of it is here.
    pub name: &'a str,
    pub mountpoint: &'a Path,
    pub options: Options,
    /// Whether to fetch only what is opened.
    pub only_opened: bool,
}

/// Mounts the image, says so on standard output and closes that, and serves the mount until it ends.
///
/// # Errors
/// No such image; a user that may not mount; a store that fails.
pub fn mount(runtime: &Runtime, common: &Common, wish: &Wish, wanted: &Wanted) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Said("mount: --lazy needs root; without root: pagefold image pull, then image exec".into()));
    }
    let Image { bucket, manifest, manifest_bytes, tree, objects } =
        Image::open(runtime, &common.server, wish.address, wanted)?;
    // The process ends with the mount: what serves it may live as long.
    let store: &'static Store = Box::leak(Box::new(Store::open(&common.store, &common.domain)?));
    let build: Arc<Build<'static>> = Arc::new(store.build()?);
    let digest = build.name_early(&tree)?;
    let has = build.has_all(&objects)?;
    let profile = manifest.head.profile.as_ref().and_then(Profile::from_outside);
    let is_wanted = !wish.options.no_prefetch;
    let first: Vec<Digest> = profile.iter().filter(|_| is_wanted).flat_map(Profile::objects).collect();
    let needs = Needs::of(&manifest, objects, &has);
    let (all, missing) = (needs.objects.len(), needs.missing);
    let head = manifest.head;
    let publish = || {
        let record = build.publish(wish.name, &tree, &wish.address.whole(), head.config.clone(), head.notes.clone())?;
        start_profile::keep(store, &record.digest, profile.clone());
        Ok::<(), Error>(())
    };
    if missing == 0 {
        publish()?;
        let mounted = mount::mount_tree(store, &digest, wish.mountpoint, &wish.options)?;
        return report(common, wish, &digest, &mounted, (all, 0));
    }
    let objects = Objects::new(runtime.handle().clone(), bucket, &build, needs, &has);
    let objects = Arc::new(objects.with_requests(&first, wish.only_opened));
    objects.count_bytes(manifest_bytes);
    let mounted = show(&build, &objects, &digest, wish)?;
    let started = objects.start();
    let told = started.and_then(|()| report(common, wish, &digest, &mounted, (all, missing)));
    let told = told.and_then(|()| quiet_stdout());
    if let Err(error) = told {
        // The caller knows of no mount.
        let _ = mount::umount(wish.mountpoint, true);
        return Err(error);
    }
    end_on_signal(runtime, &objects);
    let served = serve(&build, &objects, wish, &publish);
    // With its last user the build removes its lease. A thread that waits for a silent server may have it for longer: then
    // the next build or collection removes the lease.
    let began = Instant::now();
    while Arc::strong_count(&build) > 1 && began.elapsed() < LEAVE_PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    served
}

/// Mounts the image at its place, over a file system that shows its objects and is itself seen nowhere.
fn show(build: &Build, objects: &Arc<Objects>, digest: &Digest, wish: &Wish) -> Result<mount::Mounted> {
    let at: PathBuf = build.scratch_path();
    let failed = |what: &str, error: std::io::Error| Error::Said(format!("mount: {what}: {error}"));
    fs::create_dir(&at).map_err(|error| failed(&at.display().to_string(), error))?;
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("pagefold-objects".into()), MountOption::RO];
    config.acl = SessionACL::All;
    config.n_threads = Some(THREADS);
    heap::map_large_allocations();
    let session = Session::new(ObjectFs::new(objects.clone()), &at, &config).map_err(|error| failed("FUSE", error))?;
    let serving = objects.clone();
    let served = std::thread::Builder::new().name("fuse".into()).spawn(move || {
        let ended = session.run();
        serving.end(ended.err().map(|error| format!("FUSE: {error}")));
    });
    let mounted = served.map_err(|error| failed("a thread", error)).and_then(|_| {
        let options = Options { coming: Some(at.clone()), no_prefetch: true, ..wish.options.clone() };
        Ok(mount::mount_tree(build.store(), digest, wish.mountpoint, &options)?)
    });
    // Overlayfs has a mount of its own of it. It ends with the last of them, and with it this process.
    let _ = rustix::mount::unmount(&at, UnmountFlags::DETACH);
    let _ = fs::remove_dir(&at);
    mounted
}

/// Waits until the mount ends. Meanwhile what has come gets its name, and with the last object the image.
fn serve(build: &Build, objects: &Objects, wish: &Wish, publish: &dyn Fn() -> Result<()>) -> Result<()> {
    let mut is_stored = false;
    loop {
        match objects.wait(KEEP_EVERY, is_stored) {
            Event::Time => {
                if let Err(error) = build.keep() {
                    objects.say(&format!("what has come has no names yet: {error}"));
                }
            }
            Event::Whole => match publish() {
                Ok(()) => {
                    is_stored = true;
                    let fetched = mib(objects.bytes_fetched());
                    objects.say(&format!("all of it is here, {fetched:.1} MiB fetched; stored as {}", wish.name));
                }
                Err(error) => {
                    objects.say(&format!("all of it is here, and could not be stored: {error}"));
                    std::thread::sleep(KEEP_EVERY);
                }
            },
            Event::End(why) => {
                // What came need not come again.
                let kept = build.keep();
                let fetched = mib(objects.bytes_fetched());
                objects.say(&format!(
                    "ends, {fetched:.1} MiB fetched{}",
                    why.map_or(String::new(), |why| ": ".to_string() + &why)
                ));
                return kept.map_err(Error::from);
            }
        }
    }
}

/// Ends the process in good order when it is asked to. The mount stays: open files are still read.
fn end_on_signal(runtime: &Runtime, objects: &Arc<Objects>) {
    let _in_runtime = runtime.enter();
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let Ok(mut asked) = signal(kind) else { continue };
        let objects = objects.clone();
        runtime.spawn(async move {
            asked.recv().await;
            objects
                .end(Some("asked to by a signal; what is not here cannot be opened until it is mounted again".into()));
        });
    }
}

/// Says what is mounted.
fn report(
    common: &Common,
    wish: &Wish,
    digest: &Digest,
    mounted: &mount::Mounted,
    (all, missing): (usize, usize),
) -> Result<()> {
    let at = wish.mountpoint.display().to_string();
    if common.server.json {
        return say(&format!(
            "{:#}",
            json!({ "name": wish.name, "digest": digest, "mountpoint": at, "kind": mounted.kind, "notes": mounted.notes,
                "prefetched_bytes": mounted.prefetched_bytes, "objects": all, "objects_missing": missing,
                "pid": (missing > 0).then(std::process::id) })
        ));
    }
    let lines = mounted.notes.iter().map(|note| format!("note: {note}\n")).collect::<String>();
    if missing == 0 {
        return say(&format!("{lines}{} is mounted at {at}, all of it is here", wish.name));
    }
    let pid = std::process::id();
    say(&format!(
        "{lines}{} is mounted at {at}; {missing} of {all} objects are still to come, by process {pid}",
        wish.name
    ))
}

/// Closes standard output, so that its reader goes on.
fn quiet_stdout() -> Result<()> {
    let null = File::options().write(true).open("/dev/null");
    let done = null.and_then(|null| Ok(rustix::stdio::dup2_stdout(&null)?));
    done.map_err(|error| Error::Said(format!("/dev/null: {error}")))
}
