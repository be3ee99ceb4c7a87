//! Equal files share page frames, and what is reported about memory is measured.

use crate::common::build_dir;
use crate::executable;
use crate::fixture::{Fixture, InMemory, Scratch, drop_cache, inodes, noise, sample, umount, unmount};
use pagefold_image::digest::Digest;
use pagefold_image::mount::Options;
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::{mount, scan, stat};
use rustix::fs::{CWD, FileType, Mode};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

#[test]
fn equal_files_of_different_images_share_page_frames() {
    let Some(Fixture { scratch, store, .. }) = Fixture::new() else { return };
    let shared = noise(3, 5_000_000);
    let mut mounts = Vec::new();
    for (image, path, mode) in [("one", "a/first name", 0o644), ("two", "b/other", 0o400)] {
        let tree = scratch.dir(&format!("tree-{image}"));
        fs::create_dir_all(tree.join(path).parent().unwrap()).unwrap();
        fs::write(tree.join(path), &shared).unwrap();
        fs::set_permissions(tree.join(path), fs::Permissions::from_mode(mode)).unwrap();
        fs::write(tree.join("own"), noise(mode, 1_000_000)).unwrap();
        let record = build_dir(&store, image, &tree).unwrap();
        let at = scratch.dir(&format!("mnt-{image}"));
        mount::mount(&store, &record, &at, &Options::default()).unwrap();
        mounts.push(at.join(path));
    }
    let object = store.object_path(&Digest::of(&shared));
    drop_cache(&object);
    let saved = |store: &Store| stat::stat(store, &[]).unwrap().0.memory_saved_bytes;
    assert_eq!(stat::stat(&store, &[]).unwrap().1[0].mounts, 1);
    assert_eq!(saved(&store), 0, "nothing of the shared file is in memory yet");
    assert_eq!(fs::read(&mounts[0]).unwrap(), shared);
    let _stays = InMemory::new(&object);
    // Reading one name made the other resident: both are the same memory.
    let pages = 5_000_000u64.div_ceil(4096) * 4096;
    assert_eq!(saved(&store), pages);
    assert_eq!(fs::read(&mounts[1]).unwrap(), shared);
    assert_eq!(saved(&store), pages, "the second reading cost nothing");
    let found = stat::verify(&store, &[], true).unwrap();
    assert!(found.frames_compared >= 2 * pages / 4096);
    assert_eq!(found.frames_equal, found.frames_compared);
    assert!(found.damaged.is_empty());

    // The negative control: two plain copies of one file show different frames, so the comparison can fail.
    let (a, b) = (scratch.dir("plain").join("a"), scratch.dir("plain").join("b"));
    fs::write(&a, &shared).unwrap();
    fs::write(&b, &shared).unwrap();
    assert_eq!(same_frames(&a, &b), 0);
    assert_eq!(same_frames(&mounts[0], &mounts[1]), pages / 4096);

    // An image that is not mounted counts the pages that it shares with a mounted one.
    umount(&scratch.dir("mnt-two"));
    let shared: Vec<u64> = stat::stat(&store, &[]).unwrap().1.iter().map(|image| image.resident_shared_bytes).collect();
    assert_eq!(shared, [0, pages]);
}

