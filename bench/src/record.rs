//! What a record of figures carries: the rows, with machine, kernel, versions, commit and command.

use crate::table;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// What a bench has measured, and with which versions of its peers.
#[derive(Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Measured {
    /// The rows of its tables.
    pub rows: Vec<Value>,
    /// Peers and inputs by name.
    pub versions: Map<String, Value>,
}

/// What the bench of this process has measured; `None` in the helper processes that benches start.
static EMITTED: Mutex<Option<Measured>> = Mutex::new(None);

/// Hands rows to the code that prints and records them.
pub fn emit(rows: Vec<Value>) {
    EMITTED.lock().expect("no bench panics here").get_or_insert_default().rows.extend(rows);
}

/// Prints rows as a table of these columns (see [`table()`]) and emits them.
pub fn table(title: &str, columns: &str, rows: Vec<Value>) {
    table::print(title, columns, &rows);
    emit(rows);
}

/// Names the versions of the peers for the record: an object. The rows must be emitted too.
pub fn emit_versions(versions: Value) {
    if let Value::Object(versions) = versions {
        EMITTED.lock().expect("no bench panics here").get_or_insert_default().versions.extend(versions);
    }
}

/// All that was emitted so far, or `None` where no bench ran.
pub fn emitted() -> Option<Measured> {
    EMITTED.lock().expect("no bench panics here").clone()
}

/// The first line a command prints, or nothing where it is not installed.
pub fn first_line(command: &[&str]) -> Option<String> {
    let out = Command::new(command[0]).args(&command[1..]).output().ok()?;
    let text = if out.stdout.is_empty() { out.stderr } else { out.stdout };
    let text = String::from_utf8_lossy(&text);
    text.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_string)
}

fn field(path: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim_matches([':', ' ', '\t']).to_string())
}

/// The machine, the kernel and the commit that figures were measured with.
pub fn circumstances() -> Value {
    let trimmed = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_string());
    json!({
        "cpu": field("/proc/cpuinfo", "model name"),
        "cpus": std::thread::available_parallelism().map_or(1, usize::from),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": trimmed("/proc/sys/kernel/osrelease"),
        "huge_pages": trimmed("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": trimmed("/proc/loadavg"),
        "rustc": first_line(&["rustc", "--version"]),
        "commit": first_line(&["git", "describe", "--always", "--dirty"]),
        "date": first_line(&["date", "-u", "+%F %H:%M UTC"]),
    })
}

/// The arguments as a shell takes them, without paths of this machine.
fn without_paths(args: &[String]) -> String {
    let place = |arg: &str| matches!(arg, "--dir" | "--record" | "--inputs");
    let before = std::iter::once("").chain(args.iter().map(String::as_str));
    let kept = args.iter().zip(before).filter(|(arg, before)| !place(arg) && !place(before));
    let quoted = |arg: &str| if arg.contains(' ') { format!("'{arg}'") } else { arg.to_owned() };
    kept.map(|(arg, _)| quoted(arg)).collect::<Vec<_>>().join(" ")
}

/// The name of this run among those of the same bench and day: its part, else its first flag.
pub fn tag(args: &[String]) -> String {
    let part = args.windows(2).find(|pair| ["--only", "--part", "--tables", "--pair"].contains(&pair[0].as_str()));
    let tag = match part {
        Some(pair) => pair[1].clone(),
        None if args.iter().any(|arg| arg == "--quick") => "quick".to_string(),
        None => {
            let named = args.iter().filter(|arg| *arg != "--json");
            named.map(|arg| arg.trim_start_matches('-')).next().unwrap_or_default().to_string()
        }
    };
    tag.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

/// The machine's name in paths: the first words of its processor's name, and the kernel's version without its build.
fn machine(circumstances: &Value) -> String {
    let text = |field: &str| circumstances[field].as_str().unwrap_or("unknown").replace("(R)", "").replace("(TM)", "");
    let cpu: Vec<String> = text("cpu").split_whitespace().take(2).map(str::to_lowercase).collect();
    let kernel = text("kernel").split('-').next().unwrap_or_default().to_string();
    format!("{}-{kernel}", cpu.join("-"))
}

/// Writes what was measured with its circumstances to `DIR/CPU-KERNEL/DATE-BENCH[-TAG].json`.
pub fn write(dir: &Path, bench: &str, tag: &str, args: &[String], measured: &Measured) -> std::io::Result<PathBuf> {
    let circumstances = circumstances();
    let dir = dir.join(machine(&circumstances));
    fs::create_dir_all(&dir)?;
    let date = first_line(&["date", "-u", "+%F"]).unwrap_or_else(|| "undated".into());
    let tag = if tag.is_empty() { String::new() } else { format!("-{tag}") };
    let path = dir.join(format!("{date}-{bench}{tag}.json"));
    let record = json!({
        "command": format!("pagefold bench {bench} {}", without_paths(args)).trim_end(),
        "circumstances": circumstances,
        "versions": measured.versions,
        "rows": measured.rows,
    });
    fs::write(&path, serde_json::to_string_pretty(&record).expect("plain data") + "\n")?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_named_by_its_processor_and_its_kernel() {
        let of = |cpu: &str, kernel: &str| machine(&json!({ "cpu": cpu, "kernel": kernel }));
        assert_eq!(of("Intel(R) Xeon(R) Processor", "6.18.44-fc-v669"), "intel-xeon-6.18.44");
        assert_eq!(of("AMD EPYC", "6.8.0"), "amd-epyc-6.8.0");
    }
}
