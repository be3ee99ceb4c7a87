//! The help texts, read as a user reads them.

use crate::tool::{Tool, text};

/// Names of the commands in a help text.
fn listed(help: &str) -> Vec<String> {
    let Some(list) = help.split("Commands:").nth(1) else { return Vec::new() };
    let list = list.split("Options:").next().unwrap_or(list);
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Every command that does something, and its help.
pub fn leaves(tool: &Tool) -> Vec<(Vec<String>, String)> {
    let help = |path: &[String]| {
        let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        text(&tool.run(&args).stdout)
    };
    let mut leaves = Vec::new();
    for name in listed(&help(&[])) {
        let members = listed(&help(std::slice::from_ref(&name)));
        for member in &members {
            let path = vec![name.clone(), member.clone()];
            leaves.push((path.clone(), help(&path)));
        }
        if members.is_empty() {
            let path = vec![name];
            leaves.push((path.clone(), help(&path)));
        }
    }
    assert!(leaves.len() > 25, "{}", leaves.len());
    leaves
}

/// The long options in a help text with the names of their values.
pub fn options(help: &str) -> Vec<(String, Option<String>)> {
    let of_line = |line: &str| {
        let line = line.trim_start();
        let at = line.starts_with('-').then(|| line.find("--"))??;
        let name: String = line[at + 2..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let rest = &line[at + 2 + name.len()..];
        let value = rest.strip_prefix(" <").and_then(|rest| rest.split('>').next()).map(str::to_owned);
        Some((name, value))
    };
    help.split("Examples:").next().unwrap_or_default().lines().filter_map(of_line).collect()
}
