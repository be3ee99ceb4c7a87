//! Everything at once, for as long as one likes: programs of all ways in write, discard, fork, move, are merged, parked and
//! woken, while programs, daemon and keeper are killed. Each program knows all its bytes.
//!
//! Some seconds here. `tests/soak MINUTES` runs longer, and adds what was counted to `tests/soak.jsonl`.

#![cfg(target_arch = "x86_64")]

mod common;

use common::cold::{Host, has_ended, kill};
use common::{Random, Server, ask_until_done, c_program_with, skipped, wait_for};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

/// Options of each daemon. What is idle is parked only when the test asks for it.
const DAEMON: [&str; 3] = ["--cold-policy=manual", "--workers=2", "--vma-budget=60000"];

/// How a program comes in.
#[derive(Clone, Copy)]
enum Way {
    Attached,
    AttachedExecutable,
    AttachedCold,
    Run,
    RunCold,
}

impl Way {
    const ALL: [Way; 6] = [Way::Attached, Way::Run, Way::AttachedExecutable, Way::AttachedCold, Way::Run, Way::RunCold];

    /// Its memory is evicted now and then. Of programs that are both merged and parked one kind is enough.
    fn is_parked(self) -> bool {
        !matches!(self, Way::Attached | Way::AttachedExecutable)
    }
}

/// What happened so far.
#[derive(Default)]
struct Counts {
    checks: AtomicU64,
    pages_compared: AtomicU64,
    programs_killed: AtomicU64,
    daemons_killed: AtomicU64,
    keepers_killed: AtomicU64,
}

/// Sums of counters that begin anew with each daemon and program.
#[derive(Default)]
struct Sums {
    last: HashMap<(i64, &'static str), u64>,
    totals: HashMap<&'static str, u64>,
}

impl Sums {
    fn add(&mut self, of: i64, name: &'static str, value: u64) {
        let last = self.last.insert((of, name), value).unwrap_or(0);
        *self.totals.entry(name).or_default() += if value >= last { value - last } else { value };
    }

    /// Adds what a status says that was not added before. What happens between the last one and the daemon's death is not
    /// counted.
    fn take(&mut self, status: &Value) {
        for name in ["pages_merged", "cow_breaks", "pages_discarded"] {
            self.add(0, name, common::events(status, name));
        }
        for client in status["cold"]["clients"].as_array().into_iter().flatten() {
            for name in ["pages_evicted", "pages_returned"] {
                self.add(client["pid"].as_i64().unwrap_or(0), name, client[name].as_u64().unwrap_or(0));
            }
        }
    }
}

/// What all threads of the test share.
struct Soak {
    seed: u64,
    static_program: PathBuf,
    dynamic_program: PathBuf,
    area_pages: u64,
    began: Instant,
    time: Duration,
    socket: PathBuf,
    dir: PathBuf,
    counts: Counts,
    sums: Mutex<Sums>,
    /// Held by forks: a child may lose pages where daemon or keeper is killed meanwhile, as the known limits say.
    forks: RwLock<()>,
}

impl Soak {
    fn tool(&self, words: &[&str]) -> Output {
        common::ask(common::TOOL.as_ref(), &self.socket, words)
    }

    /// The time is over, and each thing has happened that must, however slow the machine is.
    fn is_over(&self) -> bool {
        let passed = self.began.elapsed();
        passed >= self.time && (self.has_happened() || passed >= self.time + Duration::from_secs(120))
    }

    fn has_happened(&self) -> bool {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = [&self.counts.pages_compared, &self.counts.daemons_killed, &self.counts.keepers_killed];
        let has = |name: &&str| sums.totals.get(name).is_some_and(|total| *total > 0);
        ["pages_merged", "pages_evicted"].iter().all(has)
            && counts.iter().all(|count| count.load(Ordering::Relaxed) > 0)
    }

    fn take_counters(&self) {
        let output = self.tool(&["status", "--json"]);
        if let Ok(status) = serde_json::from_slice(&output.stdout) {
            self.sums.lock().unwrap_or_else(PoisonError::into_inner).take(&status);
        }
    }

