//! Signals and descriptors that a started program inherits.

use crate::common;
use crate::tool::{Tool, merges, text};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What `command` with `args` says, started with SIGPIPE ignored or not, a signal blocked and a standard descriptor closed.
fn begun(mut command: Command, args: &[&str], ignored: bool, closed: libc::c_int) -> (Option<i32>, String) {
    let begin = move || {
        // SAFETY: system calls that are safe between fork and exec, on a set that is filled first.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGUSR1);
            libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            libc::signal(libc::SIGPIPE, if ignored { libc::SIG_IGN } else { libc::SIG_DFL });
            libc::close(closed);
        }
        Ok(())
    };
    // SAFETY: `begin` makes only calls that are allowed between fork and exec.
    unsafe { command.args(args).pre_exec(begin) };
    let output = command.output().expect("it runs");
    (output.status.code(), text(&output.stdout))
}

/// Programs that tell how they began.
const TELL: [[&str; 4]; 2] =
    [["/bin/grep", "-E", "SigBlk|SigIgn", "/proc/self/status"], ["/bin/ls", "-1", "-U", "/proc/self/fd"]];

/// As if it had been started without the tool: signals that are ignored or blocked stay so, and what is closed is closed.
#[test]
fn run_passes_signals_and_descriptors_on() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    let daemon = common::Daemon::start(&["--no-keeper"]);
    for (ignored, closed) in [(true, 0), (false, 2)] {
        for args in TELL {
            let plain = begun(Command::new(args[0]), &args[1..], ignored, closed);
            assert_eq!(begun(daemon.run(&[]), &args, ignored, closed), plain, "{args:?}");
        }
    }
}

#[test]
fn image_exec_passes_signals_and_descriptors_on() {
    let tool = Tool::new();
    let tree = tool.dir.path().join("tree");
    for dir in ["usr", "proc"] {
        std::fs::create_dir_all(tree.join(dir)).expect("a directory");
    }
    for dir in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{dir}"), tree.join(dir)).expect("a link");
    }
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let exec = ["image", "exec", "a:1", "--bind", "/usr:/usr", "--"];
    let can = tool.command(&exec).arg("/bin/true").output().expect("the tool runs");
    if !can.status.success() {
        return println!("SKIPPED: image exec cannot run a program here: {}", text(&can.stderr));
    }
    for (ignored, closed) in [(true, 0), (false, 2)] {
        for args in TELL {
            let plain = begun(Command::new(args[0]), &args[1..], ignored, closed);
            assert_eq!(begun(tool.command(&exec), &args, ignored, closed), plain, "{args:?}");
        }
    }
}
