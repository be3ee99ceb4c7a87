//! Attaching to programs that run already, and detaching from them.

use crate::clients::pinning;
use crate::cold::selector::ClientSelector;
use crate::config::Backend;
use crate::domain_key::UNNAMED_DOMAIN;
use crate::service::admission;
use crate::service::daemon::Daemon;
use crate::service::park;
use pagefold_entry::agent_thread::has_agent;
use pagefold_entry::connection::ask_for_connection;
use pagefold_entry::enter::{ColdOptions, Entered, Settings, enter};
use pagefold_entry::error::EntryError;
use pagefold_entry::image::AgentImage;
use pagefold_entry::layout::Traces;
use pagefold_entry::leave::{clear_unfinished, leave};
use pagefold_entry::look::FILTERS_CURE;
use pagefold_entry::merged_by_ksm::set_merged_by_ksm;
use pagefold_merge::client::Gone;
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{ksm, memfd, procfs, sock};
use pagefold_protocol::handshake::{HOLD_FEATURES, receive};
use pagefold_protocol::message::{Op, Packet};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::thread;
use std::time::{Duration, Instant};

/// How long the agent may take for each of its first packets, in milliseconds.
const ANSWER_MS: u64 = 10_000;

/// How long an agent may take to greet again, after the end of a loan or of an earlier daemon.
const GREETS_AGAIN: Duration = Duration::from_secs(2);

/// How long a program is asked again to make its merged pages private, while nothing but a busy machine keeps it from that.
const GIVES_BACK: Duration = Duration::from_secs(10);

/// How often programs are looked for that satisfy a rule.
const RULES_LOOK: Duration = Duration::from_secs(1);
/// How often a program is tried that cannot be attached.
pub(crate) const TRIES_MAX: u32 = 5;

/// The agent of an attached program sees no moves and forks either.
const ATTACHED_FEATURES: u64 = HOLD_FEATURES | uffd::FEATURE_EVENT_REMAP | uffd::FEATURE_EVENT_FORK;

/// What becomes of a program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manage {
    /// What the program marks as mergeable is merged.
    Marked,
    /// All large private memory is merged.
    All,
    /// Of all large private memory that which is idle is evicted to the cold tier.
    Cold(ColdOptions),
}

impl Manage {
    /// All large private memory: merged, or `cold`.
    pub(crate) const fn all(cold: bool) -> Manage {
        if cold { Manage::Cold(ColdOptions { tolerance_ppm: 0, tier_max: 0 }) } else { Manage::All }
    }
}

/// Enters process `pid` and makes it a client in `domain`; returns how long one of its threads stood still.
///
/// # Errors
/// One line: why not, and what to do about it.
pub(crate) fn attach(daemon: &Daemon, pid: i32, domain: &str, manage: Manage, asker: u32) -> Result<Duration, String> {
    try_attach(daemon, pid, domain, manage, asker).map_err(|error| error.to_string())
}

/// As [`attach`].
///
/// # Errors
/// [`EntryError::NoAgent`] where KSM may do in place of the agent.
fn try_attach(daemon: &Daemon, pid: i32, domain: &str, manage: Manage, asker: u32) -> Result<Duration, EntryError> {
    let refused = EntryError::Refused;
    may_ask(pid, asker).map_err(refused)?;
    if is_client(daemon, pid) {
        return Err(refused("it is a client already".into()));
    }
    let (requests, still) = if has_agent(pid) {
        // Its daemon and its keeper are gone, and no path leads it here.
        (ask_for_connection(pid)?, Duration::ZERO)
    } else {
        bring_agent(daemon, pid, domain, manage)?
    };
    // Its greeting is on its way.
    if let Some(greeting) = admission::first_packet(&requests) {
        admission::admit(daemon, requests, greeting);
    }
    if is_client(daemon, pid) {
        Ok(still)
    } else {
        Err(refused(daemon.refusals.reason(pid).unwrap_or_else(|| "its agent did not greet the daemon".into())))
    }
}

