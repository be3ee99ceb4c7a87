//! Servers of others that are attached while they serve: nginx and MariaDB, two instances each with equal data. Each answer
//! is compared while their memory is merged.

#![cfg(target_arch = "x86_64")]

mod common;

use common::{Daemon, Reaped, ask_until_done, can_merge, installed, is_root, shared_pages_in, skipped, wait_for};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// True if programs can be attached here; says why not.
fn can_attach() -> bool {
    can_merge() && is_root()
}

/// Does `verb` with each server, as soon as that is possible: no thread may be borrowed in time, say.
fn do_with(daemon: &Daemon, verb: &str, servers: &[Reaped]) {
    for server in servers {
        ask_until_done(|words| daemon.tool(words), &[verb, &server.pid().to_string()]);
    }
}

/// Attaches the servers, and waits until each shares so many pages.
fn merge(daemon: &Daemon, servers: &[Reaped], pages: u64) {
    do_with(daemon, "attach", servers);
    wait_for("pages to be shared", 120, || {
        servers.iter().all(|server| shared_pages_in(&daemon.status(), server.pid()) > pages)
    });
}

/// Nothing of ours is in the server's memory.
fn assert_left(server: &Reaped) {
    let maps = fs::read_to_string(format!("/proc/{}/maps", server.pid())).expect("it lives");
    assert!(!maps.contains("pagefold"), "{maps}");
}

/// Values that nginx has in its memory, and their length.
const VALUES: usize = 6000;
const VALUE_LEN: usize = 2000;

fn value(key: usize) -> String {
    let mut seed = (key as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let letter = |_| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        char::from(b'a' + (seed % 26) as u8)
    };
    (0..VALUE_LEN).map(letter).collect()
}

