//! OpenMetrics text, over loopback or a Unix socket, off unless asked for.

use crate::cold::{Activity, ColdClient, ColdDomain, ColdStatus};
use crate::service::daemon::Daemon;
use crate::service::http::{self, Request, Response};
use crate::service::report;
use crate::status::Status;
use crate::waits::Waits;
use pagefold_merge::stats::DomainStats;
use pagefold_protocol::wait_histogram;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

/// Serves metrics at `at` (`HOST:PORT` of loopback, or `unix:PATH`) on threads of its own.
///
/// # Errors
/// As [`http::serve`].
pub fn serve(daemon: Arc<Daemon>, at: &str) -> io::Result<http::Served> {
    http::serve("metrics", at, move |request| (!daemon.is_stopping()).then(|| answer(&daemon, request)))
}

fn answer(daemon: &Daemon, request: &Request) -> Response {
    if !matches!(request.path.as_str(), "/metrics" | "/") {
        return Response::line("404 Not Found", "try /metrics");
    }
    daemon.looks.look(&daemon.live);
    let mut body = render(&report::status(daemon));
    if let Some(more) = daemon.more_metrics.get() {
        more(&mut body);
    }
    body.push_str("# EOF\n");
    let accepts = |kind: &str| request.accept.as_ref().is_some_and(|kinds| kinds.contains(kind));
    if accepts("text/plain") && !accepts("application/openmetrics-text") {
        return Response::ok("text/plain; version=0.0.4; charset=utf-8", plain(&body));
    }
    Response::ok("application/openmetrics-text; version=1.0.0; charset=utf-8", body)
}

/// OpenMetrics as the older text format. There families of counters have the name of their samples, and there are neither
/// units nor an end mark.
fn plain(open: &str) -> String {
    let mut out = String::with_capacity(open.len());
    let mut suffix = "";
    for line in open.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let _ = match words[..] {
            ["#", "TYPE", name, kind] => {
                suffix = match kind {
                    "counter" => "_total",
                    "info" => "_info",
                    _ => "",
                };
                writeln!(out, "# TYPE {name}{suffix} {}", if kind == "info" { "gauge" } else { kind })
            }
            ["#", "HELP", name, help] => writeln!(out, "# HELP {name}{suffix} {help}"),
            ["#", ..] => Ok(()),
            _ => writeln!(out, "{line}"),
        };
    }
    out
}

