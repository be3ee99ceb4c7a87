//! Half the memory: a program under a limit of half of what it uses, in the cold tier and with zswap.
//!
//! redis reads and writes random keys. stress-ng's memory stressor takes all its memory immediately and never rests, so its
//! worker thread is stopped with ptrace(2) while the limit is set; the agent's threads go on. Its operations without a limit
//! are the same in a short run and in a long one, and are subtracted.

use super::kernel::Zswap;
use super::row::Row;
use crate::group::{self, Group};
use crate::process::{self, Running, wait_for};
use crate::redis::Redis;
use crate::restore::folder;
use crate::stats::median;
use crate::tool::Daemon;
use pagefold_os::procfs;
use serde_json::Value;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The backend that holds cold memory.
enum Backend {
    Tier(Daemon),
    Zswap { _on: Zswap },
}

impl Backend {
    /// Starts one: the tier with files in `dir`, or zswap over a swap file of `swap_bytes`.
    fn start(tier: bool, dir: &Path, swap_bytes: u64) -> io::Result<Backend> {
        match tier {
            true => Ok(Backend::Tier(Daemon::start(dir, &["--priority=normal", "--tier-dir", "none"])?)),
            false => Ok(Backend::Zswap { _on: Zswap::start(swap_bytes)? }),
        }
    }

    /// Its name in rows.
    fn name(tier: bool) -> String {
        if tier { "cold tier".to_owned() } else { format!("zswap, {}", Zswap::compressor()) }
    }

