//! The cold tier behind live clients: who they are, who serves them, and what survives us.
//!
//! A `Group` is a domain's tier, its clients (a thread each, `client`) and
//! its `pump`. Everything that a successor needs lies in descriptors that the
//! keeper holds from before the first page goes out: the tier's arena and file,
//! and of each client userfaultfd, table and page map. See docs/design/tier.md,
//! section 6.
//!
//! A client comes by `greet` or, from a dead daemon, by `adopt`; both leave it with the keeper (`keep`) and give it its
//! thread (`threads`).

mod agent_connection;
pub(crate) mod client;
mod evict;
mod fault_affinity;
mod handover;
mod handshake;
mod prefetcher;
mod status;
mod threads;

use crate::service::listener::DomainKey;

use client::Client;
pub use client::FAULT_BUCKETS;
use handover::keeper::forget;
use handover::pending_children::Orphans;
use pagefold_os::awake::Awake;
use pagefold_os::sync::lock;
use pagefold_os::wait;
use pagefold_tier::keeper::Keeper;
use pagefold_tier::{Backing, BackingFile, Tier};
use prefetcher::Hand;
use serde::{Deserialize, Serialize};
pub use status::{ColdClient, ColdDomain, ColdStatus};
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Most domains at once: each has three threads and a file.
const DOMAINS_MAX: usize = 1024;

/// How the cold tier works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Limit of each domain's tier in bytes; its first client may name less.
    pub tier_max_bytes: u64,
    /// Directory for the files that tiers write back to; `None` for no writeback.
    pub directory: Option<PathBuf>,
    /// Bytes that such a file may have.
    pub file_max_bytes: u64,
    /// Share of run time that may be lost to refaults, if the client names none.
    pub tolerance: f64,
    /// Unit of a page's age, and pause between two looks at a client.
    pub tick: Duration,
    /// No page goes out before it was silent for so long, unless memory is short.
    pub idle_min: Duration,
    /// Pages go out by themselves; else only by `park`, hints and shortage.
    pub automatic: bool,
    /// Near pages are kept as patches.
    pub patches: bool,
    /// What is parked is made dense at once; else some ticks later, as what goes out by itself.
    pub park_densely: bool,
    /// Program and arguments of the keeper, before its socket; `None` for no keeper.
    pub keeper: Option<Vec<OsString>>,
    /// What the keeper starts when we are killed while pages are out.
    pub successor: Vec<OsString>,
    /// On an orderly stop pages stay out, for a successor that is about to come.
    pub hand_over: bool,
    /// Processors are kept from sleeping while faults come thick.
    pub keep_awake: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            tier_max_bytes: 4 << 30,
            directory: None,
            file_max_bytes: 64 << 30,
            tolerance: 0.01,
            tick: Duration::from_secs(5),
            idle_min: Duration::from_secs(10),
            automatic: true,
            patches: true,
            park_densely: true,
            keeper: None,
            successor: Vec::new(),
            hand_over: false,
            keep_awake: true,
        }
    }
}

/// How long a daemon that starts asks a keeper that does not tell what it holds.
const PATIENCE: Duration = Duration::from_secs(30);

/// A domain's tier and its clients.
pub(crate) struct Group {
    pub(crate) key: DomainKey,
    pub(crate) tier: Tier,
    /// Tells arenas apart.
    pub(crate) id: u64,
    pub(crate) clients: Mutex<BTreeMap<u32, Arc<Client>>>,
    /// Processor time of agents whose clients are gone; changes while `clients` is held.
    pub(crate) past_cpu_ns: AtomicU64,
    pub(crate) next_region: AtomicU32,
    pub(crate) config: Config,
    pub(crate) keeper: Arc<Mutex<Option<Keeper>>>,
    pub(crate) awake: Arc<Awake>,
    pub(crate) closing: Arc<AtomicBool>,
    pub(crate) orphans: Arc<Orphans>,
    pub(crate) hand: Arc<Hand>,
    /// Changes when the pump has something to do that no hint tells it.
    pub(crate) bell: AtomicU32,
    /// The cleaner's: changes when something was parked.
    pub(crate) parked: AtomicU32,
    /// When its last client was seen, or somebody was about to be one.
    pub(crate) last_busy: Mutex<Instant>,
    /// It was let go: its threads end, and nobody becomes its client. Changes while `clients` is held.
    pub(crate) over: AtomicBool,
}