    fn start(&self, way: Way) -> Server {
        let run = |options: &[&str]| {
            let mut command = Command::new(common::TOOL);
            command.arg("run").args(options).arg("--socket").arg(&self.socket).arg("--").current_dir(&self.dir);
            // It is told here, for the environment goes through the tool.
            command.env("AREA_PAGES", self.area_pages.to_string());
            Server::start_as("1", command, &self.dynamic_program)
        };
        let plain = |executable: bool| {
            let mut command = Command::new("env");
            command.arg(format!("AREA_PAGES={}", self.area_pages));
            // As the heaps of some runtimes.
            command.args(executable.then_some("EXECUTABLE=1"));
            Server::start_as("1", command, &self.static_program)
        };
        let attached = |options: &[&str], executable: bool| {
            let server = plain(executable);
            ask_until_done(|words| self.tool(words), &[&["attach"], options, &[&server.pid().to_string()]].concat());
            server
        };
        match way {
            Way::Attached => attached(&[], false),
            Way::AttachedExecutable => attached(&[], true),
            Way::AttachedCold => attached(&["--cold"], false),
            Way::Run => run(&["--manage=all"]),
            Way::RunCold => run(&["--cold"]),
        }
    }

    fn check(&self, server: &mut Server, word: &str) {
        server.check(word);
        self.counts.checks.fetch_add(1, Ordering::Relaxed);
        if word == "check 1" {
            self.counts.pages_compared.fetch_add(self.area_pages, Ordering::Relaxed);
        }
    }

    /// A program's life after life, until the time is over.
    fn live(&self, number: usize) {
        let mut random = Random::new(self.seed.wrapping_mul(number as u64 * 2 + 3));
        let way = Way::ALL[number % Way::ALL.len()];
        let mut server = self.start(way);
        while !self.is_over() {
            let pid = server.pid().to_string();
            match random.below(100) {
                0..40 => {
                    self.check(&mut server, "check 1");
                    self.check(&mut server, "reset 1");
                    thread::sleep(Duration::from_millis(200 + random.below(1200)));
                }
                40..55 => self.check(&mut server, &format!("write {}", 1 + random.below(self.area_pages / 8))),
                55..75 => {
                    let word = match random.below(4) {
                        0 => "move 5".to_owned(),
                        1 => "fork 1".to_owned(),
                        _ => format!("discard {}", 1 + random.below(200)),
                    };
                    let is_fork = word == "fork 1";
                    let _forks = is_fork.then(|| self.forks.read().unwrap_or_else(PoisonError::into_inner));
                    self.check(&mut server, &word);
                }
                // There may be no daemon at this moment.
                75..88 if way.is_parked() => drop(self.tool(&["park", &pid])),
                88..92 => drop(self.tool(&["unpark", &pid])),
                92..94 => drop(self.tool(&["unmerge", &pid])),
                94..97 => {
                    server.tell(["reset 1", "check 1", "write 500"][random.below(3) as usize]);
                    thread::sleep(Duration::from_millis(random.below(40)));
                    kill(server.pid());
                    drop(server);
                    self.counts.programs_killed.fetch_add(1, Ordering::Relaxed);
                    server = self.start(way);
                }
                _ => thread::sleep(Duration::from_millis(random.below(1000))),
            }
        }
        self.check(&mut server, "check 1");
        // A program that ends by itself is right to its end.
        assert!(server.end().success());
    }

    /// Kills the daemon or the keeper now and then.
    fn kill_all_the_time(&self, host: &mut Host) {
        let mut random = Random::new(self.seed.rotate_left(17));
        while !self.is_over() {
            thread::sleep(Duration::from_millis(300 + random.below(4000)));
            self.take_counters();
            let _forks = self.forks.write().unwrap_or_else(PoisonError::into_inner);
            if random.below(4) == 0 {
                self.kill_keeper(host);
            } else {
                host.kill_daemon();
                self.counts.daemons_killed.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(random.below(300)));
                host.restart_daemon(&DAEMON);
            }
        }
        self.take_counters();
    }

