//! What survives us: the keeper, and what is left with it.
//!
//! A tier leaves its arena and its file, a client its userfaultfd, table and page map, each under a name that tells a
//! successor whose they are. The service manager, if there is one, is left the same. A keeper that is gone is replaced
//! with the next greeting, and is given everything anew.

use crate::cold::client::Client;
use crate::cold::{Cold, Group};
use pagefold_os::sync::lock;
use pagefold_tier::fd_store;
use pagefold_tier::keeper::Keeper;
use std::io;
use std::sync::atomic::Ordering;
use std::thread;

/// The keeper's names of what a tier and a client left with it.
pub(crate) const ARENA: &str = "arena";
pub(crate) const CLIENT: &str = "client";
/// Most descriptors under one name: a client's.
const DESCRIPTORS_MAX: usize = 3;

impl Cold {
    /// The keeper, started if there is none.
    pub(crate) fn ensure_keeper(&self) {
        let Some(command) = &self.config.keeper else { return };
        let mut held = lock(&self.keeper);
        // The one that was told to end needs no other.
        if self.closing.load(Ordering::SeqCst) {
            return;
        }
        if let Some(keeper) = held.as_ref().filter(|keeper| lives(keeper)) {
            // Its names are for the living.
            self.orphans.let_go_of_ended(Some(keeper));
            return;
        }
        *held = Keeper::connect(&self.keeper_path).ok();
        if held.is_none() {
            let arguments: Vec<&str> = command[1..].iter().filter_map(|word| word.to_str()).collect();
            match Keeper::start_with(command[0].as_ref(), &arguments, &self.keeper_path) {
                Ok((keeper, mut child)) => {
                    *held = Some(keeper);
                    let _ =
                        thread::Builder::new().name("keeper".into()).stack_size(64 << 10).spawn(move || child.wait());
                }
                Err(error) => {
                    // Each greeting tries again.
                    if !self.is_keeper_missed.swap(true, Ordering::Relaxed) {
                        eprintln!(
                            "pagefold: no keeper ({error}): should this daemon die, pages that are out die with it"
                        );
                    }
                    return;
                }
            }
        }
        let Some(keeper) = held.as_ref() else { return };
        self.is_keeper_missed.store(false, Ordering::Relaxed);
        let _ = keeper.supervise(&self.config.successor);
        for group in self.all_groups() {
            group.deposit_arena(keeper);
            lock(&group.clients).values().for_each(|client| drop(group.deposit(keeper, client)));
        }
        self.orphans.deposit(keeper);
    }
}

/// False if the keeper has ended. One that takes its time for an answer, or cannot tell all its names, holds what it held; and
/// it would start a daemon if this connection ended.
fn lives(keeper: &Keeper) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    keeper.names().map_or_else(|error| !matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected), |_| true)
}

impl Group {
    pub(crate) fn arena_name(&self) -> String {
        format!("{ARENA}:{:x}:{}:{}", self.id, self.key.0, self.key.1)
    }

    pub(crate) fn deposit_arena(&self, keeper: &Keeper) {
        // Who lets go of it has it forgotten behind that.
        if self.is_over() {
            return;
        }
        let (arena, file) = self.tier.fds();
        let fds: Vec<i32> = std::iter::once(arena).chain(file).collect();
        let name = self.arena_name();
        if let Err(error) = keeper.put(&name, &fds) {
            eprintln!("pagefold: the keeper does not take the tier of {}: {error}", self.key.1);
        }
        leave(&name, &fds);
    }

    pub(crate) fn name_of(&self, client: &Client) -> String {
        format!("{CLIENT}:{:x}:{}:{:x}:{}:{}", self.id, client.region, client.token, client.pid, client.uid)
    }

    /// Leaves a client with the keeper.
    ///
    /// # Errors
    /// The keeper holds as much as it can, and a new client's pages would die with us. One that is gone is no error: it is
    /// replaced with the next greeting.
    pub(crate) fn deposit(&self, keeper: &Keeper, client: &Client) -> io::Result<()> {
        let fds = [client.uffd.fd().raw(), client.table_fd.raw(), client.pagemap.raw()];
        if let Err(error) = keeper.put(&self.name_of(client), &fds) {
            eprintln!("pagefold: the keeper does not take {} ({}): {error}", client.name, client.pid);
            if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EMFILE)) {
                return Err(error);
            }
        }
        leave(&self.name_of(client), &fds);
        Ok(())
    }
}

/// Leaves with the service manager too what the keeper has; without one nothing is lost but that.
fn leave(name: &str, fds: &[i32]) {
    if let Err(error) = fd_store::store(name, fds) {
        eprintln!("pagefold: the service manager does not take {name}: {error}");
    }
}

/// Nobody needs what is held under the name: not the keeper, not the service manager.
pub(crate) fn forget(keeper: &Keeper, name: &str) {
    let _ = keeper.forget(name);
    let _ = fd_store::remove(name, DESCRIPTORS_MAX);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cold::{Cold, Config};
    use pagefold_os::fd::Fd;
    use pagefold_os::sock;
    use std::os::unix::ffi::OsStrExt;

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

    /// A connection that ends tells a keeper that its daemon has, and it starts another.
    #[test]
    fn a_keeper_that_has_no_time_is_not_left() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { keeper: Some(vec!["/bin/false".into()]), ..Config::default() };
        let cold = Cold::new(config, &dir.path().join("s"));
        let busy = |question: &[u8], count| vec![if question[0] == b'L' && count > 1 { libc::EBUSY as u8 } else { 0 }];
        let (_, asked) = with_keeper(&cold.keeper_path, busy, || (0..3).for_each(|_| cold.ensure_keeper()));
        let kinds: Vec<u8> = asked.iter().map(|question| question[0]).collect();
        assert_eq!(kinds, *b"SLL");
        // This one has ended.
        assert!(!cold.is_keeper_missed.load(Ordering::Relaxed));
        cold.ensure_keeper();
        assert!(lock(&cold.keeper).is_none() && cold.is_keeper_missed.load(Ordering::Relaxed));
    }
}
