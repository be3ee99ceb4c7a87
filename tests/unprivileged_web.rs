//! The daemon's page and metrics over HTTP: what is answered, what is refused, and what a real browser makes of it.

#[path = "common/browser.rs"]
mod browser;
mod common;

use browser::Browser;
use common::{Reaped, skipped};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(180);

fn pagefold() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.env("NO_COLOR", "1");
    command
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A daemon with `options`; `None`, after saying so, if there can be none here.
fn daemon(dir: &Path, options: &[&str]) -> Option<Reaped> {
    try_daemon(dir, options).map_err(|said| skipped(&format!("no daemon here: {said}"))).ok()
}

/// A daemon that serves at a port of its own for each of `options`; `None`, after saying so, if there can be none here.
fn daemon_at_ports<const N: usize>(dir: &Path, options: [&str; N]) -> Option<(Reaped, [u16; N])> {
    loop {
        let ports = options.map(|_| free_port());
        let places = ports.map(|port| format!("127.0.0.1:{port}"));
        let options: Vec<&str> = options.iter().zip(&places).flat_map(|(option, place)| [*option, place]).collect();
        match try_daemon(dir, &options) {
            Ok(daemon) => return Some((daemon, ports)),
            // Another process has taken one of the ports meanwhile.
            Err(said) if said.contains("in use") => {}
            Err(said) => {
                skipped(&format!("no daemon here: {said}"));
                return None;
            }
        }
    }
}

