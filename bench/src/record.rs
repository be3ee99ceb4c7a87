//! What a record of figures must carry to be worth anything later: machine, kernel, versions, commit, command.

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
        "load_average": trimmed("/proc/loadavg"),
        "rustc": first_line(&["rustc", "--version"]),
        "commit": first_line(&["git", "describe", "--always", "--dirty"]),
        "date": first_line(&["date", "-u", "+%F %H:%M UTC"]),
    })
}

/// The arguments without where things were kept, which is this machine's affair.
fn without_paths(args: &[String]) -> String {
    let place = |arg: &str| matches!(arg, "--dir" | "--record" | "--inputs");
    let before = std::iter::once("").chain(args.iter().map(String::as_str));
    let kept = args.iter().zip(before).filter(|(arg, before)| !place(arg) && !place(before));
    kept.map(|(arg, _)| arg.as_str()).collect::<Vec<_>>().join(" ")
}

/// Writes `rows` with their circumstances to `DIR/BENCH-DATE[-TAG].json`; `versions` are those of the peers.
///
/// # Errors
/// The system's.
pub fn write(
    dir: &Path,
    bench: &str,
    tag: &str,
    args: &[String],
    versions: Value,
    rows: &[Value],
) -> std::io::Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let date = first_line(&["date", "-u", "+%F"]).unwrap_or_else(|| "undated".into());
    let tag = if tag.is_empty() { String::new() } else { format!("-{tag}") };
    let path = dir.join(format!("{bench}-{date}{tag}.json"));
    let record = json!({
        "command": format!("pagefold bench {bench} {}", without_paths(args)).trim_end(),
        "circumstances": circumstances(),
        "versions": versions,
        "rows": rows,
    });
    fs::write(&path, serde_json::to_string_pretty(&record).expect("plain data") + "\n")?;
    Ok(path)
}
