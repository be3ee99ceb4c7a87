//! A page to look at: what `pagefold top` shows, over loopback or a Unix socket, off unless asked for.
//!
//! One file of markup, style and script (`page.html`) without anything from elsewhere; it asks for `/status.json` and
//! `/history.json` and can change nothing. A thread takes a sample a second, so that readers cost the clients nothing,
//! however many they are.

use crate::service::daemon::Daemon;
use crate::service::http::{self, Request, Response};
use crate::service::sampler;
use pagefold_os::sync::lock;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);
/// The page; `NONCE` stands where the policy's word goes.
const PAGE: &str = include_str!("page.html");

#[derive(Default)]
struct Seen {
    status: Vec<u8>,
    /// The status was read since the last sample.
    asked: bool,
}

/// Serves the page at `at` (`HOST:PORT` of loopback, or `unix:PATH`) and samples from now on.
///
/// # Errors
/// As [`http::serve`].
pub fn serve(daemon: Arc<Daemon>, at: &str) -> io::Result<http::Served> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    sample(&daemon, &seen);
    let (sampled, watched) = (seen.clone(), daemon.clone());
    let answering = daemon;
    let name =
        http::serve("web", at, move |request| (!answering.is_stopping()).then(|| answer(&answering, &seen, request)))?;
    watched.page_samples.store(true, Ordering::Relaxed);
    thread::Builder::new().name("web-sample".into()).spawn(move || {
        while !watched.is_stopping() {
            thread::sleep(INTERVAL);
            sample(&watched, &sampled);
        }
    })?;
    Ok(name)
}

fn sample(daemon: &Daemon, seen: &Mutex<Seen>) {
    if std::mem::take(&mut lock(seen).asked) {
        daemon.looks.look(&daemon.live);
    }
    let status = sampler::sample(daemon);
    let mut shown = serde_json::to_value(&status).unwrap_or_default();
    if let (Some(shown), Some(more)) = (shown.as_object_mut(), daemon.more_status.get()) {
        more(shown);
    }
    let text = serde_json::to_vec(&shown).unwrap_or_default();
    lock(seen).status = text;
}

fn answer(daemon: &Daemon, seen: &Mutex<Seen>, request: &Request) -> Response {
    const JSON: &str = "application/json; charset=utf-8";
    match request.path.as_str() {
        "/" | "/index.html" => page(),
        "/status.json" => {
            let mut seen = lock(seen);
            seen.asked = true;
            Response::ok(JSON, seen.status.clone())
        }
        "/history.json" => {
            let since = request.value("since").map(str::parse::<f64>);
            match since {
                Some(Ok(since)) if since.is_finite() => history(daemon, request, since),
                None => history(daemon, request, f64::NEG_INFINITY),
                Some(_) => Response::line("400 Bad Request", "since wants seconds since 1970"),
            }
        }
        _ => Response::line("404 Not Found", "there are /, /status.json and /history.json"),
    }
}

fn history(daemon: &Daemon, request: &Request, since: f64) -> Response {
    let past = lock(&daemon.history).past(request.value("domain"), since);
    Response::ok("application/json; charset=utf-8", serde_json::to_vec(&past).unwrap_or_default())
}

/// The page, with a word that only this answer's own script and style know: injected markup does not run.
fn page() -> Response {
    use std::hash::{BuildHasher, RandomState};
    let random = || RandomState::new().hash_one(SystemTime::now());
    let nonce = format!("{:016x}{:016x}", random(), random());
    Response {
        policy: format!(
            "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        ..Response::ok("text/html; charset=utf-8", PAGE.replace("NONCE", &nonce))
    }
}
