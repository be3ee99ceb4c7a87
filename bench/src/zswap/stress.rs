//! Half the memory: stress-ng's memory stressor under a limit of half of what it uses, in the cold tier and with zswap.
//!
//! It takes its memory at once and never rests, so it is held still (by ptrace(2), its own thread alone: the agent goes on)
//! while the limit is set. What it did without one is the same in a short run and in a long one, and taken away.

use super::side::Side;
use super::{Row, median};
use crate::group::Group;
use crate::undo::Undo;
use crate::vm::join_group;
use pagefold_os::procfs;
use std::io;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// What it does with its memory: one word everywhere, zeros and ones in turn, noise that is added up, bits that walk.
const METHODS: [&str; 4] = ["write64", "zero-one", "rand-sum", "flip"];
/// How long it may take to have its memory, and to be held where it does not hold up the agent.
const PATIENCE: Duration = Duration::from_secs(20);

/// A thread that does not run while this lives.
struct Held(i32);

impl Held {
    fn new(thread: u32) -> io::Result<Held> {
        let thread = thread as i32;
        let ask = |request: libc::c_uint| {
            // SAFETY: neither request takes or writes memory of ours.
            match unsafe { libc::ptrace(request, thread, 0, 0) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        };
        ask(libc::PTRACE_SEIZE)?;
        let held = Held(thread);
        ask(libc::PTRACE_INTERRUPT)?;
        // SAFETY: the kernel is told to write no status.
        match unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(held),
        }
    }
}

/// True if this thread, which is held, is in its program's own code, or in a call that only touches memory. Elsewhere it may
/// hold up the agent.
fn is_by_itself(thread: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let words: Vec<&str> = text.split_whitespace().collect();
    let touches = words.first().is_some_and(|call| *call == libc::SYS_madvise.to_string())
        && words.get(3).and_then(|word| number(word)) == Some(libc::MADV_POPULATE_READ as u64);
    let at = words.last().and_then(|word| number(word)).unwrap_or(0);
    let maps = procfs::maps(thread as i32).unwrap_or_default();
    touches || maps.iter().any(|map| (map.range.start..map.range.end).contains(&at) && map.name.ends_with("stress-ng"))
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: takes and writes no memory of ours.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
    }
}

/// The process below `pid` that has most memory, and how much.
fn worker(pid: u32) -> (u32, u64) {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let below = children.split_whitespace().filter_map(|child| child.parse().ok()).map(worker);
    below.chain([(pid, procfs::rss(pid as i32))]).max_by_key(|(_, rss)| *rss).unwrap_or((pid, 0))
}

