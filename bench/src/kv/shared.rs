//! A store that processes share, beside threads of one process and LMDB.

use super::Plan;
use crate::index::forrest::number;
use crate::index::run::timed;
use crate::instance::Instance;
use crate::process;
use crate::restore::Undo;
use forrest::{Options, Store};
use serde_json::json;
use std::path::{Path, PathBuf};
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
    let start = |reader| {
        let (table, name, path) = ("shared".into(), kind.into(), Some(path.clone()));
        let plan = json!(Plan { table, name, keys, threads: reader, path }).to_string();
        Instance::start(process::own("kv").ok()?.args(["--child", &plan])).ok()
    };
    let mut children = (0..readers).map(start).collect::<Option<Vec<Instance>>>()?;
    // Each reports that it is ready, all start at the same time, each reports its end.
    children.iter().try_for_each(Instance::ready).ok()?;
    let start = Instant::now();
    children.iter_mut().try_for_each(|child| child.send("go")).ok()?;
    children.iter().try_for_each(|child| child.expect("read")).ok()?;
    Some((keys * readers) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// One reading process.
pub(super) fn reader(kind: &str, keys: usize, reader: usize, path: &Path) {
    // Reads once before, so that the pages are mapped as the threads of the filling process have them mapped.
    let timed = |read: &dyn Fn(usize)| {
        read(reader + 1);
        println!("ready");
        std::io::stdin().read_line(&mut String::new()).expect("the driver speaks");
        read(reader);
        println!("read");
    };
    if kind == "lmdb" {
        return read_lmdb(path, keys, timed);
    }
    let store = Options::new().open_existing_path(path).expect("the driver made it");
    timed(&|reader| read_all(&store, keys, reader));
}

#[cfg(feature = "peers")]
fn fill_lmdb(path: &Path, keys: usize) -> Option<()> {
    bench_peers::lmdb::Lmdb::open(path)?.fill(lookup_order(keys, 0))
}

#[cfg(feature = "peers")]
fn read_lmdb(path: &Path, keys: usize, timed: impl Fn(&dyn Fn(usize))) {
    let lmdb = bench_peers::lmdb::Lmdb::open(path).expect("the driver made it");
    lmdb.read(|get| timed(&|reader| lookup_order(keys, reader).for_each(|key| assert_eq!(get(key), Some(key)))));
}

#[cfg(not(feature = "peers"))]
fn fill_lmdb(_path: &Path, _keys: usize) -> Option<()> {
    None
}

#[cfg(not(feature = "peers"))]
fn read_lmdb(_path: &Path, _keys: usize, _timed: impl Fn(&dyn Fn(usize))) {}