/// One nginx process that answers `/?k=N` by value N, at the socket `s` in `dir`.
fn nginx(dir: &Path) -> Reaped {
    fs::create_dir_all(dir).expect("a directory");
    let mut map = String::new();
    (0..VALUES).for_each(|key| map += &format!("{key} {};\n", value(key)));
    let dir_name = dir.display();
    let text = format!(
        "daemon off; master_process off; pid {dir_name}/pid; error_log {dir_name}/log;\n\
         events {{ worker_connections 64; }}\n\
         http {{ access_log off; map_hash_max_size 65536; map_hash_bucket_size 4096; keepalive_requests 10000000;\n\
         map $arg_k $value {{ {map} }}\n\
         server {{ listen unix:{dir_name}/s; location / {{ return 200 $value; }} }} }}\n"
    );
    let configuration = dir.join("nginx.conf");
    fs::write(&configuration, text).expect("a file");
    // At the same addresses in each process: its memory is full of pointers.
    let mut command = Command::new("setarch");
    command.args(["-R", "nginx", "-e"]).arg(dir.join("log")).arg("-c").arg(&configuration).arg("-p").arg(dir);
    let server = Reaped(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nginx"));
    wait_for("nginx to listen", 60, || UnixStream::connect(dir.join("s")).is_ok());
    server
}

/// Asks over one connection until told to end; each answer is compared.
fn ask(socket: &Path, is_over: &AtomicBool, asked: &AtomicU64) {
    let stream = UnixStream::connect(socket).expect("nginx listens");
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a timeout");
    let mut reader = BufReader::new(stream.try_clone().expect("a descriptor"));
    let mut writer = stream;
    let mut key = 0;
    while !is_over.load(Ordering::Relaxed) {
        key = (key * 31 + 7) % VALUES;
        write!(writer, "GET /?k={key} HTTP/1.1\r\nHost: h\r\n\r\n").expect("nginx reads");
        let (mut line, mut len) = (String::new(), 0);
        loop {
            line.clear();
            reader.read_line(&mut line).expect("nginx answers");
            if let Some(text) = line.strip_prefix("Content-Length: ") {
                len = text.trim().parse().expect("a length");
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; len];
        reader.read_exact(&mut body).expect("nginx answers");
        assert!(body == value(key).as_bytes(), "another value for key {key}");
        asked.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn nginx_is_attached_under_load() {
    if !can_attach() || installed("nginx").is_none() || installed("setarch").is_none() {
        return;
    }
    let daemon = Daemon::start(&["--no-keeper"]);
    let dirs = ["1", "2"].map(|name| daemon.dir.path().join(name));
    let servers: Vec<Reaped> = dirs.iter().map(|dir| nginx(dir)).collect();
    let (is_over, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let clients: Vec<_> = dirs.iter().map(|dir| scope.spawn(|| ask(&dir.join("s"), &is_over, &asked))).collect();
        let serve = || {
            let before = asked.load(Ordering::Relaxed);
            let works = || asked.load(Ordering::Relaxed) > before + 2000 || clients.iter().any(|one| one.is_finished());
            wait_for("answers", 120, works);
        };
        merge(&daemon, &servers, 1000);
        serve();
        daemon.verify();
        do_with(&daemon, "detach", &servers);
        servers.iter().for_each(assert_left);
        serve();
        is_over.store(true, Ordering::Relaxed);
    });
}

/// A MariaDB server with the data in `dir`.
fn mariadb(dir: &Path) -> Reaped {
    let mut command = Command::new("mariadbd");
    command.args(["--no-defaults", "--user=root", "--skip-networking", "--skip-grant-tables", "--skip-log-bin"]);
    // Else the pool is kept out of core dumps, and so taken for secret.
    command.args([
        "--innodb-buffer-pool-in-core-dump=ON",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=8M",
    ]);
    command.arg(format!("--datadir={}", dir.display())).arg(format!("--socket={}", dir.join("s").display()));
    command.arg(format!("--pid-file={}", dir.join("pid").display()));
    let server = Reaped(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("mariadbd"));
    wait_for("mariadbd to listen", 120, || UnixStream::connect(dir.join("s")).is_ok());
    server
}

/// What the server at `dir` answers.
fn query(dir: &Path, text: &str) -> String {
    let output =
        Command::new("mariadb").arg("-S").arg(dir.join("s")).args(["-N", "-e", text]).output().expect("it runs");
    assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a load of sysbench; `verb` is `prepare` or `run`.
fn sysbench(dir: &Path, load: &str, verb: &str) -> Reaped {
    let mut command = Command::new("sysbench");
    command.args([
        load,
        "--db-driver=mysql",
        "--mysql-user=root",
        "--mysql-db=test",
        "--tables=1",
        "--table-size=100000",
    ]);
    command.arg(format!("--mysql-socket={}", dir.join("s").display()));
    command.args(["--rand-seed=7", "--threads=2", "--time=3600", verb]);
    Reaped(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("sysbench"))
}

/// A copy of the directory, of plain files and directories.
fn copy_of(dir: &Path, name: &str) -> PathBuf {
    let copy = dir.with_file_name(name);
    assert!(Command::new("cp").arg("-a").args([dir, &copy]).status().expect("cp").success());
    copy
}

#[test]
fn mariadb_is_attached_under_load() {
    if !can_attach()
        || ["mariadbd", "mariadb-install-db", "mariadb", "sysbench"].iter().any(|name| installed(name).is_none())
    {
        return;
    }
    let daemon = Daemon::start(&["--no-keeper"]);
    let first = daemon.dir.path().join("1");
    let mut install = Command::new("mariadb-install-db");
    install.args(["--no-defaults", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"]);
    install.arg(format!("--datadir={}", first.display()));
    let output = install.output().expect("it runs");
    if !output.status.success() {
        return skipped(&format!("mariadb-install-db: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let server = mariadb(&first);
    query(&first, "CREATE DATABASE test");
    let mut prepared = sysbench(&first, "oltp_read_write", "prepare");
    assert!(prepared.0.wait().expect("it ends").success(), "sysbench prepare");
    query(&first, "SHUTDOWN");
    let mut server = server;
    server.0.wait().expect("it ends");
    let dirs = [copy_of(&first, "2"), first];
    let servers: Vec<Reaped> = dirs.iter().map(|dir| mariadb(dir)).collect();
    let sums = dirs.each_ref().map(|dir| query(dir, "CHECKSUM TABLE test.sbtest1"));
    assert_eq!(sums[0], sums[1]);
    // Reads alone first: what is merged must be what was written. All of it is in memory by now.
    let reads: Vec<Reaped> = dirs.iter().map(|dir| sysbench(dir, "oltp_read_only", "run")).collect();
    merge(&daemon, &servers, 2000);
    assert_eq!(dirs.each_ref().map(|dir| query(dir, "CHECKSUM TABLE test.sbtest1")), sums);
    let writes: Vec<Reaped> = dirs.iter().map(|dir| sysbench(dir, "oltp_write_only", "run")).collect();
    let done = || dirs.each_ref().map(|dir| number(&query(dir, "SHOW GLOBAL STATUS LIKE 'Com_commit'")));
    let serve = || {
        let before = done();
        wait_for("transactions", 120, || done().iter().zip(&before).all(|(now, before)| now > &(before + 200)));
    };
    serve();
    daemon.verify();
    // By O_DIRECT and io_uring devices may be reading into its memory at any time: then pages stay shared, and right.
    for server in &servers {
        let said = daemon.tool(&["detach", &server.pid().to_string()]);
        let error = String::from_utf8_lossy(&said.stderr);
        match said.status.success() {
            true => assert_left(server),
            false => assert!(error.contains("which is open"), "{error}"),
        }
    }
    serve();
    drop((reads, writes));
    for dir in &dirs {
        let said = query(dir, "CHECK TABLE test.sbtest1 EXTENDED");
        assert!(said.contains("OK"), "{said}");
    }
    for (dir, mut server) in dirs.iter().zip(servers) {
        query(dir, "SHUTDOWN");
        assert!(server.0.wait().expect("it ends").success());
    }
}

/// The last number of a line.
fn number(line: &str) -> u64 {
    line.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or(0)
}