/// The groups that there are.
#[derive(Default)]
pub(crate) struct Groups {
    pub(crate) all: Mutex<BTreeMap<DomainKey, Arc<Group>>>,
    /// Processor time of agents whose groups are gone; changes while `all` is held.
    pub(crate) past_cpu_ns: AtomicU64,
}

/// The tiers of all domains.
pub(crate) struct Cold {
    pub(crate) config: Config,
    pub(crate) groups: Arc<Groups>,
    pub(crate) keeper: Arc<Mutex<Option<Keeper>>>,
    pub(crate) keeper_path: PathBuf,
    /// Children that wait as long as they live.
    pub(crate) orphans: Arc<Orphans>,
    pub(crate) awake: Arc<Awake>,
    /// The daemon stops in good order: nothing goes out any more. Looked at under each client's link.
    pub(crate) closing: Arc<AtomicBool>,
    /// That there is no keeper was said, and there was none since.
    pub(crate) is_keeper_missed: AtomicBool,
    pub(crate) patience: Duration,
}

/// Whom a command is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whom {
    /// A process.
    Pid(i32),
    /// All of a cgroup and of those below it; a path in /sys/fs/cgroup, or below it.
    Cgroup(String),
    /// Everybody.
    All,
}

impl Whom {
    /// True if the command is about this process.
    pub(crate) fn has(&self, pid: i32) -> bool {
        match self {
            Whom::All => true,
            Whom::Pid(wanted) => pid == *wanted,
            Whom::Cgroup(path) => {
                let path = path.strip_prefix("/sys/fs/cgroup").unwrap_or(path).trim_matches('/');
                let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
                text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|own| {
                    let own = own.trim_matches('/');
                    path.is_empty() || own == path || own.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'))
                })
            }
        }
    }
}

pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

impl Cold {
    pub(crate) fn new(config: Config, socket: &std::path::Path) -> Cold {
        let mut keeper_path = socket.as_os_str().to_owned();
        keeper_path.push(std::ffi::OsStr::from_bytes(pagefold_protocol::message::KEEPER_SUFFIX));
        let awake = Arc::new(Awake::new(config.keep_awake));
        let keeper = Arc::default();
        Cold {
            config,
            groups: Arc::default(),
            orphans: Arc::new(Orphans::new(Arc::clone(&keeper))),
            keeper,
            keeper_path: keeper_path.into(),
            awake,
            closing: Arc::default(),
            is_keeper_missed: AtomicBool::new(false),
            patience: PATIENCE,
        }
    }

    /// What a tier is made by whose first client names `bytes_max`, 0 for as much as it may have.
    pub(crate) fn tier_config(&self, bytes_max: u64) -> pagefold_tier::Config {
        let most = self.config.tier_max_bytes;
        let bytes_max = if bytes_max == 0 { most } else { bytes_max.min(most) };
        pagefold_tier::Config {
            bytes_max: bytes_max.clamp(4 << 20, 200 << 30),
            patches: self.config.patches,
            ..pagefold_tier::Config::default()
        }
    }

    pub(crate) fn group_of(&self, key: DomainKey, tier: Tier, id: u64) -> Arc<Group> {
        let (hand, jobs) = Hand::new();
        let group = Arc::new(Group {
            key,
            tier,
            id,
            clients: Mutex::default(),
            past_cpu_ns: AtomicU64::new(0),
            next_region: AtomicU32::new(1),
            config: self.config.clone(),
            keeper: self.keeper.clone(),
            awake: self.awake.clone(),
            closing: self.closing.clone(),
            orphans: self.orphans.clone(),
            hand: Arc::new(hand),
            bell: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            last_busy: Mutex::new(Instant::now()),
            over: AtomicBool::new(false),
        });
        threads::start_hand(&group, jobs);
        group
    }

