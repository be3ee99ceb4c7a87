//! The cold tier behind a live client: parked, touched page by page and in order, brought back, left idle.
//!
//! What went out lately is LZ4, and Zstandard or a patch after a while; a daemon makes all of it dense at once when it was
//! parked. So pages are touched twice: made dense, and, behind a daemon of its own that leaves them alone, as LZ4.
//!
//! Daemon and client are processes of their own (this program again), so that memory and processor time are each one's.

use super::{Row, quantile};
use pagefold_agent::client::{Client, ColdOptions, Region};
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::{Config, Daemon, cold};
use pagefold_os::procfs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// A process that ends with its owner.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs one of the two processes.
pub fn run_process(words: &[String]) -> ExitCode {
    let result = match words {
        [kind, socket] if kind == "daemon" => daemon(socket.as_ref(), Cleaner::AtOnce),
        [kind, socket] if kind == "daemon-lz4" => daemon(socket.as_ref(), Cleaner::Never),
        [kind, socket, file] if kind == "client" => client(socket.as_ref(), file.as_ref()),
        _ => Err("daemon SOCKET, daemon-lz4 SOCKET, or client SOCKET FILE".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zswap: {error}");
            ExitCode::FAILURE
        }
    }
}

type Failure = Box<dyn std::error::Error>;

/// When a daemon makes dense what was parked.
#[derive(Clone, Copy)]
enum Cleaner {
    AtOnce,
    Never,
}

impl Cleaner {
    /// The daemon's name among the processes.
    fn daemon(self) -> &'static str {
        match self {
            Cleaner::AtOnce => "daemon",
            Cleaner::Never => "daemon-lz4",
        }
    }

    fn config(self) -> cold::Config {
        let config = cold::Config { automatic: false, ..cold::Config::default() };
        match self {
            Cleaner::AtOnce => config,
            // Its ticks are what pages grow old by; none comes while a benchmark lasts.
            Cleaner::Never => cold::Config { park_densely: false, tick: Duration::from_secs(86_400), ..config },
        }
    }
}

fn daemon(socket: &Path, cleaner: Cleaner) -> Result<(), Failure> {
    let config = Config { socket: socket.to_owned(), cold: cleaner.config(), ..Config::default() };
    Ok(Daemon::new(config).run()?)
}

fn client(socket: &Path, file: &Path) -> Result<(), Failure> {
    let client = Client::connect_cold(socket, "bench", ColdOptions::default())?;
    let len = std::fs::metadata(file)?.len() as usize;
    let mut region = Region::new(&client, len)?;
    std::fs::File::open(file)?.read_exact(&mut region[..len])?;
    let pages = len / 4096;
    let order = super::latency::shuffled(pages);
    println!("ready");
    let region: &[u8] = &region;
    // Volatile: the touch itself is what is timed.
    let touch = |page: usize| {
        let began = Instant::now();
        // SAFETY: inside the region.
        unsafe { std::ptr::read_volatile(region.as_ptr().add(page * 4096)) };
        began.elapsed().as_secs_f64() * 1e6
    };
    for line in io::stdin().lock().lines() {
        let mut us: Vec<f64> = match line?.as_str() {
            "random" => order.iter().map(|page| touch(*page)).collect(),
            "order" => (0..pages).map(touch).collect(),
            "first" => vec![touch(order[0])],
            other => match other.strip_prefix("paced ").and_then(|rate| rate.parse().ok()) {
                Some(rate) => paced(rate, &order, touch),
                None => break,
            },
        };
        let sum: f64 = us.iter().sum();
        us.sort_by(f64::total_cmp);
        println!("{} {} {}", quantile(&us, 0.5), quantile(&us, 0.99), sum / us.len() as f64);
    }
    Ok(())
}

/// Touches pages at a rate, each second, for two seconds or as long as there are pages.
fn paced(rate: f64, order: &[usize], touch: impl Fn(usize) -> f64) -> Vec<f64> {
    let began = Instant::now();
    let count = ((rate * 2.0) as usize).min(order.len());
    let at = |number: usize| began + Duration::from_secs_f64(number as f64 / rate);
    let turn = |(number, page): (usize, &usize)| {
        std::thread::sleep(at(number).saturating_duration_since(Instant::now()));
        touch(*page)
    };
    order[..count].iter().enumerate().map(turn).collect()
}

struct Live {
    daemon: Owned,
    client: Owned,
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

    /// Puts everything out; returns the pages and the seconds.
    fn park(&self) -> io::Result<(f64, f64)> {
        let began = Instant::now();
        let pages = self.moved(&Request::Park { whom: cold::Whom::All })?;
        Ok((pages, began.elapsed().as_secs_f64()))
    }

    fn tiers(&self) -> io::Result<Vec<cold::ColdDomain>> {
        match control::ask(&self.socket, &Request::Status {})? {
            Answer::Status(status) => Ok(status.cold.domains),
            other => Err(io::Error::other(format!("the daemon answered {other:?}"))),
        }
    }

    /// Memory of the tier.
    fn held(&self) -> io::Result<f64> {
        Ok(self.tiers()?.iter().map(|tier| tier.held_bytes).sum::<u64>() as f64)
    }

