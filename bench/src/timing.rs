//! What the time of a write tells a program of pages that another program holds: within a domain, between domains, and with
//! KSM.
//!
//! A guesser fills pages with what a holder has, and as many with other bytes, in a random order. Once there was time to
//! merge it writes to each and takes the time. Welch's t-test compares the two kinds: from an absolute t of 4.5 on they are
//! taken to differ, as the tests of cryptographic code do. A few slow writes hide small differences, so t is also taken of
//! the quicker half, 90 % and 99 % alone; the largest counts. Within one domain the same test must find the difference, or
//! it would find none anywhere.

use crate::instance::Instance;
use crate::ksm_peer;
use crate::options::{self, Extent, positive};
use crate::process::{self, Failure, wait_for};
use crate::record;
use crate::restore::Undo;
use crate::stats;
use crate::tool::Daemon;
use clap::Parser;
use pagefold_os::pagemap::{ENTRY_BYTES, PageEntry};
use pagefold_os::{PAGE_SIZE, ksm};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashSet;
use std::io::BufRead;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The time of writes: what a program learns from it of pages that another holds.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench timing",
    after_help = "Examples:\n  pagefold bench timing --quick\n  pagefold bench timing --samples 3000000"
)]
struct Args {
    /// Writes that are timed between two domains; without it a million (with --quick 30,000, with --full three million).
    #[arg(long, value_name = "N", value_parser = positive())]
    samples: Option<usize>,
    #[command(flatten)]
    extent: Extent,
    /// A process of the test (used by the driver): its part, and how many pages are guessed.
    #[arg(long, hide = true, num_args = 2, value_names = ["ROLE", "PAGES"])]
    client: Vec<String>,
}

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("timing", args, |args: Args| match args.client.as_slice() {
        [role, pages] => client(role, pages.parse()?),
        _ => measure(&args),
    })
}

impl Args {
    fn samples(&self) -> usize {
        self.samples.unwrap_or(match (self.extent.quick, self.extent.full) {
            (true, _) => 30_000,
            (_, true) => 3_000_000,
            _ => 1_000_000,
        })
    }

    /// Pages that are guessed in a round, and as many others.
    fn pages(&self) -> usize {
        (self.samples() / 2).min(1 << 16)
    }
}

/// Which programs may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Nothing,
    Ksm,
    OneDomain,
    TwoDomains,
}

impl Way {
    /// Within one domain comes before two: its rounds show how long merging takes.
    const ALL: [Way; 4] = [Way::Nothing, Way::Ksm, Way::OneDomain, Way::TwoDomains];

    fn name(self) -> &'static str {
        match self {
            Way::Nothing => "nothing",
            Way::Ksm => "KSM",
            Way::OneDomain => "pagefold, one domain",
            Way::TwoDomains => "pagefold, two domains",
        }
    }

    fn merges(self) -> bool {
        matches!(self, Way::Ksm | Way::OneDomain)
    }
}

/// The longest time for the pages of a round to be merged.
const MERGE_MAX: Duration = Duration::from_secs(120);

/// What a way showed.
struct Seen {
    /// Absolute t of all writes, and the largest of those of the quicker ones alone.
    t_all: f64,
    t: f64,
    samples: u64,
    equal_ns: f64,
    other_ns: f64,
    /// Most frames that both programs mapped at a time.
    frames: usize,
    /// The longest time until the pages of a round were merged.
    waited: Duration,
}

fn measure(args: &Args) -> Result<(), Failure> {
    process::tool()?;
    let peer =
        if process::is_root() { ksm::unused().map_err(|error| error.to_string()) } else { Err("it needs root".into()) };
    if let Err(why) = &peer {
        eprintln!("SKIPPED: the peer, KSM: {why}");
    }
    // The pages are merged one by one.
    let _mappings = Undo::set("/proc/sys/vm/max_map_count", "4000000");
    let mut rows = Vec::new();
    let mut waited = Duration::from_secs(1);
    let mut leaked = None;
    for way in Way::ALL.into_iter().filter(|way| *way != Way::Ksm || peer.is_ok()) {
        let rounds = if way == Way::TwoDomains { args.samples().div_ceil(2 * args.pages()) } else { 2 };
        let seen = look(way, args.pages(), rounds, waited).map_err(|error| format!("{}: {error}", way.name()))?;
        if way == Way::OneDomain {
            waited = seen.waited + Duration::from_secs(1);
        }
        if way == Way::TwoDomains && seen.frames > 0 {
            leaked = Some(seen.frames);
        }
        rows.push(json!({
            "way": way.name(), "samples": seen.samples, "t": seen.t, "t_of_all": seen.t_all,
            "equal_ns": seen.equal_ns, "other_ns": seen.other_ns, "frames_shared": seen.frames,
            "differs": if seen.t < 4.5 { "no" } else { "yes" },
        }));
    }
    record::table(
        "timing: writes to pages that another program holds, and to others (ns); they differ from an absolute t of 4.5 on",
        "way|writes=samples|held elsewhere=equal_ns:0|others=other_ns:0|abs(t)=t:1|of all=t_of_all:1|they differ=differs|frames shared=frames_shared",
        rows,
    );
    leaked.map_or(Ok(()), |frames| Err(format!("programs of two domains share {frames} frames").into()))
}