/// How many pages of two files of one size lie in the same frames, by this test's own reading of pagemap. The kernel
/// moves pages when it frees memory, so the comparison is repeated.
fn same_frames(a: &Path, b: &Path) -> u64 {
    let script = r"
import mmap, sys, struct, ctypes
def mapped(path):
    file = open(path, 'rb')
    m = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return m, ctypes.addressof(ctypes.c_char.from_buffer(m))
def frames(m, address):
    n = (len(m) + 4095) // 4096
    sum(m[i * 4096] for i in range(n))
    pagemap = open('/proc/self/pagemap', 'rb')
    pagemap.seek(address // 4096 * 8)
    return [x & ((1 << 55) - 1) for x in struct.unpack('<%dQ' % n, pagemap.read(8 * n))]
a, b = mapped(sys.argv[1]), mapped(sys.argv[2])
same = set()
for attempt in range(8):
    same |= {i for i, (x, y) in enumerate(zip(frames(*a), frames(*b))) if x == y != 0}
print(len(same))";
    let out = Command::new("python3").args(["-c", script]).args([a, b]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim().parse().unwrap()
}

/// Several mounts, some written to and some hidden.
#[test]
fn frames_are_compared_for_unchanged_visible_files() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    let upper = scratch.dir("upper");
    for (number, name) in ["kept", "shorter", "rewritten", "gone", "dir", "pipe", "link"].iter().enumerate() {
        fs::write(tree.join(name), noise(number as u32, 40_000)).unwrap();
    }
    let first = build_dir(&store, "first", &tree).unwrap();
    let options = Options { upper: Some(upper), ..Options::default() };
    mount::mount(&store, &first, &at, &options).unwrap();
    fs::write(at.join("shorter"), "x").unwrap();
    fs::write(at.join("rewritten"), noise(99, 40_000)).unwrap();
    for name in ["gone", "dir", "pipe", "link"] {
        fs::remove_file(at.join(name)).unwrap();
    }
    fs::create_dir(at.join("dir")).unwrap();
    rustix::fs::mknodat(CWD, at.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    symlink("kept", at.join("link")).unwrap();
    let compare = || {
        let found = stat::verify(&store, &[], true).unwrap();
        assert!(found.damaged.is_empty());
        (found.frames_compared, found.frames_equal)
    };
    assert_eq!(compare(), (10, 10), "the file that was left alone");
    // Another image is mounted over it, and one of its files is covered in turn.
    fs::write(tree.join("kept"), noise(50, 80_000)).unwrap();
    let second = build_dir(&store, "second", &tree).unwrap();
    mount::mount(&store, &second, &at, &Options::default()).unwrap();
    rustix::mount::mount_bind(tree.join("link"), at.join("link")).unwrap();
    assert_eq!(compare(), (20 + 5 * 10, 20 + 5 * 10));
}

#[test]
fn link_farms_of_two_domains_share_nothing() {
    let Some(scratch) = Scratch::new() else { return };
    let tree = scratch.dir("tree");
    sample(&tree);
    let of = |domain: &str| {
        let store = Store::open(&scratch.dir("store"), domain).unwrap();
        let record = build_dir(&store, "x", &tree).unwrap();
        let at = scratch.dir(domain);
        mount::mount(&store, &record, &at, &Options::default()).unwrap();
        let farm = store.tree_path(&record.digest).with_extension("shelf");
        (at, inodes(&farm).into_iter().map(|file| file.1).collect::<Vec<_>>())
    };
    let ((a, alices), (b, bobs)) = (of("alice"), of("bob"));
    assert!(alices.len() > 1 && alices.len() == bobs.len());
    assert!(!alices.iter().any(|inode| bobs.contains(inode)));
    assert_eq!(same_frames(&a.join("bin/same"), &b.join("bin/same")), 0);
}

#[test]
fn a_scan_counts_unknown_residency_as_unknown() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, owner) in [("others", 0), ("own", 65534)] {
        fs::write(tree.join(name), noise(owner, 40_960)).unwrap();
        std::os::unix::fs::chown(tree.join(name), Some(owner), Some(owner)).unwrap();
    }
    drop_cache(&tree.join("others"));
    let _stays = InMemory::new(&tree.join("own"));
    let program = scratch.path().join("test-program");
    executable::copy(&std::env::current_exe().unwrap(), &program);
    let out = Command::new(&program)
        .uid(65534)
        .gid(65534)
        .current_dir("/")
        .args(["--exact", "children::child_that_scans", "--nocapture"])
        .env("PAGEFOLD_TEST_SCAN", &tree)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        text.contains("SCANNED 40960 of 81920 resident, 1 unknown"),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );

    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    fs::read(at.join("own")).unwrap();
    let found = scan::trees(&[at], &Progress::silent()).unwrap();
    assert_eq!((found.files, found.resident_bytes, found.resident_unknown), (2, 0, 2));
}

