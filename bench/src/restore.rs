//! Puts back what a run changed, however the run ends.
//!
//! Two floors. [`Undo`] and [`SwapFile`] put a single change back when they are dropped. [`guarded`] covers a run that is
//! killed: the bench itself runs in a child while this process, the guard, only waits. When the child has ended, by itself,
//! by a signal or by SIGKILL, the guard gives settings their old values and removes the run's swap files, control groups,
//! mounts and files. If the guard is killed by SIGKILL, the bench and all processes that it started end immediately, and the
//! next run puts back the rest before it begins: a note holds the machine's state as long as a run is under way.

use crate::process;
use pagefold_os::mountinfo;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Changes each time that the machine starts.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Set for the child, and for all that it starts.
const GUARDED: &str = "PAGEFOLD_BENCH_GUARDED";
/// Part of the name of everything that a run makes.
const NAME: &str = "pagefold-bench";
/// Switches that some bench sets; KSM's `run` last, when its other settings are back.
const SETTINGS: &[&str] = &[
    "/proc/sys/vm/max_map_count",
    "/proc/sys/vm/page-cluster",
    "/sys/module/zswap/parameters/enabled",
    "/sys/module/zswap/parameters/compressor",
    "/sys/module/zswap/parameters/max_pool_percent",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/module/fuse/parameters/enable_uring",
    "/sys/kernel/mm/ksm/pages_to_scan",
    "/sys/kernel/mm/ksm/sleep_millisecs",
    "/sys/kernel/mm/ksm/smart_scan",
    "/sys/kernel/mm/ksm/use_zero_pages",
    "/sys/kernel/mm/ksm/run",
];
/// Where runs keep files, besides the temporary folder of their own.
const FOLDERS: &[&str] = &["/var/tmp", "/dev/shm"];
const GROUPS: &[&str] = &["/sys/fs/cgroup", "/sys/fs/cgroup/memory"];
/// How long a bench may take to end after SIGTERM.
const TERM_MAX: Duration = Duration::from_secs(10);

/// The signal that asked the guard to end; 0 before.
static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
}

/// An act that runs when this is dropped.
pub struct Undo(Option<Box<dyn FnOnce()>>);

impl Undo {
    /// Keeps `act` for later.
    pub fn later(act: impl FnOnce() + 'static) -> Undo {
        Undo(Some(Box::new(act)))
    }

    /// Sets a switch of the kernel that [`SETTINGS`] lists; dropping this restores the old value.
    pub fn set(path: &'static str, value: &str) -> io::Result<Undo> {
        debug_assert!(SETTINGS.contains(&path), "{path} would stay as it is after a kill");
        let old = setting(path).ok_or_else(|| io::Error::other(format!("{path}: no such switch")))?;
        fs::write(path, value)?;
        Ok(Undo::later(move || drop(fs::write(path, old))))
    }

    /// Removes a file or a directory, and all that is in it.
    pub fn remove(path: PathBuf) -> Undo {
        Undo::later(move || drop(fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path))))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}

/// A new folder in the run's temporary one, removed when this is dropped.
pub fn folder(name: &str) -> io::Result<(PathBuf, Undo)> {
    let path = std::env::temp_dir().join(format!("{NAME}-{name}-{}", std::process::id()));
    fs::create_dir_all(&path)?;
    Ok((path.clone(), Undo::remove(path)))
}

/// A swap file, in use while this lives.
pub struct SwapFile {
    _on: Undo,
    _file: Undo,
}

