//! Puts back what a run touched, however the run ends.
//!
//! The bench itself runs in a child; this process only waits. When the child has ended, by itself, by a signal or by
//! SIGKILL, settings have their old values again, and swap files, control groups, mounts, block devices and files of the
//! run are gone. Where this process itself is killed so, the bench ends at once with all processes that it has started, and the
//! next run does the rest before it begins: what there was is written down as long as a run is under way.

use pagefold_os::mountinfo;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Another each time that the machine starts.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Set for the child, and for all that it starts.
const GUARDED: &str = "PAGEFOLD_BENCH_GUARDED";
/// What all things of a run are named by.
const NAME: &str = "pagefold-bench";
/// Switches that some bench sets; KSM's `run` last, when its other settings are back.
pub const SETTINGS: &[&str] = &[
    "/proc/sys/vm/max_map_count",
    "/proc/sys/vm/page-cluster",
    "/sys/module/zswap/parameters/enabled",
    "/sys/module/zswap/parameters/compressor",
    "/sys/module/zswap/parameters/max_pool_percent",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/ksm/pages_to_scan",
    "/sys/kernel/mm/ksm/sleep_millisecs",
    "/sys/kernel/mm/ksm/smart_scan",
    "/sys/kernel/mm/ksm/use_zero_pages",
    "/sys/kernel/mm/ksm/run",
];
/// Where runs keep files, beside the folder of their own that they take for the temporary one.
const FOLDERS: &[&str] = &["/var/tmp", "/dev/shm"];
/// How long a bench that was asked to end may take for it.
const PATIENCE: Duration = Duration::from_secs(10);

static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
}

