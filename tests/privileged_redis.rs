//! Three redis servers with overlapping data under `pagefold run --manage all`: every key is read back, and a fork's
//! snapshot has the digest of what was in memory.

mod common;

use common::cold::Parking;
use common::{Daemon, Reaped, can_merge, installed, wait_for};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const KEYS: usize = 3000;
const SERVERS: usize = 3;

fn server(daemon: &Daemon, number: usize) -> (Reaped, PathBuf) {
    let dir = daemon.dir.path().join(format!("redis-{number}"));
    std::fs::create_dir_all(&dir).expect("a directory");
    let socket = dir.join("r");
    let mut command = daemon.run(&["--manage=all"]);
    command.args(["redis-server", "--port", "0", "--save", "", "--enable-debug-command", "yes", "--unixsocket"]);
    command.arg(&socket).arg("--dir").arg(&dir).stdout(Stdio::null());
    let server = Reaped(command.spawn().expect("redis-server"));
    wait_for("redis to listen", 30, || UnixStream::connect(&socket).is_ok());
    (server, socket)
}

/// The same for all servers, 4 KiB each; a tenth is a server's own.
fn value(number: usize, key: usize) -> Vec<u8> {
    let own = if key.is_multiple_of(10) { number + 1 } else { 0 };
    let mut seed = ((key as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)) ^ own as u64;
    (0..4096)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            b'a' + (seed % 26) as u8
        })
        .collect()
}

/// One command, one answer.
fn ask(stream: &mut UnixStream, words: &[&[u8]]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        out.extend(format!("${}\r\n", word.len()).bytes());
        out.extend(*word);
        out.extend(b"\r\n");
    }
    stream.write_all(&out).expect("redis reads");
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).expect("redis answers");
        line.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&line[1..line.len() - 2]).into_owned();
    match line[0] {
        b'$' if text != "-1" => {
            let mut bulk = vec![0; text.parse::<usize>().expect("a length") + 2];
            stream.read_exact(&mut bulk).expect("redis answers");
            bulk.truncate(bulk.len() - 2);
            bulk
        }
        b'-' => panic!("redis: {text}"),
        _ => text.into_bytes(),
    }
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("redis listens");
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a timeout");
    stream
}

fn read_back(streams: &mut [UnixStream]) {
    for (number, stream) in streams.iter_mut().enumerate() {
        for key in 0..KEYS {
            let name = format!("data:{key}");
            assert_eq!(ask(stream, &[b"GET", name.as_bytes()]), value(number, key), "server {number}, key {key}");
        }
    }
}

#[test]
fn redis_keeps_every_key() {
    keeps_every_key(false);
}

#[test]
fn redis_keeps_every_key_parked_and_merged_in_turn() {
    keeps_every_key(true);
}

fn keeps_every_key(parked: bool) {
    if !can_merge() || installed("redis-server").is_none() {
        return;
    }
    // Without a keeper, no other daemon starts when this one is killed at the end.
    let daemon = Daemon::start(&["--no-keeper"]);
    let servers: Vec<_> = (0..SERVERS).map(|number| server(&daemon, number)).collect();
    let mut streams: Vec<UnixStream> = servers.iter().map(|(_, socket)| connect(socket)).collect();
    for key in 0..KEYS {
        let name = format!("data:{key}");
        for (number, stream) in streams.iter_mut().enumerate() {
            assert_eq!(ask(stream, &[b"SET", name.as_bytes(), &value(number, key)]), b"OK");
        }
    }
    let parking = parked.then(|| Parking::start(&daemon.socket, &["park", "unpark"], Duration::from_millis(700)));
    let mut load = installed("redis-benchmark").map(|program| {
        let mut command = Command::new(program);
        command.args(["-n", "20000", "-q", "-r", "1000", "-d", "512", "-t", "set,get,incr,lpush", "-s"]);
        Reaped(command.arg(&servers[0].1).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
    });
    read_back(&mut streams);
    wait_for("pages to be merged", 60, || daemon.total("pages_sharing") + daemon.total("pages_zero") > 300);
    read_back(&mut streams);
    if let Some(load) = &mut load {
        wait_for("the benchmark to end", 300, || load.0.try_wait().expect("wait").is_some());
    }
    if parked {
        let out = || {
            let clients = daemon.status()["cold"]["clients"].as_array().cloned().unwrap_or_default();
            clients.iter().filter(|client| client["pages_evicted"].as_u64() > Some(100)).count()
        };
        wait_for("all to be parked", 60, || out() == SERVERS);
    }
    for (number, stream) in streams.iter_mut().enumerate() {
        let before = ask(stream, &[b"DEBUG", b"DIGEST"]);
        assert!(ask(stream, &[b"BGSAVE"]).starts_with(b"Background"), "server {number} saves");
        wait_for("the snapshot", 60, || {
            let info = String::from_utf8_lossy(&ask(stream, &[b"INFO", b"persistence"])).into_owned();
            assert!(!info.contains("rdb_last_bgsave_status:err"), "server {number}: the snapshot failed");
            info.contains("rdb_bgsave_in_progress:0")
        });
        // Replaces all data by what the forked child wrote.
        assert_eq!(ask(stream, &[b"DEBUG", b"RELOAD", b"NOSAVE", b"NOFLUSH", b"MERGE"]), b"OK");
        assert_eq!(ask(stream, &[b"DEBUG", b"DIGEST"]), before, "server {number}: the snapshot is another");
    }
    read_back(&mut streams);
    drop(parking);
    read_back(&mut streams);
    daemon.verify();
}