    /// A program under this backend.
    fn program(&self, name: &str) -> Command {
        let Backend::Tier(daemon) = self else { return Command::new(name) };
        let words = daemon.run(&["--cold"]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(name);
        command
    }

    /// Evicts all it can, so that a limit can be set; the kernel does that itself when the limit is set.
    fn park(&self) -> io::Result<()> {
        match self {
            Backend::Tier(daemon) => daemon.park(),
            Backend::Zswap { .. } => Ok(()),
        }
    }

    /// The daemon's status; null with zswap.
    fn status(&self) -> io::Result<Value> {
        match self {
            Backend::Tier(daemon) => daemon.status(),
            Backend::Zswap { .. } => Ok(Value::Null),
        }
    }
}

fn used(group: &Group) -> u64 {
    group.number(&["memory.usage_in_bytes", "memory.current"]).unwrap_or(0)
}

// ---- redis ----

/// Bytes of a value.
const VALUE_BYTES: usize = 1000;

/// A value as caches hold them: text with numbers in it.
fn value(key: usize) -> String {
    let (mut value, mut number) = (String::new(), (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    while value.len() < VALUE_BYTES {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(key as u64);
        value += &format!("{{\"id\":{key},\"token\":\"{number:016x}\",\"path\":\"/shop/item\",\"seen\":true}},");
    }
    value.truncate(VALUE_BYTES);
    value
}

/// One run: operations per second on random keys, all memory in use, and faults per operation.
fn redis_once(tier: bool, mib: usize, requests: usize, reads: &str) -> io::Result<[f64; 3]> {
    let (dir, _gone) = folder("half")?;
    let group = Group::new("half")?;
    let backend = Backend::start(tier, &dir, (mib as u64) << 21)?;
    let before = Zswap::bytes();
    let mut command = backend.program("redis-server");
    group::join(&mut command, &group.path);
    let redis = Redis::start(command, &dir)?;
    let count = (mib << 20) / (VALUE_BYTES + 100);
    redis.set((0..count).map(|key| (format!("key:{key:012}"), value(key))))?;
    let limit = used(&group) / 2;
    backend.park()?;
    group.limit(limit)?;
    let run = |requests: usize| -> io::Result<f64> {
        let mut command = Command::new("redis-benchmark");
        command.args(["-q", "-c", "4", "-n", &requests.to_string(), "-r", &count.to_string(), "-s"]).arg(&redis.socket);
        let text = process::output(if reads == "reads" {
            command.args(["GET", "key:__rand_int__"])
        } else {
            command.args(["SETRANGE", "key:__rand_int__", "100", "another token of the session"])
        })?;
        let number =
            |text: &str| text.split(" requests per second").next()?.split_whitespace().next_back()?.parse().ok();
        text.rsplit('\r').find_map(number).ok_or_else(|| io::Error::other(format!("redis-benchmark said {text}")))
    };
    let sum = |of: &Value, field: &str| -> f64 {
        of.as_array().into_iter().flatten().filter_map(|one| one[field].as_f64()).sum()
    };
    // Faults on evicted pages.
    let faults = || -> io::Result<f64> {
        if tier { Ok(sum(&backend.status()?["cold"]["clients"], "refaults")) } else { Ok(Zswap::pages_in()) }
    };
    // Half of the keys are faulted in and evicted before it counts.
    run(requests / 4)?;
    let earlier = faults()?;
    let rate = run(requests)?;
    let faults = (faults()? - earlier) / requests as f64;
    let held =
        if tier { sum(&backend.status()?["cold"]["domains"], "memory_bytes") } else { Zswap::bytes().0 - before.0 };
    Ok([rate, (used(&group) as f64 + held) / 1e6, faults])
}

/// As [`redis_once`]; runs again where the kernel kills the program at its limit, and counts that.
fn surviving(tier: bool, mib: usize, requests: usize, reads: &str, killed: &mut u32) -> io::Result<[f64; 3]> {
    for _ in 0..5 {
        let before = Group::killed();
        match redis_once(tier, mib, requests, reads) {
            Err(error) if Group::killed() > before => {
                eprintln!("redis was killed at its limit ({}): {error}", if tier { "cold tier" } else { "zswap" });
                *killed += 1;
            }
            other => return other,
        }
    }
    Err(io::Error::other("redis was killed at its limit five times"))
}

/// Measures redis with both backends, in turns.
pub fn redis(mib: usize, requests: usize, rounds: usize) -> io::Result<Vec<Row>> {
    group::zswap_lies_outside()?;
    let mut rows = Vec::new();
    for kind in ["reads", "writes"] {
        let mut runs = [Vec::new(), Vec::new()];
        let mut killed = [0; 2];
        for _ in 0..rounds {
            for (tier, runs) in [true, false].into_iter().zip(&mut runs) {
                runs.push(surviving(tier, mib, requests, kind, &mut killed[usize::from(!tier)])?);
            }
        }
        let names = [Backend::name(true), Backend::name(false)];
        for ((name, runs), killed) in names.into_iter().zip(&runs).zip(killed) {
            let column = |index: usize| -> Vec<f64> { runs.iter().map(|run| run[index]).collect() };
            let mut figures = Row::rounds("requests/s", &column(0));
            figures.extend([
                ("MB in all", median(column(1))),
                ("faults/request", median(column(2))),
                ("killed", f64::from(killed)),
            ]);
            rows.push(Row { part: "half", name, on: format!("redis, {mib} MiB, random {kind}"), figures });
        }
    }
    Ok(rows)
}

// ---- stress-ng ----

/// Its methods: one word everywhere, zeros and ones in turn, noise that is added up, walking bits.
const METHODS: [&str; 4] = ["write64", "zero-one", "rand-sum", "flip"];
/// How long it may take to touch its memory, and to be stopped where it does not block the agent.
const START_MAX: Duration = Duration::from_secs(20);

/// A thread that is stopped while this lives.
struct Stopped(i32);

impl Stopped {
    fn new(thread: u32) -> io::Result<Stopped> {
        let thread = thread as i32;
        let ask = |request: libc::c_uint| {
            // SAFETY: neither PTRACE_SEIZE nor PTRACE_INTERRUPT reads or writes memory of this process.
            match unsafe { libc::ptrace(request, thread, 0, 0) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        };
        ask(libc::PTRACE_SEIZE)?;
        let held = Stopped(thread);
        ask(libc::PTRACE_INTERRUPT)?;
        // SAFETY: a null status pointer makes the kernel write no status.
        match unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(held),
        }
    }
}

/// True if this stopped thread is in its program's own code, or in a call that only touches memory. Elsewhere it may block the
/// agent.
fn is_outside_agent(thread: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let words: Vec<&str> = text.split_whitespace().collect();
    let touches = words.first().is_some_and(|call| *call == libc::SYS_madvise.to_string())
        && words.get(3).and_then(|word| number(word)) == Some(libc::MADV_POPULATE_READ as u64);
    let at = words.last().and_then(|word| number(word)).unwrap_or(0);
    let maps = procfs::maps(thread as i32).unwrap_or_default();
    touches || maps.iter().any(|map| (map.range.start..map.range.end).contains(&at) && map.name.ends_with("stress-ng"))
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: PTRACE_DETACH reads and writes no memory of this process.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
    }
}

/// The process below `pid` that has most memory, and how much.
fn worker(pid: u32) -> (u32, u64) {
    let below = procfs::children(pid as i32).into_iter().map(|child| worker(child as u32));
    below.chain([(pid, procfs::rss(pid as i32))]).max_by_key(|(_, rss)| *rss).unwrap_or((pid, 0))
}

/// The process of stress-ng. It is interrupted before it is killed: SIGKILL alone would leave its children.
struct Stress(Running);

impl Stress {
    fn start(mut command: Command, dir: &Path, method: &str, mib: u64) -> io::Result<Stress> {
        command.args(["--vm", "1", "--vm-keep", "--vm-madvise", "normal", "--vm-method", method, "--vm-bytes"]);
        command.arg(format!("{mib}m")).args(["--metrics", "--timeout", "600", "--temp-path"]).arg(dir);
        let stress =
            Stress(Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))?);
        let has_memory = || (worker(stress.pid()).1 >= (mib << 20) / 16 * 15).then_some(());
        wait_for(&format!("stress-ng {method} with its memory"), START_MAX, has_memory)?;
        Ok(stress)
    }

