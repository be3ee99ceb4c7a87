//! Tests that do nothing by themselves: other tests run them in child processes, as another user or in another namespace.

use crate::common::damaged;
use crate::fixture::{noise, umount};
use pagefold_image::build::Omissions;
use pagefold_image::mount::Options;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::{exec, gc, mount, scan, stat};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// In a child process: mounts twice over one directory of changes, and prints the results.
#[test]
pub fn child_that_mounts_twice() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_TWICE") else { return };
    let [store, at, upper] = arguments.split('\n').map(Path::new).collect::<Vec<_>>()[..] else { panic!("three") };
    let store = Store::open(store, "default").unwrap();
    let (record, options) = (store.image("user").unwrap(), Options { upper: Some(upper.into()), ..Options::default() });
    mount::mount(&store, &record, at, &options).unwrap();
    println!("SECOND {:?}", mount::mount(&store, &record, at, &options).map_err(|error| error.to_string()));
    umount(at);
    let attributes = || {
        let mut names = vec![0; 4096];
        let count = rustix::fs::listxattr(upper.join("upper"), &mut names[..]).unwrap();
        (names[..count].to_vec(), fs::read_dir(upper.join("upper")).unwrap().count())
    };
    let before = attributes();
    println!("THIRD {:?}", mount::mount(&store, &record, at, &options).map_err(|error| error.to_string()));
    println!("SAME {}", attributes() == before);
}

/// In a child process: makes the image's link farm, and ends mounted.
#[test]
pub fn child_that_mounts_first() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_FIRST") else { return };
    let [store, at] = arguments.split('\n').map(Path::new).collect::<Vec<_>>()[..] else { panic!("two") };
    let store = Store::open(store, "default").unwrap();
    mount::mount(&store, &store.image("x").unwrap(), at, &Options::default()).unwrap();
}

/// In a child process: executes the command of `PAGEFOLD_TEST_EXEC` in an image.
#[test]
pub fn child_that_execs() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_EXEC") else { return };
    let [store, name, mode, command] = arguments.splitn(4, '\n').collect::<Vec<_>>()[..] else { panic!("four") };
    let store = Store::open(Path::new(store), "default").unwrap();
    let (record, lease) = store.hold(name).unwrap();
    let run = exec::ExecOptions {
        command: ["/bin/sh", "-c", command].map(Into::into).to_vec(),
        binds: vec![("/etc".into(), "/host".into())],
        user: mode.strip_prefix("as ").unwrap_or_default().into(),
        scratch: mode == "rw",
        learn: (mode == "learn").then_some(Duration::from_secs(60)),
        ..exec::ExecOptions::default()
    };
    panic!("{}", exec::exec(&store, &record, &lease, &run, |mut command| command.exec()));
}

/// In a child process: scans a directory as the user of the process.
#[test]
pub fn child_that_scans() {
    let Ok(dir) = std::env::var("PAGEFOLD_TEST_SCAN") else { return };
    let found = scan::trees(&[dir.into()], &Progress::silent()).unwrap();
    println!("SCANNED {} of {} resident, {} unknown", found.resident_bytes, found.total_bytes, found.resident_unknown);
}

/// In a child process: tells what directories hold in memory as the user of the process sees it.
#[test]
pub fn child_that_counts() {
    let Ok(dirs) = std::env::var("PAGEFOLD_TEST_COUNT") else { return };
    let dirs: Vec<PathBuf> = dirs.split('\n').map(PathBuf::from).collect();
    let held = stat::held(&dirs, &Progress::silent()).unwrap();
    println!("COUNTED {} resident, {} unknown", held.resident_bytes, held.memory_unknown);
}

/// In a child process: mounts as a plain user in a user namespace and prints what the mount shows; with
/// `PAGEFOLD_TEST_WAIT` it reads again after a line of input.
#[test]
pub fn child_that_mounts_rootless() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_ROOTLESS") else { return };
    let [store, at] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("two arguments") };
    let store = Store::open(Path::new(store), "default").unwrap();
    let record = store.image("user").unwrap();
    let mounted = mount::mount(&store, &record, Path::new(at), &Options::default()).unwrap();
    let text = || fs::read(Path::new(at).join("odd")).unwrap();
    println!("MOUNTED {:?} {} {}", mounted.kind, text() == noise(2, 65), mounted.notes.join("; "));
    println!("DAMAGED {:?}", damaged(&store));
    println!("TOOL {}", fs::read(Path::new(at).join("bin/same")).unwrap() == noise(1, 300_000));
    if std::env::var_os("PAGEFOLD_TEST_WAIT").is_some() {
        std::io::stdin().read_line(&mut String::new()).unwrap();
        println!("STILL {} {}", text() == noise(2, 65), fs::read_dir(Path::new(at).join("usr")).unwrap().count());
    }
}

/// In a child process: verifies a store as the user of the process.
#[test]
pub fn child_that_verifies() {
    let Ok(store) = std::env::var("PAGEFOLD_TEST_VERIFY") else { return };
    let store = Store::open(Path::new(&store), "default").unwrap();
    println!("DAMAGED {:?}", damaged(&store));
}

/// In a child process: mounts in its user namespace, and prints the owner of the private file and whether it can be read.
#[test]
pub fn child_that_looks_at_owners() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_OWNERS") else { return };
    let [store, at] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("two arguments") };
    let store = Store::open(Path::new(store), "default").unwrap();
    mount::mount(&store, &store.image("user").unwrap(), Path::new(at), &Options::default()).unwrap();
    let file = Path::new(at).join("private");
    println!(
        "OWNER {} {:?}",
        fs::metadata(&file).unwrap().uid(),
        fs::read(&file).map(|bytes| bytes == noise(20, 5000))
    );
}

/// In a child process: removes all names and collects.
#[test]
pub fn child_that_collects() {
    let Ok(store) = std::env::var("PAGEFOLD_TEST_COLLECT") else { return };
    let store = Store::open(Path::new(&store), "default").unwrap();
    for image in store.images().unwrap() {
        store.remove(&image.name).unwrap();
    }
    let stats = gc::collect(&store, false).unwrap();
    println!("COLLECTED {} {} UNSEEN {}", stats.trees_removed, stats.objects_removed, stats.trees_unseen);
}

/// In a child process: is not dumpable, which hides its /proc files, until a line of input; like ssh agents and login
/// sessions.
#[test]
pub fn child_that_is_not_dumped() {
    if std::env::var_os("PAGEFOLD_TEST_SHY").is_none() {
        return;
    }
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable).unwrap();
    println!("SHY");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// In a child process: imports a tar archive into a store as the user of the process.
#[test]
pub fn child_that_imports() {
    let Ok(arguments) = std::env::var("PAGEFOLD_TEST_IMPORT") else { return };
    let [root, tar] = arguments.split('\n').collect::<Vec<_>>()[..] else { panic!("two arguments") };
    let store = Store::open(Path::new(root), "default").unwrap();
    let (build, mut tree, mut notes) = (store.build().unwrap(), Default::default(), Omissions::default());
    let limits = Default::default();
    let file = fs::File::open(tar).unwrap();
    pagefold_image::build::apply_archive(&build, &mut tree, file, limits, &mut notes, &Progress::silent()).unwrap();
    build.publish("user", &tree, "tar", Default::default(), notes.lines()).unwrap();
}
