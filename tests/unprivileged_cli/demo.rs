//! `pagefold demo` leaves neither processes nor files.

use crate::tool::{Tool, merges, text};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

#[test]
fn a_demonstration_leaves_nothing_but_the_agent() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    // Settings of the user's daemon do not apply to the daemon of the demonstration.
    let file = tool.dir.path().join("c.toml");
    std::fs::write(&file, "[daemon]\nmetrics = \"unix:/nowhere/at/all\"\n").expect("a file");
    let mut demo = tool.command(&["demo", "--no-ksm", "--processes", "2", "--size", "4M"]);
    let shown = demo.env("PAGEFOLD_CONFIG", &file).output().expect("the tool runs");
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    assert!(text(&shown.stdout).contains("after: the processes and pagefold's daemon"), "{}", text(&shown.stdout));
    let left = left_by_demo(&tool);
    assert!(left.is_empty(), "{left:?}");
}

/// Names in the runtime directory that are no agent's.
fn left_by_demo(tool: &Tool) -> Vec<String> {
    let left = std::fs::read_dir(tool.dir.path().join("run")).expect("the runtime directory");
    let left = left.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"));
    left.filter(|name| !name.starts_with("pagefold-agent-")).collect()
}

#[test]
fn a_demonstration_that_is_ended_leaves_no_process() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
        let mut demo = tool.command(&["demo", "--no-ksm", "--processes", "2", "--size", "4M"]);
        // Daemon and processes have the same standard error.
        let mut demo = demo.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let (sender, lines) = std::sync::mpsc::channel();
        let errors = BufReader::new(demo.stderr.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in errors.lines() {
                let _ = sender.send(line.expect("a line"));
            }
        });
        let patience = Duration::from_secs(300);
        let mut said = Vec::new();
        while said.len() < 2 {
            said.push(lines.recv_timeout(patience).unwrap_or_else(|_| panic!("the demo begins: {said:?}")));
        }
        // SAFETY: kill takes no pointers. The child was not waited for, so its pid is not reused.
        unsafe { libc::kill(demo.id() as i32, signal) };
        let ended = loop {
            match lines.recv_timeout(patience) {
                Ok(line) => said.push(line),
                Err(why) => break why,
            }
        };
        demo.wait().expect("its end");
        assert_eq!(ended, RecvTimeoutError::Disconnected, "{signal}: somebody lives: {said:?}");
        let mut left = left_by_demo(&tool);
        // A killed process cannot remove its lock file.
        left.retain(|name| signal != libc::SIGKILL || !name.ends_with(".lock"));
        assert!(left.is_empty(), "{signal}: {left:?}");
    }
}
