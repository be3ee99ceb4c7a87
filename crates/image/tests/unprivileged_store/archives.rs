//! Archives and layouts, written by us and by other tools.

use crate::common::build_dir;
use crate::fixture::{Fixture, import, sample};
use pagefold_image::build::{Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::digest::Digest;
use pagefold_image::progress::Progress;
use pagefold_image::tree::{FileKind, Inode, Meta, Tree};
use pagefold_image::{Result, export, oci};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[test]
fn a_whiteout_name_of_a_real_file_is_not_exported() {
    let Fixture { dir, tree, store } = Fixture::new();
    let layout = dir.path().join("layout");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/.wh.file"), "real").unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    let read = store.tree(&record.digest).unwrap();
    let error = export::oci(&store, &record, &read, &layout, false, &Progress::silent()).unwrap_err().to_string();
    assert!(error.starts_with("sub/.wh.file: "), "{error}");
    assert!(!layout.exists());
    // A plain archive has no whiteouts.
    let mut tar = Vec::new();
    export::tar(&store, &read, &mut tar, &Progress::silent()).unwrap();
    let (build, mut back, mut notes) = (store.build().unwrap(), Tree::default(), Omissions::default());
    apply_archive(&build, &mut back, &tar[..], Limits::default(), &mut notes, &Progress::silent()).unwrap();
    assert!(back.find(b"sub/.wh.file").is_some());
}

#[test]
fn a_layer_that_the_store_knows_is_not_read() {
    let Fixture { dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    let layout = dir.path().join("oci");
    export::oci(&store, &record, &store.tree(&record.digest).unwrap(), &layout, false, &Progress::silent()).unwrap();
    let import_as = |name: &str| {
        let build = store.build().unwrap();
        let tree = import(&build, &layout);
        build.publish(name, &tree, "test", Default::default(), vec![]).unwrap()
    };
    let first = import_as("y");
    assert_eq!(first.layers.len(), 1);
    assert_eq!(first.layers[0].tree, record.digest);
    // The largest blob is the layer.
    let blobs = fs::read_dir(layout.join("blobs/sha256")).unwrap().map(|entry| entry.unwrap());
    fs::remove_file(blobs.max_by_key(|blob| blob.metadata().unwrap().len()).unwrap().path()).unwrap();
    let again = import_as("z");
    assert_eq!((again.digest, &again.layers), (record.digest, &first.layers));
}

/// One image, written by skopeo in every container format, has one digest.
#[test]
fn archives_by_skopeo_are_read() {
    if Command::new("skopeo").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: skopeo is not installed");
        return;
    }
    let Fixture { dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    let layout = dir.path().join("oci");
    export::oci(&store, &record, &store.tree(&record.digest).unwrap(), &layout, false, &Progress::silent()).unwrap();
    let from = format!("oci:{}", layout.display());
    for (format, path, extra) in [
        ("docker-archive:", "docker.tar", &[][..]),
        ("oci-archive:", "oci.tar", &[]),
        ("oci:", "zstd", &["--dest-compress-format", "zstd"]),
        ("oci:", "gzip", &["--dest-compress-format", "gzip"]),
    ] {
        let path = dir.path().join(path);
        let to = format!("{format}{}:name:1", path.display());
        let out =
            Command::new("skopeo").args(["--insecure-policy", "copy", "-q"]).args(extra).args([&from, &to]).output();
        let out = out.unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(oci::is_image(&path).unwrap());
        let build = store.build().unwrap();
        let tree = import(&build, &path);
        let again = build.publish("again", &tree, "skopeo", Default::default(), vec![]).unwrap();
        assert_eq!(again.digest, record.digest, "{to}");
    }
}

/// An image of two layers, the second without a file of the first, as `buildah commit` writes it in both formats.
#[test]
fn archives_by_buildah_are_read() {
    if Command::new("buildah").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: buildah is not installed");
        return;
    }
    let Fixture { dir, tree, store } = Fixture::new();
    sample(&tree);
    fs::write(tree.join("removed by the second layer"), "x").unwrap();
    let buildah = |args: &[&str]| -> Result<String, String> {
        let mut command = Command::new("buildah");
        command.args(["--storage-driver", "vfs", "--root"]).arg(dir.path().join("root"));
        let out = command.arg("--runroot").arg(dir.path().join("run")).args(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
        if out.status.success() { Ok(text(&out.stdout)) } else { Err(text(&out.stderr)) }
    };
    let first = match buildah(&["from", "scratch"]) {
        Ok(first) => first,
        Err(error) => {
            println!("SKIPPED: buildah makes no container here: {error}");
            return;
        }
    };
    buildah(&["copy", &first, tree.to_str().unwrap(), "/"]).unwrap();
    buildah(&["commit", "-q", &first, "base"]).unwrap();
    let second = buildah(&["from", "base"]).unwrap();
    let mounted = match buildah(&["mount", &second]) {
        Ok(mounted) => PathBuf::from(mounted),
        Err(error) => {
            println!("SKIPPED: buildah mounts no container here: {error}");
            return;
        }
    };
    fs::remove_file(mounted.join("removed by the second layer")).unwrap();
    fs::write(mounted.join("added"), "by the second layer").unwrap();
    fs::remove_file(tree.join("removed by the second layer")).unwrap();
    fs::write(tree.join("added"), "by the second layer").unwrap();
    for (number, (format, path)) in [("oci:", "layout"), ("docker-archive:", "docker.tar")].into_iter().enumerate() {
        let path = dir.path().join(path);
        buildah(&["commit", "-q", &second, &format!("{format}{}:name:1", path.display())]).unwrap();
        let build = store.build().unwrap();
        let found = import(&build, &path);
        let record = build.publish(&number.to_string(), &found, "buildah", Default::default(), vec![]).unwrap();
        let out = dir.path().join(format!("out{number}"));
        fs::create_dir(&out).unwrap();
        let archive = dir.path().join("out.tar");
        let mut file = fs::File::create(&archive).unwrap();
        export::tar(&store, &store.tree(&record.digest).unwrap(), &mut file, &Progress::silent()).unwrap();
        drop(file);
        assert!(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&out).status().unwrap().success());
        // Owners are those of the builder here and there; contents, links and modes are compared.
        let same = Command::new("diff").args(["-r", "--no-dereference"]).arg(&tree).arg(&out).output().unwrap();
        assert!(same.status.success(), "{format} {}", String::from_utf8_lossy(&same.stdout));
    }
}

#[test]
fn the_export_of_a_deep_tree_is_built_again() {
    let Fixture { dir: _dir, store, .. } = Fixture::new();
    let mut tree = Tree::default();
    let inode = |kind| Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind };
    tree.put(&[&b"d/".repeat(2000)[..], b"f"].concat(), inode(FileKind::Fifo)).unwrap();
    for number in 0..100 {
        let path = [&b"d/".repeat(1900)[..], format!("{number}").as_bytes()].concat();
        tree.put(&path, inode(FileKind::Dir(Default::default()))).unwrap();
    }
    let record = store.build().unwrap().publish("deep", &tree, "test", Default::default(), vec![]).unwrap();
    let mut tar = Vec::new();
    export::tar(&store, &store.tree(&record.digest).unwrap(), &mut tar, &Progress::silent()).unwrap();
    let (build, mut back, mut notes) = (store.build().unwrap(), Tree::default(), Omissions::default());
    apply_archive(&build, &mut back, &tar[..], Limits::default(), &mut notes, &Progress::silent()).unwrap();
    let again = build.publish("again", &back, "test", Default::default(), vec![]).unwrap();
    assert_eq!(again.digest, record.digest);
}

