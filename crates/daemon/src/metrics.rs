//! OpenMetrics text, over loopback or a Unix socket, off unless asked for.

use crate::server::Daemon;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

/// Longest request line that is read.
const REQUEST_BYTES_MAX: u64 = 8 << 10;

/// Serves metrics at `at` (`HOST:PORT` of loopback, or `unix:PATH`) on a thread of its own.
///
/// # Errors
/// If the address is not a loopback address, or cannot be listened at.
pub fn serve(daemon: Arc<Daemon>, at: &str) -> io::Result<()> {
    if let Some(path) = at.strip_prefix("unix:") {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path)?;
        thread::Builder::new().name("metrics".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
                let _ = answer(&daemon, stream);
            }
        })?;
        return Ok(());
    }
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let address = at.to_socket_addrs()?.next().ok_or_else(|| bad(format!("{at} is no address")))?;
    if !address.ip().is_loopback() {
        return Err(bad(format!("{at} is not a loopback address; use 127.0.0.1:PORT or unix:PATH")));
    }
    let listener = TcpListener::bind(address)?;
    thread::Builder::new().name("metrics".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
            let _ = answer(&daemon, stream);
        }
    })?;
    Ok(())
}

fn answer(daemon: &Daemon, mut stream: impl Read + Write) -> io::Result<()> {
    if daemon.stopping.load(Ordering::Acquire) {
        return Ok(());
    }
    let mut request = String::new();
    BufReader::new((&mut stream).take(REQUEST_BYTES_MAX)).read_line(&mut request)?;
    let (code, body) = match request.split(' ').collect::<Vec<_>>()[..] {
        ["GET", "/metrics" | "/", ..] => {
            let mut body = render(&daemon.status());
            if let Some(more) = daemon.more_metrics.get() {
                more(&mut body);
            }
            body.push_str("# EOF\n");
            ("200 OK", body)
        }
        _ => ("404 Not Found", "try /metrics\n".to_owned()),
    };
    write!(
        stream,
        "HTTP/1.1 {code}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
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
    out
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
