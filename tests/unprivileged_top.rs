//! `pagefold top` through a pseudo-terminal, as a person meets it: it draws, takes keys, follows the size of the
//! window, shows a client of a real daemon, and leaves the terminal as it found it.

mod common;

use common::Reaped;
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn pagefold() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
}

/// A terminal window with `top` in it.
struct Window {
    top: Reaped,
    keys: File,
    keyboard: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
    /// All that was written to it.
    raw: Arc<Mutex<Vec<u8>>>,
    /// Tells the reader to close the terminal at the next output.
    closing: Arc<AtomicBool>,
    reader: std::thread::JoinHandle<()>,
}

const START: (u16, u16) = (24, 80);

impl Window {
    fn open(socket: &Path, color: bool) -> Window {
        let (keys, open) = common::terminal::open();
        let mut command = pagefold();
        command.args(["top", "--interval", "100ms", "--socket"]).arg(socket).env("TERM", "xterm-256color");
        command.stdin(open()).stdout(open()).stderr(open()).process_group(0);
        if color {
            command.env_remove("NO_COLOR");
        } else {
            command.env("NO_COLOR", "1");
        }
        let top = Reaped(command.spawn().expect("top starts"));
        let screen = Arc::new(Mutex::new(vt100::Parser::new(START.0, START.1, 0)));
        let keyboard = OwnedFd::from(keys.try_clone().expect("a copy"));
        let mut output = keys.try_clone().expect("a copy");
        let (written, closing) = (screen.clone(), Arc::new(AtomicBool::new(false)));
        let raw = Arc::new(Mutex::new(Vec::new()));
        let all = raw.clone();
        let close = closing.clone();
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(got @ 1..) = output.read(&mut buffer) {
                written.lock().expect("no panic").process(&buffer[..got]);
                all.lock().expect("no panic").extend_from_slice(&buffer[..got]);
                if close.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        Window { top, keys, keyboard, screen, raw, closing, reader }
    }

    fn text(&self) -> String {
        self.screen.lock().expect("no panic").screen().contents()
    }

    /// Waits until the screen satisfies `wanted`; the limit only ends a test that hangs.
    fn wait(&self, what: &str, mut wanted: impl FnMut(&vt100::Screen) -> bool) {
        let began = Instant::now();
        while !wanted(self.screen.lock().expect("no panic").screen()) {
            assert!(began.elapsed() < Duration::from_secs(180), "no {what} on\n{}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait_for(&self, text: &str) {
        self.wait(text, |screen| screen.contents().contains(text));
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }
}

/// How often `what` was written to the terminal.
fn count(raw: &Mutex<Vec<u8>>, what: &[u8]) -> usize {
    raw.lock().expect("no panic").windows(what.len()).filter(|window| *window == what).count()
}

fn resize(keyboard: &OwnedFd, (rows, columns): (u16, u16)) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(keyboard, size).expect("a size");
}

#[test]
fn a_signal_leaves_the_terminal_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    for (signal, number) in [("-TERM", 15), ("-HUP", 1)] {
        let mut window = Window::open(&dir.path().join("nobody.sock"), false);
        window.wait("the alternate screen", vt100::Screen::alternate_screen);
        window.wait_for("`pagefold run` starts one");
        let sent = Command::new("kill").args([signal, &window.top.0.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        assert_eq!(window.top.0.wait().expect("it ends").code(), Some(128 + number));
        window.wait("the ordinary screen", |screen| !screen.alternate_screen() && !screen.hide_cursor());
        let modes = tcgetattr(&window.keyboard).expect("modes").local_modes;
        assert!(modes.contains(rustix::termios::LocalModes::ECHO | rustix::termios::LocalModes::ICANON), "{modes:?}");
    }
}

/// Nor is there none: to start another one would not help.
#[test]
fn a_daemon_that_does_not_answer_is_reported() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("silent.sock");
    let _listener = pagefold_os::sock::listen(socket.as_os_str().as_bytes()).expect("a socket");
    let mut window = Window::open(&socket, false);
    window.wait_for("the daemon does not answer");
    window.press("q");
    assert_eq!(window.top.0.wait().expect("it ends").code(), Some(0));
}

#[test]
fn keys_size_and_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut window = Window::open(&dir.path().join("nobody.sock"), false);
    window.wait_for("`pagefold run` starts one");
    window.wait("the alternate screen", vt100::Screen::alternate_screen);
    window.press("?");
    window.wait_for("any key goes back");
    window.press("x");
    window.wait("screen without help", |screen| !screen.contents().contains("any key goes back"));
    window.press("2");
    window.wait_for("pagefold disk --help");
    window.press("1s");
    window.wait_for("s managed");
    let bottom = |screen: &vt100::Screen, row: u16| {
        screen.rows(0, 40).nth(usize::from(row)).is_some_and(|line| line.starts_with("q quit"))
    };
    window.wait("keys in the last line", |screen| bottom(screen, 23));
    // The window grows: the kernel tells the process, which must draw anew.
    window.screen.lock().expect("no panic").screen_mut().set_size(40, 120);
    resize(&window.keyboard, (40, 120));
    let status = Command::new("kill").args(["-WINCH", &window.top.0.id().to_string()]).status().expect("kill");
    assert!(status.success());
    window.wait("keys in the new last line", |screen| bottom(screen, 39));
    window.press("q");
    assert_eq!(window.top.0.wait().expect("it ends").code(), Some(0));
    window.wait("the ordinary screen", |screen| !screen.alternate_screen() && !screen.hide_cursor());
    let modes = tcgetattr(&window.keyboard).expect("modes").local_modes;
    assert!(modes.contains(rustix::termios::LocalModes::ECHO | rustix::termios::LocalModes::ICANON), "{modes:?}");
}

#[test]
fn a_client_of_a_real_daemon_is_on_the_screen() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("daemon.sock");
    let mut daemon = pagefold();
    daemon
        .args(["daemon", "--priority=normal", "--no-keeper", "--scan-interval", "200ms", "--socket"])
        .arg(&socket)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut daemon = Reaped(daemon.spawn().expect("the daemon starts"));
    let began = Instant::now();
    while !socket.exists() {
        if daemon.0.try_wait().expect("a state").is_some() {
            let mut said = String::new();
            daemon.0.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
            println!("SKIPPED: no daemon here: {said}");
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the daemon does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    // 32 MiB of one content, written once and then left alone: more than daemon and agents take.
    let program = "import mmap,sys,time\nm=mmap.mmap(-1,4096*8192,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n\
                   m[:]=bytes([7])*len(m)\nprint('ready',flush=True)\ntime.sleep(600)";
    let mut client = pagefold();
    client.args(["run", "--manage=all", "--socket"]).arg(&socket).args(["--", "python3", "-c", program]);
    let mut client = match client.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn() {
        Ok(child) => Reaped(child),
        Err(error) => {
            println!("SKIPPED: {error}");
            return;
        }
    };
    let mut ready = [0; 5];
    // The pipe stays open: the client has yet to end its line.
    let mut output = client.0.stdout.take().expect("a pipe");
    if output.read_exact(&mut ready).is_err() {
        println!("SKIPPED: no python3 here to be a client");
        return;
    }
    let mut window = Window::open(&socket, true);
    window.wait_for("python3");
    window.wait("saving", |screen| {
        assert_eq!(client.0.try_wait().expect("a state"), None, "the client ended");
        screen.contents().contains("pagefold  saves ") && !screen.contents().contains("saves -")
    });
    let colored = |screen: &vt100::Screen| {
        (0..80).any(|column| screen.cell(0, column).is_some_and(|cell| cell.fgcolor() != vt100::Color::Default))
    };
    window.wait("colour", colored);
    window.press("j");
    window.wait_for("not merged: ");

    // Another client, of the cold tier, in a domain of its own: all of it on one screen of 80 by 24.
    let mut sleeper = pagefold();
    sleeper
        .args(["run", "--cold", "--domain", "attic", "--socket"])
        .arg(&socket)
        .args(["--", "python3", "-c", program]);
    let mut sleeper = Reaped(sleeper.stdout(Stdio::piped()).spawn().expect("run starts"));
    sleeper.0.stdout.as_mut().expect("a pipe").read_exact(&mut ready).expect("the client works");
    // Its agent greets and tells its memory on a thread of its own: there may be nothing to park yet.
    let began = Instant::now();
    loop {
        let pid = sleeper.0.id().to_string();
        let parked = pagefold().args(["park", &pid, "--socket"]).arg(&socket).output().expect("park runs");
        if parked.status.success() && !parked.stdout.starts_with(b"0 pages") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{}", String::from_utf8_lossy(&parked.stderr));
        std::thread::sleep(Duration::from_millis(100));
    }
    window.wait("live and cold memory", |screen| {
        let text = screen.contents();
        text.contains("pages  shared ") && text.contains("cold   ") && text.contains("q quit")
    });
    window.press("4");
    window.wait_for("(parked)");
    window.wait("the cold tier's graphs", |screen| {
        let text = screen.contents();
        text.contains("faults ") && text.contains("cpu ") && ['▁', '▂', '▅', '█'].iter().any(|bar| text.contains(*bar))
    });
    // Filtered by domain: the other one's table is empty, its own is not.
    window.press("d");
    window.wait_for("d attic");
    window.wait_for("(parked)");
    window.press("1");
    window.wait_for("No clients");
    window.press("d");
    window.wait_for("d default");
    window.wait_for("pagefold  default  saves ");
    window.press("d");
    window.wait_for("d all domains");

    // Back by a key, then found by its name and unmerged after a question.
    let (worker, sleeper) = (client.0.id(), sleeper.0.id());
    window.press("4j");
    window.wait_for("p park");
    window.press("p");
    window.wait_for(&format!("{sleeper} is back: "));
    window.press("1\x1b/default\r");
    window.wait("the other client alone", |screen| {
        let text = screen.contents();
        text.contains(&format!(" {worker} python3")) && !text.contains(&format!(" {sleeper} python3"))
    });
    window.press("ju");
    window.wait_for(&format!("unmerge {worker}? "));
    window.press("y");
    window.wait_for(&format!("{worker}: "));
    window.wait_for("private again");
    window.press("\x1b");

    // No flicker: sample after sample only what changed is written, and the screen is never wiped.
    let wiped = count(&window.raw, b"\x1b[2J");
    let began = Instant::now();
    let before = window.raw.lock().expect("no panic").len();
    let head = window.text();
    window.wait("another sample", |screen| screen.contents() != head);
    std::thread::sleep(Duration::from_secs(2));
    let written = window.raw.lock().expect("no panic").len() - before;
    let samples = began.elapsed().as_millis() as usize / 100;
    assert_eq!(count(&window.raw, b"\x1b[2J"), wiped, "the screen was wiped");
    // All of the screen would be 1,920 letters each.
    assert!(written < samples * 1920, "{written} bytes in {samples} samples for {:?}", window.text());
    window.press("\x03");
    assert_eq!(window.top.0.wait().expect("it ends").code(), Some(0));
}

/// NO_COLOR, and windows of any size, one after the other.
#[test]
fn without_colour_and_in_windows_of_any_size() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut window = Window::open(&dir.path().join("nobody.sock"), false);
    window.wait_for("`pagefold run` starts one");
    for (rows, columns) in [(5, 20), (3, 10), (60, 200), (2, 80), (24, 80)] {
        window.screen.lock().expect("no panic").screen_mut().set_size(rows, columns);
        let wiped = count(&window.raw, b"\x1b[2J");
        resize(&window.keyboard, (rows, columns));
        let status = Command::new("kill").args(["-WINCH", &window.top.0.id().to_string()]).status().expect("kill");
        assert!(status.success());
        window.press("?x1234");
        assert_eq!(window.top.0.try_wait().expect("a state"), None, "it ended at {rows}x{columns}");
        // Drawn anew before the next: two sizes that come as one may be the size that it had.
        window.wait("wiped screen", |_| count(&window.raw, b"\x1b[2J") > wiped);
    }
    window.wait("keys in the last line", |screen| {
        screen.rows(0, 80).nth(23).is_some_and(|line| line.starts_with("q quit"))
    });
    let raw = window.raw.lock().expect("no panic").clone();
    let text = String::from_utf8_lossy(&raw);
    // Parameters of every "select graphic rendition": none sets a colour.
    for part in text.split("\x1b[").skip(1) {
        let Some((codes, _)) = part
            .split_once(|c: char| c.is_ascii_alphabetic())
            .filter(|(codes, _)| part.as_bytes().get(codes.len()) == Some(&b'm'))
        else {
            continue;
        };
        let colour = |code: &str| code.parse::<u32>().is_ok_and(|code| matches!(code, 30..=38 | 40..=48 | 90..=107));
        assert!(!codes.split(';').any(colour), "{codes}");
    }
    window.press("q");
    assert_eq!(window.top.0.wait().expect("it ends").code(), Some(0));
}

/// The program ends when its terminal is closed, even without a signal.
#[test]
fn a_closed_window_ends_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut window = Window::open(&dir.path().join("nobody.sock"), false);
    window.wait_for("no daemon");
    window.closing.store(true, Ordering::Relaxed);
    window.press("?");
    let Window { mut top, keys, keyboard, reader, .. } = window;
    reader.join().expect("the reader ends");
    drop((keys, keyboard));
    let began = Instant::now();
    while top.0.try_wait().expect("a state").is_none() {
        assert!(began.elapsed() < Duration::from_secs(60), "top goes on without a terminal");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn without_a_terminal_it_points_to_status() {
    let output = pagefold().arg("top").stdin(Stdio::null()).output().expect("top runs");
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "pagefold: top: needs a terminal; use `pagefold status --json`\n");
}