/// Puts an agent into process `pid`, which has none; returns our end of its connection, and how long a thread stood still.
fn bring_agent(daemon: &Daemon, pid: i32, domain: &str, manage: Manage) -> Result<(Fd, Duration), EntryError> {
    let refused = EntryError::Refused;
    let agent = AgentImage::parse(daemon.config.attached_agent).map_err(|error| refused(error.to_string()))?;
    let settings = Settings {
        socket: daemon.config.socket.as_os_str().as_bytes(),
        domain,
        all: manage != Manage::Marked,
        cold: if let Manage::Cold(options) = manage { Some(options) } else { None },
        makes_userfaultfd: daemon.userfault_device.is_none(),
    };
    let Entered { requests, still, may_map_code } = enter(pid, &agent, &settings)?;
    let code = daemon.agent_code.get_or_init(|| code_file(&agent).ok()).as_ref().filter(|_| may_map_code);
    enable(&requests, daemon.userfault_device.as_ref(), code).map_err(refused)?;
    Ok((requests, still))
}

/// A file of the agent's code, which agents map over the copy that was written into their programs. Nothing can change it:
/// every program that is attached executes it.
fn code_file(agent: &AgentImage) -> io::Result<Fd> {
    let file = memfd::create(c"pagefold-agent", agent.code_len)?;
    let mut left = agent.code();
    while !left.is_empty() {
        left = &left[file.write(left)?..];
    }
    memfd::add_seals(&file, memfd::SEAL_WRITE | memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL)?;
    Ok(file)
}

/// As [`attach`], by what `backend` says. Returns as well why KSM merges its memory, if that is so.
///
/// # Errors
/// As [`attach`].
pub(crate) fn attach_by(
    daemon: &Daemon,
    pid: i32,
    domain: &str,
    manage: Manage,
    backend: Backend,
    asker: u32,
) -> Result<(Duration, Option<String>), String> {
    let may_be_ksm = || manage == Manage::All && domain == UNNAMED_DOMAIN && ksm::read("run").is_ok_and(|run| run == 1);
    if backend == Backend::Ksm {
        return Ok((attach_to_ksm(daemon, pid, domain, manage, asker)?, Some(String::new())));
    }
    match try_attach(daemon, pid, domain, manage, asker) {
        Err(EntryError::NoAgent(why)) if backend == Backend::Auto && may_be_ksm() => {
            match attach_to_ksm(daemon, pid, domain, manage, asker) {
                Ok(still) => Ok((still, Some(why))),
                // The same cure need not be named twice.
                Err(error) if error.contains(FILTERS_CURE) => Err(why),
                Err(error) => Err(format!("{why}; nor can KSM merge it: {error}")),
            }
        }
        attached => attached.map(|still| (still, None)).map_err(|error| error.to_string()),
    }
}

/// Has KSM merge the memory of process `pid`; returns how long one of its threads stood still.
fn attach_to_ksm(daemon: &Daemon, pid: i32, domain: &str, manage: Manage, asker: u32) -> Result<Duration, String> {
    may_ask(pid, asker)?;
    if manage != Manage::All || domain != UNNAMED_DOMAIN {
        return Err("KSM knows neither domains nor the cold tier: leave --domain and --cold away".into());
    }
    if is_client(daemon, pid) {
        return Err("it is a client already".into());
    }
    if !ksm::read("run").is_ok_and(|run| run == 1) {
        return Err("KSM does not run (echo 1 > /sys/kernel/mm/ksm/run)".into());
    }
    let still = set_merged_by_ksm(pid, true).map_err(|error| error.to_string())?;
    if ksm::of_process(pid).and_then(|stat| stat.merges_all) == Some(false) {
        return Err("the kernel refused: KSM for a whole program needs kernel 6.4 or later".into());
    }
    Ok(still)
}

pub(crate) fn is_client(daemon: &Daemon, pid: i32) -> bool {
    lock(&daemon.live.connected).iter().any(|client| client.shared.pid == pid) || daemon.cold.is_linked(pid)
}