    pub(crate) fn group(&self, key: &DomainKey, bytes_max: u64) -> Result<Arc<Group>, String> {
        let mut groups = lock(&self.groups.all);
        if let Some(group) = groups.get(key) {
            *lock(&group.last_busy) = Instant::now();
            return Ok(group.clone());
        }
        if groups.len() >= DOMAINS_MAX {
            return Err(format!("there are {DOMAINS_MAX} domains of the cold tier already"));
        }
        let backing = match &self.config.directory {
            None => None,
            Some(directory) => match BackingFile::create(directory, self.config.file_max_bytes) {
                Ok(file) => Some(Box::new(file) as Box<dyn Backing>),
                Err(error) => {
                    eprintln!("pagefold: no file in {}: {error}; the tier is in memory only", directory.display());
                    None
                }
            },
        };
        let tier = Tier::create(self.tier_config(bytes_max), backing).map_err(|error| error.to_string())?;
        let group = self.group_of(key.clone(), tier, random());
        groups.insert(key.clone(), group.clone());
        drop(groups);
        // Known first, without its lock: a keeper that replaces this one is given all that are known.
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            group.deposit_arena(keeper);
        }
        threads::start_movers(&group, &self.groups);
        Ok(group)
    }

    pub(crate) fn all_groups(&self) -> Vec<Arc<Group>> {
        lock(&self.groups.all).values().cloned().collect()
    }

    pub(crate) fn clients_of(&self, whom: &Whom) -> Vec<(Arc<Group>, Arc<Client>)> {
        let of = |group: &Arc<Group>| -> Vec<(Arc<Group>, Arc<Client>)> {
            let clients = lock(&group.clients);
            clients.values().filter(|client| whom.has(client.pid)).map(|one| (group.clone(), one.clone())).collect()
        };
        self.all_groups().iter().flat_map(of).collect()
    }

    /// Puts everything of these clients out; returns (clients, pages), `None` if there is no such client.
    pub(crate) fn park(&self, whom: &Whom) -> Option<(u64, u64)> {
        let clients = self.clients_of(whom);
        let mut pages = 0;
        for (group, client) in &clients {
            pages += evict::evictor::park(group, client).unwrap_or(0);
        }
        if self.config.park_densely {
            // When all are out: before that the processors are wanted for parking.
            clients.iter().for_each(|(group, _)| group.densify());
        }
        processes(&clients).map(|count| (count, pages))
    }

    /// True if the process is a client whose agent is connected.
    pub(crate) fn is_linked(&self, pid: i32) -> bool {
        self.clients_of(&Whom::Pid(pid)).iter().any(|(_, client)| lock(&client.link).is_some())
    }

    /// The processes among these clients that are merged live as well.
    pub(crate) fn leased(&self, whom: &Whom) -> Vec<i32> {
        let clients = self.clients_of(whom);
        clients.iter().filter(|(_, one)| one.leased.load(Ordering::Relaxed)).map(|(_, one)| one.pid).collect()
    }

    /// Brings everything of these clients back that there is room for, and lets those of which that is all go that are
    /// merged live as well; as [`park`](Self::park).
    pub(crate) fn unpark(&self, whom: &Whom) -> Option<(u64, u64)> {
        let clients = self.clients_of(whom);
        let pages = clients.iter().map(|(group, client)| evict::evictor::unpark(group, client)).sum();
        processes(&clients).map(|count| (count, pages))
    }

    /// True if anybody is a client.
    pub(crate) fn is_in_use(&self) -> bool {
        lock(&self.groups.all).values().any(|group| !lock(&group.clients).is_empty())
    }

    /// The daemon stops in good order: everything comes back, unless a successor is about to come. Where nobody is a client
    /// there is nothing to hand over, and a keeper that stayed would start one that nobody wants. False if something is out.
    pub(crate) fn stop(&self) -> bool {
        // What could get no name for a successor would read zeros.
        for (group, client) in self.clients_of(&Whom::All) {
            client.moved_at_once.store(true, Ordering::Relaxed);
            client.bring_all_moved(&group.tier);
        }
        if self.config.hand_over && self.is_in_use() {
            return false;
        }
        // What comes back makes memory short: without this the pump would put out again what nobody will hold then.
        self.closing.store(true, Ordering::SeqCst);
        let _ = self.unpark(&Whom::All);
        let out: Vec<u64> = self
            .all_groups()
            .iter()
            .flat_map(|group| {
                let clients = lock(&group.clients);
                // Who ended meanwhile wants nothing back, and is not seen to have ended yet.
                let living = clients.values().filter(|client| client.uffd.is_alive());
                living.map(|client| client.pages_out(&group.tier)).collect::<Vec<_>>()
            })
            .filter(|pages| *pages > 0)
            .collect();
        let keeper = lock(&self.keeper);
        let waiting = self.orphans.count(keeper.as_ref());
        if let Some(keeper) = keeper.as_ref() {
            if out.is_empty() {
                let names = keeper.names().unwrap_or_default();
                names.iter().filter(|name| !Orphans::is_name(name)).for_each(|name| forget(keeper, name));
            }
            if out.is_empty() && waiting == 0 {
                let _ = keeper.quit();
            } else {
                // Those who wait for what could not come back wait for the next daemon.
                let _ = keeper.supervise(&[]);
            }
        }
        if !out.is_empty() {
            let then = match keeper.as_ref() {
                Some(_) => "who touches one waits until a daemon is started",
                None => "without a keeper they are lost, and who touches one gets SIGBUS",
            };
            eprintln!(
                "pagefold: {} pages of {} {} do not fit into their limits of memory and stay out: {then}",
                out.iter().sum::<u64>(),
                out.len(),
                if out.len() == 1 { "client" } else { "clients" }
            );
        }
        if waiting > 0 {
            let then = match keeper.as_ref() {
                Some(_) => "they wait on, and the keeper stays for them",
                None => "without a keeper what they wait for reads zeros",
            };
            eprintln!("pagefold: {waiting} children by forks that nobody saw wait for their pages: {then}");
        }
        out.is_empty() && waiting == 0
    }
}