    /// What the client answers to `word` with everything out as LZ4, beside busy processors or not.
    ///
    /// # Errors
    /// Some of it was dense before, or was made so meanwhile.
    fn ask_of_lz4(&mut self, word: &str, is_busy: bool) -> io::Result<Vec<f64>> {
        self.park()?;
        let kept = self.tiers()?;
        let busy = is_busy.then(super::latency::Busy::start);
        let answer = self.ask(word)?;
        drop(busy);
        let contents: u64 = kept.iter().map(|tier| tier.contents).sum();
        let dense: u64 = kept.iter().map(|tier| tier.contents_dense).sum();
        let recompressed: u64 = self.tiers()?.iter().map(|tier| tier.recompressed).sum();
        if contents == 0 || dense + recompressed > 0 {
            let what = format!("{contents} contents are out, {dense} of them dense, and {recompressed} were made so");
            return Err(io::Error::other(format!("not all of it was LZ4: {what}")));
        }
        Ok(answer)
    }

    /// Waits until the cleaner has made dense what was parked; returns what is held then, and the seconds.
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

    /// Puts everything out, made dense.
    fn park_densely(&self) -> io::Result<()> {
        self.park()?;
        self.settled().map(drop)
    }

    /// Processor time of daemon and client, in nanoseconds.
    fn cpu_ns(&self) -> io::Result<u64> {
        let of = |process: &Owned| procfs::cpu_ns(process.0.id() as i32);
        let both = of(&self.daemon).zip(of(&self.client));
        both.map(|(daemon, client)| daemon + client).ok_or_else(|| io::Error::other("daemon or client ended"))
    }
}

fn start(file: &Path, cleaner: Cleaner) -> io::Result<Live> {
    let program = std::env::current_exe()?;
    let socket = std::env::temp_dir().join(format!("pagefold-bench-live-{}", std::process::id()));
    let process = |words: &[&std::ffi::OsStr]| {
        let mut command = Command::new(&program);
        command.arg("zswap");
        for word in words {
            let mut option = std::ffi::OsString::from("--process=");
            option.push(word);
            command.arg(option);
        }
        command
    };
    let daemon = Owned(process(&[cleaner.daemon().as_ref(), socket.as_ref()]).stdin(Stdio::null()).spawn()?);
    let end = Instant::now() + Duration::from_secs(20);
    while control::ask(&socket, &Request::Status {}).is_err() {
        if Instant::now() > end {
            return Err(io::Error::other("the daemon does not listen"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut command = process(&["client".as_ref(), socket.as_ref(), file.as_ref()]);
    let mut client = Owned(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
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
    while !connected(&live) {
        if Instant::now() > end {
            return Err(io::Error::other("the client does not connect"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(live)
}

/// A live client that has these pages.
fn start_with(set: &[u8], cleaner: Cleaner) -> io::Result<Live> {
    let file = PathBuf::from(format!("/dev/shm/pagefold-bench-live-{}", std::process::id()));
    std::fs::write(&file, set)?;
    let live = start(&file, cleaner);
    let _ = std::fs::remove_file(&file);
    live
}

/// What a fault takes, and daemon and client of a processor, when a live client faults so many times a second.
pub fn by_rate(on: &str, set: &[u8]) -> io::Result<Vec<Row>> {
    let mut live = start_with(set, Cleaner::AtOnce)?;
    let mut rows = Vec::new();
    for rate in [100, 1000, 10_000] {
        live.park_densely()?;
        std::thread::sleep(Duration::from_millis(500));
        let (began, before) = (Instant::now(), live.cpu_ns()?);
        let touched = live.ask(&format!("paced {rate}"))?;
        let cpu = (live.cpu_ns()? - before) as f64 / began.elapsed().as_nanos() as f64;
        rows.push(Row {
            part: "growth",
            name: format!("faults at {rate} a second"),
            on: on.to_owned(),
            figures: vec![("p50 us", touched[0]), ("p99 us", touched[1]), ("cpu %", cpu * 100.0)],
        });
    }
    Ok(rows)
}

/// Figures of touches, as the client answers.
fn of_touches(touched: &[f64]) -> Vec<(&'static str, f64)> {
    vec![("p50 us", touched[0]), ("p99 us", touched[1]), ("us/page", touched[2])]
}

/// Measures on a live client that has these pages.
pub fn measure(on: &str, set: &[u8], idle: Duration) -> io::Result<Vec<Row>> {
    let mut live = start_with(set, Cleaner::AtOnce)?;
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
    // Two ticks of the cleaner pass, which look at what came in.
    let settle_ms = if idle.as_secs() > 5 { 12_000 } else { 500 };
    std::thread::sleep(Duration::from_millis(settle_ms));
    let before = live.cpu_ns()?;
    std::thread::sleep(idle);
    let share = (live.cpu_ns()? - before) as f64 / idle.as_nanos() as f64;
    row("parked and idle", vec![("cpu %", share * 100.0)]);
    let touched = live.ask("random")?;
    row("touch, random", of_touches(&touched));
    live.park_densely()?;
    let busy = super::latency::Busy::start();
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
        let answer = control::ask(&socket, &Request::Unpark { whom: cold::Whom::All });
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

/// What touches cost while pages are still LZ4, on a live client that has these.
pub fn measure_lz4(on: &str, set: &[u8]) -> io::Result<Vec<Row>> {
    let mut live = start_with(set, Cleaner::Never)?;
    let mut row = |name: &str, word: &str, is_busy: bool| -> io::Result<Row> {
        let figures = of_touches(&live.ask_of_lz4(word, is_busy)?);
        Ok(Row { part: "live", name: name.to_owned(), on: on.to_owned(), figures })
    };
    Ok(vec![
        row("touch, random, LZ4", "random", false)?,
        row("touch, random, LZ4, cores busy", "random", true)?,
        row("touch, in order, LZ4", "order", false)?,
    ])
}
