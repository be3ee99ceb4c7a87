//! `pagefold attach` and `detach`: programs that run already become clients, and cease to be.

use super::control::for_each;
use crate::error::Error;
use crate::output::print_json;
use crate::{attach_rules, completion_values, daemon_client, note, say, units};
use pagefold_daemon::ProgramFilter;
use pagefold_daemon::control::{self, Answer, Request};
use std::ffi::CString;
use std::process::ExitCode;

/// Merge a program that runs already, static or not
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  sudo pagefold attach 4711
  sudo pagefold attach $(pidof qemu-system-x86_64)
  sudo pagefold attach --exe '/usr/bin/qemu-*'
  sudo pagefold attach --cgroup machine.slice --domain guests
  sudo pagefold attach --cold --exe /usr/lib/jvm/*/bin/java

One thread of the program stands still for a moment, starts the agent's thread, and goes on. Later the
program's threads stand still together whenever pages are merged or evicted. The daemon needs CAP_SYS_PTRACE, as
root's has, to follow the program's forks. pagefold detach undoes it.")]
pub struct Attach {
    #[command(flatten)]
    programs: Programs,
    /// Name of the domain: programs of one user and one domain may share pages
    #[arg(long, value_name = "NAME", default_value = "default", add = completion_values::domains())]
    domain: String,
    /// Evict idle pages to the cold tier instead of merging
    #[arg(long)]
    cold: bool,
    /// What merges the programs' pages
    #[arg(long, value_enum, default_value_t = Backend::Auto, conflicts_with = "cold")]
    backend: Backend,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// The agent; KSM where no agent can live (a seccomp filter), if KSM runs and there is no --domain
    Auto,
    /// The agent, a thread inside the program, remaps pages
    Agent,
    /// The kernel's KSM, for all memory of the program and of its children
    Ksm,
}

/// Give an attached program private memory, and leave it
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  sudo pagefold detach 4711
  sudo pagefold detach --exe '/usr/bin/qemu-*'

Nothing of pagefold is left in the program: no thread, mapping or descriptor.")]
#[command(mut_arg("pids", |pids| pids.add(completion_values::clients())))]
pub struct Detach {
    #[command(flatten)]
    programs: Programs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("selected").required(true).multiple(true).args(["pids", "cgroup", "exe", "user"])))]
struct Programs {
    /// Process ids
    #[arg(value_name = "PID", value_parser = units::pid, add = completion_values::programs())]
    pids: Vec<i32>,
    /// Programs in this cgroup and below it
    #[arg(long, value_name = "PATH", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    cgroup: Option<String>,
    /// Programs with an executable file that matches this pattern
    #[arg(long, value_name = "GLOB", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    exe: Option<String>,
    /// Programs of this user, by name or number
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    user: Option<String>,
}

impl Programs {
    /// The processes that are named, and those that satisfy all patterns.
    fn find(&self) -> Result<Vec<i32>, Error> {
        let mut found = self.pids.clone();
        if self.cgroup.is_none() && self.exe.is_none() && self.user.is_none() {
            return Ok(found);
        }
        let exe = self.exe.as_deref().map(CString::new).transpose().map_err(|_| "--exe: a pattern has no NUL byte")?;
        let user =
            self.user.as_deref().map(attach_rules::user_id).transpose().map_err(|error| format!("--user: {error}"))?;
        found.extend(ProgramFilter { exe, cgroup: self.cgroup.clone(), user, rss_min: 0 }.find());
        if found.is_empty() { Err("no program matches".into()) } else { Ok(found) }
    }
}

/// What `attach --json` prints.
#[derive(serde::Serialize)]
struct Attached {
    clients: u64,
    /// Of these: merged by KSM, and not clients.
    by_ksm: u64,
    /// Longest time for which a thread of a program stood still, in microseconds.
    still_us_max: u64,
}

/// What `detach --json` prints.
#[derive(serde::Serialize)]
struct Detached {
    clients: u64,
    pages: u64,
}

/// Runs `attach`.
pub fn attach(args: Attach) -> Result<ExitCode, Error> {
    let pids = args.programs.find()?;
    let socket = args.daemon.socket()?;
    if args.daemon.is_default() {
        daemon_client::ensure_daemon(&socket, None)?;
    }
    let (still, code) = for_each(&pids, |pid| {
        let backend = match args.backend {
            Backend::Auto => control::Backend::Auto,
            Backend::Agent => control::Backend::Agent,
            Backend::Ksm => control::Backend::Ksm,
        };
        let request = Request::Attach { pid: *pid, domain: args.domain.clone(), cold: args.cold, backend };
        match daemon_client::ask(&socket, &request)? {
            Answer::Attached { still_ns, ksm } => {
                if let Some(why) = ksm.as_ref().filter(|why| !why.is_empty()) {
                    note!("pagefold: {pid}: {why}; KSM merges it instead");
                }
                Ok((still_ns, ksm.is_some()))
            }
            other => Err(format!("the daemon answered {other:?}").into()),
        }
    })?;
    let most_us = still.iter().map(|(ns, _)| ns / 1000).max().unwrap_or(0);
    let by_ksm = still.iter().filter(|(_, by_ksm)| *by_ksm).count() as u64;
    if args.json {
        print_json(&Attached { clients: still.len() as u64, by_ksm, still_us_max: most_us })?;
    } else {
        say!(
            "{} attached; a thread stood still for {most_us} us",
            units::show_counted(still.len() as u64, "program", "programs")
        );
    }
    Ok(code)
}

/// Runs `detach`.
pub fn detach(args: Detach) -> Result<ExitCode, Error> {
    let pids = args.programs.find()?;
    let socket = args.daemon.socket()?;
    let (pages, code) = for_each(&pids, |pid| match daemon_client::ask(&socket, &Request::Detach { pid: *pid })? {
        Answer::Unmerged { count, .. } => Ok(count),
        other => Err(format!("the daemon answered {other:?}").into()),
    })?;
    let (clients, pages) = (pages.len() as u64, pages.iter().sum());
    if args.json {
        print_json(&Detached { clients, pages })?;
    } else {
        say!(
            "{} detached; {} private again",
            units::show_counted(clients, "program", "programs"),
            units::show_counted(pages, "page is", "pages are")
        );
    }
    Ok(code)
}
