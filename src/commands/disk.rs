//! `pagefold disk`: disk images through one page cache without copies.

use crate::error::Error;
use crate::output::{Progress, Style, Table, clean, complain, print, print_json};
use crate::units::{self, show_size};
use crate::{completion_values, note};
use pagefold_disk::control;
use pagefold_disk::fuse::Transport;
use pagefold_disk::mount::{self, Options};
use pagefold_disk::{Config, Status, scan};
use pagefold_os::procfs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Serve disk images through one page cache that keeps equal blocks once
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold disk scan /srv/vms
  pagefold disk mount /srv/vms /mnt/vms --background --cache-size 8G
  pagefold disk status
  pagefold disk umount /mnt/vms")]
pub struct Args {
    #[command(subcommand)]
    command: DiskCommand,
}

#[derive(clap::Subcommand)]
enum DiskCommand {
    /// Show the images of a directory under the same names, through the cache
    Mount(MountArgs),
    /// Unmount, after everything is written back
    Umount(UmountArgs),
    /// Tell what is in memory, what is shared, and what that saves
    Status(StatusArgs),
    /// Dry run: how much equal content images hold, and what keeps it from being shared
    Scan(ScanArgs),
}

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold disk mount /srv/vms /mnt/vms --cache-size 8G\n  \
    pagefold disk mount /srv/vms /mnt/vms --background --fingerprints ./fp\n  \
    pagefold disk mount /srv/vms /mnt/vms --nbd /run/images.sock\n\n\
    Point the VMs at /mnt/vms, with cache=none, and change the files below /srv/vms through the mount only.")]
struct MountArgs {
    /// Directory with the images
    directory: PathBuf,
    /// Where to mount; an existing directory outside of DIRECTORY, whose content is hidden meanwhile
    mountpoint: PathBuf,
    /// Memory for blocks, 4M at least; bookkeeping comes on top, about 2.5 % and 1 MiB
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = cache_size)]
    cache_size: u64,
    /// Return once mounted
    #[arg(long)]
    background: bool,
    /// With --background: print JSON
    #[arg(long, requires = "background")]
    json: bool,
    /// Keep fingerprints of the images' blocks in DIR: content another image brought in is then not read again
    #[arg(long, value_name = "DIR")]
    fingerprints: Option<PathBuf>,
    /// Serve the images over NBD on this Unix socket too; the export's name is the file's
    #[arg(long, value_name = "SOCKET")]
    nbd: Option<PathBuf>,
    /// Threads that answer requests
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// How requests arrive: by rings (FUSE over io_uring, Linux 6.14), classically (/dev/fuse), or by rings where the kernel
    /// serves them; `pagefold doctor` says what it does
    #[arg(long, value_enum, default_value_t = TransportArg::Auto)]
    transport: TransportArg,
    /// Furthest read-ahead of a sequential reader; 0 for none
    #[arg(long, value_name = "SIZE", default_value = "2M", value_parser = units::size)]
    read_ahead: u64,
    /// Pause between flushes of dirty blocks, which cannot be shared until they are flushed
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = flush_interval)]
    flush_interval: Duration,
    /// Most blocks of 4 KiB one periodic flush writes per image
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = clap::value_parser!(u32).range(1..))]
    flush_batch: u32,
    /// Dirty share of the cache above which writers wait for the disk, 1 to 80
    #[arg(long, value_name = "PERCENT", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=80))]
    dirty_percent: u32,
    /// Let blocks merge with equal pages of guests; on by itself under `pagefold run`
    #[arg(long)]
    merge: bool,
    /// Refuse every change
    #[arg(long)]
    read_only: bool,
    /// Let other users in, as far as the files' permissions allow
    #[arg(long)]
    allow_other: bool,
    /// How long open files are still served after a request to end
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::duration)]
    shutdown_grace: Duration,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum TransportArg {
    Auto,
    Ring,
    Classic,
}

