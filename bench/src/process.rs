//! Programs that the benches start: they end with the run, and what they print is checked.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Any error of a bench.
pub type Failure = Box<dyn std::error::Error>;

/// A program that is killed and reaped when this is dropped.
pub struct Running(pub Child);

impl Running {
    /// Starts a program; an error names it.
    pub fn start(command: &mut Command) -> io::Result<Running> {
        command.spawn().map(Running).map_err(|error| named(command, error))
    }

    /// As [`Running::start`], without input and output.
    pub fn start_silent(command: &mut Command) -> io::Result<Running> {
        Running::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn named(command: &Command, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", command.get_program().to_string_lossy()))
}

/// Runs a program to its end and returns what it printed.
pub fn output(command: &mut Command) -> io::Result<String> {
    let Output { status, stdout, stderr } =
        command.stdin(Stdio::null()).output().map_err(|error| named(command, error))?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let name = command.get_program().to_string_lossy().into_owned();
    Err(io::Error::other(format!("{name}: {status}: {}", String::from_utf8_lossy(&stderr).trim())))
}

/// Runs a program with these arguments to its end.
pub fn run(program: &str, args: &[&str]) -> io::Result<()> {
    output(Command::new(program).args(args)).map(drop)
}

/// Runs a script of the shell, which ends at the first failure.
pub fn sh(script: &str) -> io::Result<()> {
    run("sh", &["-ec", script]).map_err(|error| io::Error::other(format!("{script}: {error}")))
}

/// This program again, as a helper of a bench.
pub fn own(bench: &str) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(bench);
    Ok(command)
}

/// The tool, which cargo builds beside this program.
pub fn tool() -> io::Result<PathBuf> {
    beside("pagefold")
}

/// A program of ours, which cargo builds beside this one.
pub fn beside(name: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name(name);
    match program.exists() {
        true => Ok(program),
        false => Err(io::Error::other(format!("{} is not built: cargo build --release", program.display()))),
    }
}

/// An address of this machine that is free at this moment. If another process takes it first, the server that was meant to
/// have it ends, and the bench with it.
pub fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// Asks every few milliseconds until `ready` returns a value.
/// Fails after `limit`, and names `what`.
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Option<T>) -> io::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(value) = ready() {
            return Ok(value);
        }
        if began.elapsed() > limit {
            return Err(io::Error::other(format!("{what}: not within {limit:?}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A counter of the kernel's since the machine started; 0 where the kernel does not have it.
pub fn vmstat(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0)
}

/// True for root.
pub fn is_root() -> bool {
    pagefold_os::user::effective() == 0
}

/// Processor time of this process (`RUSAGE_SELF`) or of its ended children (`RUSAGE_CHILDREN`), in seconds.
pub fn cpu_s(of: libc::c_int) -> f64 {
    // SAFETY: an all-zero rusage is valid, and the kernel writes into ours only.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(of, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_named_in_the_error() {
        assert!(run("pagefold-no-such-tool", &[]).unwrap_err().to_string().contains("pagefold-no-such-tool"));
        assert!(run("false", &[]).is_err());
        assert!(wait_for("nothing", Duration::ZERO, || None::<()>).unwrap_err().to_string().contains("nothing"));
    }
}
