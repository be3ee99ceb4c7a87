//! `pagefold scan`: what merging would save, found without changing anything.

use crate::completion_values;
use crate::error::Error;
use crate::output::{self, Progress, Style, Table};
use crate::units::{self, show_count, show_counted, show_duration, show_percent, show_size, show_size_signed};
use pagefold_os::procfs;
use pagefold_scan::{Config, Dump, Lost, Note, Process, Report, Source, scan};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;
/// Sources shown without `--verbose`.
const ROWS: usize = 20;
/// Memory that equals other memory at another place within its page is named from this part of all pages on.
const SHIFTED_SHARE: u64 = 100;

/// Options that say nothing of directories.
const LIVE: [&str; 5] = ["one_domain", "sample", "workers", "vma_budget", "verbose"];

/// Tell what merging would save, changing nothing
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["targets", "all", "tree"])))]
#[command(after_help = "Examples:
  pagefold scan 1234 5678              two processes
  sudo pagefold scan --all             everything on this machine
  pagefold scan vm1.mem vm2.mem        memory dumps, or any files
  pagefold scan --sample 1/16 --all    with a sixteenth of its own memory
  pagefold scan --json $(pidof qemu-system-x86_64)
  pagefold scan --tree rootfs1 rootfs2 directories, as images

A number is a process; write ./1234 for a file of that name. Only pages that are in
memory and private to a process are read; nothing is faulted in, swapped in or stopped.
Processes of different users are different domains and are not compared, as in a merge.

Exit status: 0 if all that was named could be scanned, 1 if something could not be read.
A process that ends meanwhile is a note, not a failure.")]
pub struct Args {
    /// Processes, or files such as memory dumps
    #[arg(value_name = "PID|FILE", add = completion_values::programs())]
    targets: Vec<OsString>,
    /// All processes that may be read
    #[arg(long)]
    all: bool,
    /// Directories instead: what storing them as images would save
    #[arg(long, value_name = "DIR", num_args = 1.., conflicts_with_all = LIVE)]
    tree: Vec<PathBuf>,
    /// Compare pages across users too; a merge would not, unless told by --domain
    #[arg(long)]
    one_domain: bool,
    /// Remember one page content in N, as 1/16 or 6.25%; counts are scaled up
    #[arg(long, value_name = "SHARE", value_parser = units::one_in, default_value = "1/1")]
    sample: u32,
    /// Threads that read; default: all processors
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: Option<u16>,
    /// Mappings that merging may cost each process; default: a quarter of vm.max_map_count
    #[arg(long, value_name = "N")]
    vma_budget: Option<u64>,
    /// Show every process or file, not the largest 20
    #[arg(long, short)]
    verbose: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Scans and prints.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    if !args.tree.is_empty() {
        return super::scan_tree::run_tree(&args.tree, args.json);
    }
    let (sources, notes) = if args.all { everything(args.one_domain) } else { named(&args) };
    if sources.is_empty() {
        return Err(nothing(&notes).into());
    }
    let mut config = Config {
        one_in: args.sample,
        map_budget: map_budget(&args),
        shortest_run: pagefold_merge::plan::run_pages_min,
        ..Config::default()
    };
    if let Some(workers) = args.workers {
        config.workers = workers.into();
    }
    let mut progress = Progress::new("scan");
    let mut report = scan(sources, &config, &mut |at| progress.update(at.done_bytes, at.total_bytes));
    progress.finish();
    report.notes.splice(0..0, notes);
    if args.all {
        fold_refusals(&mut report.notes);
    }
    let failed = !args.all && report.notes.iter().any(|note| note.failure);
    if report.sources.is_empty() {
        return Err(nothing(&report.notes).into());
    }
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&render(&report, &args, Style::stdout()))?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn map_budget(args: &Args) -> u64 {
    let limit = || std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse::<u64>().ok();
    args.vma_budget.unwrap_or_else(|| limit().unwrap_or(Config::MAX_MAP_COUNT_DEFAULT) / 4)
}

/// Sources that an error line names; of more it gives the number.
const NAMES_MAX: usize = 3;

