//! A mount in a process of its own, for the tests: the test binary starts itself again to serve it.

#![allow(dead_code, reason = "each test binary uses its own part")]

use pagefold_disk::control::{self, Command};
use pagefold_disk::fuse::Transport;
use pagefold_disk::mount::{self, Options};
use pagefold_disk::{Config, Status};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

pub mod ring_switch;

use ring_switch::{RingsOn, cannot_ring};

const SERVE: &str = "PAGEFOLD_TEST_SERVE";

/// Whether this test binary is one of those that run everything by rings.
fn by_ring() -> bool {
    env!("CARGO_CRATE_NAME").starts_with("privileged_ring")
}

/// Random numbers from a seed.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end.max(1))
    }

    pub fn fill(&mut self, data: &mut [u8]) {
        self.0.fill(data);
    }
}

/// Runs `work` in another thread, so that a mount that hangs fails the test.
#[track_caller]
pub fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = channel();
    std::thread::spawn(move || done.send(work()));
    result.recv_timeout(Duration::from_secs(120)).unwrap_or_else(|_| panic!("{what} hangs"))
}

/// Says why a test cannot run here, if it cannot.
pub fn cannot_mount() -> Option<&'static str> {
    if !Path::new("/dev/fuse").exists() {
        return Some("there is no /dev/fuse");
    }
    if !rustix::process::geteuid().is_root() {
        return Some("mounting needs root");
    }
    if by_ring() { cannot_ring() } else { None }
}

/// Whether `program` can be started.
pub fn has(program: &str) -> bool {
    let mut command = std::process::Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok()
}

/// Runs a program and returns what it printed.
#[track_caller]
pub fn run(program: &str, args: &[&str]) -> String {
    let output = std::process::Command::new(program).args(args).stdin(Stdio::null()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{program} {args:?}: {text}");
    text
}

/// Settings a test may change.
#[derive(Clone)]
pub struct Setup {
    pub cache_mib: usize,
    pub flush_ms: u64,
    pub fingerprints: Option<PathBuf>,
    pub nbd: Option<PathBuf>,
    pub read_only: bool,
    pub merge: bool,
    /// The user that the server runs as, if not the test's.
    pub user: Option<u32>,
    pub transport: Transport,
    /// Calls that a filter refuses to the server, by number.
    pub refused_call: Option<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            cache_mib: 64,
            flush_ms: 200,
            fingerprints: None,
            nbd: None,
            read_only: false,
            merge: false,
            user: None,
            transport: if by_ring() { Transport::Ring } else { Transport::Classic },
            refused_call: None,
        }
    }
}

/// A mount, removed when dropped.
pub struct Mount {
    pub base: tempfile::TempDir,
    pub child: Option<Child>,
    pub setup: Setup,
    directory: PathBuf,
}

impl Mount {
    /// Mounts a fresh directory.
    pub fn new(setup: Setup) -> Self {
        let base = tempfile::tempdir_in("/var/tmp").unwrap();
        let directory = base.path().join("images");
        std::fs::create_dir(&directory).unwrap();
        Self::over(base, directory, setup)
    }

    /// Mounts `directory`.
    pub fn over(base: tempfile::TempDir, directory: PathBuf, setup: Setup) -> Self {
        std::fs::create_dir_all(base.path().join("mnt")).unwrap();
        if setup.user.is_some() {
            for path in [base.path(), &base.path().join("mnt"), &directory] {
                std::os::unix::fs::chown(path, setup.user, setup.user).unwrap();
            }
        }
        let mut mount = Self { base, child: None, setup, directory };
        mount.start();
        mount
    }

    pub fn dir(&self) -> PathBuf {
        self.directory.clone()
    }

    pub fn at(&self) -> PathBuf {
        self.base.path().join("mnt")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.at().join(name)
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        // The server's name for it, in the runtime directory of the test.
        let name = control::socket_path(&self.at()).file_name().unwrap().to_owned();
        self.base.path().join("run").join(name)
    }

