//! Status of processes other than the daemon: mounts of disk images and stores of image trees, for `status`, `top` and
//! the daemon's page.

use pagefold_image::stat::{Stat, stat};
use pagefold_image::store::{Store, default_root};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

/// How long a mount may take to answer.
const DISK_PATIENCE: Duration = Duration::from_millis(500);
/// Time between two looks at the mounts by the background thread.
const DISKS_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two looks at the image stores: each asks the kernel about every object.
pub const IMAGES_INTERVAL: Duration = Duration::from_secs(10);

/// A domain of this user's store of image trees.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ImageStore {
    /// Directory of the store.
    pub root: String,
    /// Domain.
    pub domain: String,
    /// What it holds and saves.
    #[serde(flatten)]
    pub stat: Stat,
}

/// The mounts of this user that answer.
pub fn disks() -> Vec<pagefold_disk::Status> {
    pagefold_disk::control::statuses(DISK_PATIENCE)
}

/// This user's store of images, domain by domain.
pub fn images() -> Vec<ImageStore> {
    let root = default_root();
    // Opening makes what is missing; looking must not.
    let domains = Store::domains(&root).unwrap_or_default();
    let look = |domain: String| {
        let store = Store::open(&root, &domain).ok()?;
        let (stat, _) = stat(&store, &[]).ok()?;
        Some(ImageStore { root: root.display().to_string(), domain, stat })
    };
    domains.into_iter().filter_map(look).collect()
}

static SEEN: Mutex<(Vec<pagefold_disk::Status>, Vec<ImageStore>)> = Mutex::new((Vec::new(), Vec::new()));
static LOOK: Once = Once::new();

/// Adds mounts and stores to a status, as of the last look of a thread that looks from the first call on: a mount that
/// hangs or a large store must not keep the daemon's own figures from being told.
pub fn add_to(status: &mut serde_json::Map<String, serde_json::Value>) {
    keep_looking();
    let Ok(seen) = SEEN.lock() else { return };
    for (name, value) in [("disks", serde_json::to_value(&seen.0)), ("images", serde_json::to_value(&seen.1))] {
        status.insert(name.into(), value.unwrap_or_default());
    }
}

/// One family of metrics: name, kind, help, value of a store; all are bytes or plain counts.
type ImageFamily = (&'static str, &'static str, &'static str, fn(&Stat) -> u64);

const OF_IMAGES: &[ImageFamily] = &[
    ("images", "", "Images by name.", |s| s.images),
    ("mounts", "", "Mounts of them, in all namespaces we may see.", |s| s.mounts),
    ("logical_bytes", "bytes", "Bytes of all files of all images.", |s| s.logical_bytes),
    ("object_bytes", "bytes", "Bytes of the objects that hold them.", |s| s.object_bytes),
    ("resident_bytes", "bytes", "Bytes of objects in the page cache.", |s| s.resident_bytes),
    ("memory_saved_bytes", "bytes", "What plain copies would need in addition.", |s| s.memory_saved_bytes),
];

/// Appends the metrics of image stores, as of the last look: none before the first one is done.
pub fn render_images(out: &mut String) {
    use std::fmt::Write;
    keep_looking();
    let Ok(seen) = SEEN.lock() else { return };
    let escape = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    for (name, unit, help, value) in OF_IMAGES {
        let _ = writeln!(out, "# TYPE pagefold_image_{name} gauge");
        if !unit.is_empty() {
            let _ = writeln!(out, "# UNIT pagefold_image_{name} {unit}");
        }
        let _ = writeln!(out, "# HELP pagefold_image_{name} {help}");
        for store in &seen.1 {
            let (root, domain) = (escape(&store.root), escape(&store.domain));
            let value = value(&store.stat);
            let _ = writeln!(out, "pagefold_image_{name}{{store=\"{root}\",domain=\"{domain}\"}} {value}");
        }
    }
}

fn keep_looking() {
    LOOK.call_once(|| {
        std::thread::spawn(|| {
            let mut looked: Option<Instant> = None;
            loop {
                if looked.is_none_or(|looked| looked.elapsed() >= IMAGES_INTERVAL) {
                    let images = images();
                    looked = Some(Instant::now());
                    if let Ok(mut seen) = SEEN.lock() {
                        seen.1 = images;
                    }
                }
                let disks = disks();
                if let Ok(mut seen) = SEEN.lock() {
                    seen.0 = disks;
                }
                std::thread::sleep(DISKS_INTERVAL);
            }
        });
    });
}