/// A family of one row for each `T`: name, kind, help, value.
type Family<T> = (&'static str, &'static str, &'static str, fn(&T) -> f64);

const OF_DAEMON: &[Family<Status>] = &[
    ("uptime_seconds", "gauge", "Time since the daemon started.", |s| s.uptime_s),
    ("resident_bytes", "gauge", "Memory of the daemon, pool and tier included.", |s| s.resident_bytes as f64),
    ("workers", "gauge", "Worker threads per domain.", |s| s.workers as f64),
    ("scan_interval_seconds", "gauge", "Time between two scans for writes.", |s| s.scan_interval_s),
    ("clients", "gauge", "Processes that are merged live.", |s| s.clients.len() as f64),
    ("unmanaged_processes", "gauge", "Processes that could not be managed, of the last 64.", |s| {
        s.unmanaged_processes.len() as f64
    }),
    ("process_bytes", "gauge", "Memory of daemon, keeper and agents beyond pool, records and tier.", |s| {
        s.totals.process_bytes as f64
    }),
    ("saved_bytes", "gauge", "Memory saved by live merging, less all that pagefold uses.", |s| {
        s.totals.saved_bytes as f64
    }),
    ("cpu_seconds", "counter", "Processor time of daemon and agents.", |s| s.totals.cpu_ns as f64 / 1e9),
];

const OF_DOMAINS: &[Family<DomainStats>] = &[
    ("pages", "gauge", "Managed pages.", |d| d.pages as f64),
    ("pages_shared", "gauge", "Slots in use.", |d| d.pages_shared as f64),
    ("pages_sharing", "gauge", "Mappings of slots.", |d| d.pages_sharing as f64),
    ("pages_zero", "gauge", "Zero pages dropped and still holes.", |d| d.pages_zero as f64),
    ("pages_unshared", "gauge", "Pages unwritten for two scans, without an equal page.", |d| d.pages_unshared as f64),
    ("pages_volatile", "gauge", "Pages that change.", |d| d.pages_volatile as f64),
    ("pool_bytes", "gauge", "Bytes in pool segments.", |d| d.pool_bytes as f64),
    ("pool_orphaned_bytes", "gauge", "Released pool segments that processes still map.", |d| {
        d.pool_orphaned_bytes as f64
    }),
    ("pool_max_bytes", "gauge", "Largest size of the pool.", |d| d.pool_max_bytes as f64),
    ("metadata_bytes", "gauge", "Index, tables and ledgers.", |d| d.metadata_bytes as f64),
    ("mapping_bytes", "gauge", "Kernel mappings that merging costs, estimated.", |d| d.mapping_bytes as f64),
    ("deduplicated_bytes", "gauge", "Shared and zero pages of clients, before costs.", |d| d.deduplicated_bytes as f64),
    ("general_profit", "gauge", "Deduplicated bytes less pool, records and mappings, as KSM counts.", |d| {
        d.general_profit as f64
    }),
    ("full_scans", "counter", "Scans for writes, summed over clients.", |d| d.events.full_scans as f64),
    ("scans_skipped", "counter", "Scans without a page fault since the last one.", |d| d.events.scans_skipped as f64),
    ("pages_fingerprinted", "counter", "Pages read and fingerprinted.", |d| d.events.pages_fingerprinted as f64),
    ("pages_merged", "counter", "Pages mapped to slots.", |d| d.events.pages_merged as f64),
    ("pages_predicted", "counter", "Pages merged without a fingerprint.", |d| d.events.pages_predicted as f64),
    ("pages_zeroed", "counter", "Zero pages dropped.", |d| d.events.pages_zeroed as f64),
    ("cow_breaks", "counter", "Merged pages written again.", |d| d.events.cow_breaks as f64),
    ("pages_restored", "counter", "Written pages turned back into plain memory.", |d| d.events.pages_restored as f64),
    ("pages_compacted", "counter", "Merged pages moved to free a pool segment.", |d| d.events.pages_compacted as f64),
    ("pages_discarded", "counter", "Merged pages discarded or unmapped by the program.", |d| {
        d.events.pages_discarded as f64
    }),
    ("runs_merged", "counter", "Runs that were mapped.", |d| d.events.runs_merged as f64),
    ("compare_failed", "counter", "Comparisons that failed.", |d| d.events.compare_failed as f64),
    ("over_vma_budget_runs", "counter", "Runs not merged: the budget of mappings was used up.", |d| {
        d.events.over_vma_budget_runs as f64
    }),
    ("pool_full_pages", "counter", "Pages not merged: the pool was full.", |d| d.events.pool_full_pages as f64),
    ("segment_alloc_failed_pages", "counter", "Pages not merged: no memory or descriptors for a segment.", |d| {
        d.events.segment_alloc_failed_pages as f64
    }),
    ("watch_seconds", "counter", "Time in the watch stage.", |d| d.events.watch_ns as f64 / 1e9),
    ("fingerprint_seconds", "counter", "Time spent reading and fingerprinting.", |d| {
        d.events.fingerprint_ns as f64 / 1e9
    }),
    ("index_seconds", "counter", "Time in the index and publishing.", |d| d.events.index_ns as f64 / 1e9),
    ("remap_seconds", "counter", "Time in remaps, as workers measure it.", |d| d.events.remap_ns as f64 / 1e9),
];

const OF_TIERS: &[Family<ColdDomain>] = &[
    ("cold_bytes", "gauge", "Clients' pages in the tier.", |t| t.cold_bytes as f64),
    ("cold_memory_bytes", "gauge", "Memory of the tier, indexes included.", |t| t.memory_bytes as f64),
    ("cold_metadata_bytes", "gauge", "Of that: indexes.", |t| t.metadata_bytes as f64),
    ("cold_max_bytes", "gauge", "Largest memory of the tier.", |t| t.max_bytes as f64),
    ("cold_compression_ratio", "gauge", "Cold bytes for each byte of memory.", |t| t.compression_ratio),
    ("cold_pages", "gauge", "Pages in the tier.", |t| t.pages as f64),
    ("cold_unique_pages", "gauge", "Of those: different contents.", |t| t.unique_pages as f64),
    ("cold_unique_pages_dense", "gauge", "Unique pages by Zstandard or as a patch.", |t| t.unique_pages_dense as f64),
    ("cold_pages_filled", "gauge", "Pages of one repeated word.", |t| t.pages_filled as f64),
    ("cold_disk_bytes", "gauge", "Written to the tier's file.", |t| t.disk_bytes as f64),
    ("cold_waste_bytes", "gauge", "Free slots and ends of slabs.", |t| t.waste_bytes as f64),
    ("cold_pages_recompressed", "counter", "Unique pages that the cleaner recompressed.", |t| {
        t.pages_recompressed as f64
    }),
    ("cold_stores_refused", "counter", "Stores refused: the tier was full.", |t| t.stores_refused as f64),
    ("cold_loads_failed", "counter", "Loads that failed.", |t| t.loads_failed as f64),
];

const OF_COLD_CLIENTS: &[Family<ColdClient>] = &[
    ("cold_pages_out", "gauge", "Pages of this client in the tier.", |c| c.pages_out as f64),
    ("cold_idle_seconds", "gauge", "Idle time after which its pages are evicted.", |c| c.idle_s),
    ("cold_pages_evicted", "counter", "Pages evicted.", |c| c.pages_evicted as f64),
    ("cold_pages_returned", "counter", "Pages returned by faults, prefetch and unpark.", |c| c.pages_returned as f64),
    ("cold_refaults", "counter", "Faults on evicted pages.", |c| c.refaults as f64),
    ("cold_zero_faults", "counter", "Faults on fresh pages of regions with evicted pages.", |c| c.zero_faults as f64),
    ("cold_pages_lost", "counter", "Pages lost: a touch is SIGBUS.", |c| c.pages_lost as f64),
    ("cold_agent_cpu_seconds", "counter", "Processor time of its agent.", |c| c.agent_cpu_ns as f64 / 1e9),
    ("cold_stops", "counter", "Times that all threads of an attached client were stopped.", |c| c.stops as f64),
    ("cold_stop_seconds", "counter", "For how long in all.", |c| c.stop_ns as f64 / 1e9),
];

/// Renders `status` as OpenMetrics families; the end mark is left to the caller.
pub fn render(status: &Status) -> String {
    let mut out = String::new();
    head(&mut out, "build", "info", "The daemon's version.");
    let _ = writeln!(out, "pagefold_build_info{{version=\"{}\"}} 1", escape(&status.version));
    families(&mut out, OF_DAEMON, &[(String::new(), status)]);
    // Users may each have a domain of one name.
    let domain = |uid: u32, name: &str| format!("uid=\"{uid}\",domain=\"{}\"", escape(name));
    let of_process = |uid: u32, of: &str, pid: i32, name: &str| {
        format!("{},pid=\"{pid}\",name=\"{}\"", domain(uid, of), escape(name))
    };
    families(&mut out, OF_DOMAINS, &rows(&status.domains, |d| domain(d.uid, &d.name)));
    // Frozen pages make their program wait; four entries to an octave are more than a graph needs.
    head(&mut out, "freeze_seconds", "histogram", "Times that pages of a client were frozen.");
    for (labels, client) in rows(&status.clients, |c| of_process(c.uid, &c.domain, c.pid, &c.name)) {
        let end = |bucket| wait_histogram::bucket_end(bucket) as f64 / 1e6;
        buckets(&mut out, "freeze_seconds", &labels, &client.freeze_us, end, |bucket| bucket % 4 == 3);
    }
    of_memory(&mut out, status, domain);
    let tiers = rows(&status.cold.domains, |t| domain(t.uid, &t.name));
    families(&mut out, OF_TIERS, &tiers);
    let log2_end = |bucket| (1u64 << bucket) as f64 / 1e6;
    head(&mut out, "cold_load_seconds", "histogram", "Time of a load from the tier.");
    for (labels, tier) in &tiers {
        buckets(&mut out, "cold_load_seconds", labels, &tier.load_us_log2, log2_end, |_| true);
    }
    let cold = rows(&status.cold.clients, |c| of_process(c.uid, &c.domain, c.pid, &c.name));
    families(&mut out, OF_COLD_CLIENTS, &cold);
    clients_by_activity(&mut out, &status.cold);
    head(&mut out, "wait_seconds", "gauge", "How long programs waited at most, by share of their waits.");
    for (labels, client) in rows(&status.clients, |c| of_process(c.uid, &c.domain, c.pid, &c.name)) {
        waits(&mut out, &format!("{labels},for=\"merging\""), client.waits, client.waits_recent);
    }
    for (labels, client) in &cold {
        waits(&mut out, &format!("{labels},for=\"cold\""), client.waits, client.waits_recent);
    }
    head(&mut out, "cold_fault_seconds", "histogram", "From reading a fault to answering it.");
    for (labels, client) in &cold {
        let count = buckets(&mut out, "cold_fault_seconds", labels, &client.fault_us_log2, log2_end, |_| true);
        let _ = writeln!(out, "pagefold_cold_fault_seconds_count{{{labels}}} {count}");
        let _ = writeln!(out, "pagefold_cold_fault_seconds_sum{{{labels}}} {}", client.fault_ns as f64 / 1e9);
    }
    out
}

/// Sums over the clients of each domain: what is not managed, and what KSM has.
fn of_memory(out: &mut String, status: &Status, domain: impl Fn(u32, &str) -> String) {
    let mut unmanaged: BTreeMap<(u32, &str, &str), u64> = BTreeMap::new();
    let mut leftover: BTreeMap<(u32, &str), [i64; 2]> = BTreeMap::new();
    for client in &status.clients {
        for memory in &client.unmanaged {
            *unmanaged.entry((client.uid, &client.domain, &memory.reason)).or_default() += memory.bytes;
        }
        let [handed, profit] = leftover.entry((client.uid, &client.domain)).or_default();
        *handed = handed.saturating_add_unsigned(client.leftover.handed_bytes);
        *profit = profit.saturating_add(client.leftover.ksm_profit_bytes);
    }
    head(out, "unmanaged_bytes", "gauge", "Resident memory of clients that is not managed, by reason.");
    for ((uid, name, reason), bytes) in unmanaged {
        let labels = domain(uid, name);
        let _ = writeln!(out, "pagefold_unmanaged_bytes{{{labels},reason=\"{}\"}} {bytes}", escape(reason));
    }
    let texts = ["Memory of clients that was handed to KSM.", "What KSM saves of it, less its records."];
    for (index, name) in ["leftover_bytes", "leftover_profit_bytes"].into_iter().enumerate() {
        head(out, name, "gauge", texts[index]);
        for ((uid, of), bytes) in &leftover {
            let _ = writeln!(out, "pagefold_{name}{{{}}} {}", domain(*uid, of), bytes[index]);
        }
    }
}

/// Half, 99 of 100 and all waits since the beginning, and of the last minutes.
fn waits(out: &mut String, labels: &str, all: Waits, recent: Waits) {
    for (over, waits) in [("5m", recent), ("all", all)] {
        for (share, us) in [("0.5", waits.p50_us), ("0.99", waits.p99_us), ("1", waits.max_us)] {
            let of = format!("{labels},over=\"{over}\",share=\"{share}\"");
            let _ = writeln!(out, "pagefold_wait_seconds{{{of}}} {}", us as f64 / 1e6);
        }
    }
}

/// How many clients of each tier do what, as the park policy sees it.
fn clients_by_activity(out: &mut String, cold: &ColdStatus) {
    head(out, "cold_clients", "gauge", "Clients of the tier by activity.");
    for tier in &cold.domains {
        for activity in Activity::ALL {
            let of_tier = |client: &&ColdClient| (client.uid, &client.domain) == (tier.uid, &tier.name);
            let count = cold.clients.iter().filter(of_tier).filter(|client| client.activity == activity).count();
            let labels =
                format!("uid=\"{}\",domain=\"{}\",activity=\"{}\"", tier.uid, escape(&tier.name), activity.name());
            let _ = writeln!(out, "pagefold_cold_clients{{{labels}}} {count}");
        }
    }
}

/// All, with their labels; of those with equal ones, as a process has that is connected anew, the last.
fn rows<T>(all: &[T], labels: impl Fn(&T) -> String) -> Vec<(String, &T)> {
    let mut seen = HashSet::new();
    let mut rows: Vec<_> =
        all.iter().rev().map(|one| (labels(one), one)).filter(|(labels, _)| seen.insert(labels.clone())).collect();
    rows.reverse();
    rows
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# TYPE pagefold_{name} {kind}");
    // OpenMetrics: a name ends with its unit.
    if let Some((_, unit @ ("seconds" | "bytes" | "ratio"))) = name.rsplit_once('_') {
        let _ = writeln!(out, "# UNIT pagefold_{name} {unit}");
    }
    let _ = writeln!(out, "# HELP pagefold_{name} {help}");
}

fn families<T>(out: &mut String, families: &[Family<T>], rows: &[(String, &T)]) {
    for (name, kind, help, value) in families {
        head(out, name, kind, help);
        let suffix = if *kind == "counter" { "_total" } else { "" };
        for (labels, of) in rows {
            let braced = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
            let _ = writeln!(out, "pagefold_{name}{suffix}{braced} {}", value(of));
        }
    }
}

/// Writes those buckets of a histogram that are `shown`, the last for all that is longer; returns the count of all.
fn buckets(
    out: &mut String,
    name: &str,
    labels: &str,
    counts: &[u64],
    end: impl Fn(usize) -> f64,
    shown: impl Fn(usize) -> bool,
) -> u64 {
    let mut sum = 0u64;
    for (bucket, count) in counts.iter().enumerate() {
        // Some counts are the client's own.
        sum = sum.saturating_add(*count);
        if bucket + 1 < counts.len() && shown(bucket) {
            let _ = writeln!(out, "pagefold_{name}_bucket{{{labels},le=\"{:?}\"}} {sum}", end(bucket));
        }
    }
    let _ = writeln!(out, "pagefold_{name}_bucket{{{labels},le=\"+Inf\"}} {sum}");
    sum
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let domain = DomainStats { name: "a \"b\"\\\n".into(), uid: 1000, pages_shared: 7, ..DomainStats::default() };
        let client = crate::status::Client { pid: 4, freeze_us: vec![1; 12], ..Default::default() };
        let cold = ColdClient { pid: 5, fault_us_log2: vec![1, 2, 3], fault_ns: 1500, ..ColdClient::default() };
        let mut status = Status { version: "1.2.3".into(), domains: vec![domain], ..Status::default() };
        status.clients.push(client);
        status.cold.clients.push(cold);
        status
    }

    #[test]
    fn names_in_labels_are_escaped() {
        let text = render(&status());
        assert!(text.contains("pagefold_pages_shared{uid=\"1000\",domain=\"a \\\"b\\\"\\\\\\n\"} 7\n"), "{text}");
    }

    /// Two users' domains of one name, and a process that is connected twice: a collector takes no two samples of one
    /// series.
    #[test]
    fn no_series_is_there_twice() {
        let mut status = status();
        let name = status.domains[0].name.clone();
        status.domains.push(DomainStats { name, uid: 0, ..DomainStats::default() });
        status.clients.push(status.clients[0].clone());
        status.cold.clients.push(status.cold.clients[0].clone());
        let text = render(&status);
        let mut seen = HashSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, _) = line.rsplit_once(' ').expect("a value");
            assert!(seen.insert(series), "{series} is there twice");
        }
        assert_eq!(text.lines().filter(|line| line.starts_with("pagefold_pages_shared{")).count(), 2);
    }

    #[test]
    fn buckets_are_sums_up_to_their_end() {
        let text = render(&status());
        let of = "{uid=\"0\",domain=\"\",pid=\"5\",name=\"\"";
        for line in [
            format!("pagefold_cold_fault_seconds_bucket{of},le=\"1e-6\"}} 1\n"),
            format!("pagefold_cold_fault_seconds_bucket{of},le=\"2e-6\"}} 3\n"),
            format!("pagefold_cold_fault_seconds_bucket{of},le=\"+Inf\"}} 6\n"),
            format!("pagefold_cold_fault_seconds_count{of}}} 6\n"),
            format!("pagefold_cold_fault_seconds_sum{of}}} 0.0000015\n"),
        ] {
            assert!(text.contains(&line), "no {line} in {text}");
        }
        // Twelve entries, four to an octave: two ends within, and the rest.
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("pagefold_freeze_seconds_bucket")).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].ends_with("le=\"4e-6\"} 4") && lines[2].ends_with("le=\"+Inf\"} 12"), "{lines:?}");
    }

    #[test]
    fn the_older_format_names_families_as_their_samples() {
        let text = plain(&format!("{}# EOF\n", render(&status())));
        assert!(text.contains("# TYPE pagefold_cow_breaks_total counter\n# HELP pagefold_cow_breaks_total "), "{text}");
        assert!(text.contains("# TYPE pagefold_build_info gauge\n"), "{text}");
        assert!(text.contains("# TYPE pagefold_pool_bytes gauge\n# HELP pagefold_pool_bytes "), "{text}");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    }
}