/// How many processes these clients are; `None` if there is none. One that was let go and comes back is there twice for a while.
fn processes(clients: &[(Arc<Group>, Arc<Client>)]) -> Option<u64> {
    let pids: HashSet<i32> = clients.iter().map(|(_, client)| client.pid).collect();
    (!pids.is_empty()).then_some(pids.len() as u64)
}

impl Groups {
    /// Lets go of a group that has had no client for `rest`: its name may never come again. True if it is gone.
    pub(crate) fn let_go(&self, group: &Group, rest: Duration) -> bool {
        let mut all = lock(&self.all);
        let clients = lock(&group.clients);
        let mut last_busy = lock(&group.last_busy);
        if !clients.is_empty() {
            *last_busy = Instant::now();
        }
        if !clients.is_empty() || last_busy.elapsed() < rest {
            return false;
        }
        group.over.store(true, Ordering::Release);
        all.remove(&group.key);
        self.past_cpu_ns.fetch_add(group.past_cpu_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        drop((all, clients, last_busy));
        if let Some(keeper) = lock(&group.keeper).as_ref() {
            forget(keeper, &group.arena_name());
        }
        group.ring();
        group.densify();
        true
    }
}

impl Group {
    /// Has the cleaner make dense at once what is out.
    pub(crate) fn densify(&self) {
        self.parked.fetch_add(1, Ordering::Release);
        wait::wake(&self.parked);
    }

    /// Has the pump look at once.
    pub(crate) fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release);
        wait::wake(&self.bell);
    }

    /// True once its threads shall end.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// True when nothing may go out any more: `unpark` is under way or done for who holds a client's link.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// A client has ended.
    pub(crate) fn remove(&self, region: u32) {
        let mut clients = lock(&self.clients);
        let Some(client) = clients.remove(&region) else { return };
        self.past_cpu_ns.fetch_add(client.counters.agent_cpu_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        drop(clients);
        client.gone.store(true, Ordering::Release);
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            forget(keeper, &self.name_of(&client));
        }
        // Whoever talks to its agent finds the connection ended; after that nothing is stored for it any more.
        let _held = lock(&client.link);
        self.tier.remove_client(region);
    }
}