fn look(way: Way, pages: usize, rounds: usize, wait: Duration) -> Result<Seen, Failure> {
    let daemon = matches!(way, Way::OneDomain | Way::TwoDomains)
        .then(|| Daemon::start(&["--scan-interval", "500ms"]))
        .transpose()?;
    let _restored = (way == Way::Ksm).then(ksm_peer::at_full_speed).transpose()?;
    if way == Way::Ksm {
        // It would look at most pages only now and then.
        let _ = ksm::write("smart_scan", 0);
    }
    let start = |role: &str, domain: &str| -> Result<(Instance, u64), Failure> {
        let mut command = process::own("timing")?;
        if let Some(daemon) = &daemon {
            let wrapper = daemon.run(&["--manage", "all", "--domain", domain]);
            let mut under = Command::new(&wrapper[0]);
            under.args(&wrapper[1..]).arg(command.get_program()).args(command.get_args());
            command = under;
        }
        if way == Way::Ksm {
            ksm_peer::merge_all(&mut command);
        }
        command.args(["--client", role, &pages.to_string()]);
        let instance = Instance::start(&mut command)?;
        instance.ready()?;
        let addr = instance.line()?.parse()?;
        Ok((instance, addr))
    };
    let (mut holder, held_at) = start("holder", "holders")?;
    let (mut guesser, guessed_at) = start("guesser", if way == Way::TwoDomains { "guessers" } else { "holders" })?;
    let (mut frames, mut waited) = (0, Duration::ZERO);
    for round in 0..rounds {
        holder.ask(&format!("fill {round}"))?;
        guesser.ask(&format!("fill {round}"))?;
        let shared = || shared_frames((holder.pid(), held_at, pages), (guesser.pid(), guessed_at, 2 * pages));
        if way == Way::Ksm {
            ksm::write("run", 1)?;
        }
        if way.merges() {
            let began = Instant::now();
            let is_merged = || shared().ok().filter(|frames| frames * 10 >= pages * 9);
            frames = frames.max(wait_for("the pages to be merged", MERGE_MAX, is_merged)?);
            waited = waited.max(began.elapsed());
        } else {
            std::thread::sleep(wait);
            frames = frames.max(shared()?);
        }
        guesser.ask("write")?;
    }
    guesser.send("tell")?;
    let crops: Vec<Crop> = serde_json::from_str(&guesser.line()?)?;
    let all = crops.last().ok_or("no write was timed")?;
    Ok(Seen {
        t_all: all.t(),
        t: crops.iter().map(Crop::t).fold(0.0, f64::max),
        samples: all.equal.count + all.other.count,
        equal_ns: all.equal.mean,
        other_ns: all.other.mean,
        frames,
        waited,
    })
}

/// How many frames two processes both map, each of so many pages at an address.
fn shared_frames(one: (i32, u64, usize), other: (i32, u64, usize)) -> Result<usize, Failure> {
    let frames = |(pid, addr, pages): (i32, u64, usize)| -> Result<HashSet<u64>, Failure> {
        // The wrapper has become the program.
        let file = std::fs::File::open(format!("/proc/{pid}/pagemap"))?;
        let mut bytes = vec![0; pages * ENTRY_BYTES];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, addr / PAGE_SIZE as u64 * ENTRY_BYTES as u64)?;
        Ok(PageEntry::all(&bytes).map(PageEntry::frame).filter(|frame| *frame != 0).collect())
    };
    Ok(frames(one)?.intersection(&frames(other)?).count())
}

/// Mean and variance of what was added so far, by Welford's method.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Sum {
    count: u64,
    mean: f64,
    /// Sum of squared distances from the mean.
    squares: f64,
}

impl Sum {
    fn add(&mut self, value: f64) {
        self.count += 1;
        let distance = value - self.mean;
        self.mean += distance / self.count as f64;
        self.squares += distance * (value - self.mean);
    }

    /// Variance of the mean.
    fn variance(&self) -> f64 {
        self.squares / (self.count.max(2) - 1) as f64 / self.count.max(1) as f64
    }
}

