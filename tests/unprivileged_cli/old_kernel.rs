//! On a kernel before 6.8 every command that needs a newer one says so in one line, and `run` runs the program without
//! merging.
//!
//! On a newer kernel the tests ask it to call itself 2.6 (`personality(2)`), which commands that go by the kernel's number
//! believe. Calls that an old kernel really lacks fail only in a guest with such a kernel (`tests/kernels/run 6.1`).

use crate::tool::{Tool, text};
use std::os::unix::process::CommandExt;
use std::process::Output;

/// Runs the tool under a kernel that calls itself older than 6.8.
fn run(tool: &Tool, args: &[&str]) -> Output {
    const UNAME26: libc::c_ulong = 0x002_0000;
    let mut command = tool.command(args);
    if !is_old() {
        // SAFETY: personality(2) changes a flag of the child alone, and is safe between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::personality(UNAME26) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            })
        };
    }
    command.output().expect("the tool runs")
}

/// The kernel that runs the test is older than 6.8.
fn is_old() -> bool {
    pagefold_os::probe::too_old().is_some()
}

#[test]
fn commands_refuse_an_old_kernel_in_one_line() {
    let tool = Tool::new();
    let socket = tool.socket();
    let mut cases = vec![
        (vec!["daemon", "--socket", &socket], "6.8", 1),
        (vec!["demo", "--processes", "2", "--size", "1M"], "6.8", 1),
        (vec!["run", "--backend", "agent", "--socket", &socket, "--", "true"], "6.8", 125),
        (vec!["run", "--cold", "--socket", &socket, "--", "true"], "6.8", 125),
        (vec!["run", "--domain", "a", "--socket", &socket, "--", "true"], "6.8", 125),
    ];
    if is_old() {
        cases.push((vec!["run", "--backend", "ksm", "--", "true"], "6.4", 125));
        cases.push((vec!["scan", "--all"], "6.8", 1));
    }
    for (args, needed, code) in cases {
        let output = run(&tool, &args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        assert!(said.contains(&format!("{needed} or later")), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn a_program_runs_unmerged_on_an_old_kernel() {
    let tool = Tool::new();
    let socket = tool.socket();
    let output = run(&tool, &["run", "--socket", &socket, "--", "echo", "works"]);
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), "works\n");
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("kernel 6.8 or later"), "{said}");
    assert!(!std::path::Path::new(&socket).exists(), "a daemon was started");
}
