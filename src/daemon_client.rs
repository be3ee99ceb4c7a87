//! This user's daemon and this tool's agent: where they live, and how to reach them.

use crate::error::Error;
use crate::output::Progress;
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::status::Status;
use pagefold_os::filesystem::is_noexec;
use pagefold_os::private_dir;
use pagefold_os::sock::PATH_BYTES_MAX;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The preload agent, built with this tool.
const AGENT: &[u8] = include_bytes!(env!("PAGEFOLD_AGENT_SO"));

/// The agent for programs that run already, built with this tool.
pub const ATTACHED_AGENT: &[u8] = include_bytes!(env!("PAGEFOLD_ATTACHED_AGENT_SO"));

/// The socket of this user's daemon, in the runtime directory.
pub const SOCKET: &str = "daemon.sock";

/// How long a daemon that was just started may take to listen.
pub const DAEMON_START_MAX: Duration = Duration::from_secs(30);

/// How long a daemon to which ours gave way may take for the rest of its start.
const OTHERS_START_MAX: Duration = Duration::from_secs(5);

/// This user's directory for sockets and the agent, which is made if it is not there.
pub fn runtime_dir() -> Result<PathBuf, Error> {
    let dir = private_dir::runtime_dir()?;
    private_dir::make_own(&dir).map_err(|error| format!("{error}; set PAGEFOLD_RUNTIME_DIR to another directory"))?;
    Ok(dir)
}

/// Which daemon a command asks.
#[derive(clap::Args)]
pub struct DaemonArg {
    /// Socket of the daemon [default: $PAGEFOLD_SOCKET, else this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl DaemonArg {
    /// Where it listens.
    pub fn socket(&self) -> Result<PathBuf, Error> {
        socket(self.socket.as_deref())
    }

    /// True if none was named.
    pub fn is_default(&self) -> bool {
        self.socket.is_none()
    }
}

/// Where this user's daemon listens, unless `given` says otherwise.
pub fn socket(given: Option<&Path>) -> Result<PathBuf, Error> {
    let path = match given {
        Some(path) => std::path::absolute(path)?,
        None => runtime_dir()?.join(SOCKET),
    };
    match path.as_os_str().len() {
        ..=PATH_BYTES_MAX => Ok(path),
        len => Err(format!(
            "{}: {len} bytes, and a socket's path has {PATH_BYTES_MAX} at most; --socket names another",
            path.display()
        )
        .into()),
    }
}

/// Where the agent lies, so that it can be loaded: the runtime directory, but Debian and others mount /run `noexec`. Then
/// the user's cache, /var/cache/pagefold for root, else a directory in /tmp.
pub fn agent_dir() -> Result<PathBuf, Error> {
    let first = runtime_dir()?;
    if !is_noexec(&first) {
        return Ok(first);
    }
    let uid = pagefold_os::user::effective();
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    let cache = match uid {
        0 => Some(PathBuf::from("/var/cache")),
        _ => absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache"))),
    };
    let others = cache.map(|dir| dir.join("pagefold")).into_iter();
    let mut others = others.chain([std::env::temp_dir().join(format!("pagefold-{uid}"))]);
    others.find(|dir| private_dir::make_own(dir).is_ok() && !is_noexec(dir)).ok_or_else(|| {
        format!(
            "no agent can be loaded from {}, which is mounted noexec; set PAGEFOLD_RUNTIME_DIR to a directory that is not",
            first.display()
        )
        .into()
    })
}

/// Writes the agent to its directory, if it is not there already, and returns its path.
pub fn agent() -> Result<PathBuf, Error> {
    let dir = agent_dir()?;
    let path = dir.join(format!("pagefold-agent-{}-{:x}.so", env!("CARGO_PKG_VERSION"), fnv(AGENT)));
    if fs::read(&path).is_ok_and(|bytes| bytes == AGENT) {
        return Ok(path);
    }
    let half = dir.join(format!(".agent-{}", std::process::id()));
    let write = || -> io::Result<()> {
        let mut file = fs::File::create(&half)?;
        file.write_all(AGENT)?;
        file.set_permissions(fs::Permissions::from_mode(0o755))?;
        fs::rename(&half, &path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&half);
        format!("cannot write the agent to {}: {error}", path.display())
    })?;
    Ok(path)
}

