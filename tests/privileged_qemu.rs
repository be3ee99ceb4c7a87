//! Unmodified guests of QEMU under `pagefold run`: they work on the same files while their memory is merged, compare
//! what they read, and shut down cleanly.

mod common;

use common::boot::Console;
use common::{Daemon, Reaped, can_merge, guest, is_root, wait_for};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The guest's first program: compares the file with its first digest and with a fresh copy until told to stop.
const INIT: &str = "\
b=/bin/busybox
first=$($b md5sum /data)
echo PAGEFOLD-READY
n=0
while :; do
    [ \"$($b md5sum /data)\" = \"$first\" ] || echo PAGEFOLD-WRONG digest
    $b cp /data /copy
    $b cmp /data /copy || echo PAGEFOLD-WRONG copy
    $b rm /copy
    n=$((n + 1))
    echo PAGEFOLD-ROUND $n
    if read -t 2 word && [ \"$word\" = stop ]; then
        $b poweroff -f
    fi
done
";

/// Numbers the guests' monitors.
static MONITORS: AtomicU32 = AtomicU32::new(0);

/// Bytes of the file that all guests have.
const DATA_LEN: usize = 20 << 20;

/// QEMU's monitor.
struct Monitor {
    answers: Lines<BufReader<UnixStream>>,
    to: UnixStream,
}

impl Monitor {
    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let line = json!({ "execute": command, "arguments": arguments });
        self.to.write_all(format!("{line}\n").as_bytes()).expect("the monitor reads");
        // Greetings and events come between.
        let mut answers = std::iter::from_fn(|| serde_json::from_str::<Value>(&self.answers.next()?.ok()?).ok());
        let answer = answers.find(|answer| answer.get("return").is_some() || answer.get("error").is_some());
        let answer = answer.expect("an answer");
        assert!(answer.get("error").is_none(), "{command}: {answer}");
        answer["return"].clone()
    }

    fn set(&mut self, capability: &str, state: bool) {
        let capabilities = json!({ "capabilities": [{ "capability": capability, "state": state }] });
        self.ask("migrate-set-capabilities", capabilities);
    }

    /// Waits until the guest has moved, or is saved.
    fn wait(&mut self) {
        let mut last = Value::Null;
        wait_for("the guest's memory to be written", 120, || {
            last = self.ask("query-migrate", json!({}));
            last["status"] == "completed" || last["status"] == "failed"
        });
        assert_eq!(last["status"], "completed", "{last}");
    }
}

struct Guest {
    qemu: Reaped,
    input: ChildStdin,
    console: Console,
    monitor: PathBuf,
}

impl Guest {
    fn start(daemon: &Daemon, kernel: &Path, initramfs: &Path) -> Guest {
        Guest::start_by(daemon, kernel, initramfs, &[])
    }

    fn start_by(daemon: &Daemon, kernel: &Path, initramfs: &Path, options: &[&str]) -> Guest {
        Guest::start_with(daemon.run(&[]), kernel, initramfs, options)
    }

    fn start_with(mut command: Command, kernel: &Path, initramfs: &Path, options: &[&str]) -> Guest {
        command.args(["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-m", "256", "-nodefaults", "-no-reboot"]);
        command.args(["-display", "none", "-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1"]);
        let monitor = initramfs.with_file_name(format!("monitor-{}", MONITORS.fetch_add(1, Ordering::Relaxed)));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        command
            .args(options)
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut qemu = Reaped(command.spawn().expect("qemu"));
        let input = qemu.0.stdin.take().expect("a pipe");
        let console = Console::read(qemu.0.stdout.take().expect("a pipe"));
        Guest { qemu, input, console, monitor }
    }

    /// Saves the guest's memory while it works on: QEMU tracks its writes by a userfaultfd of its own.
    fn save(&self, to: &Path) {
        let mut monitor = self.monitor();
        monitor.set("background-snapshot", true);
        monitor.ask("migrate", json!({ "uri": format!("exec:cat > {}", to.display()) }));
        monitor.wait();
        monitor.set("background-snapshot", false);
    }

    /// Moves the guest to `other`, which waits for it, while it works: what is missing there comes when it is touched.
    fn move_to(&self, other: &Guest, by: &Path) {
        let mut monitor = self.monitor();
        monitor.set("postcopy-ram", true);
        other.monitor().set("postcopy-ram", true);
        // So slowly that there is something left.
        monitor.ask("migrate-set-parameters", json!({ "max-bandwidth": 20 << 20 }));
        monitor.ask("migrate", json!({ "uri": format!("unix:{}", by.display()) }));
        std::thread::sleep(Duration::from_secs(1));
        monitor.ask("migrate-start-postcopy", json!({}));
        monitor.wait();
    }

    fn monitor(&self) -> Monitor {
        let stream = UnixStream::connect(&self.monitor).expect("the guest's monitor");
        let to = stream.try_clone().expect("a socket");
        let mut monitor = Monitor { answers: BufReader::new(stream).lines(), to };
        monitor.ask("qmp_capabilities", json!({}));
        monitor
    }

    fn shut_down(mut self) {
        self.input.write_all(b"stop\n").expect("the guest reads");
        let mut status = None;
        wait_for("the guest to shut down", 60, || {
            status = self.qemu.0.try_wait().expect("wait");
            status.is_some()
        });
        assert!(status.is_some_and(|status| status.success()), "{status:?}\n{}", self.console.text());
    }

    fn rounds(&mut self) -> usize {
        let said = self.console.text();
        assert!(!said.contains("PAGEFOLD-WRONG"), "a guest read wrong bytes:\n{said}");
        assert!(self.qemu.0.try_wait().expect("wait").is_none(), "a guest ended:\n{said}");
        said.matches("PAGEFOLD-ROUND").count()
    }
}

#[test]
fn guests_work_while_they_are_merged() {
    let Some(boot) = guest::needs(&[]).filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--scan-interval", "200ms", "--no-keeper"]);
    let data = vec![("data".to_owned(), guest::noise(DATA_LEN, u64::MAX))];
    let initramfs = guest::initramfs(daemon.dir.path(), &boot, INIT, &data);
    let kernel = &boot.0.path;
    let mut guests: Vec<Guest> = (0..2).map(|_| Guest::start(&daemon, kernel, &initramfs)).collect();
    wait_for("the guests to boot", 400, || guests.iter_mut().all(|guest| guest.rounds() > 0));
    // A quarter of the file that both have, at least.
    let wanted = (DATA_LEN / 4096 / 4) as i64;
    wait_for("the guests' file to be shared", 120, || daemon.total("pages_sharing") > wanted);
    let before: Vec<usize> = guests.iter_mut().map(Guest::rounds).collect();
    wait_for("the guests to work on", 120, || {
        guests.iter_mut().zip(&before).all(|(guest, before)| guest.rounds() > before + 1)
    });
    daemon.verify();
    // One is saved while it works, merged or not, and is merged again.
    let image = daemon.dir.path().join("image");
    guests[1].save(&image);
    assert!(std::fs::metadata(&image).expect("an image").len() > DATA_LEN as u64);
    wait_for("the guests' file to be shared again", 120, || daemon.total("pages_sharing") > wanted);
    // One of them is parked, works on from there, and is merged again.
    let pid = guests[0].qemu.pid().to_string();
    let out = || daemon.status()["cold"]["clients"][0]["pages_out"].as_u64().unwrap_or(0);
    wait_for("the guest's memory to go", 60, || {
        let output = daemon.tool(&["park", &pid]);
        assert!(output.status.success(), "park: {}", String::from_utf8_lossy(&output.stderr));
        out() > wanted as u64
    });
    assert!(daemon.total("pages_sharing") > wanted, "what is merged stays merged");
    for there_or_back in ["park", "unpark"] {
        assert!(daemon.tool(&[there_or_back, &pid]).status.success());
        let before: Vec<usize> = guests.iter_mut().map(Guest::rounds).collect();
        wait_for("the guests to work on", 120, || {
            guests.iter_mut().zip(&before).all(|(guest, before)| guest.rounds() > before + 1)
        });
        daemon.verify();
    }
    wait_for("the guests' file to be shared again", 120, || daemon.total("pages_sharing") > wanted);
    // The other one moves to another QEMU, and both work on.
    let by = daemon.dir.path().join("move");
    let moved = Guest::start_by(&daemon, kernel, &initramfs, &["-incoming", &format!("unix:{}", by.display())]);
    wait_for("it to wait", 20, || by.exists());
    guests[1].move_to(&moved, &by);
    guests[1] = moved;
    let before: Vec<usize> = guests.iter_mut().map(Guest::rounds).collect();
    wait_for("the guests to work on", 120, || {
        guests.iter_mut().zip(&before).all(|(guest, before)| guest.rounds() > before + 1)
    });
    wait_for("the guests' file to be shared again", 120, || daemon.total("pages_sharing") > wanted);
    daemon.verify();
    guests.into_iter().for_each(Guest::shut_down);
}

/// As guests of a host that never heard of pagefold: QEMU itself was started plainly.
#[test]
fn guests_that_run_already_are_attached() {
    let Some(boot) = guest::needs(&[]).filter(|_| can_merge() && is_root()) else { return };
    let daemon = Daemon::start(&["--scan-interval", "200ms", "--no-keeper"]);
    let data = vec![("data".to_owned(), guest::noise(DATA_LEN, u64::MAX))];
    let initramfs = guest::initramfs(daemon.dir.path(), &boot, INIT, &data);
    let start = |_| Guest::start_with(Command::new("env"), &boot.0.path, &initramfs, &[]);
    let mut guests: Vec<Guest> = (0..2).map(start).collect();
    wait_for("the guests to boot", 400, || guests.iter_mut().all(|guest| guest.rounds() > 0));
    let pids: Vec<String> = guests.iter().map(|guest| guest.qemu.pid().to_string()).collect();
    let do_with = |verb: &str, pid: &String| {
        common::ask_until_done(|words| daemon.tool(words), &[verb, pid]);
    };
    let mut work_on = || {
        let before: Vec<usize> = guests.iter_mut().map(Guest::rounds).collect();
        wait_for("the guests to work on", 120, || {
            guests.iter_mut().zip(&before).all(|(guest, before)| guest.rounds() > before + 1)
        });
    };
    pids.iter().for_each(|pid| do_with("attach", pid));
    let wanted = (DATA_LEN / 4096 / 4) as i64;
    wait_for("the guests' file to be shared", 120, || daemon.total("pages_sharing") > wanted);
    work_on();
    daemon.verify();
    for verb in ["park", "unpark"] {
        do_with(verb, &pids[0]);
        work_on();
    }
    daemon.verify();
    pids.iter().for_each(|pid| do_with("detach", pid));
    work_on();
    guests.into_iter().for_each(Guest::shut_down);
}
