//! The keeper: a small process that holds what a successor of the daemon needs.
//!
//! A tier leaves its arena and its file there, a client its userfaultfd, table and page map, each under a name that tells a
//! successor what they belong to. The service manager, if there is one, is left the same. A keeper that has ended is
//! replaced immediately, and the new one is given everything.
//!
//! It also answers for the memory of children that attached programs fork, and leads agents to the daemon: the ends of their
//! sockets go to each keeper.

use super::deposit::{deposit_arena, deposit_client};
use crate::cold::tiers::Tiers;
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use pagefold_os::sync::lock;
use pagefold_tier::keeper::Keeper;
use std::io;
use std::sync::atomic::Ordering;
use std::thread;

/// Time between two attempts to start a keeper, in milliseconds.
const RETRY_MS: i32 = if cfg!(test) { 20 } else { 5000 };

/// Starts the keeper, or replaces it, if there is none that lives.
pub(crate) fn ensure_keeper(tiers: &Tiers) {
    let Some(command) = &tiers.config.keeper else { return };
    let mut held = lock(&tiers.keeper);
    // A keeper that was told to end is not replaced.
    if tiers.closing.load(Ordering::SeqCst) {
        return;
    }
    if let Some(keeper) = held.as_ref().filter(|keeper| lives(keeper)) {
        // Ended children must not take names.
        tiers.pending_children.drop_ended(Some(keeper));
        return;
    }
    *held = Keeper::connect(&tiers.keeper_path).ok();
    if held.is_none() {
        let arguments: Vec<&str> = command[1..].iter().filter_map(|word| word.to_str()).collect();
        match Keeper::start_with(command[0].as_ref(), &arguments, &tiers.keeper_path) {
            Ok((keeper, mut child)) => {
                *held = Some(keeper);
                let _ = thread::Builder::new().name("keeper".into()).stack_size(64 << 10).spawn(move || child.wait());
            }
            Err(error) => {
                // Each greeting tries again.
                if !tiers.is_keeper_missed.swap(true, Ordering::Relaxed) {
                    eprintln!("pagefold: no keeper ({error}): should this daemon die, pages that are out die with it");
                }
                return;
            }
        }
    }
    let Some(keeper) = held.as_ref() else { return };
    tiers.is_keeper_missed.store(false, Ordering::Relaxed);
    let _ = keeper.supervise(&tiers.config.successor);
    for group in tiers.all_groups() {
        deposit_arena(&group, keeper);
        lock(&group.clients).values().for_each(|client| drop(deposit_client(&group, keeper, client)));
    }
    tiers.pending_children.deposit(keeper);
    let mut ends = lock(&tiers.keepers_ends);
    ends.retain(sock::is_open);
    ends.iter().for_each(|end| drop(keeper.serve_children(end)));
    tiers.keeper_changed.ring();
}

/// Replaces each keeper that ends, until `stopped` is readable.
pub(crate) fn replace_ended(tiers: &Tiers, stopped: &Fd) {
    loop {
        let liveness = lock(&tiers.keeper).as_ref().map(Keeper::liveness).transpose();
        let has_failed = liveness.is_err() || tiers.is_keeper_missed.load(Ordering::Relaxed);
        let keeper = liveness.ok().flatten();
        let [keeper, stopped, changed] =
            [keeper.as_ref(), Some(stopped), Some(tiers.keeper_changed.fd())].map(|fd| fd.map_or(-1, Fd::raw));
        // A keeper says nothing without being asked: only its end can be seen.
        let mut polls = [(keeper, libc::POLLRDHUP), (stopped, libc::POLLIN), (changed, libc::POLLIN)]
            .map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
        let ready = pagefold_os::fd::poll(&mut polls, if has_failed { RETRY_MS } else { -1 });
        if polls[1].revents != 0 {
            return;
        }
        tiers.keeper_changed.hush();
        if ready == Ok(0) || polls[0].revents != 0 {
            ensure_keeper(tiers);
        }
    }
}

/// Leaves the end of an agent's socket to the keeper. The socket outlives the keeper: the next one gets the same end.
///
/// # Errors
/// The end, if there is no keeper, or none that serves children.
pub(crate) fn leave_keepers_end(tiers: &Tiers, end: Fd) -> Result<(), Fd> {
    ensure_keeper(tiers);
    match lock(&tiers.keeper).as_ref() {
        Some(keeper) if keeper.serve_children(&end).is_ok() => {
            let mut ends = lock(&tiers.keepers_ends);
            ends.retain(sock::is_open);
            ends.push(end);
            Ok(())
        }
        _ => Err(end),
    }
}

