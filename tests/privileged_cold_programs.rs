//! Unmodified programs with their memory in the cold tier while they work: python, redis, stress-ng, a guest.

mod common;

use common::cold::{Host, Parking};
use common::{Reaped, can_merge, finish, guest, installed, wait_for};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// Settings under which pages go out by themselves within a test's time.
const EAGER: [&str; 4] = ["--cold-scan-interval", "200ms", "--cold-idle", "100ms"];

/// Pages of all clients, of now and before, that ever went out.
fn ever_out(host: &Host) -> u64 {
    let status = host.status();
    let clients = status["cold"]["clients"].as_array().cloned().unwrap_or_default();
    clients.iter().filter_map(|client| client["pages_evicted"].as_u64()).sum()
}

/// Under a limit of half its memory a program goes on, with all its bytes: what comes back waits until something went out.
#[test]
fn half_the_memory_is_enough() {
    let Some(python) = common::python().filter(|_| can_merge()) else { return };
    let Some(group) = common::group::Group::new() else { return };
    let host = Host::start(&["--cold-scan-interval", "200ms", "--cold-policy=manual"]);
    let script = "
import sys, random, mmap
pages = 24576
area = mmap.mmap(-1, pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def stamp(i): return (i * 2654435761).to_bytes(8, 'little') * 8
for i in range(pages): area[i * 4096:i * 4096 + 64] = stamp(i)
print('ready', flush=True)
sys.stdin.readline()
rng = random.Random(5)
last = bytearray(pages)
for n in range(60000):
    i = rng.randrange(pages)
    if area[i * 4096:i * 4096 + 64] != stamp(i) or area[i * 4096 + 128] != last[i]:
        sys.exit(f'page {i} is wrong in round {n}')
    if n % 4 == 0:
        last[i] = area[i * 4096 + 128] = n & 255
print('right', flush=True)
sys.stdin.readline()
";
    let mut command = host.run(&[]);
    command.arg(python).args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    group.adopt(&mut command);
    let mut child = Reaped(command.spawn().expect("a client"));
    let mut input = child.0.stdin.take().expect("a pipe");
    let mut output = BufReader::new(child.0.stdout.take().expect("a pipe")).lines();
    let mut said = || output.next().and_then(Result::ok).unwrap_or_default();
    assert_eq!(said(), "ready");
    let pid = child.pid();
    host.wait_for_client(pid);
    assert!(host.park(pid) > 20_000, "nearly all is out");
    group.limit(48 << 20);
    writeln!(input, "go").expect("the client reads");
    assert_eq!(said(), "right");
    let (refaults, ever) = (host.number(pid, "refaults"), host.number(pid, "pages_evicted"));
    assert!(refaults > 10_000 && ever > 30_000, "{refaults} pages came back, {ever} went out");
    drop(input);
    assert!(child.0.wait().expect("it ends").success());
    group.assert_nobody_was_killed();
}

#[test]
fn python_keeps_its_heap_and_its_cold_half_goes_out_by_itself() {
    if !can_merge() {
        return;
    }
    let Some(program) = common::python() else { return };
    let script = "
import sys, time, hashlib, subprocess
cold = [bytes([i % 7]) * 700_000 + (b'block %d ' % i) * 40_000 for i in range(40)]
hot = bytearray(2_000_000)
def digest():
    h = hashlib.sha256()
    for b in cold: h.update(b)
    return h.hexdigest()
first = digest()
print('ready', flush=True)
for line in sys.stdin:
    if line == 'spin\\n':
        for turn in range(20):
            for i in range(0, len(hot), 4096): hot[i] = (hot[i] + 1) % 256
            time.sleep(0.1)
    elif line == 'spawn\\n':
        assert subprocess.run(['/bin/true']).returncode == 0
    assert line == 'spin\\n' or digest() == first, 'bytes changed'
    print('right', flush=True)
";
    let host = Host::start(&EAGER);
    let mut command = host.run(&[]);
    command.args([program, "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = Reaped(command.spawn().expect("python"));
    let mut input = python.0.stdin.take().expect("a pipe");
    let mut output = std::io::BufReader::new(python.0.stdout.take().expect("a pipe"));
    let mut line = || {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut output, &mut line).expect("a line");
        line
    };
    assert_eq!(line(), "ready\n");
    let pid = python.pid();
    host.wait_for_client(pid);
    let mut turns = 0;
    wait_for("cold pages to go out by themselves", 50, || {
        input.write_all(b"spin\n").expect("python reads");
        turns += 1;
        line() == "right\n" && host.number(pid, "pages_out") > 5_000
    });
    for word in ["check\n", "spawn\n", "check\n"] {
        input.write_all(word.as_bytes()).expect("python reads");
        assert_eq!(line(), "right\n", "{word}");
        host.park(pid);
    }
    input.write_all(b"check\n").expect("python reads");
    assert_eq!(line(), "right\n");
    assert_eq!(host.number(pid, "pages_lost"), 0);
}

#[test]
fn redis_with_more_data_than_it_uses_keeps_every_key() {
    if !can_merge() || installed("redis-server").is_none() || installed("redis-cli").is_none() {
        return;
    }
    let host = Host::start(&["--cold-policy=manual"]);
    let socket = host.dir.path().join("r");
    let mut command = host.run(&[]);
    command.args(["redis-server", "--port", "0", "--save", "", "--enable-debug-command", "yes", "--unixsocket"]);
    command.arg(&socket).arg("--dir").arg(host.dir.path()).stdout(Stdio::null());
    let redis = Reaped(command.spawn().expect("redis-server"));
    wait_for("redis to listen", 30, || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    let cli = |words: &[&str]| {
        let output = Command::new("redis-cli").arg("-s").arg(&socket).args(words).output().expect("redis-cli");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    assert_eq!(cli(&["DEBUG", "POPULATE", "40000", "key", "1024"]), "OK");
    let digest = cli(&["DEBUG", "DIGEST"]);
    assert_eq!(digest.len(), 40, "{digest}");
    let pid = redis.pid();
    host.wait_for_client(pid);
    wait_for("the data to go out", 30, || host.park(pid) > 4000);
    let load = installed("redis-benchmark").map(|program| {
        let mut command = Command::new(program);
        command.args(["-n", "30000", "-q", "-r", "1000", "-d", "512", "-t", "set,get", "-s"]).arg(&socket);
        Reaped(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
    });
    if let Some(mut load) = load {
        let parking = Parking::start(&host.socket, &["park"], Duration::from_millis(200));
        wait_for("the benchmark to end", 300, || load.0.try_wait().expect("wait").is_some());
        drop(parking);
        // The benchmark's own keys have twelve digits; all others must be as they were.
        let script = "for _, k in ipairs(redis.call('KEYS', 'key:????????????')) do redis.call('DEL', k) end";
        cli(&["EVAL", script, "0"]);
    }
    assert_eq!(cli(&["DEBUG", "DIGEST"]), digest, "a value changed");
    // A fork writes what memory holds, while that is out.
    host.park(pid);
    assert_eq!(cli(&["SAVE"]), "OK");
    host.park(pid);
    assert!(cli(&["BGSAVE"]).starts_with("Background"));
    wait_for("the snapshot", 60, || cli(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:0"));
    assert!(cli(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:ok"));
    assert_eq!(cli(&["DEBUG", "RELOAD", "NOSAVE"]), "OK");
    assert_eq!(cli(&["DEBUG", "DIGEST"]), digest, "the snapshot is another");
    assert_eq!(host.number(pid, "pages_lost"), 0);
}

#[test]
fn stress_ng_finds_no_wrong_bit() {
    if !can_merge() || installed("stress-ng").is_none() {
        return;
    }
    let host = Host::start(&EAGER);
    let mut command = host.run(&[]);
    command.args(["stress-ng", "--vm", "2", "--vm-bytes", "48m", "--vm-method", "all", "--vm-keep", "--verify"]);
    command.args(["-t", "10", "--oomable"]);
    let parking = Parking::start(&host.socket, &["park"], Duration::from_millis(100));
    let most = Mutex::new(0);
    let ended = std::sync::atomic::AtomicBool::new(false);
    let (status, out, err) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                let out = ever_out(&host);
                let mut most = most.lock().expect("no panic");
                *most = out.max(*most);
                drop(most);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let result = finish(&mut command, 300);
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        result
    });
    drop(parking);
    assert!(status.success(), "{status}\n{out}{err}");
    assert!(!out.contains("error") && !err.contains("error"), "{out}{err}");
    assert!(*most.lock().expect("no panic") > 0, "nothing went out");
}

/// The guest's first program: compares the file with its first digest for as long as it lives.
const INIT: &str = "\
b=/bin/busybox
first=$($b md5sum /data)
n=0
while :; do
    [ \"$($b md5sum /data)\" = \"$first\" ] || echo PAGEFOLD-WRONG digest
    n=$((n + 1))
    echo PAGEFOLD-ROUND $n
    if read -t 1 word && [ \"$word\" = stop ]; then
        $b poweroff -f
    fi
done
";

#[test]
fn a_guest_is_parked_works_on_and_is_unparked() {
    let Some(boot) = guest::needs(&[]).filter(|_| can_merge()) else { return };
    let host = Host::start(&["--cold-policy=manual"]);
    let data = vec![("data".to_owned(), guest::noise(12 << 20, 0x0f0f_0f0f))];
    let initramfs = guest::initramfs(host.dir.path(), &boot, INIT, &data);
    let mut command = host.run(&[]);
    command.args(["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-m", "192", "-nodefaults", "-no-reboot"]);
    command.args(["-display", "none", "-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1", "-kernel"]);
    command.arg(&boot.0.path).arg("-initrd").arg(initramfs).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut qemu = Reaped(command.stderr(Stdio::null()).spawn().expect("qemu"));
    let mut input = qemu.0.stdin.take().expect("a pipe");
    let console = common::boot::Console::read(qemu.0.stdout.take().expect("a pipe"));
    let rounds = || {
        let said = console.text();
        assert!(!said.contains("PAGEFOLD-WRONG"), "the guest read wrong bytes:\n{said}");
        said.matches("PAGEFOLD-ROUND").count()
    };
    wait_for("the guest to boot", 400, || rounds() > 0);
    let pid = qemu.pid();
    host.wait_for_client(pid);
    for turn in 0..3 {
        wait_for("the guest's memory to go out", 30, || {
            host.park(pid);
            host.number(pid, "pages_evicted") > 8000
        });
        let before = rounds();
        if turn == 2 {
            assert!(host.tool(&["unpark", &pid.to_string()]).status.success());
        }
        wait_for("the guest to work on", 120, || rounds() > before + 1);
    }
    assert_eq!(host.number(pid, "pages_lost"), 0);
    input.write_all(b"stop\n").expect("the guest reads");
    let mut status = None;
    wait_for("the guest to shut down", 60, || {
        status = qemu.0.try_wait().expect("wait");
        status.is_some()
    });
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}
