//! The tool's daemon, for parts that measure programs under it.

use crate::group::Group;
use crate::process::{self, Running, wait_for};
use crate::restore::{self, Undo};
use pagefold_daemon::cold::ClientSelector;
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::status::Status;
use pagefold_os::procfs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A daemon of the tool, ended with this value.
pub struct Daemon {
    tool: PathBuf,
    /// Its control socket.
    pub socket: PathBuf,
    process: Running,
    _folder: Undo,
}

impl Daemon {
    /// Starts `pagefold daemon` with these options, and not at idle priority. It has no keeper, which would outlive it.
    pub fn start(options: &[&str]) -> io::Result<Daemon> {
        Daemon::start_in(None, options)
    }

    /// As [`start`](Self::start). In a group it has a keeper as well: what is left in the group ends with it.
    pub fn start_in(group: Option<&Group>, options: &[&str]) -> io::Result<Daemon> {
        let (tool, (dir, folder)) = (process::tool()?, restore::folder("daemon")?);
        let socket = dir.join("daemon.sock");
        let mut command = Command::new(&tool);
        command.args(["daemon", "--priority=normal"]).args(options).arg("--socket").arg(&socket);
        match group {
            Some(group) => group.adopt(&mut command),
            None => drop(command.arg("--no-keeper")),
        }
        let process = Running::start(command.stdin(Stdio::null()).stdout(Stdio::null()))?;
        let daemon = Daemon { tool, socket, process, _folder: folder };
        wait_for("the daemon", Duration::from_secs(20), || daemon.status().ok())?;
        Ok(daemon)
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Words that start a program as a client: the tool, `run`, these options.
    pub fn run(&self, options: &[&str]) -> Vec<String> {
        let (tool, socket) = (self.tool.display().to_string(), self.socket.display().to_string());
        [&[&*tool, "run"], options, &["--socket", &socket, "--"]].concat().into_iter().map(str::to_owned).collect()
    }

    /// Its status, without the look at unmanaged memory: asked many times a second, that would be measured.
    pub fn status(&self) -> io::Result<Status> {
        match control::ask(&self.socket, &Request::Counts {})? {
            Answer::Status(status) => Ok(*status),
            other => Err(io::Error::other(format!("the daemon answered {other:?}"))),
        }
    }

    /// Attaches a program that runs already.
    pub fn attach(&self, pid: i32) -> io::Result<()> {
        let mut command = Command::new(&self.tool);
        command.args(["attach", "--socket"]).arg(&self.socket).arg(pid.to_string());
        process::output(&mut command).map(drop)
    }

    /// Its memory, less what the kernel may take back at any time: the pages of its program.
    pub fn own_bytes(&self) -> io::Result<u64> {
        let memory = procfs::memory(self.pid())?;
        Ok(memory.anonymous + memory.pss_shared_memory + self.status()?.totals.mapping_bytes)
    }

    /// Evicts the memory of all cold clients; returns the pages.
    pub fn park(&self) -> io::Result<u64> {
        moved(&self.socket, &Request::Park { clients: ClientSelector::All })
    }
}

/// Has a daemon evict or load memory back; returns the pages.
pub fn moved(socket: &Path, request: &Request) -> io::Result<u64> {
    match control::ask(socket, request)? {
        Answer::Moved { pages, .. } => Ok(pages),
        other => Err(io::Error::other(format!("the daemon answered {other:?}"))),
    }
}
