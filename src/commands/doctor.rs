//! `pagefold doctor`: what works here, what does not, and the one command that mends it.

use crate::daemon_client;
use crate::error::Error;
use crate::output::{self, Style};
use pagefold_daemon::FILTERS_CURE;
use pagefold_os::probe::{self, Finding};
use pagefold_os::procfs;
use serde::Serialize;
use std::process::ExitCode;

/// Tell what works on this machine, and how to mend what does not
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold doctor
  pagefold doctor --json

Exit status: 0 if memory can be merged here, 1 if something needed is missing.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The number of the capability (linux/capability.h).
const CAP_SYS_ADMIN: u32 = 21;

/// One finding, as `--json` shows it.
#[derive(Debug, Serialize)]
struct Item {
    /// Which part of pagefold asks for it.
    part: &'static str,
    name: String,
    works: bool,
    needed: bool,
    detail: String,
    /// Absent if it works.
    #[serde(skip_serializing_if = "Option::is_none")]
    cure: Option<String>,
}

/// All findings, as `--json` shows them.
#[derive(Debug, Serialize)]
struct Findings {
    merging_works: bool,
    findings: Vec<Item>,
}

/// Why memory is not simply merged across everything that runs here.
const DOMAINS: &str = "\
Domains are walls. Pages merge only inside one domain, and by default all that one user
starts is one domain. Whoever shares a page can learn that someone else holds the same
content: the kernel's own files in /proc tell it, and so does the time of the first
write. Whoever maps one page of a pool can read that pool. So put processes into one
domain only if all of them may know all of the data in it: if you host guests of
different owners, give each owner its own, `pagefold run --domain OWNER -- CMD`.
";

fn merging(finding: Finding) -> Item {
    Item {
        part: "merging",
        name: finding.name.to_owned(),
        works: finding.works,
        needed: finding.needed,
        detail: finding.detail,
        cure: (!finding.works && !finding.cure.is_empty()).then_some(finding.cure),
    }
}

/// Whether what `run` preloads has a place from which it can be loaded.
fn agent() -> Item {
    let dir = daemon_client::agent_dir();
    Item {
        part: "merging",
        name: "a directory for the agent".into(),
        works: dir.is_ok(),
        needed: true,
        detail: dir.as_ref().map_or_else(ToString::to_string, |dir| dir.display().to_string()),
        cure: dir
            .is_err()
            .then(|| "PAGEFOLD_RUNTIME_DIR=DIR in the environment, a directory of this user's alone".into()),
    }
}

fn images(check: pagefold_image::doctor::Check) -> Item {
    Item {
        part: "images",
        name: check.name.to_owned(),
        works: check.ok,
        needed: false,
        detail: check.detail,
        cure: (!check.ok && !check.cure.is_empty()).then(|| check.cure.to_owned()),
    }
}

/// Whether the program that talks to registries is installed.
fn registries() -> Item {
    let program = super::image::registry_program();
    Item {
        part: "images",
        name: "image pull and push".into(),
        works: program.is_some(),
        needed: false,
        detail: program.as_ref().map_or("no pagefold-remote".into(), |path| path.display().to_string()),
        cure: program.is_none().then(|| super::image::REGISTRY_CURE.into()),
    }
}

fn disks(check: pagefold_disk::doctor::Check) -> Item {
    Item {
        part: "disks",
        name: check.name.to_owned(),
        works: check.ok,
        needed: false,
        detail: check.detail,
        cure: (!check.ok).then(|| check.cure.to_owned()),
    }
}

/// Whether seccomp filters of programs can be read: by the daemon that runs, or by one that this user would start.
fn filters() -> Item {
    let daemon = daemon_client::socket(None).and_then(|socket| daemon_client::status_of_any(&socket));
    let daemon = daemon.ok().flatten().map(|status| status.pid);
    let by = daemon.map_or_else(|| "this user".into(), |pid| format!("daemon {pid}"));
    reads_filters(&procfs::status(daemon.unwrap_or(std::process::id() as i32)), &by)
}

/// As [`filters`], by what the kernel says of the process `by`.
fn reads_filters(status: &str, by: &str) -> Item {
    let rights = procfs::value(status, "CapEff").and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    let lack = if procfs::has_filter(status) {
        Some(("has a filter itself, and the kernel shows it no other", FILTERS_CURE))
    } else {
        (rights >> CAP_SYS_ADMIN & 1 == 0)
            .then_some(("lacks CAP_SYS_ADMIN", "sudo pagefold daemon, and attach as root"))
    };
    Item {
        part: "merging",
        name: "attach: programs under a seccomp filter, as in containers".into(),
        works: lack.is_none(),
        needed: false,
        detail: format!("{by} {}", lack.map_or("may read their filters", |(detail, _)| detail)),
        cure: lack.map(|(_, cure)| cure.into()),
    }
}

fn render(findings: &Findings, style: Style) -> String {
    let mut text = String::new();
    for (needed, heading) in [(true, "Needed"), (false, "Useful")] {
        text += &format!("{}\n", style.bold(heading));
        for item in findings.findings.iter().filter(|item| item.needed == needed) {
            let mark = match (item.works, needed) {
                (true, _) => style.good("ok     "),
                (false, true) => style.bad("missing"),
                (false, false) => style.warn("lacking"),
            };
            text += &format!("  {mark}  {}: {}\n", item.name, item.detail);
            if let Some(cure) = &item.cure {
                text += &format!("           -> {cure}\n");
            }
        }
    }
    text += &format!("\n{DOMAINS}\n");
    text += &if findings.merging_works {
        style.good("Memory can be merged here.\n")
    } else {
        style.bad("Memory cannot be merged here until what is missing is there.\n")
    };
    text
}

/// Prints the findings.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let merging = probe::all().into_iter().map(merging).chain([agent(), filters()]);
    let images = pagefold_image::doctor().into_iter().map(images).chain([registries()]);
    let findings: Vec<Item> =
        merging.chain(images).chain(pagefold_disk::doctor::doctor().into_iter().map(disks)).collect();
    let merging_works = findings.iter().all(|item| item.works || !item.needed);
    let findings = Findings { merging_works, findings };
    if args.json {
        output::print_json(&findings)?;
    } else {
        output::print(&render(&findings, Style::stdout()))?;
    }
    Ok(if merging_works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(works: bool, needed: bool) -> Item {
        let cure = (!works).then(|| "mend it".to_owned());
        Item { part: "merging", name: "thing".into(), works, needed, detail: "seen".into(), cure }
    }

    #[test]
    fn filters_are_read_with_the_right_and_without_a_filter() {
        for (status, works) in [
            ("CapEff:\t000001ffffffffff\nSeccomp:\t0\n", true),
            ("CapEff:\t000001ffffffffff\nSeccomp:\t2\n", false),
            ("CapEff:\t0000000000080000\nSeccomp:\t0\n", false),
            ("", false),
        ] {
            let found = reads_filters(status, "daemon 7");
            assert_eq!((found.works, found.cure.is_none()), (works, works), "{status}");
        }
    }

    #[test]
    fn what_is_missing_comes_with_its_cure() {
        let findings = Findings { merging_works: false, findings: vec![finding(false, true), finding(true, false)] };
        let text = render(&findings, Style::plain());
        assert!(text.contains("missing  thing: seen\n           -> mend it\n"), "{text}");
        assert!(text.contains("Useful\n  ok       thing: seen\n"), "{text}");
        assert!(text.contains("--domain OWNER"), "{text}");
        assert!(text.ends_with("until what is missing is there.\n"), "{text}");
    }
}
