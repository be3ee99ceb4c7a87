//! A systemd of a test's own, with the packaged units.

use super::{Reaped, TOOL, installed, skipped};
use std::path::Path;
use std::process::{Command, Stdio};

/// What a probe says that runs in a systemd of its own, beside services that start `program`; the script
/// `tests/programs/NAME.sh` writes both. `None` after saying why no systemd comes up here.
pub fn probe(program: &Path, name: &str) -> Option<String> {
    installed("unshare")?;
    if !["/usr/lib/systemd/systemd", "/lib/systemd/systemd"].iter().any(|path| Path::new(path).exists()) {
        skipped("systemd is not installed");
        return None;
    }
    let source = |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let dir = tempfile::tempdir().expect("a directory");
    let mut trial = Command::new("unshare");
    trial.args(["--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc", "--net", "sh"]);
    trial.arg(source("tests/programs/systemd.sh")).arg(dir.path()).arg(TOOL).arg(program).arg(source("dist"));
    trial.arg(source(&format!("tests/programs/{name}.sh"))).stdin(Stdio::null()).stdout(Stdio::null());
    let mut trial = Reaped(
        trial.stderr(std::fs::File::create(dir.path().join("errors")).expect("a file")).spawn().expect("unshare"),
    );
    let said = || std::fs::read_to_string(dir.path().join("said")).unwrap_or_default();
    let began = std::time::Instant::now();
    while !said().lines().any(|line| line == "END") {
        let ended = trial.0.try_wait().expect("wait").is_some();
        // One that comes up says so soon; what it then does may take its time on a busy machine.
        let limit = if said().is_empty() { 120 } else { 900 };
        if ended || began.elapsed().as_secs() > limit {
            let errors = std::fs::read_to_string(dir.path().join("errors")).unwrap_or_default();
            assert!(said().is_empty(), "systemd ended in the middle: {}\n{errors}", said());
            skipped(&format!("no systemd of our own comes up here: {}", errors.lines().last().unwrap_or("")));
            return None;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    Some(said())
}
