//! The metrics of a daemon at work, by the conventions: promtool and a strict parser of OpenMetrics read them, and
//! dashboard and alert rules name nothing that is not there.

mod common;

use common::cold::Host;
use common::{Daemon, Reaped, can_merge, installed, skipped, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn dist(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dist").join(path)
}

/// Head and body of the answer to a request that accepts `kinds`.
fn get(socket: &Path, kinds: &str) -> (String, String) {
    let mut stream = UnixStream::connect(socket).expect("the metrics");
    write!(stream, "GET /metrics HTTP/1.0\r\nAccept: {kinds}\r\n\r\n").expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

/// What Prometheus itself accepts.
const OPEN: &str = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
const PLAIN: &str = "text/plain";

/// A program with 16 MiB that it does not touch again.
fn silent(mut command: Command) -> Reaped {
    let program = "import mmap,random,time\nm=mmap.mmap(-1,16<<20,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n\
        r=random.Random(7)\nfor i in range(0,16<<20,4096): m[i:i+64]=r.randbytes(64)\ntime.sleep(300)\n";
    command.args(["python3", "-c", program]).stdin(Stdio::null()).stdout(Stdio::null());
    Reaped(command.spawn().expect("python3 starts"))
}

fn fed(command: &mut Command, text: &str) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads");
    child.wait_with_output().expect("it ends")
}

/// Both forms of what is told, as others read them.
fn check(socket: &Path) {
    let (head, open) = get(socket, OPEN);
    assert!(head.contains("Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8"), "{head}");
    assert!(open.ends_with("\n# EOF\n"), "{open}");
    let (head, plain) = get(socket, PLAIN);
    assert!(head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    if installed("promtool").is_some() {
        let said = fed(Command::new("promtool").args(["check", "metrics"]), &plain);
        let errors = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.status.success() && errors.trim().is_empty(), "promtool check metrics: {errors}{plain}");
    }
    let strict = "import sys\nfrom prometheus_client.openmetrics.parser import text_string_to_metric_families as read\n\
        print(sum(len(family.samples) for family in read(sys.stdin.read())))";
    // The system's own, where the package puts its modules, before another one in the path.
    let python =
        ["/usr/bin/python3", "python3"].into_iter().find(|path| *path == "python3" || Path::new(path).exists());
    let said = fed(Command::new(python.expect("one of them")).args(["-c", strict]), &open);
    let errors = String::from_utf8_lossy(&said.stderr).into_owned();
    if errors.contains("ModuleNotFoundError") {
        skipped("python3-prometheus-client is not installed: no strict parser");
    } else {
        assert!(said.status.success(), "{errors}{open}");
        let lines = open.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), lines.to_string(), "samples that were read");
    }
}

/// Names of all series that may ever be told, from the heads of the families.
fn exported(socket: &Path) -> BTreeSet<String> {
    let (_, plain) = get(socket, PLAIN);
    let mut names = BTreeSet::new();
    for line in plain.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').expect("a kind");
        match kind {
            "histogram" => names.extend(["_bucket", "_sum", "_count"].map(|suffix| format!("{name}{suffix}"))),
            _ => drop(names.insert(name.to_owned())),
        }
    }
    names
}

/// The names of series in an expression.
fn named(expression: &str) -> impl Iterator<Item = &str> {
    expression
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("pagefold_") && *word != "pagefold_")
}

/// All values of `key` in a document.
fn values<'a>(document: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match document {
        Value::Object(map) => map.iter().for_each(|(name, value)| match value.as_str() {
            Some(text) if name == key => found.push(text),
            _ => values(value, key, found),
        }),
        Value::Array(list) => list.iter().for_each(|value| values(value, key, found)),
        _ => {}
    }
}

#[test]
fn metrics_of_live_memory_follow_the_conventions() {
    let told = tempfile::tempdir().expect("a directory");
    let socket = told.path().join("m");
    let daemon = Daemon::start(&["--metrics", &format!("unix:{}", socket.display())]);
    wait_for("the metrics", 20, || UnixStream::connect(&socket).is_ok());
    check(&socket);
    if !can_merge() || installed("python3").is_none() {
        return;
    }
    let _clients = [silent(daemon.run(&["--manage=all"])), silent(daemon.run(&["--manage=all"]))];
    wait_for("pages to merge", 60, || daemon.total("pages_sharing") > 1000);
    check(&socket);
    let (_, open) = get(&socket, OPEN);
    let value = |name: &str| -> f64 {
        let line = open.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {open}"));
        line.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number")
    };
    assert_eq!(value("pagefold_clients "), 2.0);
    assert!(value("pagefold_pages_sharing{") > 1000.0 && value("pagefold_deduplicated_bytes{") > 4096.0 * 1000.0);
    let longest =
        open.lines().filter(|line| line.starts_with("pagefold_freeze_seconds_bucket") && line.contains("+Inf"));
    assert_eq!(longest.count(), 2, "one histogram for each client: {open}");
}