/// Why there is nothing to scan, in one line: each reason once, with the sources that it concerns.
fn nothing(notes: &[Note]) -> String {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for note in notes {
        match reasons.iter_mut().find(|(what, _)| *what == note.what) {
            Some((_, names)) => names.push(who(note)),
            None => reasons.push((&note.what, vec![who(note)])),
        }
    }
    let line = |(what, names): &(&str, Vec<String>)| match names.len() {
        count if count > NAMES_MAX => format!("{}: {what}", show_counted(count as u64, "source", "sources")),
        _ => format!("{}: {what}", names.join(", ")),
    };
    let why = reasons.iter().map(line).collect::<Vec<_>>().join("; ");
    if why.is_empty() { "scan: no process to scan".into() } else { format!("scan: {why}") }
}

fn who(note: &Note) -> String {
    let name = output::shorten(&note.name, 60);
    match note.pid {
        Some(pid) if name.is_empty() => format!("process {pid}"),
        Some(pid) => format!("process {pid} ({name})"),
        None if name.is_empty() => "an empty name".into(),
        None => name,
    }
}

/// All processes but ourselves. Kernel threads have no memory and are left out without a word.
fn everything(one_domain: bool) -> (Vec<Box<dyn Source>>, Vec<Note>) {
    let ourselves = std::process::id() as i32;
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    for pid in procfs::pids().into_iter().filter(|&pid| pid != ourselves && has_memory(pid)) {
        // One that ended since the list was made is not worth a word either.
        if let Ok(process) = Process::new(pid) {
            sources.push(Box::new(if one_domain { process.with_domain(0) } else { process }));
        }
    }
    (sources, Vec::new())
}

fn has_memory(pid: i32) -> bool {
    procfs::field(&procfs::status(pid), "VmSize").is_some()
}

fn named(args: &Args) -> (Vec<Box<dyn Source>>, Vec<Note>) {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    let mut notes = Vec::new();
    let mut pids = BTreeSet::new();
    let mut files = BTreeSet::new();
    for target in &args.targets {
        let name = target.to_string_lossy().into_owned();
        let pid: Option<i32> = name.parse().ok().filter(|&pid| pid > 0);
        let twice =
            |name: &str| Note { pid, name: name.into(), what: "named twice, scanned once".into(), failure: false };
        let note = |lost: Lost| {
            let name = if pid.is_some() { String::new() } else { name.clone() };
            Note { pid, name, what: lost.to_string(), failure: true }
        };
        if let Some(pid) = pid {
            match Process::new(pid) {
                Ok(_) if !pids.insert(pid) => notes.push(twice("")),
                Ok(process) => sources.push(Box::new(if args.one_domain { process.with_domain(0) } else { process })),
                Err(lost) => notes.push(note(lost)),
            }
        } else {
            match Dump::open(Path::new(target)).and_then(|dump| Ok((dump.device_and_inode()?, dump))) {
                Ok((file, _)) if !files.insert(file) => notes.push(twice(&name)),
                Ok((_, dump)) => sources.push(Box::new(dump)),
                Err(lost) => notes.push(note(lost)),
            }
        }
    }
    (sources, notes)
}

/// One line for all processes that only root may read.
fn fold_refusals(notes: &mut Vec<Note>) {
    let before = notes.len();
    notes.retain(|note| !(note.pid.is_some() && note.what.starts_with("may not be read")));
    let refused = before - notes.len();
    if refused > 0 {
        let what = format!("{refused} may not be read; run as root with CAP_SYS_PTRACE to see them");
        notes.push(Note { pid: None, name: "processes".into(), what, failure: false });
    }
}

fn render(report: &Report, args: &Args, style: Style) -> String {
    let mut text = String::new();
    text += &headline(report, style);
    text += &pages(report, style);
    text += &runs(report, style);
    text += &bill(report, style);
    text += &reasons(report, style);
    text += &sources(report, args, style);
    for note in &report.notes {
        text += &style.warn(&format!("note: {}: {}\n", who(note), note.what));
    }
    text
}