/// A daemon with `options` that serves already, or what one said that ended.
fn try_daemon(dir: &Path, options: &[&str]) -> Result<Reaped, String> {
    let socket = dir.join("daemon.sock");
    let mut command = pagefold();
    command
        .args(["daemon", "--priority=normal", "--no-keeper", "--scan-interval", "200ms", "--socket"])
        .arg(&socket)
        .args(options);
    // Its own stores and mounts, not those of the user that runs the test.
    command.env("PAGEFOLD_STORE", dir.join("images")).env("PAGEFOLD_RUNTIME_DIR", dir.join("run"));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut daemon = Reaped(command.spawn().expect("the daemon starts"));
    let began = Instant::now();
    // It answers when its pages are served too.
    while !pagefold().args(["status", "--socket"]).arg(&socket).output().expect("status").status.success() {
        if daemon.0.try_wait().expect("a state").is_some() {
            let mut said = String::new();
            daemon.0.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
            return Err(said);
        }
        assert!(began.elapsed() < LIMIT, "the daemon does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(daemon)
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port()
}

/// Sends `request` and returns the answer: head and body.
fn exchange(mut stream: impl Read + Write, request: &[u8]) -> (String, String) {
    // The server may refuse before all of it is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.to_owned(), body.to_owned())
}

fn get(port: u16, target: &str) -> (String, String) {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the daemon listens");
    exchange(stream, format!("GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n").as_bytes())
}

#[test]
fn only_proper_requests_of_this_machine_are_answered() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some((_daemon, [web, metrics])) = daemon_at_ports(dir.path(), ["--web", "--metrics"]) else { return };

    let (head, page) = get(web, "/");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let policy = head.lines().find(|line| line.starts_with("Content-Security-Policy: ")).expect("a policy");
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    let nonce = policy.split("'nonce-").nth(1).and_then(|rest| rest.split('\'').next()).expect("a nonce");
    assert!(nonce.len() == 32 && page.contains(nonce) && !page.contains("NONCE"), "{nonce}");
    assert!(!get(web, "/").1.contains(nonce), "each answer has a word of its own");
    assert!(!page.contains("http://www.w3.org/1999"), "nothing is loaded from elsewhere");
    for line in ["X-Content-Type-Options: nosniff", "Cache-Control: no-store", "Referrer-Policy: no-referrer"] {
        assert!(head.contains(line), "{head}");
    }
    let (head, body) = get(web, "/status.json");
    assert!(head.contains("application/json"), "{head}");
    let status: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    assert!(status["version"].is_string() && status["clients"].is_array(), "{status}");
    let past: serde_json::Value = serde_json::from_str(&get(web, "/history.json").1).expect("JSON");
    let times = past["fine"]["time"].as_array().expect("times");
    assert!(!times.is_empty(), "history is there on first load");
    let since = format!("/history.json?since={}", times.last().and_then(|t| t.as_f64()).expect("a time") + 1e6);
    let past: serde_json::Value = serde_json::from_str(&get(web, &since).1).expect("JSON");
    assert_eq!(past["fine"]["time"], serde_json::json!([]));

    let (head, body) = get(metrics, "/metrics");
    assert!(head.contains("application/openmetrics-text") && body.ends_with("# EOF\n"), "{head}");

    for port in [web, metrics] {
        let host = format!("Host: localhost:{port}\r\n");
        for (request, expected) in [
            (format!("GET /nowhere HTTP/1.1\r\n{host}\r\n"), "404"),
            (format!("POST / HTTP/1.1\r\n{host}Content-Length: 2\r\n\r\n{{}}"), "400"),
            (format!("POST / HTTP/1.1\r\n{host}\r\n"), "405"),
            (format!("DELETE /status.json HTTP/1.1\r\n{host}\r\n"), "405"),
            (format!("OPTIONS * HTTP/1.1\r\n{host}\r\n"), "405"),
            ("GET / HTTP/1.1\r\nHost: rebound.example\r\n\r\n".into(), "403"),
            (format!("GET / HTTP/1.1\r\nHost: rebound.example:{port}\r\n\r\n"), "403"),
            ("GET / HTTP/1.0\r\n\r\n".into(), "403"),
            ("GET / HTTP/1.1\r\n\r\n".into(), "400"),
            (format!("GET / HTTP/1.1\r\n{host}{host}\r\n"), "400"),
            (format!("GET /../etc/passwd HTTP/1.1\r\n{host}\r\n"), "404"),
            (format!("GET /%2e%2e/etc/passwd HTTP/1.1\r\n{host}\r\n"), "404"),
            (format!("GET / HTTP/1.1\r\n{host}A: {}\r\n\r\n", "a".repeat(64 << 10)), "431"),
            (format!("GET /{} HTTP/1.1\r\n{host}\r\n", "a".repeat(64 << 10)), "431"),
            ("\0\0\0\0".into(), "400"),
        ] {
            let stream = TcpStream::connect(("127.0.0.1", port)).expect("the daemon listens");
            let (head, _) = exchange(stream, request.as_bytes());
            assert!(head.starts_with(&format!("HTTP/1.1 {expected} ")), "{request:.60?}: {head}");
            assert_eq!(head.contains("Allow: GET"), expected == "405", "{head}");
        }
    }
    assert!(get(web, "/history.json?since=yesterday").0.starts_with("HTTP/1.1 400 "));

    // An idle connection holds one of the permits for a while, and does not keep others out for ever.
    let idle: Vec<TcpStream> = (0..40).filter_map(|_| TcpStream::connect(("127.0.0.1", web)).ok()).collect();
    wait("an answer beside idle connections", || get(web, "/status.json").0.starts_with("HTTP/1.1 200"));
    drop(idle);
}

#[test]
fn a_unix_socket_is_for_its_owner_or_a_group() {
    let dir = tempfile::tempdir().expect("a directory");
    let (page, metrics) = (dir.path().join("web.sock"), dir.path().join("metrics.sock"));
    // SAFETY: getegid(2) has no arguments and cannot fail.
    let group = unsafe { libc::getegid() };
    // What a killed daemon left does not keep the next one out.
    drop(std::os::unix::net::UnixListener::bind(&page).expect("a socket"));
    let options = [format!("unix:{}", page.display()), format!("unix:{},group={group}", metrics.display())];
    let Some(_daemon) = daemon(dir.path(), &["--web", &options[0], "--metrics", &options[1]]) else { return };
    wait("the page", || UnixStream::connect(&page).is_ok() && UnixStream::connect(&metrics).is_ok());
    let mode = |path: &Path| std::fs::metadata(path).expect("a socket").permissions().mode() & 0o777;
    assert_eq!((mode(&page), mode(&metrics)), (0o600, 0o660));
    assert_eq!(std::fs::metadata(&metrics).expect("a socket").gid(), group);
    // No name can be made to point to a socket in the file system: any Host will do.
    let request = b"GET /status.json HTTP/1.1\r\nHost: pagefold\r\n\r\n";
    let (head, body) = exchange(UnixStream::connect(&page).expect("it listens"), request);
    assert!(head.starts_with("HTTP/1.1 200 ") && body.contains("\"clients\""), "{head}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("a directory").flatten().map(|e| e.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("web.sock.")), "{left:?}");
}

#[test]
fn addresses_that_others_could_reach_are_refused_in_one_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").expect("a file");
    let path = format!("unix:{}", file.display());
    let nowhere = format!("unix:{}/none/web.sock", dir.path().display());
    // The daemon's own socket takes packets: if the page replaced it, no client would find the daemon.
    let own = format!("unix:{}", dir.path().join("daemon.sock").display());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("its number").to_string();
    for (option, at, expected) in [
        ("--web", "0.0.0.0:0", "is not a loopback address"),
        ("--web", "192.0.2.1:80", "is not a loopback address"),
        ("--metrics", "[::]:0", "is not a loopback address"),
        ("--web", "9200", "is no address"),
        ("--web", "", "`` is no address"),
        ("--web", path.as_str(), "is no socket; name another, or remove it"),
        ("--web", nowhere.as_str(), "none is no directory; make it, or name another\n"),
        ("--metrics", own.as_str(), "daemon.sock: a process serves there already; name another\n"),
        ("--metrics", port.as_str(), "; name another port\n"),
        (
            "--web",
            "unix:/x,group=no-such-group",
            "there is no group \"no-such-group\": give a name of /etc/group, or a number\n",
        ),
    ] {
        let mut command = pagefold();
        command.args(["daemon", "--socket"]).arg(dir.path().join("daemon.sock")).args([option, at]);
        let output = command.output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        // What is wrong by itself is wrong usage; what the file system says is a failure.
        assert_eq!(
            output.status.code(),
            Some(if [&path, &nowhere, &own, &port].iter().any(|failure| *failure == at) { 1 } else { 2 }),
            "{at}: {errors}"
        );
        let line = errors.lines().next().unwrap_or_default();
        assert!(format!("{line}\n").contains(expected) && line.contains(option), "{at}: {errors}");
    }
    assert_eq!(std::fs::read(&file).expect("a file"), b"precious");
}

/// A client with markup as its name, in `domain`; `None`, after saying so, if there is no python3.
fn client(dir: &Path, domain: &str) -> Option<Reaped> {
    let found = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let Some(found) = found.ok().filter(|output| output.status.success()) else {
        skipped("no python3 here to be a client");
        return None;
    };
    let python = dir.join(format!("<b>{domain}"));
    let real = String::from_utf8(found.stdout).expect("a path");
    std::os::unix::fs::symlink(real.trim(), &python).expect("a link");
    let program = "import mmap,time\nm=mmap.mmap(-1,4096*2000,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n\
                   m[:]=bytes(range(1,256))*(len(m)//255)+bytes(len(m)%255)\nprint('ready',flush=True)\ntime.sleep(600)";
    let mut command = pagefold();
    command.args(["run", "--manage=all", "--domain", domain, "--socket"]).arg(dir.join("daemon.sock"));
    command.arg("--").arg(&python).args(["-c", program]);
    let mut client = Reaped(command.stdout(Stdio::piped()).spawn().expect("run starts"));
    let mut ready = [0; 5];
    client.0.stdout.as_mut().expect("a pipe").read_exact(&mut ready).expect("the client works");
    Some(client)
}

#[test]
fn a_browser_shows_the_clients_of_a_real_daemon() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some((daemon, [port])) = daemon_at_ports(dir.path(), ["--web"]) else { return };
    let base = format!("http://127.0.0.1:{port}/");
    let Some(mut browser) = Browser::start() else { return };
    let (Some(first), Some(_second)) = (client(dir.path(), "red"), client(dir.path(), "blue")) else { return };
    browser.open(&base);

    // The page shows what the daemon says: managed memory of the client, and that some of it is shared.
    let pid = first.0.id();
    let cells = format!(
        "(() => {{ const row = [...document.querySelectorAll('#clients tbody tr')]\
         .find((row) => row.cells[0].textContent === '{pid}');\
         return row ? [...row.cells].map((cell) => cell.textContent) : []; }})()"
    );
    wait("the client's figures", || {
        let status = pagefold().args(["status", "--json", "--socket"]).arg(dir.path().join("daemon.sock")).output();
        let status: serde_json::Value = serde_json::from_slice(&status.expect("status").stdout).expect("JSON");
        let known = status["clients"].as_array().expect("clients").iter().find(|client| client["pid"] == pid);
        let Some(stats) = known.map(|client| &client["stats"]) else { return false };
        let size = |pages: &serde_json::Value| format!("size({} * 4096)", pages.as_u64().expect("pages"));
        let expected = browser.evaluate(&format!("[{}, {}]", size(&stats["pages"]), size(&stats["pages_sharing"])));
        let shown = browser.evaluate(&cells);
        shown[1] == "<b>red" && shown[3] == expected[0] && shown[4] == expected[1] && shown[4] != "0 B"
    });
    assert_eq!(browser.evaluate("document.querySelectorAll('td b').length"), 0, "names are text, never markup");

    // Graphs: many points, all of them numbers within the picture, and a figure beside each.
    let points = "[...document.querySelectorAll('#graphs figure')].map((figure) => \
                  (figure.querySelector('path:not(.area)').getAttribute('d') || '').slice(1).split('L')\
                  .map((point) => point.split(',').map(Number)))";
    wait("graphs", || {
        let graphs = browser.evaluate(points);
        graphs.as_array().is_some_and(|graphs| {
            graphs.len() == 7 && graphs.iter().all(|graph| graph.as_array().is_some_and(|points| points.len() >= 4))
        })
    });
    let graphs = browser.evaluate(points);
    for point in graphs.as_array().expect("graphs").iter().flat_map(|graph| graph.as_array().expect("points")) {
        let (x, y) = (point[0].as_f64().expect("a number"), point[1].as_f64().expect("a number"));
        assert!((0.0..=1000.0).contains(&x) && (0.0..=200.0).contains(&y), "{point}");
    }
    let height = browser.evaluate("document.querySelector('#graph-cpu svg').getBoundingClientRect().height");
    assert!(height.as_f64().is_some_and(|height| height > 50.0), "{height}");
    // The saving rose from nothing to something: the line is not flat.
    let rise = "(() => { const all = [...document.querySelectorAll('#graph-saved path:not(.area)')]\
                .flatMap((path) => (path.getAttribute('d') || '').slice(1).split('L').map((p) => Number(p.split(',')[1])));\
                return Math.max(...all) - Math.min(...all); })()";
    wait("a saving", || browser.evaluate(rise).as_f64().is_some_and(|rise| rise > 1.0));

    // The value under the pointer, while it is there.
    let output = "document.querySelector('#graph-available output').textContent";
    let point = |kind: &str| {
        format!(
            "(() => {{ const svg = document.querySelector('#graph-available svg'), box = svg.getBoundingClientRect();\
             svg.dispatchEvent(new PointerEvent('{kind}', {{ clientX: box.left + box.width / 2 }})); }})()"
        )
    };
    let has_time =
        |text: &serde_json::Value| text.as_str().is_some_and(|text| text.contains(" at ") && text.contains(':'));
    browser.evaluate(&point("pointermove"));
    assert!(has_time(&browser.evaluate(output)), "{}", browser.evaluate(output));
    browser.evaluate(&point("pointerleave"));
    assert!(!has_time(&browser.evaluate(output)), "{}", browser.evaluate(output));
    let host = pagefold_os::probe::host_name();
    assert_eq!(browser.evaluate("document.title"), format!("{host}: pagefold"));

    // Only one domain, then all again.
    let names = "[...document.querySelectorAll('#clients tbody tr')].map((row) => row.cells[2].textContent).sort()";
    let choose = |domain: &str| {
        format!(
            "(() => {{ const choice = document.getElementById('domain'); choice.value = '{domain}';\
             choice.dispatchEvent(new Event('change')); }})()"
        )
    };
    assert_eq!(browser.evaluate(names), serde_json::json!(["blue", "red"]));
    browser.evaluate(&choose("red"));
    assert_eq!(browser.evaluate(names), serde_json::json!(["red"]));
    wait("the domain's own graph", || {
        browser.evaluate("state.past !== null && state.past.domain === 'red' && state.past.fine.time.length > 1")
            == true
    });
    browser.evaluate(&choose(""));
    assert_eq!(browser.evaluate(names), serde_json::json!(["blue", "red"]));
    // Another order, by a click on the heading.
    let order = "[...document.querySelectorAll('#clients tbody tr')].map((row) => Number(row.cells[0].textContent))";
    browser.evaluate("document.querySelector('#clients th button').click()");
    let down = browser.evaluate(order);
    browser.evaluate("document.querySelector('#clients th button').click()");
    let up = browser.evaluate(order);
    assert!(down[0].as_u64() > down[1].as_u64() && up[0] == down[1] && up[1] == down[0], "{down} {up}");

    // Light and dark, as the system says and as the reader says.
    let back = "getComputedStyle(document.body).backgroundColor";
    let scheme = |browser: &mut Browser, scheme: &str| {
        let features = serde_json::json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        browser.ask("Emulation.setEmulatedMedia", features);
        browser.evaluate(back)
    };
    let (dark, light) = (scheme(&mut browser, "dark"), scheme(&mut browser, "light"));
    assert_ne!(dark, light);
    browser.evaluate("document.getElementById('theme').click()");
    assert_eq!(browser.evaluate(back), dark);

    // Nothing went wrong, and nothing was asked of anybody else.
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let asked = browser.requests();
    assert!(asked.iter().any(|url| url.contains("/history.json")), "{asked:?}");
    let elsewhere: Vec<_> = asked.iter().filter(|url| !url.starts_with(&base) && !url.starts_with("data:")).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");

    // A daemon that is gone is said to be gone.
    drop(daemon);
    wait("the bad news", || {
        let text = browser.evaluate(
            "document.getElementById('trouble').hidden ? '' : document.getElementById('trouble').textContent",
        );
        text.as_str().is_some_and(|text| text.contains("does not answer"))
    });
}
