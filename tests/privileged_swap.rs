//! Merged memory that the kernel has swapped out. By itself, as swap concerns the whole machine: Cargo runs one file of
//! tests after the other.

mod common;

use common::group::Group;
use common::{Daemon, Server, can_merge, is_root, semantics, skipped, wait_for};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Somewhere to swap to while this value lives.
struct Swap(Option<PathBuf>);

impl Swap {
    /// What the machine has, else a file of our own.
    fn on() -> Option<Swap> {
        if std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1) {
            return Some(Swap(None));
        }
        if !is_root() {
            return None;
        }
        let swap = Swap(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("swap-{}", std::process::id()))));
        let path = swap.0.as_ref().expect("just named");
        // With no holes, which the kernel does not take.
        std::fs::write(path, vec![0; 128 << 20]).expect("room for a file to swap to");
        for program in ["mkswap", "swapon"] {
            let done = Command::new(program).arg(path).output();
            if !done.as_ref().is_ok_and(|done| done.status.success()) {
                let why =
                    done.map_or_else(|error| error.to_string(), |done| String::from_utf8_lossy(&done.stderr).into());
                skipped(&format!("no swap here: {program}: {}", why.trim()));
                return None;
            }
        }
        Some(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let Some(path) = &self.0 else { return };
        let _ = Command::new("swapoff").arg(path).output();
        let _ = std::fs::remove_file(path);
    }
}

/// Merged pages are swapped out while the daemon is replaced: the agent must not touch what it alone can bring.
#[test]
fn an_agent_does_not_wait_for_itself() {
    let (Some(program), Some(group)) = (semantics().filter(|_| can_merge()), Group::new()) else { return };
    let Some(_swap) = Swap::on() else { return };
    let mut daemon = Daemon::start(&[]);
    group.take(daemon.pid());
    let mut command = daemon.run(&[]);
    group.adopt(&mut command);
    let mut server = Server::start(command, program);
    let pid = server.pid();
    wait_for("the pages to be merged", 60, || server.check("merged") > 1000);
    daemon.kill();
    wait_for("pages to be swapped out", 60, || {
        group.reclaim();
        group.swapped() > 1 << 20
    });
    daemon.replace();
    wait_for("the client to greet", 60, || daemon.status()["clients"].as_array().is_some_and(|all| all.len() == 1));
    // A client that would wait for ever is killed, and the test fails.
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(std::time::Duration::from_secs(60)).is_err() {
            // SAFETY: kill takes no pointers. The child was not waited for, so its pid is not reused.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    });
    server.check("swapped out");
    done.send(()).expect("the watch waits");
    watch.join().expect("it ends");
    server.end();
}
