//! The two sides of a comparison under a limit of memory: a daemon with the cold tier, and zswap.

use super::kernel::Zswap;
use crate::undo::Undo;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts a program that ends with the run.
pub fn start(mut command: Command) -> io::Result<(u32, Undo)> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child: Child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
    let pid = child.id();
    let end = Undo::later(move || {
        let _ = child.kill();
        let _ = child.wait();
    });
    Ok((pid, end))
}

/// What a tool says.
///
/// # Errors
/// What it says when it fails.
pub fn said(command: &mut Command) -> io::Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// How long a program may take until it answers.
const PATIENCE: Duration = Duration::from_secs(20);

/// Connects to who is about to listen.
pub fn connect(socket: &Path) -> io::Result<UnixStream> {
    let end = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(socket) {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            other => return other,
        }
    }
}

/// Who looks after the memory of a program.
pub enum Side {
    /// A daemon of ours.
    Tier {
        tool: PathBuf,
        socket: PathBuf,
        _daemon: Undo,
    },
    Zswap {
        _on: Zswap,
    },
}

impl Side {
    /// Readies one: `tier`, with files in `dir`, or zswap over a swap file of `swap_bytes`.
    pub fn start(tier: bool, dir: &Path, swap_bytes: u64) -> io::Result<Side> {
        if !tier {
            return Ok(Side::Zswap { _on: Zswap::start(swap_bytes)? });
        }
        let tool = std::env::current_exe()?.with_file_name("pagefold");
        if !tool.exists() {
            return Err(io::Error::other(format!("{} is not built: cargo build --release", tool.display())));
        }
        let socket = dir.join("d");
        let mut command = Command::new(&tool);
        command.args(["daemon", "--priority=normal", "--no-keeper", "--tier-dir", "none", "--socket"]).arg(&socket);
        let (_, daemon) = start(command)?;
        let side = Side::Tier { tool, socket, _daemon: daemon };
        let end = Instant::now() + PATIENCE;
        while let Err(error) = side.status() {
            if Instant::now() > end {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(side)
    }

    /// As rows call it.
    pub fn name(tier: bool) -> String {
        if tier { "cold tier".to_owned() } else { format!("zswap, {}", Zswap::compressor()) }
    }

    /// A program whose memory is looked after.
    pub fn program(&self, name: &str) -> Command {
        match self {
            Side::Tier { tool, socket, .. } => {
                let mut command = Command::new(tool);
                command.args(["run", "--cold", "--socket"]).arg(socket).arg("--").arg(name);
                command
            }
            Side::Zswap { .. } => Command::new(name),
        }
    }

    /// Puts out what goes, so that a limit can be set; the kernel does that itself when it is.
    pub fn park(&self) -> io::Result<()> {
        if let Side::Tier { tool, socket, .. } = self {
            said(Command::new(tool).args(["park", "--all", "--socket"]).arg(socket))?;
        }
        Ok(())
    }

    /// The daemon's status; null with zswap.
    pub fn status(&self) -> io::Result<serde_json::Value> {
        let Side::Tier { tool, socket, .. } = self else { return Ok(serde_json::Value::Null) };
        let text = said(Command::new(tool).args(["status", "--json", "--socket"]).arg(socket))?;
        serde_json::from_str(&text).map_err(io::Error::other)
    }
}
