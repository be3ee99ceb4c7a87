//! Progress on standard error when it is a terminal: what is done, how fast, and the time left.

use pagefold_os::sanitize::clean;
use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Writes a note to standard error, with `?` for control characters: some of the text comes from images and their files.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "pagefold: note: {}", clean(text));
}

/// Counts work done and shows it, at most four times a second.
pub struct Progress {
    what: &'static str,
    start: Instant,
    done_bytes: AtomicU64,
    done_files: AtomicU64,
    total_bytes: AtomicU64,
    shown: Option<Mutex<Instant>>,
}

impl Progress {
    /// Starts counting; shows nothing unless standard error is a terminal.
    pub fn new(what: &'static str) -> Self {
        Self::make(what, std::io::stderr().is_terminal())
    }

    fn make(what: &'static str, show: bool) -> Self {
        let start = Instant::now();
        let shown = show.then(|| Mutex::new(start));
        Self {
            what,
            start,
            done_bytes: AtomicU64::new(0),
            done_files: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            shown,
        }
    }

    /// Never shows anything.
    pub fn silent() -> Self {
        Self::make("", false)
    }

    /// Sets how much there is to do in all, bytes; 0 if unknown.
    pub fn expect(&self, bytes: u64) {
        self.total_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts bytes read from `source` as done.
    pub fn watch<R: std::io::Read>(&self, source: R) -> Watched<'_, R> {
        Watched { source, progress: self }
    }

    /// Counts `bytes` done, and a finished file when `file` is set.
    pub fn add(&self, bytes: u64, file: bool) {
        let done = self.done_bytes.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
        let files = self.done_files.fetch_add(u64::from(file), Ordering::Relaxed) + u64::from(file);
        let Some(shown) = &self.shown else { return };
        let Ok(mut last) = shown.try_lock() else { return };
        if last.elapsed() < Duration::from_millis(250) {
            return;
        }
        *last = Instant::now();
        let line = line(self.what, files, done, self.total_bytes.load(Ordering::Relaxed), self.start.elapsed());
        let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
    }
}

/// A source of bytes that count as done; see [`Progress::watch`].
pub struct Watched<'a, R> {
    source: R,
    progress: &'a Progress,
}

impl<R: std::io::Read> std::io::Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.source.read(buffer)?;
        self.progress.add(count as u64, false);
        Ok(count)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// The line shown: files, bytes, rate, and the time left when the total is known.
fn line(what: &str, files: u64, done: u64, total: u64, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    let mib = |bytes: f64| bytes / (1 << 20) as f64;
    let mut text = match files {
        0 => format!("{what}: {:.0} MiB", mib(done as f64)),
        _ => format!("{what}: {files} files, {:.0} MiB", mib(done as f64)),
    };
    if total > 0 {
        text += &format!(" of {:.0} ({:.0} %)", mib(total as f64), done as f64 * 100.0 / total as f64);
    }
    text += &format!(", {:.0} MiB/s", mib(rate));
    if total > done && rate > 0.0 {
        let left = ((total - done) as f64 / rate).ceil() as u64;
        text += &format!(", {}:{:02} left", left / 60, left % 60);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_shows_rate_and_time_left() {
        let text = line("build", 3, 10 << 20, 40 << 20, Duration::from_secs(2));
        assert_eq!(text, "build: 3 files, 10 MiB of 40 (25 %), 5 MiB/s, 0:06 left");
        assert_eq!(
            line("import", 0, 10 << 20, 40 << 20, Duration::from_secs(2)),
            "import: 10 MiB of 40 (25 %), 5 MiB/s, 0:06 left"
        );
        assert_eq!(line("import", 1, 1 << 20, 0, Duration::from_secs(1)), "import: 1 files, 1 MiB, 1 MiB/s");
    }
}
