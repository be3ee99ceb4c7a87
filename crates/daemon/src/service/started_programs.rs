//! Programs that were started to be clients, as their environment says, and into which the preloaded agent cannot load:
//! static ones, and those of musl. The daemon enters them soon after their start, or `status` says why not.

use crate::domain_key::UNNAMED_DOMAIN;
use crate::service::attach::{Manage, TRIES_MAX, attach, is_client};
use crate::service::daemon::Daemon;
use pagefold_entry::enter::ColdOptions;
use pagefold_os::exec_events::ExecEvents;
use pagefold_os::{patience, procfs};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How often the kernel's events are read, and the age at which a program is first looked at: most end before.
const LOOK: Duration = Duration::from_millis(500);
/// How long the thread sleeps at most while no program starts, in milliseconds.
const QUIET_MS: i32 = 5000;
/// How long a program may keep its reader waiting: other programs wait as well.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a program is looked at that has nothing to merge yet.
const LOOK_MAX: Duration = Duration::from_secs(30);
/// Anonymous memory below which a program is left alone.
const ANONYMOUS_MIN: u64 = 1 << 20;

/// What the preloaded agent's file is called.
const AGENT: &str = "pagefold-agent";

/// What is known of a program.
struct Program {
    started: u64,
    next: Instant,
    pause: Duration,
    refused: u32,
}

/// What the environment of a program asks for.
#[derive(Debug, PartialEq, Eq)]
struct Wish {
    domain: String,
    manage: Manage,
}

/// Enters what should be a client and has no agent, until the daemon stops.
pub(crate) fn follow(daemon: &Daemon) {
    // Without the privilege programs cannot be entered either.
    let Ok(events) = ExecEvents::open() else { return };
    let mut programs: BTreeMap<i32, Program> = BTreeMap::new();
    let mut news = procfs::pids();
    while !daemon.is_stopping() {
        let now = Instant::now();
        for pid in news.drain(..) {
            if let Some(started) = procfs::start_time(pid) {
                programs.insert(pid, Program { started, next: now + LOOK, pause: LOOK, refused: 0 });
            }
        }
        programs.retain(|pid, program| now < program.next || serve(daemon, *pid, program, now));
        if programs.is_empty() {
            events.wait(QUIET_MS);
        }
        // Together, for where one program starts others do.
        thread::sleep(LOOK);
        if !events.read(&mut news) {
            // Any process may have become another program meanwhile. Those that are waited for keep their turn.
            let is_known = |pid| programs.get(&pid).is_some_and(|known| procfs::start_time(pid) == Some(known.started));
            news = procfs::pids();
            news.retain(|pid| !is_known(*pid));
        }
    }
}

/// Looks at a program that is due; false if it is done with.
fn serve(daemon: &Daemon, pid: i32, program: &mut Program, now: Instant) -> bool {
    if procfs::start_time(pid) != Some(program.started) || is_client(daemon, pid) || !is_of_this_user(pid) {
        return false;
    }
    let socket = daemon.config.socket.clone();
    match patience::within(PATIENCE, move || look_at(pid, &socket)) {
        Some(None) => return false,
        Some(Some((wish, true))) => {
            match attach(daemon, pid, &wish.domain, wish.manage, 0) {
                Ok(_) => return false,
                Err(reason) => daemon.refusals.note(pid, reason),
            }
            program.refused += 1;
        }
        Some(Some((_, false))) => {}
        // Few such readers may wait for one program.
        None => program.refused += 1,
    }
    program.pause = (program.pause * 2).min(LOOK_MAX);
    program.next = now + program.pause;
    program.refused < TRIES_MAX
}

/// True if all rights of program `pid` are those of the daemon's user. The environment of another is not the word of that
/// user.
fn is_of_this_user(pid: i32) -> bool {
    let own = pagefold_os::user::effective().to_string();
    procfs::value(&procfs::status(pid), "Uid").is_some_and(|all| all.split_whitespace().all(|uid| uid == own))
}

/// What program `pid` asks the daemon at `socket` for, if it has no agent, and whether it has anything to merge yet.
fn look_at(pid: i32, socket: &Path) -> Option<(Wish, bool)> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let wish = wish_in(&environment, socket.as_os_str().as_bytes()).filter(|_| !has_preloaded_agent(pid))?;
    let has_memory =
        procfs::anonymous(pid) >= ANONYMOUS_MIN && (wish.manage != Manage::Marked || has_marked_memory(pid));
    Some((wish, has_memory))
}

