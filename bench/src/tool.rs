//! The tool's daemon, for parts that measure programs under `pagefold run`.

use crate::process::{self, Running, wait_for};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A daemon of the tool, ended with this value.
pub struct Daemon {
    tool: PathBuf,
    socket: PathBuf,
    _process: Running,
}

impl Daemon {
    /// Starts `pagefold daemon` with these options and a socket in `dir`. It has no keeper, which would outlive it.
    pub fn start(dir: &Path, options: &[&str]) -> io::Result<Daemon> {
        let (tool, socket) = (process::tool()?, dir.join("daemon.sock"));
        let mut command = Command::new(&tool);
        command
            .args(["daemon", "--no-keeper"])
            .args(options)
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let daemon = Daemon { _process: Running::start(&mut command)?, tool, socket };
        wait_for("the daemon", Duration::from_secs(20), || daemon.status().ok())?;
        Ok(daemon)
    }

    /// Words that start a program as a client: the tool, `run`, these options.
    pub fn run(&self, options: &[&str]) -> Vec<String> {
        let (tool, socket) = (self.tool.display().to_string(), self.socket.display().to_string());
        [&[&*tool, "run"], options, &["--socket", &socket, "--"]].concat().into_iter().map(str::to_owned).collect()
    }

    /// Its status.
    pub fn status(&self) -> io::Result<Value> {
        let text = process::output(Command::new(&self.tool).args(["status", "--json", "--socket"]).arg(&self.socket))?;
        serde_json::from_str(&text).map_err(io::Error::other)
    }

    /// Attaches a program that runs already.
    pub fn attach(&self, pid: i32) -> io::Result<()> {
        let mut command = Command::new(&self.tool);
        command.args(["attach", "--socket"]).arg(&self.socket).arg(pid.to_string());
        process::output(&mut command).map(drop)
    }

    /// Evicts the memory of all cold clients.
    pub fn park(&self) -> io::Result<()> {
        process::output(Command::new(&self.tool).args(["park", "--all", "--socket"]).arg(&self.socket)).map(drop)
    }
}
