//! The service as containerd calls it, over its socket, with mounts made as containerd makes them.

mod common;

use common::{Client, Scratch, code, command, frames, mount, oci, option, start, unmount, until, upper};
use pagefold_image::digest::Digest;
use pagefold_image::oci::{Wanted, import};
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_snapshotter::api::{Info, Kind};
use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use tonic::Code;

const REFERENCE: &str = "containerd.io/snapshot.ref";

fn whiteout(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
}

fn opaque(path: &Path) {
    rustix::fs::setxattr(path, "trusted.overlay.opaque", b"y", XattrFlags::empty()).unwrap();
}

/// Bytes that differ for each `seed`.
fn content(seed: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// All names below `root` with what each is: kind, mode, owner, size, target of links.
fn listing(root: &Path) -> Vec<String> {
    let mut all = Vec::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let what = match (meta.is_dir(), fs::read_link(&path)) {
                (true, _) => "dir".into(),
                (_, Ok(target)) => format!("-> {}", target.display()),
                _ => format!("{} bytes", meta.len()),
            };
            let name = path.strip_prefix(root).unwrap().display().to_string();
            all.push(format!("{name} {:o} {}:{} {what}", meta.mode(), meta.uid(), meta.gid()));
            if meta.is_dir() {
                todo.push(path);
            }
        }
    }
    all.sort();
    all
}

/// Commits a layer of one file.
fn layer(client: &Client, name: &str, parent: &str, file: &str, bytes: &[u8]) {
    let key = format!("extract-1 {name}");
    let mounts = client.prepare(&key, parent).unwrap();
    fs::write(upper(&mounts).join(file), bytes).unwrap();
    client.commit(name, &key).unwrap();
}

