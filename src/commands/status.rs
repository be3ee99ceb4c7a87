//! `pagefold status`: what is merged now, once.

use crate::error::Error;
use crate::output::{Style, Table, clean, print, print_json};
use crate::remote_status::ImageStore;
use crate::{daemon_client, units, unmanaged_memory};
use pagefold_daemon::status::{Leftover, Status};
use pagefold_daemon::waits::Waits;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

const PAGE: u64 = 4096;

/// Show what is merged and what it costs
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold status
  pagefold status --json | jq .totals.general_profit

Saved: memory that would be in use without pagefold, less all that pagefold uses: the pool, its
records and mappings, and its processes (daemon, keeper and agents).
Live: managed, memory that pagefold scans; shared, mapped from one copy in the pool; zero, zero
pages dropped; volatile, pages that change; unshared, unwritten for two scans, without an equal
page; broken, shared once and written since.
Cold: out, in the tier now; returned, by faults, prefetch and unpark; refaults, pages the program
waited for; idle, how long a page must be idle before it is evicted; lost, pages that cannot
return; waste, free slots in slabs.
Waits: how long programs waited for pages that were being merged, or that were cold: half of the
waits (p50), 99 of 100 (p99) and all (longest) were at most this long, in the last five minutes
and (ever) since the program became a client.
Not managed: memory that is neither merged nor evicted, where it is 1 MiB or more, and why.

In JSON the counters have KSM's names where they mean the same: pages_shared are the slots in use,
pages_sharing their mappings, general_profit the deduplicated bytes less pool, records and
mappings; saved_bytes is general_profit less the memory of pagefold's processes.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

/// What `--json` shows: the daemon's status, mounts of disk images and stores of image trees beside it.
#[derive(serde::Serialize)]
struct Shown {
    /// Absent without a daemon.
    #[serde(flatten)]
    status: Option<Status>,
    disks: Vec<pagefold_disk::Status>,
    /// This user's stores of image trees.
    images: Vec<ImageStore>,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let (disks, images) = (crate::remote_status::disks(), crate::remote_status::images());
    let socket = args.daemon.socket()?;
    // Mounts need no daemon, and are worth telling without one.
    let has_mounts = !disks.is_empty() || images.iter().any(|store| store.stat.mounts > 0);
    let status = if has_mounts && args.daemon.is_default() {
        daemon_client::status_of_any(&socket)?
    } else {
        Some(daemon_client::status(&socket)?)
    };
    let shown = Shown { status, disks, images };
    if args.json {
        print_json(&shown)?;
        return Ok(ExitCode::SUCCESS);
    }
    let style = Style::stdout();
    let live =
        shown.status.as_ref().map_or("no daemon runs: no live memory is merged\n".to_owned(), |s| render(s, style));
    print(&format!("{live}{}{}", render_disks(&shown.disks, style), render_images(&shown.images, style)))?;
    Ok(ExitCode::SUCCESS)
}

/// The mounts of disk images; nothing if there are none.
fn render_disks(disks: &[pagefold_disk::Status], style: Style) -> String {
    if disks.is_empty() {
        return String::new();
    }
    let mut table = Table::new(style, &["disk images", ">resident", ">cache", ">saved", ">I/O saved", ">dirty"]);
    for disk in disks {
        let sizes =
            [disk.resident_bytes, disk.cache_bytes, disk.memory_saved_bytes, disk.io_saved_bytes, disk.dirty_bytes];
        table.row(std::iter::once(disk.mountpoint.clone()).chain(sizes.map(units::show_size)));
    }
    format!("\n{}", table.render(0))
}

/// Stores of image trees of which something is mounted; nothing if there are none.
fn render_images(stores: &[ImageStore], style: Style) -> String {
    let mut table = Table::new(style, &["image trees", "domain", ">mounts", ">resident", ">saved"]);
    for store in stores.iter().filter(|store| store.stat.mounts > 0) {
        table.row([
            store.root.clone(),
            store.domain.clone(),
            units::show_count(store.stat.mounts),
            units::show_size(store.stat.resident_bytes),
            units::show_size(store.stat.memory_saved_bytes),
        ]);
    }
    if table.is_empty() { String::new() } else { format!("\n{}", table.render(0)) }
}

