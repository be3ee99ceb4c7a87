//! The kernel's own merging, through /sys/kernel/mm/ksm.

use std::fs;
use std::io;
use std::path::PathBuf;

/// Whether this kernel has KSM.
pub fn exists() -> bool {
    path("run").exists()
}

fn path(name: &str) -> PathBuf {
    PathBuf::from("/sys/kernel/mm/ksm").join(name)
}

/// Reads the value `name`.
///
/// # Errors
/// As reading the file; a value that is no number is `InvalidData`.
pub fn read(name: &str) -> io::Result<i64> {
    fs::read_to_string(path(name))?.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Writes the value `name`.
///
/// # Errors
/// As writing the file.
pub fn write(name: &str, value: i64) -> io::Result<()> {
    fs::write(path(name), value.to_string())
}

/// Settings that [`Settings::restore`] (or drop) puts back.
#[derive(Debug)]
pub struct Settings {
    saved: Vec<(&'static str, i64)>,
}

const TUNABLES: &[&str] = &[
    "sleep_millisecs",
    "pages_to_scan",
    "smart_scan",
    "use_zero_pages",
    "max_page_sharing",
    "merge_across_nodes",
    "run",
];

impl Settings {
    /// Remembers all tunables as they are.
    ///
    /// # Errors
    /// If KSM is not there.
    pub fn save() -> io::Result<Settings> {
        read("run")?;
        Ok(Settings { saved: TUNABLES.iter().filter_map(|name| Some((*name, read(name).ok()?))).collect() })
    }

    /// Puts all tunables back; also unmerges what was merged meanwhile if KSM was stopped before.
    pub fn restore(&mut self) {
        for (name, value) in self.saved.drain(..) {
            if name == "run" && value == 0 {
                let _ = write("run", 2);
            }
            let _ = write(name, value);
        }
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        self.restore();
    }
}
