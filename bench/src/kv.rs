//! `pagefold bench kv`: forrest and its peers, same keys, same threads, same run.
//!
//! Four tables: operations against other maps (by the engine of `index`: each measurement a process of its own, rounds
//! interleaved); the source's test against its red-black tree; a shared store of two processes against a private one of
//! two threads; and what people use today to share between processes, LMDB and redis, where they are installed.

use crate::index::maps::{Maker, Map};
use crate::index::{self, median_and_spread};
use crate::options::{self, Clock, Common};
use clap::Parser;
use forrest::{Options, Store};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::RwLock;
use std::time::{Duration, Instant};

/// The peers of the first table that this build may have.
const PEERS: &str = "forrest,forrest-shared,forrest-ordered,std-hash-lock,std-hash-sharded,std-btree-lock,papaya,dashmap,scc-hash-map,\
                     scc-hash-index,rb-tree-lock,absl-btree-lock,libcuckoo,tbb,liburcu";

/// forrest and its peers: the source's test, gets, inserts, churn, memory, shared stores.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench kv",
    after_help = "Examples:\n  pagefold bench kv --quick\n  pagefold bench kv --keys 10000000 --threads 1,2 --tables source,shared\n  \
                  pagefold bench kv --clock cpu --tables maps -- --mix churn --dist zipf"
)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Which tables.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "maps,source,values,shared")]
    tables: Vec<String>,
    /// Options passed on to the `maps` table: --mix, --dist, --pages, --only, as `pagefold bench index` has them.
    #[arg(last = true, value_name = "INDEX OPTIONS")]
    rest: Vec<String>,
}

