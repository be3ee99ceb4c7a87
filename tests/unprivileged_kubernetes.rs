//! The manifests of the node agent: they fit each other, and the program that they start.

mod common;

use common::{TOOL, installed, skipped};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/kubernetes").join(name)
}

/// The objects of a manifest; `None` after saying what is missing.
fn objects(name: &str) -> Option<Vec<Value>> {
    const PROGRAM: &str = "import json, sys, yaml\nprint(json.dumps(list(yaml.safe_load_all(sys.stdin))))";
    let python = installed("python3")?;
    if !Command::new(&python)
        .args(["-c", "import yaml"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|done| done.success())
    {
        skipped("Python has no module yaml (package python3-yaml)");
        return None;
    }
    let file = std::fs::File::open(source(name)).expect("the manifest");
    let output = Command::new(python).args(["-c", PROGRAM]).stdin(file).output().expect("Python runs");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).expect("JSON"))
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

fn list<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
    value[name].as_array().unwrap_or_else(|| panic!("{name} is not a list in {value}"))
}

fn named<'a>(all: &'a [Value], name: &str) -> &'a Value {
    all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name} in {all:?}"))
}

fn words(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().map(|word| word.as_str().expect("a word")).collect()
}

/// Runs the tool and returns what it says on standard error.
fn says(config: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(TOOL).arg("--config").arg(config).args(arguments).output().expect("the tool");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_manifests_name_each_other_as_they_are() {
    let (Some(agent), Some(monitor)) = (objects("node-agent.yaml"), objects("podmonitor.yaml")) else { return };
    let set = of_kind(&agent, "DaemonSet");
    let namespace = &of_kind(&agent, "Namespace")["metadata"]["name"];
    for object in agent.iter().chain(&monitor).filter(|object| object["kind"] != "Namespace") {
        assert_eq!(&object["metadata"]["namespace"], namespace, "{object}");
    }
    let (pod, labels) = (&set["spec"]["template"]["spec"], &set["spec"]["template"]["metadata"]["labels"]);
    let (service, monitor) = (of_kind(&agent, "Service"), of_kind(&monitor, "PodMonitor"));
    for selector in [&set["spec"]["selector"], &monitor["spec"]["selector"]] {
        assert_eq!(&selector["matchLabels"], labels);
    }
    assert_eq!(&service["spec"]["selector"], labels);
    let containers = list(pod, "containers");
    let port = &named(list(named(containers, "metrics"), "ports"), "metrics")["name"];
    assert_eq!(&list(&service["spec"], "ports")[0]["targetPort"], port);
    assert_eq!(&list(&monitor["spec"], "podMetricsEndpoints")[0]["port"], port);
    let volumes = list(pod, "volumes");
    let config = &named(volumes, "config")["configMap"]["name"];
    assert_eq!(config, &of_kind(&agent, "ConfigMap")["metadata"]["name"]);
    for mount in containers.iter().flat_map(|container| list(container, "volumeMounts")) {
        named(volumes, mount["name"].as_str().expect("a name"));
    }
}

#[test]
fn the_daemon_of_the_node_agent_takes_its_options_and_its_configuration() {
    let Some(agent) = objects("node-agent.yaml") else { return };
    let containers = list(&of_kind(&agent, "DaemonSet")["spec"]["template"]["spec"], "containers");
    let daemon = named(containers, "daemon");
    let (mut options, probe) = (words(&daemon["args"]), words(&daemon["readinessProbe"]["exec"]["command"]));
    let text = of_kind(&agent, "ConfigMap")["data"]["pagefold.toml"].as_str().expect("the configuration");
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("pagefold.toml");
    std::fs::write(&config, text).expect("a file");
    for arguments in [options.clone(), probe[1..].to_vec()] {
        let (done, said) = says(&config, &[&arguments[..], &["--help"]].concat());
        assert!(done, "{arguments:?}: {said}");
    }
    assert_eq!(probe[0], "pagefold");
    // What no daemon can take is refused before anything else: a socket where no file can be.
    let socket = options.iter_mut().find(|word| word.starts_with('/')).expect("a socket");
    *socket = "/proc/no/socket";
    let (_, said) = says(&config, &options);
    assert!(said.contains("/proc/no/socket"), "the configuration was refused: {said}");
    for (right, wrong) in [("pool_max", "pool_most"), ("cgroup", "label"), ("\"64M\"", "\"many\"")] {
        assert!(text.contains(right));
        std::fs::write(&config, text.replace(right, wrong)).expect("a file");
        let (done, said) = says(&config, &options);
        assert!(!done && !said.contains("/proc/no/socket"), "{wrong} was taken: {said}");
    }
    // The other container reads metrics where the daemon serves them.
    let metrics = text.lines().find_map(|line| line.trim().strip_prefix("metrics = \"unix:")).expect("a place");
    let proxy = words(&named(containers, "metrics")["args"]);
    assert_eq!(proxy[1], format!("UNIX-CONNECT:{}", metrics.trim_end_matches('"')));
}

/// True if all of `written` is in `read`.
fn has(read: &Value, written: &Value) -> bool {
    match (read, written) {
        (Value::Object(read), Value::Object(written)) => {
            written.iter().all(|(name, value)| read.get(name).is_some_and(|other| has(other, value)))
        }
        (Value::Array(read), Value::Array(written)) => {
            read.len() == written.len() && read.iter().zip(written).all(|(read, written)| has(read, written))
        }
        _ => read == written,
    }
}

/// Without a cluster kubectl knows the fields of a DaemonSet, and drops others.
#[test]
fn kubernetes_knows_all_fields_of_the_daemon_set() {
    let (Some(kubectl), Some(agent)) = (installed("kubectl"), objects("node-agent.yaml")) else { return };
    // It changes one thing, the image, and shows what it has read.
    let keeps_all = |set: &Value| {
        let mut command = Command::new(&kubectl);
        command.args(["set", "image", "--local", "-o", "json", "daemon=other", "-f", "-"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl runs");
        child.stdin.take().expect("a pipe").write_all(set.to_string().as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        let mut read: Value = serde_json::from_slice(&output.stdout).expect("a DaemonSet");
        let image = &mut read["spec"]["template"]["spec"]["containers"][0]["image"];
        assert_eq!(*image, "other");
        *image = "pagefold".into();
        has(&read, set)
    };
    let mut set = of_kind(&agent, "DaemonSet").clone();
    assert!(keeps_all(&set), "a field is unknown to kubectl");
    set["spec"]["template"]["spec"]["hostPIDs"] = true.into();
    assert!(!keeps_all(&set), "kubectl kept a field that there is not");
}
