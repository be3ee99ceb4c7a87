//! The kernel's side: zswap behind a swap file, and zram; made for the run, undone when dropped.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

type Act = Box<dyn FnOnce() + Send>;

/// What is to be undone, oldest first.
static UNDO: Mutex<BTreeMap<u64, Act>> = Mutex::new(BTreeMap::new());
static UNDO_NEXT: AtomicU64 = AtomicU64::new(0);

/// An act that runs when this is dropped, or when the run is ended by a signal.
pub struct Undo(u64);

impl Undo {
    pub fn later(act: impl FnOnce() + Send + 'static) -> Undo {
        let number = UNDO_NEXT.fetch_add(1, Ordering::Relaxed);
        UNDO.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Box::new(act));
        Undo(number)
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let act = UNDO.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        if let Some(act) = act {
            act();
        }
    }
}

/// Lets SIGTERM, SIGINT and SIGHUP undo everything, newest first, before they end the process.
///
/// To be called while the process has one thread, so that all others inherit the mask.
pub fn undo_on_signals() {
    // SAFETY: an all-zero set is emptied before use; the calls read and write only the set and the number.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe {
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
    std::thread::spawn(move || {
        let mut signal = 0;
        // SAFETY: the set is initialised, and the kernel writes the number only.
        if unsafe { libc::sigwait(&raw const set, &raw mut signal) } == 0 {
            let acts = std::mem::take(&mut *UNDO.lock().unwrap_or_else(PoisonError::into_inner));
            acts.into_values().rev().for_each(|act| act());
            std::process::exit(128 + signal);
        }
    });
}

const ZSWAP: &str = "/sys/module/zswap/parameters";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

fn command(program: &str, args: &[&str]) -> io::Result<()> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output()?;
    let error = || io::Error::other(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    if output.status.success() { Ok(()) } else { Err(error()) }
}

/// Sets a switch of the kernel; it gets its old value back.
fn set(path: impl AsRef<Path>, value: &str) -> io::Result<Undo> {
    let path = path.as_ref().to_owned();
    let text = fs::read_to_string(&path)?;
    // A choice shows the chosen one in brackets.
    let chosen = text.split_ascii_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    let old = chosen.unwrap_or(text.trim()).to_owned();
    fs::write(&path, value)?;
    Ok(Undo::later(move || drop(fs::write(path, old))))
}

/// zswap over a swap file.
pub struct Zswap(Vec<Undo>);

impl Zswap {
    /// Switches zswap on over a swap file of `bytes`.
    ///
    /// Refuses if there is swap already: its pages would be counted with ours.
    pub fn start(bytes: u64) -> io::Result<Zswap> {
        if fs::read_to_string("/proc/swaps")?.lines().count() > 1 {
            return Err(io::Error::other("there is swap already"));
        }
        let file = std::env::temp_dir().join(format!("pagefold-bench-swap-{}", std::process::id()));
        let path = file.to_string_lossy().into_owned();
        let mut zswap = Zswap(vec![Undo::later(move || drop(fs::remove_file(file)))]);
        command("fallocate", &["-l", &bytes.to_string(), &path])?;
        command("chmod", &["600", &path])?;
        command("mkswap", &[&path])?;
        zswap.0.push(set(PAGE_CLUSTER, "0")?);
        zswap.0.push(set(format!("{ZSWAP}/max_pool_percent"), "50")?);
        zswap.0.push(set(format!("{ZSWAP}/enabled"), "Y")?);
        command("swapon", &[&path])?;
        zswap.0.push(Undo::later(move || drop(command("swapoff", &[&path]))));
        Ok(zswap)
    }

    /// The compressor in use.
    pub fn compressor() -> String {
        fs::read_to_string(format!("{ZSWAP}/compressor")).unwrap_or_default().trim().to_owned()
    }

    /// Sets how many pages a fault brings back, as a power of two.
    pub fn page_cluster(power: u32) -> io::Result<()> {
        fs::write(PAGE_CLUSTER, power.to_string())
    }

    /// Bytes of zswap's pool, and bytes of the pages in it.
    pub fn bytes() -> (f64, f64) {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse::<f64>().ok()).unwrap_or(f64::NAN) * 1024.0
        };
        (field("Zswap:"), field("Zswapped:"))
    }

    /// Pages that came back from zswap's pool since the machine started.
    pub fn pages_in() -> f64 {
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("zswpin ")?.parse().ok());
        count.unwrap_or(f64::NAN)
    }
}

impl Drop for Zswap {
    fn drop(&mut self) {
        // Newest first: swap off before its file goes.
        while self.0.pop().is_some() {}
    }
}

/// Bytes of memory that zram with `algorithm` holds for `pages`.
pub fn zram_bytes(pages: &[u8], algorithm: &str) -> io::Result<f64> {
    let number: u32 =
        fs::read_to_string("/sys/class/zram-control/hot_add")?.trim().parse().map_err(io::Error::other)?;
    let _device = Undo::later(move || {
        let _ = fs::write(format!("/sys/block/zram{number}/reset"), "1");
        let _ = fs::write("/sys/class/zram-control/hot_remove", number.to_string());
    });
    let system = |name: &str| format!("/sys/block/zram{number}/{name}");
    fs::write(system("comp_algorithm"), algorithm)?;
    fs::write(system("disksize"), (pages.len() + (1 << 20)).to_string())?;
    let file = fs::File::options().write(true).open(format!("/dev/zram{number}"))?;
    let mut at = 0;
    for chunk in pages.chunks(1 << 20) {
        std::os::unix::fs::FileExt::write_all_at(&file, chunk, at)?;
        at += chunk.len() as u64;
    }
    file.sync_all()?;
    drop(file);
    let stat = fs::read_to_string(system("mm_stat"))?;
    stat.split_ascii_whitespace().nth(2).and_then(|bytes| bytes.parse().ok()).ok_or_else(|| io::Error::other("mm_stat"))
}