#[test]
fn memory_that_several_mounts_show_is_counted_once() {
    let Some(Fixture { scratch, tree, at, store }) = Fixture::new() else { return };
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let size = 2_000_000;
    let pages = 2_000_000u64.next_multiple_of(4096);
    let (content, changed) = (noise(5, size), noise(6, size));
    // A layer below two mounts of overlayfs, in one of which the file was written.
    let [layer, one, two, plain] = ["layer", "one", "two", "plain"].map(|name| scratch.dir(name));
    for (path, bytes) in
        [(layer.join("file"), &content), (layer.join("other"), &changed), (plain.join("copy"), &content)]
    {
        fs::write(&path, bytes).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), Some(65534)).unwrap();
    }
    for at in [&one, &two] {
        let name = at.file_name().unwrap().to_str().unwrap();
        let [upper, work] = ["upper", "work"].map(|kind| scratch.dir(&format!("{name}-{kind}")));
        let options = format!("lowerdir={},upperdir={},workdir={}", layer.display(), upper.display(), work.display());
        let mounted =
            Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(at).status().unwrap();
        assert!(mounted.success());
    }
    fs::write(two.join("other"), &content).unwrap();
    rustix::fs::syncfs(fs::File::open(&two).unwrap()).unwrap();
    // An image of the same content, mounted too.
    fs::write(tree.join("in image"), &content).unwrap();
    let record = build_dir(&store, "x", &tree).unwrap();
    mount::mount(&store, &record, &at, &Options::default()).unwrap();
    let object = store.object_path(&Digest::of(&content));
    for path in [
        &layer.join("file"),
        &layer.join("other"),
        &plain.join("copy"),
        &scratch.path().join("two-upper/other"),
        &object,
    ] {
        drop_cache(path);
    }
    let dirs = vec![one.clone(), two.clone(), layer.clone(), plain.clone(), at.clone()];
    let held = || {
        let held = stat::held(&dirs, &Progress::silent()).unwrap();
        assert_eq!((held.unreadable, held.resident_unknown, held.memory_unknown), (0, 0, 0));
        let trees: Vec<_> = held.trees.iter().map(|t| (t.resident_bytes, t.shared_bytes, t.duplicate_bytes)).collect();
        (held.resident_bytes, held.duplicate_bytes, trees)
    };
    assert_eq!(held(), (0, 0, vec![(0, 0, 0); 5]));
    fs::read(one.join("file")).unwrap();
    let _stays = InMemory::new(&layer.join("file"));
    let (all, none) = ((pages, pages, 0), (0, 0, 0));
    assert_eq!(held(), (pages, 0, vec![all, all, all, none, none]), "one memory, three names");
    // The copy, the written file and the image's object hold the same again.
    fs::read(plain.join("copy")).unwrap();
    fs::read(two.join("other")).unwrap();
    fs::read(at.join("in image")).unwrap();
    let _stay = [plain.join("copy"), scratch.path().join("two-upper/other"), object].map(|path| InMemory::new(&path));
    let all = (pages, pages, pages);
    let others = [(2 * pages, pages, 2 * pages), all, (pages, 0, pages), (pages, 0, pages)];
    assert_eq!(held(), (4 * pages, 3 * pages, [vec![all], others.to_vec()].concat()));
    // Without root the kernel does not tell which names show one memory, and that is said.
    let program = scratch.path().join("test-program");
    executable::copy(&std::env::current_exe().unwrap(), &program);
    let mut child = Command::new(&program);
    child.uid(65534).gid(65534).current_dir("/").args(["--exact", "children::child_that_counts", "--nocapture"]);
    let out = child.env("PAGEFOLD_TEST_COUNT", format!("{}\n{}", one.display(), layer.display())).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let expected = format!("COUNTED {} resident, 1 unknown", 2 * pages);
    assert!(text.contains(&expected), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for at in [&one, &two] {
        unmount(at);
    }
}