#[test]
fn an_export_to_a_full_disk_names_the_disk() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    sample(&tree);
    let record = build_dir(&store, "x", &tree).unwrap();
    let tree = store.tree(&record.digest).unwrap();
    let silent = Progress::silent();
    // At the first write, and in the middle of a file.
    for room in [0, 1_000_000] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let error = export::tar(&store, &tree, &mut std::io::BufWriter::with_capacity(room, full), &silent);
        assert_eq!(error.unwrap_err().to_string(), "output: No space left on device (os error 28)");
    }
    let full = "/dev/full".as_ref();
    let error = export::to_file(full, |file| export::erofs_full(&store, &tree, file, &silent)).unwrap_err();
    assert_eq!(error.to_string(), "/dev/full: No space left on device (os error 28)");
}

/// The archive is complete but for its end mark.
#[test]
fn an_export_that_stopped_at_a_damaged_object_is_no_archive() {
    let Fixture { dir: _dir, tree, store } = Fixture::new();
    fs::write(tree.join("file"), vec![3; 8192]).unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    fs::write(store.object_path(&Digest::of(&vec![3; 8192])), vec![4; 8192]).unwrap();
    let (mut cut, silent) = (Vec::new(), Progress::silent());
    export::tar(&store, &store.tree(&record.digest).unwrap(), &mut cut, &silent).unwrap_err();
    let (build, mut tree, mut notes) = (store.build().unwrap(), Tree::default(), Omissions::default());
    let error = apply_archive(&build, &mut tree, &cut[..], Limits::default(), &mut notes, &silent).unwrap_err();
    assert!(error.to_string().contains("no end mark after"), "{error}");
}