fn wish_in(environment: &[u8], socket: &[u8]) -> Option<Wish> {
    let value = |name: &[u8]| {
        let words = environment.split(|byte| *byte == 0);
        words.filter_map(|word| word.strip_prefix(name)?.strip_prefix(b"=")).next()
    };
    // The socket alone may be there for our own commands.
    let preload = String::from_utf8_lossy(value(b"LD_PRELOAD")?);
    if value(b"PAGEFOLD_SOCKET")? != socket || !preload.contains(AGENT) {
        return None;
    }
    let domain = value(b"PAGEFOLD_DOMAIN").filter(|domain| !domain.is_empty()).unwrap_or(UNNAMED_DOMAIN.as_bytes());
    let number = |name| String::from_utf8_lossy(value(name).unwrap_or_default()).parse().unwrap_or(0);
    let manage = if value(b"PAGEFOLD_COLD").is_some() {
        let (tolerance_ppm, tier_max) = (number(b"PAGEFOLD_REFAULT_BUDGET"), number(b"PAGEFOLD_TIER_MAX"));
        Manage::Cold(ColdOptions { tolerance_ppm, tier_max })
    } else if value(b"PAGEFOLD_MANAGE") == Some(b"all") {
        Manage::All
    } else {
        Manage::Marked
    };
    Some(Wish { domain: String::from_utf8(domain.to_vec()).ok()?, manage })
}

/// True if the preloaded agent is there and works.
fn has_preloaded_agent(pid: i32) -> bool {
    let maps = procfs::maps(pid).unwrap_or_default();
    agent_works(&maps.iter().map(|map| map.name.as_str()).collect::<Vec<_>>())
}

/// True if a program with mappings of these files has the agent, and glibc: beside another C library the agent stands aside.
/// Files of musl have no name of their own: where its loader is a link, the file may be called `libc.so`.
fn agent_works(files: &[&str]) -> bool {
    let is_glibc = |file: &&str| {
        let name = file.rsplit('/').next().unwrap_or_default();
        name.starts_with("libc.so.6") || name.starts_with("libc-2.")
    };
    files.iter().any(|file| file.contains(AGENT)) && files.iter().any(is_glibc)
}

/// True if the program has marked memory as mergeable.
fn has_marked_memory(pid: i32) -> bool {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    flags.flat_map(str::split_whitespace).any(|flag| flag == "mg")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_works_beside_glibc_only() {
        let agent = "/run/pagefold-agent-1.2.3-ab.so";
        for glibc in ["/usr/lib/x86_64-linux-gnu/libc.so.6", "/lib/libc-2.31.so", "/lib/libc.so.6 (deleted)"] {
            assert!(agent_works(&["/bin/cat", agent, glibc]) && !agent_works(&["/bin/cat", glibc]), "{glibc}");
        }
        for musl in ["/lib/ld-musl-x86_64.so.1", "/usr/lib/x86_64-linux-musl/libc.so"] {
            assert!(!agent_works(&["/bin/cat", agent, musl]), "{musl}");
        }
    }

    #[test]
    fn a_wish_is_for_the_daemon_that_the_environment_names() {
        let wish = |text: &str| {
            let preload = "LD_PRELOAD=/d/other.so:/d/pagefold-agent-1.2.3-ab.so ";
            wish_in((preload.to_owned() + text).replace(' ', "\0").as_bytes(), b"/s")
        };
        let asks = |domain: &str, manage| Some(Wish { domain: domain.into(), manage });
        assert_eq!(wish("A=1 PAGEFOLD_SOCKET=/s"), asks("default", Manage::Marked));
        let all = "PAGEFOLD_MANAGE=all PAGEFOLD_SOCKET=/s PAGEFOLD_DOMAIN=d B";
        assert_eq!(wish(all), asks("d", Manage::All));
        assert_eq!(wish_in(b"PAGEFOLD_SOCKET=/s\0LD_PRELOAD=/d/other.so", b"/s"), None);
        let cold = "PAGEFOLD_SOCKET=/s PAGEFOLD_COLD=1 PAGEFOLD_TIER_MAX=4096";
        assert_eq!(wish(cold), asks("default", Manage::Cold(ColdOptions { tolerance_ppm: 0, tier_max: 4096 })));
        for other in ["", "PAGEFOLD_SOCKET=/t", "XPAGEFOLD_SOCKET=/s"] {
            assert_eq!(wish(other), None, "{other}");
        }
    }
}
