//! The cold tier behind live clients: who they are, who serves them, and what survives us.
//!
//! A `Group` is a domain's tier, its clients (a thread each, `client`) and
//! its `pump`. Everything that a successor needs lies in descriptors that the
//! keeper holds from before the first page goes out: the tier's arena and file,
//! and of each client userfaultfd, table and page map. See docs/design/tier.md,
//! section 6.

mod client;
mod hand;
mod link;
mod out;
mod place;
mod pump;
mod room;
mod store;
mod threads;

use crate::server::{DomainKey, lock};
pub use client::FAULT_BUCKETS;
use client::{Client, Handed, Identity};
use hand::Hand;
use link::ColdLink;
use pagefold_agent::wire::{HELLO_AWAY, Op, Packet};
use pagefold_os::awake::Awake;
use pagefold_os::fd::Fd;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Errno, pagemap, sock, wait};
use pagefold_tier::keeper::Keeper;
use pagefold_tier::{Backing, BackingFile, Tier, fd_store};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How the cold tier works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Limit of each domain's tier in bytes, if its first client names none.
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
            keeper: None,
            successor: Vec::new(),
            hand_over: false,
            keep_awake: true,
        }
    }
}

/// The keeper's names of what a tier and a client left with it.
const ARENA: &str = "arena";
const CLIENT: &str = "client";
/// Clients that are settled at once when a tier is adopted.
const ADOPTED_AT_ONCE: usize = 64;
/// How long a daemon that starts asks a keeper that does not tell what it holds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Clients that one process may be: one, another while an exec(2) ends it, and what tests and debuggers make of it. Each
/// costs a thread.
const CLIENTS_PER_PROCESS: usize = 8;
/// Most descriptors under one name: a client's.
const DESCRIPTORS_MAX: usize = 3;

/// A domain's tier and its clients.
pub(crate) struct Group {
    key: DomainKey,
    tier: Tier,
    /// Tells arenas apart.
    id: u64,
    clients: Mutex<BTreeMap<u32, Arc<Client>>>,
    next_region: AtomicU32,
    config: Config,
    keeper: Arc<Mutex<Option<Keeper>>>,
    awake: Arc<Awake>,
    hand: Arc<Hand>,
    /// Changes when the pump has something to do that no hint tells it.
    bell: AtomicU32,
    /// The cleaner's: changes when something was parked.
    parked: AtomicU32,
}

/// The tiers of all domains.
pub(crate) struct Cold {
    config: Config,
    groups: Mutex<BTreeMap<DomainKey, Arc<Group>>>,
    keeper: Arc<Mutex<Option<Keeper>>>,
    keeper_path: PathBuf,
    awake: Arc<Awake>,
    patience: Duration,
}

/// A client of the cold tier, as status shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdClient {
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Command name.
    pub name: String,
    /// Domain.
    pub domain: String,
    /// Pages that are out now.
    pub pages_out: u64,
    /// Pages that ever went out.
    pub pages_out_ever: u64,
    /// Faults on pages that were out.
    pub refaults: u64,
    /// Pages that came back, with neighbours and by unpark.
    pub pages_back: u64,
    /// Faults on fresh pages of regions with pages out.
    pub zero_faults: u64,
    /// Pages lost: damaged, unreadable, or the tier died. SIGBUS for who touches them.
    pub pages_lost: u64,
    /// Time that the client's threads waited for pages, in nanoseconds.
    pub fault_ns: u64,
    /// Faults by time from reading to answering: entry `i` counts those below 2^i microseconds.
    pub fault_us_log2: Vec<u64>,
    /// Put out by `park`, and not brought back by `unpark` since.
    pub parked: bool,
    /// The agent is connected.
    pub connected: bool,
    /// How long a page must be silent before it goes out, in seconds; 0 before the first look.
    pub idle_s: f64,
    /// Processor time of the agent in nanoseconds.
    pub agent_cpu_ns: u64,
}

