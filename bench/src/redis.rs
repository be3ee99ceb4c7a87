//! A redis server of a bench's own.

use crate::process::{Running, wait_for};
use std::io::{self, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A server on a socket in a folder, ended with this value.
pub struct Redis {
    /// Its process.
    pub process: Running,
    /// Its socket.
    pub socket: PathBuf,
}

impl Redis {
    /// Starts the server `command`, which may be run by another program.
    pub fn start(mut command: Command, folder: &Path) -> io::Result<Redis> {
        let socket = folder.join("redis.sock");
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(&socket);
        let process = Running::start_silent(command.current_dir(folder))?;
        let redis = Redis { process, socket };
        redis.connect().map(|_| redis)
    }

    /// A connection.
    pub fn connect(&self) -> io::Result<UnixStream> {
        wait_for("redis-server", Duration::from_secs(20), || UnixStream::connect(&self.socket).ok())
    }

    /// Sets keys to values.
    pub fn set(&self, entries: impl Iterator<Item = (String, String)>) -> io::Result<()> {
        let mut client = Command::new("redis-cli");
        client.arg("-s").arg(&self.socket).arg("--pipe").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut client = Running::start(&mut client)?;
        let mut input = BufWriter::new(client.0.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?);
        for (key, value) in entries {
            write!(input, "*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n{value}\r\n", key.len(), value.len())?;
        }
        drop(input.into_inner()?);
        let status = client.0.wait()?;
        status.success().then_some(()).ok_or_else(|| io::Error::other("redis-server refuses a value"))
    }
}
