//! OpenMetrics text, over loopback or a Unix socket, off unless asked for.

use crate::http::{self, Request, Response};
use crate::server::Daemon;
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Serves metrics at `at` (`HOST:PORT` of loopback, or `unix:PATH`) on threads of its own.
///
/// # Errors
/// As [`http::serve`].
pub fn serve(daemon: Arc<Daemon>, at: &str) -> io::Result<()> {
    http::serve("metrics", at, move |request| {
        (!daemon.stopping.load(Ordering::Acquire)).then(|| answer(&daemon, request))
    })
}

fn answer(daemon: &Daemon, request: &Request) -> Response {
    if !matches!(request.path.as_str(), "/metrics" | "/") {
        return Response::line("404 Not Found", "try /metrics");
    }
    let mut body = render(&daemon.status());
    if let Some(more) = daemon.more_metrics.get() {
        more(&mut body);
    }
    body.push_str("# EOF\n");
    Response::ok("application/openmetrics-text; version=1.0.0; charset=utf-8", body)
}

/// Renders `status` as OpenMetrics families; the end mark is left to the caller.
pub fn render(status: &crate::status::Status) -> String {
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, unit: &str, help: &str, rows: Vec<(String, f64)>| {
        let _ = writeln!(out, "# TYPE {name} {kind}");
        if !unit.is_empty() {
            let _ = writeln!(out, "# UNIT {name} {unit}");
        }
        let _ = writeln!(out, "# HELP {name} {help}");
        let suffix = if kind == "counter" { "_total" } else { "" };
        for (labels, value) in rows {
            let _ = writeln!(out, "{name}{suffix}{labels} {value}");
        }
    };
    let domains = |f: &dyn Fn(&pagefold_merge::stats::DomainStats) -> f64| -> Vec<(String, f64)> {
        status.domains.iter().map(|domain| (format!("{{domain=\"{}\"}}", escape(&domain.name)), f(domain))).collect()
    };
    family("pagefold_pages_shared", "gauge", "", "Slots that somebody shares.", domains(&|d| d.pages_shared as f64));
    family("pagefold_pages_sharing", "gauge", "", "Mappings of slots.", domains(&|d| d.pages_sharing as f64));
    family("pagefold_pages_zero", "gauge", "", "Zero pages dropped.", domains(&|d| d.pages_zero as f64));
    family(
        "pagefold_pages_unshared",
        "gauge",
        "",
        "Silent pages without a twin.",
        domains(&|d| d.pages_unshared as f64),
    );
    family("pagefold_pages_volatile", "gauge", "", "Pages that change.", domains(&|d| d.pages_volatile as f64));
    family("pagefold_pool_bytes", "gauge", "bytes", "Bytes in pool segments.", domains(&|d| d.pool_bytes as f64));
    family(
        "pagefold_saved_bytes",
        "gauge",
        "bytes",
        "Bytes that clients no longer hold.",
        domains(&|d| d.saved_bytes as f64),
    );
    family(
        "pagefold_profit_bytes",
        "gauge",
        "bytes",
        "Saved bytes less pool, records and mappings.",
        domains(&|d| d.general_profit as f64),
    );
    family("pagefold_full_scans", "counter", "", "Watch periods passed.", domains(&|d| d.events.full_scans as f64));
    family(
        "pagefold_merged_pages",
        "counter",
        "",
        "Pages mapped to slots.",
        domains(&|d| d.events.pages_merged as f64),
    );
    family("pagefold_zeroed_pages", "counter", "", "Zero pages dropped.", domains(&|d| d.events.pages_zeroed as f64));
    family("pagefold_breaks", "counter", "", "Merged pages written again.", domains(&|d| d.events.breaks as f64));
    family(
        "pagefold_healed_pages",
        "counter",
        "",
        "Broken pages made plain again.",
        domains(&|d| d.events.healed as f64),
    );
    family(
        "pagefold_clients",
        "gauge",
        "",
        "Processes that are managed.",
        vec![(String::new(), status.clients.len() as f64)],
    );
    family(
        "pagefold_cpu_seconds",
        "counter",
        "seconds",
        "Processor time of daemon and agents.",
        vec![(String::new(), status.totals.cpu_ns as f64 / 1e9)],
    );
    if status.cold.domains.is_empty() {
        return out;
    }
    let tiers = |f: &dyn Fn(&crate::cold::ColdDomain) -> f64| -> Vec<(String, f64)> {
        let row = |tier: &crate::cold::ColdDomain| (format!("{{domain=\"{}\"}}", escape(&tier.name)), f(tier));
        status.cold.domains.iter().map(row).collect()
    };
    let clients = |f: &dyn Fn(&crate::cold::ColdClient) -> f64| -> Vec<(String, f64)> {
        let row = |client: &crate::cold::ColdClient| {
            let labels = format!(
                "{{domain=\"{}\",pid=\"{}\",name=\"{}\"}}",
                escape(&client.domain),
                client.pid,
                escape(&client.name)
            );
            (labels, f(client))
        };
        status.cold.clients.iter().map(row).collect()
    };
    let page = pagefold_os::PAGE_SIZE as f64;
    family("pagefold_cold_bytes", "gauge", "bytes", "Clients' pages that are out.", tiers(&|t| t.cold_bytes as f64));
    family("pagefold_cold_held_bytes", "gauge", "bytes", "Memory that they take.", tiers(&|t| t.held_bytes as f64));
    family("pagefold_cold_limit_bytes", "gauge", "bytes", "What they may take.", tiers(&|t| t.bytes_max as f64));
    family("pagefold_cold_ratio", "gauge", "", "Cold bytes for each byte held.", tiers(&|t| t.ratio));
    family("pagefold_cold_contents", "gauge", "", "Different contents of the pages.", tiers(&|t| t.contents as f64));
    family("pagefold_cold_disk_bytes", "gauge", "bytes", "Written back.", tiers(&|t| t.disk_bytes as f64));
    family("pagefold_cold_waste_bytes", "gauge", "bytes", "Free slots, ends.", tiers(&|t| t.waste_bytes as f64));
    family("pagefold_cold_refused", "counter", "", "Stores refused.", tiers(&|t| t.stores_refused as f64));
    family("pagefold_cold_load_failures", "counter", "", "Loads that failed.", tiers(&|t| t.loads_failed as f64));
    family("pagefold_cold_client_bytes", "gauge", "bytes", "Of this client.", clients(&|c| c.pages_out as f64 * page));
    family("pagefold_cold_refaults", "counter", "", "Faults on cold pages.", clients(&|c| c.refaults as f64));
    family("pagefold_cold_lost_pages", "counter", "", "Pages lost: SIGBUS.", clients(&|c| c.pages_lost as f64));
    let _ = writeln!(out, "# TYPE pagefold_cold_fault_seconds histogram");
    let _ = writeln!(out, "# UNIT pagefold_cold_fault_seconds seconds");
    let _ = writeln!(out, "# HELP pagefold_cold_fault_seconds From reading a fault to answering it.");
    for client in &status.cold.clients {
        let labels = format!("domain=\"{}\",pid=\"{}\"", escape(&client.domain), client.pid);
        let mut sum = 0;
        for (bucket, count) in client.fault_us_log2.iter().enumerate() {
            sum += count;
            let bound = match bucket + 1 == client.fault_us_log2.len() {
                true => "+Inf".to_owned(),
                false => format!("{}", (1u64 << bucket) as f64 / 1e6),
            };
            let _ = writeln!(out, "pagefold_cold_fault_seconds_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let _ = writeln!(out, "pagefold_cold_fault_seconds_count{{{labels}}} {sum}");
        let _ = writeln!(out, "pagefold_cold_fault_seconds_sum{{{labels}}} {}", client.fault_ns as f64 / 1e9);
    }
    out
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