#[test]
fn metrics_of_the_cold_tier_follow_the_conventions() {
    if !can_merge() || installed("python3").is_none() {
        return;
    }
    let told = tempfile::tempdir().expect("a directory");
    let socket = told.path().join("m");
    let host = Host::start(&["--metrics", &format!("unix:{}", socket.display())]);
    let client = silent(host.run(&[]));
    host.wait_for_client(client.pid());
    wait_for("pages to go out", 60, || {
        // The first look at a client that has just come may be too early; what counts here is what is told afterwards.
        let parked = host.tool(&["park", &client.pid().to_string()]);
        eprint!("{}", String::from_utf8_lossy(&parked.stderr));
        host.number(client.pid(), "pages_out") > 1000
    });
    check(&socket);
    let (_, open) = get(&socket, OPEN);
    let of_client = format!("pid=\"{}\"", client.pid());
    for name in ["pagefold_cold_pages_out{", "pagefold_cold_pages_lost_total{", "pagefold_cold_fault_seconds_sum{"] {
        assert!(open.lines().any(|line| line.starts_with(name) && line.contains(&of_client)), "no {name}: {open}");
    }
}

#[test]
fn dashboard_and_rules_name_existing_metrics() {
    let told = tempfile::tempdir().expect("a directory");
    let socket = told.path().join("m");
    let _daemon = Daemon::start(&["--metrics", &format!("unix:{}", socket.display())]);
    wait_for("the metrics", 20, || UnixStream::connect(&socket).is_ok());
    let exported = exported(&socket);
    assert!(exported.len() > 50, "{exported:?}");

    let text = std::fs::read_to_string(dist("grafana/pagefold.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let mut expressions = Vec::new();
    values(&dashboard, "expr", &mut expressions);
    assert!(expressions.len() > 40, "{}", expressions.len());
    let queries = expressions.len();
    values(&dashboard, "definition", &mut expressions);
    for expression in &expressions {
        let names: Vec<&str> = named(expression).collect();
        assert!(!names.is_empty(), "{expression} names nothing of ours");
        for name in names {
            assert!(exported.contains(name), "the dashboard names {name}, which is not exported");
        }
    }
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        assert!(ids.insert(panel["id"].as_u64()), "two panels have the number {}", panel["id"]);
        let place = &panel["gridPos"];
        assert!(place["x"].as_u64().unwrap_or(99) + place["w"].as_u64().unwrap_or(99) <= 24, "{panel}");
    }

    let rules = std::fs::read_to_string(dist("prometheus/pagefold.rules.yml")).expect("the rules");
    let tests = std::fs::read_to_string(dist("prometheus/pagefold.rules.test.yml")).expect("their tests");
    let of_rules: Vec<&str> = rules.lines().filter(|line| !line.trim().starts_with('#')).flat_map(named).collect();
    assert!(of_rules.len() > 12);
    for name in of_rules {
        assert!(exported.contains(name), "the rules name {name}, which is not exported");
    }
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let fires = tests.split("alertname: ").skip(1).any(|part| {
            part.starts_with(alert) && part.trim_start_matches(alert).trim_start().starts_with("exp_alerts: [{")
        });
        assert!(fires, "no test lets {alert} fire");
    }

    if installed("promtool").is_none() {
        return;
    }
    let promtool = |args: &[&str]| {
        let said = Command::new("promtool").args(args).current_dir(dist("prometheus")).output().expect("promtool");
        let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success(), "promtool {args:?}: {text}");
    };
    promtool(&["check", "rules", "pagefold.rules.yml"]);
    promtool(&["test", "rules", "pagefold.rules.test.yml"]);
    // The dashboard's queries as rules, so that their syntax is checked as well.
    let records = expressions[..queries].iter().enumerate().map(|(number, expression)| {
        let expression = expression.replace("$__rate_interval", "5m");
        serde_json::json!({ "record": format!("dashboard:query:{number}"), "expr": expression })
    });
    let document = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": records.collect::<Vec<_>>() }] });
    let file = told.path().join("dashboard.yml");
    std::fs::write(&file, document.to_string()).expect("a file");
    promtool(&["check", "rules", &file.display().to_string()]);
}