#[cfg(test)]
mod tests {
    use super::handover::keeper::tests::with_keeper;
    use super::*;

    /// A tier with a group, and the directory of its keeper's socket.
    fn with_group(config: Config) -> (tempfile::TempDir, Cold, Arc<Group>) {
        let dir = tempfile::tempdir().unwrap();
        let cold = Cold::new(config, &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        (dir, cold, group)
    }

    /// Stops it beside a keeper: whether nothing is out any more, and whether the keeper was told to quit.
    fn stop(cold: &Cold) -> (bool, bool) {
        let stop = || {
            *lock(&cold.keeper) = Some(Keeper::connect(&cold.keeper_path).unwrap());
            cold.stop()
        };
        let (nothing_out, asked) = with_keeper(&cold.keeper_path, |_, _| vec![0], stop);
        std::fs::remove_file(&cold.keeper_path).unwrap();
        (nothing_out, asked.contains(&b"Q".to_vec()))
    }

    #[test]
    fn a_tier_that_nobody_comes_back_to_is_let_go() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let dir = tempfile::tempdir().unwrap();
        let cold = Cold::new(Config::default(), &dir.path().join("s"));
        client.counters.agent_cpu_ns.store(5, Ordering::Relaxed);
        let act = || {
            *lock(&cold.keeper) = Some(Keeper::connect(&cold.keeper_path).unwrap());
            let group = cold.group(&(0, "sandbox".into()), 4 << 20).unwrap();
            lock(&group.clients).insert(1, Arc::new(client));
            assert!(!cold.groups.let_go(&group, Duration::ZERO), "it has a client");
            group.remove(1);
            assert!(!cold.groups.let_go(&group, Duration::from_secs(3600)), "it rests first");
            assert!(cold.groups.let_go(&group, Duration::ZERO) && cold.all_groups().is_empty());
            // Known to the end of the closure, as whoever greeted it may.
            group.deposit_arena(lock(&cold.keeper).as_ref().unwrap());
            *lock(&cold.keeper) = None;
            Arc::downgrade(&group)
        };
        let (group, asked) = with_keeper(&cold.keeper_path, |_, _| vec![0], act);
        let of_arena = |question: &&Vec<u8>| question[1..].starts_with(b"arena:");
        assert_eq!(asked.iter().filter(of_arena).map(|question| question[0]).collect::<Vec<_>>(), b"PD");
        assert_eq!(cold.agents_cpu_ns(), 5);
        // Its threads end, and all that it held goes.
        let is_gone = (0..6000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            group.upgrade().is_none()
        });
        assert!(is_gone, "its threads go on");
    }

    #[test]
    fn a_client_may_name_less_than_the_daemon_allows_and_no_more() {
        let config = Config { tier_max_bytes: 8 << 20, ..Config::default() };
        let cold = Cold::new(config, "/nowhere/s".as_ref());
        let made = [0, 5 << 20, 200 << 30].map(|named| cold.tier_config(named).bytes_max);
        assert_eq!(made, [8 << 20, 5 << 20, 8 << 20]);
    }

    /// A keeper that stays starts the next daemon, so it stays where there is somebody to hand over.
    #[test]
    fn a_daemon_without_clients_hands_nothing_over() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, group) = with_group(Config { hand_over: true, ..Config::default() });
        lock(&group.clients).insert(client.region, Arc::new(client));
        assert!(!stop(&cold).1);
        group.remove(1);
        assert!(stop(&cold).1);
    }

    /// Near a limit, where it waits for room as long as somebody is there who brings it.
    #[test]
    fn what_was_moved_is_there_before_a_daemon_stops() {
        for hand_over in [false, true] {
            let Some((mut client, memory)) = client::tests::own(0, 2) else { return };
            let (dir, cold, group) = with_group(Config { hand_over, ..Config::default() });
            client.room = crate::memory_limits::tests::limited(dir.path(), 999, 1000);
            let [to, from] = [memory.addr() + 4096, 1 << 30];
            group.tier.store(client.region, from / 4096, &[7; 4096], pagefold_tier::Effort::Fast).unwrap();
            client::tests::await_moved(&client, from, to);
            let client = Arc::new(client);
            lock(&group.clients).insert(client.region, client.clone());
            assert_eq!(cold.stop(), !hand_over);
            let there = client.uffd.zero(pagefold_os::Range::pages_from(to, 1), 0).1;
            assert_eq!(there, Some(pagefold_os::Errno(libc::EEXIST)), "it reads zeros");
            // SAFETY: there, mapped and ours.
            assert_eq!(unsafe { (to as *const u8).read_volatile() }, 7);
            group.remove(client.region);
        }
    }

    /// A daemon and its clients are ended at once by who ends all: nobody asks for those pages any more.
    #[test]
    fn pages_of_who_has_ended_keep_nobody() {
        let Some((mut client, memory)) = client::tests::own(0, 1) else { return };
        client.uffd = client::tests::of_who_has_ended();
        let (_dir, cold, group) = with_group(Config::default());
        let page = memory.addr() / 4096;
        group.tier.store(client.region, page, &[7; 4096], pagefold_tier::Effort::Fast).unwrap();
        client.table.find_or_add(memory.addr()).unwrap();
        client.table.set_state(memory.addr(), pagefold_protocol::residency_map::EVICTED);
        assert_eq!(client.pages_out(&group.tier), 1);
        lock(&group.clients).insert(client.region, Arc::new(client));
        assert_eq!(stop(&cold), (true, true));
        group.remove(1);
    }

    /// One that was let go, and is a client again before its end was seen.
    #[test]
    fn a_process_counts_once() {
        let Some((first, _memory)) = client::tests::own(0, 1) else { return };
        let Some((mut second, _memory)) = client::tests::own(0, 1) else { return };
        second.region = 2;
        let (_dir, cold, group) = with_group(Config::default());
        assert_eq!(cold.park(&Whom::All), None);
        lock(&group.clients).extend([first, second].map(|client| (client.region, Arc::new(client))));
        assert_eq!((cold.park(&Whom::All), cold.unpark(&Whom::All)), (Some((1, 0)), Some((1, 0))));
        group.remove(1);
        group.remove(2);
    }

    /// It is quicker to bring back while it is LZ4, and takes more memory.
    #[test]
    fn what_is_parked_is_made_dense_at_once_unless_told_otherwise() {
        for park_densely in [true, false] {
            let Some((client, _memory)) = client::tests::own(0, 1) else { return };
            let (_dir, cold, group) = with_group(Config { park_densely, ..Config::default() });
            lock(&group.clients).insert(1, Arc::new(client));
            assert!(cold.park(&Whom::All).is_some());
            assert_eq!(group.parked.load(Ordering::Acquire) > 0, park_densely);
            group.remove(1);
        }
    }

    /// Else they would read zeros.
    #[test]
    fn children_that_wait_keep_the_keeper() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, _group) = with_group(Config::default());
        let child = pagefold_os::uffd::Uffd::from_fd(client.uffd.fd().duplicate().unwrap());
        cold.orphans.hold(std::iter::once(child));
        assert_eq!(stop(&cold), (false, false));
    }

    /// What a client writes into its table does not keep the keeper, and all that it holds, beyond an orderly stop.
    #[test]
    fn pages_that_a_client_says_are_out_keep_nobody() {
        let Some((client, _memory)) = client::tests::own(0, 1) else { return };
        let (_dir, cold, group) = with_group(Config::default());
        client.table.head().evicted.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(client.pages_out(&group.tier), 0);
        lock(&group.clients).insert(client.region, Arc::new(client));
        assert_eq!(stop(&cold), (true, true));
        group.remove(1);
    }
}