/// Operations that stress-ng counted until it was interrupted `seconds` after the limit was set; nothing if the kernel killed
/// its worker there, which it starts again.
fn run(tier: bool, method: &str, mib: u64, seconds: f64) -> io::Result<Option<f64>> {
    let killed = Group::killed();
    let dir = std::env::temp_dir().join(format!("pagefold-bench-stress-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let made = dir.clone();
    let _dir = Undo::later(move || drop(std::fs::remove_dir_all(made)));
    let group = Group::new("stress")?;
    // Of programs and their files what is in use.
    let used = || {
        let used = group.number(&["memory.usage_in_bytes", "memory.current"]).unwrap_or(0);
        used.saturating_sub(group.idle_file_cache())
    };
    let side = Side::start(tier, &dir, mib << 21)?;
    let mut command = side.program("stress-ng");
    command.args([
        "--vm",
        "1",
        "--vm-keep",
        "--vm-madvise",
        "normal",
        "--vm-method",
        method,
        "--vm-bytes",
        &format!("{mib}m"),
    ]);
    command.args(["--metrics", "--timeout", "600", "--temp-path"]).arg(&dir);
    join_group(&mut command, &group.path);
    let named = |error: io::Error| io::Error::new(error.kind(), format!("stress-ng: {error}"));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(named)?;
    let mut child = Ended(child);
    let pid = child.0.id();
    let end = Instant::now() + PATIENCE;
    while worker(pid).1 < (mib << 20) / 16 * 15 {
        if Instant::now() > end {
            return Err(io::Error::other(format!("stress-ng {method} does not take its memory")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let limit = used().saturating_sub(mib << 19);
    let mut thread;
    loop {
        thread = worker(pid).0;
        let held = Held::new(thread)?;
        let parked = if !tier || is_by_itself(thread) {
            side.park()
        } else {
            Err(io::Error::other("stress-ng is always inside of a call"))
        };
        // Its agent may not have been heard of yet, and what just came to its place is left alone for a moment.
        if parked.is_ok() && (!tier || used() < limit) {
            group.limit(limit)?;
            drop(held);
            break;
        }
        drop(held);
        if Instant::now() > end {
            return Err(parked
                .err()
                .unwrap_or_else(|| io::Error::other("stress-ng keeps its memory when it is parked")));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let survived = worker(pid).0 == thread && Group::killed() == killed;
    // SAFETY: a signal to our own child, which has not been waited for.
    unsafe { libc::kill(pid as i32, libc::SIGINT) };
    let output = child.output()?;
    let ops = output.lines().find_map(|line| {
        let mut words = line.split("] ").nth(1)?.split_whitespace();
        (words.next() == Some("vm")).then(|| words.next()?.parse().ok())?
    });
    let ops = ops.ok_or_else(|| io::Error::other(format!("stress-ng said {output}")))?;
    Ok(survived.then_some(ops))
}

/// A program that ends with the run, and what runs below it.
struct Ended(Child);

impl Ended {
    fn output(&mut self) -> io::Result<String> {
        let mut text = String::new();
        if let Some(mut out) = self.0.stdout.take() {
            io::Read::read_to_string(&mut out, &mut text)?;
        }
        if let Some(mut err) = self.0.stderr.take() {
            io::Read::read_to_string(&mut err, &mut text)?;
        }
        self.0.wait()?;
        Ok(text)
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let (worker, _) = worker(self.0.id());
        if let Ok(None) = self.0.try_wait() {
            // Not by SIGKILL alone: it would leave its own children.
            // SAFETY: signals to our own child, and to what it started.
            unsafe { libc::kill(self.0.id() as i32, libc::SIGINT) };
            std::thread::sleep(Duration::from_millis(200));
            if worker != self.0.id() {
                // SAFETY: as above.
                unsafe { libc::kill(worker as i32, libc::SIGKILL) };
            }
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Operations a second under the limit; nothing if it did not survive that.
fn once(tier: bool, method: &str, mib: u64, seconds: f64) -> io::Result<Option<f64>> {
    let short = run(tier, method, mib, seconds / 4.0)?;
    let long = run(tier, method, mib, seconds / 4.0 + seconds)?;
    Ok(short.zip(long).map(|(short, long)| (long - short) / seconds))
}

/// Measures both, in turns: `seconds` of each method, and a half more of each for the short runs.
pub fn measure(mib: u64, seconds: f64, rounds: usize) -> io::Result<Vec<Row>> {
    crate::group::zswap_lies_outside()?;
    let mut rows = Vec::new();
    for method in METHODS {
        let mut rates = [Vec::new(), Vec::new()];
        let mut killed = [0u32; 2];
        for _ in 0..rounds {
            for (at, tier) in [true, false].into_iter().enumerate() {
                match once(tier, method, mib, seconds)? {
                    Some(rate) => rates[at].push(rate),
                    None => killed[at] += 1,
                }
            }
        }
        for ((tier, rates), killed) in [true, false].into_iter().zip(&rates).zip(killed) {
            rows.push(Row {
                part: "half",
                name: Side::name(tier),
                on: format!("stress-ng, {mib} MiB, {method}"),
                figures: vec![
                    ("ops/s", median(&mut rates.clone())),
                    ("least", rates.iter().copied().reduce(f64::min).unwrap_or(f64::NAN)),
                    ("most", rates.iter().copied().reduce(f64::max).unwrap_or(f64::NAN)),
                    ("killed", f64::from(killed)),
                ],
            });
        }
    }
    Ok(rows)
}
