//! The cold tier of a live client: parked, touched page by page and in order, faulted in, left idle.
//!
//! Pages evicted lately are LZ4, older ones Zstandard or a patch; after `park` a daemon makes all of them dense. So pages are
//! dense when they are touched.
//!
//! Daemon and client are processes of their own (this program again), so that memory and processor time are counted apart.

use super::measure::Busy;
use super::row::Row;
use crate::process::{self, Failure, Running, wait_for};
use crate::restore::Undo;
use crate::stats::{Random, quantile};
use pagefold_agent::client::{Client, ColdOptions, Region};
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::{Config, Daemon, cold};
use pagefold_os::procfs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Runs one of the two processes.
pub fn run_process(words: &[String]) -> ExitCode {
    let result = match words {
        [kind, socket] if kind == "daemon" => daemon(socket.as_ref()),
        [kind, socket, file] if kind == "client" => client(socket.as_ref(), file.as_ref()),
        _ => Err("daemon SOCKET, or client SOCKET FILE".into()),
    };
    crate::options::exit_code("zswap", result)
}

fn daemon(socket: &Path) -> Result<(), Failure> {
    let cold = cold::Config { automatic: false, ..cold::Config::default() };
    Ok(pagefold_daemon::run(&Daemon::new(Config { socket: socket.to_owned(), cold, ..Config::default() }))?)
}

fn client(socket: &Path, file: &Path) -> Result<(), Failure> {
    let client = Client::connect_cold(socket, "bench", ColdOptions::default())?;
    let len = std::fs::metadata(file)?.len() as usize;
    let mut region = Region::new(&client, len)?;
    std::fs::File::open(file)?.read_exact(&mut region[..len])?;
    let pages = len / 4096;
    let order = Random(7).order(pages);
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
        let mut us: Vec<f64> = match line?.as_str() {
            "random" => order.iter().map(|page| touch(*page)).collect(),
            "order" => (0..pages).map(touch).collect(),
            "first" => vec![touch(order[0])],
            _ => break,
        };
        let sum: f64 = us.iter().sum();
        us.sort_by(f64::total_cmp);
        println!(
            "{} {} {}",
            quantile(&us, 0.5).unwrap_or(0.0),
            quantile(&us, 0.99).unwrap_or(0.0),
            sum / us.len() as f64
        );
    }
    Ok(())
}

struct Live {
    daemon: Running,
    client: Running,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    socket: PathBuf,
}

impl Live {
    fn ask(&mut self, word: &str) -> io::Result<Vec<f64>> {
        writeln!(self.input, "{word}")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let numbers: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
        numbers.filter(|numbers| numbers.len() == 3).ok_or_else(|| io::Error::other("the client ended"))
    }

    fn moved(&self, request: &Request) -> io::Result<f64> {
        match control::ask(&self.socket, request)? {
            Answer::Moved { pages, .. } => Ok(pages as f64),
            other => Err(io::Error::other(format!("the daemon answered {other:?}"))),
        }
    }

    /// Evicts everything; returns the pages and the seconds.
    fn park(&self) -> io::Result<(f64, f64)> {
        let began = Instant::now();
        let pages = self.moved(&Request::Park { clients: cold::ClientSelector::All })?;
        Ok((pages, began.elapsed().as_secs_f64()))
    }

    /// Memory of the tier.
    fn held(&self) -> io::Result<f64> {
        match control::ask(&self.socket, &Request::Status {})? {
            Answer::Status(status) => Ok(status.cold.domains.iter().map(|tier| tier.memory_bytes).sum::<u64>() as f64),
            other => Err(io::Error::other(format!("the daemon answered {other:?}"))),
        }
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
        let of = |process: &Running| procfs::cpu_ns(process.pid());
        let both = of(&self.daemon).zip(of(&self.client));
        both.map(|(daemon, client)| daemon + client).ok_or_else(|| io::Error::other("daemon or client ended"))
    }
}

