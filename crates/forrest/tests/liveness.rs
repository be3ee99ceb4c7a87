//! Liveness: a process counts as dead exactly if it can execute no further instruction, whatever /proc shows of it.
//!
//! Other processes are this program again: each runs the test `role` with a part to play, says what it came to on its
//! standard error, and waits for a line on its standard input where it is asked to.

use forrest::{Options, Store};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const ROLE: &str = "FORREST_TEST_ROLE";
const STORE: &str = "FORREST_TEST_STORE";
const ROOM: &str = "FORREST_TEST_ROOM";

/// A store of one test, removed at its end.
struct File(PathBuf);

impl File {
    fn new(what: &str) -> File {
        File(PathBuf::from(format!("/dev/shm/forrest-test-liveness-{what}-{}", std::process::id())))
    }

    fn open(&self) -> Store {
        Options::new().limit_bytes(32 << 20).open_path(&self.0).unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Another process; killed at the end of the test if it is still there.
struct Actor {
    child: Child,
    says: BufReader<std::process::ChildStderr>,
}

impl Actor {
    /// Starts a role, through the program and arguments of `through` if there are any.
    fn start(through: &[&str], role: &str, store: &File) -> Actor {
        let own = std::env::current_exe().unwrap();
        let mut words: Vec<&std::ffi::OsStr> = through.iter().map(|word| word.as_ref()).collect();
        words.extend([own.as_os_str(), "--exact".as_ref(), "role".as_ref(), "--nocapture".as_ref()]);
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .env(ROLE, role)
            .env(STORE, &store.0)
            .env(ROOM, std::env::temp_dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stderr.take().unwrap());
        Actor { child, says }
    }

    /// The next line that it says.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn expect(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    fn go_on(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn wait() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn counts(store: &Store) -> String {
    let stats = store.stats();
    format!("threads {}, recoveries {}", stats.thread_count, stats.recovery_count)
}

/// Takes thread records with two threads that keep running.
fn sit(store: &'static Store) {
    for thread in 0..2u8 {
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            store.set(&[thread], b"sits").unwrap();
            done.send(()).unwrap();
            loop {
                std::thread::park();
            }
        });
        wait.recv().unwrap();
    }
}

fn exec(role: &str) -> ! {
    let own = std::env::current_exe().unwrap();
    let error = Command::new(own).args(["--exact", "role", "--nocapture"]).env(ROLE, role).exec();
    panic!("{error}");
}

#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let path = PathBuf::from(std::env::var(STORE).unwrap());
    let open = || Options::new().open_existing_path(&path);
    let leaked = || -> &'static Store { Box::leak(Box::new(open().unwrap())) };
    match role.as_str() {
        "open" => say(&open().map_or_else(|error| error.to_string(), |_| "opened".to_owned())),
        "write" => {
            let store = open().unwrap();
            store.set(b"writer", b"was here").unwrap();
            say("wrote");
            wait();
            say(&format!("{}, {}", store.set(b"writer", b"is here").is_ok(), counts(&store)));
            wait();
        }
        "write and vanish" => {
            open().unwrap().set(b"warm", b"up").unwrap();
            sit(leaked());
            say("wrote");
            // SAFETY: ends the process as a kill does: nothing is cleaned up.
            unsafe { libc::_exit(0) };
        }
        "fork and write" => {
            let store = open().unwrap();
            store.set(b"parent", b"was here").unwrap();
            // SAFETY: the child does nothing but wait to be killed.
            let child = unsafe { libc::fork() };
            if child == 0 {
                loop {
                    // SAFETY: waits for a signal.
                    unsafe { libc::pause() };
                }
            }
            say(&child.to_string());
            wait();
        }
        "write and exec away" => {
            sit(leaked());
            exec("wait");
        }
        "wait" => {
            say("waits");
            wait();
        }
        "write and exec 3" | "write and exec 2" | "write and exec 1" => {
            let store = leaked();
            sit(store);
            say(&counts(store));
            exec(&format!("write and exec {}", role[role.len() - 1..].parse::<u32>().unwrap() - 1));
        }
        "write and exec 0" => {
            let store = leaked();
            sit(store);
            say(&counts(store));
            wait();
        }
        "look without /proc" => {
            let store = open().unwrap();
            std::os::unix::fs::chroot(std::env::var(ROOM).unwrap()).unwrap();
            std::env::set_current_dir("/").unwrap();
            assert!(!Path::new("/proc/self").exists());
            store.set(b"looker", b"was here").unwrap();
            store.recover();
            say(&counts(&store));
            wait();
            store.recover();
            say(&counts(&store));
        }
        other => panic!("no role '{other}'"),
    }
}

/// Whether `program` with these arguments works here; says what is skipped if not.
fn can(words: &[&str]) -> bool {
    let done = Command::new(words[0]).args(&words[1..]).arg("true").output();
    match done {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            println!("SKIPPED: {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
            false
        }
        Err(error) => {
            println!("SKIPPED: {}: {error}", words.join(" "));
            false
        }
    }
}