/// The writes that took at most so long.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Crop {
    most_ns: u64,
    equal: Sum,
    other: Sum,
}

impl Crop {
    fn add(&mut self, ns: u64, is_equal: bool) {
        if ns <= self.most_ns {
            if is_equal { &mut self.equal } else { &mut self.other }.add(ns as f64);
        }
    }

    /// Welch's statistic, without its sign.
    fn t(&self) -> f64 {
        let distance = (self.equal.mean - self.other.mean).abs();
        let deviation = (self.equal.variance() + self.other.variance()).sqrt();
        if deviation > 0.0 { distance / deviation } else { 0.0 }
    }
}

/// The shares of the writes of the first round whose longest time bounds a crop.
const CROPS: [f64; 3] = [0.5, 0.9, 0.99];

/// A process of the test: `holder` has as many pages as are guessed, `guesser` those and as many others.
fn client(role: &str, guessed: usize) -> Result<(), Failure> {
    let is_guesser = role == "guesser";
    let pages = if is_guesser { 2 * guessed } else { guessed };
    let len = pages * PAGE_SIZE;
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // By the C library, whose calls the agent sees. It is never unmapped.
    // SAFETY: new memory, which only `bytes` refers to; the advice, for single pages are guessed, changes no byte.
    let bytes = unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0);
        if memory == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        libc::madvise(memory, len, libc::MADV_NOHUGEPAGE);
        std::slice::from_raw_parts_mut(memory.cast::<u8>(), len)
    };
    println!("ready\n{}", bytes.as_ptr() as u64);
    let (mut order, mut crops) = (Vec::new(), Vec::new());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("fill", round) => {
                let round: u64 = round.parse()?;
                order = if is_guesser { stats::order(pages, round) } else { (0..pages).collect() };
                for (place, number) in order.iter().enumerate() {
                    // Numbers from `guessed` on are no page of the holder's.
                    let seed = round << 32 | *number as u64;
                    fastrand::Rng::with_seed(seed).fill(&mut bytes[place * PAGE_SIZE..][..PAGE_SIZE]);
                }
                println!("right");
            }
            ("write", _) => {
                let mut times = Vec::with_capacity(pages);
                for place in 0..pages {
                    let word = bytes[place * PAGE_SIZE..].as_mut_ptr().cast::<u64>();
                    let began = Instant::now();
                    // SAFETY: the pointer is at a page of `bytes`; volatile, so that the write happens here.
                    unsafe { word.write_volatile(place as u64) };
                    times.push(began.elapsed().as_nanos() as u64);
                }
                if crops.is_empty() {
                    let mut ascending = times.clone();
                    ascending.sort_unstable();
                    let most = CROPS.iter().filter_map(|share| stats::quantile(&ascending, *share)).chain([u64::MAX]);
                    crops =
                        most.map(|most_ns| Crop { most_ns, equal: Sum::default(), other: Sum::default() }).collect();
                }
                for (ns, number) in times.iter().zip(&order) {
                    crops.iter_mut().for_each(|crop: &mut Crop| crop.add(*ns, *number < guessed));
                }
                println!("right");
            }
            ("tell", _) => println!("{}", json!(crops)),
            _ => break,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statistic_tells_kinds_apart_that_differ_and_no_others() {
        let mut random = fastrand::Rng::with_seed(9);
        let crop = |random: &mut fastrand::Rng, more: u64| {
            let mut crop = Crop { most_ns: u64::MAX, equal: Sum::default(), other: Sum::default() };
            for number in 0..100_000 {
                let is_equal = number % 2 == 0;
                crop.add(1000 + random.u64(0..500) + if is_equal { more } else { 0 }, is_equal);
            }
            crop
        };
        let (same, slower) = (crop(&mut random, 0), crop(&mut random, 20));
        assert!(same.t() < 4.5 && slower.t() > 15.0, "{} and {}", same.t(), slower.t());
        // The mean and the variance of 0..500, as a textbook has them.
        assert!((same.other.mean - 1249.5).abs() < 2.0, "{}", same.other.mean);
        let variance = same.other.variance() * same.other.count as f64;
        assert!((variance / ((500.0 * 500.0 - 1.0) / 12.0) - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn a_crop_leaves_out_what_took_longer() {
        let mut crop = Crop { most_ns: 10, equal: Sum::default(), other: Sum::default() };
        [(5, true), (11, true), (10, false)].into_iter().for_each(|(ns, is_equal)| crop.add(ns, is_equal));
        assert_eq!((crop.equal.count, crop.other.count, crop.t()), (1, 1, 0.0));
    }
}