    fn pid(&self) -> u32 {
        self.0.0.id()
    }

    fn interrupt(&self) {
        // SAFETY: kill takes numbers only; the child is not reaped yet, so the id is still its own.
        unsafe { libc::kill(self.0.pid(), libc::SIGINT) };
    }

    /// Interrupts it and returns the operations that it counted.
    fn operations(&mut self) -> io::Result<f64> {
        self.interrupt();
        let mut text = String::new();
        if let Some(mut out) = self.0.0.stdout.take() {
            out.read_to_string(&mut text)?;
        }
        if let Some(mut err) = self.0.0.stderr.take() {
            err.read_to_string(&mut text)?;
        }
        self.0.0.wait()?;
        let ops = text.lines().find_map(|line| {
            let mut words = line.split("] ").nth(1)?.split_whitespace();
            (words.next() == Some("vm")).then(|| words.next()?.parse().ok())?
        });
        ops.ok_or_else(|| io::Error::other(format!("stress-ng said {text}")))
    }
}

impl Drop for Stress {
    fn drop(&mut self) {
        if let Ok(None) = self.0.0.try_wait() {
            let (worker, _) = worker(self.pid());
            self.interrupt();
            std::thread::sleep(Duration::from_millis(200));
            if worker != self.pid() {
                // SAFETY: kill takes numbers only; the worker was a descendant of our unreaped child a moment ago.
                unsafe { libc::kill(worker as i32, libc::SIGKILL) };
            }
        }
    }
}

/// Stops the worker's thread, evicts what the tier takes, and sets the limit; returns the thread.
fn limit(backend: &Backend, group: &Group, pid: u32, limit: u64, in_use: impl Fn() -> u64) -> io::Result<u32> {
    let (tier, end) = (matches!(backend, Backend::Tier(_)), Instant::now() + START_MAX);
    loop {
        let thread = worker(pid).0;
        let stopped = Stopped::new(thread)?;
        let parked = match !tier || is_outside_agent(thread) {
            true => backend.park(),
            false => Err(io::Error::other("stress-ng is always inside of a call")),
        };
        // Its agent may not have connected yet, and pages that were just faulted in are left alone for a moment.
        if parked.is_ok() && (!tier || in_use() < limit) {
            group.limit(limit)?;
            return Ok(thread);
        }
        drop(stopped);
        if Instant::now() > end {
            return Err(parked
                .err()
                .unwrap_or_else(|| io::Error::other("stress-ng keeps its memory when it is parked")));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Operations that stress-ng counted until it was interrupted `seconds` after the limit was set; nothing if the kernel killed
/// its worker there, which stress-ng starts again.
fn run(tier: bool, method: &str, mib: u64, seconds: f64) -> io::Result<Option<f64>> {
    let killed = Group::killed();
    let (dir, _gone) = folder("stress")?;
    let group = Group::new("stress")?;
    // Idle file cache is not in use.
    let in_use = || used(&group).saturating_sub(group.idle_file_cache());
    let backend = Backend::start(tier, &dir, mib << 21)?;
    let mut command = backend.program("stress-ng");
    group::join(&mut command, &group.path);
    let mut stress = Stress::start(command, &dir, method, mib)?;
    let thread = limit(&backend, &group, stress.pid(), in_use().saturating_sub(mib << 19), in_use)?;
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let survived = worker(stress.pid()).0 == thread && Group::killed() == killed;
    let operations = stress.operations()?;
    Ok(survived.then_some(operations))
}

/// Operations a second under the limit; nothing if it did not survive that.
fn once(tier: bool, method: &str, mib: u64, seconds: f64) -> io::Result<Option<f64>> {
    let short = run(tier, method, mib, seconds / 4.0)?;
    let long = run(tier, method, mib, seconds / 4.0 + seconds)?;
    Ok(short.zip(long).map(|(short, long)| (long - short) / seconds))
}

/// Measures stress-ng with both backends, in turns: `seconds` of each method, and a half more of each for the short runs.
pub fn stress(mib: u64, seconds: f64, rounds: usize) -> io::Result<Vec<Row>> {
    group::zswap_lies_outside()?;
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
            let mut figures = Row::rounds("ops/s", rates);
            figures.push(("killed", f64::from(killed)));
            let on = format!("stress-ng, {mib} MiB, {method}");
            rows.push(Row { part: "half", name: Backend::name(tier), on, figures });
        }
    }
    Ok(rows)
}
