//! A redis server of a bench's own.

use crate::process::{Running, wait_for};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
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
        let mut stream = self.connect()?;
        let (mut request, mut count) = (String::new(), 0);
        let mut send = |request: &str, count: usize| -> io::Result<()> {
            stream.write_all(request.as_bytes())?;
            let mut answers = vec![0; 5 * count];
            stream.read_exact(&mut answers)?;
            match answers.chunks(5).all(|answer| answer == b"+OK\r\n") {
                true => Ok(()),
                false => Err(io::Error::other("redis-server refuses a value")),
            }
        };
        for (key, value) in entries {
            request += &format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n{value}\r\n", key.len(), value.len());
            count += 1;
            if count == 500 {
                send(&std::mem::take(&mut request), std::mem::take(&mut count))?;
            }
        }
        send(&request, count)
    }
}
