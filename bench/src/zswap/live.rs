//! The cold tier of a live client: parked, touched page by page and in order, faulted in, left idle.
//!
//! Pages evicted lately are LZ4, older ones Zstandard or a patch; after `park` a daemon makes all of them dense. So pages
//! are dense when they are touched.
//!
//! The client is a process of its own (this program again), so that its processor time is counted apart.

use super::measure::Busy;
use super::row;
use crate::instance::Instance;
use crate::process::{self, Failure, wait_for};
use crate::restore::Undo;
use crate::stats;
use crate::tool::{self, Daemon};
use pagefold_agent::client::{Client, ColdOptions, Region};
use pagefold_daemon::cold::ClientSelector;
use pagefold_daemon::control::Request;
use pagefold_os::procfs;
use serde_json::{Value, json};
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The client's process.
pub fn client(words: &[String]) -> Result<(), Failure> {
    let [socket, file] = words else { return Err("--client SOCKET FILE".into()) };
    let (socket, file) = (Path::new(socket), Path::new(file));
    let client = Client::connect_cold(socket, "bench", ColdOptions::default())?;
    let len = std::fs::metadata(file)?.len() as usize;
    let mut region = Region::new(&client, len)?;
    std::fs::File::open(file)?.read_exact(&mut region[..len])?;
    let pages = len / 4096;
    let order = stats::order(pages, 7);
    println!("ready");
    let region: &[u8] = &region;
    // Volatile, because the touch itself is timed.
    let touch = |page: usize| {
        let began = Instant::now();
        // SAFETY: `page` is below the number of pages of the region.
        unsafe { std::ptr::read_volatile(region.as_ptr().add(page * 4096)) };
        began.elapsed().as_secs_f64() * 1e6
    };
    for line in io::stdin().lock().lines() {
        let us: Vec<f64> = match line?.as_str() {
            "random" => order.iter().map(|page| touch(*page)).collect(),
            "order" => (0..pages).map(touch).collect(),
            _ => break,
        };
        let short: Vec<String> = row::in_short(us).iter().map(f64::to_string).collect();
        println!("{}", short.join(" "));
    }
    Ok(())
}

struct Live {
    daemon: Daemon,
    client: Instance,
}

impl Live {
    fn start(file: &Path) -> Result<Live, Failure> {
        let daemon = Daemon::start(&["--cold-policy=manual", "--tier-dir=none"])?;
        let client = Instance::start(process::own("zswap")?.arg("--client").arg(&daemon.socket).arg(file))?;
        client.ready()?;
        let connected =
            || daemon.status().is_ok_and(|status| status.cold.clients.iter().any(|client| client.connected));
        wait_for("the client's connection", Duration::from_secs(20), || connected().then_some(()))?;
        Ok(Live { daemon, client })
    }

    fn ask(&mut self, word: &str) -> Result<Vec<f64>, Failure> {
        self.client.send(word)?;
        Ok(self.client.line()?.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
    }

    /// Evicts everything; returns the bytes and the seconds.
    fn park(&self) -> io::Result<(f64, f64)> {
        let began = Instant::now();
        let pages = self.daemon.park()?;
        Ok((pages as f64 * 4096.0, began.elapsed().as_secs_f64()))
    }

    /// Memory of the tier.
    fn held(&self) -> io::Result<f64> {
        Ok(self.daemon.status()?.cold.domains.iter().map(|tier| tier.memory_bytes).sum::<u64>() as f64)
    }

    /// Waits until the cleaner has made parked pages dense; returns the bytes held then, and the seconds.
    fn settled(&self) -> io::Result<(f64, f64)> {
        let began = Instant::now();
        let (mut held, mut since) = (self.held()?, began);
        while since.elapsed() < Duration::from_secs(1) && began.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_millis(100));
            let now = self.held()?;
            if now != held {
                (held, since) = (now, Instant::now());
            }
        }
        Ok((held, since.duration_since(began).as_secs_f64()))
    }

    /// Evicts everything and waits until it is dense.
    fn park_densely(&self) -> io::Result<()> {
        self.park()?;
        self.settled().map(drop)
    }

    /// Processor time of daemon and client, in nanoseconds.
    fn cpu_ns(&self) -> io::Result<u64> {
        let both = procfs::cpu_ns(self.daemon.pid()).zip(procfs::cpu_ns(self.client.pid()));
        both.map(|(daemon, client)| daemon + client).ok_or_else(|| io::Error::other("daemon or client ended"))
    }
}

/// Measures on a live client that has these pages.
pub fn measure(on: &str, set: &[u8], idle: Duration) -> Result<Vec<Value>, Failure> {
    let file = PathBuf::from(format!("/dev/shm/pagefold-bench-live-{}", std::process::id()));
    std::fs::write(&file, set)?;
    let removed = Undo::remove(file.clone());
    let mut live = Live::start(&file)?;
    drop(removed);
    let mut rows = Vec::new();
    let row = |name: &str, figures: Value| row::of("live", name, on, figures);
    let (bytes, seconds) = live.park()?;
    let per_gib = |held: f64| held / 1e6 / (bytes / (1 << 30) as f64);
    let held_first = live.held()?;
    let (held, dense_s) = live.settled()?;
    rows.push(row(
        "park",
        json!({ "MB": bytes / 1e6, "GB/s": bytes / 1e9 / seconds, "MB/GiB held": per_gib(held_first),
            "made dense": per_gib(held), "after s": dense_s }),
    ));
    // Two ticks of the cleaner pass, which look at new pages.
    let settle_ms = if idle.as_secs() > 5 { 12_000 } else { 500 };
    std::thread::sleep(Duration::from_millis(settle_ms));
    let before = live.cpu_ns()?;
    std::thread::sleep(idle);
    let share = (live.cpu_ns()? - before) as f64 / idle.as_nanos() as f64;
    rows.push(row("parked and idle", json!({ "cpu %": share * 100.0 })));
    for (name, word, is_busy) in [
        ("touch, random", "random", false),
        ("touch, random, cores busy", "random", true),
        ("touch, in order", "order", false),
    ] {
        let busy = is_busy.then(Busy::start);
        let touched = live.ask(word)?;
        drop(busy);
        rows.push(row::of_times("live", name, on, &touched));
        live.park_densely()?;
    }
    let (began, unpark) = (Instant::now(), Request::Unpark { clients: ClientSelector::All });
    let bytes = tool::moved(&live.daemon.socket, &unpark)? as f64 * 4096.0;
    rows.push(row("unpark", json!({ "MB": bytes / 1e6, "GB/s": bytes / 1e9 / began.elapsed().as_secs_f64() })));
    Ok(rows)
}
