//! `docs/json.md` against what the commands print: every key that is printed is described with its type, and every key
//! that is described is printed where its place is.

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Past the harness, which hides the output of tests that pass.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Ends with its handle.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Key {
    kind: String,
    /// May be left out.
    optional: bool,
}

/// What the page says of one document: keys in its notation.
struct Described(BTreeMap<String, Key>);

impl Described {
    fn of(command: &str) -> Described {
        let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/json.md")).expect("a page");
        let heading = format!("## `{command}`\n");
        let section = page.split(&heading).nth(1).unwrap_or_else(|| panic!("docs/json.md does not describe {command}"));
        let section = section.split("\n## ").next().unwrap_or_default();
        let mut keys = BTreeMap::new();
        for line in section.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let key = Key { kind: cells[1].to_owned(), optional: cells[2].contains("bsent") };
            keys.insert(cells[0].trim_matches('`').to_owned(), key);
        }
        assert!(!keys.is_empty(), "{command}");
        Described(keys)
    }

    fn below(&self, path: &str) -> bool {
        self.0.keys().any(|key| key.starts_with(path) && key.len() > path.len())
    }

    /// Compares `value` at `path`, and all that is in it.
    fn check(&self, path: &str, value: &Value) {
        if let Some(Key { kind, .. }) = self.0.get(path) {
            let fits = match value {
                Value::Null => kind.ends_with("or null"),
                Value::Bool(_) => kind.starts_with("true or false"),
                Value::Number(number) => kind.starts_with("number") || kind.starts_with("integer") && !number.is_f64(),
                Value::String(_) => kind.starts_with("string"),
                Value::Array(_) => kind.starts_with("list"),
                Value::Object(_) => kind.starts_with("object"),
            };
            assert!(fits, "{path} is {value:.100}, and docs/json.md says {kind}");
        } else {
            let implied = path.is_empty() || path.ends_with("[]") || path.ends_with(".*");
            assert!(implied, "{path} is not in docs/json.md; it is {value:.100}");
        }
        match value {
            Value::Array(entries) => entries.iter().for_each(|entry| self.check(&format!("{path}[]"), entry)),
            Value::Object(entries) => {
                let base = if path.is_empty() { String::new() } else { format!("{path}.") };
                // Names that are data: nothing is said below, or it is said for every name.
                let any = !path.is_empty() && (!self.below(&base) || self.below(&format!("{base}*")));
                for (name, entry) in entries {
                    self.check(&format!("{base}{}", if any { "*" } else { name }), entry);
                }
                let own = |key: &&String| {
                    key.strip_prefix(&base).is_some_and(|rest| !rest.is_empty() && !rest.contains(['.', '[', '*']))
                };
                for key in self.0.keys().filter(own) {
                    let name = &key[base.len()..];
                    assert!(
                        any || self.0[key].optional || entries.contains_key(name),
                        "{key} is described, and not there"
                    );
                }
            }
            _ => {}
        }
    }
}

fn check(command: &str, value: &Value) {
    Described::of(command).check("", value);
}

struct Tool {
    dir: tempfile::TempDir,
}

impl Tool {
    fn new() -> Tool {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(dir.path().join("tree/below")).expect("directories");
        for (name, byte) in [("tree/one", 7), ("tree/two", 7), ("tree/below/three", 8)] {
            std::fs::write(dir.path().join(name), vec![byte; 300_000]).expect("a file");
        }
        Tool { dir }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("PAGEFOLD_CONFIG", "none").env("PAGEFOLD_STORE", self.dir.path().join("store"));
        command.env("PAGEFOLD_RUNTIME_DIR", self.dir.path().join("run"));
        command
    }

    fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the tool runs")
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.output(args);
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{args:?}: {error}: {}", String::from_utf8_lossy(&output.stderr)))
    }
}

#[test]
fn a_key_that_is_not_described_is_found() {
    let wrong = |value: Value| std::panic::catch_unwind(|| check("pagefold pause", &value)).is_err();
    assert!(!wrong(serde_json::json!({ "count": 1 })));
    assert!(wrong(serde_json::json!({ "count": 1, "more": 2 })));
    assert!(wrong(serde_json::json!({ "count": "1" })));
    assert!(wrong(serde_json::json!({})));
}