/// The cold tier: its domains and its clients.
fn render_cold(out: &mut String, status: &Status, style: Style) {
    for tier in &status.cold.domains {
        let _ = writeln!(
            out,
            "\ncold tier of {}: {} of pages in {} (ratio {:.1}), {} unique pages, {} on disk, {} of waste",
            clean(&tier.name),
            style.bold(&units::show_size(tier.cold_bytes)),
            units::show_size(tier.memory_bytes),
            tier.compression_ratio,
            units::show_count(tier.unique_pages),
            units::show_size(tier.disk_bytes),
            units::show_size(tier.waste_bytes),
        );
    }
    if !status.cold.clients.is_empty() {
        let heading = ["pid", "name", "domain", "out", "returned", "refaults", "idle", "lost"];
        let mut table = Table::new(style, &heading);
        for client in &status.cold.clients {
            table.row([
                client.pid.to_string(),
                format!("{}{}", client.name, client.state_suffix()),
                client.domain.clone(),
                units::show_size(client.pages_out * PAGE),
                units::show_size(client.pages_returned * PAGE),
                units::show_count(client.refaults),
                if client.idle_s > 0.0 {
                    units::show_duration(Duration::from_secs_f64(client.idle_s))
                } else {
                    "-".to_owned()
                },
                units::show_count(client.pages_lost),
            ]);
        }
        out.push('\n');
        out.push_str(&table.render(0));
    }
}

fn render(status: &Status, style: Style) -> String {
    let mut out = String::new();
    let totals = &status.totals;
    let merged = totals.pages_sharing + totals.pages_zero > 0;
    let _ = if merged {
        let saved = style.bold(&units::show_size(totals.saved_bytes.unsigned_abs()));
        let shared = units::show_counted(totals.pages_shared, "page", "pages");
        let places = units::show_counted(totals.pages_sharing, "place", "places");
        let zero = units::show_counted(totals.pages_zero, "zero page", "zero pages");
        if totals.saved_bytes < 0 {
            writeln!(
                out,
                "nothing saved yet: pagefold takes {saved} more than one copy of {shared} mapped in {places} and {zero} save"
            )
        } else {
            writeln!(out, "{saved} saved by one copy of {shared} mapped in {places}, and {zero}")
        }
    } else {
        writeln!(out, "nothing is merged now")
    };
    let orphaned = match totals.pool_orphaned_bytes {
        0 => String::new(),
        bytes => format!(" and {} orphaned", units::show_size(bytes)),
    };
    let _ = writeln!(
        out,
        "pool {}{orphaned}, records and mappings {}, processes {}, {} of processor time in {}",
        units::show_size(totals.pool_bytes),
        units::show_size(totals.metadata_bytes + totals.mapping_bytes),
        units::show_size(totals.process_bytes),
        units::show_duration(Duration::from_nanos(totals.cpu_ns)),
        units::show_duration(Duration::from_secs_f64(status.uptime_s)),
    );
    render_clients(&mut out, status, style);
    render_cold(&mut out, status, style);
    render_waits(&mut out, status, style);
    render_not_merged(&mut out, status);
    if !status.unmanaged_processes.is_empty() {
        out.push_str("\nnot managed:\n");
        for process in &status.unmanaged_processes {
            let _ = writeln!(out, "{:>12} {}: {}", process.pid, clean(&process.name), clean(&process.reason));
        }
    }
    out
}

/// The clients that are merged live.
fn render_clients(out: &mut String, status: &Status, style: Style) {
    if status.clients.is_empty() {
        return;
    }
    let heading = ["pid", "name", "domain", "managed", "shared", "zero", "volatile", "unshared", "broken"];
    let mut table = Table::new(style, &heading);
    for client in &status.clients {
        let size = |pages: u64| units::show_size(pages * PAGE);
        let is_parked = status.cold.clients.iter().any(|cold| cold.pid == client.pid && cold.parked);
        let name = match (client.stats.paused, is_parked) {
            (false, _) => client.name.clone(),
            (true, false) => format!("{} (paused)", client.name),
            (true, true) => format!("{} (parked)", client.name),
        };
        table.row([
            client.pid.to_string(),
            name,
            client.domain.clone(),
            size(client.stats.pages),
            size(client.stats.pages_sharing),
            size(client.stats.pages_zero),
            size(client.stats.pages_volatile),
            size(client.stats.pages_unshared),
            size(client.stats.pages_broken),
        ]);
    }
    out.push('\n');
    out.push_str(&table.render(0));
    render_attached(out, status);
    render_unmanaged_memory(out, status);
    render_leftover(out, status);
}

