//! What pagefold says it saves is what the kernel says: by the memory of the processes, and by the memory of the machine.

mod common;

use common::{Daemon, Server, can_merge, comes, semantics};
use pagefold_os::procfs;
use std::process::Command;

const PROGRAMS: usize = 3;
/// Of the saved memory: how far two accounts may be apart, in per cent.
const APART_MAX: i64 = 3;
/// How often the accounts are compared anew, if they do not agree.
const ATTEMPTS: usize = 4;

/// The kernel's account of a process: its own pages, its part of shared ones, and its page tables. Pages of files, as of its
/// program, are the page cache's: the machine counts them as available, and a daemon that is built for tests has many.
fn memory(pid: i32) -> i64 {
    let kib_of = |file: &str, name: &str| -> i64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("the process is ours");
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel names it");
        line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
    };
    (kib_of("smaps_rollup", "Pss_Anon:") + kib_of("smaps_rollup", "Pss_Shmem:") + kib_of("status", "VmPTE:")) << 10
}

fn available() -> i64 {
    procfs::available_and_total().0 as i64
}

fn start(mut run: impl FnMut() -> Command, program: &std::path::Path) -> Vec<Server> {
    (0..PROGRAMS).map(|_| Server::start_as("serve-large", run(), program)).collect()
}

/// Compares the accounts; the words of the last comparison if they did not agree in time.
fn compare(program: &std::path::Path) -> Result<(), String> {
    let empty = available();
    let plain = start(|| Command::new("env"), program);
    let plain_memory: i64 = plain.iter().map(|one| memory(one.pid())).sum();
    let plain_used = empty - available();
    drop(plain);

    // A keeper would hold nothing here.
    let daemon = Daemon::start(&["--no-keeper"]);
    let programs = start(|| daemon.run(&[]), program);
    let mut said = String::new();
    let agree = comes(60, || {
        let used: i64 = programs.iter().map(Server::pid).chain([daemon.pid()]).map(memory).sum();
        let (by_processes, by_machine) = (plain_memory - used, plain_used - (empty - available()));
        let status = daemon.status();
        let number = |name: &str| status["totals"][name].as_i64().expect("a number");
        let saved = number("saved_bytes");
        said = format!("saved {saved}, by processes {by_processes}, by the machine {by_machine}: {}", status["totals"]);
        let is_near = |other: i64| (saved - other).abs() * 100 <= saved * APART_MAX;
        // Two of three copies at least, or the accounts agree about nothing.
        saved > plain_memory / 2 && is_near(by_processes) && is_near(by_machine)
    });
    println!("{said}");
    daemon.verify();
    if agree { Ok(()) } else { Err(said) }
}

#[test]
fn saved_memory_is_what_the_kernel_counts() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    // What other processes of this machine free or take after the first look at its memory stays in the second account until
    // that look is taken again: the last test's, which end now, too.
    let compared: Vec<String> = (0..ATTEMPTS).map_while(|_| compare(program).err()).collect();
    assert!(compared.len() < ATTEMPTS, "{compared:#?}");
}