/// True if `path` is named as the agent of some version, wherever it lies: a process has room for one.
fn is_agent(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    // Older ones have no name of ours in front.
    let name = name.strip_prefix("pagefold-").unwrap_or(name);
    let parts = name.strip_prefix("agent-").and_then(|rest| rest.strip_suffix(".so")?.rsplit_once('-'));
    parts.is_some_and(|(version, hash)| {
        version.starts_with(|first: char| first.is_ascii_digit()) && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// True if this process was started as a client.
pub fn has_agent() -> bool {
    let preload = std::env::var("LD_PRELOAD").unwrap_or_default();
    std::env::var_os("PAGEFOLD_SOCKET").is_some() && preload.split([':', ' ']).any(is_agent)
}

/// A short name for content; no proof of anything.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// What a client of the cold tier asks for.
pub struct Cold {
    /// Share of run time that may be lost to refaults.
    pub refault_budget: Option<f64>,
    /// Limit of its domain's tier, if it is the first there.
    pub tier_max: Option<u64>,
}

/// Environment that makes a program started with it a client.
pub fn environment(
    socket: &Path,
    domain: Option<&str>,
    all: bool,
    cold: Option<&Cold>,
) -> Result<Vec<(String, String)>, Error> {
    let text =
        |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| format!("{}: not UTF-8 text", path.display()));
    let agent = text(&agent()?).map_err(|error| format!("{error}; set PAGEFOLD_RUNTIME_DIR"))?;
    if agent.contains([' ', ':']) {
        return Err(format!("{agent}: the loader takes no path with a space or colon; set PAGEFOLD_RUNTIME_DIR").into());
    }
    // A lossy name would be another socket, on which no daemon listens.
    let socket = text(socket).map_err(|error| format!("{error}; --socket names another"))?;
    let others = std::env::var("LD_PRELOAD").unwrap_or_default();
    let mut preload = agent;
    for other in others.split([':', ' ']).filter(|other| !other.is_empty() && !is_agent(other)) {
        preload.push(':');
        preload.push_str(other);
    }
    let mut pairs = vec![
        ("LD_PRELOAD".to_owned(), preload),
        ("PAGEFOLD_SOCKET".to_owned(), socket),
        ("PAGEFOLD_MANAGE".to_owned(), if all { "all" } else { "marked" }.to_owned()),
    ];
    // AddressSanitizer's library refuses programs in which it is not the first; the agent stands aside there.
    let before = std::env::var("ASAN_OPTIONS").unwrap_or_default();
    let ours = "verify_asan_link_order=0";
    let options = if before.is_empty() || before == ours { ours.to_owned() } else { format!("{before}:{ours}") };
    pairs.push(("ASAN_OPTIONS".to_owned(), options));
    if let Some(cold) = cold {
        pairs.push(("PAGEFOLD_COLD".to_owned(), "1".to_owned()));
        if let Some(share) = cold.refault_budget {
            pairs.push(("PAGEFOLD_REFAULT_BUDGET".to_owned(), ((share * 1e6) as u64).max(1).to_string()));
        }
        if let Some(bytes) = cold.tier_max {
            pairs.push(("PAGEFOLD_TIER_MAX".to_owned(), bytes.to_string()));
        }
    }
    if let Some(domain) = domain {
        pairs.push(("PAGEFOLD_DOMAIN".to_owned(), domain.to_owned()));
    }
    Ok(pairs)
}

/// The owner of `socket`, if it is neither this user nor root: that user's daemon may not read this user's programs.
pub fn stranger(socket: &Path) -> Option<u32> {
    let uid = pagefold_os::user::effective();
    fs::metadata(socket).ok().map(|found| found.uid()).filter(|owner| *owner != uid && *owner != 0)
}

/// Default memory limit of a domain's cold tier, in bytes.
pub fn tier_max_auto() -> u64 {
    pagefold_os::procfs::available_and_total().1 / 4
}

/// Starts a daemon at `socket` in the background, if none listens there.
///
/// Started for a program that asks for a larger tier than a daemon would give, it allows that.
pub fn ensure_daemon(socket: &Path, tier_max: Option<u64>) -> Result<(), Error> {
    // A daemon that takes over a cold tier answers no request before that is done.
    match control::ask_within(socket, &Request::Counts {}, DAEMON_START_MAX) {
        Ok(_) => return Ok(()),
        // It is there, and no other gets its place.
        Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(silent(socket, &error)),
        Err(_) => {}
    }
    // A typing error shall not make a directory.
    if let Some(dir) = socket.parent().filter(|dir| !dir.is_dir()) {
        return Err(format!("no daemon at {}: {} is no directory", socket.display(), dir.display()).into());
    }
    // No daemon takes the place of what is none's, and so none is waited for.
    if fs::metadata(socket).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(
            format!("no daemon at {}: what is there is no daemon's socket; name another", socket.display()).into()
        );
    }
    // A name that no other file has.
    let mut log = socket.as_os_str().to_owned();
    log.push(".log");
    let (output, no_log) = match create_log(Path::new(&log)) {
        Ok(file) => (Stdio::from(file), None),
        Err(error) => (Stdio::null(), Some(format!("cannot write {}: {error}", log.display()))),
    };
    // The daemon never reads it: our end tells when it has ended, and what its last word was.
    let (input, mut ours) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["daemon", "--on-demand", "--socket"])
        .arg(socket)
        .env_remove("LD_PRELOAD")
        .env_remove("PAGEFOLD_SOCKET")
        // What a service's program is to be told is not for us.
        .env_remove("NOTIFY_SOCKET")
        .env_remove("LISTEN_PID")
        .stdin(OwnedFd::from(input))
        .stdout(Stdio::null())
        .stderr(output)
        .current_dir("/");
    if let Some(bytes) = tier_max.filter(|bytes| *bytes > tier_max_auto()) {
        command.args(["--tier-max", &bytes.to_string()]);
    }
    crate::config::pass_on(&mut command);
    // SAFETY: nothing but system calls that are safe between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            // The program that we become must not find a child that it never made, nor the daemon its descriptors.
            match libc::fork() {
                -1 => return Err(io::Error::last_os_error()),
                0 => {}
                _ => libc::_exit(0),
            }
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
            Ok(())
        });
    }
    command.spawn()?.wait()?;
    drop(command);
    let mut end = Instant::now() + DAEMON_START_MAX;
    let mut ended = false;
    loop {
        match last_word(&mut ours).filter(|_| !ended) {
            None => {}
            Some(word) => {
                ended = true;
                // Another daemon has won the race for the socket, which is as good. Otherwise none will come: ask once more.
                let patience = if word == GAVE_WAY { OTHERS_START_MAX } else { Duration::ZERO };
                end = end.min(Instant::now() + patience);
            }
        }
        match control::ask(socket, &Request::Counts {}) {
            Ok(_) => return Ok(()),
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => {
                let said = fs::read_to_string(&log).unwrap_or_default();
                let said = said.lines().last().map(str::to_owned).or(no_log);
                let said = said.unwrap_or_else(|| "it said nothing".to_owned());
                return Err(format!("no daemon at {}: {error}; {said}", socket.display()).into());
            }
        }
    }
}