/// What became of memory that the budget of mappings keeps private, and of private mappings of files.
fn render_leftover(out: &mut String, status: &Status) {
    for client in &status.clients {
        let Leftover { state, handed_bytes, ksm_pages, ksm_profit_bytes } = &client.leftover;
        if state.is_empty() && *handed_bytes == 0 {
            continue;
        }
        let _ = write!(out, "{} {} leftover: {}", client.pid, clean(&client.name), clean(state));
        if *handed_bytes > 0 {
            let sign = if *ksm_profit_bytes < 0 { "-" } else { "" };
            let _ = write!(
                out,
                ", {}; of the program KSM has merged {} (profit {sign}{})",
                units::show_size(*handed_bytes),
                units::show_size(ksm_pages * PAGE),
                units::show_size(ksm_profit_bytes.unsigned_abs()),
            );
        }
        out.push('\n');
    }
}

/// Memory of clients that is not managed, where it is much.
fn render_unmanaged_memory(out: &mut String, status: &Status) {
    for client in &status.clients {
        let reasons = unmanaged_memory::reasons(client);
        if !reasons.is_empty() {
            let _ = writeln!(out, "{} {} not managed: {}", client.pid, clean(&client.name), reasons.join("; "));
        }
    }
}

/// How long clients waited, those that did.
fn render_waits(out: &mut String, status: &Status, style: Style) {
    let heading =
        ["pid", "name", "waits for", "p50", "p99", "longest", "p50 ever", "p99 ever", "longest ever", "waits ever"];
    let mut table = Table::new(style, &heading);
    let mut add = |pid: i32, name: &str, cause: &str, recent: Waits, all: Waits| {
        if all.count == 0 {
            return;
        }
        let show = |us, of: Waits| match of.count {
            0 => "-".to_owned(),
            _ => units::show_duration(Duration::from_micros(us)),
        };
        table.row([
            pid.to_string(),
            name.to_owned(),
            cause.to_owned(),
            show(recent.p50_us, recent),
            show(recent.p99_us, recent),
            show(recent.max_us, recent),
            show(all.p50_us, all),
            show(all.p99_us, all),
            show(all.max_us, all),
            units::show_count(all.count),
        ]);
    };
    for client in &status.clients {
        add(client.pid, &client.name, "merging", client.waits_recent, client.waits);
    }
    for client in &status.cold.clients {
        add(client.pid, &client.name, "cold pages", client.waits_recent, client.waits);
    }
    if !table.is_empty() {
        out.push('\n');
        out.push_str(&table.render(0));
    }
}

/// Why pages of clients are not merged.
fn render_not_merged(out: &mut String, status: &Status) {
    let mut reasons: std::collections::BTreeMap<&str, u64> = std::collections::BTreeMap::new();
    for client in &status.clients {
        for (why, count) in &client.stats.not_merged {
            *reasons.entry(why).or_default() += count;
        }
    }
    let huge: u64 = status.clients.iter().map(|client| client.stats.pages_huge).sum();
    let events = status.domains.iter().map(|domain| domain.events);
    let (budget, full, none) = events.fold((0, 0, 0), |(budget, full, none), event| {
        (budget + event.over_vma_budget_runs, full + event.pool_full_pages, none + event.segment_alloc_failed_pages)
    });
    let extra = [
        ("in huge pages left whole", huge),
        ("over the budget of mappings (runs)", budget),
        ("the pool was full", full),
        ("the daemon had no descriptor or memory for more of the pool", none),
    ];
    let all: Vec<(&str, u64)> = reasons.into_iter().chain(extra).filter(|(_, count)| *count > 0).collect();
    if !all.is_empty() {
        out.push_str("\nnot merged:\n");
        for (why, count) in all {
            let _ = writeln!(out, "{:>12} {why}", units::show_count(count));
        }
    }
}

