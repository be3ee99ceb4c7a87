//! `pagefold run`: starts a program whose equal pages are merged with those of others.

use crate::error::Error;
use crate::{args, completion_values, daemon_client, exit, inherited_state, note};
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What kind of client a program becomes.
#[derive(clap::Args)]
pub struct ClientArgs {
    /// Which of the program's memory is merged
    #[arg(long, value_enum, default_value_t = Manage::Marked)]
    pub manage: Manage,
    /// Share pages only inside this domain [default: one domain for all of this user]
    #[arg(long, value_name = "NAME", add = completion_values::domains())]
    pub domain: Option<String>,
    /// Evict idle pages to the cold tier instead of merging; manages all large private memory
    #[arg(long)]
    pub cold: bool,
}

/// Which memory of a client is managed.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Manage {
    /// What the program marks mergeable: MADV_MERGEABLE or prctl(2)
    Marked,
    /// Every large private anonymous mapping
    All,
}

/// Run a program and merge its pages with those of all others
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold run -- qemu-system-x86_64 -m 2G disk.img
  pagefold run --manage all -- redis-server --port 7001
  pagefold run --domain customer-7 -- ./sandbox
  pagefold run --cold --tier-max 2G -- qemu-system-x86_64 -m 4G disk.img

Exit status: the program's own, and its signals, because it replaces this process; 125 if pagefold
failed or was used wrongly, 126 if the program could not be run, 127 if it was not found.

A domain is a trust boundary: a program that shares pages with another one can find out, by the
time a write takes, what the other has in memory. All programs of one user share that user's
domain; give each owner of data a --domain of its own. KSM knows no domains: with --domain it is
not used, and a program into which the agent cannot load runs unmerged. A child process has its
parent's domain, unless --domain says otherwise.")]
pub struct Args {
    #[command(flatten)]
    client: ClientArgs,
    /// With --cold: percent of run time it may lose to refaults, at most 50 [default: the daemon's]
    #[arg(long, value_name = "PERCENT", value_parser = args::percent)]
    refault_budget: Option<f64>,
    /// With --cold: memory limit of the domain's tier; the domain's first client sets it [default: the daemon's]
    #[arg(long, value_name = "SIZE", value_parser = args::tier_max)]
    tier_max: Option<u64>,
    /// What merges the program's pages
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// The agent if this kernel and user allow it, else KSM
    Auto,
    /// The agent, a thread inside the program, remaps pages
    Agent,
    /// The kernel's KSM (for static programs)
    Ksm,
}

/// Becomes the program.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let error = match prepare(&args) {
        Ok(command) => {
            let error = inherited_state::exec_as(command);
            note!("pagefold: cannot run {}: {error}", args.command[0].to_string_lossy());
            return Ok(ExitCode::from(exit::of_exec(&error)));
        }
        Err(error) => error,
    };
    note!("pagefold: {error}");
    Ok(ExitCode::from(exit::FAILED))
}

