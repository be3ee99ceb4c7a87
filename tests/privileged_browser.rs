//! Chromium: many processes, forked by one that must be alone, in a sandbox that knows few system calls.

mod common;

use common::{Daemon, TOOL, can_merge, finish, installed, is_root, skipped};
use std::path::Path;
use std::process::Command;

/// Works on a heap of some megabytes for a while, then says what came of it.
const PAGE: &str = "<p id=a></p><script>
let l = [], n = 0;
for (let i = 0; i < 100000; i++) l.push({ k: 'key' + i % 1000, v: i });
function step() {
    let s = 0;
    for (const o of l) s += o.v;
    l = l.map(o => ({ ...o }));
    if (++n < 8) setTimeout(step, 200); else a.textContent = 'sum ' + s;
}
step();
</script>";
const SAID: &str = "sum 4999950000";

const OPTIONS: [&str; 6] = [
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--virtual-time-budget=60000",
    "--dump-dom",
];

/// A directory that everybody may enter, with the page in it.
fn place() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("rights");
    std::fs::write(dir.path().join("page.html"), PAGE).expect("a page");
    dir
}

fn page(dir: &Path) -> String {
    format!("file://{}/page.html", dir.display())
}

#[test]
fn a_browser_works_with_all_its_memory_merged_or_cold() {
    if !is_root() || !can_merge() || installed("chromium").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), place());
    for how in ["--manage=all", "--cold"] {
        let mut command = daemon.run(&[how]);
        command.arg("chromium").args(OPTIONS).arg("--no-sandbox").arg(page(dir.path()));
        let home = dir.path().join(how);
        command.arg(format!("--user-data-dir={}", home.join("profile").display())).env("HOME", home);
        let (status, out, err) = finish(&mut command, 120);
        assert!(status.success() && out.contains(SAID), "{how}: {status}\n{out}{err}");
    }
}

/// As another user, so that the browser has its sandbox: namespaces, an empty root directory, filters of system calls.
#[test]
fn a_browser_in_its_sandbox_works_the_same() {
    if !is_root() || !can_merge() {
        return;
    }
    if ["chromium", "unshare", "setpriv"].iter().any(|name| installed(name).is_none()) {
        return;
    }
    let dir = place();
    let at = dir.path();
    assert!(Command::new("cp").arg(TOOL).arg(at.join("pagefold")).status().expect("cp").success());
    // A private /dev/userfaultfd, open to all users of the namespace; all processes end with the namespace.
    let script = format!(
        "set -e; mkdir {at}/dev; mount -t tmpfs tmpfs {at}/dev
        mknod -m 666 {at}/dev/uffd c $(stat -c '0x%t 0x%T' /dev/userfaultfd)
        mount --bind {at}/dev/uffd /dev/userfaultfd
        mkdir {at}/home; chown 65534:65534 {at}/home
        exec setpriv --reuid 65534 --regid 65534 --clear-groups env HOME={at}/home TMPDIR={at}/home \"$@\"",
        at = at.display()
    );
    let sandboxed = |run: &[&str]| {
        let _ = std::fs::remove_dir_all(at.join("dev"));
        let _ = std::fs::remove_dir_all(at.join("home"));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &script, "sh"]);
        command.args(run).arg("chromium").args(OPTIONS).arg(page(at));
        finish(&mut command, 120)
    };
    let (status, out, err) = sandboxed(&[]);
    if !status.success() || !out.contains(SAID) {
        return skipped(&format!("no browser in its sandbox here: {}", err.lines().last().unwrap_or("")));
    }
    let tool = at.join("pagefold").display().to_string();
    for how in ["--backend=agent", "--manage=all", "--cold"] {
        let (status, out, err) = sandboxed(&[&tool, "run", how, "--"]);
        assert!(status.success() && out.contains(SAID), "{how}: {status}\n{out}{err}");
        assert!(!err.contains("CRASHING"), "{how}: {err}");
    }
}