impl From<TransportArg> for Transport {
    fn from(argument: TransportArg) -> Self {
        match argument {
            TransportArg::Auto => Transport::Auto,
            TransportArg::Ring => Transport::Ring,
            TransportArg::Classic => Transport::Classic,
        }
    }
}

fn cache_size(text: &str) -> Result<u64, String> {
    // With less the cache would be larger than it was told to be.
    let size = crate::args::at_least(pagefold_disk::config::CACHE_BYTES_MIN as u64, text)?;
    let max = pagefold_disk::config::CACHE_BYTES_MAX as u64;
    if size <= max { Ok(size) } else { Err(format!("takes at most 4 TiB less one page ({max})")) }
}

/// Refuses a cache whose bookkeeping alone would not fit, and says when the cache itself will not.
fn check_memory(cache_bytes: u64) -> Result<(), Error> {
    let (available, total) = pagefold_os::procfs::available_and_total();
    let (size, records) = (show_size(cache_bytes), cache_bytes / 40);
    if records > available {
        let (records, free) = (show_size(records), show_size(available));
        let why = format!("the bookkeeping of {size} takes {records}, and {free} are free");
        return Err(format!("--cache-size: {why}").into());
    }
    if cache_bytes > total {
        note!("pagefold: note: --cache-size {size} is more than this machine has, {}", show_size(total));
    }
    Ok(())
}

/// A flush costs the disk something: not more often than a hundred times a second.
fn flush_interval(text: &str) -> Result<Duration, String> {
    crate::args::no_shorter(10, text)
}

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold disk umount /mnt/vms\n  pagefold disk umount --force /mnt/vms   \
    # its disk fails or hangs")]