/// A domain's tier, as status shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdDomain {
    /// Domain.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Bytes of clients' pages that are in the tier.
    pub cold_bytes: u64,
    /// Memory of the tier, its indexes included.
    pub held_bytes: u64,
    /// Limit of the arena.
    pub bytes_max: u64,
    /// `cold_bytes` for each byte held.
    pub ratio: f64,
    /// Pages, and the different contents that they show.
    pub pages: u64,
    /// See `pages`.
    pub contents: u64,
    /// Pages of one repeated word.
    pub pages_filled: u64,
    /// Bytes in the file.
    pub disk_bytes: u64,
    /// Bytes in free slots and ends of slabs.
    pub waste_bytes: u64,
    /// Stores refused: the tier was full, or the kernel gave no memory.
    pub stores_refused: u64,
    /// Loads that failed.
    pub loads_failed: u64,
    /// Loads by time: entry `i` counts those below 2^i microseconds.
    pub load_us_log2: Vec<u64>,
}

/// The cold tier, as status shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdStatus {
    /// Tiers.
    pub domains: Vec<ColdDomain>,
    /// Clients.
    pub clients: Vec<ColdClient>,
    /// The keeper's process holds our descriptors.
    pub keeper: bool,
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

fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

impl Cold {
    pub(crate) fn new(config: Config, socket: &std::path::Path) -> Cold {
        let mut keeper_path = socket.as_os_str().to_owned();
        keeper_path.push(std::ffi::OsStr::from_bytes(pagefold_agent::cold::KEEPER_SUFFIX));
        let awake = Arc::new(Awake::new(config.keep_awake));
        Cold {
            config,
            groups: Mutex::default(),
            keeper: Arc::default(),
            keeper_path: keeper_path.into(),
            awake,
            patience: PATIENCE,
        }
    }

