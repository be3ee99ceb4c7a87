//! A store that processes share, beside threads of one process and LMDB.

use crate::index::forrest::number;
use crate::index::run::timed;
use crate::process::{self, Running};
use crate::restore::Undo;
use forrest::{Options, Store};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

/// The rate of one row, in million gets per second; `None` where something is missing here.
pub(super) fn rate(name: &str, keys: usize, threads: usize) -> Option<f64> {
    match name {
        "private" => {
            let store = Store::new().ok()?;
            fill(&store, keys);
            Some(timed(threads, keys * threads, |thread| read_all(&store, keys, thread)))
        }
        "shared" => processes(keys, threads, "forrest"),
        "lmdb" if cfg!(feature = "peers") => processes(keys, threads, "lmdb"),
        _ => None,
    }
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

/// Fills a store in /dev/shm, then lets `readers` processes read all of it at the same time.
fn processes(keys: usize, readers: usize, kind: &str) -> Option<f64> {
    let path = PathBuf::from(format!("/dev/shm/pagefold-bench-{}", std::process::id()));
    let _remove = Undo::remove(path.clone());
    let _store = if kind == "lmdb" {
        fill_lmdb(&path, keys)?;
        None
    } else {
        let store = Options::new().create_path(&path).ok()?;
        fill(&store, keys);
        Some(store)
    };
    let mut children: Vec<Running> = (0..readers)
        .filter_map(|reader| {
            let plan = format!("reader {kind} {keys} {reader} {}", path.display());
            let mut command = process::own("kv").ok()?;
            Running::start(command.args(["--child", &plan]).stdin(Stdio::piped()).stdout(Stdio::piped())).ok()
        })
        .collect();
    // Each reports that it is ready, all start at the same time, each reports its end.
    let mut byte = [0];
    for child in &mut children {
        child.0.stdout.as_mut()?.read_exact(&mut byte).ok()?;
    }
    let start = Instant::now();
    for child in &mut children {
        child.0.stdin.as_mut()?.write_all(b"g").ok()?;
    }
    for child in &mut children {
        child.0.stdout.as_mut()?.read_exact(&mut byte).ok()?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let good = children.iter_mut().all(|child| child.0.wait().is_ok_and(|status| status.success()));
    (good && children.len() == readers).then(|| (keys * readers) as f64 / seconds / 1e6)
}

/// One reading process.
pub(super) fn reader(kind: &str, keys: usize, reader: usize, path: &Path) {
    let say = || {
        std::io::stdout().write_all(b"r").and_then(|()| std::io::stdout().flush()).expect("the driver listens");
    };
    let wait = || std::io::stdin().read_exact(&mut [0]).expect("the driver speaks");
    if kind == "lmdb" {
        read_lmdb(path, keys, reader, say, wait);
        return;
    }
    let store = Options::new().open_existing_path(path).expect("the driver made it");
    // Maps the pages first, as the threads of the filling process have them mapped.
    read_all(&store, keys, reader + 1);
    say();
    wait();
    read_all(&store, keys, reader);
    say();
}

#[cfg(feature = "peers")]
fn fill_lmdb(path: &Path, keys: usize) -> Option<()> {
    bench_peers::lmdb::Lmdb::open(path)?.fill(lookup_order(keys, 0))
}

#[cfg(feature = "peers")]
fn read_lmdb(path: &Path, keys: usize, reader: usize, say: impl Fn(), wait: impl Fn()) {
    let lmdb = bench_peers::lmdb::Lmdb::open(path).expect("the driver made it");
    lmdb.read(|get| {
        let all = |reader| lookup_order(keys, reader).for_each(|key| assert_eq!(get(key), Some(key)));
        all(reader + 1);
        say();
        wait();
        all(reader);
        say();
    });
}

#[cfg(not(feature = "peers"))]
fn fill_lmdb(_path: &Path, _keys: usize) -> Option<()> {
    None
}

#[cfg(not(feature = "peers"))]
fn read_lmdb(_path: &Path, _keys: usize, _reader: usize, _say: impl Fn(), _wait: impl Fn()) {}
