//! Sparse files of archives: read in all forms of GNU tar, and exported so that it reads them back equal.

use crate::fixture::Fixture;
use pagefold_image::build::{Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::export;
use pagefold_image::progress::Progress;
use pagefold_image::store::{ImageRecord, Store};
use pagefold_image::tree::{Data, FileKind, Tree};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

fn tar(args: &[&str], archive: &Path, dir: &Path) {
    let out = Command::new("tar").args(args).arg("-f").arg(archive).arg("-C").arg(dir).arg(".").output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Makes files with holes at their beginning, middle and end, with more parts than fit a header and the block after it, of
/// nothing but a hole, and of none.
fn sample(dir: &Path) {
    fs::create_dir_all(dir.join("sub")).unwrap();
    let make = |name: &str, size: u64, parts: &[(u64, usize)]| {
        let file = File::create(dir.join(name)).unwrap();
        file.set_len(size).unwrap();
        for (index, (place, length)) in parts.iter().enumerate() {
            file.write_all_at(&vec![index as u8 + 1; *length], *place).unwrap();
        }
    };
    make("begin", 3_000_000, &[(2_000_000, 1_000_000)]);
    make("middle", 5_000_001, &[(0, 4096), (4_000_000, 1_000_001)]);
    make("end", 40_000_000, &[(0, 5)]);
    let many: Vec<(u64, usize)> = (0..60).map(|part| (part << 18, 4096)).collect();
    make("sub/many", 60 << 18, &many);
    make("hole", 200 << 20, &[]);
    make("full", 2_000_000, &[(0, 2_000_000)]);
    make("small", 100_000, &[(50_000, 5)]);
    make(
        "sub/a name of more than a hundred bytes, which is longer than a header of the oldest form has room for, too",
        9 << 20,
        &[(1 << 20, 9)],
    );
}

fn build(store: &Store, name: &str, archive: &Path) -> ImageRecord {
    let (build, mut tree, mut notes) = (store.build().unwrap(), Tree::default(), Omissions::default());
    let file = File::open(archive).unwrap();
    apply_archive(&build, &mut tree, file, Limits::default(), &mut notes, &Progress::silent()).unwrap();
    build.publish(name, &tree, "test", Default::default(), notes.lines()).unwrap()
}

#[test]
fn all_forms_of_sparse_files_are_one_image_and_go_back() {
    let Fixture { dir, tree, store } = Fixture::new();
    sample(&tree);
    let packed = dir.path().join("packed.tar");
    // Without what PAX alone has, so that all forms say the same.
    let same = ["--sort=name", "--mtime=@1", "--owner=0", "--group=0", "-c"];
    tar(&[&same[..], &["--format=gnu"]].concat(), &packed, &tree);
    let plain = build(&store, "plain", &packed);
    for form in [
        &["--format=gnu"][..],
        &["--format=posix", "--sparse-version=0.0"],
        &["--format=posix", "--sparse-version=0.1"],
        &["--format=posix", "--sparse-version=1.0"],
    ] {
        let args = [&same[..], &["-S"], form].concat();
        tar(&args[..], &packed, &tree);
        let size = fs::metadata(&packed).unwrap().len();
        if size > 100 << 20 {
            println!("SKIPPED: the temporary directory's file system has no holes: {size} bytes");
            return;
        }
        assert_eq!(build(&store, "sparse", &packed).digest, plain.digest, "{form:?}");
    }

    let read = store.tree(&plain.digest).unwrap();
    let mut file = File::create(&packed).unwrap();
    export::tar(&store, &read, &mut file, &Progress::silent()).unwrap();
    drop(file);
    let size = fs::metadata(&packed).unwrap().len();
    assert!(size < 16 << 20, "{size} bytes for 300 MB of holes");
    assert_eq!(build(&store, "again", &packed).digest, plain.digest);
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let told = Command::new("tar").arg("-xf").arg(&packed).arg("-C").arg(&out).output().unwrap();
    assert!(told.status.success() && told.stderr.is_empty(), "{}", String::from_utf8_lossy(&told.stderr));
    let same = Command::new("diff").arg("-r").arg(&tree).arg(&out).output().unwrap();
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stdout));
    let hole = fs::metadata(out.join("hole")).unwrap();
    assert!(hole.len() == 200 << 20 && hole.blocks() == 0, "{} blocks", hole.blocks());

    // Readers of layers need not know sparse files, and those of images are not read where they lie.
    let layout = dir.path().join("layout");
    let mut small = Tree::default();
    let inode = read.inode(read.clone().find(b"begin").unwrap()).clone();
    assert!(matches!(inode.kind, FileKind::File(Data::Object(_, 3_000_000))));
    small.put(b"begin", inode).unwrap();
    export::oci(&store, &plain, &small, &layout, false, &Progress::silent()).unwrap();
    let layer =
        fs::read_dir(layout.join("blobs/sha256")).unwrap().map(|blob| blob.unwrap().metadata().unwrap().len()).max();
    assert!(layer.unwrap() > 3_000_000);
}