#[test]
fn layers_become_trees_and_containers_see_them() {
    let Some(scratch) = Scratch::new() else { return };
    let _snapshotter = start(scratch.path());
    let (client, at) = (Client::new(scratch.path()), scratch.dir("mnt"));
    let shared = content(1, 300_000);

    let base = client.prepare("extract-1 base", "").unwrap();
    assert_eq!((&*base[0].r#type, base[0].options.join(",")), ("bind", "rw,rbind".into()));
    let root = upper(&base);
    for dir in ["etc/deep", "old", "replaced", "tmp"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    fs::set_permissions(&root, Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(root.join("tmp"), Permissions::from_mode(0o1777)).unwrap();
    fs::write(root.join("etc/library"), &shared).unwrap();
    fs::hard_link(root.join("etc/library"), root.join("etc/other-name")).unwrap();
    fs::write(root.join("etc/secret"), content(2, 5000)).unwrap();
    fs::set_permissions(root.join("etc/secret"), Permissions::from_mode(0o000)).unwrap();
    fs::write(root.join("etc/program"), content(3, 5000)).unwrap();
    fs::set_permissions(root.join("etc/program"), Permissions::from_mode(0o4755)).unwrap();
    std::os::unix::fs::chown(root.join("etc/deep"), Some(7), Some(8)).unwrap();
    for name in ["etc/removed", "old/file", "replaced/file"] {
        fs::write(root.join(name), name).unwrap();
    }
    client.commit("base", "extract-1 base").unwrap();
    until("its files are objects, and no longer here", || !root.exists());

    let second = client.prepare("extract-2 second", "base").unwrap();
    // containerd's applier looks here for directories that the layer does not name.
    let lower = option(&second, "lowerdir").unwrap();
    assert_eq!(fs::metadata(lower.join("tmp")).unwrap().mode() & 0o7777, 0o1777);
    let root = upper(&second);
    assert_eq!(fs::metadata(&root).unwrap().mode() & 0o7777, 0o750, "the parent's root");
    fs::create_dir(root.join("etc")).unwrap();
    whiteout(&root.join("etc/removed"));
    whiteout(&root.join("old"));
    fs::create_dir(root.join("replaced")).unwrap();
    opaque(&root.join("replaced"));
    fs::write(root.join("replaced/new"), "new").unwrap();
    symlink("library", root.join("etc/link")).unwrap();
    client.commit("second", "extract-2 second").unwrap();

    let container = client.prepare("web", "second").unwrap();
    mount(&container, &at);
    let expected = [
        "etc 40755 0:0 dir",
        "etc/deep 40755 7:8 dir",
        "etc/library 100644 0:0 300000 bytes",
        "etc/link 120777 0:0 -> library",
        "etc/other-name 100644 0:0 300000 bytes",
        "etc/program 104755 0:0 5000 bytes",
        "etc/secret 100000 0:0 5000 bytes",
        "replaced 40755 0:0 dir",
        "replaced/new 100644 0:0 3 bytes",
        "tmp 41777 0:0 dir",
    ];
    assert_eq!(listing(&at), expected);
    assert_eq!(fs::metadata(&at).unwrap().mode() & 0o7777, 0o750);
    assert_eq!(fs::read(at.join("etc/other-name")).unwrap(), shared);
    assert_eq!(fs::read(at.join("etc/secret")).unwrap(), content(2, 5000));
    assert_eq!(fs::metadata(at.join("etc/library")).unwrap().nlink(), 2);

    // What the container changes is the next layer.
    fs::rename(at.join("replaced"), at.join("renamed")).unwrap_or_else(|_| {
        // As rename(1) does it where overlayfs renames no directory of a lower layer.
        assert!(Command::new("mv").arg(at.join("replaced")).arg(at.join("renamed")).status().unwrap().success());
    });
    fs::set_permissions(at.join("etc/library"), Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(at.join("etc/link")).unwrap();
    fs::write(at.join("tmp/log"), "log").unwrap();
    let before = listing(&at);
    unmount(&at);
    client.commit("third", "web").unwrap();
    let view = client.view("look", "third").unwrap();
    mount(&view, &at);
    assert_eq!(listing(&at), before);
    assert_eq!(fs::read(at.join("etc/library")).unwrap(), shared);
    assert!(fs::write(at.join("x"), "").unwrap_err().raw_os_error() == Some(rustix::io::Errno::ROFS.raw_os_error()));
    unmount(&at);

    for name in ["look", "third", "second", "base"] {
        client.remove(name).unwrap();
    }
    client.clean_up().unwrap();
    assert_eq!(scratch.mounted(), Vec::<std::path::PathBuf>::new());
    let objects = scratch.path().join("store/domains/default/objects");
    let left = Command::new("find").arg(objects).args(["-type", "f"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "the store keeps nothing that no snapshot needs");
}

#[test]
fn equal_files_of_two_chains_are_one_in_memory() {
    let Some(scratch) = Scratch::new() else { return };
    let _snapshotter = start(scratch.path());
    let client = Client::new(scratch.path());
    let shared = content(1, 1 << 20);
    layer(&client, "one", "", "library", &shared);
    layer(&client, "two", "", "renamed", &shared);
    let (one, two) = (scratch.dir("one"), scratch.dir("two"));
    mount(&client.prepare("container-1", "one").unwrap(), &one);
    mount(&client.prepare("container-2", "two").unwrap(), &two);
    let frames = [one.join("library"), two.join("renamed")].map(|path| frames(&path));
    assert_eq!((frames[0].len(), &frames[0]), (256, &frames[1]), "each page is the same frame");
    // A container that writes gets a copy.
    fs::write(two.join("renamed"), "changed").unwrap();
    assert_eq!(fs::read(one.join("library")).unwrap(), shared);
}

#[test]
fn errors_have_the_codes_that_containerd_acts_on() {
    let Some(scratch) = Scratch::new() else { return };
    let _snapshotter = start(scratch.path());
    let client = Client::new(scratch.path());
    layer(&client, "base", "", "file", b"x");
    client.prepare("web", "base").unwrap();
    assert_eq!(code(client.prepare("web", "base")), Code::AlreadyExists);
    assert_eq!(code(client.prepare("other", "none")), Code::NotFound);
    assert_eq!(code(client.prepare("other", "web")), Code::InvalidArgument);
    assert_eq!(code(client.prepare("", "base")), Code::InvalidArgument);
    assert_eq!(code(client.commit("base", "web")), Code::AlreadyExists);
    assert_eq!(code(client.commit("new", "none")), Code::NotFound);
    assert_eq!(code(client.commit("new", "base")), Code::FailedPrecondition);
    assert_eq!(code(client.mounts("base")), Code::FailedPrecondition);
    assert_eq!(code(client.mounts("none")), Code::NotFound);
    assert_eq!(code(client.remove("base")), Code::FailedPrecondition);
    assert_eq!(code(client.remove("none")), Code::NotFound);
    assert_eq!(code(client.stat("none")), Code::NotFound);
    assert_eq!(code(client.usage("none")), Code::NotFound);
    assert_eq!(code(client.list(&["name~=x"])), Code::InvalidArgument);
    client.view("look", "base").unwrap();
    assert_eq!(code(client.commit("new", "look")), Code::FailedPrecondition);
    let info = |name: &str| Info { name: name.into(), ..Info::default() };
    assert_eq!(code(client.update(info("none"), &["labels.a"])), Code::NotFound);
    assert_eq!(code(client.update(info("web"), &["parent"])), Code::InvalidArgument);
    // Nothing of all that has changed anything.
    let names: Vec<String> = client.list(&[]).unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(names, ["base", "look", "web"]);
    // A second snapshotter neither gets the root nor the socket.
    let out = command(scratch.path()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(1) && text.contains("another snapshotter uses it"), "{text}");
    let out = command(scratch.path()).arg("--root").arg(scratch.dir("root2")).output().unwrap();
    assert!(!out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn labels_are_kept_changed_and_filtered_by() {
    let Some(scratch) = Scratch::new() else { return };
    let mut snapshotter = start(scratch.path());
    let client = Client::new(scratch.path());
    client.prepare_labelled("web", "", &[("a", "1"), ("b", "2")]).unwrap();
    let labels = |info: &Info| {
        let mut labels: Vec<String> = info.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        labels.sort();
        labels.join(" ")
    };
    let mut info = client.stat("web").unwrap();
    assert_eq!((info.kind(), &*labels(&info)), (Kind::Active, "a=1 b=2"));
    info.labels = [("a".to_string(), "3".to_string()), ("c".into(), "4".into())].into();
    assert_eq!(labels(&client.update(info.clone(), &["labels.a", "labels.b"]).unwrap()), "a=3");
    assert_eq!(labels(&client.update(info, &[]).unwrap()), "a=3 c=4");
    snapshotter.kill();
    let _snapshotter = start(scratch.path());
    assert_eq!(labels(&client.stat("web").unwrap()), "a=3 c=4");
    assert_eq!(client.list(&["labels.c==4"]).unwrap().len(), 1);
    assert_eq!(client.list(&["labels.c==5"]).unwrap().len(), 0);
}

/// Another namespace of containerd pulls an image that is here already.
#[test]
fn a_layer_that_is_here_is_not_unpacked_again() {
    let Some(scratch) = Scratch::new() else { return };
    let _snapshotter = start(scratch.path());
    let client = Client::new(scratch.path());
    let reference = |name| [(REFERENCE, name)];
    client.prepare_labelled("a/1/extract-1 base", "", &reference("sha256:base")).unwrap();
    // Not committed yet: both may unpack it.
    client.prepare_labelled("b/1/extract-1 base", "", &reference("sha256:base")).unwrap();
    client.remove("b/1/extract-1 base").unwrap();
    client.commit_labelled("a/2/sha256:base", "a/1/extract-1 base", &reference("sha256:base")).unwrap();
    client.prepare_labelled("a/3/extract-1 top", "a/2/sha256:base", &reference("sha256:top")).unwrap();
    client.commit("a/4/sha256:top", "a/3/extract-1 top").unwrap();

    assert_eq!(code(client.prepare_labelled("b/2/extract-1 x", "", &reference("sha256:base"))), Code::AlreadyExists);
    let found = client.list(&[r#"labels."containerd.io/snapshot.ref"==sha256:base,parent=="""#]).unwrap();
    assert_eq!((found.len(), &*found[0].name, found[0].kind()), (1, "a/2/sha256:base", Kind::Committed));
    let again = client.prepare_labelled("b/3/extract-1 x", "a/2/sha256:base", &reference("sha256:top"));
    assert_eq!(code(again), Code::AlreadyExists, "the reference lasts without a label at the commit");
    // The same layer over another parent is another chain.
    client.prepare_labelled("b/4/extract-1 x", "", &reference("sha256:top")).unwrap();
}

/// `pagefold image import` or `pull` has brought the image.
#[test]
fn layers_of_the_stores_images_are_not_unpacked_again() {
    let Some(scratch) = Scratch::new() else { return };
    let (low, high) = (content(1, 9000), content(2, 9000));
    let layers: [&[oci::File]; 2] = [
        &[("dir/", 0o755, b""), ("dir/low", 0o640, &low), ("dir/gone", 0o644, &low)],
        &[("dir/high", 0o644, &high), ("dir/.wh.gone", 0o644, b"")],
    ];
    let archive = scratch.path().join("image.tar");
    fs::write(&archive, oci::archive("known", &layers)).unwrap();
    let diffs = layers.map(|files| Digest::of(&oci::tar(files)));
    let chains = [diffs[0], Digest::of(format!("{} {}", diffs[0], diffs[1]).as_bytes())].map(|chain| chain.to_string());
    {
        let store = Store::open(&scratch.path().join("store"), "default").unwrap();
        let build = store.build().unwrap();
        let (limits, mut omissions) = (Default::default(), Default::default());
        let progress = Progress::silent();
        let (tree, config) = import(&build, &archive, &Wanted::default(), limits, &mut omissions, &progress).unwrap();
        build.publish("known", &tree, "t", config, vec![]).unwrap();
    }

    let _snapshotter = start(scratch.path());
    let client = Client::new(scratch.path());
    let prepare = |key: &str, parent: &str, chain: &str| client.prepare_labelled(key, parent, &[(REFERENCE, chain)]);
    let made = |chain: &str, parent: &str| {
        let found = client.list(&[format!(r#"labels."{REFERENCE}"=={chain},parent=="{parent}""#).as_str()]).unwrap();
        assert_eq!((found.len(), found[0].kind()), (1, Kind::Committed));
        found[0].name.clone()
    };
    // Not over nothing, and not of another image.
    prepare("a/1/extract-1 x", "", &chains[1]).unwrap();
    prepare("a/2/extract-1 x", "", &Digest::of(b"x").to_string()).unwrap();
    prepare("a/3/extract-1 x", "", "sha256:x").unwrap();
    assert_eq!(code(prepare("a/4/extract-1 x", "", &chains[0])), Code::AlreadyExists);
    let base = made(&chains[0], "");
    assert_eq!(code(prepare("a/5/extract-1 x", &base, &chains[1])), Code::AlreadyExists);
    let top = made(&chains[1], &base);
    assert_eq!(code(prepare("b/1/extract-1 x", &base, &chains[1])), Code::AlreadyExists);
    assert_eq!(made(&chains[1], &base), top, "it is made once");

    let at = scratch.path().join("root-of-a-container");
    mount(&client.prepare("a/6/web", &top).unwrap(), &at);
    assert!(fs::read(at.join("dir/low")).unwrap() == low && fs::read(at.join("dir/high")).unwrap() == high);
    assert!(!at.join("dir/gone").exists());
    unmount(&at);
    // The image's name may go, and the snapshots stay; what they had goes with them.
    Store::open(&scratch.path().join("store"), "default").unwrap().remove("known").unwrap();
    client.clean_up().unwrap();
    mount(&client.mounts("a/6/web").unwrap(), &at);
    assert!(fs::read(at.join("dir/low")).unwrap() == low);
    unmount(&at);
    for name in ["a/6/web", &top, &base] {
        client.remove(name).unwrap();
    }
    client.clean_up().unwrap();
    let objects = scratch.path().join("store/domains/default/objects");
    let left = Command::new("find").arg(objects).args(["-type", "f"]).output().unwrap().stdout;
    assert_eq!(String::from_utf8(left).unwrap(), "");
}

#[test]
fn usage_is_what_a_removal_would_free() {
    let Some(scratch) = Scratch::new() else { return };
    let _snapshotter = start(scratch.path());
    let client = Client::new(scratch.path());
    let size = |name: &str| client.usage(name).unwrap().size;
    let (shared, own) = (content(1, 1 << 20), content(2, 1 << 19));
    layer(&client, "base", "", "file", &shared);
    let alone = size("base");
    assert!(((1 << 20)..(1 << 20) + 16384).contains(&alone), "{alone}");
    let mounts = client.prepare("extract-2 top", "base").unwrap();
    fs::write(upper(&mounts).join("own"), &own).unwrap();
    assert!((1 << 19..(1 << 19) + 16384).contains(&size("extract-2 top")), "of an active one: its upper directory");
    client.commit("top", "extract-2 top").unwrap();
    assert!((1 << 19..(1 << 19) + 16384).contains(&size("top")), "without its parent's: {}", size("top"));
    layer(&client, "other", "", "elsewhere", &shared);
    assert!(size("other") < 16384 && size("base") < 16384, "neither frees what both have");
    client.remove("other").unwrap();
    assert_eq!(size("base"), alone);
}

/// A file that a program writes to must not become an object: all images with its content would change.
#[test]
fn a_file_that_is_written_to_is_copied() {
    let Some(scratch) = Scratch::new() else { return };
    let _snapshotter = start(scratch.path());
    let (client, at) = (Client::new(scratch.path()), scratch.dir("mnt"));
    let (first, second) = (content(1, 100_000), content(2, 100_000));
    let mounts = client.prepare("extract-1 base", "").unwrap();
    fs::write(upper(&mounts).join("open"), &first).unwrap();
    let mut open = File::options().write(true).open(upper(&mounts).join("open")).unwrap();
    client.commit("base", "extract-1 base").unwrap();
    open.write_all(&second).unwrap();
    mount(&client.view("look", "base").unwrap(), &at);
    assert_eq!(fs::read(at.join("open")).unwrap(), first);
    unmount(&at);

    // Through a mount that stays, a file can be opened at any time.
    mount(&client.prepare("web", "base").unwrap(), &at);
    fs::write(at.join("late"), &first[1..]).unwrap();
    client.commit("top", "web").unwrap();
    let _ = fs::write(at.join("late"), &second);
    let other = scratch.dir("other");
    mount(&client.view("look-2", "top").unwrap(), &other);
    assert_eq!(fs::read(other.join("late")).unwrap(), &first[1..]);
}

/// Kills the snapshotter at many moments of a commit. Afterwards the snapshot is committed with all of its files, or is as
/// it was, and shares no file with the store.
#[test]
fn a_commit_that_is_killed_is_done_or_undone() {
    let Some(scratch) = Scratch::new() else { return };
    let at = scratch.dir("mnt");
    let files: Vec<Vec<u8>> = (0..300).map(|number| content(number, 20_000)).collect();
    let (mut done, mut undone) = (0, 0);
    for round in 0..10u64 {
        let dir = scratch.dir(&format!("round-{round}"));
        let mut snapshotter = start(&dir);
        let client = Client::new(&dir);
        let root = upper(&client.prepare("extract-1 base", "").unwrap());
        for (number, bytes) in files.iter().enumerate() {
            let path = root.join(format!("{number:03}"));
            fs::write(&path, bytes).unwrap();
            std::os::unix::fs::chown(&path, Some(number as u32), Some(0)).unwrap();
        }
        let expected = listing(&root);
        std::thread::scope(|scope| {
            let commit = scope.spawn(|| client.commit("base", "extract-1 base"));
            let note = dir.join("root/snapshots/1/committing");
            until("the commit begins or ends", || note.exists() || commit.is_finished());
            let (began, pause) = (std::time::Instant::now(), std::time::Duration::from_millis(5 << round));
            until("the commit ends, or its time", || commit.is_finished() || round < 9 && began.elapsed() > pause);
            snapshotter.kill();
            let _ = commit.join().unwrap();
        });
        let _snapshotter = start(&dir);
        let client = Client::new(&dir);
        if client.stat("base").is_err() {
            undone += 1;
            assert_eq!(client.stat("extract-1 base").unwrap().kind(), Kind::Active);
            assert_eq!(listing(&root), expected);
            for path in fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()) {
                assert_eq!(fs::metadata(&path).unwrap().nlink(), 1, "{}: shared with the store", path.display());
            }
            client.commit("base", "extract-1 base").unwrap();
        } else {
            done += 1;
        }
        until("its files are no longer here", || !root.exists());
        mount(&client.view("look", "base").unwrap(), &at);
        assert_eq!(listing(&at), expected);
        for (number, bytes) in files.iter().enumerate() {
            assert_eq!(&fs::read(at.join(format!("{number:03}"))).unwrap(), bytes);
        }
        unmount(&at);
    }
    println!("{done} commits were done, {undone} undone");
    assert!(done > 0 && undone > 0, "kills came before and after the end of a commit");
}

#[test]
fn containers_outlive_the_snapshotter() {
    let Some(scratch) = Scratch::new() else { return };
    let mut snapshotter = start(scratch.path());
    let (client, at) = (Client::new(scratch.path()), scratch.dir("mnt"));
    let bytes = content(1, 100_000);
    layer(&client, "base", "", "file", &bytes);
    let mounts = client.prepare("web", "base").unwrap();
    mount(&mounts, &at);
    let mounted = scratch.mounted();
    snapshotter.kill();
    assert_eq!(fs::read(at.join("file")).unwrap(), bytes);
    fs::write(at.join("new"), "new").unwrap();
    let _snapshotter = start(scratch.path());
    assert_eq!(client.mounts("web").unwrap(), mounts);
    assert_eq!(scratch.mounted(), mounted, "the metadata is mounted once");
    assert_eq!(fs::read(at.join("file")).unwrap(), bytes);
    // As after a reboot: no mount is left, and the first request makes them again.
    unmount(&at);
    for at in scratch.mounted() {
        unmount(&at);
    }
    mount(&client.mounts("web").unwrap(), &at);
    assert_eq!((fs::read(at.join("file")).unwrap(), fs::read(at.join("new")).unwrap()), (bytes, b"new".to_vec()));
    unmount(&at);
    client.remove("web").unwrap();
    client.remove("base").unwrap();
    assert_eq!(scratch.mounted(), Vec::<std::path::PathBuf>::new());
}
