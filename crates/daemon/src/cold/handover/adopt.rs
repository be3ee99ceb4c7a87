//! Adoption: a daemon takes over what a killed daemon left with the keeper, before it accepts connections.
//!
//! It drops nothing that it cannot list or fetch now: it retries for a while, and then does not start. What no daemon can
//! ever take over is forgotten. Clients are reconciled with the tier before they are served.

use super::keeper::ensure_keeper;
use super::records::{ARENA, CLIENT, forget};
use crate::cold::client::{Client, ClientDescriptors, Identity, event_journal};
use crate::cold::threads;
use crate::cold::tiers::Tiers;
use crate::domain_key::{DomainKey, UNNAMED_DOMAIN};
use pagefold_os::Errno;
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_tier::keeper::Keeper;
use pagefold_tier::{Backing, BackingFile, Tier, fd_store};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Clients that are reconciled at the same time when a tier is adopted.
const ADOPTED_AT_ONCE: usize = 64;

/// Takes over what a predecessor left with the keeper, before the daemon accepts connections.
///
/// # Errors
/// The keeper cannot tell or give all that it holds, or it cannot be served: the pages of those that are left out would
/// be thrown away.
pub(crate) fn adopt(tiers: &Tiers) -> io::Result<()> {
    if tiers.config.keeper.is_none() {
        return Ok(());
    }
    let end = Instant::now() + tiers.keeper_timeout;
    refill_keeper(tiers, end)?;
    let Some((keeper, names)) = held(tiers, end)? else { return Ok(()) };
    // For children of forks that show while their parents are reconciled.
    {
        let mut other = lock(&tiers.keeper);
        *other = other.take().or_else(|| Keeper::connect(&tiers.keeper_path).ok());
    }
    for name in names.iter().filter(|name| name.starts_with(ARENA)) {
        match adopt_arena(tiers, &keeper, name, &names, end) {
            Ok(()) => {}
            // No daemon ever can.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                eprintln!("pagefold: {name} was left by an earlier daemon and cannot be taken over: {error}");
                forget(&keeper, name);
            }
            Err(error) => return Err(refusal(tiers, &format!("{name} cannot be taken over"), &error)),
        }
    }
    // No client will come for the rest: clients of arenas that were not valid.
    let groups = tiers.all_groups();
    for name in names.iter().filter(|name| name.starts_with(CLIENT)) {
        let mut words = name.split(':').skip(1);
        let id = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
        let client_id: Option<u32> = words.next().and_then(|word| word.parse().ok());
        let known = groups.iter().any(|group| {
            Some(group.id) == id && client_id.is_some_and(|client_id| lock(&group.clients).contains_key(&client_id))
        });
        if !known {
            forget(&keeper, name);
        }
    }
    tiers.pending_children.adopt(&keeper, &names);
    let _ = keeper.supervise(&tiers.config.successor);
    *lock(&tiers.keeper) = Some(keeper);
    tiers.keeper_changed.ring();
    for group in groups {
        for client in lock(&group.clients).values() {
            threads::start_client(&group, client).map_err(|error| {
                refusal(tiers, &format!("{} ({}) cannot be served", client.name, client.pid), &error)
            })?;
        }
        threads::start_evictor_and_cleaner(&group, &tiers.groups);
    }
    Ok(())
}