#[test]
fn scans_images_and_doctor() {
    let tool = Tool::new();
    let pid = std::process::id().to_string();
    check("pagefold doctor", &tool.json(&["doctor", "--json"]));
    let beside = tool.json(&["scan", "--json", &pid, "tree/one", "tree/two", "no-such-file"]);
    assert!(!beside["notes"].as_array().expect("notes").is_empty());
    check("pagefold scan", &beside);
    check("pagefold scan --tree", &tool.json(&["scan", "--json", "--tree", "tree"]));
    check("pagefold scan --tree", &tool.json(&["image", "scan", "--json", "tree"]));
    check("pagefold disk scan", &tool.json(&["disk", "scan", "--json", "tree/one", "tree/two", "no-such-file"]));
    check("pagefold image build", &tool.json(&["image", "build", "--json", "--name", "a:1", "tree"]));
    assert!(tool.output(&["image", "export", "--format", "oci", "a:1", "layout"]).status.success());
    check("pagefold image build", &tool.json(&["image", "import", "--json", "--name", "b:1", "layout"]));
    check("pagefold image ls", &tool.json(&["image", "ls", "--json"]));
    let files = tool.output(&["image", "ls", "--json", "a:1"]);
    let lines = String::from_utf8(files.stdout).expect("text");
    assert!(lines.lines().count() >= 4, "{lines}");
    for line in lines.lines() {
        check("pagefold image ls NAME", &serde_json::from_str(line).expect("JSON"));
    }
    check("pagefold image stat", &tool.json(&["image", "stat", "--json"]));
    check("pagefold image stat --any", &tool.json(&["image", "stat", "--json", "--any", "tree"]));
    check("pagefold image verify", &tool.json(&["image", "verify", "--json"]));
    check("pagefold image gc", &tool.json(&["image", "gc", "--json"]));
    let at = tool.dir.path().join("mounted");
    std::fs::create_dir(&at).expect("a directory");
    let mounted = tool.output(&["image", "mount", "--json", "a:1", "mounted"]);
    if mounted.status.success() {
        check("pagefold image mount", &serde_json::from_slice(&mounted.stdout).expect("JSON"));
        assert!(tool.output(&["image", "umount", "mounted"]).status.success());
        lazy_mount(&tool);
    } else {
        skipped(&format!("image mount --json: {}", String::from_utf8_lossy(&mounted.stderr)));
    }
}

/// Mounts image `a:1` of a fleet's store into a store that has nothing of it.
fn lazy_mount(tool: &Tool) {
    if !Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("pagefold-remote").exists() {
        return skipped("image mount --lazy: pagefold-remote is not built: cargo build -p pagefold-remote");
    }
    std::fs::create_dir(tool.dir.path().join("fleet")).expect("a directory");
    let address = format!("file://{}/fleet/a:1", tool.dir.path().display());
    assert!(tool.output(&["image", "push", "a:1", &address]).status.success());
    let mount = |name: &str| tool.output(&["image", "--store", "other", "mount", "--lazy", "--json", name, "mounted"]);
    let mounted = mount(&address);
    let said = String::from_utf8_lossy(&mounted.stderr);
    check("pagefold image mount", &serde_json::from_slice(&mounted.stdout).unwrap_or_else(|_| panic!("{said}")));
    assert_eq!(std::fs::read(tool.dir.path().join("mounted/one")).expect("a file"), vec![7; 300_000]);
    assert!(tool.output(&["image", "umount", "mounted"]).status.success());
    for (name, why) in [("a:1", "give an address"), (&*address.replace("a:1", "b:1"), "no such image")] {
        let refused = mount(name);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(why) && said.lines().count() == 1, "{said}");
    }
}

const CLIENT: &str = "import mmap,time\nm=mmap.mmap(-1,4096*800,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n\
                      m[:]=bytes([7])*len(m)\nprint('ready',flush=True)\ntime.sleep(600)";

