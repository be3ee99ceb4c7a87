//! A running program that holds data and obeys by lines: those of `bench/holders`, and helper processes of the benches.

use crate::process::{Running, wait_for};
use pagefold_os::procfs;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// The longest time to load the data, to compare it, or to do what else a line asks for.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// The longest time to end at the end of its input.
const END_MAX: Duration = Duration::from_secs(5);

/// An instance of a kind, ended with its children when this is dropped.
pub struct Instance {
    process: Running,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Instance {
    /// Starts a program.
    pub fn start(command: &mut Command) -> io::Result<Instance> {
        let mut process = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let input = process.0.stdin.take();
        let output = process.0.stdout.take().expect("it is a pipe");
        let (sender, lines) = mpsc::channel();
        // A thread, for the wait for a line has a limit. It ends with the program's output.
        std::thread::spawn(move || {
            let mut said = BufReader::new(output).lines().map_while(Result::ok);
            while said.next().is_some_and(|line| sender.send(line).is_ok()) {}
        });
        Ok(Instance { process, input, lines })
    }

    /// Waits until it holds the data.
    pub fn ready(&self) -> Result<(), String> {
        self.expect("ready")
    }

    /// Gives it a line and waits until it says that all is right.
    pub fn ask(&mut self, line: &str) -> Result<(), String> {
        self.send(line)?;
        self.answer()
    }

    /// Gives it a line.
    pub fn send(&mut self, line: &str) -> Result<(), String> {
        let input = self.input.as_mut().expect("open until the end");
        input.write_all(format!("{line}\n").as_bytes()).map_err(|error| format!("it has ended: {error}"))
    }

    /// Waits until it says that all is right.
    pub fn answer(&self) -> Result<(), String> {
        self.expect("right")
    }

    /// Waits until it says this.
    pub fn expect(&self, wanted: &str) -> Result<(), String> {
        let line = self.line()?;
        if line == wanted { Ok(()) } else { Err(format!("it prints {line:?} instead of {wanted:?}")) }
    }

    /// Waits for its next line.
    pub fn line(&self) -> Result<String, String> {
        self.line_within(ANSWER_MAX)
    }

    /// As [`line`](Self::line), so long at most.
    pub fn line_within(&self, limit: Duration) -> Result<String, String> {
        self.lines.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Disconnected => "it has ended".into(),
            RecvTimeoutError::Timeout => format!("it is silent for {limit:?}"),
        })
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Its processes.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids = vec![self.process.pid()];
        let mut at = 0;
        while let Some(&pid) = pids.get(at) {
            pids.extend(procfs::children(pid));
            at += 1;
        }
        pids
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let pids = self.pids();
        // At the end of its input a script ends its server, which leaves nothing behind then.
        self.input = None;
        let _ = wait_for("its end", END_MAX, || self.process.0.try_wait().ok().flatten());
        for pid in pids.into_iter().rev() {
            // SAFETY: kill(2) takes no pointer. The machine does not give a number again within seconds.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(script: &str) -> Instance {
        Instance::start(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn a_holder_is_right_wrong_or_gone() {
        let mut right = holder("echo ready; read -r line; echo right");
        right.ready().unwrap();
        assert_eq!(right.ask(""), Ok(()));
        for (script, says) in [("echo ready; read -r line; echo wrong", "wrong"), ("echo ready; exit", "ended")] {
            let mut holder = holder(script);
            holder.ready().unwrap();
            assert!(holder.ask("").unwrap_err().contains(says));
        }
        assert!(holder("echo help; cat").ready().is_err() && holder("exit").ready().is_err());
    }

    #[test]
    fn children_end_with_their_instance() {
        let instance = holder("sleep 600 & echo ready; read -r line");
        instance.ready().unwrap();
        let pids = instance.pids();
        assert_eq!(pids.len(), 2);
        drop(instance);
        let ended = || !pids.iter().any(|pid| procfs::start_time_of_running(*pid).is_some());
        wait_for("their end", Duration::from_secs(5), || ended().then_some(())).unwrap();
    }
}