    /// Evicted pages are in the daemon's and the keeper's hands: with both dead they would be lost, so the daemon lives
    /// until the next keeper has them.
    fn kill_keeper(&self, host: &Host) {
        let Some(keeper) = host.keeper_pid() else { return };
        kill(keeper);
        wait_for("the keeper to have ended", 60, || has_ended(keeper));
        self.counts.keepers_killed.fetch_add(1, Ordering::Relaxed);
        let has_next =
            || host.status()["cold"]["keeper"] == true && host.keeper_pid().is_some_and(|next| next != keeper);
        wait_for("the next keeper", 60, has_next);
    }

    fn line(&self, minutes: f64, failed: Option<&str>) -> Value {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let total = |name: &str| sums.totals.get(name).copied().unwrap_or(0);
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let first_line = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        json!({
            "kernel": first_line("/proc/sys/kernel/osrelease"),
            "commit": std::env::var("PAGEFOLD_SOAK_COMMIT").unwrap_or_default(),
            "seed": self.seed,
            "minutes": (minutes * 10.0).round() / 10.0,
            "pages_merged": total("pages_merged"),
            "pages_broken": total("cow_breaks"),
            "pages_discarded": total("pages_discarded"),
            "pages_evicted": total("pages_evicted"),
            "pages_returned": total("pages_returned"),
            "pages_compared": count(&self.counts.pages_compared),
            "checks": count(&self.counts.checks),
            "programs_killed": count(&self.counts.programs_killed),
            "daemons_killed": count(&self.counts.daemons_killed),
            "keepers_killed": count(&self.counts.keepers_killed),
            "failed": failed,
        })
    }
}

/// A number that the environment sets.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

fn append(path: &Path, line: &Value) {
    let mut file = OpenOptions::new().create(true).append(true).open(path).expect("the log");
    writeln!(file, "{line}").expect("the log");
}

#[test]
fn nothing_is_lost_while_everything_happens_at_once() {
    if !common::can_merge() {
        return;
    }
    if !common::is_root() {
        skipped("only a daemon with CAP_SYS_PTRACE follows forks of attached programs");
        return;
    }
    let programs = c_program_with("attached", &["-static"]).zip(c_program_with("attached", &[]));
    let Some((static_program, dynamic_program)) = programs else { return };
    let time = Duration::from_secs(setting("PAGEFOLD_SOAK_SECONDS", 12));
    let mut host = Host::start(&DAEMON);
    let began = Instant::now();
    let soak = Soak {
        seed: setting("PAGEFOLD_SOAK_SEED", common::seed_by_clock()),
        static_program,
        dynamic_program,
        area_pages: setting("PAGEFOLD_SOAK_PAGES", 4096),
        began,
        time,
        socket: host.socket.clone(),
        dir: host.dir.path().to_owned(),
        counts: Counts::default(),
        sums: Mutex::default(),
        forks: RwLock::default(),
    };
    let lives = setting("PAGEFOLD_SOAK_PROGRAMS", 6) as usize;
    let failed: Vec<String> = thread::scope(|scope| {
        let soak = &soak;
        let mut threads: Vec<_> = (0..lives).map(|number| scope.spawn(move || soak.live(number))).collect();
        threads.push(scope.spawn(|| soak.kill_all_the_time(&mut host)));
        let said = |panic: Box<dyn std::any::Any + Send>| {
            panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic without words".into())
        };
        threads.into_iter().filter_map(|thread| thread.join().err()).map(said).collect()
    });
    let line = soak.line(began.elapsed().as_secs_f64() / 60.0, failed.first().map(String::as_str));
    println!("{line}");
    if let Some(path) = std::env::var_os("PAGEFOLD_SOAK_LOG") {
        append(Path::new(&path), &line);
    }
    assert!(failed.is_empty(), "{failed:?}");
    assert!(soak.has_happened(), "{line}");
}