fn headline(report: &Report, style: Style) -> String {
    let saved = report.cost.saved_bytes;
    let examined = report.totals.examined.saturating_mul(PAGE);
    let of = show_percent(saved.max(0).unsigned_abs(), examined);
    let verdict = if saved > 0 {
        style.good(&format!("Merging would save {}, {of} of {} examined", show_size_signed(saved), show_size(examined)))
    } else {
        format!("Merging would save nothing: {} of {} examined", show_size_signed(saved), show_size(examined))
    };
    let sample = match report.sample_one_in {
        1 => String::new(),
        // Of what none was seen twice it cannot be told how far off that is.
        n if report.cost.sample_error_bytes == 0 => format!(", estimated from one content in {n}"),
        n => format!(", estimated from one content in {n}, ± {}", show_size(report.cost.sample_error_bytes)),
    };
    let count = report.sources.len();
    let time = show_duration(Duration::from_secs_f64(report.seconds));
    format!("{verdict}{sample}.\n{} in {time}\n\n", show_counted(count as u64, "source", "sources"))
}

fn pages(report: &Report, style: Style) -> String {
    let totals = &report.totals;
    let mut table = Table::new(style, &["pages", ">count", ">size", ">share", ""]);
    let mut row = |name: &str, pages: u64, remark: &str| {
        if pages > 0 {
            let share = show_percent(pages, totals.examined);
            table.styled_row([
                name.into(),
                show_count(pages),
                show_size(pages.saturating_mul(PAGE)),
                share,
                style.dim(remark),
            ]);
        }
    };
    row("examined", totals.examined, "");
    row("zero", totals.zero, "");
    row("duplicate inside", totals.duplicate_inside, "copies of a page of the same process");
    row("duplicate across", totals.duplicate_across, "copies of a page of another process");
    row("first copies", first_copies(report), "of the duplicates; one of each stays");
    row("unique", totals.unique, "");
    row("already shared", totals.shared_already, "by fork or by KSM");
    row("merged by pagefold", totals.shared_by_pagefold, "");
    row("only for KSM", totals.kernel_only, "see below");
    let mut text = table.render(0);
    if totals.duplicate_huge > 0 {
        let huge = show_size(totals.duplicate_huge * PAGE);
        text += &format!("{huge} of the duplicates are parts of huge pages, which a merge splits where it pays.\n");
    }
    if totals.duplicate_shifted * SHIFTED_SHARE > totals.examined {
        text += &format!(
            "{} more equal other memory at another place within the page, so no merge shares them: their allocator begins \
             blocks at any cache line, as jemalloc does.\n",
            show_size(totals.duplicate_shifted * PAGE)
        );
    }
    if totals.swapped > 0 {
        text += &format!("{} in swap, not looked at.\n", show_size(totals.swapped * PAGE));
    }
    text + "\n"
}

/// Pages with twins less the twins.
fn first_copies(report: &Report) -> u64 {
    let totals = &report.totals;
    report.runs.pages.saturating_sub(totals.duplicate_inside + totals.duplicate_across)
}

fn runs(report: &Report, style: Style) -> String {
    let runs = &report.runs;
    if runs.count == 0 {
        return String::new();
    }
    let mut text = format!("{} duplicates, first copies counted, in ", show_count(runs.pages));
    text += &format!("{} runs of {:.1} pages on average\n", show_count(runs.count), runs.mean);
    if runs.histogram.is_empty() {
        return text + "(how long each run is cannot be told from a sample)\n\n";
    }
    let most = runs.histogram.iter().map(|bucket| bucket.pages).max().unwrap_or(0);
    let mut table = Table::new(style, &[">run of", ">runs", ">pages", ">share", ""]);
    for bucket in runs.histogram.iter().filter(|bucket| bucket.runs > 0) {
        let length = match bucket.to {
            Some(to) if to == bucket.from => format!("{to}"),
            Some(to) => format!("{}-{to}", bucket.from),
            None => format!("{} and more", bucket.from),
        };
        let share = show_percent(bucket.pages, runs.pages);
        let bar = output::bar(bucket.pages, most, 24);
        table.row([length, show_count(bucket.runs), show_count(bucket.pages), share, bar]);
    }
    text + &table.render(0) + "\n"
}