/// False if the keeper has ended. A keeper that answers slowly, or cannot list all its names, still holds everything, and
/// would start a daemon if this connection ended.
pub(super) fn lives(keeper: &Keeper) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    keeper.names().map_or_else(|error| !matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected), |_| true)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cold::config::Config;
    use pagefold_os::wait::Bell;
    use std::os::unix::ffi::OsStrExt;
    use std::time::{Duration, Instant};

    /// Runs `act` beside a keeper at `path` that answers each question as told: a status and names. Returns what `act` did
    /// and the questions.
    pub(crate) fn with_keeper<T>(
        path: &std::path::Path,
        answer: impl Fn(&[u8], usize) -> Vec<u8> + Sync,
        act: impl FnOnce() -> T,
    ) -> (T, Vec<Vec<u8>>) {
        with_keeper_that_gives(path, |question, count| (answer(question, count), Vec::new()), act)
    }

    /// As [`with_keeper`], with descriptors in the answers.
    pub(crate) fn with_keeper_that_gives<T>(
        path: &std::path::Path,
        answer: impl Fn(&[u8], usize) -> (Vec<u8>, Vec<i32>) + Sync,
        act: impl FnOnce() -> T,
    ) -> (T, Vec<Vec<u8>>) {
        let listener = sock::listen(path.as_os_str().as_bytes()).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let serve = || {
            let (mut peers, mut asked) = (Vec::<Fd>::new(), Vec::new());
            while !stop.load(Ordering::Acquire) {
                let mut polls = [libc::pollfd { fd: listener.raw(), events: libc::POLLIN, revents: 0 }];
                if pagefold_os::fd::poll(&mut polls, 5).unwrap() > 0 {
                    peers.push(sock::accept(&listener).unwrap());
                }
                for peer in &peers {
                    let mut question = [0; 512];
                    while let Ok((len @ 1.., _)) = sock::receive(peer, &mut question, libc::MSG_DONTWAIT) {
                        asked.push(question[..len].to_vec());
                        let (text, fds) = answer(&question[..len], asked.len());
                        sock::send(peer, &text, &fds).unwrap();
                    }
                }
            }
            asked
        };
        thread::scope(|scope| {
            let keeper = scope.spawn(serve);
            let done = act();
            stop.store(true, Ordering::Release);
            (done, keeper.join().unwrap())
        })
    }

    /// Without a greeting, which may be long in coming.
    #[test]
    fn a_keeper_that_has_ended_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { keeper: Some(vec!["/bin/false".into()]), ..Config::default() };
        let cold = Tiers::new(config, &dir.path().join("s"));
        let stopped = Bell::new().unwrap();
        let right = |_: &[u8], _| vec![0];
        with_keeper(&cold.keeper_path, right, || ensure_keeper(&cold));
        std::fs::remove_file(&cold.keeper_path).unwrap();
        thread::scope(|scope| {
            let replacing = scope.spawn(|| replace_ended(&cold, stopped.fd()));
            let deadline = Instant::now() + Duration::from_secs(60);
            let has_one = || lock(&cold.keeper).as_ref().is_some_and(lives);
            let (_, asked) = with_keeper(&cold.keeper_path, right, || {
                while !has_one() && Instant::now() < deadline {
                    thread::sleep(Duration::from_millis(5));
                }
            });
            stopped.ring();
            replacing.join().unwrap();
            assert_eq!(asked.iter().filter(|question| question[0] == b'S').count(), 1, "{asked:?}");
        });
    }

    /// A keeper takes the end of its connection for the end of its daemon, and starts another.
    #[test]
    fn a_busy_keeper_is_not_replaced() {
        // A child of another test's would hold the keeper's listener open.
        let _alone = lock(&crate::cold::client::tests::FORKING);
        let dir = tempfile::tempdir().unwrap();
        let config = Config { keeper: Some(vec!["/bin/false".into()]), ..Config::default() };
        let cold = Tiers::new(config, &dir.path().join("s"));
        let busy = |question: &[u8], count| vec![if question[0] == b'L' && count > 1 { libc::EBUSY as u8 } else { 0 }];
        let (_, asked) = with_keeper(&cold.keeper_path, busy, || (0..3).for_each(|_| ensure_keeper(&cold)));
        let kinds: Vec<u8> = asked.iter().map(|question| question[0]).collect();
        assert_eq!(kinds, *b"SLL");
        // This keeper has ended.
        assert!(!cold.is_keeper_missed.load(Ordering::Relaxed));
        ensure_keeper(&cold);
        assert!(lock(&cold.keeper).is_none() && cold.is_keeper_missed.load(Ordering::Relaxed));
    }
}