/// Attaches what satisfies a rule of the configuration, as it appears, until the daemon stops.
pub(crate) fn follow_rules(daemon: &Daemon) {
    // When a program was first seen, how often it was refused, and when it is tried next.
    let mut seen: BTreeMap<(i32, u64), (u32, Instant)> = BTreeMap::new();
    while !daemon.is_stopping() {
        let now = Instant::now();
        let mut living = BTreeMap::new();
        for pid in procfs::pids() {
            let Some(started) = procfs::start_time(pid) else { continue };
            let Some(rule) = daemon.config.attach.iter().find(|rule| rule.programs.has(pid)) else { continue };
            // Most programs that begin soon end, or become others.
            let (mut refused, mut next) = seen.get(&(pid, started)).copied().unwrap_or((0, now + RULES_LOOK / 2));
            let is_left = lock(&daemon.detached).contains(&(pid, started));
            if !is_left && !is_client(daemon, pid) && refused < TRIES_MAX && now >= next {
                match attach_by(daemon, pid, &rule.domain, Manage::all(rule.cold), Backend::Auto, 0) {
                    Ok((_, None)) => {}
                    Ok((_, Some(why))) => {
                        daemon.refusals.note(pid, format!("KSM merges its memory: {why}"));
                        refused = TRIES_MAX;
                    }
                    Err(reason) => {
                        daemon.refusals.note(pid, reason);
                        refused += 1;
                    }
                }
                next = now + RULES_LOOK * (1 << refused);
            }
            living.insert((pid, started), (refused, next));
        }
        lock(&daemon.detached).retain(|program| living.contains_key(program));
        seen = living;
        thread::sleep(RULES_LOOK);
    }
}

/// A user may ask for what that user could trace without the daemon.
fn may_ask(pid: i32, asker: u32) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    let own = pagefold_os::user::effective();
    if asker == 0 || asker == own && own != 0 {
        return Ok(());
    }
    // The kernel gives the directory of a program with other rights than its user's to root.
    let owner = std::fs::metadata(format!("/proc/{pid}")).map(|meta| meta.uid());
    match owner {
        Ok(owner) if owner == asker => Ok(()),
        Ok(_) => Err("it is another user's".into()),
        Err(_) => Err("there is no such process".into()),
    }
}

/// Has the agent's userfaultfd report forks, which takes a privilege that the program need not have. Hands over the file of
/// its `code`.
fn enable(requests: &Fd, device: Option<&Fd>, code: Option<&Fd>) -> Result<(), String> {
    let failed = |errno: pagefold_os::Errno| format!("its agent does not answer: {errno}");
    sock::set_timeout(requests, ANSWER_MS).map_err(failed)?;
    let welcome = Packet::new(Op::Welcome);
    sock::send(requests, welcome.bytes(), device.map(Fd::raw).as_slice()).map_err(failed)?;
    let (ready, mut fds) = receive(requests, Op::Ready).map_err(failed)?;
    let hold = fds.take(0).map(Uffd::from_fd).filter(Uffd::is_one);
    let Some(hold) = hold.filter(|_| ready.status == 0) else {
        return Err(format!(
            "its kernel refused userfaultfd: {}; see pagefold doctor",
            pagefold_os::Errno(ready.status)
        ));
    };
    let enabled = hold.enable(ATTACHED_FEATURES);
    let status = enabled.err().map_or(0, |errno| errno.0);
    sock::send(requests, Packet { status, ..welcome }.bytes(), code.map(Fd::raw).as_slice()).map_err(failed)?;
    enabled.map_err(|errno| match errno.0 {
        libc::EPERM => "forks of it could not be followed: a daemon with CAP_SYS_PTRACE can, as root's has".to_owned(),
        _ => format!("its kernel refused userfaultfd: {errno}; see pagefold doctor"),
    })
}

