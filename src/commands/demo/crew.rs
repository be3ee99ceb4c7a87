//! The processes of the demonstration, which are told what to do by lines and answer by lines.

use super::interrupt::{LOOK, end_with_us, go_on};
use crate::error::Error;
use pagefold_os::procfs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// What a process says when it has done what it was told, before anything else on the line.
pub(super) struct Answers(Vec<String>);

impl Answers {
    /// How many begin with `wanted`.
    pub(super) fn count(&self, wanted: &str) -> usize {
        self.0.iter().filter(|line| line.starts_with(wanted)).count()
    }

    /// Sum of the numbers behind the first word.
    pub(super) fn sum(&self) -> u64 {
        self.0.iter().filter_map(|line| line.split_once(' ')?.1.parse::<u64>().ok()).sum()
    }
}

/// The processes, their pipes, and that they end with us.
pub(super) struct Crew(Vec<(Child, ChildStdin, BufReader<ChildStdout>)>);

impl Crew {
    pub(super) fn start(processes: usize, size: u64, environment: &[(String, String)]) -> Result<Crew, Error> {
        let mut crew = Crew(Vec::new());
        for number in 0..processes {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args(["demo-client", &size.to_string(), &number.to_string()])
                .env_remove("LD_PRELOAD")
                .envs(environment.iter().cloned())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            let mut child = end_with_us(&mut command, libc::SIGKILL).spawn()?;
            let pipes = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
            crew.0.push((child, pipes.0, BufReader::new(pipes.1)));
        }
        crew.answers()?;
        Ok(crew)
    }

    /// Tells all the same, and waits for what they answer.
    pub(super) fn tell(&mut self, line: &str) -> Result<Answers, Error> {
        for (_, input, _) in &mut self.0 {
            writeln!(input, "{line}")?;
        }
        self.answers()
    }

    /// Reads one line of each.
    fn answers(&mut self) -> Result<Answers, Error> {
        let mut answers = Answers(Vec::new());
        for (child, _, output) in &mut self.0 {
            // Each answers by one line: nothing of it was read before.
            let mut answer = [libc::pollfd { fd: output.get_ref().as_raw_fd(), events: libc::POLLIN, revents: 0 }];
            while pagefold_os::fd::poll(&mut answer, LOOK.as_millis() as i32).map_err(std::io::Error::from)? == 0 {
                go_on()?;
            }
            let mut line = String::new();
            if output.read_line(&mut line)? == 0 {
                return Err(format!("process {} of the demonstration ended: {}", child.id(), child.wait()?).into());
            }
            answers.0.push(line.trim_end().to_owned());
        }
        Ok(answers)
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = i32> {
        self.0.iter().map(|(child, ..)| child.id() as i32)
    }

    /// What they use together, as the kernel counts it.
    pub(super) fn pss(&self) -> u64 {
        self.pids().filter_map(|pid| procfs::memory(pid).ok()).map(|memory| memory.pss).sum()
    }

    /// Has each compare every byte; returns how many found all of them right.
    pub(super) fn check(&mut self) -> Result<usize, Error> {
        Ok(self.tell("check")?.count("intact"))
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for (child, ..) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