#[test]
fn a_daemon_with_clients_and_a_mount() {
    let tool = Tool::new();
    let (socket, web) = (tool.dir.path().join("s").display().to_string(), tool.dir.path().join("w"));
    let place = format!("unix:{}", web.display());
    // A keeper would start another daemon when this one is killed at the end.
    let mut daemon = tool.command(&[
        "daemon",
        "--priority=normal",
        "--no-keeper",
        "--scan-interval",
        "200ms",
        "--socket",
        &socket,
        "--web",
        &place,
    ]);
    let mut daemon = Running(daemon.stderr(Stdio::piped()).spawn().expect("the daemon starts"));
    let wait = |what: &str, done: &mut dyn FnMut() -> bool| {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < Duration::from_secs(180), "waited in vain for {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    wait("the daemon", &mut || web.exists() || daemon.0.try_wait().expect("a state").is_some());
    let status = |part: &str| tool.json(&["status", "--json", "--socket", &socket])[part].clone();
    if !web.exists() || !tool.output(&["doctor"]).status.success() {
        return skipped("no merging here: see pagefold doctor");
    }
    // A mount of disk images, where there may be one.
    std::fs::create_dir_all(tool.dir.path().join("shown")).expect("a directory");
    let mounted = tool.output(&["disk", "mount", "tree", "shown", "--background", "--cache-size", "16M"]);
    let mounted = mounted.status.success();
    if mounted {
        let _ = std::fs::read(tool.dir.path().join("shown/one"));
        check("pagefold disk status", &tool.json(&["disk", "status", "--json"]));
    } else {
        skipped("no FUSE mount here: disk status --json is not compared");
    }
    assert!(tool.output(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let start = |options: &[&str]| {
        let mut run = tool.command(&["run", "--socket", &socket]);
        run.args(options).args(["--", "python3", "-c", CLIENT]).stdout(Stdio::piped());
        let mut client = Running(run.spawn().expect("run starts"));
        let mut ready = [0; 5];
        client.0.stdout.as_mut().expect("a pipe").read_exact(&mut ready).ok().map(|()| client)
    };
    let (Some(live), Some(_cold)) = (start(&["--manage=all"]), start(&["--cold"])) else {
        return skipped("no python3 here to be a client");
    };
    wait("merging", &mut || status("totals")["pages_sharing"].as_u64() >= Some(800));
    wait("the cold client", &mut || {
        let parked = tool.output(&["park", "--all", "--json", "--socket", &socket]);
        let moved: Value = serde_json::from_slice(&parked.stdout).unwrap_or_default();
        moved["pages"].as_u64() > Some(0) && {
            check("pagefold park", &moved);
            true
        }
    });
    check("pagefold status", &tool.json(&["status", "--json", "--socket", &socket]));
    check("pagefold pause", &tool.json(&["pause", "--all", "--json", "--socket", &socket]));
    check("pagefold pause", &tool.json(&["resume", "--all", "--json", "--socket", &socket]));
    check("pagefold park", &tool.json(&["unpark", "--all", "--json", "--socket", &socket]));
    check("pagefold verify", &tool.json(&["verify", "--json", "--socket", &socket]));
    let pid = live.0.id().to_string();
    check("pagefold unmerge", &tool.json(&["unmerge", &pid, "--json", "--socket", &socket]));
    let mut plain = Command::new("python3");
    let mut plain = Running(plain.args(["-c", CLIENT]).stdout(Stdio::piped()).spawn().expect("python3 starts"));
    plain.0.stdout.as_mut().expect("a pipe").read_exact(&mut [0; 5]).expect("it is ready");
    let pid = plain.0.id().to_string();
    let attached = tool.output(&["attach", &pid, "--json", "--socket", &socket]);
    if attached.status.success() {
        check("pagefold attach", &serde_json::from_slice(&attached.stdout).expect("JSON"));
        check("pagefold detach", &tool.json(&["detach", &pid, "--json", "--socket", &socket]));
    } else {
        skipped(&format!("attach --json: {}", String::from_utf8_lossy(&attached.stderr)));
    }
    let get = |target: &str| -> Value {
        let mut stream = UnixStream::connect(&web).expect("the page is served");
        write!(stream, "GET {target} HTTP/1.1\r\nHost: x\r\n\r\n").expect("it listens");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("text");
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("a head").1).expect("JSON")
    };
    wait("mounts and stores on the page", &mut || {
        let shown = get("/status.json");
        let some = |part: &str| shown[part].as_array().is_some_and(|list| !list.is_empty());
        some("images") && (some("disks") || !mounted)
    });
    check("pagefold status", &get("/status.json"));
    check("GET /history.json", &get("/history.json?domain=default"));
    check("GET /history.json", &get("/history.json"));
    if mounted {
        assert!(tool.output(&["disk", "umount", "shown"]).status.success());
    }
    check("pagefold stop", &tool.json(&["stop", "--json", "--socket", &socket]));
    let demo = ["demo", "--json", "--no-ksm", "--processes", "2", "--size", "4M"];
    check("pagefold demo", &tool.json(&demo));
}
