//! `pagefold top`: what is merged now, live.

use crate::daemon_client;
use crate::error::Error;
use crate::top::{Act, Disk, Images, Order, Sample, View, screen};
use crate::{remote_status, units};
use crossterm::event::{self, Event, KeyEventKind};
use pagefold_daemon::cold::ClientSelector;
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::history::History;
use std::io::{ErrorKind, IsTerminal, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::{Duration, Instant, SystemTime};

/// Shortest time between samples: a sample costs the daemon a walk over its clients.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// How often the program looks whether its window is still there.
const WINDOW_WATCH: Duration = Duration::from_millis(500);
/// How long the program waits for a key before it looks for a new sample.
const KEY_WAIT: Duration = Duration::from_millis(50);
/// What is there is taken at once; with no time at all crossterm does not look.
const AT_ONCE: Duration = Duration::from_millis(1);

/// Show what is merged, live
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold top
  pagefold top --interval 250ms
  ssh -t host pagefold top

Keys: q quit, ? help, Tab panes, s sort, r reverse, d domain, / filter, arrows select, p park, u unmerge,
Space keep still.
Without a terminal use `pagefold status --json`.")]
pub struct Args {
    /// Time between two samples
    #[arg(long, short, value_name = "TIME", value_parser = units::duration, default_value = "1s")]
    interval: Duration,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

/// Shows samples until the user ends it.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    if !stdout().is_terminal() || !stdin().is_terminal() {
        return Err("top: needs a terminal; use `pagefold status --json`".into());
    }
    // It would show the codes as letters.
    if std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
        return Err("top: cannot draw on this terminal (TERM=dumb); use `pagefold status`".into());
    }
    let socket = args.daemon.socket()?;
    let samples = sample_every(args.interval.max(INTERVAL_MIN), socket.clone());
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    end_with_the_window();
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        // SAFETY: the handler only stores a number.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, View::new(!no_color), &samples, &socket);
    let restored = ratatui::try_restore();
    match SIGNAL.load(Ordering::Relaxed) {
        0 => shown.and(restored).map(|()| ExitCode::SUCCESS).map_err(Error::from),
        signal => Ok(ExitCode::from(128 + signal as u8)),
    }
}

/// The signal that ends the program, or 0. The terminal must be put in order first.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

/// Ends the program when its window is closed. Not every terminal emulator sends a signal then, and waiting for keys
/// would spin: the terminal is at its end of file for ever. There is no screen left to restore.
fn end_with_the_window() {
    std::thread::spawn(|| {
        while stdin().is_terminal() {
            std::thread::sleep(WINDOW_WATCH);
        }
        std::process::exit(0);
    });
}

/// Draws when something changed and only then: an idle screen costs nothing over a slow line.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    mut view: View,
    samples: &Receiver<Sample>,
    socket: &Path,
) -> Result<(), std::io::Error> {
    let mut changed = true;
    let (told, answers) = channel();
    while SIGNAL.load(Ordering::Relaxed) == 0 {
        if changed {
            terminal.draw(|frame| screen::draw(frame, &view))?;
            changed = false;
        }
        while let Ok(sample) = samples.try_recv() {
            view.push(sample);
            changed = true;
        }
        while let Ok(answer) = answers.try_recv() {
            view.message = Some(answer);
            changed = true;
        }
        // Keys typed ahead are all taken before the next drawing.
        let mut wait = if changed { AT_ONCE } else { KEY_WAIT };
        loop {
            match event::poll(wait) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => break,
                Err(error) => return Err(error),
            }
            wait = AT_ONCE;
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match view.key(key) {
                    Act::Quit => return Ok(()),
                    Act::Draw => changed = true,
                    Act::Ask(order) => {
                        view.message = Some(begin(order, socket, told.clone()));
                        changed = true;
                    }
                    Act::None => {}
                },
                Event::Resize(..) => changed = true,
                _ => {}
            }
        }
    }
    Ok(())
}

/// Asks the daemon on a thread of its own, which tells what came of it; returns what is to be read meanwhile.
fn begin(order: Order, socket: &Path, told: Sender<String>) -> String {
    let (request, meanwhile) = match order {
        Order::Park(pid) => (Request::Park { clients: ClientSelector::Pid(pid) }, format!("parking {pid}")),
        Order::Unpark(pid) => (Request::Unpark { clients: ClientSelector::Pid(pid) }, format!("unparking {pid}")),
        Order::Unmerge(pid) => (Request::Unmerge { pid }, format!("unmerging {pid}")),
    };
    let socket = socket.to_owned();
    // If the window has closed meanwhile nothing reads it, and the daemon goes on.
    std::thread::spawn(move || drop(told.send(outcome(order, control::ask(&socket, &request)))));
    meanwhile
}