fn prepare(args: &Args) -> Result<Command, Error> {
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);
    if let Some(domain) = &args.client.domain {
        args::domain(domain)?;
    }
    let lack = pagefold_os::probe::all().into_iter().find(|finding| finding.needed && !finding.works);
    let remap = match (args.backend, lack) {
        (Backend::Ksm, _) if args.client.cold => return Err("--cold needs the agent: leave --backend away".into()),
        (Backend::Ksm, _) if args.client.domain.is_some() => {
            return Err("--domain needs the agent: KSM merges across all domains; leave --backend away".into());
        }
        (Backend::Ksm, _) => {
            if !prefer_ksm()? {
                if pagefold_os::ksm::write("run", 1).is_ok() {
                    note!("pagefold: KSM runs now, for all that ask for it; echo 0 > /sys/kernel/mm/ksm/run stops it");
                } else {
                    note!("pagefold: not merged: KSM does not run; as root: echo 1 > /sys/kernel/mm/ksm/run");
                }
            }
            false
        }
        (Backend::Auto, Some(lack)) if !args.client.cold && args.client.domain.is_none() => {
            let why = format!("{}: {}", lack.name, lack.detail);
            if prefer_ksm().unwrap_or(false) {
                note!("pagefold: {why}; using KSM instead");
            } else {
                note!("pagefold: not merged: {why}; pagefold doctor tells how to mend it");
            }
            false
        }
        (_, Some(lack)) => {
            let who = match args.backend {
                _ if args.client.cold => "the cold tier",
                Backend::Agent => "--backend agent",
                _ => "--domain",
            };
            return Err(
                format!("{who} needs {}: {}; pagefold doctor tells how to mend it", lack.name, lack.detail).into()
            );
        }
        (_, None) => true,
    };
    if !remap {
        return Ok(command);
    }
    let socket = args.daemon.socket()?;
    if let Some((why, can_be_entered)) = takes_no_agent(&args.command[0]) {
        let is_root = pagefold_os::user::effective() == 0;
        let enters = can_be_entered && is_root && cfg!(target_arch = "x86_64");
        let free = args.backend == Backend::Auto && !args.client.cold && args.client.domain.is_none();
        let then = match (enters, free) {
            (true, _) => "the daemon enters it while it runs",
            (false, true) => "it runs unmerged; root's daemon could enter it, and --backend ksm can serve it",
            (false, false) => "it runs unmerged",
        };
        note!("pagefold: {} {why}: {then}", args.command[0].to_string_lossy());
    }
    let cold = args
        .client
        .cold
        .then_some(daemon_client::Cold { refault_budget: args.refault_budget, tier_max: args.tier_max });
    let environment = daemon_client::environment(
        &socket,
        args.client.domain.as_deref(),
        args.client.manage == Manage::All,
        cold.as_ref(),
    )?;
    daemon_client::ensure_daemon(&socket, args.tier_max.filter(|_| args.client.cold))?;
    if let Some(owner) = daemon_client::stranger(&socket) {
        note!("pagefold: the daemon at {} is user {owner}'s, and may not serve this program", socket.display());
    }
    // The tier is asked for by each run anew.
    for name in ["PAGEFOLD_COLD", "PAGEFOLD_REFAULT_BUDGET", "PAGEFOLD_TIER_MAX"] {
        command.env_remove(name);
    }
    command.envs(environment);
    Ok(command)
}

/// Marks this process, and so the program it becomes, for KSM; tells whether that runs.
fn prefer_ksm() -> Result<bool, Error> {
    const PR_SET_MEMORY_MERGE: i32 = 67;
    if !pagefold_os::ksm::exists() {
        return Err("this kernel has no KSM either; pagefold doctor tells more".into());
    }
    // SAFETY: `PR_SET_MEMORY_MERGE` takes no pointer.
    if unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EINVAL) => format!(
                "KSM for a whole program needs kernel 6.4 or later: this is {}; boot a newer kernel",
                pagefold_os::probe::release()
            ),
            _ => format!("KSM for this process: {error}"),
        }
        .into());
    }
    Ok(pagefold_os::ksm::read("run")? == 1)
}

/// Why the agent cannot load into `program`, or will stand aside there, as far as its file tells; and whether it can be
/// entered.
fn takes_no_agent(program: &OsString) -> Option<(&'static str, bool)> {
    let found = if Path::new(program).components().count() > 1 {
        Some(PathBuf::from(program))
    } else {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .map(|dir| dir.join(program))
            .find(|path| path.is_file())
    };
    let mut head = [0u8; 4096];
    let got = std::fs::File::open(found?).ok()?.read(&mut head).ok()?;
    let head = &head[..got];
    if got < 64 || &head[..4] != b"\x7fELF" {
        return None;
    }
    if head[4] != 2 {
        return Some(("is a program of 32 bits, into which the agent cannot load", false));
    }
    let word = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]) as usize;
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?) as usize);
    const PT_INTERP: u8 = 3;
    let (offset, size, count) = (long(32)?, word(54), word(56));
    let mut parts = (0..count).map(|index| offset.saturating_add(index * size)).filter(|at| *at < head.len());
    match parts.find(|at| head[*at] == PT_INTERP) {
        None if count > 0 => Some(("is a static program, into which the agent cannot load", true)),
        None => None,
        Some(at) => {
            let (start, len) = (long(at + 8)?, long(at + 32)?);
            let loader = head.get(start..start.checked_add(len)?)?;
            let name = loader.rsplit(|byte| *byte == b'/').next()?;
            name.starts_with(b"ld-musl-").then_some(("is linked with musl, where the agent stands aside", true))
        }
    }
}