/// The value of a switch; a choice shows the chosen one in brackets.
pub fn value(path: &str) -> Option<String> {
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

const GROUPS: &[&str] = &["/sys/fs/cgroup", "/sys/fs/cgroup/memory"];

/// What lies in these folders.
fn entries(folders: &[&str]) -> Vec<String> {
    let entries = folders.iter().flat_map(fs::read_dir).flatten().flatten();
    entries.filter_map(|entry| entry.path().into_os_string().into_string().ok()).collect()
}

/// Numbers of the zram devices, as text.
fn zrams() -> Vec<String> {
    let paths = entries(&["/sys/block"]);
    paths.iter().filter_map(|path| path.strip_prefix("/sys/block/zram").map(str::to_owned)).collect()
}

/// Takes a zram device away, and what is in it.
pub fn remove_zram(number: &str) {
    let _ = fs::write(format!("/sys/block/zram{number}/reset"), "1");
    let _ = fs::write("/sys/class/zram-control/hot_remove", number);
}

/// The machine as it was.
#[derive(serde::Serialize, serde::Deserialize)]
struct Before {
    /// The start of the machine that this is about: the next one has settings of its own.
    boot: String,
    /// The run's own folder.
    own: Option<PathBuf>,
    settings: Vec<(String, String)>,
    swap_files: Vec<String>,
    mounts: Vec<String>,
    groups: Vec<String>,
    zrams: Vec<String>,
    files: Vec<String>,
}

impl Before {
    fn look(own: Option<PathBuf>) -> Before {
        Before {
            boot: value(BOOT).unwrap_or_default(),
            own,
            settings: SETTINGS.iter().filter_map(|path| Some(((*path).to_owned(), value(path)?))).collect(),
            swap_files: swap_files(),
            mounts: mounts(),
            groups: entries(GROUPS),
            zrams: zrams(),
            files: entries(FOLDERS),
        }
    }

    fn restore(&self) {
        let new = |all: Vec<String>, old: &[String]| -> Vec<String> {
            all.into_iter().filter(|name| name.contains(NAME) && !old.contains(name)).collect()
        };
        let run = |program: &str, args: &[&str]| drop(Command::new(program).args(args).output());
        new(swap_files(), &self.swap_files).iter().for_each(|file| {
            run("swapoff", &[file]);
            let _ = fs::remove_file(file);
        });
        new(mounts(), &self.mounts).iter().rev().for_each(|at| run("umount", &["-l", at]));
        for group in new(entries(GROUPS), &self.groups) {
            let end = Instant::now() + Duration::from_secs(2);
            while Path::new(&group).exists() && fs::remove_dir(&group).is_err() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        for number in zrams().iter().filter(|number| !self.zrams.contains(number)) {
            remove_zram(number);
        }
        // Not what is still mounted, should that be so: its files are not ours.
        let mounts = mounts();
        let kept = |file: &String| mounts.iter().any(|at| Path::new(at).starts_with(file));
        for file in new(entries(FOLDERS), &self.files).iter().filter(|file| !kept(file)) {
            let _ = fs::remove_file(file).or_else(|_| fs::remove_dir_all(file));
        }
        for (path, old) in self.settings.iter().filter(|(path, _)| SETTINGS.contains(&&**path)) {
            if value(path).is_some_and(|now| now != *old) && fs::write(path, old).is_err() {
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

    /// What a run wrote down that did not come to put it back.
    fn left() -> Option<Before> {
        let mut file =
            fs::File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(note()).ok()?;
        // Anybody may put a file there: ours tells what to write where.
        if file.metadata().ok()?.uid() != user() {
            return None;
        }
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        let left: Before = serde_json::from_str(&text).ok()?;
        (Some(&left.boot) == value(BOOT).as_ref()).then_some(left)
    }
}

/// Where a run notes how the machine was before it.
fn note() -> PathBuf {
    std::env::temp_dir().join(format!("{NAME}-{}.before", user()))
}

fn user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
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
            (_, Some(at)) if at.elapsed() > PATIENCE => drop(tell(libc::SIGKILL)),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until no other run of this user's is under way: it would be measured too, and see our settings as its own.
fn wait_alone() -> Option<fs::File> {
    let path = std::env::temp_dir().join(format!("{NAME}-{}.lock", user()));
    let file = fs::File::options().create(true).truncate(false).write(true).open(path).ok()?;
    if file.try_lock().is_err() {
        eprintln!("{NAME}: another run is under way; this one waits for its end");
        file.lock().ok()?;
    }
    Some(file)
}

/// Ends all that the run has started, and itself, when who watches is gone: it holds the other end of this pipe, of which
/// `number` is a descriptor.
fn end_with_guard(number: i32) {
    // SAFETY: a number only. What was not handed to us for this is no pipe that ends.
    unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    std::thread::spawn(move || {
        // SAFETY: who has started us left it open, for us alone.
        let mut pipe = unsafe { fs::File::from_raw_fd(number) };
        if matches!(pipe.read(&mut [0]), Ok(0)) {
            // SAFETY: the guard made us the leader of a group.
            unsafe { libc::kill(0, libc::SIGKILL) };
        }
    });
}

/// Runs this program again, watched; `None` in the one that is watched, which goes on.
pub fn run() -> Option<ExitCode> {
    if let Some(guarded) = std::env::var_os(GUARDED) {
        // What it starts is guarded as well, by the same guard.
        if let Some(number) = guarded.to_str().and_then(|text| text.parse().ok()) {
            // SAFETY: no thread runs yet.
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
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
    let (ends, _lives) = std::io::pipe().ok()?;
    let ends_fd = ends.as_raw_fd();
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.args(std::env::args_os().skip(1)).env(GUARDED, ends_fd.to_string()).process_group(0);
    if let Some(own) = &own {
        command.env("TMPDIR", own);
    }
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::fcntl(ends_fd, libc::F_SETFD, 0);
            Ok(())
        });
    }
    let mut child = command.spawn().ok()?;
    let code = wait(&mut child);
    // What the run left in its group.
    // SAFETY: numbers only; a group without members is an error and nothing else.
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
