//! A command of the tool with directories of its own.

use std::process::{Command, Output, Stdio};

/// The tool, and a directory in which it works.
pub struct Tool {
    pub dir: tempfile::TempDir,
}

impl Tool {
    pub fn new() -> Tool {
        Tool { dir: tempfile::tempdir().expect("a directory") }
    }

    /// The tool with stores, mounts and configuration of its own.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("PAGEFOLD_CONFIG", "none").env("PAGEFOLD_STORE", self.dir.path().join("store"));
        command.env("PAGEFOLD_RUNTIME_DIR", self.dir.path().join("run")).env_remove("NO_COLOR");
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the tool runs")
    }

    pub fn socket(&self) -> String {
        self.dir.path().join("s").display().to_string()
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// True if this user can merge here and KSM does not; else says why not.
pub fn merges(tool: &Tool) -> bool {
    if !tool.run(&["doctor"]).status.success() {
        println!("SKIPPED: no merging here: `pagefold doctor` tells more");
        return false;
    }
    if std::fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim() != "0") {
        println!("SKIPPED: KSM is in use");
        return false;
    }
    true
}

/// A tool with a small tree beside it, and what tells something of it and of process `pid`, in an order that works.
pub fn tellers(pid: &str) -> (Tool, Vec<Vec<&str>>) {
    let tool = Tool::new();
    std::fs::create_dir(tool.dir.path().join("tree")).expect("a directory");
    std::fs::write(tool.dir.path().join("tree/file"), vec![7; 100_000]).expect("a file");
    let tellers = vec![
        vec!["image", "build", "--name", "a:1", "tree"],
        vec!["image", "ls"],
        vec!["image", "stat"],
        vec!["image", "verify"],
        vec!["image", "gc", "--dry-run"],
        vec!["image", "scan", "tree"],
        vec!["scan", pid],
        vec!["scan", "--tree", "tree"],
        vec!["disk", "scan", "tree/file"],
        vec!["disk", "status"],
    ];
    (tool, tellers)
}