impl SwapFile {
    /// Makes a file of `bytes` at `path`, and has the kernel swap to it.
    pub fn new(path: PathBuf, bytes: u64) -> io::Result<SwapFile> {
        let name = path.to_string_lossy().into_owned();
        let file = Undo::remove(path);
        process::run("fallocate", &["-l", &bytes.to_string(), &name])?;
        fs::set_permissions(&name, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        process::run("mkswap", &[&name])?;
        process::run("swapon", &[&name])?;
        Ok(SwapFile { _on: Undo::later(move || drop(process::run("swapoff", &[&name]))), _file: file })
    }
}

/// The value of a switch; a choice shows the chosen one in brackets.
fn setting(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let chosen = text.split_ascii_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    Some(chosen.unwrap_or(text.trim()).to_owned())
}

fn swap_files() -> Vec<String> {
    let text = fs::read_to_string("/proc/swaps").unwrap_or_default();
    text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

fn mounts() -> Vec<String> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    mountinfo::parse(&table).filter_map(|mount| mount.at.into_os_string().into_string().ok()).collect()
}

/// What lies in these folders.
fn entries(folders: &[&str]) -> Vec<String> {
    let entries = folders.iter().flat_map(fs::read_dir).flatten().flatten();
    entries.filter_map(|entry| entry.path().into_os_string().into_string().ok()).collect()
}

/// The machine as it was.
#[derive(serde::Serialize, serde::Deserialize)]
struct Before {
    /// The boot that this is about: the next one has settings of its own.
    boot: String,
    /// The run's own folder.
    own: Option<PathBuf>,
    settings: Vec<(String, String)>,
    swap_files: Vec<String>,
    mounts: Vec<String>,
    groups: Vec<String>,
    files: Vec<String>,
}

impl Before {
    fn look(own: Option<PathBuf>) -> Before {
        Before {
            boot: setting(BOOT).unwrap_or_default(),
            own,
            settings: SETTINGS.iter().filter_map(|path| Some(((*path).to_owned(), setting(path)?))).collect(),
            swap_files: swap_files(),
            mounts: mounts(),
            groups: entries(GROUPS),
            files: entries(FOLDERS),
        }
    }