    /// Takes over what a predecessor left with the keeper, before anybody is let in.
    ///
    /// # Errors
    /// The keeper cannot tell or give all that it holds, or it cannot be served: the pages of those that are left out would
    /// be thrown away.
    pub(crate) fn adopt(&self) -> io::Result<()> {
        if self.config.keeper.is_none() {
            return Ok(());
        }
        let end = Instant::now() + self.patience;
        self.refill_keeper(end)?;
        let Some((keeper, names)) = self.held(end)? else { return Ok(()) };
        for name in names.iter().filter(|name| name.starts_with(ARENA)) {
            match self.adopt_arena(&keeper, name, &names, end) {
                Ok(()) => {}
                // Nobody ever can.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    eprintln!("pagefold: {name} was left by an earlier daemon and cannot be taken over: {error}");
                }
                Err(error) => return Err(self.refusal(&format!("{name} cannot be taken over"), &error)),
            }
        }
        // Nobody will come for the rest: an arena that is no arena, a client of one.
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        for name in names.iter().filter(|name| name.starts_with(CLIENT)) {
            let mut words = name.split(':').skip(1);
            let id = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
            let region: Option<u32> = words.next().and_then(|word| word.parse().ok());
            let known = groups.iter().any(|group| {
                Some(group.id) == id && region.is_some_and(|region| lock(&group.clients).contains_key(&region))
            });
            if !known {
                forget(&keeper, name);
            }
        }
        let _ = keeper.supervise(&self.config.successor);
        *lock(&self.keeper) = Some(keeper);
        for group in groups {
            for client in lock(&group.clients).values() {
                threads::start_client(&group, client).map_err(|error| {
                    self.refusal(&format!("{} ({}) cannot be served", client.name, client.pid), &error)
                })?;
            }
            threads::start_movers(&group);
        }
        Ok(())
    }

    /// The keeper and the names that it holds; `None` if there is none.
    fn held(&self, end: Instant) -> io::Result<Option<(Keeper, Vec<String>)>> {
        let asked = patiently(end, || {
            let keeper = Keeper::connect(&self.keeper_path)?;
            let names = keeper.names()?;
            Ok((keeper, names))
        });
        match asked {
            Ok(held) => Ok(Some(held)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Ok(None)
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(error),
            Err(error) => Err(self.refusal("it does not tell what it holds", &error)),
        }
    }

    /// Why a daemon does not start: what it does not take over would be lost.
    fn refusal(&self, what: &str, error: &io::Error) -> io::Error {
        let path = self.keeper_path.display();
        let text = format!(
            "{path}: {what} ({error}), and the pages that are out would be lost: start the daemon again when that is \
             mended, or end the keeper's process to give them up"
        );
        io::Error::new(error.kind(), text)
    }

    /// Daemon and keeper both died: what the service manager held for them goes to a new keeper, and from there on it is
    /// as if only the daemon had. A keeper that lives has the same and more.
    fn refill_keeper(&self, end: Instant) -> io::Result<()> {
        let left = fd_store::take();
        if left.is_empty() || self.held(end)?.is_some_and(|(_, names)| !names.is_empty()) {
            return Ok(());
        }
        self.ensure_keeper();
        // We stay connected until `adopt` is: a keeper that is left alone with what it holds starts a daemon.
        let held = lock(&self.keeper);
        for (name, fds) in left {
            let fds: Vec<i32> = fds.iter().map(Fd::raw).collect();
            let put =
                held.as_ref().ok_or(io::ErrorKind::NotConnected.into()).and_then(|keeper| keeper.put(&name, &fds));
            put.map_err(|error| self.refusal(&format!("it does not take {name} from the service manager"), &error))?;
        }
        Ok(())
    }

    fn adopt_arena(&self, keeper: &Keeper, name: &str, names: &[String], end: Instant) -> io::Result<()> {
        let void = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
        let mut words = name.splitn(4, ':').skip(1);
        let id = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
        let uid = words.next().and_then(|word| word.parse().ok());
        let (Some(id), Some(uid)) = (id, uid) else { return Err(void("its name is none")) };
        let key: DomainKey = (uid, words.next().unwrap_or("default").to_owned());
        // A daemon that was killed a moment ago may still be dying.
        let dying_end = Instant::now() + Duration::from_secs(5);
        let (tier, _) = loop {
            let mut fds = patiently(end, || keeper.get(name))?;
            let file = (fds.len() > 1).then(|| fds.remove(1));
            let arena = fds.pop().ok_or_else(|| void("nothing was left"))?;
            let backing =
                file.map(|fd| Box::new(BackingFile::from_fd(fd, self.config.file_max_bytes)) as Box<dyn Backing>);
            match Tier::adopt(arena, backing, self.tier_config(0)) {
                Ok(adopted) => break adopted,
                Err(pagefold_tier::AdoptError::OwnerAlive { .. }) if Instant::now() < dying_end => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error @ pagefold_tier::AdoptError::Format(_)) => return Err(void(&error.to_string())),
                Err(error) => return Err(io::Error::other(error)),
            }
        };
        let group = self.group_of(key.clone(), tier, id);
        let mut found = Vec::new();
        let prefix = format!("{CLIENT}:{id:x}:");
        for name in names.iter().filter(|name| name.starts_with(&prefix)) {
            let words: Vec<&str> = name[prefix.len()..].split(':').collect();
            let [region, token, pid, uid] = words[..] else { continue };
            let (Ok(region), Ok(token), Ok(pid), Ok(uid)) =
                (region.parse::<u32>(), u64::from_str_radix(token, 16), pid.parse::<i32>(), uid.parse::<u32>())
            else {
                continue;
            };
            let mut fds = match patiently(end, || keeper.get(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                fds => fds.unwrap_or_default(),
            };
            if fds.len() != 3 {
                continue;
            }
            let (pagemap, table, uffd) = (fds.remove(2), fds.remove(1), Uffd::from_fd(fds.remove(0)));
            let who = Identity { region, token, pid, uid };
            group.next_region.fetch_max(region + 1, Ordering::Relaxed);
            if !uffd.is_one() || !uffd.is_alive() {
                forget(keeper, name);
                continue;
            }
            match Client::new(who, Handed { uffd, table, pagemap }, group.hand.clone()) {
                Ok(client) => found.push(Arc::new(client)),
                Err(errno @ Errno(libc::ENOMEM | libc::EMFILE | libc::ENFILE)) => return Err(errno.into()),
                // Its table is none.
                Err(_) => {}
            }
        }
        // Many at once: one that keeps its pact, or claims much, must not let the others wait in line.
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
        lock(&group.clients).extend(found.into_iter().map(|client| (client.region, client)));
        // Pages of clients that ended meanwhile.
        for region in group.tier.region_ids() {
            group.next_region.fetch_max(region + 1, Ordering::Relaxed);
            if !lock(&group.clients).contains_key(&region) {
                group.tier.remove_region(region);
            }
        }
        lock(&self.groups).insert(key, group);
        Ok(())
    }

    fn tier_config(&self, bytes_max: u64) -> pagefold_tier::Config {
        let bytes_max = if bytes_max == 0 { self.config.tier_max_bytes } else { bytes_max };
        pagefold_tier::Config {
            bytes_max: bytes_max.clamp(4 << 20, 200 << 30),
            patches: self.config.patches,
            ..pagefold_tier::Config::default()
        }
    }

    /// The keeper, started if there is none.
    fn ensure_keeper(&self) {
        let Some(command) = &self.config.keeper else { return };
        let mut held = lock(&self.keeper);
        if held.as_ref().is_some_and(|keeper| keeper.names().is_ok()) {
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
                    eprintln!("pagefold: no keeper ({error}): should this daemon die, pages that are out die with it");
                    return;
                }
            }
        }
        let Some(keeper) = held.as_ref() else { return };
        let _ = keeper.supervise(&self.config.successor);
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        for group in groups {
            group.deposit_arena(keeper);
            lock(&group.clients).values().for_each(|client| drop(group.deposit(keeper, client)));
        }
    }

    fn group_of(&self, key: DomainKey, tier: Tier, id: u64) -> Arc<Group> {
        let (hand, jobs) = Hand::new();
        let group = Arc::new(Group {
            key,
            tier,
            id,
            clients: Mutex::default(),
            next_region: AtomicU32::new(1),
            config: self.config.clone(),
            keeper: self.keeper.clone(),
            awake: self.awake.clone(),
            hand: Arc::new(hand),
            bell: AtomicU32::new(0),
            parked: AtomicU32::new(0),
        });
        threads::start_hand(&group, jobs);
        group
    }

    fn group(&self, key: &DomainKey, bytes_max: u64) -> Result<Arc<Group>, String> {
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.get(key) {
            return Ok(group.clone());
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
        threads::start_movers(&group);
        Ok(group)
    }

    /// Greets an agent: see `agent::cold::connect` for the other half.
    ///
    /// # Errors
    /// One line for `status`.
    pub(crate) fn greet(
        &self,
        socket: Fd,
        hello: &Packet,
        mut fds: sock::Fds,
        device: Option<&Fd>,
        key: DomainKey,
    ) -> Result<(), String> {
        let cred = sock::peer(&socket).map_err(|errno| errno.to_string())?;
        let pagemap = fds.take(0).ok_or("not a greeting of this version")?;
        pagemap::scan(&pagemap, pagefold_os::Range { start: 0, end: 0 }, pagemap::Query::default(), &mut [])
            .map_err(|_| "not a greeting of this version")?;
        self.ensure_keeper();
        let group = self.group(&key, hello.count)?;
        let socket = Arc::new(socket);
        let link = ColdLink::new(socket.clone()).map_err(|errno| errno.to_string())?;
        let mut pass = vec![link.channel_fd().raw()];
        pass.extend(device.map(Fd::raw));
        sock::send(&socket, Packet::new(Op::Welcome).bytes(), &pass).map_err(|errno| errno.to_string())?;
        let mut buffer = [0; size_of::<Packet>()];
        let (got, mut fds) = sock::receive(&socket, &mut buffer, 0).map_err(|errno| errno.to_string())?;
        let ready = Packet::parse(&buffer[..got]).filter(|packet| packet.op == Op::Ready as u32);
        let ready = ready.ok_or("not a greeting of this version")?;
        if ready.status != 0 {
            return Err(format!(
                "the client's kernel refused userfaultfd: {}; see pagefold doctor",
                Errno(ready.status)
            ));
        }
        let (Some(uffd), Some(table)) = (fds.take(0), fds.take(1)) else {
            return Err("not a greeting of this version".into());
        };
        let handed = Handed { uffd: Uffd::from_fd(uffd), table, pagemap };
        let who = Identity { region: 0, token: 0, pid: cred.pid, uid: cred.uid };
        let result = self.attach(&group, who, handed, link, ready.a == 1, hello);
        result.map_err(|errno| {
            let _ = sock::send(&socket, Packet { status: errno.0, ..Packet::new(Op::ColdGo) }.bytes(), &[]);
            format!("the cold tier cannot serve it: {errno}")
        })
    }

    /// Makes a client of what was handed over, or finds the one that it is; `bare` is a descriptor that nobody has enabled.
    fn attach(
        &self,
        group: &Arc<Group>,
        who: Identity,
        handed: Handed,
        link: ColdLink,
        bare: bool,
        hello: &Packet,
    ) -> Result<(), Errno> {
        let uffd = &handed.uffd;
        // Else its thread would look for events where none can be, and never hear that the client has ended.
        if !uffd.is_one() {
            return Err(Errno(libc::EPROTO));
        }
        // Whoever is in a namespace that we do not see has no number.
        if bare && who.pid > 0 && self.clients_of(&Whom::Pid(who.pid)).len() >= CLIENTS_PER_PROCESS {
            return Err(Errno(libc::EUSERS));
        }
        if bare {
            let features = uffd::FEATURE_PAGEFAULT_FLAG_WP
                | uffd::FEATURE_WP_ASYNC
                | uffd::FEATURE_MOVE
                | uffd::FEATURE_POISON
                | uffd::FEATURE_THREAD_ID
                | uffd::FEATURE_EVENT_REMOVE
                | uffd::FEATURE_EVENT_UNMAP
                | uffd::FEATURE_EVENT_REMAP;
            // Forks by calls that the agent does not see are known only to the privileged.
            if uffd.enable(features | uffd::FEATURE_EVENT_FORK).is_err() {
                uffd.enable(features)?;
            }
        }
        let mut new = Client::new(who, handed, group.hand.clone())?;
        let head = new.table.head();
        let (region, token, arena) = (
            head.region.load(Ordering::Acquire),
            head.token.load(Ordering::Relaxed),
            head.arena.load(Ordering::Relaxed),
        );
        let known = lock(&group.clients).get(&(region as u32)).cloned();
        let known = known.filter(|client| {
            arena == group.id
                && client.token == token
                && client.uid == who.uid
                && same_file(&client.table_fd, &new.table_fd)
        });
        let client = match known {
            Some(client) => client,
            None => {
                // Of another tier, which is gone, or of a daemon that never was: what is out is lost.
                let _ = head.pact.compare_exchange(2, 0, Ordering::AcqRel, Ordering::Relaxed);
                if head.out.load(Ordering::Relaxed) > 0 && new.take_pact(1_000_000) {
                    let lost = pagefold_agent::cold::poison_out(&new.uffd, &new.table);
                    new.table.free_pact();
                    eprintln!("pagefold: {} ({}): {lost} pages died with an earlier tier", new.name, new.pid);
                }
                let region = group.next_region.fetch_add(1, Ordering::Relaxed);
                (new.region, new.token) = (region, random());
                let client = Arc::new(new);
                head.token.store(client.token, Ordering::Relaxed);
                head.arena.store(group.id, Ordering::Relaxed);
                head.region.store(u64::from(region), Ordering::Release);
                // Before the first page goes out; known first, as above.
                lock(&group.clients).insert(region, client.clone());
                let kept = lock(&self.keeper).as_ref().map_or(Ok(()), |keeper| group.deposit(keeper, &client));
                if let Err(error) = kept.and_then(|()| threads::start_client(group, &client)) {
                    // It keeps its memory, and may ask again.
                    head.region.store(0, Ordering::Release);
                    group.remove(region);
                    return Err(Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)));
                }
                client
            }
        };
        client.tolerance_ppm.store(hello.b, Ordering::Relaxed);
        client.leased.store(hello.a & HELLO_AWAY != 0, Ordering::Relaxed);
        // A link that broke is given up by whoever holds it.
        let mut held = lock(&client.link);
        if !client.reconcile(&group.tier) {
            return Err(Errno(libc::ETIMEDOUT));
        }
        // While we hold the link: the answer to the greeting comes before any request of the pump's.
        let go = Packet { a: u64::from(head_epoch(&client)), ..Packet::new(Op::ColdGo) };
        sock::send(&link.socket, go.bytes(), &[])?;
        *lock(&client.socket) = Some(link.socket.clone());
        *held = Some(link);
        group.ring();
        Ok(())
    }

    fn clients_of(&self, whom: &Whom) -> Vec<(Arc<Group>, Arc<Client>)> {
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        let of = |group: &Arc<Group>| -> Vec<(Arc<Group>, Arc<Client>)> {
            let clients = lock(&group.clients);
            clients.values().filter(|client| whom.has(client.pid)).map(|one| (group.clone(), one.clone())).collect()
        };
        groups.iter().flat_map(of).collect()
    }

    /// Puts everything of these clients out; returns (clients, pages), `None` if there is no such client.
    pub(crate) fn park(&self, whom: &Whom) -> Option<(u64, u64)> {
        let clients = self.clients_of(whom);
        let mut buffers = out::Buffers::new();
        let mut pages = 0;
        for (group, client) in &clients {
            pages += pump::park(group, client, &mut buffers).unwrap_or(0);
        }
        // When all are out: before that the processors are wanted for parking.
        clients.iter().for_each(|(group, _)| group.densify());
        (!clients.is_empty()).then_some((clients.len() as u64, pages))
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

    /// Brings everything of these clients back, and lets those go that are merged live as well; as [`park`](Self::park).
    pub(crate) fn unpark(&self, whom: &Whom) -> Option<(u64, u64)> {
        let clients = self.clients_of(whom);
        let pages = clients.iter().map(|(group, client)| pump::unpark(group, client)).sum();
        (!clients.is_empty()).then_some((clients.len() as u64, pages))
    }

    /// True if anybody is a client.
    pub(crate) fn is_in_use(&self) -> bool {
        lock(&self.groups).values().any(|group| !lock(&group.clients).is_empty())
    }

    /// The daemon stops in good order: everything comes back, unless a successor is about to come.
    pub(crate) fn stop(&self) {
        if self.config.hand_over {
            return;
        }
        let _ = self.unpark(&Whom::All);
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        let out: Vec<u64> = groups
            .iter()
            .flat_map(|group| lock(&group.clients).values().map(|client| client.pages_out()).collect::<Vec<_>>())
            .filter(|pages| *pages > 0)
            .collect();
        let keeper = lock(&self.keeper);
        if let Some(keeper) = keeper.as_ref() {
            if out.is_empty() {
                keeper.names().unwrap_or_default().iter().for_each(|name| forget(keeper, name));
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
                "pagefold: {} pages of {} clients do not fit into their limits of memory and stay out: {then}",
                out.iter().sum::<u64>(),
                out.len()
            );
        }
    }

    pub(crate) fn status(&self) -> ColdStatus {
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        let mut status = ColdStatus { keeper: lock(&self.keeper).is_some(), ..ColdStatus::default() };
        for group in groups {
            let stats = group.tier.stats();
            status.domains.push(ColdDomain {
                name: group.key.1.clone(),
                uid: group.key.0,
                cold_bytes: stats.pages * pagefold_os::PAGE_SIZE as u64,
                held_bytes: stats.bytes_held + stats.bytes_metadata,
                bytes_max: stats.bytes_max,
                ratio: stats.ratio(),
                pages: stats.pages,
                contents: stats.contents,
                pages_filled: stats.pages_filled,
                disk_bytes: stats.disk_bytes,
                waste_bytes: stats.bytes_free_slots + stats.bytes_rounding,
                stores_refused: stats.stores_refused,
                loads_failed: stats.loads_failed,
                load_us_log2: stats.load_us.to_vec(),
            });
            for client in lock(&group.clients).values() {
                let counters = &client.counters;
                let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
                status.clients.push(ColdClient {
                    pid: client.pid,
                    uid: client.uid,
                    name: client.name.clone(),
                    domain: group.key.1.clone(),
                    pages_out: client.pages_out(),
                    pages_out_ever: get(&counters.pages_out_ever),
                    refaults: get(&counters.refaults),
                    pages_back: get(&counters.pages_back),
                    zero_faults: get(&counters.zero_faults),
                    pages_lost: client.table.head().lost.load(Ordering::Relaxed),
                    fault_ns: get(&counters.fault_ns),
                    fault_us_log2: counters.fault_us.iter().map(get).collect(),
                    parked: client.parked.load(Ordering::Relaxed),
                    connected: lock(&client.socket).is_some(),
                    idle_s: client
                        .policy
                        .try_lock()
                        .ok()
                        .and_then(|policy| policy.pace)
                        .map_or(0.0, |pace| pace.idle_s),
                    agent_cpu_ns: get(&counters.agent_cpu_ns),
                });
            }
        }
        status
    }
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

/// Leaves with the service manager too what the keeper has; without one nothing is lost but that.
fn leave(name: &str, fds: &[i32]) {
    if let Err(error) = fd_store::leave(name, fds) {
        eprintln!("pagefold: the service manager does not take {name}: {error}");
    }
}

/// Nobody needs what is held under the name: not the keeper, not the service manager.
fn forget(keeper: &Keeper, name: &str) {
    let _ = keeper.forget(name);
    let _ = fd_store::remove(name, DESCRIPTORS_MAX);
}

fn head_epoch(client: &Client) -> u32 {
    client.table.head().epoch.load(Ordering::Relaxed)
}

fn same_file(a: &Fd, b: &Fd) -> bool {
    let inode = |fd: &Fd| pagefold_os::memfd::len_and_inode(fd.raw()).ok().map(|(_, inode)| inode);
    inode(a).is_some() && inode(a) == inode(b)
}

impl Group {
    /// Has the cleaner make dense at once what is out.
    fn densify(&self) {
        self.parked.fetch_add(1, Ordering::Release);
        wait::wake(&self.parked);
    }

    /// Has the pump look at once.
    fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release);
        wait::wake(&self.bell);
    }

    fn deposit_arena(&self, keeper: &Keeper) {
        let (arena, file) = self.tier.fds();
        let fds: Vec<i32> = std::iter::once(arena).chain(file).collect();
        let name = format!("{ARENA}:{:x}:{}:{}", self.id, self.key.0, self.key.1);
        if let Err(error) = keeper.put(&name, &fds) {
            eprintln!("pagefold: the keeper does not take the tier of {}: {error}", self.key.1);
        }
        leave(&name, &fds);
    }

    fn name_of(&self, client: &Client) -> String {
        format!("{CLIENT}:{:x}:{}:{:x}:{}:{}", self.id, client.region, client.token, client.pid, client.uid)
    }

    /// Leaves a client with the keeper.
    ///
    /// # Errors
    /// The keeper holds as much as it can, and a new client's pages would die with us. One that is gone is no error: it is
    /// replaced with the next greeting.
    fn deposit(&self, keeper: &Keeper, client: &Client) -> io::Result<()> {
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

    /// A client has ended.
    fn remove(&self, region: u32) {
        let Some(client) = lock(&self.clients).remove(&region) else { return };
        client.gone.store(true, Ordering::Release);
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            forget(keeper, &self.name_of(&client));
        }
        // Whoever talks to its agent finds the connection ended; after that nothing is stored for it any more.
        let _held = lock(&client.link);
        self.tier.remove_region(region);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `act` beside a keeper at `path` that answers each question as told: a status and names. Returns what `act` did
    /// and the questions.
    fn with_keeper<T>(
        path: &std::path::Path,
        answer: impl Fn(&[u8], usize) -> Vec<u8> + Sync,
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
                        sock::send(peer, &answer(&question[..len], asked.len()), &[]).unwrap();
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

    /// What came of it, and what the keeper was asked.
    type Adopted = (io::Result<()>, Vec<Vec<u8>>);

    /// Starts a daemon's cold tier at such a keeper.
    fn adopt_at(patience: Duration, answer: impl Fn(&[u8], usize) -> Vec<u8> + Sync) -> Adopted {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { keeper: Some(vec!["/bin/false".into()]), ..Config::default() };
        let mut cold = Cold::new(config, &dir.path().join("s"));
        cold.patience = patience;
        with_keeper(&cold.keeper_path, answer, || cold.adopt())
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

    /// Greets as one that is this process.
    fn attach(cold: &Cold, group: &Arc<Group>) -> (Result<(), Errno>, Handed) {
        let bare = || Uffd::bare(uffd::open_device().ok().as_ref()).unwrap();
        let (uffd, (handed, map)) = (bare(), client::tests::handed(bare()));
        let copy =
            Handed { uffd, table: handed.table.duplicate().unwrap(), pagemap: handed.pagemap.duplicate().unwrap() };
        drop(map);
        let mut pair = [0; 2];
        // SAFETY: the kernel writes two numbers.
        let made =
            unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, pair.as_mut_ptr()) };
        assert_eq!(made, 0);
        // SAFETY: both were just made.
        let [ours, _theirs] = pair.map(|fd| unsafe { Fd::from_raw(fd) });
        let link = ColdLink::new(Arc::new(ours)).unwrap();
        let who = Identity { region: 0, token: 0, pid: std::process::id() as i32, uid: 0 };
        (cold.attach(group, who, copy, link, true, &Packet::new(Op::Hello)), handed)
    }

    fn table_of(handed: &Handed) -> u64 {
        let mut word = [0; 8];
        // The region's number is the second word of the head.
        handed.table.read_at(&mut word, 8).unwrap();
        u64::from_ne_bytes(word)
    }

    #[test]
    fn who_cannot_be_kept_is_refused_and_one_process_is_few_clients() {
        if client::tests::own(uffd::FEATURE_EVENT_REMOVE, 1).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let cold = Cold::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        let (full, handed) = with_keeper(
            &cold.keeper_path,
            |_, _| vec![libc::ENOSPC as u8],
            || {
                *lock(&cold.keeper) = Some(Keeper::connect(&cold.keeper_path).unwrap());
                let attached = attach(&cold, &group);
                *lock(&cold.keeper) = None;
                attached
            },
        )
        .0;
        assert_eq!((full, table_of(&handed)), (Err(Errno(libc::ENOSPC)), 0));
        assert!(lock(&group.clients).is_empty());
        let greeted: Vec<_> = (0..=CLIENTS_PER_PROCESS).map(|_| attach(&cold, &group)).collect();
        let (last, first) = greeted.split_last().unwrap();
        assert!(first.iter().all(|(attached, handed)| attached.is_ok() && table_of(handed) > 0));
        assert_eq!((&last.0, table_of(&last.1)), (&Err(Errno(libc::EUSERS)), 0));
        let regions: Vec<u32> = lock(&group.clients).keys().copied().collect();
        regions.into_iter().for_each(|region| group.remove(region));
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
        assert!(asked.contains(&b"Dclient:7:1:1:1:0".to_vec()), "{asked:?}");
        assert_eq!(asked.iter().filter(|question| question[0] == b'S').count(), 1);
    }
}