const PID_NAMESPACE: [&str; 4] = ["unshare", "--pid", "--fork", "--mount-proc"];

#[test]
fn another_pid_namespace_is_refused_also_before_the_first_write() {
    if !can(&PID_NAMESPACE) {
        return;
    }
    let file = File::new("pid");
    let store = file.open();
    let line = Actor::start(&PID_NAMESPACE, "open", &file).line();
    assert!(line.contains("another pid or time namespace"), "{line}");
    // It may take the store over when no other process uses it; then this process is the one in foreign namespaces.
    drop(store);
    let mut other = Actor::start(&PID_NAMESPACE, "write", &file);
    other.expect("wrote");
    let error = Options::new().open_path(&file.0).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("another pid or time namespace"), "{error}");
    other.go_on();
    other.expect("true, threads 1, recoveries 0");
}

#[test]
fn another_time_namespace_is_refused() {
    let through = ["unshare", "--time", "--boottime", "100000", "--fork"];
    if !can(&through) {
        return;
    }
    let file = File::new("time");
    let _store = file.open();
    let line = Actor::start(&through, "open", &file).line();
    assert!(line.contains("another pid or time namespace"), "{line}");
}

#[test]
fn a_proc_of_an_outer_namespace_is_refused() {
    let through = ["unshare", "--pid", "--fork"];
    if !can(&through) {
        return;
    }
    let file = File::new("outer");
    drop(file.open());
    let line = Actor::start(&through, "open", &file).line();
    assert!(line.contains("needs /proc of this pid namespace"), "{line}");
}

#[test]
fn what_a_container_left_is_recovered_when_it_is_gone() {
    if !can(&PID_NAMESPACE) {
        return;
    }
    let file = File::new("container");
    drop(file.open());
    let mut container = Actor::start(&PID_NAMESPACE, "write and vanish", &file);
    container.expect("wrote");
    container.child.wait().unwrap();
    let store = file.open();
    assert_eq!(counts(&store), "threads 0, recoveries 2");
    assert_eq!(store.check().unwrap().lost_blocks, 0);
    store.set(b"writer", b"the next").unwrap();
}

#[test]
fn a_process_without_proc_takes_no_live_process_for_dead() {
    if !can(&["chroot", "/"]) {
        return;
    }
    let file = File::new("chroot");
    let store = file.open();
    store.set(b"we", b"were here").unwrap();
    let mut writer = Actor::start(&[], "write", &file);
    writer.expect("wrote");
    let mut looker = Actor::start(&[], "look without /proc", &file);
    looker.expect("threads 3, recoveries 0");
    writer.go_on();
    writer.expect("true, threads 3, recoveries 0");
    // A death it notices nevertheless.
    writer.kill();
    looker.go_on();
    looker.expect("threads 2, recoveries 1");
}

#[test]
fn a_death_is_noticed_although_a_forked_child_keeps_the_file() {
    let file = File::new("fork");
    let store = file.open();
    let mut parent = Actor::start(&[], "fork and write", &file);
    let child: i32 = parent.line().parse().unwrap();
    store.recover();
    assert_eq!(counts(&store), "threads 1, recoveries 0");
    parent.kill();
    store.recover();
    // SAFETY: signals the child, which lives until then and so keeps its id.
    let killed = unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!((counts(&store).as_str(), killed), ("threads 0, recoveries 1", 0));
}

#[test]
fn a_program_that_calls_exec_is_recovered() {
    let file = File::new("exec");
    // Keeps the others from being alone with the store.
    let store = file.open();
    let mut gone = Actor::start(&[], "write and exec away", &file);
    gone.expect("waits");
    assert_eq!(counts(&store), "threads 2, recoveries 0");
    store.recover();
    assert_eq!(counts(&store), "threads 0, recoveries 2", "the process lives, and is another program");
    let mut again = Actor::start(&[], "write and exec 3", &file);
    for image in 1..=4 {
        again.expect(&format!("threads 2, recoveries {}", 2 * image));
    }
    assert_eq!(store.check().unwrap().lost_blocks, 0);
}

#[test]
fn opening_and_closing_handles_does_not_affect_other_handles() {
    let file = File::new("turns");
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let file = &file;
            scope.spawn(move || {
                for round in 0..150u64 {
                    let store = file.open();
                    store.add(b"total", 1).unwrap();
                    store.set(&thread.to_le_bytes(), &vec![round as u8; 100 + round as usize]).unwrap();
                }
            });
        }
    });
    let store = file.open();
    assert_eq!(store.add(b"total", 0).unwrap(), 600);
    assert_eq!(store.stats().recovery_count, 0, "no process died");
    assert_eq!(store.check().unwrap().lost_blocks, 0);
}