    fn restore(&self) {
        let new = |all: Vec<String>, old: &[String]| -> Vec<String> {
            all.into_iter().filter(|name| name.contains(NAME) && !old.contains(name)).collect()
        };
        new(swap_files(), &self.swap_files).iter().for_each(|file| {
            let _ = process::run("swapoff", &[file]);
            let _ = fs::remove_file(file);
        });
        new(mounts(), &self.mounts).iter().rev().for_each(|at| drop(process::run("umount", &["-l", at])));
        for group in new(entries(GROUPS), &self.groups) {
            let end = Instant::now() + Duration::from_secs(2);
            // A keeper is in no process group of the run's.
            crate::group::end_members(Path::new(&group));
            while Path::new(&group).exists() && fs::remove_dir(&group).is_err() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // A file system that is still mounted there keeps its files: they are not ours.
        let mounts = mounts();
        let kept = |file: &String| mounts.iter().any(|at| Path::new(at).starts_with(file));
        for file in new(entries(FOLDERS), &self.files).iter().filter(|file| !kept(file)) {
            let _ = fs::remove_file(file).or_else(|_| fs::remove_dir_all(file));
        }
        for (path, old) in self.settings.iter().filter(|(path, _)| SETTINGS.contains(&&**path)) {
            if setting(path).is_some_and(|now| now != *old) && fs::write(path, old).is_err() {
                eprintln!("{NAME}: {path} was {old}, and is not any more: set it back");
            }
        }
        if let Some(own) = &self.own {
            let _ = fs::remove_dir_all(own);
        }
    }

    /// Writes this down where [`Before::left`] finds it.
    fn note(&self) -> std::io::Result<()> {
        let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(note())?;
        file.write_all(serde_json::to_string(self)?.as_bytes())
    }

    /// The note of a run that was killed before it put anything back.
    fn left() -> Option<Before> {
        let mut file =
            fs::File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(note()).ok()?;
        // Any user may put a file there, and the note says what to write where: only our own counts.
        if file.metadata().ok()?.uid() != user() {
            return None;
        }
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        let left: Before = serde_json::from_str(&text).ok()?;
        (Some(&left.boot) == setting(BOOT).as_ref()).then_some(left)
    }
}

/// Where a run notes how the machine was before it.
fn note() -> PathBuf {
    std::env::temp_dir().join(format!("{NAME}-{}.before", user()))
}

fn user() -> u32 {
    // SAFETY: getuid takes nothing and cannot fail.
    unsafe { libc::getuid() }
}

fn wait(child: &mut Child) -> Option<i32> {
    let mut asked: Option<Instant> = None;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return status.code();
        }
        // SAFETY: the child leads a group of its own and is not reaped yet, so the number is still its own.
        let tell = |signal| unsafe { libc::kill(-(child.id() as i32), signal) };
        match (ASKED.load(Ordering::Relaxed), asked) {
            (0, _) => {}
            (_, None) => {
                tell(libc::SIGTERM);
                asked = Some(Instant::now());
            }
            (_, Some(at)) if at.elapsed() > TERM_MAX => drop(tell(libc::SIGKILL)),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for another run of this user to end: it would be measured too, and would take our settings for the machine's.
fn wait_alone() -> Option<fs::File> {
    let path = std::env::temp_dir().join(format!("{NAME}-{}.lock", user()));
    let file = fs::File::options().create(true).truncate(false).write(true).open(path).ok()?;
    if file.try_lock().is_err() {
        eprintln!("{NAME}: another run is under way; this one waits for its end");
        file.lock().ok()?;
    }
    Some(file)
}

/// Kills the run's process group, this process included, when the guard is gone: the guard holds the other end of the pipe
/// of which `number` is a descriptor.
fn end_with_guard(number: i32) {
    // SAFETY: `F_SETFD` takes no pointer; a descriptor that is not the guard's pipe only gets closed on exec.
    unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    std::thread::spawn(move || {
        // SAFETY: the guard left this descriptor open for this process, and nothing else here uses its number.
        let mut pipe = unsafe { fs::File::from_raw_fd(number) };
        if matches!(pipe.read(&mut [0]), Ok(0)) {
            // SAFETY: kill(2) takes no pointer; the guard made this process the leader of a group of its own.
            unsafe { libc::kill(0, libc::SIGKILL) };
        }
    });
}

/// Runs this program again under a guard and returns its exit code; `None` in the guarded child, which goes on.
pub fn guarded() -> Option<ExitCode> {
    if let Some(guarded) = std::env::var_os(GUARDED) {
        // Children of the guarded process are in its group, under the same guard.
        if let Some(number) = guarded.to_str().and_then(|text| text.parse().ok()) {
            // SAFETY: `main` calls this before it starts a thread.
            unsafe { std::env::set_var(GUARDED, "yes") };
            end_with_guard(number);
        }
        return None;
    }
    let _alone = wait_alone();
    if let Some(left) = Before::left() {
        eprintln!("{NAME}: an earlier run was killed; what it left is put back first");
        left.restore();
    }
    let _ = fs::remove_file(note());
    let own = std::env::temp_dir().join(format!("{NAME}-{}", std::process::id()));
    let own = fs::DirBuilder::new().mode(0o700).create(&own).is_ok().then_some(own);
    let before = Before::look(own.clone());
    if let Err(error) = before.note() {
        eprintln!("{NAME}: {}: {error}: should this process be killed, nothing puts settings back", note().display());
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: the handler only stores to an atomic, which is safe in a signal handler.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
    let (ends, _lives) = std::io::pipe().ok()?;
    let ends_fd = ends.as_raw_fd();
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.args(std::env::args_os().skip(1)).env(GUARDED, ends_fd.to_string()).process_group(0);
    if let Some(own) = &own {
        command.env("TMPDIR", own);
    }
    // SAFETY: between fork and exec the closure makes one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            libc::fcntl(ends_fd, libc::F_SETFD, 0);
            Ok(())
        });
    }
    let mut child = command.spawn().ok()?;
    let code = wait(&mut child);
    // Processes that the run left in its group.
    // SAFETY: kill(2) takes no pointer; a group without members is an error without effect.
    unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
    before.restore();
    let _ = fs::remove_file(note());
    let asked = ASKED.load(Ordering::Relaxed);
    Some(match code {
        _ if asked != 0 => ExitCode::from(128 + asked as u8),
        Some(code) => ExitCode::from(code as u8),
        None => ExitCode::FAILURE,
    })
}