/// Gives process `pid` private memory again and takes the agent out of it; returns how many pages are private again.
///
/// # Errors
/// One line: why not, and what to do about it.
pub(crate) fn detach(daemon: &Daemon, pid: i32, asker: u32) -> Result<u64, String> {
    let began = Instant::now();
    while !is_client(daemon, pid) && has_agent(pid) && began.elapsed() < GREETS_AGAIN {
        thread::sleep(Duration::from_millis(10));
    }
    let Some(traces) = traces_in(daemon, pid) else {
        if !is_client(daemon, pid) && !has_agent(pid) && may_ask(pid, asker).is_ok() {
            // Of a detach that did not get to its end.
            match clear_unfinished(pid) {
                Ok(true) => return Ok(0),
                Err(error @ EntryError::Busy(_)) => return Err(error.to_string()),
                _ => {}
            }
        }
        if let Some(stat) = ksm::of_process(pid).filter(|stat| stat.merges_all == Some(true) && !is_client(daemon, pid))
        {
            may_ask(pid, asker)?;
            set_merged_by_ksm(pid, false).map_err(|error| error.to_string())?;
            leave_alone(daemon, pid, procfs::start_time(pid));
            return Ok(stat.merged_pages);
        }
        let name = procfs::name(pid);
        return Err(match name {
            None => "there is no such process".into(),
            Some(_) if !is_client(daemon, pid) => "it is no client; pagefold status lists them".into(),
            Some(_) => "it was started as a client, and stays one: pagefold unmerge gives it private memory".into(),
        });
    };
    // The agent would bring everything back whether there is room or not, and while the program waits for it to end.
    let (_, mut count) = park::unpark(daemon, &ClientSelector::Pid(pid)).unwrap_or_default();
    let (private, left) = make_private(daemon, pid).map_err(|Gone| "it is gone, or does not answer".to_owned())?;
    count += private;
    if left > 0 {
        return Err(match pinning::way(pid) {
            Some(way) => format!(
                "{left} of its pages stay shared, because a device may be reading into them by {way}; its agent stays. Nothing more \
                 is merged; detach it when that is over, or let it end"
            ),
            None => format!(
                "{left} of its pages stay shared, because memory is short, or its threads do not stand still; its agent stays: \
                 try again"
            ),
        });
    }
    if daemon.cold.pages_out(pid) > 0 {
        return Err(
            "its memory limit has no room for all of its pages that are in the cold tier: raise it, and try again"
                .into(),
        );
    }
    leave(&traces).map_err(|error| error.to_string())?;
    leave_alone(daemon, traces.pid, Some(traces.started));
    daemon.live.forget(|client| client.shared.pid == pid);
    Ok(count)
}

/// Makes all merged pages of process `pid` private; returns how many are, and how many stay shared.
///
/// A batch of pages fails on a busy machine, where threads of the program do not stand still in time, and while the kernel
/// holds a page for a moment. So what is left is asked for again, unless a device may be reading into it.
///
/// # Errors
/// [`Gone`] if a client of the process is.
pub(crate) fn make_private(daemon: &Daemon, pid: i32) -> Result<(u64, u64), Gone> {
    let (mut pages, mut all_left) = (0, 0);
    for (domain, id) in daemon.live.clients_of(Some(pid)) {
        let began = Instant::now();
        all_left += loop {
            let done = domain.unmerge(id)?;
            pages += done.pages;
            if done.left == 0 || began.elapsed() > GIVES_BACK || pinning::way(pid).is_some() {
                break done.left;
            }
            thread::sleep(Duration::from_millis(20));
        };
    }
    Ok((pages, all_left))
}

/// No rule attaches the process again.
fn leave_alone(daemon: &Daemon, pid: i32, started: Option<u64>) {
    if !daemon.config.attach.is_empty() {
        lock(&daemon.detached).extend(started.map(|started| (pid, started)));
    }
}

/// What the entry left in process `pid`, if it is an attached client.
fn traces_in(daemon: &Daemon, pid: i32) -> Option<Traces> {
    let merged = lock(&daemon.live.connected)
        .iter()
        .find_map(|client| client.shared.attached.as_ref().filter(|_| client.shared.pid == pid).map(|one| one.traces));
    let cold = || daemon.cold.clients_of(&ClientSelector::Pid(pid)).into_iter();
    merged.or_else(|| cold().find_map(|(_, client)| lock(&client.attached).as_ref().map(|one| one.traces)))
}