fn bill(report: &Report, style: Style) -> String {
    let (cost, ksm) = (&report.cost, &report.ksm);
    let mut table = Table::new(style, &["bill", ">pagefold", ">KSM", ""]);
    let deduplicated = cost.duplicate_bytes + cost.zero_bytes;
    let metadata = cost.scanned_bytes + cost.shared_bytes;
    let minus = |bytes: u64| if bytes == 0 { "0 B".into() } else { format!("-{}", show_size(bytes)) };
    table.row(["deduplicated".into(), show_size(deduplicated), show_size(ksm.deduplicated_bytes), String::new()]);
    table.row(["own metadata".into(), minus(metadata), minus(ksm.metadata_bytes), String::new()]);
    let mappings = style.dim(&format!("{} mappings", show_count(cost.mappings)));
    table.styled_row(["kernel's mappings".into(), minus(cost.mapping_bytes), "0 B".into(), mappings]);
    table.styled_row([
        "saved".into(),
        style.bold(&show_size_signed(cost.saved_bytes)),
        show_size_signed(ksm.saved_bytes),
        String::new(),
    ]);
    let mut text = table.render(0);
    if cost.over_budget_pages > 0 {
        let over = show_size(cost.over_budget_pages * PAGE);
        text +=
            &format!("{over} of duplicates are beyond the mapping budget: raise vm.max_map_count or --vma-budget\n");
    }
    text + "\n"
}

fn reasons(report: &Report, style: Style) -> String {
    let mut table = Table::new(style, &["not merged", ">count", ">size"]);
    let mut reasons: Vec<_> = report.not_merged.iter().collect();
    reasons.sort_by_key(|(_, pages)| std::cmp::Reverse(**pages));
    for (reason, &pages) in reasons {
        table.row([reason.words().into(), show_count(pages), show_size(pages * PAGE)]);
    }
    if report.totals.pinned > 0 {
        let pages = report.totals.pinned;
        table.row(["held by devices, at most".into(), show_count(pages), show_size(pages * PAGE)]);
    }
    if table.is_empty() { String::new() } else { table.render(0) + "\n" }
}

fn sources(report: &Report, args: &Args, style: Style) -> String {
    let mut sources: Vec<_> = report.sources.iter().collect();
    sources.sort_by_key(|source| std::cmp::Reverse((source.deduplicated_bytes, source.totals.examined)));
    let shown = if args.verbose { sources.len() } else { sources.len().min(ROWS) };
    let domains = sources.iter().map(|source| source.domain).collect::<BTreeSet<_>>().len() > 1;
    let heading = [">pid", "name", ">examined", ">zero", ">inside", ">across", ">shared", ">freed"];
    let heading = heading.into_iter().chain(domains.then_some(">user")).collect::<Vec<_>>();
    let mut table = Table::new(style, &heading);
    let name_width = output::columns().saturating_sub(64).max(15);
    for source in &sources[..shown] {
        let totals = &source.totals;
        let size = |pages: u64| show_size(pages.saturating_mul(PAGE));
        let cells = [
            source.pid.map_or("-".into(), |pid| pid.to_string()),
            output::shorten(&source.name, name_width),
            size(totals.examined),
            size(totals.zero),
            size(totals.duplicate_inside),
            size(totals.duplicate_across),
            size(totals.shared_already + totals.shared_by_pagefold),
            show_size(source.deduplicated_bytes),
            source.domain.to_string(),
        ];
        table.row(cells);
    }
    let mut text = table.render(0);
    if shown < sources.len() {
        text += &style.dim(&format!("and {} more; --verbose shows them\n", sources.len() - shown));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_many_sources_is_one_short_line() {
        let note = |pid| Note { pid: Some(pid), name: String::new(), what: "needs PAGEMAP_SCAN".into(), failure: true };
        let gone = Note { pid: None, name: "dump".into(), what: "no such process or file".into(), failure: true };
        let mut notes: Vec<Note> = (1..=2).map(note).chain([gone]).collect();
        assert_eq!(nothing(&notes), "scan: process 1, process 2: needs PAGEMAP_SCAN; dump: no such process or file");
        notes.extend((3..=95).map(note));
        assert_eq!(nothing(&notes), "scan: 95 sources: needs PAGEMAP_SCAN; dump: no such process or file");
        assert_eq!(nothing(&[]), "scan: no process to scan");
    }
}
