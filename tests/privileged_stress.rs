//! Programs that fill memory and compare it, with all their memory managed.

mod common;

use common::{Daemon, can_merge, finish, installed};

#[test]
fn stress_ng_finds_no_wrong_bit() {
    if !can_merge() || installed("stress-ng").is_none() {
        return;
    }
    let daemon = Daemon::start(&[]);
    let mut command = daemon.run(&["--manage=all"]);
    command.args(["stress-ng", "--vm", "2", "--vm-bytes", "96m", "--vm-method", "all", "--vm-hang", "1", "--verify"]);
    let (status, out, err) = finish(command.args(["-t", "12", "--oomable"]), 300);
    assert!(status.success(), "{status}\n{out}{err}");
    assert!(!out.contains("error") && !err.contains("error"), "{out}{err}");
    assert!(daemon.total("pages_merged") > 0, "nothing was merged");
}

#[test]
fn python_keeps_its_heap() {
    let Some(program) = common::python().filter(|_| can_merge()) else { return };
    let script = "
import time, hashlib, gc
blocks = [bytes([i % 7]) * 1_500_000 for i in range(40)]
words = {i: ('word %d ' % i) * 20 for i in range(100_000)}
copy = [b[:-1] + b'x' for b in blocks]
def digest():
    h = hashlib.sha256()
    for b in blocks + copy: h.update(b)
    for i in range(100_000): h.update(words[i].encode())
    return h.hexdigest()
first = digest()
for turn in range(6):
    time.sleep(0.7)
    copy = [bytes(bytearray(b)) for b in copy]
    gc.collect()
    assert digest() == first, 'bytes changed in turn %d' % turn
";
    let daemon = Daemon::start(&[]);
    let (status, out, err) = finish(daemon.run(&["--manage=all"]).args([program, "-c", script]), 300);
    assert!(status.success(), "{status}\n{out}{err}");
    assert!(daemon.total("pages_merged") > 0, "nothing was merged");
}