    fn command(&self, directory: &Path, at: &Path) -> std::process::Command {
        let or_empty = |path: &Option<PathBuf>| path.as_ref().map_or(String::new(), |p| p.display().to_string());
        let fields = [
            directory.display().to_string(),
            at.display().to_string(),
            self.setup.cache_mib.to_string(),
            self.setup.flush_ms.to_string(),
            or_empty(&self.setup.fingerprints),
            or_empty(&self.setup.nbd),
            self.setup.read_only.to_string(),
            self.setup.merge.to_string(),
            self.setup.transport.name().to_owned(),
        ];
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "the_process_that_serves", "--nocapture"])
            .env(SERVE, fields.join("|"))
            .env("PAGEFOLD_RUNTIME_DIR", self.base.path().join("run"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(user) = self.setup.user {
            command.uid(user).gid(user);
        }
        if let Some(number) = self.setup.refused_call {
            // SAFETY: the closure only makes system calls, and allocates nothing.
            unsafe { command.pre_exec(move || refuse_call(number)) };
        }
        command
    }

    /// Starts the server and waits until it answers.
    pub fn start(&mut self) {
        let _on = (self.setup.transport != Transport::Classic).then(RingsOn::new);
        self.child = Some(self.command(&self.directory, &self.at()).spawn().unwrap());
        let started = Instant::now();
        while control::ask_status(&self.socket()).is_err() {
            let child = self.child.as_mut().unwrap();
            if child.try_wait().unwrap().is_some() {
                let output = self.child.take().unwrap().wait_with_output().unwrap();
                panic!("the mount failed: {}", String::from_utf8_lossy(&output.stderr));
            }
            assert!(started.elapsed() < Duration::from_secs(120), "the mount does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        if self.setup.transport != Transport::Auto {
            assert_eq!(self.status().transport, self.setup.transport.name());
        }
    }

    /// Tries another mount of `directory` at `at`; returns its output.
    pub fn try_another(&self, directory: &Path, at: &Path) -> (bool, String) {
        let output = self.command(directory, at).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub fn status(&self) -> Status {
        control::ask_status(&self.socket()).unwrap()
    }

    pub fn flush(&self) {
        self.try_flush();
    }

    /// Flushes everything and returns the answer.
    pub fn try_flush(&self) -> String {
        control::ask(&self.socket(), Command::Flush, Duration::from_secs(60)).unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends the server with a signal; returns whether it succeeded, and its output.
    pub fn terminate(&mut self) -> (bool, String) {
        let child = self.child.take().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        while mount::is_mounted(&self.at()) {
            if mount::unmount(&self.at(), true).is_err() {
                break;
            }
        }
    }
}

/// Has a filter refuse a system call to this process from now on.
fn refuse_call(number: u32) -> std::io::Result<()> {
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let step = |code: u32, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let mut program = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, number),
        step(libc::BPF_RET | libc::BPF_K, 0, REFUSE),
        step(libc::BPF_RET | libc::BPF_K, 0, ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: prctl takes no pointer here.
    let bound = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel copies the program, which lives until the call returns.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    if bound == 0 && set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The body of `the_process_that_serves`: does nothing unless this process was started to serve.
pub fn serve_if_asked() {
    let Ok(fields) = std::env::var(SERVE) else { return };
    let fields: Vec<&str> = fields.split('|').collect();
    let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
    let options = Options {
        directory: fields[0].into(),
        mountpoint: fields[1].into(),
        config: Config {
            cache_bytes: fields[2].parse::<usize>().unwrap() << 20,
            flush_interval: Duration::from_millis(fields[3].parse().unwrap()),
            merge: fields[7] == "true",
            ..Config::default()
        },
        threads: 4,
        transport: match fields[8] {
            "ring" => Transport::Ring,
            "classic" => Transport::Classic,
            _ => Transport::Auto,
        },
        fingerprints: path(fields[4]),
        read_only: fields[6] == "true",
        allow_other: false,
        nbd: path(fields[5]),
        grace: Duration::from_secs(2),
    };
    match mount::serve(&options, |_| ()) {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// Ends the test with a message if the machine cannot run it.
#[macro_export]
macro_rules! skip_unless_mountable {
    () => {
        if let Some(why) = common::cannot_mount() {
            println!("SKIPPED: {why}");
            return;
        }
    };
}
