//! Programs that a test writes and then runs.
//!
//! Another process writes them. A child that a test beside this one forks has copies of all of our descriptors until it
//! executes its program, and the kernel runs no program that is open for writing.

#![allow(dead_code)]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// A copy that everybody may run.
pub fn copy(program: &Path, at: &Path) {
    let program = File::open(program).expect("the program");
    assert!(writer(at).stdin(program).status().expect("sh runs").success(), "{}", at.display());
}

/// A script that everybody may run.
pub fn script(text: &str, at: &Path) {
    let mut child = writer(at).stdin(Stdio::piped()).spawn().expect("sh runs");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads all");
    assert!(child.wait().expect("it ends").success(), "{}", at.display());
}

fn writer(at: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "cat > \"$1\" && chmod 755 \"$1\"", "sh"]).arg(at);
    command
}