/// Our entries in the list of maps.
pub fn makers() -> Vec<Maker> {
    vec![
        ("forrest", "forrest, private", |_, huge| Box::new(options(huge).private().expect("address space"))),
        ("forrest-reserved", "forrest, room made before", |keys, huge| {
            let store = options(huge).private().expect("address space");
            store.reserve(keys as u64).expect("memory");
            Box::new(store)
        }),
        ("forrest-shared", "forrest, in /dev/shm", |_, huge| {
            let path = PathBuf::from(format!("/dev/shm/forrest-bench-{}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            let store = options(huge).create_path(&path).expect("room in /dev/shm");
            std::fs::remove_file(&path).expect("just made");
            Box::new(store)
        }),
        ("forrest-ordered", "forrest, private, keys in order too", |_, huge| {
            Box::new(options(huge).ordered().private().expect("address space"))
        }),
    ]
}

fn options(huge: bool) -> Options {
    Options::new().pages(if huge { forrest::Pages::Auto } else { forrest::Pages::Small })
}

fn number(value: &[u8]) -> u64 {
    value.try_into().map_or(u64::MAX, u64::from_le_bytes)
}

impl Map for Store {
    fn get(&self, key: u64) -> Option<u64> {
        Store::get(self, &key.to_le_bytes()).map(|value| number(&value))
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        !self.set(&key.to_le_bytes(), &value.to_le_bytes()).expect("memory")
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.delete(&key.to_le_bytes()).expect("a thread record")
    }

    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        let mut bytes = [[0; 8]; 256];
        for (keys, found) in keys.chunks(256).zip(found.chunks_mut(256)) {
            for (bytes, key) in bytes.iter_mut().zip(keys) {
                *bytes = key.to_le_bytes();
            }
            Store::get_many(self, &bytes[..keys.len()], |index, value| found[index] = value.map(number));
        }
        true
    }

    fn insert_many(&self, pairs: &[(u64, u64)]) -> bool {
        let pairs: Vec<([u8; 8], [u8; 8])> =
            pairs.iter().map(|(key, value)| (key.to_le_bytes(), value.to_le_bytes())).collect();
        self.set_many(&pairs).expect("memory");
        true
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        // Any order will do for a bench, as long as there is one: that of the little-endian bytes.
        let scan = Store::scan(self, &from.to_le_bytes()..).ok()?;
        Some(scan.take(count).fold(0, |sum: u64, (_, value)| sum.wrapping_add(number(&value))))
    }

    fn memory_bytes(&self) -> Option<u64> {
        let stats = self.stats();
        Some(stats.held_bytes + stats.fixed_bytes + stats.order_bytes)
    }
}

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    let args: Args = match options::parse("kv", args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    if let Some(plan) = &args.common.child {
        child(plan);
        return ExitCode::SUCCESS;
    }
    let known = ["maps", "source", "values", "shared"];
    if let Some(unknown) = args.tables.iter().find(|table| !known.contains(&table.as_str())) {
        eprintln!("pagefold bench kv: no table named {unknown}; there are {}", known.join(", "));
        return ExitCode::from(2);
    }
    for table in known.into_iter().filter(|name| args.tables.iter().any(|table| table == name)) {
        let done = if table == "maps" { maps(&args) } else { rows(&args, table) };
        if let Err(message) = done {
            eprintln!("pagefold bench kv: {table}: {message}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The first table, by the engine of `index`.
fn maps(args: &Args) -> Result<(), String> {
    let known: Vec<&str> = index::maps::all().into_iter().map(|maker| maker.0).collect();
    let only: Vec<&str> = PEERS.split(',').filter(|name| known.contains(name)).collect();
    let mut passed = vec![
        "--keys".to_string(),
        args.common.keys(10_000_000).to_string(),
        "--rounds".into(),
        args.common.rounds().to_string(),
        "--threads".into(),
        args.common.threads.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
    ];
    if !args.rest.iter().any(|option| option == "--only") {
        passed.extend(["--only".into(), only.join(",")]);
    }
    passed.extend(
        (args.common.clock == Clock::Cpu).then_some(["--clock".to_string(), "cpu".into()]).into_iter().flatten(),
    );
    passed.extend(args.common.quick.then(|| "--quick".into()));
    passed.extend(args.common.json.then(|| "--json".into()));
    passed.extend(args.rest.iter().cloned());
    if index::run(&passed) == ExitCode::SUCCESS { Ok(()) } else { Err("see above".into()) }
}

/// A measurement by name: what it is, and the call that gives million operations per second for keys, threads and a
/// directory of its own.
type Row = (&'static str, &'static str, fn(usize, usize, &Path) -> Option<f64>);

fn table_rows(table: &str) -> Vec<Row> {
    match table {
        "source" => vec![
            ("forrest", "one at a time", |keys, threads, _| source(&Store::new().ok()?, keys, threads, false)),
            ("forrest-batch", "set_many, get_many", |keys, threads, _| {
                source(&Store::new().ok()?, keys, threads, true)
            }),
            #[cfg(feature = "cpp-peers")]
            ("rb-tree-source", "the source's user-space side: red-black tree, one rwlock", |keys, threads, _| {
                source(&index::cpp::SourceTree::new(), keys, threads, false)
            }),
            ("rb-tree-lock", "the same without its allocations: std::map of numbers", |keys, threads, _| {
                let known = index::maps::all();
                let maker = known.iter().find(|maker| maker.0 == "rb-tree-lock")?;
                source_u64(&*(maker.2)(keys, true), keys, threads)
            }),
            ("std-btree-lock", "BTreeMap of strings, one RwLock", |keys, threads, _| {
                source(&RwLock::new(BTreeMap::new()), keys, threads, false)
            }),
        ],
        "values" => vec![
            ("set-100", "values of 100 bytes, set", |keys, threads, _| records(keys, threads, 0)),
            ("get-100", "copied", |keys, threads, _| records(keys, threads, 1)),
            ("get-100-guard", "under a guard", |keys, threads, _| records(keys, threads, 2)),
            ("get-100-batch", "in batches", |keys, threads, _| records(keys, threads, 3)),
            ("delete-100", "deleted", |keys, threads, _| records(keys, threads, 4)),
        ],
        _ => vec![
            ("private", "forrest, threads of one process", |keys, threads, _| private_reads(keys, threads)),
            ("shared", "forrest, a process per thread, /dev/shm", |keys, threads, _| {
                processes(Path::new("/dev/shm"), keys, threads, "forrest")
            }),
            ("shared-huge", "the same on a tmpfs with huge pages", |keys, threads, folder| {
                let mount = HugeMount::new(folder)?;
                processes(&mount.0, keys, threads, "forrest")
            }),
            ("private-batch", "forrest, threads, get_many", |keys, threads, _| private_batches(keys, threads)),
            ("shared-batch", "forrest, processes, get_many", |keys, threads, _| {
                processes(Path::new("/dev/shm"), keys, threads, "forrest-batch")
            }),
            #[cfg(feature = "peers")]
            ("lmdb", "LMDB in /dev/shm, a process per thread", |keys, threads, _| {
                processes(Path::new("/dev/shm"), keys, threads, "lmdb")
            }),
            ("redis", "redis over a Unix socket, GETs one at a time", |keys, threads, folder| {
                redis(keys, threads, folder)
            }),
        ],
    }
}

/// One result line.
#[derive(serde::Serialize)]
struct Line {
    name: &'static str,
    about: &'static str,
    threads: usize,
    rates: Vec<f64>,
}

/// Measures the rows of a table, interleaved, and prints them.
fn rows(args: &Args, table: &str) -> Result<(), String> {
    let keys = args.common.keys(10_000_000);
    let rows = table_rows(table);
    let mut lines: Vec<Line> = Vec::new();
    for &threads in &args.common.threads {
        lines.extend(rows.iter().map(|&(name, about, _)| Line { name, about, threads, rates: Vec::new() }));
    }
    for round in 0..args.common.rounds() {
        for line in &mut lines {
            // A process of its own, so that no structure inherits another's heap.
            let clock = if args.common.clock == Clock::Cpu { "cpu" } else { "wall" };
            let plan = format!("{table} {} {keys} {} {clock}", line.name, line.threads);
            let exe = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
            let output = Command::new(exe)
                .args(["kv", "--child", &plan])
                .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
                .stdin(Stdio::null())
                .stderr(Stdio::inherit())
                .output()
                .map_err(|error| format!("cannot start the measuring process: {error}"))?;
            let text = String::from_utf8_lossy(&output.stdout);
            if !output.status.success() {
                return Err(format!("measuring {} failed: {}", line.name, output.status));
            }
            if let Ok(rate) = text.trim().parse() {
                line.rates.push(rate);
            } else if round == 0 && !args.common.json {
                eprintln!("SKIPPED: {} ({}) is not available here", line.name, line.about);
            }
        }
    }
    lines.retain(|line| !line.rates.is_empty());
    crate::record::emit(serde_json::json!({
        "bench": "kv", "table": table, "keys": keys, "clock": args.common.clock, "rows": lines,
    }));
    if args.common.json {
        return Ok(());
    }
    let about = match table {
        "source" => "inserts and reads of the source's test: key%lu hashed with seed 9, decimal values",
        "values" => "operations on values of 100 bytes",
        _ => "gets of a store that processes share",
    };
    let by = if args.common.clock == Clock::Cpu { " of processor time" } else { "" };
    println!("\n{keys} keys, {about}\nmillion operations per second{by}, median (+-: half the spread in percent)");
    for line in &lines {
        let (median, spread) = median_and_spread(&line.rates);
        let threads = line.threads;
        println!("{:16}{threads:>3} threads {median:>9.3} +-{spread:<3.0} {}", line.name, line.about);
    }
    Ok(())
}

fn child(plan: &str) {
    let fields: Vec<&str> = plan.split(' ').collect();
    let (Some(keys), Some(threads)) =
        (fields.get(2).and_then(|field| field.parse().ok()), fields.get(3).and_then(|field| field.parse().ok()))
    else {
        eprintln!("a plan is TABLE NAME KEYS THREADS CLOCK");
        std::process::exit(2);
    };
    let _ = CLOCK.set(if fields.get(4) == Some(&"cpu") { Clock::Cpu } else { Clock::Wall });
    if fields[0] == "reader" {
        reader(fields[1], keys, threads, Path::new(fields[5]));
        return;
    }
    let folder = std::env::temp_dir().join(format!("pagefold-bench-kv-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a directory for this run");
    let rows = table_rows(fields[0]);
    let rate = rows.iter().find(|row| row.0 == fields[1]).and_then(|row| (row.2)(keys, threads, &folder));
    let _ = std::fs::remove_dir_all(&folder);
    match rate {
        Some(rate) => println!("{rate}"),
        None => println!("-"),
    }
}

/// What this process's rates are taken by: set once, from the plan.
static CLOCK: std::sync::OnceLock<Clock> = std::sync::OnceLock::new();

fn clock() -> Clock {
    CLOCK.get().copied().unwrap_or(Clock::Wall)
}

/// Runs `work(thread)` in all threads at once; million operations per second.
fn timed(threads: usize, operations: usize, work: impl Fn(usize) + Sync) -> f64 {
    index::run::timed(threads, operations, clock(), work)
}

/// What the source's test needs of a store.
trait Strings: Sync {
    fn put(&self, key: u64, value: &[u8]);
    fn holds(&self, key: u64, value: &[u8]) -> bool;
    fn put_many(&self, entries: &[([u8; 8], Digits)]);
    fn holds_many(&self, keys: &[[u8; 8]], values: &[Digits]) -> bool;
}

impl Strings for Store {
    fn put(&self, key: u64, value: &[u8]) {
        self.set(&key.to_le_bytes(), value).expect("memory");
    }

    fn holds(&self, key: u64, value: &[u8]) -> bool {
        self.get(&key.to_le_bytes()).is_some_and(|found| *found == *value)
    }

    fn put_many(&self, entries: &[([u8; 8], Digits)]) {
        self.set_many(entries).expect("memory");
    }

    fn holds_many(&self, keys: &[[u8; 8]], values: &[Digits]) -> bool {
        let mut good = true;
        self.get_many(keys, |index, found| good &= found == Some(values[index].as_ref()));
        good
    }
}

#[cfg(feature = "cpp-peers")]
impl Strings for index::cpp::SourceTree {
    fn put(&self, key: u64, value: &[u8]) {
        index::cpp::SourceTree::put(self, key, value);
    }

    fn holds(&self, key: u64, value: &[u8]) -> bool {
        index::cpp::SourceTree::holds(self, key, value)
    }

    fn put_many(&self, entries: &[([u8; 8], Digits)]) {
        entries.iter().for_each(|(key, value)| self.put(u64::from_le_bytes(*key), value.as_ref()));
    }

    fn holds_many(&self, keys: &[[u8; 8]], values: &[Digits]) -> bool {
        keys.iter().zip(values).all(|(key, value)| self.holds(u64::from_le_bytes(*key), value.as_ref()))
    }
}

impl Strings for RwLock<BTreeMap<u64, Box<[u8]>>> {
    fn put(&self, key: u64, value: &[u8]) {
        self.write().expect("no panic under the lock").insert(key, value.into());
    }

    fn holds(&self, key: u64, value: &[u8]) -> bool {
        self.read().expect("no panic under the lock").get(&key).is_some_and(|found| **found == *value)
    }

    fn put_many(&self, entries: &[([u8; 8], Digits)]) {
        entries.iter().for_each(|(key, value)| self.put(u64::from_le_bytes(*key), value.as_ref()));
    }

    fn holds_many(&self, keys: &[[u8; 8]], values: &[Digits]) -> bool {
        keys.iter().zip(values).all(|(key, value)| self.holds(u64::from_le_bytes(*key), value.as_ref()))
    }
}

/// The decimal text of a number, without an allocation.
#[derive(Clone, Copy)]
struct Digits {
    bytes: [u8; 20],
    start: u8,
}

impl Digits {
    fn of(mut number: usize) -> Digits {
        let mut digits = Digits { bytes: [0; 20], start: 20 };
        loop {
            digits.start -= 1;
            digits.bytes[usize::from(digits.start)] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return digits;
            }
        }
    }
}

impl AsRef<[u8]> for Digits {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[usize::from(self.start)..]
    }
}

/// The source's key of a number: the hash of `key%lu` with seed 9.
fn source_key(number: usize) -> u64 {
    let mut digits = Digits::of(number);
    let start = usize::from(digits.start) - 3;
    digits.bytes[start..start + 3].copy_from_slice(b"key");
    forrest::murmur64a(&digits.bytes[start..], 9)
}

/// All threads insert their share; join; all threads read it. Both phases count, as in the source.
fn source(store: &dyn Strings, keys: usize, threads: usize, batched: bool) -> Option<f64> {
    let share = keys.div_ceil(threads);
    let range = |thread: usize| (thread * share).min(keys)..((thread + 1) * share).min(keys);
    let phase = |read: bool| {
        timed(threads, keys, |thread| {
            if !batched {
                for number in range(thread) {
                    let value = Digits::of(number);
                    if read {
                        assert!(store.holds(source_key(number), value.as_ref()), "{number} is missing");
                    } else {
                        store.put(source_key(number), value.as_ref());
                    }
                }
                return;
            }
            let range = range(thread);
            let (mut keys, mut values, mut entries) = (Vec::new(), Vec::new(), Vec::new());
            for first in range.clone().step_by(256) {
                let numbers = first..(first + 256).min(range.end);
                if read {
                    keys.clear();
                    values.clear();
                    keys.extend(numbers.clone().map(|number| source_key(number).to_le_bytes()));
                    values.extend(numbers.map(Digits::of));
                    assert!(store.holds_many(&keys, &values), "some from {first} on are missing");
                } else {
                    entries.clear();
                    entries.extend(numbers.map(|number| (source_key(number).to_le_bytes(), Digits::of(number))));
                    store.put_many(&entries);
                }
            }
        })
    };
    let (insert, read) = (phase(false), phase(true));
    Some(2.0 / (1.0 / insert + 1.0 / read))
}

/// The same on a map of numbers: the decimal text packed into one, which spares the peer an allocation per value.
fn source_u64(map: &dyn Map, keys: usize, threads: usize) -> Option<f64> {
    let share = keys.div_ceil(threads);
    let range = |thread: usize| (thread * share).min(keys)..((thread + 1) * share).min(keys);
    let value =
        |number: usize| Digits::of(number).as_ref().iter().fold(0u64, |packed, &digit| packed << 8 | u64::from(digit));
    let insert = timed(threads, keys, |thread| {
        range(thread).for_each(|number| assert!(map.insert(source_key(number), value(number))));
    });
    let read = timed(threads, keys, |thread| {
        range(thread).for_each(|number| assert_eq!(map.get(source_key(number)), Some(value(number))));
    });
    Some(2.0 / (1.0 / insert + 1.0 / read))
}

/// Values of 100 bytes under keys of 8: set, get in three ways, delete; the rate of one of them.
fn records(keys: usize, threads: usize, which: usize) -> Option<f64> {
    let store = Store::new().ok()?;
    let share = keys.div_ceil(threads);
    let range = |thread: usize| (thread * share).min(keys)..((thread + 1) * share).min(keys);
    let name = |number: usize| (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let rate = timed(threads, keys, |thread| {
        let mut value = [7u8; 100];
        for number in range(thread) {
            value[..8].copy_from_slice(&name(number));
            store.set(&name(number), &value).expect("memory");
        }
    });
    Some(match which {
        0 => rate,
        1 => timed(threads, keys, |thread| {
            let mut out = Vec::new();
            for number in range(thread) {
                assert!(store.get_into(&name(number), &mut out) && out[..8] == name(number) && out.len() == 100);
            }
        }),
        2 => timed(threads, keys, |thread| {
            for number in range(thread) {
                let value = store.get_ref(&name(number)).expect("set above");
                assert!(value[..8] == name(number) && value.len() == 100);
            }
        }),
        3 => timed(threads, keys, |thread| {
            let names: Vec<[u8; 8]> = range(thread).map(name).collect();
            for names in names.chunks(256) {
                store.get_many(names, |index, value| assert_eq!(value.expect("set above")[..8], names[index]));
            }
        }),
        _ => timed(threads, keys, |thread| {
            range(thread).for_each(|n| assert!(store.delete(&name(n)).expect("a thread record")))
        }),
    })
}

/// Lookups of one reader: as many as there are keys, in an order of its own.
fn lookup_order(keys: usize, reader: usize) -> impl Iterator<Item = u64> {
    let step = (keys / 2 + 1..).find(|step| gcd(*step, keys) == 1).unwrap_or(1);
    let mut at = reader * 7919 % keys;
    (0..keys).map(move |_| {
        at = (at + step) % keys;
        (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn fill(store: &Store, keys: usize) {
    for key in lookup_order(keys, 0) {
        store.set(&key.to_le_bytes(), &key.to_le_bytes()).expect("memory");
    }
}

fn read_all(store: &Store, keys: usize, reader: usize) {
    for key in lookup_order(keys, reader) {
        assert_eq!(store.get(&key.to_le_bytes()).map(|value| number(&value)), Some(key));
    }
}

fn read_batches(store: &Store, keys: usize, reader: usize) {
    let mut batch = Vec::with_capacity(256);
    let mut order = lookup_order(keys, reader).peekable();
    while order.peek().is_some() {
        batch.clear();
        batch.extend(order.by_ref().take(256).map(u64::to_le_bytes));
        store.get_many(&batch, |index, value| assert_eq!(value, Some(&batch[index][..])));
    }
}

fn private_reads(keys: usize, threads: usize) -> Option<f64> {
    let store = Store::new().ok()?;
    fill(&store, keys);
    Some(timed(threads, keys * threads, |thread| read_all(&store, keys, thread)))
}

fn private_batches(keys: usize, threads: usize) -> Option<f64> {
    let store = Store::new().ok()?;
    fill(&store, keys);
    Some(timed(threads, keys * threads, |thread| read_batches(&store, keys, thread)))
}

/// A tmpfs with huge pages, unmounted when dropped. Only root may mount one.
struct HugeMount(PathBuf);

impl HugeMount {
    fn new(folder: &Path) -> Option<HugeMount> {
        let path = folder.join("huge");
        std::fs::create_dir_all(&path).ok()?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "huge=always", "tmpfs"])
            .arg(&path)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        mounted.then_some(HugeMount(path))
    }
}

impl Drop for HugeMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Fills a store in `folder`, then lets `readers` processes read all of it at once.
fn processes(folder: &Path, keys: usize, readers: usize, kind: &str) -> Option<f64> {
    let path = folder.join(format!("pagefold-bench-{}", std::process::id()));
    let _remove = RemoveOnDrop(path.clone());
    let _store = if kind == "lmdb" {
        fill_lmdb(&path, keys)?;
        None
    } else {
        let store = Options::new().create_path(&path).ok()?;
        fill(&store, keys);
        Some(store)
    };
    let exe = std::env::current_exe().ok()?;
    let mut children: Vec<Child> = (0..readers)
        .filter_map(|reader| {
            let plan = format!("reader {kind} {keys} {reader} wall {}", path.display());
            let mut command = Command::new(&exe);
            command.args(["kv", "--child", &plan]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().ok()
        })
        .collect();
    // Each says that it is ready, all start at once, each says when it has ended.
    let mut byte = [0];
    for child in &mut children {
        child.stdout.as_mut()?.read_exact(&mut byte).ok()?;
    }
    let start = Instant::now();
    for child in &mut children {
        child.stdin.as_mut()?.write_all(b"g").ok()?;
    }
    for child in &mut children {
        child.stdout.as_mut()?.read_exact(&mut byte).ok()?;
    }
    let mut seconds = start.elapsed().as_secs_f64();
    // Each tells at its end how long it had a processor.
    let mut busy = 0.0;
    for child in &mut children {
        let mut text = String::new();
        child.stdout.as_mut()?.read_to_string(&mut text).ok()?;
        busy += text.trim().parse::<f64>().ok()?;
    }
    if clock() == Clock::Cpu {
        seconds = busy / readers as f64;
    }
    let good = children.iter_mut().all(|child| child.wait().is_ok_and(|status| status.success()));
    (good && children.len() == readers).then(|| (keys * readers) as f64 / seconds / 1e6)
}

struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One reading process.
fn reader(kind: &str, keys: usize, reader: usize, path: &Path) {
    let say = || {
        std::io::stdout().write_all(b"r").and_then(|()| std::io::stdout().flush()).expect("the driver listens");
    };
    let wait = || std::io::stdin().read_exact(&mut [0]).expect("the driver speaks");
    if kind == "lmdb" {
        read_lmdb(path, keys, reader, say, wait);
        return;
    }
    let busy = index::run::thread_seconds;
    let store = Options::new().open_existing_path(path).expect("the driver made it");
    // Map in what a thread of the filling process has mapped already.
    read_batches(&store, keys, reader + 1);
    say();
    wait();
    let start = busy();
    if kind == "forrest-batch" {
        read_batches(&store, keys, reader)
    } else {
        read_all(&store, keys, reader)
    }
    say();
    println!("{}", busy() - start);
}

#[cfg(feature = "peers")]
fn open_lmdb(path: &Path) -> Option<heed::Env> {
    std::fs::create_dir_all(path).ok()?;
    let mut options = heed::EnvOpenOptions::new();
    // SAFETY: the files are this run's own; nobody changes them but through LMDB. NO_SYNC: nothing must survive.
    unsafe { options.map_size(16 << 30).flags(heed::EnvFlags::NO_SYNC).open(path) }.ok()
}

#[cfg(feature = "peers")]
fn fill_lmdb(path: &Path, keys: usize) -> Option<()> {
    let env = open_lmdb(path)?;
    let mut write = env.write_txn().ok()?;
    let base: heed::Database<heed::types::Bytes, heed::types::Bytes> = env.create_database(&mut write, None).ok()?;
    for key in lookup_order(keys, 0) {
        base.put(&mut write, &key.to_le_bytes(), &key.to_le_bytes()).ok()?;
    }
    write.commit().ok()
}

#[cfg(feature = "peers")]
fn read_lmdb(path: &Path, keys: usize, reader: usize, say: impl Fn(), wait: impl Fn()) {
    let env = open_lmdb(path).expect("the driver made it");
    let read = env.read_txn().expect("a reader slot");
    let base: heed::Database<heed::types::Bytes, heed::types::Bytes> =
        env.open_database(&read, None).expect("it opens").expect("the driver made it");
    let all = |reader| {
        for key in lookup_order(keys, reader) {
            assert_eq!(base.get(&read, &key.to_le_bytes()).expect("readable").map(number), Some(key));
        }
    };
    all(reader + 1);
    say();
    wait();
    let start = index::run::thread_seconds();
    all(reader);
    say();
    println!("{}", index::run::thread_seconds() - start);
}

#[cfg(not(feature = "peers"))]
fn fill_lmdb(_path: &Path, _keys: usize) -> Option<()> {
    None
}

#[cfg(not(feature = "peers"))]
fn read_lmdb(_path: &Path, _keys: usize, _reader: usize, _say: impl Fn(), _wait: impl Fn()) {}

/// A redis server on a socket of its own, ended when dropped.
struct Redis(Child);

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn redis(keys: usize, threads: usize, folder: &Path) -> Option<f64> {
    // Enough for a rate; a million round trips would only take longer.
    let gets = keys.min(50_000);
    let socket = folder.join("redis.sock");
    let server = Command::new("redis-server")
        .args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no", "--unixsocket"])
        .arg(&socket)
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let _server = Redis(server);
    let connect = || {
        for _ in 0..100 {
            if let Ok(stream) = UnixStream::connect(&socket) {
                return Some(stream);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        None
    };
    let mut stream = connect()?;
    for number in 0..gets {
        let command = format!("*3\r\n$3\r\nSET\r\n$12\r\nkey{number:09}\r\n$9\r\n{number:09}\r\n");
        stream.write_all(command.as_bytes()).ok()?;
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).ok()?;
        if &answer != b"+OK\r\n" {
            return None;
        }
    }
    // By the wall: it waits for another process nearly all of the time.
    Some(index::run::timed(threads, gets * threads, Clock::Wall, |thread| {
        let mut stream = connect().expect("it answered before");
        for number in 0..gets {
            let number = (number + thread * 31) % gets;
            let command = format!("*2\r\n$3\r\nGET\r\n$12\r\nkey{number:09}\r\n");
            stream.write_all(command.as_bytes()).expect("redis listens");
            let mut answer = [0; 15];
            stream.read_exact(&mut answer).expect("redis answers");
            assert_eq!(answer[4..13], *format!("{number:09}").as_bytes());
        }
    }))
}