/// Which clients ran before they became clients, and what stops cost them.
fn render_attached(out: &mut String, status: &Status) {
    let merged = status.clients.iter().filter(|client| client.attached);
    let merged = merged.map(|client| (client.pid, client.stops, client.stop_ns, client.stop_ns_max, ""));
    let cold = status.cold.clients.iter().filter(|client| client.attached);
    let cold = cold.map(|client| (client.pid, client.stops, client.stop_ns, client.stop_ns_max, " for the cold tier"));
    for (pid, stops, ns, ns_max, why) in merged.chain(cold) {
        let _ = writeln!(
            out,
            "{pid} attached; its threads stopped {}{why}, {} in all, at most {}",
            units::show_counted(stops, "time", "times"),
            units::show_duration(Duration::from_nanos(ns)),
            units::show_duration(Duration::from_nanos(ns_max)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_daemon::cold::ColdClient;
    use pagefold_daemon::status::{Client, UnmanagedMemory, UnmanagedProcess};

    #[test]
    fn processes_and_domains_do_not_write_to_the_terminal() {
        let hostile = || "e\x1b[31mvil\n".to_owned();
        let mut status = Status {
            clients: vec![Client { name: hostile(), domain: hostile(), ..Client::default() }],
            unmanaged_processes: vec![UnmanagedProcess { name: hostile(), reason: hostile(), pid: 7 }],
            ..Status::default()
        };
        status.cold.clients.push(ColdClient { name: hostile(), domain: hostile(), ..ColdClient::default() });
        let text = render(&status, Style::plain());
        assert_eq!(text.matches("e?[31mvil?").count(), 6, "{text:?}");
        let disk = pagefold_disk::Status { mountpoint: hostile(), ..Default::default() };
        assert!(!(text + &render_disks(&[disk], Style::plain())).contains('\x1b'));
    }

    #[test]
    fn waits_are_shown_for_both_causes_where_there_were_any() {
        let all = Waits { count: 9, p50_us: 12, p99_us: 1500, max_us: 2_000_000 };
        let recent = Waits { count: 1, p50_us: 11, p99_us: 320, max_us: 321 };
        let mut status = Status::default();
        let client = |pid, waits, waits_recent| Client { pid, waits, waits_recent, ..Client::default() };
        status.clients = vec![client(7, all, recent), client(8, Waits::default(), Waits::default())];
        status.cold.clients.push(ColdClient { pid: 9, waits: all, ..ColdClient::default() });
        let text = render(&status, Style::plain());
        let words = |pid: &str, cause: &str| {
            let line = text.lines().find(|line| line.starts_with(pid) && line.contains(cause));
            line.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let ever = "12.0 us 1.50 ms 2.0 s 9";
        assert_eq!(words("7", "merging"), Some(format!("7 merging 11.0 us 320 us 321 us {ever}")), "{text}");
        assert_eq!(words("9", "cold pages"), Some(format!("9 cold pages - - - {ever}")), "{text}");
        assert_eq!(words("8", "merging"), None, "{text}");
    }

    #[test]
    fn unmanaged_memory_is_named_by_program() {
        let unmanaged = vec![UnmanagedMemory { reason: "shared memory".into(), bytes: 9 << 20 }];
        let clients = vec![
            Client { pid: 7, name: "a".into(), unmanaged, ..Client::default() },
            Client { pid: 9, name: "a".into(), ..Client::default() },
        ];
        let text = render(&Status { clients, ..Status::default() }, Style::plain());
        assert!(text.contains("\n7 a not managed: 9.00 MiB shared memory\n"), "{text}");
        assert!(!text.contains("9 a not"), "{text}");
    }

    #[test]
    fn what_became_of_leftovers_is_told() {
        let leftover =
            Leftover { state: "handed to KSM".into(), handed_bytes: 64 << 20, ksm_pages: 256, ksm_profit_bytes: -4096 };
        let rests = Leftover { state: "private: KSM does not run".into(), ..Leftover::default() };
        let client = |pid, leftover| Client { pid, name: "a".into(), leftover, ..Client::default() };
        let clients = vec![client(7, leftover), client(8, rests), client(9, Leftover::default())];
        let text = render(&Status { clients, ..Status::default() }, Style::plain());
        let handed = "handed to KSM, 64.0 MiB; of the program KSM has merged 1.00 MiB (profit -4.00 KiB)";
        assert!(text.contains(&format!("\n7 a leftover: {handed}\n")), "{text}");
        assert!(text.contains("\n8 a leftover: private: KSM does not run\n"), "{text}");
        assert!(!text.contains("\n9 a leftover"), "{text}");
    }

    #[test]
    fn savings_are_never_negative_and_one_page_is_not_plural() {
        let mut status = Status::default();
        (status.totals.pages_shared, status.totals.pages_sharing) = (1, 2);
        status.totals.saved_bytes = -8 << 20;
        let text = render(&status, Style::plain());
        let loss = "takes 8.00 MiB more than one copy of 1 page mapped in 2 places and 0 zero pages save";
        assert!(text.starts_with("nothing saved yet") && text.contains(loss), "{text}");
        status.totals.saved_bytes = 4096;
        let text = render(&status, Style::plain());
        assert!(text.contains("saved by one copy of 1 page mapped in 2 places, and 0 zero pages"), "{text}");
    }
}