fn outcome(order: Order, answer: std::io::Result<Answer>) -> String {
    let size = |pages: u64| units::show_size(pages * pagefold_os::PAGE_SIZE as u64);
    let (Order::Park(pid) | Order::Unpark(pid) | Order::Unmerge(pid)) = order;
    match answer {
        Ok(Answer::Moved { pages, .. }) if order == Order::Park(pid) => {
            format!("{pid} is parked: {} went", size(pages))
        }
        Ok(Answer::Moved { pages, .. }) => format!("{pid} is back: {} came", size(pages)),
        Ok(Answer::Unmerged { count, left: 0 }) => format!("{pid}: {} private again", size(count)),
        Ok(Answer::Unmerged { count, left }) => {
            format!("{pid}: {} private again, {} stay shared: see `pagefold unmerge`", size(count), size(left))
        }
        Ok(Answer::Error { message }) => message,
        Ok(_) => "the daemon gives other answers than this version expects".into(),
        Err(error) => error.to_string(),
    }
}

/// Samples on a thread of its own: a daemon that does not answer must not keep the keys from working.
fn sample_every(interval: Duration, socket: PathBuf) -> Receiver<Sample> {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        // The daemon that `top` asked for the past.
        let mut daemon = None;
        let mut images = (Instant::now(), images());
        loop {
            let next = Instant::now() + interval;
            let mut sample = take_sample(&socket);
            let answering = sample.status.as_ref().map(|status| status.pid);
            if answering.is_some() && answering != daemon {
                daemon = answering;
                sample.past = past(&socket);
            }
            if images.0.elapsed() > remote_status::IMAGES_INTERVAL {
                images = (Instant::now(), self::images());
            }
            sample.images.clone_from(&images.1);
            if sender.send(sample).is_err() {
                return;
            }
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    });
    receiver
}

/// What a daemon knows of the last minutes; one of another version may not say it.
fn past(socket: &Path) -> Option<History> {
    match control::ask(socket, &Request::History {}) {
        Ok(Answer::History(history)) => Some(*history),
        _ => None,
    }
}

fn take_sample(socket: &Path) -> Sample {
    let (status, trouble) = match control::ask(socket, &Request::Status {}) {
        Ok(Answer::Status(status)) => (Some(*status), None),
        Ok(Answer::Error { message }) => (None, Some(message)),
        Ok(_) => (None, Some("the daemon gives other answers than this version expects".into())),
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            (None, Some(format!("the daemon does not answer: {error} ({})", socket.display())))
        }
        // The cure first: the line may be cut.
        Err(error) => (None, Some(format!("no daemon; `pagefold run` starts one ({}: {error})", socket.display()))),
    };
    let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Sample { at, status, trouble, disks: disks(), ..Sample::default() }
}

/// The mounts of this user that answer.
fn disks() -> Vec<Disk> {
    let row = |status: pagefold_disk::Status| Disk {
        name: status.mountpoint,
        resident_bytes: status.resident_bytes,
        limit_bytes: status.cache_bytes,
        saved_bytes: status.memory_saved_bytes,
        io_saved_bytes: status.io_saved_bytes,
        dirty_bytes: status.dirty_bytes,
        hits: status.hits,
        misses: status.misses,
        images: status.images.into_iter().map(image).collect(),
    };
    remote_status::disks().into_iter().map(row).collect()
}

fn image(image: pagefold_disk::ImageStatus) -> Disk {
    Disk {
        name: image.name,
        resident_bytes: image.resident_bytes,
        limit_bytes: image.size_bytes,
        saved_bytes: image.memory_saved_bytes,
        io_saved_bytes: image.io_saved_bytes,
        dirty_bytes: image.dirty_bytes,
        hits: image.hits,
        misses: image.misses,
        images: Vec::new(),
    }
}

/// This user's store of images, domain by domain.
fn images() -> Vec<Images> {
    let row = |store: remote_status::ImageStore| Images {
        name: store.root,
        domain: store.domain,
        mounts: store.stat.mounts,
        resident_bytes: store.stat.resident_bytes,
        saved_bytes: store.stat.memory_saved_bytes,
    };
    remote_status::images().into_iter().map(row).collect()
}