/// The keeper and the names that it holds; `None` if there is none.
fn held(tiers: &Tiers, end: Instant) -> io::Result<Option<(Keeper, Vec<String>)>> {
    let asked = patiently(end, || {
        let keeper = Keeper::connect(&tiers.keeper_path)?;
        let names = keeper.names()?;
        Ok((keeper, names))
    });
    match asked {
        Ok(held) => Ok(Some(held)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(error),
        Err(error) => Err(refusal(tiers, "it does not tell what it holds", &error)),
    }
}

/// Why a daemon does not start: what it does not take over would be lost.
fn refusal(tiers: &Tiers, what: &str, error: &io::Error) -> io::Error {
    let path = tiers.keeper_path.display();
    let text = format!(
        "{path}: {what} ({error}), and the pages that are out would be lost: start the daemon again when that is \
         mended, or end the keeper's process to give them up"
    );
    io::Error::new(error.kind(), text)
}

/// Daemon and keeper both died: what the service manager held for them goes to a new keeper, and from there on it is
/// as if only the daemon had. A keeper that lives has the same and more.
fn refill_keeper(tiers: &Tiers, end: Instant) -> io::Result<()> {
    let left = fd_store::take_passed();
    if left.is_empty() || held(tiers, end)?.is_some_and(|(_, names)| !names.is_empty()) {
        return Ok(());
    }
    ensure_keeper(tiers);
    // We stay connected until `adopt` is: a keeper that is left alone with what it holds starts a daemon.
    let held = lock(&tiers.keeper);
    for (name, fds) in left {
        let fds: Vec<i32> = fds.iter().map(Fd::raw).collect();
        let put = held.as_ref().ok_or(io::ErrorKind::NotConnected.into()).and_then(|keeper| keeper.put(&name, &fds));
        put.map_err(|error| refusal(tiers, &format!("it does not take {name} from the service manager"), &error))?;
    }
    Ok(())
}

fn adopt_arena(tiers: &Tiers, keeper: &Keeper, name: &str, names: &[String], end: Instant) -> io::Result<()> {
    let void = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
    let mut words = name.splitn(4, ':').skip(1);
    let id = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
    let uid = words.next().and_then(|word| word.parse().ok());
    let (Some(id), Some(uid)) = (id, uid) else { return Err(void("its name is none")) };
    let key: DomainKey = (uid, words.next().unwrap_or(UNNAMED_DOMAIN).to_owned());
    // A daemon that was killed a moment ago may still be dying.
    let dying_end = Instant::now() + Duration::from_secs(5);
    let (tier, _) = loop {
        let mut fds = patiently(end, || keeper.get(name))?;
        let file = (fds.len() > 1).then(|| fds.remove(1));
        let arena = fds.pop().ok_or_else(|| void("nothing was left"))?;
        let backing =
            file.map(|fd| Box::new(BackingFile::from_fd(fd, tiers.config.file_max_bytes)) as Box<dyn Backing>);
        match Tier::adopt(arena, backing, tiers.tier_config(0)) {
            Ok(adopted) => break adopted,
            Err(pagefold_tier::AdoptError::OwnerAlive { .. }) if Instant::now() < dying_end => {
                thread::sleep(Duration::from_millis(5));
            }
            Err(error @ pagefold_tier::AdoptError::Format(_)) => return Err(void(&error.to_string())),
            Err(error) => return Err(io::Error::other(error)),
        }
    };
    let group = tiers.make_group(key.clone(), tier, id);
    let mut found = Vec::new();
    let prefix = format!("{CLIENT}:{id:x}:");
    for name in names.iter().filter(|name| name.starts_with(&prefix)) {
        let words: Vec<&str> = name[prefix.len()..].split(':').collect();
        let [client_id, token, pid, uid] = words[..] else { continue };
        let (Ok(client_id), Ok(token), Ok(pid), Ok(uid)) =
            (client_id.parse::<u32>(), u64::from_str_radix(token, 16), pid.parse::<i32>(), uid.parse::<u32>())
        else {
            continue;
        };
        let mut fds = match patiently(end, || keeper.get(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            fds => fds.unwrap_or_default(),
        };
        // Daemons of before the journal left three.
        let journal = (fds.len() == 4).then(|| fds.remove(3));
        if fds.len() != 3 {
            continue;
        }
        let (pagemap, table, uffd) = (fds.remove(2), fds.remove(1), Uffd::from_fd(fds.remove(0)));
        let who = Identity { client_id, token, pid, uid };
        group.next_client_id.fetch_max(client_id + 1, Ordering::Relaxed);
        if !uffd.is_one() || !uffd.is_alive() {
            forget(keeper, name);
            continue;
        }
        let handed = ClientDescriptors { uffd, table, pagemap };
        let journal = journal.map_or_else(event_journal::create, Ok)?;
        match Client::new(who, handed, journal, group.prefetcher.clone(), group.pending_children.clone()) {
            Ok(client) => found.push(Arc::new(client)),
            Err(errno @ Errno(libc::ENOMEM | libc::EMFILE | libc::ENFILE)) => return Err(errno.into()),
            // Its table is none.
            Err(_) => {}
        }
    }
    if found.is_empty() {
        // No client is left with pages in this tier. Another tier may have the same domain.
        forget(keeper, name);
        return Ok(());
    }
    // Many at the same time: a client that keeps its owner lock, or claims many pages, must not delay the others.
    for some in found.chunks(ADOPTED_AT_ONCE) {
        thread::scope(|scope| {
            for client in some {
                let reconcile = || {
                    if !client.reconcile(&group.tier) {
                        eprintln!("pagefold: {} ({}) holds its table and answers nothing", client.name, client.pid);
                    }
                };
                if thread::Builder::new().spawn_scoped(scope, reconcile).is_err() {
                    reconcile();
                }
            }
        });
    }
    lock(&group.clients).extend(found.into_iter().map(|client| (client.client_id, client)));
    // Pages of clients that ended meanwhile.
    for client_id in group.tier.client_ids() {
        group.next_client_id.fetch_max(client_id + 1, Ordering::Relaxed);
        if !lock(&group.clients).contains_key(&client_id) {
            group.tier.remove_client(client_id);
        }
    }
    lock(&tiers.groups.all).insert(key, group);
    Ok(())
}

/// Asks until there is an answer or `end` has come: what a keeper cannot tell or give now it holds all the same.
fn patiently<T>(end: Instant, mut ask: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, InvalidData, NotFound};
    loop {
        match ask() {
            Err(error)
                if Instant::now() < end
                    && !matches!(error.kind(), BrokenPipe | ConnectionRefused | InvalidData | NotFound) =>
            {
                thread::sleep(Duration::from_millis(50));
            }
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::handover::keeper::tests::{with_keeper, with_keeper_that_gives};
    use crate::cold::{Config, client};
    use pagefold_os::uffd;
    use pagefold_protocol::residency_map::EVICTED;

    /// What came of it, and what the keeper was asked.
    type Adopted = (io::Result<()>, Vec<Vec<u8>>);

    /// Starts a daemon's cold tier at such a keeper.
    fn adopt_at(patience: Duration, answer: impl Fn(&[u8], usize) -> Vec<u8> + Sync) -> Adopted {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { keeper: Some(vec!["/bin/false".into()]), ..Config::default() };
        let mut cold = Tiers::new(config, &dir.path().join("s"));
        cold.keeper_timeout = patience;
        with_keeper(&cold.keeper_path, answer, || adopt(&cold))
    }

    /// As [`adopt_at`], where patience ends: with more of it, until the keeper was asked `enough`.
    fn adopt_in_vain(answer: impl Fn(&[u8], usize) -> Vec<u8> + Sync, enough: impl Fn(&[Vec<u8>]) -> bool) -> Adopted {
        let mut patience = Duration::from_millis(300);
        loop {
            let (adopted, asked) = adopt_at(patience, &answer);
            if enough(&asked) || patience > Duration::from_secs(60) {
                return (adopted, asked);
            }
            patience *= 4;
        }
    }

    #[test]
    fn what_a_busy_keeper_holds_is_not_forgotten() {
        let forgot = |asked: &[Vec<u8>]| asked.iter().any(|question| question[0] == b'D');
        let busy = libc::EBUSY as u8;
        // It never tells.
        let (adopted, asked) = adopt_in_vain(move |_, _| vec![busy], |asked| asked.len() > 1);
        let text = adopted.unwrap_err().to_string();
        assert!(text.contains("would be lost") && text.contains("s.keeper") && !text.contains('\n'), "{text}");
        assert!(asked.len() > 1 && !forgot(&asked), "{asked:?}");
        // It tells, and does not give.
        let list = b"\0arena:7:0:default\0client:7:1:1:1:0\0".to_vec();
        let names = list.clone();
        let (adopted, asked) = adopt_in_vain(
            move |question, _| if question[0] == b'L' { names.clone() } else { vec![busy] },
            |asked| asked.iter().any(|question| question[0] == b'G'),
        );
        assert!(adopted.unwrap_err().to_string().contains("arena:7:0:default cannot be taken over"));
        assert!(!forgot(&asked), "{asked:?}");
        // It tells at last, and what it gives is nothing that anybody could take over.
        let (adopted, asked) = adopt_at(Duration::from_secs(60), move |question, count| match question[0] {
            _ if count < 3 => vec![busy],
            b'L' => list.clone(),
            _ => vec![0],
        });
        adopted.unwrap();
        for forgotten in [&b"Darena:7:0:default"[..], b"Dclient:7:1:1:1:0"] {
            assert!(asked.iter().any(|question| question == forgotten), "{asked:?}");
        }
        assert_eq!(asked.iter().filter(|question| question[0] == b'S').count(), 1);
    }

    /// A daemon that dies while it settles the parent leaves the child to its successor.
    #[test]
    fn the_keeper_has_a_child_of_a_fork_that_a_successor_hears_of() {
        let _alone = lock(&client::tests::FORKING);
        let Some((parent, memory)) = client::tests::own(uffd::FEATURE_EVENT_FORK, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        tier.store(1, memory.addr() / 4096, &[7; 4096], pagefold_tier::Effort::Fast).unwrap();
        parent.table.find_or_add(memory.addr()).unwrap();
        parent.table.set_state(memory.addr(), EVICTED);
        // SAFETY: a copy of ours.
        let arena = unsafe { Fd::from_raw(libc::dup(tier.fds().0)) };
        drop(tier);
        let list = format!("\0arena:7:0:default\0client:7:1:1:{}:0\0", std::process::id());
        let give = |question: &[u8], _: usize| match question[0] {
            b'L' => (list.clone().into_bytes(), Vec::new()),
            b'G' if question.starts_with(b"Garena") => (vec![0], vec![arena.raw()]),
            b'G' => (vec![0], vec![parent.uffd.fd().raw(), parent.table_fd.raw(), parent.pagemap.raw()]),
            _ => (vec![0], Vec::new()),
        };
        let dir = tempfile::tempdir().unwrap();
        let cold =
            Tiers::new(Config { keeper: Some(vec!["/bin/false".into()]), ..Config::default() }, &dir.path().join("s"));
        let (byte, asked) = with_keeper_that_gives(&cold.keeper_path, give, || {
            thread::scope(|scope| {
                let forks = scope.spawn(|| {
                    // By a bare call: fork(3) holds the allocator's locks meanwhile.
                    // SAFETY: the child reads memory that is mapped, allocates nothing, and ends.
                    unsafe {
                        let child = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32;
                        if child == 0 {
                            libc::_exit(i32::from((memory.addr() as *const u8).read_volatile()));
                        }
                        let mut status = 0;
                        assert_eq!(libc::waitpid(child, &mut status, 0), child);
                        libc::WEXITSTATUS(status)
                    }
                });
                let mut polls = [libc::pollfd { fd: parent.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no event of the fork");
                adopt(&cold).unwrap();
                forks.join().unwrap()
            })
        });
        cold.all_groups().iter().for_each(|group| group.remove(1));
        assert_eq!(byte, 7);
        let of_child = |question: &&Vec<u8>| question[1..].starts_with(b"child:");
        let kinds: Vec<u8> = asked.iter().filter(of_child).map(|question| question[0]).collect();
        assert_eq!(kinds, *b"PD");
    }
}
