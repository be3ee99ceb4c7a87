//! Many images in one store: what looks at all of them needs no memory for all of them.

use pagefold_image::store::Store;
use pagefold_image::tree::{FileKind, Inode, Meta, Tree};
use pagefold_image::{gc, stat};
use pagefold_os::procfs;
use std::path::Path;
use std::process::Command;

const LOOK: &str = "PAGEFOLD_LOOK";
const STORE: &str = "PAGEFOLD_LOOK_STORE";
const IMAGES: u32 = 2000;
const BASES: u32 = 20;

/// Images over bases: 200 files of each base, 3 of each image's own.
fn fill(root: &Path) -> Store {
    let store = Store::open(root, "default").unwrap().without_sync();
    let file = |data| Inode { meta: Meta { mode: 0o644, ..Meta::default() }, kind: FileKind::File(data) };
    // Above the size of files that lie in the metadata.
    let content = |what: &str, image: u32, number: u32| format!("{what} {image} {number} ").repeat(12).into_bytes();
    for base in 0..BASES {
        let (build, mut tree) = (store.build().unwrap(), Tree::default());
        for number in 0..200 {
            let data = build.put_bytes(&content("base", base, number)).unwrap();
            tree.put(format!("base/{number}").as_bytes(), file(data)).unwrap();
        }
        for image in (base..IMAGES).step_by(BASES as usize) {
            let mut tree = tree.clone();
            for number in 0..3 {
                let data = build.put_bytes(&content("own", image, number)).unwrap();
                tree.put(format!("own/{number}").as_bytes(), file(data)).unwrap();
            }
            build.publish(&format!("image-{image}"), &tree, "test", Default::default(), vec![]).unwrap();
        }
    }
    store
}

/// The child of the test below: one look at the store, in a process of its own.
#[test]
fn one_look() {
    let Ok(look) = std::env::var(LOOK) else { return };
    let store = Store::open(Path::new(&std::env::var_os(STORE).unwrap()), "default").unwrap();
    let count = match &*look {
        "list" => store.images().unwrap().len() as u64,
        "stat" => stat::stat(&store, &[]).unwrap().0.objects,
        _ => gc::collect(&store, false).unwrap().objects_removed,
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    println!("\nlook {count} {}", procfs::field(&status, "VmHWM").unwrap());
}

#[test]
fn thousands_of_images_take_no_memory_each() {
    let dir = tempfile::tempdir().unwrap();
    let store = fill(dir.path());
    let look = |what: &str| -> (u64, u64) {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "many::one_look", "--nocapture"]).env(LOOK, what).env(STORE, dir.path());
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find_map(|line| line.strip_prefix("look ")).unwrap_or_else(|| panic!("{what}: {text}"));
        let (count, peak_kib) = line.split_once(' ').unwrap();
        (count.parse().unwrap(), peak_kib.parse().unwrap())
    };
    // Every tenth image of each base, so that only their own files go.
    let gone: Vec<u32> = (0..IMAGES).filter(|image| image / BASES % 10 == 1).collect();
    let (listed, stats) = (look("list"), look("stat"));
    gone.iter().for_each(|image| store.remove(&format!("image-{image}")).unwrap());
    let collected = look("gc");
    assert_eq!((listed.0, collected.0), (IMAGES.into(), gone.len() as u64 * 3));
    for (what, (_, peak_kib)) in [("list", listed), ("stat", stats), ("gc", collected)] {
        assert!(peak_kib < 20 << 10, "{what} took {peak_kib} KiB");
    }
}