/// An empty file at `path` for what a process in the background has to say, to its owner alone. No link is followed.
pub fn create_log(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(path)
}

/// What a daemon that was started for a command says when another has its socket, or was asked to stop and may be about to
/// have it.
const GAVE_WAY: &[u8] = b"another";

/// Tells the process that started this daemon that another one has its socket. Does nothing if stdin is not a socket.
pub fn tell_gave_way() {
    // SAFETY: the bytes outlive the call.
    let _ = unsafe { libc::send(0, GAVE_WAY.as_ptr().cast(), GAVE_WAY.len(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
}

/// What a daemon said before it ended; `None` while it runs.
fn last_word(ours: &mut UnixStream) -> Option<Vec<u8>> {
    let mut word = vec![0; GAVE_WAY.len()];
    match ours.read(&mut word) {
        Ok(got) => {
            word.truncate(got);
            Some(word)
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(_) => Some(Vec::new()),
    }
}

/// Asks the daemon at `socket`.
pub fn ask(socket: &Path, request: &Request) -> Result<Answer, Error> {
    let none = "start something with pagefold run, or pagefold daemon";
    ask_any(socket, request)?.ok_or_else(|| format!("no daemon listens at {}; {none}", socket.display()).into())
}

/// Asks the daemon at `socket`; `None` if there is none.
fn ask_any(socket: &Path, request: &Request) -> Result<Option<Answer>, Error> {
    match control::ask(socket, request) {
        Ok(Answer::Error { message }) => Err(message.into()),
        Ok(answer) => Ok(Some(answer)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let whose =
                fs::metadata(socket).map_or("another user's".to_owned(), |found| format!("user {}'s", found.uid()));
            Err(format!("{}: {error}; the daemon there is {whose}", socket.display()).into())
        }
        // Packets are asked for, as a daemon's socket takes them.
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => {
            Err(format!("no daemon at {}: what is there is another program's; name another", socket.display()).into())
        }
        Err(error) => Err(silent(socket, &error)),
    }
}

/// What is to be said of a daemon that is there and does not answer.
fn silent(socket: &Path, error: &io::Error) -> Error {
    format!("the daemon at {} does not answer: {error}", socket.display()).into()
}

/// Pause between two looks at how far a long request is.
const LOOK: Duration = Duration::from_millis(250);

/// As [`ask`], for what may take long: shows meanwhile, on a terminal, how far it is. `how_far` gets the daemon's status
/// before the request, and then again and again; it tells bytes that are done, and of how many.
pub fn ask_and_watch(
    socket: &Path,
    request: &Request,
    what: &'static str,
    how_far: impl Fn(&Status, &Status) -> (u64, u64),
) -> Result<Answer, Error> {
    let mut progress = Progress::new(what);
    // Without a terminal the daemon need not be asked for progress.
    if !progress.is_shown() {
        return ask(socket, request);
    }
    let before = status(socket)?;
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| ask(socket, request).map_err(|error| error.to_string()));
        while !asked.is_finished() {
            std::thread::sleep(LOOK);
            if let Ok(now) = status(socket) {
                let (done, total) = how_far(&before, &now);
                progress.update(done, total.max(done));
            }
        }
        progress.finish();
        asked.join().map_err(|_| "the request's thread ended")?.map_err(Error::from)
    })
}

/// The daemon's status.
pub fn status(socket: &Path) -> Result<Status, Error> {
    status_in(ask(socket, &Request::Status {})?)
}

/// The daemon's status; `None` if no daemon listens there.
pub fn status_of_any(socket: &Path) -> Result<Option<Status>, Error> {
    ask_any(socket, &Request::Status {})?.map(status_in).transpose()
}

fn status_in(answer: Answer) -> Result<Status, Error> {
    match answer {
        Answer::Status(status) => Ok(*status),
        other => Err(format!("the daemon answered {other:?} to a request for its status").into()),
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::ATTACHED_AGENT;
    use pagefold_protocol::seccomp_filter::called_when_attached;
    use std::process::Command;

    /// A seccomp filter of a program that is attached is asked about what is listed; any other call may end the program.
    #[test]
    fn each_system_call_in_the_agents_code_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("agent.so");
        std::fs::write(&image, ATTACHED_AGENT).unwrap();
        let Ok(output) = Command::new("objdump").args(["-d", "--no-show-raw-insn", "-M", "intel"]).arg(&image).output()
        else {
            return println!("SKIPPED: needs objdump");
        };
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> =
            text.lines().map(|line| line.split_once(":\t").map_or("", |(_, code)| code.trim())).collect();
        let listed: Vec<i64> = called_when_attached().collect();
        let mut calls = 0;
        for (at, _) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("syscall")) {
            // The last instruction before it that sets the register with the number.
            let sets = lines[..at].iter().rev().take(60).find_map(|line| {
                let code = line.split_whitespace().collect::<Vec<_>>().join(" ");
                match code.strip_prefix("mov eax,0x").or_else(|| code.strip_prefix("mov rax,0x")) {
                    Some(number) => i64::from_str_radix(number, 16).ok(),
                    None => (code == "xor eax,eax").then_some(0),
                }
            });
            let number = sets.unwrap_or_else(|| panic!("no number before the call at line {at}"));
            // A signal, with which a broken agent ends, is not asked for.
            assert!(listed.contains(&number) || number == libc::SYS_kill, "call {number} is not listed");
            calls += 1;
        }
        assert!(calls > 50, "{calls} calls are found: objdump shows something else");
    }
}