struct UmountArgs {
    /// The mount point
    #[arg(add = completion_values::disk_mounts())]
    mountpoint: PathBuf,
    /// Give up what the disk refuses, and kill the process when it does not end in 10 seconds; what it had
    /// not written is lost
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  pagefold disk status\n  pagefold disk status /mnt/vms --json | jq .memory_saved_bytes"
)]
struct StatusArgs {
    /// The mount point; all mounts of this user if left out
    #[arg(add = completion_values::disk_mounts())]
    mountpoint: Option<PathBuf>,
    /// Print JSON: one object for a mount point, else a list
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold disk scan /srv/vms\n  pagefold disk scan a.raw b.raw c.qcow2 --json")]
struct ScanArgs {
    /// Images, or directories of images
    #[arg(required = true)]
    images: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs a `pagefold disk` command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    match args.command {
        DiskCommand::Mount(args) => run_mount(&args),
        DiskCommand::Umount(args) => run_umount(&args),
        DiskCommand::Status(args) => run_status(&args),
        DiskCommand::Scan(args) => run_scan(&args),
    }
}

fn run_mount(args: &MountArgs) -> Result<ExitCode, Error> {
    check_memory(args.cache_size)?;
    if args.background {
        return mount_in_background(args);
    }
    let config = Config {
        cache_bytes: usize::try_from(args.cache_size)?,
        flush_interval: args.flush_interval,
        flush_batch: args.flush_batch as usize,
        dirty_percent: args.dirty_percent,
        dirty_background_percent: args.dirty_percent.div_ceil(4),
        read_ahead_bytes: usize::try_from(args.read_ahead)?,
        // Under `pagefold run` the agent is told of the frames by the very call this makes.
        merge: args.merge || crate::daemon_client::has_agent(),
        ..Config::default()
    };
    let options = Options {
        directory: args.directory.clone(),
        mountpoint: args.mountpoint.clone(),
        config,
        threads: args.workers.into(),
        transport: args.transport.into(),
        fingerprints: args.fingerprints.clone(),
        read_only: args.read_only,
        allow_other: args.allow_other,
        nbd: args.nbd.clone(),
        grace: args.shutdown_grace,
    };
    let called = Caller::of_this();
    mount::serve(&options, |status| {
        called.let_go();
        note!(
            "pagefold: {} {SHOWN_AT} {} through a cache of {}",
            status.directory,
            status.mountpoint,
            show_size(status.cache_bytes)
        );
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Set for a mount in the background: the process that waits for it.
const CALLER: &str = "PAGEFOLD_DISK_CALLER";

/// The process that waits until this mount is there.
struct Caller(Option<libc::pid_t>);

impl Caller {
    /// That of this process: should it end before it has the mount it called for, so does this one, as if asked to.
    fn of_this() -> Caller {
        let caller = std::env::var(CALLER).ok().and_then(|pid| pid.parse().ok());
        if let Some(pid) = caller {
            // SAFETY: `PR_SET_PDEATHSIG` takes no pointer.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
            // SAFETY: takes nothing.
            if unsafe { libc::getppid() } != pid {
                // It was too late for a signal.
                std::process::exit(1);
            }
        }
        Caller(caller)
    }

    /// The mount is there, and stays.
    fn let_go(self) {
        if self.0.is_some() {
            // SAFETY: `PR_SET_PDEATHSIG` takes no pointer.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) };
        }
    }
}

/// Starts this program again without `--background` and waits until it says that it is mounted. What it says later
/// goes on in the same file, which gets its name beside the socket only then: before, a log of that name is another's.
fn mount_in_background(args: &MountArgs) -> Result<ExitCode, Error> {
    use std::os::unix::process::CommandExt;
    let log_path = control::socket_path(&absolute(&args.mountpoint)?).with_extension("log");
    control::make_own(&control::runtime_dir())?;
    let draft = mount::RemoveOnDrop(log_path.with_extension(format!("log.{}", std::process::id())));
    let log = crate::daemon_client::create_log(&draft.0).and_then(|log| reserve(&log).map(|()| log));
    let log = log.map_err(|error| format!("{}, for messages: {error}", draft.0.display()))?;
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--background" && argument != "--json");
    let mut child = std::process::Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(log)
        .env(CALLER, std::process::id().to_string())
        // Out of this terminal's job: its interrupt key is not meant for the mount.
        .process_group(0)
        .spawn()?;
    loop {
        let ended = child.try_wait()?;
        let said = std::fs::read_to_string(&draft.0)?;
        if let Some(status) = ended {
            complain(&said);
            return Ok(crate::exit::of_child(status));
        }
        if said.contains(SHOWN_AT) {
            std::fs::rename(&draft.0, &log_path)?;
            remove_drafts(&log_path);
            let (directory, at) = (args.directory.display(), args.mountpoint.display());
            if args.json {
                print_json(&serde_json::json!({ "directory": directory.to_string(), "mountpoint": at.to_string(),
                    "pid": child.id(), "log": log_path.display().to_string() }))?;
            } else {
                let log = log_path.display();
                print(&format!("mounted {directory} at {at}, process {}, messages in {log}\n", child.id()))?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Takes the room for the first lines of a log: what is not written there is waited for in vain.
fn reserve(log: &std::fs::File) -> std::io::Result<()> {
    const BYTES: libc::off_t = 4096;
    // SAFETY: fallocate(2) takes no pointer, and `FALLOC_FL_KEEP_SIZE` changes no byte of the file.
    let done = unsafe { libc::fallocate(log.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, BYTES) } == 0;
    match std::io::Error::last_os_error() {
        error if !done && error.raw_os_error() == Some(libc::ENOSPC) => Err(error),
        // Not every file system can.
        _ => Ok(()),
    }
}

/// Removes the drafts of `log` that calls left which were killed: no other mount writes there, now that ours has the place.
fn remove_drafts(log: &Path) {
    let (Some(directory), Some(name)) = (log.parent(), log.file_name().and_then(|name| name.to_str())) else { return };
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let of = entry.file_name();
        let pid = of.to_str().and_then(|of| of.strip_prefix(name)?.strip_prefix('.')?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Part of the line a mount says when it is ready.
const SHOWN_AT: &str = "is shown at";

/// The mount point as its socket is named.
fn absolute(mountpoint: &Path) -> Result<PathBuf, Error> {
    mount::resolve(mountpoint).map_err(|error| format!("{}: {error}", mountpoint.display()).into())
}

fn run_umount(args: &UmountArgs) -> Result<ExitCode, Error> {
    let mountpoint = absolute(&args.mountpoint)?;
    let socket = control::socket_path(&mountpoint);
    let pid = match control::ask_status(&socket) {
        Ok(status) => Some(status.pid),
        Err(error) if !args.force && !is_gone(&error) => {
            return Err(format!("{}: {}", args.mountpoint.display(), silent(&args.mountpoint, &error)).into());
        }
        Err(_) => None,
    };
    let trouble = match pid {
        Some(pid) if args.force => within(FORCE_PATIENCE, {
            let socket = socket.clone();
            move || orderly_end(&socket, pid).map_err(|error| error.to_string())
        })
        .unwrap_or_else(|| Err("its process does not end".to_owned()))
        .unwrap_or_else(|error| format!("{error}; what it had not written back is lost")),
        Some(pid) => {
            write_back(&socket, args)?;
            let at = &args.mountpoint;
            orderly_end(&socket, pid).map_err(|error| format!("{}: {}", at.display(), silent(at, &error)))?
        }
        None => String::new(),
    };
    if mount::is_mounted(&mountpoint) {
        if args.force {
            // Waiting calls return now. The connection may be gone already.
            let _ = mount::cut_off(&mountpoint, &socket);
        }
        mount::unmount(&mountpoint, true).map_err(|error| format!("{}: {error}", mountpoint.display()))?;
    } else if pid.is_none() {
        return Err(format!("{}: not mounted by pagefold", args.mountpoint.display()).into());
    }
    if pid.is_none() {
        let _ = std::fs::remove_file(socket);
    }
    // A log that says only that the mount succeeded is not worth keeping.
    let log = control::socket_path(&mountpoint).with_extension("log");
    if trouble.is_empty()
        && std::fs::read_to_string(&log).is_ok_and(|said| said.lines().all(|line| line.contains(SHOWN_AT)))
    {
        let _ = std::fs::remove_file(log);
    }
    if !trouble.is_empty() {
        return Err(format!("{}: {trouble}", args.mountpoint.display()).into());
    }
    if args.json {
        print_json(&serde_json::json!({ "mountpoint": mountpoint.display().to_string(), "pid": pid }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Has the mount write everything back before it is asked to end: what its disk refuses is still there afterwards, and can
/// be written when there is room again.
fn write_back(socket: &Path, args: &UmountArgs) -> Result<(), Error> {
    // However long it takes. A process that does not answer has died or is too old; the way it ends tells.
    let Ok(said) = control::ask(socket, control::Command::Flush, Duration::MAX) else { return Ok(()) };
    let said: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
    let Some(error) = said["error"].as_str() else { return Ok(()) };
    let images = control::ask_status(socket).map(|status| status.images).unwrap_or_default();
    let dirty = images.iter().filter(|image| image.dirty_bytes > 0);
    let dirty: Vec<String> =
        dirty.map(|image| format!("{} of {}", show_size(image.dirty_bytes), clean(&image.name))).collect();
    let what = if dirty.is_empty() { "not everything".into() } else { dirty.join(", ") + " not" };
    let at = args.mountpoint.display();
    Err(format!("{at}: {what} written back: {error}; still mounted: mend that and try again (--force gives it up)")
        .into())
}

/// Asks the mount's process to end and waits until it has; tells what it could not write back. The disk below can be
/// unmounted then: the process has no file of it open any more.
fn orderly_end(socket: &Path, pid: u32) -> std::io::Result<String> {
    let ended = control::stop(socket, Duration::from_secs(10))?;
    let has_ended = || procfs::has_ended(pid as i32);
    while socket.exists() && !has_ended() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let patience = Instant::now() + EXIT_PATIENCE;
    while !has_ended() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(match ended {
        Some(ended) => ended.unwritten.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        // An orderly end takes the socket with it.
        None if socket.exists() => "its process died before it had written everything back".to_owned(),
        None => String::new(),
    })
}

/// How long the process of a mount may take to exit once the mount has ended.
const EXIT_PATIENCE: Duration = Duration::from_secs(10);

/// How long `umount --force` waits for an orderly end.
const FORCE_PATIENCE: Duration = Duration::from_secs(10);

/// What `work` gives, if that is not longer away than `patience`; else it is left to itself.
fn within<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(patience).ok()
}

/// True if no process listens any more.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound)
}

fn run_status(args: &StatusArgs) -> Result<ExitCode, Error> {
    if let Some(mountpoint) = &args.mountpoint {
        let at = absolute(mountpoint)?;
        let status = control::ask_status(&control::socket_path(&at)).map_err(|error| {
            let why = match is_gone(&error) {
                true if mount::is_mounted(&at) => not_ours(),
                true => "nothing is mounted there by this user".to_owned(),
                false => silent(mountpoint, &error),
            };
            format!("{}: {why}", mountpoint.display())
        })?;
        if args.json {
            print_json(&status)?
        } else {
            print(&show(&status, Style::stdout()))?
        }
        return Ok(ExitCode::SUCCESS);
    }
    let (mut all, mut silent_ones) = (Vec::<Status>::new(), Vec::new());
    for socket in control::sockets() {
        match control::ask_status(&socket) {
            Ok(status) => all.push(status),
            // Sockets of mounts that died stay silent; the next mount there removes them.
            Err(error) if is_gone(&error) => {}
            Err(error) => {
                let at = mount::mounted().into_iter().find(|at| control::socket_path(at) == socket).unwrap_or(socket);
                note!("pagefold: note: {}: {}", at.display(), silent(&at, &error));
                silent_ones.push(at);
            }
        }
    }
    if args.json {
        print_json(&all)?;
    } else if all.is_empty() {
        if silent_ones.is_empty() {
            print("no mounts\n")?;
        }
        for at in mount::mounted().into_iter().filter(|at| !silent_ones.contains(at)) {
            note!("pagefold: note: {}: {}", clean(&at.display().to_string()), not_ours());
        }
    } else {
        let texts: Vec<String> = all.iter().map(|status| show(status, Style::stdout())).collect();
        print(&texts.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What is to be said of a mount that lives and does not answer.
fn silent(mountpoint: &Path, error: &std::io::Error) -> String {
    let cut = format!("pagefold disk umount --force {}", mountpoint.display());
    format!(
        "the mount does not answer ({error}); is it stopped? `{cut}` cuts it off, and what it had not written back is lost"
    )
}

/// What is to be said of a mount whose socket is not where we look.
fn not_ours() -> String {
    let place = control::runtime_dir();
    let who = "another user's, or made with another PAGEFOLD_RUNTIME_DIR or XDG_RUNTIME_DIR, or its process died";
    format!("mounted, but no server answers in {}: it is {who}", place.display())
}

/// A mount's status as text.
fn show(status: &Status, style: Style) -> String {
    let (directory, mountpoint) = (clean(&status.directory), clean(&status.mountpoint));
    let mut text = format!("{} at {}\n", style.bold(&directory), style.bold(&mountpoint));
    text.push_str(&format!(
        "memory saved {}, disk reads saved {}; {} of {} in use, {} of bookkeeping, {} dirty; {} transport\n",
        style.good(&show_size(status.memory_saved_bytes)),
        style.good(&show_size(status.io_saved_bytes)),
        show_size(status.resident_bytes),
        show_size(status.cache_bytes),
        show_size(status.metadata_bytes),
        show_size(status.dirty_bytes),
        status.transport,
    ));
    if status.writeback_errors > 0 {
        text.push_str(&format!("{}\n", style.bad(&format!("{} writebacks failed", status.writeback_errors))));
    }
    let indirect: Vec<&str> =
        status.images.iter().filter(|image| image.open && !image.direct_io).map(|image| &*image.name).collect();
    if !indirect.is_empty() {
        let names = clean(&indirect.join(", "));
        text.push_str(&style.warn(&format!("the file system refuses direct I/O, the kernel caches too: {names}")));
        text.push('\n');
    }
    let mut table = Table::new(
        style,
        &["image", ">size", ">resident", ">shared", ">dirty", ">saved", ">I/O saved", ">read", ">written"],
    );
    for image in &status.images {
        let sizes = [
            image.size_bytes,
            image.resident_bytes,
            image.shared_bytes,
            image.dirty_bytes,
            image.memory_saved_bytes,
            image.io_saved_bytes,
            image.disk_read_bytes,
            image.disk_written_bytes,
        ];
        table.row(std::iter::once(image.name.clone()).chain(sizes.map(show_size)));
    }
    if !table.is_empty() {
        text.push_str(&table.render(2));
    }
    text
}

fn run_scan(args: &ScanArgs) -> Result<ExitCode, Error> {
    let started = Instant::now();
    let mut progress = Progress::new("scanning");
    let report = scan::scan(&args.images, |done, total| progress.update(done, total));
    progress.finish();
    if args.json {
        print_json(&report)?;
    } else if !report.images.is_empty() || report.unreadable.is_empty() {
        print(&show_scan(&report, started.elapsed(), Style::stdout()))?;
    }
    for (path, why) in &report.unreadable {
        note!("pagefold: {}: {why}", clean(&path.display().to_string()));
    }
    Ok(if report.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show_scan(report: &scan::Report, elapsed: Duration, style: Style) -> String {
    let mut table = Table::new(style, &["image", ">size", ">content", ">zeros", ">repeated"]);
    for image in &report.images {
        let sizes = [image.size_bytes, image.data_bytes, image.zero_bytes, image.repeated_bytes].map(show_size);
        table.row(std::iter::once(image.path.display().to_string()).chain(sizes));
    }
    let mut text = table.render(0);
    let mut equal = Table::new(style, &["compared in", ">content", ">unique", ">saved", ">share"]);
    for line in &report.equal {
        let name =
            if line.granularity_bytes == 0 { "whole files".to_owned() } else { show_size(line.granularity_bytes) };
        let share = 100.0 * line.saved_bytes as f64 / line.total_bytes.max(1) as f64;
        let sizes = [line.total_bytes, line.unique_bytes, line.saved_bytes].map(show_size);
        equal.row(std::iter::once(name).chain(sizes).chain([format!("{share:.1} %")]));
    }
    text.push_str(&format!("\n{}", equal.render(0)));
    for warning in &report.warnings {
        let line = clean(&format!("{}: {}", warning.path.display(), warning.problem));
        text.push_str(&format!("\n{}\n  cure: {}\n", style.warn(&line), warning.cure));
    }
    text.push_str(
        &style.dim(&format!("\nA mount shares in 4 KiB pages. Scanned in {:.1} s.\n", elapsed.as_secs_f64())),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_of_who_was_killed_go() {
        let dir = tempfile::tempdir().expect("a directory");
        // No process has such a number.
        let dead = u32::MAX;
        let stays = [
            "disk-1.log".to_owned(),
            format!("disk-1.log.{}", std::process::id()),
            format!("disk-2.log.{dead}"),
            "disk-1.log.old".to_owned(),
        ];
        let goes = format!("disk-1.log.{dead}");
        stays.iter().chain([&goes]).for_each(|name| std::fs::write(dir.path().join(name), "").expect("a file"));
        remove_drafts(&dir.path().join("disk-1.log"));
        assert!(stays.iter().all(|name| dir.path().join(name).exists()));
        assert!(!dir.path().join(goes).exists());
    }
}
