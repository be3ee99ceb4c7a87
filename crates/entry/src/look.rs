//! May a program be entered? If not, why, and what to do about it.

use crate::agent_thread::has_agent;
use crate::call_names::name_of_call;
use crate::error::{EntryError, step};
use crate::instructions;
use crate::memory::Memory;
use crate::stop::status_of;
use crate::trace::Tracer;
use pagefold_os::procfs;
use pagefold_os::procfs::OwnedMap;
use pagefold_protocol::POOL_NAME;
use pagefold_protocol::seccomp_filter::{self, Leeway};
use std::{fs, io};

/// What lets the packaged daemon read the filters of programs: the one command as root.
pub const FILTERS_CURE: &str = "install -Dm644 -t /etc/systemd/system/pagefold.service.d /usr/share/pagefold/examples/filters.conf \
                                && systemctl daemon-reload && systemctl restart pagefold";

/// Says why no agent can live in process `pid`.
///
/// # Errors
/// [`EntryError::Gone`], or [`EntryError::Refused`] with one line: what, and what to do about it.
pub fn look(pid: i32) -> Result<Vec<OwnedMap>, EntryError> {
    let refuse = |reason: &str| Err(EntryError::Refused(reason.into()));
    let maps = look_at_threads(pid)?;
    if maps.iter().any(|map| map.name.as_bytes().starts_with(POOL_NAME) && !map.shared) {
        return refuse("it shows merged memory already, its own or that of the process that forked it");
    }
    if has_agent(pid) {
        return refuse("an agent is in it already");
    }
    Ok(maps)
}

/// Says why no thread of process `pid` can be borrowed.
pub(crate) fn look_at_threads(pid: i32) -> Result<Vec<OwnedMap>, EntryError> {
    let refuse = |reason: &str| Err(EntryError::Refused(reason.into()));
    if pid <= 0 || !fs::exists(format!("/proc/{pid}")).unwrap_or(false) {
        return Err(EntryError::Gone);
    }
    if pid == std::process::id() as i32 {
        return refuse("it is the daemon itself");
    }
    if !instructions::is_supported() {
        return refuse("programs can be entered on x86-64 only so far; start it by pagefold run");
    }
    let status = procfs::status(pid);
    let field = |name: &str| procfs::value(&status, name).unwrap_or_default();
    match field("State").chars().next() {
        None | Some('Z' | 'X') => return Err(EntryError::Gone),
        Some('T' | 't') => return refuse("it is stopped (SIGSTOP or a debugger): let it go on first"),
        _ => {}
    }
    let tracer = field("TracerPid");
    if tracer != "0" && !tracer.is_empty() {
        return Err(EntryError::Refused(format!("process {tracer} traces it: end that first")));
    }
    if field("Kthread") == "1" || field("VmSize").is_empty() {
        return refuse("it is a thread of the kernel");
    }
    if field("Tgid") != pid.to_string() {
        return Err(EntryError::Refused(format!("it is a thread of process {}: name that", field("Tgid"))));
    }
    let maps = procfs::maps(pid).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => EntryError::Refused(
            "this user may not trace it: it is another user's, or has other rights than its user (see ptrace(2), pagefold doctor)".into(),
        ),
        _ => EntryError::Gone,
    })?;
    if maps.is_empty() {
        return Err(EntryError::Gone);
    }
    Ok(maps)
}

/// The kernel gives the file to the program's user: another one needs the right to overrule that.
pub(crate) fn open_memory(pid: i32) -> Result<Memory, EntryError> {
    Memory::open(pid).map_err(|error| match error.raw_os_error() {
        Some(libc::EACCES) => EntryError::Refused(
            "it is another user's, and this daemon may not write its memory without CAP_DAC_OVERRIDE: attach by root's daemon".into(),
        ),
        _ => step("opening its memory")(error),
    })
}

pub(crate) fn has_filter(pid: i32, thread: i32) -> bool {
    procfs::has_filter(&status_of(pid, thread))
}

/// True if this process has a filter: the kernel shows it no other's then.
pub(crate) fn has_own_filter() -> bool {
    let own = std::process::id() as i32;
    has_filter(own, own)
}

/// Asks the seccomp filters of `thread`, which stands still, about each call that the agent makes: its threads get them too.
///
/// # Errors
/// [`EntryError::NoAgent`]: a call is forbidden, or the filters cannot be read.
pub(crate) fn judge_filters(tracer: &Tracer, thread: i32, makes_userfaultfd: bool) -> Result<Leeway, EntryError> {
    let filters = tracer.filters(thread).map_err(|error| {
        let why = if has_own_filter() {
            format!("this daemon may not read it, for it has one itself: {FILTERS_CURE}")
        } else if error.raw_os_error() == Some(libc::EACCES) {
            "this daemon may not read it without CAP_SYS_ADMIN: attach by root's daemon".into()
        } else {
            format!("the kernel does not show it ({error})")
        };
        EntryError::NoAgent(format!("a seccomp filter restricts its system calls, and {why}"))
    })?;
    let filters: Vec<&[libc::sock_filter]> = filters.iter().map(Vec::as_slice).collect();
    seccomp_filter::judge_attached(&filters, makes_userfaultfd).map_err(|number| {
        EntryError::NoAgent(format!(
            "its seccomp filter forbids a system call of the agent's ({}): allow that call (SystemCallFilter= and other settings of \
             a service), or attach --backend ksm",
            name_of_call(number)
        ))
    })
}