fn start(file: &Path) -> io::Result<Live> {
    let socket = std::env::temp_dir().join(format!("pagefold-bench-live-{}", std::process::id()));
    let process = |words: &[&std::ffi::OsStr]| -> io::Result<Command> {
        let mut command = process::own("zswap")?;
        for word in words {
            let mut option = std::ffi::OsString::from("--process=");
            option.push(word);
            command.arg(option);
        }
        Ok(command)
    };
    let mut command = process(&["daemon".as_ref(), socket.as_ref()])?;
    let daemon = Running::start(command.stdin(Stdio::null()))?;
    let limit = Duration::from_secs(20);
    wait_for("the daemon", limit, || control::ask(&socket, &Request::Status {}).ok())?;
    let mut command = process(&["client".as_ref(), socket.as_ref(), file.as_ref()])?;
    let mut client = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let (Some(input), Some(output)) = (client.0.stdin.take(), client.0.stdout.take()) else {
        return Err(io::Error::other("no pipes"));
    };
    let mut live = Live { daemon, client, input, output: BufReader::new(output), socket };
    let mut line = String::new();
    live.output.read_line(&mut line)?;
    if line != "ready\n" {
        return Err(io::Error::other("the client did not start"));
    }
    let connected = |live: &Live| match control::ask(&live.socket, &Request::Status {}) {
        Ok(Answer::Status(status)) => status.cold.clients.iter().any(|client| client.connected),
        _ => false,
    };
    wait_for("the client's connection", limit, || connected(&live).then_some(()))?;
    Ok(live)
}

/// Figures of touches, as the client answers.
fn of_touches(touched: &[f64]) -> Vec<(&'static str, f64)> {
    vec![("p50 us", touched[0]), ("p99 us", touched[1]), ("us/page", touched[2])]
}

/// Measures on a live client that has these pages.
pub fn measure(on: &str, set: &[u8], idle: Duration) -> io::Result<Vec<Row>> {
    let file = PathBuf::from(format!("/dev/shm/pagefold-bench-live-{}", std::process::id()));
    std::fs::write(&file, set)?;
    let removed = Undo::remove(file.clone());
    let mut live = start(&file)?;
    drop(removed);
    let mut rows = Vec::new();
    let mut row = |name: &str, figures: Vec<(&'static str, f64)>| {
        rows.push(Row { part: "live", name: name.to_owned(), on: on.to_owned(), figures });
    };
    let bytes = |pages: f64| pages * 4096.0;
    let (pages, seconds) = live.park()?;
    let per_gib = |held: f64| held / 1e6 / (bytes(pages) / (1 << 30) as f64);
    let held_first = live.held()?;
    let (held, dense_s) = live.settled()?;
    row(
        "park",
        vec![
            ("MB", bytes(pages) / 1e6),
            ("GB/s", bytes(pages) / 1e9 / seconds),
            ("MB/GiB held", per_gib(held_first)),
            ("made dense", per_gib(held)),
            ("after s", dense_s),
        ],
    );
    // Two ticks of the cleaner pass, which look at new pages.
    let settle_ms = if idle.as_secs() > 5 { 12_000 } else { 500 };
    std::thread::sleep(Duration::from_millis(settle_ms));
    let before = live.cpu_ns()?;
    std::thread::sleep(idle);
    let share = (live.cpu_ns()? - before) as f64 / idle.as_nanos() as f64;
    row("parked and idle", vec![("cpu %", share * 100.0)]);
    let touched = live.ask("random")?;
    row("touch, random", of_touches(&touched));
    live.park_densely()?;
    let busy = Busy::start();
    let touched = live.ask("random")?;
    drop(busy);
    row("touch, random, cores busy", of_touches(&touched));
    live.park_densely()?;
    let touched = live.ask("order")?;
    row("touch, in order", of_touches(&touched));
    live.park_densely()?;
    let began = Instant::now();
    let socket = live.socket.clone();
    let unpark = std::thread::spawn(move || {
        let answer = control::ask(&socket, &Request::Unpark { clients: cold::ClientSelector::All });
        (answer, Instant::now())
    });
    let first = live.ask("first")?;
    let replied = began.elapsed().as_secs_f64();
    let (answer, ended) = unpark.join().map_err(|_| io::Error::other("unpark"))?;
    let Answer::Moved { pages, .. } = answer? else { return Err(io::Error::other("no answer to unpark")) };
    let seconds = ended.duration_since(began).as_secs_f64();
    row(
        "unpark",
        vec![
            ("MB", bytes(pages as f64) / 1e6),
            ("GB/s", bytes(pages as f64) / 1e9 / seconds),
            ("first touch us", first[0]),
            ("first reply ms", replied * 1e3),
        ],
    );
    Ok(rows)
}
